"""Run by test_shapes under torchrun: `shapes_worker.py ROOT PLAN`, all runs of a plan in one set of ranks.

PLAN is a JSON list of starts: `run` (a directory of ROOT), `shape` [dp, tp, pp], `stop` (the safe point, counted from
this start, at which rank 1 asks to stop; null: to the end), `train` (changes of TrainConfig), `distributed` (further
fields of it). A run that exists is resumed from its newest checkpoint, in whatever shape.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.checkpoint.recover import choose_resume
from verl_slurm.config import load
from verl_slurm.config.layout import keep_step
from verl_slurm.config.schema import (
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from verl_slurm.dcp.collective import Collective
from verl_slurm.fence import take_epoch
from verl_slurm.files import private_dir, write_file
from verl_slurm.paths import RunPaths
from verl_slurm.trainer.place import Place, process_group
from verl_slurm.trainer.setup import build_loop
from verl_slurm.wire.client import NoDaemon
from verl_slurm.wire.control_page import Request

PROMPTS = 16
TRAIN = TrainConfig(
    steps=2,
    batch_size_per_device=PROMPTS,
    mini_batch_size_per_device=PROMPTS // 2,
    micro_batch_size_per_device=2,
    ppo_epochs=1,
    lr_schedule="cosine",
    warmup_steps=1,
    weight_decay=0.01,
    entropy_coef=0.01,
)


class Line(NoDaemon):
    """Asks for a stop at one safe point."""

    def __init__(self, stop: int | None) -> None:
        self._stop, self._polls = stop, 0

    def request(self) -> Request | None:
        number, self._polls = self._polls, self._polls + 1
        return Request(1, True, 0) if self._stop is not None and number >= self._stop else None


def config_of(root: Path, start: dict[str, Any]) -> RunConfig:
    """PROMPTS prompts a step over all data-parallel ranks."""
    dp, tp, pp = start["shape"]
    train = TRAIN
    for name in ("batch_size_per_device", "mini_batch_size_per_device"):
        train = msgspec.structs.replace(train, **{name: getattr(TRAIN, name) // dp})
    shape = DistributedConfig(
        dp_size=dp, tp_size=tp, pp_size=pp, nodes=1, device="cpu", **start.get("distributed", {})
    )
    return RunConfig(
        name=start["run"],
        run_dir=str(root / start["run"]),
        model=ModelConfig(path=str(root / "model")),
        data=DataConfig(root=str(root / "sums" / "train")),
        rollout=RolloutConfig(micro_batch_size_per_device=4, max_new_tokens=4),
        train=msgspec.structs.replace(train, **start.get("train", {})),
        distributed=shape,
        checkpoint=CheckpointConfig(every_steps=1, keep_last=9),
    )


def prepare(paths: RunPaths, config: RunConfig) -> bytes:
    """Rank 0: what submit and the daemon do before a start."""
    private_dir(paths.root)
    if paths.run_yaml.exists():
        config = keep_step(load.load_resolved(paths.run_yaml), config)
    write_file(paths.run_yaml, load.dump(config))
    epoch = take_epoch(paths, job_id="test", restart=0).epoch
    return json.dumps([epoch, choose_resume(paths, "auto").name or ""]).encode()


def start_one(root: Path, start: dict[str, Any], ranks: Collective, device: Any) -> None:
    config = config_of(root, start)
    paths = RunPaths(config.run_dir)
    epoch, resume = json.loads(ranks.on_first("preparing", lambda: prepare(paths, config)))
    line = Line(start.get("stop") if ranks.rank == ranks.world_size - 1 else None)
    loop = build_loop(
        load.load_resolved(paths.run_yaml),
        paths,
        epoch=epoch,
        resume=resume,
        device=device,
        ranks=ranks,
        line=line,
    )
    loop.run()


def main(root: Path, plan: list[dict[str, Any]]) -> None:
    os.umask(0o077)
    with process_group(config_of(root, plan[0]), Place.from_environ(os.environ)) as (device, ranks):
        for start in plan:
            start_one(root, start, ranks, device)


def run_and_leave() -> None:
    code = 1
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
        code = 0
    except Exception:  # noqa: BLE001 - the root of this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # trainer.__main__ says why


if __name__ == "__main__":
    run_and_leave()
