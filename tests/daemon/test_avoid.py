"""Nodes to stay away from: remembered in the journal, forgotten after their time."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from verl_slurm_daemon.allocation import slurm_job as module
from verl_slurm_daemon.allocation.slurm_job import SlurmAllocation

from tests.journals import make_event
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import parse_config
from verl_slurm.journal.events import Event
from verl_slurm.journal.history import History
from verl_slurm.slurm.parse import parse_usable_nodes
from verl_slurm.slurm.slurm_environment import SlurmJob

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def avoid(minutes_ago: float, *nodes: str) -> Event:
    at = NOW - timedelta(minutes=minutes_ago)
    return make_event("avoid", time=at.isoformat(timespec="milliseconds"), nodes=list(nodes))


def test_a_node_is_avoided_for_its_time_and_damaged_events_are_passed_over() -> None:
    events = [avoid(61, "n1"), avoid(59, "n2")]
    assert History(events).avoided_nodes(["n3"], NOW, 3600.0) == ("n3", "n2")
    assert History([avoid(0, "n1")]).avoided_nodes(["n2"], NOW, 0.0) == ()
    damaged = [
        make_event("avoid", time="yesterday", nodes=["n1"]),
        make_event("avoid", time="2026-11-21T11:59:00", nodes=["n1"]),
        make_event("avoid", nodes=["n1"]),
        make_event("stacks", time=NOW.isoformat(), node="n1"),
    ]
    assert History(damaged).avoided_nodes([], NOW, 3600.0) == ()


NODES = "\n".join(
    [
        "n1|mix|a100|gpu:8",
        "n2|alloc|a100|gpu:8",
        "n3|drain|a100|gpu:8",
        "n4|idle*|a100|gpu:8",
        "n5|idle||(null)",
        "n6|idle||(null)",
    ]
)


@pytest.mark.parametrize(
    ("wanted", "present", "told", "asks", "why"),
    [
        (1, [], ["n1"], {}, ""),
        (2, [], None, {}, "partition gpu has too few"),  # n5 and n6 have no GPUs, n3 and n4 are not up
        (1, ["n2"], None, {}, "partition gpu has too few"),
        (1, ["n5"], ["n5", "n1"], {}, ""),  # an operator's stays
        (1, ["n7", "n2"], ["n1"], {}, ""),  # both ours
        (1, [], None, {"required": "n1"}, "the job asks for n1"),
        (1, ["n7", "n1"], [""], {"required": "n1"}, "the job asks for n1"),  # both ours: taken back
        (1, [], None, {"reservation": "R"}, "reservation R has too few"),
    ],
)
def test_a_node_is_avoided_only_where_enough_like_it_are_up_and_an_operators_exclusion_stays(
    wanted: int,
    present: list[str],
    told: list[str] | None,
    asks: dict[str, str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    excluded: list[str] = []

    class Client:
        async def job(self, job_id: int) -> SimpleNamespace:
            shown = {"excluded": ",".join(present) or None, "required": None, "reservation": None}
            return SimpleNamespace(**shown | asks, partition="gpu")

        async def usable_nodes(self, partition: str, reservation: str | None = None) -> dict[str, str]:
            assert partition == "gpu"
            usable = parse_usable_nodes(NODES)
            return {"n1": usable["n1"]} if reservation else usable

        async def expand(self, nodes: str) -> list[str]:
            return nodes.split(",")

        async def exclude(self, job_id: int, nodes: str) -> None:
            excluded.append(nodes)

    config = parse_config(b"", "my.yaml", (f"distributed.nodes={wanted}", f"distributed.dp_size={wanted}"))
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    job = SlurmJob.from_environ(environment | {"SLURMD_NODENAME": "n1"})
    assert job is not None
    monkeypatch.setattr(module, "SlurmClient", Client)
    before = present if len(present) == 2 else []
    avoided = asyncio.run(SlurmAllocation(job, config, RunPaths(tmp_path)).avoid(["n1"], before))
    assert excluded == ([",".join(told)] if told else [])
    assert avoided.told == (() if why else ("n1",))
    assert avoided.said.startswith(f"nothing is avoided: {why}" if why else "the next start avoids ")
