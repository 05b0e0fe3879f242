"""Every event that the code writes into a journal is told as a sentence."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_slurm.cli.story import tell
from verl_slurm.slurm.parse import parse_job
from verl_slurm.slurm.requeue_rules import refuse_requeue

ROOT = Path(__file__).parents[2]
NO_REQUEUE = ROOT / "tests/slurm/golden/norequeue_preempted_in_grace.txt"
_FIELDS = {
    **dict.fromkeys(("reason", "detail", "text", "error"), "why"),
    **dict.fromkeys(("name", "checkpoint"), "step_000004"),
    **{
        "step": 1,
        "topic": "a topic",
        "cause": "preemption",
        "evidence": "seen",
        "phase": "update",
        "index": 2,
    },
    **{
        "node": "node2",
        "node_id": 1,
        "nodes": "node1",
        "number": 1,
        "job_id": "7",
        "after": "6",
        "cluster": "slurm",
    },
    **{"kind": "crash", "crashes": 1, "budget": 8, "rank": 0, "stuck": 4, "total": 3, "peer": "10.0.0.1"},
    **{"exit_code": 0, "seconds": 1.0, "num_bytes": 9, "log": "/x", "state": "GONE", "reward": "rule:sums"},
    **{"before": 2, "good": True, "accepted": True, "resume": "step_000002", "progress": "a", "epoch": 1},
    **{"checkpoints": ["step_000004"], "source": "/old", "tier": "nvme", "problem": "why", "what": "copy"},
}


def names() -> Iterator[str]:
    """The first word of each `journal.event(...)`, `append_event(paths, ...)` and `Note(...)`."""
    for folder in ("verl_slurm", "daemon/verl_slurm_daemon"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                called = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                place = {"event": 0, "Note": 0, "_write": 0, "append_event": 1}.get(called)
                if place is None or len(node.args) <= place:
                    continue
                yield from (
                    word.value
                    for word in ast.walk(node.args[place])
                    if isinstance(word, ast.Constant) and isinstance(word.value, str)
                )


@pytest.mark.scenario("USE17")
@pytest.mark.parametrize(
    "name", sorted(set(names()) | {"verified", "pruned", "corrupt", "notice", "warning"})
)
def test_every_event_that_the_code_writes_is_told_as_a_sentence(name: str) -> None:
    told = tell({"event": name, **_FIELDS})
    assert told is None or ("=" not in told and "None" not in told), told
    bare = tell({"event": name, "reason": "why"})
    assert bare is None or "None: None" not in bare


@pytest.mark.scenario("USE17")
def test_the_code_writes_at_least_the_events_of_a_life() -> None:
    life = {"started", "generation", "cause", "save", "requeue", "ended", "done", "start_failed", "submitted"}
    assert life <= set(names())


@pytest.mark.scenario("USE20")
def test_the_end_of_a_job_that_another_follows_asks_nobody_to_submit() -> None:
    answer = "job 18 is queued and follows this one: Slurm may not requeue this job (Requeue=0)"
    told = tell({"event": "ended", "exit_code": 25, "reason": answer})
    assert told is not None
    assert "the run goes on by itself" in told
    assert "submit again" not in told
    assert refuse_requeue(parse_job(NO_REQUEUE.read_text(), 1), 0).detail in answer  # type: ignore[union-attr]
