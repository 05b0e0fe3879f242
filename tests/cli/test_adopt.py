"""`verl-slurm adopt`: what plain verl left is judged, taken over, and its tracker repaired."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.builders import write_verl_rows
from tests.cli.conftest import Cli
from tests.hostile.measured import measured
from tests.journals import append_event, read_events
from tests.verl.uncomposed import without_hydra
from tests.verl.verl_steps import make_directory, make_step
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.submit.checks import verl as verl_checks
from verl_slurm.verl.tracker import TRACKER

pytestmark = pytest.mark.torch


@pytest.fixture
def verl_dir(tmp_path: Path) -> Path:
    """Two whole steps of the SFT trainer, 4 and 6, of two ranks, and a tracker that says 6."""
    return make_directory(tmp_path / "verl", 4, 6)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a run of verl's SFT trainer on two ranks, whose inputs are there."""
    monkeypatch.setattr(verl_checks, "installed_verl", lambda: "0.9.1")
    monkeypatch.setattr(verl_checks, "_BESIDES", {"sft": {}, "ppo": {}})
    without_hydra(monkeypatch)
    write_verl_rows(tmp_path / "data.parquet")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    path = tmp_path / "my.yaml"
    path.write_text(
        f"name: taken\nrun_dir: {tmp_path}/runs/{{name}}\n"
        "trainer: {backend: verl, entry: sft}\ndistributed: {dp_size: 2}\n"
        f"verl:\n  data: {{train_files: {tmp_path}/data.parquet, val_files: null}}\n"
        f"  model.path: {tmp_path}/model\n  actor_rollout_ref.model.path: {tmp_path}/model\n"
    )
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "runs" / "taken")


def names(run: RunPaths) -> list[str]:
    return [info.name for info in list_checkpoints(run) if info.kind == "committed"]


def everything(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()
    }


def test_a_whole_directory_becomes_a_run_that_submit_goes_on_from(
    cli: Cli, verl_dir: Path, config: Path, run: RunPaths
) -> None:
    result = cli("adopt", verl_dir, config)
    assert result.code == ExitCode.OK, result.err
    assert names(run) == ["step_000006", "step_000004"]
    assert all(verify(run.checkpoints / name).ok for name in names(run))
    assert "adopted" in result.out
    assert "points to global_step_6, which is whole" in result.out
    assert f"verl-slurm submit {run.root}" in result.out
    assert [event["event"] for event in read_events(run)] == ["adopted"]
    assert f"verl-slurm verify {run.root}" in cli("adopt", run.checkpoint(6)).error, (
        "it is none of plain verl's"
    )
    plan = cli("submit", run.root, "--cluster", "local", "--dry-run", "--json").json
    assert plan["resumes_from"] == "step_000006"
    before = everything(run.root)
    again = cli("adopt", verl_dir, run.root, "--json").json
    assert [step["state"] for step in again["steps"]] == ["there", "there"]
    assert everything(run.root) == before, "twice is as good as once"


def test_a_dry_run_makes_and_repairs_nothing(cli: Cli, verl_dir: Path, config: Path, run: RunPaths) -> None:
    (verl_dir / TRACKER).write_text("")
    before = everything(verl_dir)
    result = cli("adopt", verl_dir, config, "--dry-run")
    assert result.code == ExitCode.OK
    assert "would adopt" in result.out
    assert "would be repaired" in result.err
    assert not run.root.exists()
    assert everything(verl_dir) == before


@pytest.mark.parametrize("tracker", ["", "abc", "99", None, "6"])
def test_without_a_run_the_tracker_is_pointed_to_the_newest_whole_step(
    cli: Cli, verl_dir: Path, tracker: str | None
) -> None:
    os.truncate(verl_dir / "global_step_6" / "optim_world_size_2_rank_1.pt", 100)
    (verl_dir / TRACKER).unlink()
    if tracker is not None:
        (verl_dir / TRACKER).write_text(tracker)
    result = cli("adopt", verl_dir)
    assert result.code == ExitCode.OK
    assert (verl_dir / TRACKER).read_text() == "4"
    assert "broken" in result.out
    assert "optim_world_size_2_rank_1.pt" in result.out
    assert ": repaired" in result.out
    found = cli("adopt", verl_dir, "--json").json["tracker"]
    assert (found["state"], found["repaired"]) == ("good", False)


def test_the_tracker_stays_where_that_is_asked(cli: Cli, verl_dir: Path) -> None:
    (verl_dir / TRACKER).write_text("")
    result = cli("adopt", verl_dir, "--keep-tracker")
    assert result.code == ExitCode.OK
    assert "left as it is" in result.error
    assert (verl_dir / TRACKER).read_text() == ""


def test_where_no_step_is_whole_nothing_is_touched_and_the_code_says_so(
    cli: Cli, verl_dir: Path, config: Path, run: RunPaths
) -> None:
    for step in (4, 6):
        os.truncate(verl_dir / f"global_step_{step}" / "data_0.pt", 1)
    before = everything(verl_dir)
    result = cli("adopt", verl_dir, config)
    assert result.code == ExitCode.CORRUPT
    assert "verl cannot resume here" in result.error
    assert everything(verl_dir) == before
    assert not run.root.exists()


