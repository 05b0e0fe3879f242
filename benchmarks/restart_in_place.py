"""How long a run stands still when one rank is killed: verl-slurm's restart in place beside torchrun's, in one run.

    python benchmarks/restart_in_place.py [--rounds 5] [--json FILE]

Both train the same model (0.5 GB of float32) on two ranks with FSDP2 and AdamW, and have a checkpoint of it with its
optimizer (1.5 GB). One rank is killed with SIGKILL; measured is the time until the ranks have loaded the newest
checkpoint and stand at their first safe point.

* torchrun: `torchrun --max-restarts`, whose workers import, build, shard and load by `torch.distributed.checkpoint`;
* cold: verl-slurm without ranks that stand by (`daemon.standby_after_s: null`);
* standby: with them;
* memory: likewise, and with second copies in memory (`checkpoint.local_dir` in /dev/shm), which a restart reads.

Also measured: the memory of a rank that stands by (PSS).
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil

from benchmarks.gpu.runs import build_wide_model
from benchmarks.save.machine import environment
from tests.processes import python_path
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import read_events
from verl_slurm.submit.submission import carry_out, plan_submission
from verl_slurm.trainer.quickstart.tiny_model import build_model

T = TypeVar("T")
_ROOT = Path(__file__).parents[1]
_PATIENCE_S = 300.0
_PEER = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
model_dir, root = Path(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
# torchrun keeps one store for all its restarts; gloo would find the addresses of the one before in it.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("restart" + os.environ["TORCHELASTIC_RESTART_COUNT"], store)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
ids = torch.randint(0, 200, (2, 16))
def step():
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
saved = root / "checkpoint"
if saved.exists():
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=saved)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
else:
    step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=root / "saving")
    if dist.get_rank() == 0:
        os.rename(root / "saving", saved)
dist.barrier()
with open(root / "safe_points", "a") as file:
    file.write(f"{dist.get_rank()} {os.getpid()} {time.time()}\\n")
while True:
    step()
"""


def _wait(found: Callable[[], list[T]], count: int = 1) -> list[T]:
    """Returns what is found once there is so much of it. Polls: the peer has no events."""
    deadline = time.monotonic() + _PATIENCE_S
    while len(value := found()) < count:
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)
    return value


def torchrun(model: Path, root: Path, rounds: int) -> list[float]:
    """Seconds from each kill to the later rank's safe point."""
    private_dir(root)
    (root / "peer.py").write_text(_PEER)
    points = root / "safe_points"
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv += [
        f"--max-restarts={rounds + 1}",
        "--monitor-interval=0.1",
        str(root / "peer.py"),
        str(model),
        str(root),
    ]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    took = []

    def lines() -> list[str]:
        return points.read_text().splitlines() if points.exists() else []

    with open(root / "log", "wb") as log, subprocess.Popen(argv, env=environ, stdout=log, stderr=log) as peer:
        try:
            for number in range(rounds):
                seen = _wait(lines, 2 * (number + 1))
                time.sleep(2.0)  # it trains
                killed = time.time()
                os.kill(int(seen[-1].split()[1]), signal.SIGKILL)
                after = _wait(lines, 2 * (number + 2))
                took.append(max(float(line.split()[2]) for line in after[-2:]) - killed)
        finally:
            children = psutil.Process(peer.pid).children(recursive=True)
            for process in [psutil.Process(peer.pid), *children]:
                process.kill()
    return took


