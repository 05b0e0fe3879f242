"""The pace of a run, and what its nodes do."""

from datetime import UTC, datetime

import pytest

from tests.journals import Line, make_events
from verl_slurm.journal.history import History
from verl_slurm.journal.pace import LOOKED_AT, NODE_STATES, node_states, number, pace_of


def rows(*seconds: float) -> list[dict[str, float]]:
    return [{"step": float(step + 1), "step_s": time} for step, time in enumerate(seconds)]


def test_the_time_left_is_the_median_of_the_last_steps_for_each_step_to_come() -> None:
    pace = pace_of(rows(10.0, 11.0, 500.0), 3, 10)
    assert (pace.step_s, pace.seconds_left, pace.share) == (11.0, 77.0, 0.3)
    early = rows(*[900.0] * 40, *[2.0] * LOOKED_AT)
    assert pace_of(early, 70, 71).seconds_left == 2.0, "a pace of long ago does not count"


def test_what_cannot_be_known_is_none() -> None:
    assert pace_of([], 0, 10).seconds_left is None
    assert pace_of(rows(1.0), 1, None).seconds_left is None
    assert pace_of(rows(1.0), 1, 0).share is None
    assert pace_of([], 10, 10).seconds_left == 0.0, "a run that is done needs no measured step"


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), 10**400])
def test_a_value_of_a_row_that_is_no_number_does_not_count(value: object) -> None:
    assert number(value) is None
    assert pace_of([{"step": 1.0, "step_s": value}], 1, 2).step_s is None


def lost_nodes(*lines: Line) -> list[str]:
    return History(make_events(list(lines))).lost_nodes


def test_a_node_is_lost_until_the_ranks_start_on_it_again() -> None:
    crash = {"event": "crash", "kind": "node", "node": "n2"}
    start = {"event": "restart", "number": 2}
    assert lost_nodes(crash) == ["n2"]
    assert lost_nodes(crash, start) == [], "it is started on again, so it is not given up"
    left_out = crash | {"replaced": True}
    assert lost_nodes(left_out, start) == ["n2"]
    chosen = {"event": "nodes_chosen", "train": ["n1", "n2"]}
    assert lost_nodes(left_out, start, chosen) == []
    assert lost_nodes(left_out, {"event": "started", "nodes": "n[1-3]"}) == []


@pytest.mark.parametrize(("state", "doing"), NODE_STATES.items())
def test_nodes_do_what_their_lead_has_the_ranks_do(state: str, doing: str) -> None:
    status = {"state": state, "train_nodes": ["n1", "n2"], "spare_nodes": ["n3"]}
    found = node_states(status, ["n2"], ["n9"], has_nodes=True)
    assert found == {doing: ["n1"], "spare": ["n3"], "lost": ["n2"], "avoided": ["n9"]}


def test_a_job_that_waits_has_no_nodes_and_may_avoid_some() -> None:
    avoid = make_events([{"event": "avoid", "nodes": ["n2"], "time": "2026-11-21T11:00:00+00:00"}])
    now = datetime(2026, 11, 21, 11, 30, tzinfo=UTC)
    avoided = History(avoid).avoided_nodes((), now, 3600)
    status = {"state": "ended", "train_nodes": ["n1"]}
    assert node_states(status, [], avoided, has_nodes=False) == {"avoided": ["n2"]}
