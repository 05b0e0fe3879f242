"""Room, mounts and clocks of a node."""

import tempfile
from pathlib import Path

import pytest
from verl_slurm_daemon.agent.node_check import order_for

from verl_slurm.config.schema import RunConfig, ServiceConfig
from verl_slurm.health.nodes import judge_clock, look_at_mounts, look_at_room


def nothing(check: str) -> None:
    """Nobody waits for the check."""


def test_a_full_temporary_directory_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (found,) = look_at_room(nothing, 1 << 40)
    assert (found.verdict, found.passing) == ("bad", True)
    assert found.found.endswith(f"MiB free in {tmp_path}, at least {1 << 40}")
    assert look_at_room(nothing, 1)[0].verdict == "good"
    assert look_at_room(nothing, 0) == []


def test_what_the_lead_sees_and_the_node_does_not_is_named(tmp_path: Path) -> None:
    (found,) = look_at_mounts(nothing, [str(tmp_path), str(tmp_path / "data")])
    assert (found.verdict, found.found) == ("bad", f"{tmp_path / 'data'}: No such file or directory")
    assert look_at_mounts(nothing, [str(tmp_path)])[0].verdict == "good"


@pytest.mark.parametrize(
    ("ahead_s", "verdict"),
    [(0.2, "good"), (-59.0, "good"), (61.0, "bad"), (-61.0, "bad"), (None, "not checked")],
)
def test_a_clock_that_is_far_from_slurms_is_bad(ahead_s: float | None, verdict: str) -> None:
    (found,) = judge_clock(ahead_s, 60.0)
    assert found.verdict == verdict
    assert judge_clock(ahead_s, 0.0) == []


@pytest.mark.parametrize(("nodes", "looked_for"), [(0, False), (1, True)])
def test_a_service_beside_the_ranks_is_no_foreign_process_on_their_gpus(nodes: int, looked_for: bool) -> None:
    judge = ServiceConfig(command=("judge.py",), nodes=nodes, gpus=1)
    assert order_for(RunConfig(services={"judge": judge}), ()).foreign_processes is looked_for
