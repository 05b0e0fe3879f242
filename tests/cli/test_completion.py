"""What Tab offers, in a real bash on a pseudo terminal, and as click's protocol has it."""

import os
import pty
import select
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import captured

PROGRAM = Path(sys.executable).with_name("verl-slurm")


def offered(*words: str, at: Path) -> list[str]:
    environ = {
        **os.environ,
        "_VERL_SLURM_COMPLETE": "zsh_complete",
        "COMP_WORDS": " ".join(("verl-slurm", *words)),
        "COMP_CWORD": str(len(words)),
    }
    lines = captured([str(PROGRAM)], env=environ, cwd=at, timeout=60).stdout.splitlines()
    return lines[1::3]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("first", "runs/second", "runs/third", "no_run"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("first", "runs/second", "runs/third"):
        (tmp_path / name / "run.yaml").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("stat",), ["status"]),
        (("status", "runs/"), ["runs/second", "runs/third"]),
        (("status", "th"), ["runs/third"]),
        (("submit", "quick"), ["quickstart", "quickstart_grpo"]),
        (("submit", "quickstart", "daemon.hang_"), ["daemon.hang_budget=", "daemon.hang_floor_s="]),
        (
            ("submit", "quickstart", "daemon.spot_notices=a"),
            [f"daemon.spot_notices={c}" for c in ("auto", "aws", "azure")],
        ),
        (("submit", "quickstart", "deterministic="), ["deterministic=true", "deterministic=false"]),
        (("submit", "quickstart", "train.steps="), []),
        (("submit", "quickstart", "daemon.spot_notices", "=", "aw"), ["aws"]),
        (("config", "daemon.hang_"), ["daemon.hang_budget", "daemon.hang_floor_s"]),
    ],
)
def test_tab_offers_what_fits(place: Path, words: tuple[str, ...], expected: list[str]) -> None:
    assert offered(*words, at=place) == expected


class Bash:
    """An interactive bash on a pseudo terminal."""

    def __init__(self, cwd: Path) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.environ.update(PS1="ready> ", PATH=f"{PROGRAM.parent}:{os.environ['PATH']}", TERM="dumb")
            os.execv("/bin/bash", ["bash", "--norc", "--noprofile", "-i"])
        self._text = ""

    def type(self, text: str, until: Callable[[str], bool]) -> str:
        """Returns all that bash has shown since."""
        self._text = ""
        os.write(self._fd, text.encode())
        end = time.monotonic() + 60
        while not until(self._text):
            ready, _, _ = select.select([self._fd], [], [], max(end - time.monotonic(), 0))
            assert ready, self._text
            self._text += os.read(self._fd, 65536).decode()
        return self._text

    def close(self) -> None:
        os.close(self._fd)
        os.waitpid(self.pid, 0)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_a_real_bash_completes_a_key_and_then_its_value(place: Path) -> None:
    bash = Bash(place)
    try:
        bash.type(
            'eval "$(_VERL_SLURM_COMPLETE=bash_source verl-slurm)"; echo DO""NE\n',
            lambda text: "DONE" in text,
        )
        # No blank after the key: the value is typed right behind it.
        bash.type(
            "verl-slurm submit quickstart daemon.spot\t", lambda text: text.endswith("daemon.spot_notices=")
        )
        bash.type("az\t", lambda text: text.endswith("azure "))
    finally:
        bash.close()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_name_of_a_run_is_no_command(place: Path) -> None:
    names = ("best;id>pwned;#", "best$(id>pwned)", "best\nplain,x;id>pwned;#", "best `id>pwned`", "-best")
    for name in names:
        (place / "runs" / name).mkdir()
        (place / "runs" / name / "run.yaml").touch()
    for words in (("status", "runs/be"), ("status", "be")):
        assert offered(*words, at=place) == [words[1]]  # the shell looks by itself
    bash = Bash(place)
    try:
        bash.type(
            'eval "$(_VERL_SLURM_COMPLETE=bash_source verl-slurm)"; echo DO""NE\n',
            lambda text: "DONE" in text,
        )
        shutil.rmtree(place / "runs" / names[1])
        for name in names[2:4]:
            shutil.rmtree(place / "runs" / name)
        shown = bash.type("verl-slurm status runs/be\t", lambda text: "best" in text and "#" in text)
        assert "best\\;id\\>pwned\\;#" in shown
        bash.type('\necho DO""NE\n', lambda text: "DONE" in text)
        assert not (place / "pwned").exists()
    finally:
        bash.close()
