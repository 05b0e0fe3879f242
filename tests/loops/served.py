"""configs/pytorch_loop.yaml for tests: slow enough to be struck, and the same by hand, undisturbed."""

import os
import subprocess
import sys
from pathlib import Path

from tests.harness import ROOT
from tests.processes import free_port

PROGRAM = ROOT / "configs/pytorch_loop.py"
CONFIG = ROOT / "configs/pytorch_loop.yaml"
STEPS = 40


def overrides(pause_s: float) -> tuple[str, ...]:
    command = f'trainer.command=[{PROGRAM}, --steps, "{STEPS}", --pause, "{pause_s}"]'
    return (
        command,
        "code.tree=null",
        "daemon.requeue_delay_s=2",
        "daemon.backoff_s=0.2",
        "slurm.time_limit_min=20",
    )


def by_hand(run_dir: Path) -> Path:
    """The same loop without a daemon, two ranks; returns `run_dir`."""
    port = str(free_port())
    environ = dict(os.environ) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    environ["OMP_NUM_THREADS"] = "1"
    argv = [sys.executable, str(PROGRAM), "--steps", str(STEPS), "--run-dir", str(run_dir)]
    ranks = [
        subprocess.Popen(argv, env=environ | {"RANK": str(rank)}, stdout=subprocess.DEVNULL)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.wait(timeout=240)
    assert (run_dir / "checkpoints" / f"step_{STEPS:06d}").exists()
    return run_dir
