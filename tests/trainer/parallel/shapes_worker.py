"""Run by test_shapes: `shapes_worker.py MODEL DATA ROOT PLAN`, starts of runs, each in ranks of its own.

PLAN is a JSON list of starts, done in order: `run` (a directory of ROOT), `shape` [dp, tp, pp], `stop` (the safe point,
counted from this start, at which the last rank asks to stop; none: to the end), `kill` (the one at which it is killed,
and the others with it), `config` (changes, as on the command line), `ask` (another reward, asked for before the start).
A run that exists is resumed from its newest checkpoint, in whatever shape, and what was loaded is held to that
checkpoint, bit for bit.

Ranks are forks of one process that has imported everything: an import of torch and transformers takes longer than
all else here.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers.models.qwen2.modeling_qwen2  # noqa: F401 - before the ranks are forked

from tests.builders import run_config, train_config
from tests.fakes.daemon import AtSafePoint
from tests.processes import free_port
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.config import load
from verl_slurm.config.elastic import keep_step
from verl_slurm.config.schema import RunConfig
from verl_slurm.save.ranks.boxes import local_part
from verl_slurm.save.ranks.loader import read_whole
from verl_slurm.trainer.loop import Loop
from verl_slurm.trainer.place import Place, process_group
from verl_slurm.trainer.saving import live_tensors
from verl_slurm.trainer.setup import build_loop
from verl_slurm.wire.reward_plan import ask_for_reward

PROMPTS = 16
TRAIN = train_config(
    # What the second one samples depends on what the first one has trained.
    steps=2,
    # Two mini-batches: which rows are in which must not depend on the number of data-parallel ranks.
    sizes=(PROMPTS, PROMPTS // 2, 4),
    ppo_epochs=2,
    lr_schedule="cosine",
    warmup_steps=1,
    weight_decay=0.01,
    entropy_coef=0.01,
)


def config_of(model: Path, data: Path, root: Path, start: dict[str, Any]) -> RunConfig:
    """PROMPTS prompts a step over all data-parallel ranks, in two mini-batches."""
    dp, tp, pp = start["shape"]
    train = TRAIN
    for name in ("batch_size_per_device", "mini_batch_size_per_device"):
        train = msgspec.structs.replace(train, **{name: getattr(TRAIN, name) // dp})
    # A pipeline wants as many micro-batches in a mini-batch as it has stages.
    micro = min(TRAIN.micro_batch_size_per_device, train.mini_batch_size_per_device // pp)
    train = msgspec.structs.replace(train, micro_batch_size_per_device=micro)
    config = run_config(
        name=start["run"],
        run_dir=root / start["run"],
        path=model,
        root=data,
        sampled_at_once=4,
        max_new_tokens=4,
        train=train,
        ranks=dp,
        tp_size=tp,
        pp_size=pp,
        every_steps=1,
        keep_last=9,
    )
    for key, value in start.get("config", {}).items():
        section, _, name = key.partition(".")
        value = str(root / value) if key == "model.path" else value
        value = value.format(root=root) if key == "model.reward" else value
        changed = msgspec.structs.replace(getattr(config, section), **{name: value})
        config = msgspec.structs.replace(config, **{section: changed})
    return config


def prepare(paths: RunPaths, config: RunConfig, ask: str | None) -> tuple[int, str]:
    """Rank 0: what submit, an operator and the daemon do before a start."""
    private_dir(paths.root)
    if ask is not None:
        ask_for_reward(paths, ask.format(root=paths.root.parent), 2)
    if paths.run_yaml.exists():
        config = keep_step(load.load_resolved(paths.run_yaml), config)
    write_file(paths.run_yaml, load.dump(config))
    attempt = take_attempt(paths, job_id="test", restart=0).attempt
    return attempt, choose_resume(paths, "auto").name or ""


def require_loaded(loop: Loop, checkpoint: Path) -> None:
    """Every bit of every tensor that this rank holds is the one that was saved."""
    learner: Any = loop._learner
    for domain, tensors in live_tensors(learner._models, learner._optimizers).items():
        saved = read_whole(checkpoint, domain)
        for name, tensor in tensors.items():
            local, box = local_part(tensor)
            part = saved[name][tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))]
            assert torch.equal(local, part), f"{domain}/{name}"


def line_of(stop: int | None, kill: int | None) -> AtSafePoint:
    """Asks for a stop at one safe point, or kills the rank there."""
    if kill is None:
        return AtSafePoint(stop)
    return AtSafePoint(kill, act=lambda: os.kill(os.getpid(), signal.SIGKILL))


def run_rank(config: RunConfig, stop: int | None, kill: int | None, ask: str | None) -> None:
    with process_group(config, Place.from_environ(os.environ)) as (device, ranks):
        paths = RunPaths(config.run_dir)
        attempt, resume = ranks.on_first("preparing", lambda: prepare(paths, config, ask), tuple[int, str])
        # Every rank has a daemon or none has: without one, rank 0 verifies the checkpoint while the others wait for it.
        line = line_of(stop, kill) if ranks.rank == ranks.world_size - 1 else AtSafePoint()
        config = load.load_resolved(paths.run_yaml)
        loop = build_loop(
            config, paths, attempt=attempt, resume=resume, device=device, ranks=ranks, line=line
        )
        if resume:
            ranks.together("comparing", lambda: require_loaded(loop, paths.checkpoints / resume))
        loop.run()


def fork_rank(rank: int, port: int, config: RunConfig, start: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        world = config.distributed.world_size
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update(
            {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
        )
        run_rank(config, start.get("stop"), start.get("kill"), start.get("ask"))
        code = 0
    except BaseException:  # noqa: BLE001 - the root of this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # trainer.__main__ says why


def wait_for(pids: list[int]) -> list[int]:
    """Exit codes in the order in which ranks end; when one ends badly, the others are ended as torchrun would."""
    codes = []
    for _ in pids:
        pid, status = os.wait()
        codes.append(os.waitstatus_to_exitcode(status))
        pids = [other for other in pids if other != pid]
        if codes[-1]:
            for other in pids:
                os.kill(other, signal.SIGKILL)
    return codes


def main(model: Path, data: Path, root: Path, plan: list[dict[str, Any]]) -> int:
    os.umask(0o077)
    for start in plan:
        config, port = config_of(model, data, root, start), free_port()
        pids = [fork_rank(rank, port, config, start) for rank in range(config.distributed.world_size)]
        codes = wait_for(pids)
        # One whose peer is killed may find out before it is ended, and fail by itself.
        as_planned = all(codes) and -signal.SIGKILL in codes if "kill" in start else not any(codes)
        if not as_planned:
            sys.stderr.write(f"{start}: {codes}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*(Path(word) for word in sys.argv[1:4]), json.loads(sys.argv[4])))
