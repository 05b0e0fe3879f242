"""A directory of somebody else's, made a checkpoint."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import write_config
from verl_slurm.base.errors import CheckpointCorrupt, ConfigError, Fenced, PermissionRefused
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.specification import Guest, missing_parts, path_problem
from verl_slurm.checkpoint.store.commit import SavedCheckpoint, seal
from verl_slurm.checkpoint.store.loop_checkpoint import (
    LoopSave,
    clear_work,
    commit_tree,
    require_guest,
    sweep_work,
)
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.checkpoint.store.verify import read_manifest, verify


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(private_dir(tmp_path / "run"))
    write_config(paths)
    take_attempt(paths, job_id="1", restart=0)
    return paths


def written(paths: RunPaths, names: tuple[str, ...] = ("rank_0000.pt",), top: str = "guest") -> Path:
    """What a loop might have left in its work directory."""
    directory = clear_work(paths, 1) / top
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(name.encode() * 100)
    return directory


def saved(paths: RunPaths, step: int = 7, guest: Guest = "loop", **more: object) -> SavedCheckpoint:
    top = "guest" if guest == "loop" else f"global_step_{step}"
    if "parts" not in more:
        more["parts"] = {top: written(paths, top=top)}
    save = LoopSave(
        guest=guest, step=step, attempt=1, world_size=2, metrics={"loss": 0.5, "bad": float("nan")}
    )
    return commit_tree(paths, save, **more)  # type: ignore[arg-type]


def test_it_is_committed_private_and_whole_and_a_start_goes_on_from_it(paths: RunPaths) -> None:
    done = saved(paths)
    directory = paths.checkpoints / done.name
    verdict = verify(directory)
    assert verdict.ok, verdict.one_line()
    manifest = read_manifest(directory)
    assert (manifest.guest, manifest.step, manifest.world_size, manifest.topology.dp) == ("loop", 7, 2, 2)
    assert manifest.metrics == {"loss": 0.5}
    assert missing_parts(manifest) == []
    modes = {stat.S_IMODE(p.stat().st_mode) for p in directory.rglob("*") if p.is_file()}
    assert modes == {0o600}
    assert stat.S_IMODE((directory / "guest").stat().st_mode) == 0o700
    assert choose_resume(paths, "auto").name == done.name == "step_000007"
    assert done.num_bytes == verdict.num_bytes


def test_the_names_of_verl_and_of_torchs_distributed_checkpoints_are_allowed(paths: RunPaths) -> None:
    names = (
        "actor/model_world_size_2_rank_0.pt",
        "actor/huggingface/special_tokens_map.json",
        "data.pt",
        "sharded/.metadata",
        "sharded/__0_0.distcp",
    )
    assert [path_problem(name) for name in names] == [None] * len(names)
    directory = written(paths, names, top="global_step_7")
    done = saved(
        paths,
        guest="verl",
        parts={"global_step_7": directory},
        texts={"latest_checkpointed_iteration.txt": b"7"},
    )
    assert verify(paths.checkpoints / done.name).ok
    assert (paths.checkpoints / done.name / "latest_checkpointed_iteration.txt").read_bytes() == b"7"


def test_what_the_ranks_have_hashed_is_not_read_again(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = written(paths, ("rank_0000.pt", "rank_0001.pt"))
    entries = seal(directory.parent, ["guest/rank_0000.pt", "guest/rank_0001.pt"])
    asked: list[str] = []

    def noted(staging: Path, names: list[str]) -> object:
        asked.extend(names)
        return seal(staging, names)

    monkeypatch.setattr("verl_slurm.checkpoint.store.loop_checkpoint.door.seal", noted)
    done = saved(paths, parts={"guest": directory}, sealed=entries)
    assert not any(name.startswith("guest/") for name in asked)
    assert verify(paths.checkpoints / done.name).ok


def test_links_and_names_that_no_manifest_may_hold_are_refused_and_nothing_is_left(paths: RunPaths) -> None:
    for spoil in (
        lambda d: os.symlink("/etc/passwd", d / "link"),
        lambda d: os.mkfifo(d / "pipe"),
        lambda d: (d / "a name with spaces").write_bytes(b""),
    ):
        directory = written(paths)
        spoil(directory)
        with pytest.raises(CheckpointCorrupt, match="cannot be a checkpoint"):
            saved(paths, parts={"guest": directory})
    assert list(paths.checkpoints.iterdir()) == []


def test_directories_without_a_file_are_left_out(paths: RunPaths) -> None:
    directory = written(paths)
    (directory / "empty" / "deeper").mkdir(parents=True)
    assert verify(paths.checkpoints / saved(paths, parts={"guest": directory}).name).ok


def test_a_save_without_the_loops_own_directory_is_refused(paths: RunPaths) -> None:
    directory = written(paths, top="global_step_6")
    with pytest.raises(CheckpointCorrupt, match="global_step_7/: required"):
        saved(paths, guest="verl", parts={"global_step_6": directory})


def test_an_attempt_that_was_closed_commits_nothing_and_keeps_its_files(paths: RunPaths) -> None:
    directory = written(paths)
    take_attempt(paths, job_id="2", restart=0)
    with pytest.raises(Fenced):
        saved(paths, parts={"guest": directory})
    assert directory.exists()
    assert not paths.checkpoints.exists()


def test_only_the_same_kind_of_loop_with_as_many_ranks_goes_on_from_it(paths: RunPaths) -> None:
    directory = paths.checkpoints / saved(paths).name
    assert require_guest(directory, "loop", world_size=2).step == 7
    with pytest.raises(ConfigError, match="another kind of loop"):
        require_guest(directory, "verl")
    with pytest.raises(ConfigError, match=r"another number of ranks.*distributed.dp_size=2"):
        require_guest(directory, "loop", world_size=4)
    with pytest.raises(
        ConfigError, match="not one of verl_slurm.run.*found rank_0000.pt, expected index.json"
    ):
        require_guest(directory, "loop", needed="index.json", whose="verl_slurm.run")


def test_what_dead_attempts_left_is_swept(paths: RunPaths) -> None:
    written(paths)
    (paths.work(1).parent / "stray").write_bytes(b"")
    assert len(sweep_work(paths)) == 2
    assert list(paths.work(1).parent.iterdir()) == []
    assert sweep_work(RunPaths(paths.root / "nothing")) == []


@pytest.mark.scenario("SEC15")
@pytest.mark.parametrize("begin", [sweep_work, lambda paths: clear_work(paths, 1)], ids=["lead", "loop"])
def test_a_start_removes_nothing_that_a_link_in_the_place_of_work_leads_to(
    paths: RunPaths, tmp_path: Path, begin: Callable[[RunPaths], object]
) -> None:
    (precious := tmp_path / "precious" / "attempt_000001").mkdir(parents=True)
    paths.root.mkdir(exist_ok=True)
    (paths.root / "work").symlink_to(precious.parent)
    with pytest.raises(PermissionRefused, match="a link to"):
        begin(paths)
    assert precious.is_dir()


def test_a_save_needs_no_file_of_the_configuration_where_its_loop_has_read_it(paths: RunPaths) -> None:
    config = paths.run_yaml.read_bytes()
    paths.run_yaml.unlink()
    save = LoopSave(guest="loop", step=7, attempt=1, world_size=2, config=config)
    name = commit_tree(paths, save, {"guest": written(paths)}).name
    assert (paths.checkpoints / name / "config.yaml").read_bytes() == config
