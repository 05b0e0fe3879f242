"""Walks the table of docs/preemption.md: what a start needs fails or hangs, and the run goes on. What lies is read by
tests of its own: `checkpoint/test_recover.py`, `slurm/test_client.py`.

A real lead and a real agent; the rank needs no torch. File systems that fail are mounted for a moment.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.faulty_mount import Fault, faulty_mount
from tests.fakes.run_without_torch import Stage

pytestmark = pytest.mark.slow

_PAGE = Path(__file__).parents[2] / "docs" / "preemption.md"
_AWAY = """#!/bin/sh
%(hang)s
echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
exit 1
"""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    live = Stage(tmp_path, "daemon.backoff_s=3", "daemon.no_progress_limit=2", slurm=True)
    yield live
    live.close()


@contextlib.contextmanager
def mounted(place: Path, fault: Fault) -> Iterator[None]:
    try:
        with faulty_mount(place, fault):
            yield
    except OSError as error:
        pytest.skip(f"NOT RUN: mounting a file system needs root and FUSE: {error}")


@contextlib.contextmanager
def slurm_away(stage: Stage, *, hang: str = "") -> Iterator[None]:
    """Both programs of the stage's Slurm do without slurmctld what the real ones do."""
    kept = {name: (stage.box / name).read_text() for name in ("srun", "scontrol")}
    for name in kept:
        (stage.box / name).write_text(_AWAY % {"hang": hang})
    yield
    for name, text in kept.items():
        (stage.box / name).write_text(text)


def waits(stage: Stage, count: int = 1) -> None:
    """Until the lead has said that it tries again."""
    stage.wait("warning", count=count, topic="start")


def at_the_restart(stage: Stage, what: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """The rank has died after its first save; before the next start of ranks, this begins."""
    stage.lead(saves=3, dies=True)
    stage.wait("crash")
    with what():
        waits(stage)


def at_the_start(stage: Stage, what: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    with what():
        stage.lead(saves=3)
        waits(stage)


def while_saving(stage: Stage) -> None:
    stage.lead(saves=3, dies=True)
    stage.wait("crash")
    stage.wait("restart", count=2)
    with mounted(stage.paths.checkpoints, "EIO"):
        stage.wait("crash", kind="environment")


WALK: dict[tuple[str, str], Callable[[Stage], None]] = {
    ("RUN's checkpoints", "fails"): lambda s: at_the_restart(s, lambda: mounted(s.paths.checkpoints, "dead")),
    ("RUN's checkpoints", "hangs"): lambda s: at_the_restart(
        s, lambda: _for_a_while(s, mounted(s.paths.checkpoints, "silent"))
    ),
    ("RUN's ledger", "fails"): lambda s: at_the_restart(s, lambda: mounted(s.paths.ledger, "EIO")),
    ("storage, as a rank writes", "fails"): while_saving,
    ("slurmctld, as an attempt begins", "fails"): lambda s: at_the_start(s, lambda: slurm_away(s)),
    ("slurmctld, as an attempt begins", "hangs"): lambda s: at_the_start(
        s, lambda: slurm_away(s, hang="exec sleep 30")
    ),
    ("slurmctld, as ranks start", "fails"): lambda s: at_the_restart(s, lambda: slurm_away(s)),
}


@contextlib.contextmanager
def _for_a_while(stage: Stage, silent: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """Ends the silence once somebody waits in it: the calls then fail, as those to a server that is restarted."""
    with silent:
        stage.wait("crash")
        time.sleep(5)  # the pause of 3 s is over, and what was called does not return
    yield


@pytest.mark.scenario("FLT-A", "FLT-B")
@pytest.mark.parametrize(("what", "how"), WALK)
def test_a_run_whose_environment_fails_goes_on_and_counts_no_crash(stage: Stage, what: str, how: str) -> None:
    WALK[what, how](stage)
    assert stage.end() == 0, stage.story()
    assert stage.checkpoints()[-1] == "step_000003"
    crashes = [event for event in stage.events("crash") if event["kind"] != "environment"]
    # The rank's own, where it was to die after its saves.
    assert all("exit 3" in event["detail"] for event in crashes), stage.story()


def test_the_table_has_a_row_for_each_of_them() -> None:
    text = _PAGE.read_text().partition("## A failing environment")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    _, _, *table = rows
    walked = {what for what, _ in WALK}
    assert walked <= {re.sub(r"`", "", row[0]) for row in table}
    assert all(len(row) == 4 and all(row) for row in table)
