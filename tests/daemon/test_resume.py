"""Where a restart starts from: what was named, once; then the newest that verifies."""

import asyncio
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.lead import resume
from verl_slurm_daemon.lead.attempt_start import ENVIRONMENT
from verl_slurm_daemon.lead.resume import ResumePoint, find_resume_point, read_back, wait_for_checkpoints

from tests.builders import cold_tier, run_config, write_config
from tests.checkpoint.conftest import STREWN, leaves, manifest_of, owns_it, stage, strew
from tests.checkpoint.sealed import KEY, KEYS, OTHER, save_sealed
from tests.journals import append_event, read_events
from verl_slurm.base.errors import CheckpointsAbsent, CheckpointsLost, Fenced, KeyRefused, TierError
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir
from verl_slurm.base.keys import Keyring, new_key_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.retention import plan_prune
from verl_slurm.checkpoint.store import verify as verify_module
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.commit import commit
from verl_slurm.checkpoint.store.pruning import apply_prune
from verl_slurm.checkpoint.store.scrub import scrub_one
from verl_slurm.checkpoint.tiers.mover import sync
from verl_slurm.config.load import load_resolved
from verl_slurm.config.schema import CheckpointConfig
from verl_slurm.runtime_state.segment import HEAD_BYTES


def save(paths: RunPaths, step: int, safe_point: int = 0, **changes: object) -> Path:
    private_dir(paths.root)
    staging = stage(paths, step, safe_point)
    return commit(staging, manifest_of(staging, **changes), attempt_check=owns_it)


def ask_once(paths: RunPaths) -> None:
    """What `submit` does where `resume_from` is not auto."""
    private_dir(paths.control)
    paths.resume_once.write_bytes(b"")


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    private_dir(paths.root)
    take_attempt(paths, job_id="1", restart=0)
    return paths


def test_the_newest_checkpoint_that_verifies_is_taken(run: RunPaths) -> None:
    save(run, 2)
    newest = save(run, 4, 3)
    assert find_resume_point(run, "auto", 1).name == newest.name


def test_a_named_checkpoint_counts_for_one_start_and_newer_ones_are_set_aside(run: RunPaths) -> None:
    named, newer = save(run, 2), save(run, 4)
    ask_once(run)
    assert find_resume_point(run, named.name, 1).name == named.name
    assert not newer.exists()
    run.resume_once.unlink()
    later = save(run, 3)
    assert find_resume_point(run, named.name, 1).name == later.name


def test_null_starts_from_nothing_once_and_destroys_nothing(run: RunPaths) -> None:
    old = save(run, 4)
    ask_once(run)
    assert find_resume_point(run, None, 1).name == ""
    assert len(list(run.quarantine.glob(f"{old.name}.*"))) == 2, "the checkpoint and the reason"


def test_a_checkpoint_of_another_run_is_copied_even_over_ours_of_that_name(
    run: RunPaths, tmp_path: Path
) -> None:
    other = RunPaths(tmp_path / "other")
    theirs = save(other, 4, created_utc="2020-02-02T00:00:00Z")
    ours = save(run, 4)
    private_dir(run.ledger)
    run.ledger_segment(1, 0).write_bytes(b"sampled by other weights")
    ask_once(run)
    assert find_resume_point(run, str(theirs), 1).name == ours.name
    assert b"2020-02-02" in (ours / "manifest.json").read_bytes()
    assert list(run.ledger.iterdir()) == []
    assert len(list(run.root.glob("ledger.before.*"))) == 1


