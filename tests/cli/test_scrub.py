"""`verl-slurm verify --scrub`: everything is read, what is damaged is set aside, the data set included in the look."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.builders import write_config
from tests.checkpoint.conftest import STREWN, leaves, strew
from tests.checkpoint.sealed import save_sealed
from tests.checkpoint.test_components import save_partial
from tests.cli.test_checkpoints import make_run, save
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import new_key_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store import scrub as scrub_module
from verl_slurm.checkpoint.store.frozen import store_frozen
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.config.load import dump, load_resolved
from verl_slurm.config.schema import DataConfig, EncryptionConfig, GuestConfig
from verl_slurm.dataset.fingerprint.data_record import fingerprint, survey, write

Cli = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = make_run(tmp_path / "run")
    write(paths, fingerprint(paths.root / "data"))
    for step in (10, 20):
        save(paths, step)
    return paths


def test_what_is_well_is_said_in_a_line_each_and_what_is_damaged_set_aside(cli: Cli, run: RunPaths) -> None:
    result = cli("verify", run.root, "--scrub")
    assert (result.code, result.out.count("  verified, ")) == (ExitCode.OK, 2)
    (run.checkpoint(20) / "metadata.json").write_bytes(b"[]")
    dry = cli("verify", run.root, "--scrub", "--dry-run", "--json")
    assert (dry.code, dry.json["ok"]) == (ExitCode.CORRUPT, False)
    assert run.checkpoint(20).exists()
    real = cli("verify", run.root, "--scrub")
    assert real.code == ExitCode.CORRUPT
    assert "metadata.json" in real.out
    assert "set aside: checkpoints/quarantine/" in real.out
    assert not run.checkpoint(20).exists()
    assert cli("verify", run.root, "--scrub").code == ExitCode.OK
    assert cli("verify", run.root, "--dry-run").code == ExitCode.USAGE


@pytest.mark.parametrize("fault", ["no manifest", "a cut manifest", "another run's", "a link"])
def test_a_checkpoint_that_lost_its_manifest_or_is_none_of_the_runs_is_bad(
    cli: Cli, run: RunPaths, tmp_path: Path, fault: str
) -> None:
    newest = run.checkpoint(20)
    if fault == "no manifest":
        (newest / "manifest.json").unlink()
    elif fault == "a cut manifest":
        os.truncate(newest / "manifest.json", 40)
    elif fault == "another run's":
        shutil.rmtree(newest)
        other = make_run(tmp_path / "other")
        other.run_id.write_text("fedcba9876543210\n")
        shutil.copytree(save(other, 20), newest)
    else:
        newest.rename(tmp_path / "disk")
        newest.symlink_to(tmp_path / "disk")
    assert cli("verify", run.root).code == ExitCode.CORRUPT
    result = cli("verify", run.root, "--scrub")
    assert result.code == ExitCode.CORRUPT
    assert "step_000020  BAD" in result.out
    assert ("set aside: " in result.out, newest.is_symlink()) == (fault != "a link", fault == "a link")


def test_a_run_with_none_left_is_not_called_good(cli: Cli, run: RunPaths) -> None:
    for step in (10, 20):
        shutil.rmtree(run.checkpoint(step))
    for words in ((), ("--scrub",)):
        result = cli("verify", run.root, *words)
        assert result.code == ExitCode.NOT_FOUND
        assert "no checkpoint" in result.error


def test_partial_checkpoints_without_a_manifest_too_are_read_back(cli: Cli, run: RunPaths) -> None:
    partial = save_partial(run, 10)
    assert "partial/checkpoints/step_000010  verified" in cli("verify", run.root, "--scrub").out
    (partial / "manifest.json").unlink()
    result = cli("verify", run.root, "--scrub")
    assert result.code == ExitCode.CORRUPT
    assert "partial/checkpoints/step_000010  BAD manifest.json: missing" in result.out


def test_strays_are_named_by_a_look_and_moved_by_a_scrub_and_the_checkpoint_stays(
    cli: Cli, run: RunPaths
) -> None:
    newest = run.checkpoint(20)
    strew(newest)
    for words in ((), ("--scrub", "--dry-run")):
        looked = cli("verify", run.root, *words)
        assert looked.code == ExitCode.CORRUPT
        assert "step_000020  BAD .DS_Store: extra: not in the manifest" in looked.out
        assert "step_000020  its own files are whole; `verl-slurm verify RUN --scrub`" in looked.out
    assert leaves(newest) > STREWN
    real = cli("verify", run.root, "--scrub")
    assert real.code == ExitCode.OK
    assert "step_000020  set aside: checkpoints/quarantine/strays.step_000020." in real.out
    assert real.out.count("  verified, ") == 2
    assert not STREWN & leaves(newest)
    assert cli("verify", run.root).code == ExitCode.OK
    assert "strays.step_000020." in cli("list", run.root).out


def test_data_whose_fingerprint_is_lost_is_said_to_be_not_looked_at(cli: Cli, run: RunPaths) -> None:
    run.fingerprint.unlink()
    result = cli("verify", run.root, "--scrub")
    assert result.code == ExitCode.NOT_FOUND
    assert f"data: not looked at: its record is gone: {run.fingerprint}" in result.out
    assert cli("verify", run.root, "--scrub", "--json").json["ok"] is False


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("the root is away", ExitCode.DATA),
        ("the record is cut", ExitCode.CORRUPT),
        ("a file is away", ExitCode.DATA),
    ],
)
def test_data_that_cannot_be_read_hides_no_verdict_on_checkpoints(
    cli: Cli, run: RunPaths, fault: str, code: ExitCode
) -> None:
    data = run.root / "data"
    if fault == "the root is away":
        data.rename(run.root / "elsewhere")
    elif fault == "the record is cut":
        os.truncate(run.fingerprint, 20)
    else:
        (data / "a.jsonl").unlink()
        (data / "a.jsonl").symlink_to("nowhere")
    assert cli("verify", run.root, "--scrub", "--dry-run").code == code, "of the data alone"
    (run.checkpoint(20) / "metadata.json").write_bytes(b"[]")
    result = cli("verify", run.root, "--scrub")
    assert result.code == ExitCode.CORRUPT
    lines = result.out.splitlines()
    assert [line.split()[1] for line in lines[:3]] == ["BAD", "set", "verified,"]
    assert lines[3].startswith("data: not looked at: ")
    assert str(run.fingerprint if "record" in fault else data) in lines[3]


def test_a_disk_that_is_full_keeps_no_checkpoint_from_being_read(
    cli: Cli, run: RunPaths, with_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(scrub_module, "move_to_quarantine", full)
    (run.checkpoint(20) / "metadata.json").write_bytes(b"[]")
    with_model.write_bytes(b"[]")
    result = cli("verify", run.root, "--scrub")
    assert result.code == ExitCode.CORRUPT
    assert "step_000020  BAD metadata.json" in result.out
    assert result.out.count("  not set aside: [Errno 28] No space left on device") == 2
    assert "step_000010  verified" in result.out
    assert run.checkpoint(20).is_dir()
    answer = cli("verify", run.root, "--scrub", "--json").json
    assert "No space left" in answer["checkpoints"][0]["not_set_aside"]


def test_changed_data_is_found_unless_it_is_left_out(cli: Cli, run: RunPaths) -> None:
    (run.root / "data" / "a.jsonl").write_text('{"x": 1}\n')
    result = cli("verify", run.root, "--scrub")
    assert result.code == ExitCode.DATASET_DRIFT
    assert "data: changed a.jsonl" in result.out
    assert cli("verify", run.root, "--scrub", "--no-data").code == ExitCode.OK


def test_a_checkpoint_that_a_living_run_prunes_meanwhile_is_no_damage(
    cli: Cli, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = scrub_module.verify

    def prune_first(path: Path, **options: Any) -> Any:
        if path == run.checkpoint(10):
            shutil.rmtree(path)
        return real(path, **options)

    monkeypatch.setattr(scrub_module, "verify", prune_first)
    result = cli("verify", run.root, "--scrub", "--json")
    assert result.code == ExitCode.OK
    assert len(result.json["checkpoints"]) == 1
    assert "checkpoints/step_000010 was removed while it was read" in result.error


def test_of_a_run_of_verl_the_files_are_read_that_its_settings_name(cli: Cli, run: RunPaths) -> None:
    file = run.root / "train.parquet"
    file.write_bytes(b"rows")
    verl = {"data": {"train_files": str(file), "val_files": str(file)}}
    config = msgspec.structs.replace(
        load_resolved(run.run_yaml), data=DataConfig(), trainer=GuestConfig(backend="verl"), verl=verl
    )
    run.run_yaml.write_bytes(dump(config))
    write(run, survey((str(file),)).found)
    assert cli("verify", run.root, "--scrub", "--json").json["data"] == []
    file.write_bytes(b"other rows")
    assert cli("verify", run.root, "--scrub", "--json").json["data"] == [f"changed {str(file)[1:]}"]


@pytest.fixture
def with_model(run: RunPaths) -> Path:
    """RUN/frozen has a model; returns its file there."""
    model = run.root.parent / "model"
    model.mkdir()
    (model / "config.json").write_bytes(b"{}")
    return store_frozen(run, model, fingerprint(model)) / "config.json"


def test_frozen_models_are_read_back_and_a_damaged_one_is_set_aside(
    cli: Cli, run: RunPaths, with_model: Path
) -> None:
    name = with_model.parent.name
    assert f"frozen/{name}  verified" in cli("verify", run.root, "--scrub").out
    with_model.write_bytes(b"[]")
    dry = cli("verify", run.root, "--scrub", "--dry-run", "--json")
    assert (dry.code, dry.json["frozen"][0]["ok"]) == (ExitCode.CORRUPT, False)
    assert with_model.exists()
    real = cli("verify", run.root, "--scrub")
    assert real.code == ExitCode.CORRUPT
    assert "set aside: frozen/quarantine/" in real.out
    assert not with_model.exists()
    assert cli("verify", run.root, "--scrub").code == ExitCode.OK


@pytest.fixture
def sealed_run(tmp_path: Path) -> RunPaths:
    """step_000010 signed with the run's key, step_000020 by somebody who has it not."""
    tmp_path.chmod(0o700)
    paths = make_run(tmp_path / "run")
    save_sealed(paths, 10, new_key_file(tmp_path / "run.key"))
    save_sealed(paths, 20, None)
    _configure(paths, key_file=str(tmp_path / "run.key"))
    return paths


