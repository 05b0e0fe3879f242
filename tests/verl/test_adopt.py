import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.verl.verl_steps import make_directory, make_step
from verl_slurm.base.errors import Fenced, NoRoom
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import Entry, list_tree
from verl_slurm.checkpoint.decide.storage import Need, Room
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.verl import adopt as module, shards, step_copying
from verl_slurm.verl.adopt import AdoptedStep, adopt_steps, is_adopted, plan_adoption
from verl_slurm.verl.shards import judge_all, judge_step
from verl_slurm.verl.step_copying import copy_files, how_to_copy

pytestmark = pytest.mark.torch


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir(mode=0o700)
    paths.run_yaml.write_bytes(b"name: run\n")
    return paths


def plan(directory: Path, run: RunPaths, **how: object) -> list[AdoptedStep]:
    judged = judge_all(directory)
    committed = [info for info in list_checkpoints(run) if info.kind == "committed"]
    words = {"entry": "sft", "world_size": 2, "keep_last": 3} | how
    return plan_adoption(judged, committed, **words)  # type: ignore[arg-type]


def names(run: RunPaths) -> list[str]:
    return [info.name for info in list_checkpoints(run) if info.kind == "committed"]


def everything(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()
    }


def test_whole_steps_become_checkpoints_of_the_run_that_verify_and_hold_the_same_bytes(
    verl_dir: Path, run: RunPaths
) -> None:
    before = everything(verl_dir)
    done = adopt_steps(run, plan(verl_dir, run))
    assert [one.saved and one.saved.name for one in done] == ["step_000006", "step_000004"]
    assert names(run) == ["step_000006", "step_000004"]
    for step in (4, 6):
        final = run.checkpoint(step)
        assert verify(final).ok
        assert everything(final / f"global_step_{step}") == everything(verl_dir / f"global_step_{step}")
        assert (final / "latest_checkpointed_iteration.txt").read_text() == str(step)
        manifest = read_manifest(final)
        assert (manifest.guest, manifest.world_size, manifest.attempt) == ("verl", 2, 0)
    assert everything(verl_dir) == before
    assert run.latest.read_text() == "step_000006\n"
    assert list((run.root / "work").iterdir()) == []


def test_the_checkpoint_is_a_directory_that_verls_own_tools_can_use(verl_dir: Path, run: RunPaths) -> None:
    adopt_steps(run, plan(verl_dir, run))
    inside = judge_all(run.checkpoint(6))
    assert [(one.step, one.ok) for one in inside] == [(6, True)]


def test_a_copy_is_independent_of_the_original(verl_dir: Path, run: RunPaths) -> None:
    adopt_steps(run, plan(verl_dir, run))
    make_step(verl_dir, 6, world=2)  # plain verl saves the step again, in place
    os.truncate(verl_dir / "global_step_6" / "data_0.pt", 1)
    assert verify(run.checkpoint(6)).ok


def test_a_hard_link_is_the_same_file_and_takes_no_room(
    verl_dir: Path, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "room_for", lambda *_: pytest.fail("asked for room"))
    (done, *_) = adopt_steps(run, plan(verl_dir, run), link=True)
    assert (done.how, done.choice) == ("link", "adopted")
    shard = "global_step_6/model_world_size_2_rank_0.pt"
    assert (run.checkpoint(6) / shard).samefile(verl_dir / shard)
    assert verify(run.checkpoint(6)).ok


def test_adopting_twice_finds_it_done(verl_dir: Path, run: RunPaths) -> None:
    adopt_steps(run, plan(verl_dir, run))
    before = everything(run.root)
    again = plan(verl_dir, run)
    assert [row.choice for row in again] == ["there", "there"]
    assert adopt_steps(run, again) == []
    assert everything(run.root) == before
    assert is_adopted(run, judge_step(verl_dir / "global_step_6"))


def test_a_step_of_which_the_run_has_another_checkpoint_is_left_and_said(
    verl_dir: Path, run: RunPaths
) -> None:
    adopt_steps(run, plan(verl_dir, run))
    (verl_dir / "global_step_6" / "huggingface" / "merges.txt").write_text(
        "longer than before, much longer\n"
    )
    (verl_dir / "global_step_6" / "huggingface" / "merges.txt").chmod(0o644)
    one = judge_step(verl_dir / "global_step_6")
    assert not is_adopted(run, one)
    assert "another" in plan(verl_dir, run, another={6})[0].why


def test_what_is_broken_is_listed_with_its_reason_and_stays_where_it_is(
    verl_dir: Path, run: RunPaths
) -> None:
    os.truncate(verl_dir / "global_step_6" / "data_1.pt", 5)
    before = everything(verl_dir)
    rows = plan(verl_dir, run)
    assert [(row.choice, row.judged.step) for row in rows] == [("broken", 6), ("adopt", 4)]
    assert rows[0].why.startswith("data_1.pt")
    adopt_steps(run, rows)
    assert names(run) == ["step_000004"]
    assert everything(verl_dir) == before


