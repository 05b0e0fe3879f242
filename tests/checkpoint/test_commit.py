import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.checkpoint.conftest import strew
from verl_slurm.base.errors import CheckpointCorrupt, Fenced
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.specification import Manifest, Topology
from verl_slurm.checkpoint.store import commit as door
from verl_slurm.checkpoint.store.commit import StagingDirectory, abort, begin, commit, seal, sweep
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.checkpoint.store.verify import read_manifest, verify

Save = Callable[..., Path]
Staged = Callable[..., tuple[StagingDirectory, Manifest]]

# Everything commit, seal and sweep ask the system to change or make durable.
OPERATIONS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "fchmod")


def nothing() -> None:
    """An attempt check that finds nothing wrong."""


def count_down(
    monkeypatch: pytest.MonkeyPatch, nth: int, act: Callable[[], None], operations: Sequence[str] = OPERATIONS
) -> list[int]:
    """Make the `nth` system operation from now on call `act` instead; returns the running count."""
    seen = [0]

    def wrap(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            seen[0] += 1
            if seen[0] == nth:
                act()
            return real(*args, **kwargs)

        return call

    for name in operations:
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    return seen


def test_a_committed_checkpoint_verifies_and_is_private(save: Save, paths: RunPaths) -> None:
    final = save(3, 7)
    assert final == paths.checkpoint(3, 7)
    assert verify(final).ok
    for path in [final, *final.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert paths.latest.read_text() == "step_000003_sp0007\n"
    assert sorted(p.name for p in paths.checkpoints.iterdir()) == ["latest", "step_000003_sp0007"]


@pytest.mark.long
@pytest.mark.scenario("P01")
def test_killed_at_any_operation_of_a_save_the_newest_verified_checkpoint_is_found(
    save: Save, staged: Staged, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1)
    nth, outcomes = 0, []
    while True:
        nth += 1
        pid = os.fork()
        if pid == 0:
            # In the child: die, without any handler running, at the nth operation of a whole save.
            code = 1
            try:
                count_down(monkeypatch, nth, lambda: os._exit(9))
                staging, manifest = staged(2)
                commit(staging, manifest, attempt_check=nothing)
                code = 0
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in {0, 9}
        choice = choose_resume(paths, "auto")
        assert choice.name in {"step_000001", "step_000002"}
        assert not choice.set_aside
        outcomes.append(choice.name)
        sweep(paths)
        left = {p.name for p in paths.checkpoints.iterdir()} - {"latest", "step_000001", "step_000002"}
        assert not left
        if code == 0:
            break
        if choice.name == "step_000002":
            os.rename(paths.checkpoint(2), paths.root / f"seen_{nth}")
    assert nth > 50
    # Once it is there it stays there: no later crash point loses it again.
    assert outcomes == sorted(outcomes)
    assert outcomes[-1] == "step_000002"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_of_any_operation_is_no_commit_or_a_whole_one(
    save: Save, staged: Staged, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    save(1)
    nth = 0
    while True:
        nth += 1
        staging, manifest = staged(2)

        def fail() -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            seen = count_down(patch, nth, fail)
            try:
                commit(staging, manifest, attempt_check=nothing)
                said_yes = True
            except OSError:
                said_yes = False
        if said_yes:
            assert verify(paths.checkpoint(2)).ok
        else:
            abort(staging)
        assert verify(paths.checkpoint(1)).ok
        assert choose_resume(paths, "auto").name in {"step_000001", "step_000002"}
        if paths.checkpoint(2).exists():
            os.rename(paths.checkpoint(2), paths.root / f"seen_{nth}")
        if seen[0] < nth:
            break
    assert nth > 10


@pytest.mark.parametrize("when", ["before the manifest", "between manifest and rename"])
def test_an_attempt_that_lost_the_run_cannot_commit(staged: Staged, paths: RunPaths, when: str) -> None:
    staging, manifest = staged(4)

    def check() -> None:
        if when == "before the manifest" or (staging.directory / "manifest.json").exists():
            raise Fenced("another attempt owns the run")

    with pytest.raises(Fenced):
        commit(staging, manifest, attempt_check=check)
    assert not paths.checkpoint(4).exists()
    assert not paths.latest.exists()


def test_a_verified_checkpoint_of_that_name_is_kept_and_the_new_one_dropped(
    save: Save, paths: RunPaths
) -> None:
    first = save(2)
    inode = first.stat().st_ino
    assert save(2, attempt=5) == first
    assert first.stat().st_ino == inode
    assert sorted(p.name for p in paths.checkpoints.iterdir()) == ["latest", "step_000002"]


def test_strays_in_a_verified_checkpoint_of_that_name_are_moved_out_of_it(
    save: Save, staged: Staged, paths: RunPaths
) -> None:
    first = save(1)
    strew(first)
    inode = first.stat().st_ino
    commit(*staged(1), attempt_check=nothing)
    assert verify(first).ok
    assert first.stat().st_ino == inode
    assert [path.name[:19] for path in paths.quarantine.iterdir() if path.is_dir()] == ["strays.step_000001."]


@pytest.mark.parametrize(
    "changes",
    [{"world_size": 1, "topology": Topology(dp=1)}, {"topology": Topology(dp=1, tp=2)}],
    ids=["fewer ranks", "another topology"],
)
def test_one_of_that_name_by_other_ranks_is_another_state_and_waits_in_quarantine(
    save: Save, paths: RunPaths, changes: dict[str, object]
) -> None:
    inode = save(2, 6, **changes).stat().st_ino
    final = save(2, 6)
    manifest = read_manifest(final)
    assert (manifest.world_size, manifest.topology) == (2, Topology(dp=2))
    (aside,) = (path for path in paths.quarantine.iterdir() if path.is_dir())
    assert aside.stat().st_ino == inode
    assert "another" in aside.with_name(f"{aside.name}.reason.json").read_text()
    assert sweep(paths) == []
    assert verify(final).ok
    os.rename(final, paths.root / "pruned")
    assert sweep(paths) == []
    assert not final.exists(), "what was replaced does not come back when its successor is gone"


def test_a_save_that_fails_while_it_replaces_one_of_other_ranks_puts_that_back(
    save: Save, staged: Staged, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save(2, 6, world_size=1, topology=Topology(dp=1))
    inode = old.stat().st_ino
    staging, manifest = staged(2, 6)
    real = os.rename

    def refuse(source: Path, target: Path) -> None:
        if Path(source) == staging.directory:
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="Input/output"):
        commit(staging, manifest, attempt_check=nothing)
    assert old.stat().st_ino == inode
    assert list(paths.quarantine.iterdir()) == []


@pytest.mark.parametrize("record", [b"", b"\xff", b"[", b'{"name": "../../x", "until_gone": "%s"}'])
def test_a_record_in_quarantine_that_makes_no_sense_moves_nothing(
    staged: Staged, paths: RunPaths, record: bytes
) -> None:
    staging, _ = staged(2)
    (paths.quarantine / "step_000002.abcdef01").mkdir(parents=True)
    name = staging.directory.name.encode()
    (paths.quarantine / "step_000002.abcdef01.reason.json").write_bytes(record.replace(b"%s", name))
    assert sweep(paths) == [staging.directory]
    assert (paths.quarantine / "step_000002.abcdef01").is_dir()


def test_a_damaged_checkpoint_of_that_name_goes_to_quarantine_first(save: Save, paths: RunPaths) -> None:
    (save(2) / "metadata.json").write_bytes(b"[]")
    assert verify(save(2)).ok
    reasons = list(paths.quarantine.glob("step_000002.*.reason.json"))
    assert len(reasons) == 1
    assert "metadata.json" in reasons[0].read_text()


def test_a_checkpoint_of_that_name_that_cannot_be_judged_is_left_alone(save: Save, staged: Staged) -> None:
    final = save(2)
    final.chmod(0o770)
    staging, manifest = staged(2)
    with pytest.raises(CheckpointCorrupt, match="cannot be judged"):
        commit(staging, manifest, attempt_check=nothing)
    final.chmod(0o700)
    assert verify(final).ok


@pytest.mark.parametrize("fault", ["unsealed file", "missing file", "grown file", "link", "required part"])
def test_a_tree_that_is_not_what_was_sealed_is_not_committed(
    staged: Staged, paths: RunPaths, fault: str
) -> None:
    staging, manifest = staged(2)
    victim = staging.directory / "actor/__0_0.distcp"
    if fault == "unsealed file":
        (staging.directory / "actor/__1_0.distcp").write_bytes(b"late")
    elif fault == "missing file":
        victim.unlink()
    elif fault == "grown file":
        victim.write_bytes(victim.read_bytes() + b"!")
    elif fault == "link":
        victim.rename(paths.root / "elsewhere")
        victim.symlink_to(paths.root / "elsewhere")
    else:
        (staging.directory / "scheduler.json").unlink()
        manifest = type(manifest)(
            **{f: getattr(manifest, f) for f in manifest.__struct_fields__ if f != "files"},
            files=tuple(e for e in manifest.files if e.path != "scheduler.json"),
        )
    with pytest.raises(CheckpointCorrupt) as caught:
        commit(staging, manifest, attempt_check=nothing)
    assert "scheduler.json" in str(caught.value) or "actor/__" in str(caught.value)
    assert not paths.checkpoint(2).exists()


def test_a_rename_that_worked_but_said_it_did_not_is_believed_only_by_its_manifest(
    staged: Staged, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def lost_reply(source: Path, target: Path) -> None:
        real(source, target)
        if Path(target) == paths.checkpoint(2):
            raise OSError(errno.ESTALE, "Stale file handle")

    staging, manifest = staged(2)
    monkeypatch.setattr(door.os, "rename", lost_reply)
    assert verify(commit(staging, manifest, attempt_check=nothing)).ok


def test_sealing_a_link_or_a_missing_file_or_without_an_fsync_is_refused(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = begin(paths, 1, 0)
    (paths.root / "secret").write_bytes(b"x")
    (staging.directory / "link").symlink_to(paths.root / "secret")
    (staging.directory / "a").write_bytes(b"x")
    for name in ("link", "missing"):
        with pytest.raises(OSError, match=name):
            seal(staging.directory, [name])
    with pytest.raises(ValueError, match=r"\.\."):
        seal(staging.directory, ["../secret"])

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        seal(staging.directory, ["a"])


def test_sweep_removes_staging_directories_and_nothing_else(
    save: Save, staged: Staged, paths: RunPaths
) -> None:
    save(1)
    staging, _ = staged(2)
    foreign = [
        paths.checkpoints / n for n in ("notes.txt", ".hidden", ".step_000001.tmp", "step_1.abcdef12.tmp")
    ]
    for path in foreign:
        path.write_bytes(b"mine")
    hint = paths.checkpoints / ".latest.0a0b0c0d.tmp"
    hint.write_bytes(b"")
    assert set(sweep(paths)) == {staging.directory, hint}
    assert all(path.exists() for path in foreign)
    assert verify(paths.checkpoint(1)).ok
    assert sweep(RunPaths(paths.root / "nowhere")) == []


def test_a_stale_hint_does_not_make_a_commit_fail(staged: Staged, paths: RunPaths) -> None:
    paths.latest.parent.mkdir(parents=True)
    paths.latest.mkdir()
    staging, manifest = staged(2)
    assert verify(commit(staging, manifest, attempt_check=nothing)).ok
