"""A run that is quick to submit: a stub of the lead, a model directory by its file names, a line of data."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

import verl_slurm
from tests.processes import python_path, tell
from verl_slurm.cli.__main__ import main

HERE = Path(__file__).parent
ROOT = Path(verl_slurm.__file__).parents[1]


class Result(NamedTuple):
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line on standard error."""
        [line] = self.errors
        return line

    @property
    def errors(self) -> list[str]:
        """The lines on standard error, one for each mistake."""
        lines = self.err.splitlines()
        assert all(line.startswith("verl-slurm: ") for line in lines), self.err
        return [line for line in lines if not line.startswith("verl-slurm: not looked at yet")]


Cli = Callable[..., Result]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """`cli("status", run)`: run the command line in this process."""

    def run(*words: object) -> Result:
        capfd.readouterr()
        code = main([str(word) for word in words])
        return Result(code, *capfd.readouterr())

    return run


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with config.yaml, model/ and data/; jobs get the stub lead. Ends what was started."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (tmp_path / "config.yaml").write_text(
        "name: demo\nmodel:\n  path: model\n  reward: rule:arithmetic\n"
        "data:\n  root: data\ncheckpoint:\n  resume_from: auto\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path(HERE.parent / "fakes" / "stub_lead")["PYTHONPATH"])
    monkeypatch.delenv("STUB_RESTART", raising=False)
    yield tmp_path
    started = psutil.process_iter(["cmdline"])
    ours = [p for p in started if any(str(tmp_path) in word for word in p.info["cmdline"] or [])]
    tell(ours, signal.SIGKILL)


@pytest.fixture
def without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A PATH on which there is no Slurm."""
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("bin")))


@contextmanager
def _ordinary_user() -> Iterator[None]:
    """Root may read and write everything, so for a while it is nobody."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def ordinary_user() -> Callable[[], AbstractContextManager[None]]:
    return _ordinary_user


def snapshot(directory: Path) -> set[str]:
    """Everything below `directory`, by relative path."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


@pytest.fixture
def nothing_left(workplace: Path) -> Iterator[None]:
    """The working directory holds afterwards what it held before."""
    before = snapshot(workplace)
    yield
    assert snapshot(workplace) == before


def fail_storage(call: str, number: int, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `os.CALL` fail as the kernel does for paths with `part` in them: by descriptor the error names no path."""
    real = getattr(os, call)

    def fails(where: Any, *rest: Any, **more: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else str(where)
        if part in path and (call != "open" or rest[0] & os.O_RDWR):
            named = [where] if call in ("open", "listdir") else []
            raise OSError(number, os.strerror(number), *named)
        return real(where, *rest, **more)

    monkeypatch.setattr(os, call, fails)
