"""verl's SFT trainer on CPUs as a process: plain, or with our entry in front and nobody who serves it."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.processes import python_path
from verl_slurm.config.load import flattened
from verl_slurm.verl.composing import words_of
from verl_slurm.verl.overrides import user_settings

VERLS, OURS = "verl.trainer.sft_trainer", "verl_slurm.loops.verl.verl_sft"
_STEP = re.compile(r"step:(\d+) - ")  # behind a progress bar, too


@dataclass(frozen=True)
class Ended:
    """What came of a start.

    Attributes:
        steps: those it said it did, in order.
    """

    exit_code: int
    steps: tuple[int, ...]
    output: str


def cpu_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, and verl on CPUs, from this checkout, without a network."""
    return {
        **environ,
        **python_path(environ=environ),
        "VERL_USE_EXTERNAL_MODULES": "tests.verl.cpu_platform",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def run_sft(
    module: str, section: Mapping[str, object], words: Sequence[str], *, cwd: Path, ranks: int = 2
) -> Ended:
    """Start `ranks` of them and wait for their end."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    argv = [sys.executable, "-P", "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    argv += [f"--master-port={port}", "-m", module]
    argv += words_of(user_settings(flattened(dict(section))).values())
    argv += [f"trainer.n_gpus_per_node={ranks}", *words]
    done = subprocess.run(
        argv,
        cwd=cwd,
        env=cpu_environ(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    steps = tuple(int(step) for step in _STEP.findall(done.stdout))
    return Ended(done.returncode, steps, done.stdout)