def ours(
    model: Path, root: Path, rounds: int, *, standby: bool, more: Sequence[str] = ()
) -> tuple[list[float], list[int]]:
    """Seconds from each kill to the first safe point; and bytes (PSS) of each rank that stood by.

    Args:
        more: settings.
    """
    settings = [
        f"run_dir={root}",
        f"model.path={model}",
        "train.algorithm=grpo",
        "train.kl_in=loss",
        "train.steps=1000",
        "train.batch_size_per_device=2",
        "train.mini_batch_size_per_device=2",
        "train.micro_batch_size_per_device=2",
        "train.ppo_epochs=1",
        "rollout.micro_batch_size_per_device=2",
        "rollout.samples_per_prompt=2",
        "rollout.max_new_tokens=2",
        "checkpoint.every_steps=4",
        "checkpoint.keep_last=1",
        "distributed.nodes=2",
        "distributed.dp_size=2",
        "distributed.threads_per_rank=1",
        f"daemon.standby_after_s={'0' if standby else 'null'}",
        *more,
    ]
    carry_out(
        plan_submission(_ROOT / "configs/quickstart.yaml", settings, cluster="local"), prepare_only=True
    )
    paths = RunPaths(root)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | python_path()
    argv = [sys.executable, "-m", "verl_slurm_daemon", "lead", "--run", str(root)]
    took, memory = [], []
    with open(root / "lead.log", "wb") as log:
        lead = subprocess.Popen(argv, env=environ, stdout=log, stderr=log)

    def seconds(time_of: str) -> float:
        return datetime.fromisoformat(time_of).timestamp()

    def training() -> list[float]:
        return [seconds(event.time) for event in read_events(paths) if isinstance(event, ev.Training)]

    def verified() -> list[float]:
        """Checkpoints of this restart, read back."""
        begun = training()[-1]
        return [
            at for e in read_events(paths) if isinstance(e, ev.Verified) and (at := seconds(e.time)) > begun
        ]

    try:
        for number in range(rounds):
            _wait(training, number + 1)
            _wait(verified)
            if standby:
                memory += [one.memory_full_info().pss for one in _wait(lambda: _asleep(lead.pid), 2)]
            ranks = [one for one in _ranks(lead.pid) if not _waits(one)]
            killed = time.time()
            ranks[-1].kill()
            took.append(_wait(training, number + 2)[-1] - killed)
    finally:
        lead.terminate()
        lead.wait()
    return took, memory


def _ranks(lead: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(lead).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if words[3:4] == ["verl_slurm.loops.rendezvous"]:
            found.append(process)
    return found


def _waits(process: psutil.Process) -> bool:
    """Whether it waits for orders: its standard input is a pipe."""
    return os.readlink(f"/proc/{process.pid}/fd/0").startswith("pipe:")


def _asleep(lead: int) -> list[psutil.Process]:
    """The two that stand by, once their imports are done: they use no more CPU."""
    waiting = [one for one in _ranks(lead) if _waits(one)]
    before = [one.cpu_times().user for one in waiting]
    time.sleep(1.0)
    done = len(waiting) == 2 and min(before) > 1.0 and before == [one.cpu_times().user for one in waiting]
    return waiting if done else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = environment([options.directory])
    with tempfile.TemporaryDirectory(prefix="vs-restart-", dir=options.directory) as name:
        root = private_dir(Path(name))
        tiny = build_model(private_dir(root / "models") / "tiny", head_dim=64)
        parameters = build_wide_model(tiny, root / "models/wide", width=options.width, layers=options.layers)
        model = root / "models/wide"
        print(f"{4 * parameters / 1e9:.2f} GB of weights", flush=True)
        peer = torchrun(model, root / "peer", options.rounds)
        print("torchrun", [round(one, 2) for one in peer], flush=True)
        cold, _ = ours(model, root / "cold", options.rounds, standby=False)
        print("cold    ", [round(one, 2) for one in cold], flush=True)
        warm, memory = ours(model, root / "warm", options.rounds, standby=True)
        print("standby ", [round(one, 2) for one in warm], flush=True)
        with tempfile.TemporaryDirectory(prefix="vs-restart-", dir="/dev/shm") as copies:
            near = [f"checkpoint.local_dir={copies}"]
            nearest, _ = ours(model, root / "memory", options.rounds, standby=True, more=near)
        print("memory  ", [round(one, 2) for one in nearest], flush=True)
    medians = {
        name: statistics.median(took)
        for name, took in (("torchrun", peer), ("cold", cold), ("standby", warm), ("memory", nearest))
    }
    print({name: round(value, 2) for name, value in medians.items()})
    for name in ("standby", "memory"):
        print(f"{name} / torchrun: {medians[name] / medians['torchrun']:.2f}")
    print(f"memory of a rank that stands by: {statistics.median(memory) / 1e6:.0f} MB (PSS)")
    if options.json:
        found = {
            "parameters": parameters,
            "torchrun_s": peer,
            "cold_s": cold,
            "standby_s": warm,
            "memory_s": nearest,
            "pss": memory,
        }
        found |= {"cpu": machine.cpu, "cores": machine.cores, "load": list(os.getloadavg())}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
