"""What sbatch would refuse is refused by the dry run, and the line names the key."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import run_config
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.submit.checks.slurm_answers import refusal, refused_keys

Cli = Callable[..., Any]
pytestmark = pytest.mark.scenario("USE09")


@pytest.mark.slurm
@pytest.mark.parametrize("dry", [("--dry-run",), ()], ids=["dry run", "submit"])
@pytest.mark.parametrize(
    ("word", "where"),
    [
        ("slurm.gpus_per_node=8", "slurm.gpus_per_node=8"),
        ("slurm.extra={constraint: nosuch}", "slurm.extra.constraint=nosuch"),
        ("slurm.extra={reservation: nosuch}", "slurm.extra.reservation=nosuch"),
    ],
)
def test_what_sbatch_refuses_is_refused_before_queueing_and_names_the_key(
    workplace: Path,
    cli: Cli,
    cluster: DevCluster,
    monkeypatch: pytest.MonkeyPatch,
    dry: tuple[str, ...],
    word: str,
    where: str,
) -> None:
    for name, value in cluster.env().items():
        monkeypatch.setenv(name, value)
    result = cli("submit", "config.yaml", word, "--cluster", "slurm", *dry)
    assert result.code == ExitCode.SLURM_REFUSED, result.err
    assert where in result.error.partition(" (found ")[0]
    assert not (workplace / "runs").exists()


@pytest.mark.slurm
def test_a_dry_run_is_a_list_with_a_line_for_each_thing_checked(
    workplace: Path, cli: Cli, cluster: DevCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.env().items():
        monkeypatch.setenv(name, value)
    result = cli("submit", "config.yaml", "--cluster", "slurm", "--dry-run")
    assert result.code == 0, result.err
    good = [line for line in result.err.splitlines() if line.startswith("verl-slurm:   good  ")]
    assert len(good) >= 6
    assert any("sbatch --test-only: " in line for line in good)
    assert all(len(line) < 200 for line in good)
    assert result.out.startswith("#!"), "the script alone is on standard output"


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("Invalid generic resource (gres) specification", "slurm.gpus_per_node"),
        ("Invalid Trackable RESource (TRES) specification", "slurm.gpus_per_node"),
        ("invalid partition specified: gpu", "slurm.partition"),
        ("Invalid account or account/partition combination specified", "slurm.account"),
        ("Invalid qos specification", "slurm.qos"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "slurm.time_limit_min"),
        ("Memory specification can not be satisfied", "slurm.mem_mb_per_node"),
        ("Invalid feature specification", "slurm.extra.constraint"),
        ("Requested reservation is invalid", "slurm.extra.reservation"),
        ("More processors requested than permitted", "slurm.cpus_per_node"),
        ("Node count specification invalid", "distributed.nodes"),
        ("Requested node configuration is not available", "distributed.nodes"),
        ("Unspecified error", None),
        ("every job must name a project: --account=PROJECT; Unspecified error", "slurm.account"),
        ("--mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.", "slurm.mem_mb_per_node"),
        ("Invalid node name specified", "slurm.extra.nodelist"),
        ("--ntasks-per-node is mutually exclusive with --ntasks-per-gpu", "slurm.extra.ntasks-per-gpu"),
        ("--gpus-per-socket is not allowed; Invalid generic resource", "slurm.extra.gpus-per-socket"),
        ("do not use CPUs here; Invalid qos specification", "slurm.qos"),
    ],
)
def test_each_refusal_of_slurm_is_translated_to_its_key(said: str, key: str | None) -> None:
    assert (refused_keys(said) or (None,))[0] == key


def test_an_option_of_extra_that_is_refused_is_named_by_its_key() -> None:
    config = run_config(gpus_per_node=0, extra={"gres": "gpu:v100:1"})
    said = refusal(config, "Invalid generic resource (gres) specification")
    assert said.where == "slurm.extra.gres=gpu:v100:1"
    assert "slurm.gpus_per_node=0 asks for none" in said.one_line()
    said = refusal(run_config(extra={"mem-per-cpu": "9T"}), "Memory required by task is not available")
    assert said.where == "slurm.extra.mem-per-cpu=9T"
