"""A whole run on this machine without Slurm, as a test holds it: small, and disturbed at will."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.harness import ROOT, SMALL
from tests.made_once import made_once
from verl_slurm.base.paths import RunPaths
from verl_slurm.submit.submission import carry_out, plan_submission

QUICK = (*SMALL, "train.steps=2", "train.batch_size_per_device=64")


def prepared(root: Path, *overrides: str) -> RunPaths:
    """A run directory, nothing started."""
    plan = plan_submission(
        ROOT / "configs/quickstart.yaml", [*QUICK, *overrides, f"run_dir={root}"], cluster="local"
    )
    carry_out(plan, prepare_only=True)
    return RunPaths(root)


def lead(paths: RunPaths, *options: str, environ: Mapping[str, str] = {}) -> "subprocess.Popen[str]":
    """The lead of a run, as a process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | dict(environ)
    return subprocess.Popen(
        [sys.executable, "-m", "verl_slurm_daemon", "lead", "--run", str(paths.root), *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until(process: "subprocess.Popen[str]", word: str) -> str:
    """Read the lead's log up to the line with `word` in it."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if word in line:
            return line
    raise AssertionError(f"no {word!r} in:\n{''.join(seen)}")


def finish(process: "subprocess.Popen[str]") -> int:
    process.communicate(timeout=300)  # four ranks that import torch on two busy cores take minutes
    return process.returncode


def undisturbed(factory: pytest.TempPathFactory) -> RunPaths:
    """What `prepared` comes to when nobody disturbs it; one for all tests of a session, to be compared with."""

    def make(place: Path) -> None:
        assert finish(lead(prepared(place / "run"))) == 0

    return RunPaths(made_once(factory, "straight", make) / "run")
