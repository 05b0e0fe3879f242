"""The trainer's own ranks, struck in their saves by everything that part B knows. One run is struck by all of it, one
after the other, and must end bit for bit like its twin that nobody struck."""

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.run_without_torch import Stage, control_group
from tests.harness import same_weights
from tests.ledger_stats import ledger_stats
from verl_slurm.checkpoint.store.verify import verify

pytestmark = [pytest.mark.torch, pytest.mark.long]

TWO = ("distributed.nodes=1", "distributed.dp_size=2")
OFTEN = (
    "train.steps=4",
    "checkpoint.every_steps=1",
    "checkpoint.runtime_every_steps=1",
    "daemon.backoff_s=0.05",
    # The lead's cancel leaves 10 s, a preemption 30 s: with this margin the first is over at once.
    "daemon.save_margin_s=9.9",
)
STRIKES = [
    [1, "during", "raise"],
    [1, "before", "oom"],
    [1, "during", "kill"],
    [1, "wrote", "kill"],
    [1, "asked", "stop"],
]
WALL = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && clock == CLOCK_REALTIME && !access(getenv("VS_SET_BACK"), F_OK)) now->tv_sec -= 7200;
    return failed;
}
"""


@pytest.fixture
def struck(tmp_path: Path) -> Iterator[Stage]:
    found = Stage(tmp_path, *OFTEN, *TWO)
    yield found
    found.close()


def wall_clock_that_can_be_set_back(box: Path) -> dict[str, str]:
    """For a lead and all that it starts: by two hours, as soon as there is a file `set_back`; nothing without a
    compiler and C's headers."""
    compiler = shutil.which("cc")
    if compiler is None:
        return {}
    (box / "wall.c").write_text(WALL)
    argv = [compiler, "-shared", "-fPIC", "-o", str(box / "wall.so"), str(box / "wall.c"), "-ldl"]
    if subprocess.run(argv, check=False, timeout=60).returncode:
        return {}
    return {"LD_PRELOAD": str(box / "wall.so"), "VS_SET_BACK": str(box / "set_back")}


@contextlib.contextmanager
def memory_group() -> Iterator[tuple[Path, str]]:
    """A control group with little memory, and why there is none to be had here."""
    with contextlib.ExitStack() as stack:
        group, problem = Path(), ""
        try:
            group = stack.enter_context(control_group("memory", "rank"))
            (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        except OSError as error:
            problem = f"no control group (memory, version 1): {error}"
        yield group, problem


@pytest.mark.scenario("P01", "P03", "P04", "P08", "P09")
def test_ranks_that_are_killed_starved_stopped_or_raise_in_a_save_cost_that_save_and_nothing_else(
    struck: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in wall_clock_that_can_be_set_back(struck.box).items():
        monkeypatch.setenv(name, value)
    with memory_group() as (group, not_run):
        strikes = [[rank, at, "kill" if act == "oom" and not_run else act] for rank, at, act in STRIKES]
        lead = struck.lead(strikes=strikes, memory=str(group))
        struck.wait("crash", count=len(STRIKES) - 2)
        if not not_run:
            told = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
            assert int(told["oom_kill"]) == 1, struck.story()
    monkeypatch.undo()
    (failed,) = struck.events("save_failed")
    assert "rank 1: RuntimeError: rank 1 was struck during" in failed["reason"]

    # The save before the end, in which rank 1 comes to the barrier and no further.
    struck.wait("training", count=len(STRIKES) - 1)
    lead.send_signal(signal.SIGUSR2)
    struck.marked("part of rank 0")
    struck.marked(f"strike {len(STRIKES) - 1}: stop rank 1 asked")
    (struck.box / "set_back").touch()
    before = struck.checkpoints()
    lead.send_signal(signal.SIGTERM)
    assert struck.end() == 23, struck.story()
    (degraded,) = struck.events("degraded")
    assert degraded["reason"].endswith(": rank 1 has not written its part"), struck.story()
    assert struck.checkpoints() == before
    for name in before:
        verdict = verify(struck.paths.checkpoints / name)
        assert verdict.ok, verdict.one_line()

    struck.lead(strikes=[])
    assert struck.end() == 0, struck.story()
    assert not list(struck.paths.checkpoints.glob(".*.tmp"))
    assert ledger_stats(struck.paths).duplicates == ()
    (tmp_path / "twin").mkdir(mode=0o700)
    twin = Stage(tmp_path / "twin", *OFTEN, *TWO)
    try:
        twin.lead(strikes=[])
        assert twin.end() == 0, twin.story()
        same, said = same_weights(struck.paths.root, twin.paths.root)
        assert same, said
    finally:
        twin.close()
    if not_run:
        pytest.skip(f"NOT RUN: a rank without memory, which was killed instead; all else held: {not_run}")
