"""A full disk under standard output, the real one: /dev/full."""

import sys

import pytest

from verl_slurm.trainer.measures import console


@pytest.mark.scenario("P10")
def test_a_line_that_cannot_be_written_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, speak in (("stdout", console.say), ("stderr", console.complain)):
        # Unbuffered below, so that closing the file has nothing left to fail with.
        with open("/dev/full", "wb", buffering=0) as raw, monkeypatch.context() as patch:
            full = _Unbuffered(raw)
            patch.setattr(sys, stream, full)
            speak("hello")
            assert full.refused == 1


def test_a_line_that_can_be_written_is_there_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    console.say("one")
    console.complain("two")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("one\n", "two\n")


class _Unbuffered:
    """A text stream that writes through, as under PYTHONUNBUFFERED; counts what the system refused."""

    def __init__(self, raw: object) -> None:
        self._raw = raw
        self.refused = 0

    def write(self, text: str) -> int:
        try:
            return int(self._raw.write(text.encode()))  # type: ignore[attr-defined]
        except OSError:
            self.refused += 1
            raise

    def flush(self) -> None:
        """Nothing is buffered."""