def test_another_number_of_ranks_or_another_trainer_is_refused_by_name(verl_dir: Path, run: RunPaths) -> None:
    assert "saved by 2 ranks, the run has 4" in plan(verl_dir, run, world_size=4)[0].why
    assert "sft trainer" in plan(verl_dir, run, entry="ppo")[0].why


def test_what_retention_would_drop_at_once_is_not_copied_unless_asked(tmp_path: Path, run: RunPaths) -> None:
    directory = make_directory(tmp_path / "d", 2, 4, 6, 8)
    assert [row.choice for row in plan(directory, run, keep_last=2)] == ["adopt", "adopt", "old", "old"]
    assert [row.choice for row in plan(directory, run, keep_last=1)] == ["adopt", "adopt", "old", "old"]
    kept = [row.choice for row in plan(directory, run, keep_last=2, keep_every=4)]
    assert kept == ["adopt", "adopt", "adopt", "old"]
    assert {row.choice for row in plan(directory, run, keep_last=2, take_all=True)} == {"adopt"}


def test_nothing_is_copied_where_it_would_not_fit(
    verl_dir: Path, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path, need: Need) -> Room:
        return Room(enough=False, reason="1 MB free")

    monkeypatch.setattr(module, "room_for", full)
    with pytest.raises(NoRoom, match="--link"):
        adopt_steps(run, plan(verl_dir, run))
    assert names(run) == []
    assert list((run.root / "work").iterdir()) == []


