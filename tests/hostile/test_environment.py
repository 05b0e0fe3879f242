"""Walks the table of docs/preemption.md: each operation of lead and agent fails, hangs or lies, and the run goes on.

Each cell of the table has a walk here, or names the test that shows it (`SHOWN`). A walk has a real lead and a real
agent; the rank needs no torch. File systems that fail are mounted for a moment.
"""

import contextlib
import itertools
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.faulty_mount import Fault, faulty_mount
from tests.fakes.run_without_torch import Stage
from tests.journals import append_event

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[2]
_AWAY = """#!/bin/sh
%(hang)s
echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
exit 1
"""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    away = tmp_path / "setup_is_away"
    setup = f"slurm.setup=['test ! -e {away} || cat {away}/env.sh']"
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    secret.chmod(0o600)
    words = ("daemon.backoff_s=3", "daemon.no_progress_limit=2", setup)
    live = Stage(tmp_path, *words, f"env_from_files.API_KEY={secret}", slurm=True)
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


@contextlib.contextmanager
def opened(place: Path) -> Iterator[None]:
    place.chmod(0o770)
    yield
    place.chmod(0o700)


def waits(stage: Stage, count: int = 1) -> None:
    """Until the lead has said that it tries again."""
    stage.wait("warning", count=count, topic="start")