def test_another_number_of_ranks_is_refused_with_verls_own_merger_as_the_way_out(
    cli: Cli, verl_dir: Path, config: Path, run: RunPaths
) -> None:
    result = cli("adopt", verl_dir, config, "distributed.dp_size=4")
    assert result.code == ExitCode.CONFIG
    for word in (
        "saved by 2 ranks, the run has 4",
        "-m verl.model_merger merge --backend fsdp",
        "--local_dir",
    ):
        assert word in result.error
    assert not run.root.exists()


def test_older_steps_of_another_number_of_ranks_are_left_out_by_name(
    cli: Cli, verl_dir: Path, config: Path, run: RunPaths
) -> None:
    make_step(verl_dir, 8, world=4)
    found = cli("adopt", verl_dir, config, "--json").json
    assert [step["state"] for step in found["steps"]] == ["refused", "adopted", "adopted"]
    assert names(run) == ["step_000006", "step_000004"]


def test_a_run_that_is_not_verls_is_refused(cli: Cli, verl_dir: Path, config: Path) -> None:
    program = config.parent / "x.py"
    program.touch()
    config.write_text(
        f"name: x\nrun_dir: {config.parent}/x\ntrainer: {{backend: command, command: [{program}]}}\n"
    )
    assert "trainer.backend: verl" in cli("adopt", verl_dir, config).error


def test_a_run_with_a_living_job_is_left_alone(
    cli: Cli, verl_dir: Path, config: Path, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("adopt", verl_dir, config)
    append_event(run, "submitted", job_id="7", cluster="local", host="another-host")
    make_step(verl_dir, 8)
    assert cli("adopt", verl_dir, run.root).code == ExitCode.FENCED
    assert names(run) == ["step_000006", "step_000004"]


def test_a_directory_that_is_none_of_verls_says_what_was_expected(
    cli: Cli, verl_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    assert "no checkpoint of verl" in cli("adopt", tmp_path / "empty").error
    assert "no such directory" in cli("adopt", tmp_path / "not there").error
    assert f"verl-slurm adopt {verl_dir}" in cli("adopt", verl_dir / "global_step_6").error


def test_a_tracker_that_cannot_be_written_is_said_and_keeps_no_run_from_it(
    cli: Cli, verl_dir: Path, config: Path, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    (verl_dir / TRACKER).write_text("")

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("verl_slurm.cli.checkpoint.adopt_command.write_tracker", refuse)
    result = cli("adopt", verl_dir)
    assert result.code == ExitCode.PERMISSION
    assert "Read-only file system" in result.err
    assert cli("adopt", verl_dir, config).code == ExitCode.OK
    assert names(run) == ["step_000006", "step_000004"]


def test_what_was_taken_over_is_pruned_like_any_other(
    cli: Cli, tmp_path: Path, config: Path, run: RunPaths
) -> None:
    directory = make_directory(tmp_path / "d", 2, 4, 6, 8)
    assert len(cli("adopt", directory, config, "--all", "--json").json["steps"]) == 4
    assert cli("prune", run.root, "--keep-last", 2).code == ExitCode.OK
    assert names(run) == ["step_000008", "step_000006"]


@pytest.mark.parametrize("words", [(), ("--dry-run",), ("--link",)])
def test_steps_that_others_can_exchange_are_refused_before_anything_is_read_or_made(
    verl_dir: Path, config: Path, run: RunPaths, words: tuple[str, ...]
) -> None:
    verl_dir.chmod(0o775)
    done = measured("adopt", verl_dir, config, *words)
    assert done.code == ExitCode.PERMISSION, done.err
    assert done.err.count("\n") == 1
    assert str(verl_dir) in done.err
    for word in ("others can put steps of theirs", "mode 0775", "chmod go-w"):
        assert word in done.err
    assert not run.root.exists()


def test_names_from_the_disk_cannot_write_on_the_terminal(cli: Cli, tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "x\n\x1b[31mred", 4)
    (directory / "global_step_4" / "a\n\x1b[2Jb.pt").write_bytes(b"")
    (directory / TRACKER).write_text("\x1b]0;owned\x07")
    result = cli("adopt", directory)
    assert "\x1b" not in result.out + result.err
    assert result.code == ExitCode.CORRUPT


def test_ppo_with_a_critic_is_taken_too(cli: Cli, tmp_path: Path, config: Path, run: RunPaths) -> None:
    directory = make_directory(tmp_path / "ppo", 2, 4, entry="ppo", critic=True)
    shutil.rmtree(directory / "global_step_4" / "actor")  # as verl's max_actor_ckpt_to_keep leaves it
    assert cli("adopt", directory, config, "trainer.entry=ppo").code == ExitCode.OK
    assert names(run) == ["step_000002"]
    assert (directory / TRACKER).read_text() == "2"