@pytest.mark.parametrize("how", ["gone", "not mounted", "EIO", "name"])
def test_a_named_checkpoint_that_is_away_is_waited_for(
    run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Of another run, which may prune it or lie on another file system; or ours, with RUN/checkpoints not mounted."""
    theirs = save(RunPaths(tmp_path / "other"), 4)
    ask_once(run)
    wanted, real = "step_000004" if how == "name" else str(theirs), os.lstat
    with monkeypatch.context() as patch:
        if how == "EIO":

            def fails(path: Path, **more: Any) -> os.stat_result:
                if Path(path) == theirs:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
                return real(path, **more)

            patch.setattr(os, "lstat", fails)
        aside = theirs if how == "gone" else tmp_path / "other"
        if how != "EIO":
            aside.rename(tmp_path / "aside")
        with pytest.raises(OSError, match="step_000004") as caught:
            find_resume_point(run, wanted, 1)
        if how != "EIO":
            assert "verl-slurm submit" in str(caught.value)
            (tmp_path / "aside").rename(aside)
    assert find_resume_point(run, str(theirs), 1).name == theirs.name


def test_strays_in_a_named_checkpoint_of_another_run_are_neither_moved_nor_copied(
    run: RunPaths, tmp_path: Path
) -> None:
    theirs = save(RunPaths(tmp_path / "other"), 4)
    strew(theirs)
    ask_once(run)
    point = find_resume_point(run, str(theirs), 1)
    assert point.name == theirs.name
    assert any("they are not copied" in reason for reason in point.reasons)
    assert leaves(theirs) > STREWN
    assert not STREWN & leaves(run.checkpoints)


def test_strays_in_a_fresh_checkpoint_make_its_save_no_failure(run: RunPaths) -> None:
    only = save(run, 4)
    strew(only)
    found = read_back(run, only.name, 1)
    assert found.good
    assert "moved to" in found.detail
    strew(only)
    point = find_resume_point(run, "auto", 1)
    assert (point.name, point.strays) == (only.name, point.reasons[-1])


def sibling(run: RunPaths, step: int) -> Path:
    """A checkpoint of another run, which has another id."""
    other = RunPaths(private_dir(run.root.with_name("sibling")))
    other.run_id.write_text("fedcba9876543210\n")
    return save(other, step)


def test_a_siblings_checkpoint_in_the_place_of_ours_is_set_aside_and_named(run: RunPaths) -> None:
    own, over = save(run, 2), save(run, 4)
    shutil.copytree(sibling(run, 4), over, dirs_exist_ok=True)
    assert {info.name: info.kind for info in list_checkpoints(run)} == {
        own.name: "committed",
        over.name: "foreign",
    }
    assert not read_back(run, over.name, 1).good
    shutil.copytree(sibling(run, 5), run.checkpoints / "step_000005")
    point = find_resume_point(run, "auto", 1)
    assert point.name == own.name
    assert any("of another run, fedcba9876543210" in reason for reason in point.reasons)
    assert [info.kind for info in list_checkpoints(run)] == ["committed", "quarantined", "quarantined"]


def test_a_siblings_checkpoint_that_was_asked_for_counts_as_ours_from_then_on(run: RunPaths) -> None:
    theirs = sibling(run, 4)
    # Also where it was copied there by hand before.
    shutil.copytree(theirs, private_dir(run.checkpoints) / theirs.name)
    run.run_id.write_text("0123456789abcdef\n")
    ask_once(run)
    assert find_resume_point(run, str(theirs), 1).name == theirs.name
    run.resume_once.unlink()
    assert find_resume_point(run, "auto", 1).name == theirs.name
    assert [info.kind for info in list_checkpoints(run)] == ["committed"]
    shutil.copytree(sibling(run, 6), run.checkpoints / "step_000006")
    assert find_resume_point(run, "auto", 1).name == theirs.name, "one of them was adopted, not the run"


def test_a_tier_gives_back_ours_where_a_siblings_lies_in_its_place(run: RunPaths, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    config = write_config(run, root=tmp_path, tiers=(cold_tier(private_dir(tmp_path / "cold")),))
    own = save(run, 4)
    assert sync(run, config).ok
    append_event(run, "verified", name=own.name)
    digest = (own / "manifest.json").read_bytes()
    shutil.copytree(sibling(run, 4), own, dirs_exist_ok=True)
    assert find_resume_point(run, "auto", 1, has_tiers=True).name == own.name
    assert (own / "manifest.json").read_bytes() == digest


def test_an_attempt_that_lost_the_run_tidies_up_nothing(run: RunPaths) -> None:
    save(run, 2)
    half_made = stage(run, 4)
    take_attempt(run, job_id="2", restart=0)
    with pytest.raises(Fenced):
        find_resume_point(run, "auto", 1)
    assert half_made.directory.exists(), "the save of the newer attempt"


def test_a_new_attempt_alone_is_no_progress_and_a_rollout_is(run: RunPaths) -> None:
    private_dir(run.ledger)
    before = find_resume_point(run, "auto", 1).progress
    run.ledger_segment(1, 0).write_bytes(bytes(HEAD_BYTES))
    assert find_resume_point(run, "auto", 1).progress == before
    run.ledger_segment(1, 0).write_bytes(bytes(HEAD_BYTES + 1))
    assert find_resume_point(run, "auto", 1).progress != before


def test_a_fresh_checkpoint_is_read_back_and_a_damaged_one_set_aside(run: RunPaths) -> None:
    good, bad = save(run, 2), save(run, 4)
    (bad / "actor/__0_0.distcp").write_bytes(b"torn")
    assert read_back(run, good.name, 1).good
    found = read_back(run, bad.name, 1)
    assert not found.good
    assert "actor/__0_0.distcp" in found.detail
    assert not bad.exists()
    assert good.exists()


@pytest.mark.parametrize("moment", ["before it is opened", "while it is read"])
def test_one_that_the_retention_took_meanwhile_is_pruned_and_not_corrupt(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    old = save(run, 2)
    save(run, 4)
    plan = plan_prune(list_checkpoints(run), 1)

    def first(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        apply_prune(run, plan)
        return real(*args, **options)

    if moment.startswith("before"):
        apply_prune(run, plan)
    else:
        real = verify_module.list_tree
        monkeypatch.setattr(verify_module, "list_tree", first)
    found = read_back(run, old.name, 1)
    assert (found.good, found.pruned) == (False, True)
    assert not run.quarantine.exists()


@pytest.mark.parametrize("why", ["it was the newest", "the scrub set it aside"])
def test_one_that_is_gone_for_another_reason_is_not_called_pruned(run: RunPaths, why: str) -> None:
    older, newer = save(run, 2), save(run, 4)
    if why.startswith("it"):
        gone = newer
        shutil.rmtree(gone)
    else:
        gone = older
        (gone / "metadata.json").write_bytes(b"[]")
        assert scrub_one(gone, set_aside=True).set_aside
    found = read_back(run, gone.name, 1)
    assert (found.good, found.pruned) == (False, False)


def test_a_checkpoint_that_cannot_be_read_now_is_not_set_aside(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save(run, 2)

    def failing(fd: int, buffers: object, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        found = read_back(run, checkpoint.name, 1)
    assert not found.good
    assert "Input/output error" in found.detail
    assert checkpoint.exists()


def test_a_newest_that_others_may_write_is_waited_for_and_taken_once_it_is_closed(run: RunPaths) -> None:
    save(run, 2)
    newest = save(run, 4)
    opened = [newest, *newest.rglob("*")]
    for path in opened:  # chmod -R g+w
        path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(ENVIRONMENT, match="chmod -R go-w"):
        find_resume_point(run, "auto", 1)
    for path in opened:
        path.chmod(path.stat().st_mode & ~0o022)
    assert find_resume_point(run, "auto", 1).name == newest.name


def test_with_a_key_only_what_is_signed_with_it_is_resumed_from_and_the_rest_stays(run: RunPaths) -> None:
    signed, planted = save_sealed(run, 2), save_sealed(run, 4, None)
    assert find_resume_point(run, "auto", 1, KEYS).name == signed.name
    assert planted.is_dir()
    assert read_back(run, signed.name, 1, KEYS).good
    found = read_back(run, planted.name, 1, KEYS)
    assert not found.good
    assert "not signed" in found.detail
    assert planted.is_dir()


@pytest.mark.parametrize("keys", [None, Keyring(OTHER)])
def test_what_needs_a_key_that_is_not_there_is_refused_before_any_rank_starts(
    run: RunPaths, keys: Keyring | None
) -> None:
    only = save_sealed(run, 2)
    for resume_from in ("auto", only.name):
        with pytest.raises(KeyRefused) as caught:
            find_resume_point(run, resume_from, 1, keys)
        assert KEY.id in caught.value.one_line()
    assert only.is_dir()


@pytest.fixture
def archived(run: RunPaths, tmp_path: Path) -> RunPaths:
    """step_000004 in an archive and nowhere else."""
    private_dir(tmp_path / "cold")
    cold = cold_tier(tmp_path / "cold")
    config = write_config(run, root=tmp_path, tiers=(cold,))
    path = save(run, 4)
    assert sync(run, config).ok
    path.rename(tmp_path / "lost")
    return run


def test_what_only_a_tier_has_is_brought_back(archived: RunPaths) -> None:
    point = find_resume_point(archived, "auto", 1, has_tiers=True)
    assert point.name == "step_000004"
    assert "asked the run's tiers" in point.reasons
    assert read_back(archived, point.name, 1).good


def test_a_newest_that_only_a_tier_has_is_brought_back_over_an_older_one(archived: RunPaths) -> None:
    save(archived, 2)
    # By a user's word: what a tier has, is of the path that was left.
    assert find_resume_point(archived, "auto", 1, has_tiers=True).name == "step_000002"
    append_event(archived, "verified", name="step_000004")
    assert find_resume_point(archived, "auto", 1, has_tiers=True).name == "step_000004"
    assert _warned(archived, "step_000004") == []


def test_a_newest_that_no_tier_gives_back_is_missed(archived: RunPaths, tmp_path: Path) -> None:
    save(archived, 2)
    assert sync(archived, load_resolved(archived.run_yaml)).ok
    append_event(archived, "verified", name="step_000004")
    for path in (tmp_path / "cold").rglob("step_000004"):
        shutil.rmtree(path)
    assert find_resume_point(archived, "auto", 1, has_tiers=True).name == "step_000002"
    assert "step_000004 was verified and is gone" in _warned(archived, "step_000002")[0]


@pytest.mark.parametrize("records", [None, b"", b'{"tiers": {}}'])
def test_a_tier_is_asked_for_a_newest_of_which_the_record_is_gone(
    archived: RunPaths, tmp_path: Path, records: bytes | None
) -> None:
    save(archived, 2)
    append_event(archived, "verified", name="step_000004")
    archived.tier_records.unlink()
    if records is not None:
        archived.tier_records.write_bytes(records)
    (tmp_path / "cold").rename(tmp_path / "unmounted")
    with pytest.raises(OSError, match="does not answer"):
        find_resume_point(archived, "auto", 1, has_tiers=True)
    (tmp_path / "unmounted").rename(tmp_path / "cold")
    assert find_resume_point(archived, "auto", 1, has_tiers=True).name == "step_000004"


@pytest.fixture
def put_back(run: RunPaths, tmp_path: Path) -> RunPaths:
    """A copy of the run from its step 2, in its place; a tier has its step 6."""
    private_dir(tmp_path / "cold")
    config = write_config(run, root=tmp_path, tiers=(cold_tier(tmp_path / "cold"),))
    run.run_id.write_text("0123456789abcdef\n")
    for step in (2, 6):
        save(run, step)
        append_event(run, "verified", attempt=1, name=f"step_{step:06d}")
        if step == 2:
            shutil.copytree(run.root, tmp_path / "backup")
    assert sync(run, config).ok
    run.root.rename(tmp_path / "lost")
    (tmp_path / "backup").rename(run.root)
    return run


def test_a_run_that_was_put_back_goes_on_from_what_its_tier_has_of_its_own_future(put_back: RunPaths) -> None:
    assert sync(put_back, load_resolved(put_back.run_yaml)).ok  # the mover reads back what it meets there
    point = find_resume_point(put_back, "auto", 1, has_tiers=True)
    assert point.name == "step_000006"
    assert (
        "step_000006 is newer than step_000002, and the journal never told of it: "
        "RUN was put back to a former copy" in point.reasons
    )
    assert read_back(put_back, point.name, 1).good


def test_what_a_tier_has_of_a_path_that_the_user_left_is_not_brought_back(put_back: RunPaths) -> None:
    append_event(put_back, "started", attempt=1)
    ask_once(put_back)
    assert find_resume_point(put_back, "step_000002", 1, has_tiers=True).name == "step_000002"
    put_back.resume_once.unlink()
    assert find_resume_point(put_back, "auto", 1, has_tiers=True).name == "step_000002"


@pytest.mark.parametrize("in_place", [False, True])
def test_a_start_asks_a_tier_for_what_nobody_misses_once_and_goes_on_without_it(
    put_back: RunPaths, tmp_path: Path, in_place: bool
) -> None:
    if in_place:
        append_event(put_back, "restart", attempt=1, number=0, resume="step_000002")
    else:
        (tmp_path / "cold").rename(tmp_path / "unmounted")
    assert find_resume_point(put_back, "auto", 1, has_tiers=True).name == "step_000002"


def _warned(run: RunPaths, name: str) -> list[str]:
    """What a start from there warns of."""
    point = ResumePoint(name, (), name)
    asyncio.run(
        wait_for_checkpoints(
            lambda: point, run_config(), Journal(run, attempt=1, job_id="1"), asyncio.Event()
        )
    )
    return [event["text"] for event in read_events(run) if event["event"] == "warning"]


def test_a_start_from_an_older_checkpoint_warns_unless_the_user_named_it(run: RunPaths) -> None:
    append_event(run, "verified", name="step_000004")
    ask_once(run)
    assert _warned(run, "step_000002") == []
    run.resume_once.unlink()
    assert _warned(run, "step_000002") == [
        "step_000004 was verified and is gone: the run goes back to step_000002, and does steps 3 and 4 again"
    ]


def test_a_run_that_was_told_to_begin_from_nothing_is_not_brought_back(archived: RunPaths) -> None:
    ask_once(archived)
    assert find_resume_point(archived, None, 1, has_tiers=True).name == ""
    archived.resume_once.unlink()
    assert find_resume_point(archived, None, 1, has_tiers=True).name == ""
    save(archived, 1)
    assert find_resume_point(archived, None, 1, has_tiers=True).name == "step_000001"


@pytest.mark.parametrize("mount_point", [False, True])
def test_a_run_is_not_begun_afresh_while_its_tier_is_away(
    archived: RunPaths, tmp_path: Path, mount_point: bool
) -> None:
    (tmp_path / "cold").rename(tmp_path / "unmounted")
    if mount_point:  # it stays, and is empty
        (tmp_path / "cold").mkdir()
    with pytest.raises(OSError, match="does not answer"):  # waited for as storage is, and then held
        find_resume_point(archived, "auto", 1, has_tiers=True)


def test_a_tier_gives_back_what_is_signed_and_nothing_else(run: RunPaths, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    key = new_key_file(tmp_path / "run.key")
    private_dir(tmp_path / "cold")
    cold = cold_tier(tmp_path / "cold")
    config = write_config(run, root=tmp_path, tiers=(cold,), key_file=tmp_path / "run.key")
    made = [save_sealed(run, 2, key), save_sealed(run, 4, None)]
    # As somebody who can write to the tier, and has not the key.
    assert sync(run, msgspec.structs.replace(config, checkpoint=CheckpointConfig())).ok
    for path in made:
        path.rename(tmp_path / path.name)
    run.tier_records.unlink()
    point = find_resume_point(run, "auto", 1, Keyring(key), has_tiers=True)
    assert point.name == "step_000002"
    assert not run.checkpoint(4).exists()
    made[0].rename(tmp_path / "lost")
    for path in (Path(str(cold.path))).rglob(made[0].name):
        shutil.rmtree(path)
    with pytest.raises(TierError, match="nothing could be brought back"):
        find_resume_point(run, "auto", 1, Keyring(key), has_tiers=True)


def _waits(run: RunPaths, *, leaves: bool = False, mounts: bool = False) -> ResumePoint:
    """A start of a run whose directory of checkpoints is empty."""
    append_event(run, "verified", name="step_000004")
    looked: list[ResumePoint] = []

    def find() -> ResumePoint:
        if looked and mounts:
            save(run, 4)
        looked.append(find_resume_point(run, "auto", 1))
        return looked[-1]

    async def story() -> ResumePoint:
        leaving = asyncio.Event()
        if leaves:
            leaving.set()
        return await wait_for_checkpoints(find, run_config(), Journal(run, attempt=1, job_id="1"), leaving)

    return asyncio.run(story())


def test_a_directory_of_checkpoints_that_is_not_mounted_is_waited_for(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "IN_PLACE_S", (0.0, 0.0))
    assert _waits(run, mounts=True).name == "step_000004"


def test_a_run_whose_checkpoints_stay_away_is_refused_with_what_was_judged(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "IN_PLACE_S", (0.0, 0.0))
    with pytest.raises(CheckpointsAbsent, match="verified step_000004"):
        _waits(run)
    assert read_events(run)[-1]["reason"] == "there is no checkpoint yet"


def test_an_end_of_the_job_cuts_the_wait_for_checkpoints_short(run: RunPaths) -> None:
    with pytest.raises(InterruptedError):
        _waits(run, leaves=True)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_at_once(run: RunPaths) -> None:
    (save(run, 4) / "actor/__0_0.distcp").write_bytes(b"torn")
    with pytest.raises(CheckpointsLost):
        _waits(run)
    assert any("actor/__0_0.distcp" in event.get("reason", "") for event in read_events(run))
