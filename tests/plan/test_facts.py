"""What Slurm and the storage tell a plan, by the words of a Slurm that is not there."""

import asyncio
from pathlib import Path

import pytest

from tests.builders import run_config
from verl_slurm.base.errors import SlurmMissing
from verl_slurm.base.paths import RunPaths
from verl_slurm.checks.storage_probe import PlaceReport
from verl_slurm.plan import plan_facts
from verl_slurm.plan.plan_inputs import KnownValue, complete
from verl_slurm.slurm.facts import PartitionFacts
from verl_slurm.slurm.parse import PastJobs
from verl_slurm.slurm.slurm_client import SlurmClient


class Told(SlurmClient):
    """A Slurm whose answers are given."""

    def __init__(self, conf: dict[str, str] | None, past: PastJobs | None, grace_s: int = 90) -> None:
        super().__init__({})
        self._conf, self._past, self._grace_s = conf, past, grace_s

    async def config(self) -> dict[str, str]:
        if self._conf is None:
            raise SlurmMissing("Slurm does not answer")
        return self._conf

    async def default_partition(self) -> PartitionFacts:
        return PartitionFacts(
            name="gpu",
            state="UP",
            total_nodes=4,
            total_cpus=4,
            max_time_s=None,
            max_nodes=None,
            grace_s=self._grace_s,
            preempt_mode="REQUEUE",
            is_default=True,
        )

    async def past_jobs(self, partition: str, days: int) -> PastJobs:
        if self._past is None:
            raise SlurmMissing("Slurm does not answer", found="accounting storage is disabled")
        return self._past


PREEMPTS = {"PreemptType": "preempt/partition_prio", "SlurmdTimeout": "60 sec", "KillWait": "30 sec"}
PAST = PastJobs(waits_s=(10.0, 20.0, 90.0), ran_s=4 * 86400.0, thrown_out=6)


def told(client: Told) -> tuple[dict[str, KnownValue], list[str]]:
    return asyncio.run(plan_facts.from_slurm(run_config(), client))


def test_slurm_tells_grace_queue_and_how_often_it_preempts() -> None:
    found, notes = told(Told(PREEMPTS, PAST))
    values = {name: known.value for name, known in found.items()}
    assert values == {"warning_s": 90.0, "lost_node_s": 150.0, "queue_s": 20.0, "notices_per_day": 1.5}
    assert found["queue_s"].samples == PAST.waits_s
    assert notes == []
    assert told(Told(PREEMPTS, PAST, grace_s=0))[0]["warning_s"].value == 30.0, "KillWait is the warning"
    found, _ = told(Told({"PreemptType": "preempt/none"}, PAST))
    assert found["notices_per_day"] == KnownValue(0.0, "Slurm", "nothing preempts jobs of partition gpu")
    found, (note,) = told(Told(PREEMPTS, None))
    assert ("queue_s" in found, found["warning_s"].value) == (False, 90.0)
    assert "accounting storage is disabled" in note


def test_a_slurm_that_does_not_answer_leaves_assumptions_and_a_line() -> None:
    found, (note,) = told(Told(None, None))
    assert found == {}
    assert "Slurm was not asked" in note
    inputs = complete(found, run_config())
    assert inputs["queue_s"].source == inputs["step_s"].source == "assumed"
    assert inputs["crashes_per_day"].basis == "checkpoint.expected_mtbi_h"


def test_a_small_state_is_not_taken_for_one_whose_size_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        plan_facts, "checkpoint_size", lambda config, committed: (1_270_000, 8, "an estimate")
    )
    found, _ = plan_facts.from_storage(
        run_config(), RunPaths(tmp_path), lambda place: pytest.fail("not worth it")
    )
    assert complete(found, run_config())["emergency_s"].value < 5


def test_a_large_state_is_saved_as_fast_as_the_storage_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_facts, "checkpoint_size", lambda config, committed: (10**10, 8, "an estimate"))
    report = PlaceReport(path=str(tmp_path), write_bytes_per_s=2e9)
    found, notes = plan_facts.from_storage(run_config(), RunPaths(tmp_path), lambda place: report)
    assert (found["durable_s"].value, found["durable_s"].source) == (5.0, "doctor")
    assert notes == []
    # What follows from a measured speed is no assumption any more.
    assert complete(found, run_config())["emergency_s"].source == "derived"
