"""What cannot be resumed is refused before any tensor is read; the first start's layout stays."""

from pathlib import Path

import msgspec
import pytest

from verl_slurm.checkpoint.fingerprint import fingerprint
from verl_slurm.checkpoint.format import Manifest, Topology
from verl_slurm.checkpoint.manifest import render, sealed
from verl_slurm.config.schema import DistributedConfig, RunConfig
from verl_slurm.errors import CheckpointCorrupt, ConfigError, DataError
from verl_slurm.exit_codes import ExitCode
from verl_slurm.files import private_dir
from verl_slurm.paths import RunPaths
from verl_slurm.trainer import __main__ as entry
from verl_slurm.trainer.orchestration import check_or_write, describe
from verl_slurm.trainer.place import Place, process_group
from verl_slurm.trainer.resuming import check_manifest, checkpoint_directory

pytestmark = pytest.mark.torch

CONFIG = RunConfig(distributed=DistributedConfig(dp_size=2, nodes=1))


def _manifest(directory: Path, *, world_size: int = 2) -> None:
    manifest = Manifest(
        name="step_000001",
        step=1,
        safe_point=0,
        phase="step_end",
        epoch=1,
        parent=None,
        schema_id="s",
        dataset_fingerprint="f",
        world_size=world_size,
        topology=Topology(dp=world_size),
        files=(),
        frozen={"reference": "a" * 64},
        created_utc="2026-01-01T00:00:00Z",
        save_seconds=0.1,
    )
    private_dir(directory)
    (directory / "manifest.json").write_bytes(render(sealed(manifest)))


def test_a_checkpoint_of_another_world_size_is_refused(tmp_path: Path) -> None:
    _manifest(tmp_path / "step_000001", world_size=4)
    with pytest.raises(ConfigError, match="cannot reshard.*found world size 2, expected world size 4"):
        check_manifest(tmp_path / "step_000001", CONFIG, {"reference": "a" * 64})


def test_a_changed_reference_model_is_refused(tmp_path: Path) -> None:
    _manifest(tmp_path / "step_000001")
    assert check_manifest(tmp_path / "step_000001", CONFIG, {"reference": "a" * 64}).step == 1
    with pytest.raises(DataError, match="reference"):
        check_manifest(tmp_path / "step_000001", CONFIG, {"reference": "b" * 64})
    with pytest.raises(DataError, match="reward"):
        check_manifest(tmp_path / "step_000001", CONFIG, {"reference": "a" * 64, "reward": "c" * 64})


def test_resume_names_a_checkpoint_of_the_run_or_a_path() -> None:
    paths = RunPaths("/run")
    assert checkpoint_directory(paths, "") is None
    assert checkpoint_directory(paths, "step_000001") == paths.checkpoints / "step_000001"
    assert checkpoint_directory(paths, "/other/step_000001") == Path("/other/step_000001")


def test_another_number_of_ranks_than_configured_is_refused_before_they_meet() -> None:
    place = Place(rank=0, local_rank=0, world_size=3)
    with pytest.raises(ConfigError, match="found 3, expected 2"), process_group(CONFIG, place):
        pass


def test_a_trainer_without_torchrun_is_told_so() -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        Place.from_environ({"RANK": "0"})


def test_the_layout_of_the_first_start_is_kept_and_held_to(tmp_path: Path) -> None:
    paths = RunPaths(private_dir(tmp_path / "run"))
    (private_dir(tmp_path / "data") / "a.jsonl").write_text("{}\n")
    data = fingerprint(tmp_path / "data")
    first = check_or_write(paths, describe(CONFIG, tmp_path / "data", data, "gloo"))
    assert check_or_write(paths, msgspec.structs.replace(first, data_root="/moved")) == first
    wider = RunConfig(distributed=DistributedConfig(dp_size=4, nodes=1))
    with pytest.raises(ConfigError, match="another number of ranks"):
        check_or_write(paths, describe(wider, tmp_path / "data", data, "gloo"))
    paths.orchestration.chmod(0o600)
    paths.orchestration.write_bytes(b"{}")
    with pytest.raises(CheckpointCorrupt):
        check_or_write(paths, first)


def test_a_directory_that_is_no_run_ends_with_one_line_and_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(entry.CONTROL_VARIABLE, raising=False)
    assert entry.main(["--run", str(tmp_path), "--epoch", "1"]) == ExitCode.NOT_FOUND
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "not a run directory" in error