def at_the_restart(stage: Stage, what: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """The rank dies after its first save; before the next start of ranks, this begins."""
    stage.lead(saves=3, dies=True, quick=True)
    stage.wait("verified")
    with what():
        (stage.box / "go").touch()
        waits(stage)


def at_the_start(stage: Stage, what: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    with what():
        stage.lead(saves=3, quick=True)
        waits(stage)


def not_set_up(stage: Stage) -> None:
    """The rank dies after its first save; before the next start, a secret and a file of `slurm.setup` are away."""
    secret, setup = (stage.box.parent / name for name in ("secret", "setup_is_away"))
    stage.lead(saves=3, dies=True, quick=True)
    stage.wait("verified")
    secret.rename(stage.box / "secret")
    (stage.box / "go").touch()
    assert "env_from_files.API_KEY" in stage.wait("crash", kind="environment")["detail"]
    setup.touch()
    (stage.box / "secret").rename(secret)
    said = (stage.wait("crash", kind="environment", count=count)["detail"] for count in itertools.count(2))
    assert any("env.sh: Not a directory" in detail for detail in said)
    setup.unlink()


def while_saving(stage: Stage) -> None:
    stage.lead(saves=3, dies=True, quick=True)
    stage.wait("verified")
    (stage.box / "go").touch()
    stage.wait("restart", count=2)
    with mounted(stage.paths.checkpoints, "EIO"):
        stage.wait("crash", kind="environment")


def as_an_attempt_begins(stage: Stage, fault: Fault) -> None:
    """Nothing of RUN answers: the preemption's requeue is asked for all the same."""
    with mounted(stage.paths.root, fault):
        process = stage.lead(saves=3, quick=True, stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout as said:
            # Its journal is away, too.
            assert "tries again" in (line := said.readline()) or "does not answer" in line
            stage.preempt()
            said.read()
        assert stage.end() == 25
    comes_back(stage)


def while_ranks_train(stage: Stage, fault: Fault) -> None:
    stage.lead(quick=True)
    stage.wait("first_rollout")
    with mounted(stage.paths.root, fault):
        # The save of the ranks fails with it, or waits: the requeue does not.
        stage.preempt(int(time.time()) + 6)
        assert stage.end() == 25
    comes_back(stage)


def moved_while_ranks_train(stage: Stage) -> None:
    process = stage.lead(saves=3, dies=True, quick=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    stage.wait("verified")
    aside = stage.paths.root.with_name("aside")
    stage.paths.root.rename(aside)
    (stage.box / "go").touch()
    with process.stdout as said:
        assert any("no_journal" in line for line in iter(said.readline, ""))
        assert not stage.paths.root.exists(), "no other run is made there"
        aside.rename(stage.paths.root)
        said.read()


def as_it_is_read_back(stage: Stage) -> None:
    stage.lead(rank="waits", quick=True)
    stage.wait("first_rollout")
    stage.preempt(int(time.time()) + 8)
    stage.marked("saved")
    with mounted(stage.paths.checkpoint(1), "silent"):
        (stage.box / "go").touch()
        assert stage.wait("degraded")
        assert stage.end() == 25
    comes_back(stage)
    stage.wait("restart", resume="step_000001")


def slurm_is_away_in_training(stage: Stage, hang: str = "") -> None:
    process = stage.lead(quick=True)
    stage.wait("first_rollout")
    with slurm_away(stage, hang=hang):
        process.send_signal(signal.SIGUSR1)
        assert stage.wait("cause")["cause"] == "unknown"
    stage.preempt()
    assert stage.end() == 25
    comes_back(stage)


def slurm_is_away_at_the_end(stage: Stage, hang: str = "") -> None:
    stage.lead(rank="waits", quick=True)
    stage.wait("first_rollout")
    stage.preempt()
    stage.marked("saved")
    with slurm_away(stage, hang=hang):
        (stage.box / "go").touch()
        stage.wait("requeue", accepted=False)
    stage.wait("requeue", accepted=True)
    assert stage.end() == 25
    comes_back(stage)


def held_for_its_time_limit(stage: Stage) -> None:
    for _ in range(2):
        append_event(stage.paths, "restart", number=1, progress="start+0")
        append_event(stage.paths, "cause", cause="time_limit")
    stage.lead(quick=True)
    assert stage.end() == 25
    assert "requeuehold 7" in (stage.box / "asked").read_text()
    assert "scontrol update JobId=7 TimeLimit=" in stage.wait("held")["reason"]
    assert "scontrol release 7" in stage.wait("requeue", accepted=True)["detail"]
    comes_back(stage)


def comes_back(stage: Stage) -> None:
    """Slurm starts the job again."""
    for fact in ("requeued", "preempted"):
        (stage.box / fact).unlink(missing_ok=True)
    stage.lead(saves=3, quick=True)


_Cell = tuple[str, str]
_ROOM = "room in RUN for a checkpoint that is fetched or [divided](verl.md#another-number-of-gpus)"
_NAMED = "the checkpoint that `checkpoint.resume_from` names, as an attempt begins"
_MOVED = "RUN moved or unmounted, while ranks train"
_SET_UP = "commands, Python and secrets of ranks and services"
_OPEN = (
    "RUN, a checkpoint or a key that others can write, as after `chmod -R g+w`, or a checkpoint of another owner: "
    "nothing older is used in its place"
)
WALK: dict[_Cell, Callable[[Stage], None]] = {
    ("RUN itself, as an attempt begins", "fails"): lambda s: as_an_attempt_begins(s, "EIO"),
    ("RUN itself, as an attempt begins", "hangs"): lambda s: as_an_attempt_begins(s, "silent"),
    ("RUN itself, while ranks train", "fails"): lambda s: while_ranks_train(s, "dead"),
    ("RUN itself, while ranks train", "hangs"): lambda s: while_ranks_train(s, "silent"),
    (_MOVED, "fails"): moved_while_ranks_train,
    ("RUN's checkpoints", "fails"): lambda s: at_the_restart(s, lambda: mounted(s.paths.checkpoints, "dead")),
    ("RUN's checkpoints", "hangs"): lambda s: at_the_restart(
        s, lambda: mounted(s.paths.checkpoints, "silent")
    ),
    ("RUN's ledger", "fails"): lambda s: at_the_restart(s, lambda: mounted(s.paths.ledger, "EIO")),
    ("RUN's ledger", "hangs"): lambda s: at_the_restart(s, lambda: mounted(s.paths.ledger, "silent")),
    (_SET_UP, "fails"): not_set_up,
    (_OPEN, "fails"): lambda s: at_the_restart(s, lambda: opened(s.paths.root)),
    ("storage, as a rank writes", "fails"): while_saving,
    ("a save that is read back", "hangs"): as_it_is_read_back,
    ("slurmctld, as an attempt begins", "fails"): lambda s: at_the_start(s, lambda: slurm_away(s)),
    ("slurmctld, as an attempt begins", "hangs"): lambda s: at_the_start(
        s, lambda: slurm_away(s, hang="exec sleep 30")
    ),
    ("slurmctld, as ranks start", "fails"): lambda s: at_the_restart(s, lambda: slurm_away(s)),
    ("slurmctld, as ranks start", "hangs"): lambda s: at_the_restart(
        s, lambda: slurm_away(s, hang="sleep 15")
    ),
    ("slurmctld, while ranks train", "fails"): slurm_is_away_in_training,
    ("slurmctld, while ranks train", "hangs"): lambda s: slurm_is_away_in_training(s, "exec sleep 30"),
    ("slurmctld, at the end", "fails"): slurm_is_away_at_the_end,
    ("slurmctld, at the end", "hangs"): lambda s: slurm_is_away_at_the_end(s, "exec sleep 30"),
    ("the time limit", "lies"): held_for_its_time_limit,
}
_IN_TEST = (
    ("RUN itself, while ranks train", "hangs"),
    (_SET_UP, "fails"),
    (_MOVED, "fails"),
    ("a save that is read back", "hangs"),
    ("slurmctld, at the end", "fails"),
)
"""One of each way in `make test`; more of them in CI's long lane, and all in `make test-all`."""
_IN_LONG = (
    ("RUN itself, as an attempt begins", "hangs"),
    ("RUN's checkpoints", "hangs"),
    (_OPEN, "fails"),
    ("slurmctld, as ranks start", "fails"),
    ("the time limit", "lies"),
)

_SLURMD = "slurmd of a node, as agents or services start, while Slurm calls the node usable"
SHOWN: dict[_Cell, str] = {
    (_SLURMD, "fails"): (
        "daemon/test_spare_nodes.py::test_a_slurmd_that_is_away_as_agents_start_is_the_environments_fault_and_named"
    ),
    (_SLURMD, "hangs"): (
        "daemon/test_effects.py::test_agents_that_slurm_does_not_bring_are_the_environments_fault"
    ),
    ("Python of the batch script, and what is installed there, as Slurm starts the job", "fails"): (
        "slurm/test_batch.py::test_a_python_that_stays_away_costs_a_requeue_and_not_the_job"
    ),
    ("RUN itself, as an attempt begins", "lies"): (
        "base/test_fence.py::test_a_copy_that_cannot_be_read_is_refused_by_its_file_where_no_claim_decides"
    ),
    ("RUN put back to a former copy of itself, while ranks train", "fails"): (
        "daemon/test_policy.py::test_a_wished_requeue_goes_on_without_a_save_where_none_can_succeed_in_this_attempt"
    ),
    ("RUN itself, while ranks train", "lies"): (
        "base/test_fence.py::test_a_copy_that_cannot_be_read_is_refused_by_its_file_where_no_claim_decides"
    ),
    ("RUN's checkpoints", "lies"): (
        "checkpoint/test_recover.py::"
        "test_a_damaged_newest_is_set_aside_with_its_reason_and_the_one_before_is_taken"
    ),
    ("the tier that has the only checkpoint", "fails"): (
        "daemon/test_resume.py::test_a_run_is_not_begun_afresh_while_its_tier_is_away"
    ),
    ("the tier that has the only checkpoint", "hangs"): (
        "daemon/test_tier_child.py::test_a_tier_that_gives_no_bytes_is_waited_for_as_storage"
    ),
    ("the tier that has the only checkpoint", "lies"): (
        "daemon/test_resume.py::test_a_tier_gives_back_what_is_signed_and_nothing_else"
    ),
    (_ROOM, "fails"): (
        "tiers/test_fetch.py::test_what_does_not_fit_here_is_waited_for_and_nothing_older_is_taken"
    ),
    (_ROOM, "hangs"): (
        "tiers/test_fetch.py::test_a_fault_of_the_runs_own_storage_is_to_the_lead_as_a_tier_that_is_away"
    ),
    ("RUN's ledger", "lies"): (
        "runtime_state/test_ledger.py::"
        "test_what_is_read_is_what_was_written_and_not_torn_damaged_or_taken_back"
    ),
    ("data, model, image and code, as an attempt begins", "fails"): (
        "daemon/test_lead.py::test_data_that_is_away_at_a_start_is_waited_for_by_name"
    ),
    ("data, model, image and code, as an attempt begins", "hangs"): (
        "daemon/test_start.py::test_a_start_that_waits_for_silent_storage_leaves_soon_after_a_signal"
    ),
    ("data, model, image and code, as an attempt begins", "lies"): (
        "trainer/test_loop.py::test_changed_data_is_refused_with_its_exit_code"
    ),
    (_NAMED, "fails"): "daemon/test_resume.py::test_a_named_checkpoint_that_is_away_is_waited_for",
    (_NAMED, "hangs"): (
        "daemon/test_start.py::test_a_start_that_waits_for_silent_storage_leaves_soon_after_a_signal"
    ),
    (_NAMED, "lies"): (
        "checkpoint/test_recover.py::test_an_explicit_one_that_does_not_verify_is_an_error_and_stays"
    ),
    (_SET_UP, "hangs"): (
        "daemon/test_rank_environment.py::"
        "test_a_command_that_hangs_is_named_before_the_lead_gives_the_start_up"
    ),
    (_SET_UP, "lies"): "daemon/test_rank_environment.py::test_a_secret_that_others_can_read_is_not_used",
    ("the files of keys, at each start of ranks", "fails"): (
        "daemon/test_start.py::test_a_key_that_was_there_before_is_storage_that_is_away"
    ),
    ("the files of keys, at each start of ranks", "hangs"): (
        "daemon/test_start.py::test_a_start_that_waits_for_silent_storage_leaves_soon_after_a_signal"
    ),
    (
        "the files of keys, at each start of ranks",
        "lies",
    ): "base/test_keys.py::test_what_is_no_key_is_refused_and_not_quoted",
    ("storage, as a rank writes", "hangs"): (
        "daemon/test_hang.py::test_a_save_that_training_waits_for_has_the_patience_of_loading_and_is_no_pace"
    ),
    ("storage, as a rank writes", "lies"): (
        "daemon/test_resume.py::test_a_fresh_checkpoint_is_read_back_and_a_damaged_one_set_aside"
    ),
    ("a save that is read back", "fails"): (
        "daemon/test_effects.py::test_a_save_that_storage_does_not_give_back_is_read_again"
    ),
    ("a save that is read back", "lies"): (
        "daemon/test_resume.py::test_a_fresh_checkpoint_is_read_back_and_a_damaged_one_set_aside"
    ),
    ("slurmctld, as an attempt begins", "lies"): (
        "daemon/test_allocation.py::test_a_node_without_an_address_has_its_name"
    ),
    ("slurmctld, as ranks start", "lies"): (
        "daemon/test_policy.py::test_a_start_that_says_nothing_is_a_crash_and_an_old_timer_is_nothing"
    ),
    ("slurmctld, while ranks train", "lies"): (
        "slurm/test_client.py::test_a_requeue_that_changes_nothing_is_unconfirmed"
    ),
    ("slurmctld, at the end", "lies"): (
        "daemon/test_effects.py::test_a_requeue_that_got_no_answer_is_asked_for_again"
    ),
    ("a rank that stands by", "fails"): (
        "daemon/test_ranks.py::test_one_that_stood_by_and_is_dead_is_started_anew"
    ),
    ("a rank that stands by", "hangs"): (
        "daemon/test_ranks.py::test_one_that_stood_by_and_is_stopped_is_made_anew_within_seconds"
    ),
    ("a rank that stands by", "lies"): (
        "daemon/test_ranks.py::test_a_rank_that_fails_ends_the_others_a_second_later_and_is_named"
    ),
    ("an agent that stands by", "fails"): (
        "daemon/test_standby_step.py::"
        "test_agents_of_the_other_nodes_go_on_standing_by_without_one_that_is_gone"
    ),
    ("an agent that stands by", "hangs"): (
        "daemon/test_policy.py::test_a_start_that_says_nothing_is_a_crash_and_an_old_timer_is_nothing"
    ),
    ("an agent that stands by", "lies"): (
        "daemon/test_policy.py::test_a_start_that_says_nothing_is_a_crash_and_an_old_timer_is_nothing"
    ),
    ("the job's nodes", "lies"): (
        "daemon/test_allocation.py::test_a_job_with_fewer_nodes_than_the_run_needs_waits_for_a_person"
    ),
    ("the time limit", "fails"): (
        "daemon/test_allocation.py::"
        "test_a_time_limit_that_is_shorter_than_the_lead_time_leaves_half_of_it_for_training"
    ),
}


@pytest.mark.scenario("FLT-A", "FLT-B")
@pytest.mark.parametrize(
    ("what", "how"),
    [
        *_IN_TEST,
        *(pytest.param(*cell, marks=pytest.mark.long) for cell in _IN_LONG),
        *(
            pytest.param(*cell, marks=pytest.mark.variant)
            for cell in WALK
            if cell not in (*_IN_TEST, *_IN_LONG)
        ),
    ],
)
def test_a_run_whose_environment_fails_goes_on_and_counts_no_crash(stage: Stage, what: str, how: str) -> None:
    WALK[what, how](stage)
    assert stage.end() == 0, stage.story()
    assert stage.checkpoints()[-1] == "step_000003"
    crashes = [event for event in stage.events("crash") if event["kind"] != "environment"]
    # The rank's own, where it was to die after its saves.
    assert all("exit 3" in event["detail"] for event in crashes), stage.story()


def test_each_cell_of_the_table_is_walked_or_names_the_test_that_shows_it() -> None:
    text = (_ROOT / "docs/preemption.md").read_text().partition("## A failing environment")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    head, _, *table = rows
    assert head[1:] == ["fails", "hangs", "lies"]
    assert all(len(row) == 4 and all(row) for row in table)
    # A dash: there is no such case.
    cells = {
        (row[0], how) for row in table for how, text in zip(head[1:], row[1:], strict=True) if text != "–"
    }
    assert cells == WALK.keys() | SHOWN.keys()
    assert not WALK.keys() & SHOWN.keys()
    for place in SHOWN.values():
        file, _, name = place.partition("::")
        assert re.search(rf"^def {name}\(", (_ROOT / "tests" / file).read_text(), re.MULTILINE), place
