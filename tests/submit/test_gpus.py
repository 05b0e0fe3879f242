"""What is said of GPUs before anything is queued."""

from pathlib import Path

import msgspec
import pytest

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.schema import DistributedConfig, RunConfig
from verl_slurm.submit.checks import check_list
from verl_slurm.submit.checks.check_list import check_gpus

CUDA = msgspec.structs.replace(RunConfig(), distributed=DistributedConfig(device="cuda"))


def _torch(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(check_list, "version", lambda _: version)


def test_a_torch_for_cpus_is_a_note_on_slurm_and_refused_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _torch(monkeypatch, "2.13.0+cpu")
    (note,) = check_gpus(CUDA, "slurm", signs=())
    assert "torch 2.13.0+cpu of this environment is built without CUDA" in note.line
    assert "constraints/cuda.txt" in note.remedy
    (tmp_path / "driver").touch()
    with pytest.raises(ConfigError, match=r"torch 2\.13\.0\+cpu, built without CUDA"):
        check_gpus(CUDA, "local", signs=[tmp_path / "driver"])


def test_a_machine_without_a_driver_is_refused_where_the_run_is_to_stay_on_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _torch(monkeypatch, "2.13.0")
    driver = tmp_path / "version"
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        check_gpus(CUDA, "local", signs=[driver])
    assert check_gpus(CUDA, "slurm", signs=[driver]) == [], "a login node need not have one"
    driver.touch()
    assert check_gpus(CUDA, "local", signs=[driver]) == []


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_who_asks_for_no_gpu_hears_nothing(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    _torch(monkeypatch, "2.13.0+cpu")
    config = msgspec.structs.replace(RunConfig(), distributed=DistributedConfig(device=device))  # type: ignore[arg-type]
    assert check_gpus(config, "local", signs=()) == []
