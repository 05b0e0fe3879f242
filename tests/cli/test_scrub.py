"""`verl-slurm scrub`: everything is read, what is damaged is set aside, the data set included in the look."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_checkpoints import make_run, save
from verl_slurm.checkpoint import scrub as scrub_module
from verl_slurm.checkpoint.fingerprint import fingerprint, write
from verl_slurm.exit_codes import ExitCode
from verl_slurm.paths import RunPaths

Cli = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = make_run(tmp_path / "run")
    write(paths, fingerprint(paths.root / "data"))
    for step in (10, 20):
        save(paths, step)
    return paths


def test_all_that_is_well_is_said_in_a_line_each(cli: Cli, run: RunPaths) -> None:
    result = cli("scrub", run.root)
    assert result.code == ExitCode.OK
    assert result.out.count("  ok, ") == 2


def test_what_is_damaged_is_named_and_set_aside(cli: Cli, run: RunPaths) -> None:
    (run.checkpoint(20) / "metadata.json").write_bytes(b"[]")
    dry = cli("scrub", run.root, "--dry-run", "--json")
    assert (dry.code, dry.json["ok"]) == (ExitCode.CORRUPT, False)
    assert run.checkpoint(20).exists()
    real = cli("scrub", run.root)
    assert real.code == ExitCode.CORRUPT
    assert "metadata.json" in real.out
    assert "set aside: checkpoints/quarantine/" in real.out
    assert not run.checkpoint(20).exists()
    assert cli("scrub", run.root).code == ExitCode.OK


def test_changed_data_is_found_unless_it_is_left_out(cli: Cli, run: RunPaths) -> None:
    (run.root / "data" / "a.jsonl").write_text('{"x": 1}\n')
    result = cli("scrub", run.root)
    assert result.code == ExitCode.DATASET_DRIFT
    assert "data: changed a.jsonl" in result.out
    assert cli("scrub", run.root, "--no-data").code == ExitCode.OK


def test_a_checkpoint_that_a_living_run_prunes_meanwhile_is_no_damage(
    cli: Cli, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = scrub_module.verify

    def prune_first(path: Path, **options: Any) -> Any:
        if path == run.checkpoint(10):
            shutil.rmtree(path)
        return real(path, **options)

    monkeypatch.setattr(
        scrub_module.scrub_one, "__kwdefaults__", {"bytes_per_s": None, "verifier": prune_first}
    )
    result = cli("scrub", run.root, "--json")
    assert result.code == ExitCode.OK
    assert len(result.json["checkpoints"]) == 1
