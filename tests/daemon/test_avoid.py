"""Nodes to stay away from: remembered in the journal, forgotten after their time."""

from datetime import UTC, datetime, timedelta

from verl_slurm_daemon.avoid import avoided

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def event(minutes_ago: float, *nodes: str) -> dict[str, object]:
    at = NOW - timedelta(minutes=minutes_ago)
    return {"event": "avoid", "time": at.isoformat(timespec="milliseconds"), "nodes": list(nodes)}


def test_a_node_is_avoided_for_its_time_and_no_longer() -> None:
    events = [event(61, "n1"), event(59, "n2")]
    assert avoided(events, ["n3"], NOW, 3600.0) == ("n2", "n3")


def test_with_no_time_nothing_is_avoided() -> None:
    assert avoided([event(0, "n1")], ["n2"], NOW, 0.0) == ()


def test_damaged_events_are_passed_over() -> None:
    events: list[dict[str, object]] = [
        {"event": "avoid", "time": "yesterday", "nodes": ["n1"]},
        {"event": "avoid", "time": "2026-11-21T11:59:00", "nodes": ["n1"]},
        {"event": "avoid", "nodes": ["n1"]},
        {"event": "avoid", "time": NOW.isoformat(), "nodes": "n1"},
        {"event": "started", "time": NOW.isoformat(), "nodes": ["n1"]},
    ]
    assert avoided(events, [], NOW, 3600.0) == ()
