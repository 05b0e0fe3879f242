"""Processes of a test: what they find on their path, and how they are signalled."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
NO_TORCH = ROOT / "tests/fakes/no_torch"
"""On PYTHONPATH: the trainer's ranks are those of `fakes/rank_without_torch.py`."""


def python_path(*first: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`PYTHONPATH` of this checkout, with all that `environ` has on its own: packages may be found by it alone."""
    inherited = environ.get("PYTHONPATH", "")
    places = [*map(str, first), str(ROOT), str(ROOT / "daemon"), *filter(None, [inherited])]
    return {"PYTHONPATH": os.pathsep.join(places)}


def tell(processes: Iterable[psutil.Process], number: int) -> None:
    """Signal each. One that has ended by itself is passed over: between a look and a signal it may."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def captured(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    input: str | None = None,  # noqa: A002 - subprocess's word
    timeout: float | None = None,
    check: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Runs a program to its end. Both of its outputs are kept, as text."""
    return subprocess.run(
        argv, env=env, cwd=cwd, input=input, timeout=timeout, check=check, capture_output=True, text=True
    )


def torchrun(
    *words: str | Path, ranks: int = 2, timeout_s: float = 240.0, **environ: str
) -> "subprocess.CompletedProcess[str]":
    """Runs ranks on this machine until all have ended, and leaves none behind. No agent is told of them."""
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *words,
    ]
    env = os.environ | python_path() | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | environ
    env.pop("VERL_SLURM_CONTROL", None)
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, env=env, text=True, stdout=pipe, stderr=pipe) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                launcher = psutil.Process(process.pid)
                tell([*launcher.children(recursive=True), launcher], signal.SIGKILL)
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def free_port() -> int:
    """A port of the loopback that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def held(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """They stand still while the body runs, and never longer."""
    each = list(processes)
    tell(each, signal.SIGSTOP)
    try:
        yield
    finally:
        tell(each, signal.SIGCONT)