def _configure(paths: RunPaths, **encryption: str) -> None:
    write_config(paths, encryption=EncryptionConfig(**encryption))


def test_what_nobody_with_the_runs_key_signed_is_named_and_left(cli: Cli, sealed_run: RunPaths) -> None:
    result = cli("verify", sealed_run.root, "--scrub", "--no-data")
    assert result.code == ExitCode.KEY
    assert "step_000010  verified" in result.out
    assert "step_000020  BAD" in result.out
    assert "not signed" in result.out
    assert sealed_run.checkpoint(20).is_dir()
    answer = cli("verify", sealed_run.root, "--scrub", "--no-data", "--json").json
    assert (answer["ok"], answer["signature"]) == (False, "checked")


def test_the_one_that_accept_unsigned_names_is_good(cli: Cli, sealed_run: RunPaths, tmp_path: Path) -> None:
    digest = read_manifest(sealed_run.checkpoint(20)).digest
    _configure(sealed_run, key_file=str(tmp_path / "run.key"), accept_unsigned=digest)
    assert cli("verify", sealed_run.root, "--scrub", "--no-data").code == ExitCode.OK


def test_without_the_key_at_hand_the_scrub_says_what_it_did_not_check(
    cli: Cli, sealed_run: RunPaths, tmp_path: Path
) -> None:
    (tmp_path / "run.key").rename(tmp_path / "elsewhere.key")
    result = cli("verify", sealed_run.root, "--scrub", "--no-data")
    assert result.code == ExitCode.OK, "the bytes are as they should be"
    assert "signature not checked: no key" in result.err
    answer = cli("verify", sealed_run.root, "--scrub", "--no-data", "--json").json
    assert answer["signature"].startswith("not checked: no key")
    by_hand = cli("verify", sealed_run.root, "--scrub", "--no-data", "--key-file", tmp_path / "elsewhere.key")
    assert by_hand.code == ExitCode.KEY
    assert cli("verify", sealed_run.root, "--scrub", "--key-file", tmp_path / "run.key").code == ExitCode.KEY


def test_a_signed_checkpoint_of_a_run_without_a_key_is_not_passed_in_silence(cli: Cli, run: RunPaths) -> None:
    assert cli("verify", run.root, "--scrub", "--json").json["signature"] == "none"
    save_sealed(run, 30)
    assert "signature not checked: no key" in cli("verify", run.root, "--scrub").err
