"""Events as sentences, and what is shown of text from outside."""

import pytest

from verl_slurm.cli import render
from verl_slurm.cli.story import progress, tell


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            {"event": "cause", "cause": "preemption", "seconds_left": 28.4, "evidence": "PreemptTime is set"},
            "PREEMPTION, 28.4 s left: PreemptTime is set",
        ),
        (
            {
                "event": "saved",
                "name": "step_000003_sp0007",
                "seconds": 0.2,
                "num_bytes": 2e6,
                "emergency": True,
            },
            "emergency checkpoint step_000003_sp0007, 2.0 MB in 0.2 s",
        ),
        ({"event": "requeue", "accepted": False, "detail": "no"}, "requeue REFUSED: no"),
        ({"event": "ended", "exit_code": 0, "reason": "all steps"}, "ended with 0, done: all steps"),
        ({"event": "news", "epoch": 1, "colour": "red", "empty": None}, "news colour=red"),
    ],
)
def test_an_event_is_told_as_a_sentence(event: dict[str, object], text: str) -> None:
    told = tell(event)
    assert told == f"--:--:--  {text}"


def test_progress_shows_step_place_and_measures() -> None:
    status = {"step": 3, "steps": 30, "phase": "update", "index": 2, "metrics": {"reward": 0.51234}}
    assert progress(status) == "step 3/30  update 2  reward 0.5123"


def test_text_from_outside_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    render.line("a\x1b]0;title\x07b\nc\u2028d")
    render.raw_line(b"\tred \x1b[31m\xff")
    render.table(["name"], [["x\x1b[2J"]])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u2028" not in out
    assert out.splitlines()[0] == "a\\x1b]0;title\\x07b\\nc\\u2028d"
