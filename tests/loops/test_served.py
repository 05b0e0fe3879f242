"""A loop of the user's own under the real daemon, without Slurm: saved, preempted, requeued, bit for bit."""

import signal
from pathlib import Path

import pytest

from tests.harness import same_weights
from tests.journals import read_events
from tests.local_runs import finish, lead, until
from tests.loops.served import CONFIG, STEPS, by_hand, overrides
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.steps import last_steps
from verl_slurm.submit.submission import carry_out, plan_submission

pytestmark = pytest.mark.torch


@pytest.mark.long
@pytest.mark.variant
def test_a_loop_is_saved_when_asked_preempted_and_ends_like_one_that_ran_by_hand(tmp_path: Path) -> None:
    straight = by_hand(tmp_path / "straight")
    root = tmp_path / "run"
    plan = plan_submission(CONFIG, [*overrides(0.1), f"run_dir={root}"], cluster="local")
    carry_out(plan, prepare_only=True)
    paths = RunPaths(root)
    process = lead(paths)
    until(process, "training")
    process.send_signal(signal.SIGUSR1)
    until(process, "verified")
    process.send_signal(signal.SIGUSR2)
    assert finish(process) == 0
    events = read_events(paths)
    assert [e["cause"] for e in events if e["event"] == "cause"] == ["operator", "preemption"]
    asked, at_the_end = (e["name"] for e in events if e["event"] == "saved" and e["emergency"])
    assert asked < at_the_end < f"step_{STEPS:06d}"
    resumed = [e["resume"] for e in events if e["event"] == "restart"]
    assert resumed[-1] == at_the_end
    assert {e["attempt"] for e in events if e["event"] == "started"} == {1, 2}
    same, said = same_weights(straight, root)
    assert same, said
    assert [row["step"] for row in last_steps(paths, STEPS)] == list(range(1, STEPS + 1))
    assert not (root / "work").exists() or not any((root / "work").glob("*/*"))
