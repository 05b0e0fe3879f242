"""Events as sentences, and what is shown of text from outside."""

import time
from pathlib import Path

import pytest

from tests.journals import make_event, make_events
from verl_slurm.base.one_line import json_line
from verl_slurm.cli.show import render
from verl_slurm.cli.show.story import Story, for_people, progress, tell
from verl_slurm.journal.files import parse_event
from verl_slurm.slurm.parse import parse_job
from verl_slurm.slurm.requeue_rules import refuse_requeue

NO_REQUEUE = Path(__file__).parents[1] / "slurm/golden/norequeue_preempted_in_grace.txt"


SAVED = {"event": "saved", "seconds": 0.2, "num_bytes": 2_000_000}
LOST = {"event": "cause", "cause": "preemption", "seconds_left": 28.4, "evidence": "PreemptTime is set"}
SLOW = {"event": "warning", "topic": "storage", "text": "it is SLOW: 3 MB a second"}
OFTEN = {"event": "notice", "topic": "cadence", "text": "saves once in 5 steps: measured"}


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (LOST, "PREEMPTION, 28.4 s left: PreemptTime is set"),
        (SAVED | {"name": "a", "emergency": True}, "emergency checkpoint a, 2.0 MB in 0.2 s"),
        (SAVED | {"name": "a", "reason": "a multiple"}, "checkpoint a, 2.0 MB in 0.2 s: a multiple"),
        (SLOW, "WARNING, storage: it is SLOW: 3 MB a second"),
        (OFTEN, "cadence: saves once in 5 steps: measured"),
        ({"event": "requeue", "accepted": False, "detail": "no"}, "requeue REFUSED: no"),
        ({"event": "ended", "exit_code": 0, "reason": "all steps"}, "ended with 0, done: all steps"),
        ({"event": "news", "attempt": 1, "colour": "red", "empty": None}, "news colour=red"),
    ],
)
def test_an_event_is_told_as_a_sentence(event: dict[str, object], text: str) -> None:
    (made,) = make_events([event]) if event["event"] != "news" else (parse_event(json_line(event)),)
    assert made is not None
    assert tell(made) == f"--:--:--  {text}"


def test_progress_shows_step_place_and_measures() -> None:
    status = {"step": 3, "steps": 30, "phase": "update", "index": 2, "metrics": {"reward": 0.51234}}
    assert progress(status) == "step 3/30  updating 2  reward 0.512"


def test_a_refusal_is_told_once() -> None:
    story = Story()
    refused = [make_event("refused", rank=rank, reason="no answers") for rank in (0, 1)]
    told = [story.tell(event) for event in refused]
    assert told == ["--:--:--  the ranks REFUSED to train: no answers", None]
    end = story.tell(make_event("ended", exit_code=11, reason="no answers"))
    assert end is not None
    assert "no answers" not in end


def test_the_line_at_the_bottom_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    bottom = render.BottomLine()
    monkeypatch.setattr(bottom, "_tty", True)
    bottom.show(1, "x" * 50)
    assert capsys.readouterr().out.count("x") == 19


def test_text_from_outside_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    render.line("a\x1b]0;title\x07b\nc\u2028d")
    render.raw_line(b"\tred \x1b[31m\xff")
    render.table(["name\x1b[2J"], [["x\x1b[2J"]])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u2028" not in out
    assert out.splitlines()[0] == "a\\x1b]0;title\\x07b\\nc\\u2028d"


@pytest.mark.scenario("USE-SMALL")
def test_what_slurm_said_word_for_word_is_told_only_where_it_was_asked_for() -> None:
    raw = "SIGCONT to lead; JobState=RUNNING Reason=None Restarts=0 (ours 0) PreemptTime=2026-11-21T15:46:03+00:00"
    event = make_event("cause", cause="preemption", evidence=raw, seconds_left=29.3)
    plain, full = Story().tell(event), Story(verbose=True).tell(event)
    assert plain is not None
    assert plain.endswith(
        "PREEMPTION, 29.3 s left: Slurm takes the nodes for a more urgent job; SIGCONT to lead"
    )
    assert full is not None
    assert full.endswith(raw)


@pytest.mark.scenario("SEC19")
def test_a_stranger_among_the_ranks_is_told_as_a_sentence() -> None:
    peer = "in the place of rank 1: 10.0.0.7:42"
    told = tell(make_event("stranger", reason="ranks", node="n1", rank=0, peer=peer))
    assert told.endswith(
        "  rank 0 on n1 met a stranger and ended itself: in the place of rank 1: 10.0.0.7:42"
    )


@pytest.mark.scenario("SEC05")
@pytest.mark.parametrize("end", ["", " \n", " \n\n"], ids=repr)
def test_an_event_full_of_what_slurm_says_is_told_at_once(end: str) -> None:
    began = time.process_time()
    for_people(make_event("cause", evidence="; JobState=X" * 10_000 + end))
    for_people(make_event("cause", evidence="; JobState=X " * 10_000 + end + "x"))
    assert time.process_time() - began < 0.5


@pytest.mark.scenario("USE20")
def test_the_end_of_a_job_that_another_follows_asks_nobody_to_submit() -> None:
    answer = "job 18 is queued and follows this one: Slurm may not requeue this job (Requeue=0)"
    told = tell(make_event("ended", exit_code=25, reason=answer))
    assert "the run goes on by itself" in told
    assert "submit again" not in told
    held = "requeued: held until somebody says: scontrol release 18"
    assert tell(make_event("ended", exit_code=25, reason=held)).endswith(f"ended with 25: {held}")
    assert refuse_requeue(parse_job(NO_REQUEUE.read_text(), 1), 0).detail in answer  # type: ignore[union-attr]
