"""Encrypted checkpoints are exported, inspected and told apart with their key, and only with it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.export.conftest import fill_here, wish
from verl_slurm.base.errors import KeyRefused
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import new_key_file
from verl_slurm.cli.__main__ import main
from verl_slurm.config.schema import EncryptionConfig
from verl_slurm.export.exporting import export as export_checkpoint

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    folder.chmod(0o700)
    new_key_file(folder / "run.key")
    return folder / "run.key"


@pytest.fixture(scope="module")
def encrypted(trained: Any, checkpoint: Path, key_file: Path) -> Path:
    """The state of `checkpoint`, a step later."""
    return trained.save(3, encryption=EncryptionConfig(key_file=str(key_file)))


@pytest.mark.parametrize("to", ["hf", "split"])
def test_an_export_of_what_is_encrypted_is_that_of_what_is_not(
    to: str,
    trained: Any,
    checkpoint: Path,
    encrypted: Path,
    key_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill_here(monkeypatch)
    options: dict[str, Any] = {"to": to, "roles": ("actor",)}
    with pytest.raises(KeyRefused, match="no key is configured"):
        export_checkpoint(encrypted, wish(tmp_path / "refused", trained.base, **options))
    assert not (tmp_path / "refused").exists()
    export_checkpoint(encrypted, wish(tmp_path / "a", trained.base, **options), key_file=key_file)
    export_checkpoint(checkpoint, wish(tmp_path / "b", trained.base, **options))
    name = "model.safetensors" if to == "hf" else "policy_model/pytorch_model.bin"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.long
def test_the_command_line_finds_the_key_by_the_run_or_takes_it_by_hand(
    trained: Any, checkpoint: Path, encrypted: Path, key_file: Path, tmp_path: Path, capfd: Any
) -> None:
    away = tmp_path / "step_000003"
    shutil.copytree(encrypted, away)
    assert main(["inspect", str(away)]) == ExitCode.KEY
    assert "no key is configured" in capfd.readouterr().err
    assert main(["inspect", str(away), "--key-file", str(key_file), "--json"]) == ExitCode.OK
    facts = json.loads(capfd.readouterr().out)
    assert (facts["run"], facts["ranks"][0]["kl_window"]) == ("tiny", [0.5, 0.25])
    text = (checkpoint / "config.yaml").read_text()
    assert "encryption: null" in text
    configured = text.replace("encryption: null", f"encryption: {{key_file: {key_file}}}")
    trained.paths.run_yaml.write_text(configured)
    try:
        assert main(["inspect", str(encrypted)]) == ExitCode.OK
        assert main(["inspect", str(encrypted), str(away)]) == ExitCode.KEY
        assert main(["inspect", str(encrypted), str(away), "--key-file", str(key_file)]) == ExitCode.OK
        words = ["export", str(encrypted), "--to", "single-file", "--model", str(trained.base), "--json"]
        assert main([*words, "--out", str(tmp_path / "out")]) == ExitCode.OK
        assert (tmp_path / "out" / "optimizer.pt").is_file()
    finally:
        trained.paths.run_yaml.unlink()