def test_a_disk_that_fills_up_in_the_middle_leaves_what_was_whole_and_nothing_else(
    verl_dir: Path, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filled(source: Path, target: Path, *args: object, **kwargs: object) -> None:
        if source.name == "global_step_4":
            target.mkdir()
            (target / "half").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")
        copy_files(source, target, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "copy_files", filled)
    with pytest.raises(NoRoom):
        adopt_steps(run, plan(verl_dir, run))
    assert names(run) == ["step_000006"]
    assert [info.kind for info in list_checkpoints(run)] == ["committed"]
    assert list((run.root / "work").iterdir()) == []


@pytest.mark.parametrize("at", ["copy_files", "judge_step", "commit_tree"])
def test_an_interruption_at_any_stage_leaves_nothing_half_made(
    verl_dir: Path, run: RunPaths, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    original: Callable[..., object] = getattr(module, at)

    def interrupted(*args: object, **kwargs: object) -> object:
        if at == "copy_files":
            original(*args, **kwargs)
        raise KeyboardInterrupt

    rows = plan(verl_dir, run)
    monkeypatch.setattr(module, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        adopt_steps(run, rows)
    assert list_checkpoints(run) == []
    assert list((run.root / "work").iterdir()) == []
    monkeypatch.undo()
    adopt_steps(run, rows)
    assert names(run) == ["step_000006", "step_000004"]


def test_what_a_killed_adoption_left_is_removed_by_the_next_one(verl_dir: Path, run: RunPaths) -> None:
    left = run.root / "work" / "adopt.0123456789abcdef" / "global_step_6"
    left.mkdir(parents=True)
    (left / "data_0.pt").write_text("half")
    staging = run.checkpoints / ".step_000006.0123456789abcdef.tmp"
    staging.mkdir(parents=True)
    adopt_steps(run, plan(verl_dir, run))
    assert list((run.root / "work").iterdir()) == []
    assert not staging.exists()


def test_a_step_that_changes_while_it_is_copied_is_not_taken(
    verl_dir: Path, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = plan(verl_dir, run)

    def changing(source: Path, target: Path, *args: object, **kwargs: object) -> None:
        copy_files(source, target, *args, **kwargs)  # type: ignore[arg-type]
        if source.name == "global_step_6":
            shard = target / "model_world_size_2_rank_0.pt"
            data = bytearray(shard.read_bytes())
            data[len(data) // 3] ^= 4
            shard.write_bytes(data)

    monkeypatch.setattr(module, "copy_files", changing)
    first, second = adopt_steps(run, rows)
    assert "not as it was judged" in first.why
    assert second.saved is not None
    assert names(run) == ["step_000004"]


def test_a_step_that_was_removed_since_it_was_judged_does_not_keep_the_others_out(
    verl_dir: Path, run: RunPaths
) -> None:
    rows = plan(verl_dir, run)
    shutil.rmtree(verl_dir / "global_step_6")
    first, second = adopt_steps(run, rows)
    assert first.choice == "failed"
    assert second.saved is not None


def test_a_file_that_became_a_link_since_it_was_judged_is_not_followed(verl_dir: Path, run: RunPaths) -> None:
    rows = plan(verl_dir, run)
    shard = verl_dir / "global_step_6" / "data_0.pt"
    shard.unlink()
    shard.symlink_to("/etc/passwd")
    for link in (False, True):
        first, _ = adopt_steps(run, rows, link=link)
        assert first.choice == "failed"
        assert "step_000006" not in names(run)
        shutil.rmtree(run.checkpoints)


@pytest.mark.parametrize("whose", ["theirs", "writable", "ours"])
@pytest.mark.parametrize("link", [False, True])
def test_a_step_that_was_exchanged_since_it_was_judged_is_not_taken(
    verl_dir: Path, run: RunPaths, whose: str, link: bool
) -> None:
    """Whole and of the same sizes, as somebody who may rename in the directory puts it there."""
    rows = plan(verl_dir, run)
    judged = verl_dir / "global_step_6"
    shutil.copytree(judged, verl_dir / "other")  # with the times of the original
    judged.rename(verl_dir / "away")
    (verl_dir / "other").rename(judged)
    shard = judged / "extra_state_world_size_2_rank_0.pt"
    if whose == "theirs":
        if os.geteuid() != 0:
            pytest.skip("NOT RUN: only root can give a file away")
        os.chown(shard, 65534, 65534)
    elif whose == "writable":
        shard.chmod(0o666)
    else:
        assert judge_step(judged).ok
    first, second = adopt_steps(run, rows, link=link)
    assert "not the file that was judged" in first.why
    assert second.saved is not None
    assert names(run) == ["step_000004"]


def test_a_file_that_is_written_while_it_is_copied_is_not_taken(
    verl_dir: Path, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = plan(verl_dir, run)
    merges = verl_dir / "global_step_6" / "huggingface" / "merges.txt"
    copy = step_copying._copy

    def meanwhile(fd: int, target: Path, *args: object) -> None:
        copy(fd, target, *args)  # type: ignore[arg-type]
        if target.name == merges.name and target.parent.parent.name == "global_step_6":
            merges.write_text("#version: 0.3\n")

    monkeypatch.setattr(step_copying, "_copy", meanwhile)
    first, second = adopt_steps(run, rows)
    assert "not the file that was judged" in first.why
    assert second.saved is not None


def test_a_file_that_is_exchanged_while_it_is_judged_is_not_called_good(
    verl_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, step = "data_0.pt", verl_dir / "global_step_6"

    def then_exchanged(root: int, most: int) -> list[Entry]:
        found = list_tree(root, most)
        shutil.copy2(step / name, verl_dir / "other")
        os.replace(verl_dir / "other", step / name)
        return found

    monkeypatch.setattr(shards, "list_tree", then_exchanged)
    assert [(p.path, p.what) for p in judge_step(step).problems] == [(name, "changed while it was judged")]


def test_a_start_of_the_run_meanwhile_fences_the_adoption(
    verl_dir: Path, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starting(*args: object, **kwargs: object) -> None:
        copy_files(*args, **kwargs)  # type: ignore[arg-type]
        take_attempt(run, job_id="7", restart=0)

    monkeypatch.setattr(module, "copy_files", starting)
    with pytest.raises(Fenced):
        adopt_steps(run, plan(verl_dir, run))
    assert names(run) == []


def test_a_run_that_had_its_attempts_signs_with_the_last_one(verl_dir: Path, run: RunPaths) -> None:
    take_attempt(run, job_id="7", restart=0)
    adopt_steps(run, plan(verl_dir, run))
    assert read_manifest(run.checkpoint(6)).attempt == 1


def test_modes_of_the_copy_are_private_and_those_of_the_original_stay(verl_dir: Path, run: RunPaths) -> None:
    adopt_steps(run, plan(verl_dir, run))
    for path in run.checkpoint(6).rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert (verl_dir / "global_step_6" / "data_0.pt").stat().st_mode & 0o777 == 0o644


def test_what_can_be_cloned_is_said_beforehand_and_what_cannot_is_copied(
    verl_dir: Path, tmp_path: Path
) -> None:
    target = tmp_path / "t"
    target.mkdir()
    assert how_to_copy(verl_dir / "global_step_6", target) in ("clone", "copy")
    assert how_to_copy(verl_dir / "not_there", target) == "copy"
    assert list(target.iterdir()) == []
    judged = judge_step(verl_dir / "global_step_6").identities
    files = {name: judged[name] for name in ("data_0.pt", "huggingface/merges.txt")}
    copy_files(verl_dir / "global_step_6", target / "c", files, "clone")
    assert (target / "c" / "data_0.pt").read_bytes() == (
        verl_dir / "global_step_6" / "data_0.pt"
    ).read_bytes()


def test_a_file_system_without_copies_in_the_kernel_is_read_and_written(
    verl_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuses)
    read: list[int] = []
    name = "model_world_size_2_rank_0.pt"
    files = {name: judge_step(verl_dir / "global_step_6").identities[name]}
    copy_files(verl_dir / "global_step_6", tmp_path / "c", files, "copy", on_bytes=read.append)
    assert (tmp_path / "c" / name).read_bytes() == (verl_dir / "global_step_6" / name).read_bytes()
    assert sum(read) == (tmp_path / "c" / name).stat().st_size


def test_the_plan_names_every_step_once(verl_dir: Path, run: RunPaths) -> None:
    rows = plan(verl_dir, run)
    assert [row.judged.step for row in rows] == [6, 4]
    assert (
        plan_adoption([replace(rows[0].judged)], [], entry="sft", world_size=2, keep_last=1)[0].choice
        == "adopt"
    )
