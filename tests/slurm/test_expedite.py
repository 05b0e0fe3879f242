"""`--requeue=expedite` is asked for where sbatch knows it and the site allows it, and only there."""

import asyncio
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import run_config
from verl_slurm.config.schema import RunConfig
from verl_slurm.slurm.batch import sbatch_options, sbatch_parameters
from verl_slurm.slurm.requeue_rules import offered
from verl_slurm.slurm.slurm_client import SlurmClient
from verl_slurm.submit.executor import render_script
from verl_slurm.submit.submission_plan import SubmissionPlan

OLD = "              [--requeue] [--no-requeue] [--ntasks-per-node=n] [--propagate]\n"
NEW = "              [--requeue[=expedite]] [--no-requeue] [--ntasks-per-node=n]\n"
ALLOWED = "SlurmctldParameters     = idle_on_node_suspend,enable_expedited_requeue\n"
Programs = Callable[..., SlurmClient]


@pytest.fixture
def slurm(tmp_path: Path) -> Programs:
    """A client of a Slurm whose sbatch and scontrol print that."""

    def make(helps: str, conf: str) -> SlurmClient:
        for name, text in (("sbatch", helps), ("scontrol", conf)):
            (tmp_path / f"{name}.out").write_text(text)
            program = tmp_path / name
            program.write_text(
                f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/asked\nexec cat {tmp_path}/{name}.out\n'
            )
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return SlurmClient({"PATH": f"{tmp_path}:{os.environ['PATH']}"})

    return make


@pytest.mark.parametrize(
    ("helps", "conf", "answer", "asked"),
    [
        (NEW, ALLOWED, True, ["sbatch --help", "scontrol show config"]),
        (NEW, "SlurmctldParameters     = (null)\n", False, ["sbatch --help", "scontrol show config"]),
        (
            NEW,
            "SlurmctldParameters = not_enable_expedited_requeue\n",
            False,
            ["sbatch --help", "scontrol show config"],
        ),
        (NEW, "", False, ["sbatch --help", "scontrol show config"]),
        # an old sbatch before a new slurmctld would end with an error of its own
        (OLD, ALLOWED, False, ["sbatch --help"]),
        ("", ALLOWED, False, ["sbatch --help"]),
    ],
)
def test_both_sbatch_and_the_site_have_to_know_it(
    slurm: Programs, tmp_path: Path, helps: str, conf: str, answer: bool, asked: list[str]
) -> None:
    assert asyncio.run(slurm(helps, conf).offers_expedite()) is answer
    assert (tmp_path / "asked").read_text().splitlines() == asked


def test_without_slurm_nothing_is_offered_and_the_word_alone_is_no_offer(tmp_path: Path) -> None:
    assert asyncio.run(SlurmClient({"PATH": str(tmp_path)}).offers_expedite()) is False
    assert not offered("--requeue may be expedited", {"SlurmctldParameters": "enable_expedited_requeue"})
    assert offered(NEW, {"SlurmctldParameters": "a, enable_expedited_requeue"})


def test_it_is_one_option_and_a_plain_requeue_without_it() -> None:
    config = RunConfig()
    additional = sbatch_parameters(config, expedite=True)["additional_parameters"]
    assert isinstance(additional, dict)
    assert additional["requeue"] == "expedite"
    assert "--requeue" in sbatch_options(config)


@pytest.mark.parametrize(
    ("helps", "wish", "line"),
    [
        (NEW, "auto", "#SBATCH --requeue=expedite"),
        (NEW, "never", "#SBATCH --requeue"),
        (OLD, "auto", "#SBATCH --requeue"),
    ],
)
def test_the_script_of_a_submission_asks_for_what_is_offered(
    slurm: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helps: str, wish: Any, line: str
) -> None:
    slurm(helps, ALLOWED)
    shutil.copy(tmp_path / "sbatch", tmp_path / "srun")  # submitit wants to see one
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    config = run_config(expedite=wish)
    plan = SubmissionPlan(config=config, cluster="slurm", new_run=True)
    assert line in render_script(plan).splitlines()
