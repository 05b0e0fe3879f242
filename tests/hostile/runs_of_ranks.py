"""Whole runs of a program of the test's own, without Slurm, and what their processes listen on."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.harness import ROOT
from tests.local_runs import lead
from verl_slurm.base.paths import RunPaths
from verl_slurm.submit.submission import carry_out, plan_submission

BELOW_RAY = ROOT / "verl_slurm/loops/rendezvous/below_ray"
"""On PYTHONPATH of all processes of Ray's."""

SAVES = """
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with verl_slurm.run(model=model, optimizer=optimizer) as run:
    for step in run.steps(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""
"""A loop's end, so that the daemon takes the program for one that has done its work."""


def prepared(root: Path, program: str, *overrides: str) -> RunPaths:
    """A run of `program` on two ranks, nothing started."""
    script = root / "program.py"
    script.write_text(program)
    config = root / "run.yaml"
    config.write_text(
        f"trainer: {{backend: command, command: [{script}]}}\\n"
        "code: {tree: null}\\n"  # the program writes beside itself
        "distributed: {dp_size: 2, nodes: 1, device: cpu, threads_per_rank: 1}\\n"
        "checkpoint: {every_steps: 2}\\n".replace("\\n", "\n")
    )
    return planned(config, root / "run", *overrides)


def planned(config: Path, root: Path, *overrides: str) -> RunPaths:
    """A run of a configuration file, nothing started."""
    carry_out(plan_submission(config, [f"run_dir={root}", *overrides], cluster="local"), prepare_only=True)
    return RunPaths(root)


@contextmanager
def living(paths: RunPaths, environ: Mapping[str, str] = {}) -> "Iterator[subprocess.Popen[str]]":
    """Its lead; ended, and all below it, whatever happens in the test."""
    process = lead(paths, environ=environ)
    try:
        yield process
    finally:
        below = tree(process.pid)
        for one in [*below, psutil.Process(process.pid)] if process.poll() is None else below:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def tree(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def listeners(pid: int) -> dict[tuple[int, str, int], list[str]]:
    """(process, address, port) of each TCP socket that `pid` and all below it listen on, and its command line.

    A child between its fork and its exec still has its parent's command line and sockets, and is not counted.
    """
    found: dict[tuple[int, str, int], list[str]] = {}
    processes: list[psutil.Process] = []
    with suppress(psutil.Error):  # it may end while it is looked at
        processes = [psutil.Process(pid), *tree(pid)]
    for process in processes:
        with suppress(psutil.Error, OSError):
            words = process.cmdline()
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    address: Any = connection.laddr
                    if found.get((process.ppid(), address.ip, address.port)) != words:
                        found[process.pid, address.ip, address.port] = words
    return found


def require_nothing_listens_but_lead_and_gloo(paths: RunPaths, environ: Mapping[str, str] = {}) -> None:
    """Run it to its end on this machine. Only its lead's control port and gloo's ports of its ranks are ever open."""
    seen: dict[tuple[int, str, int], list[str]] = {}
    with living(paths, environ) as process:
        watcher = threading.Thread(target=process.communicate)
        watcher.start()
        while process.poll() is None:
            seen |= listeners(process.pid)
            time.sleep(0.2)  # that a port opens is no event
        watcher.join()
        assert process.returncode == 0, paths.root
        lead = process.pid
    ranks = {place: words for place, words in seen.items() if place[0] != lead}
    assert sum(pid == lead for pid, _, _ in seen) == 1, "the control port"
    assert ranks, "gloo's"
    assert {ip for _, ip, _ in seen} == {"127.0.0.1"}, seen
    assert {tuple(words[1:4]) for words in ranks.values()} == {("-P", "-m", "verl_slurm.loops.rendezvous")}, (
        seen
    )


def environment_of(process: psutil.Process) -> dict[str, str]:
    with suppress(psutil.Error, OSError):
        return process.environ()
    return {}


def ranks_of(pid: int) -> dict[str, psutil.Process]:
    """The processes below `pid` that are ranks, by their number."""
    return {
        environ["RANK"]: process
        for process in tree(pid)
        if "RANK" in (environ := environment_of(process)) and os.getpgid(process.pid) == process.pid
    }
