"""`verl-slurm prune`: a dry run prints the very plan that is carried out without it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import write_config
from tests.checkpoint.sealed import save_sealed
from tests.cli.test_checkpoints import make_run, save
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import new_key_file
from verl_slurm.base.paths import RunPaths

Cli = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = make_run(tmp_path / "run")
    for step in (10, 20, 30, 40, 50):
        save(paths, step)
    return paths


def left(paths: RunPaths) -> list[str]:
    return sorted(path.name for path in paths.checkpoints.glob("step_*"))


def test_the_dry_run_and_the_real_one_say_the_same_and_only_one_removes(cli: Cli, run: RunPaths) -> None:
    options = ("--keep-last", 2, "--keep-every", 20, "--json")
    dry = cli("prune", run.root, *options, "--dry-run").json
    assert len(left(run)) == 5
    real = cli("prune", run.root, *options).json
    assert (dry.pop("dry_run"), real.pop("dry_run")) == (True, False)
    assert (dry.pop("removed"), real.pop("removed")) == ([], ["step_000010", "step_000030"])
    assert dry == real
    assert real["verified"] == "step_000050"
    assert left(run) == ["step_000020", "step_000040", "step_000050"]


def test_the_table_names_each_checkpoint_with_its_reason_and_what_is_freed(cli: Cli, run: RunPaths) -> None:
    result = cli("prune", run.root, "--keep-last", 1, "--dry-run")
    assert result.code == ExitCode.OK
    assert "number 1 of the newest 1" in result.out
    assert result.out.count("older than the newest 1") == 4
    assert result.out.splitlines()[-1].startswith("dry run: would remove 4 checkpoints, ")
    assert cli("prune", run.root, "--keep-last", 0).code == ExitCode.USAGE
    assert len(left(run)) == 5
    cli("prune", run.root)
    assert left(run) == ["step_000030", "step_000040", "step_000050"], "the run's own retention"
    assert cli("prune", run.root, "--keep-last", 1).out.splitlines()[-1].startswith("removed 2 checkpoints")


def test_a_damaged_newest_is_warned_of_and_the_last_good_one_stays(cli: Cli, run: RunPaths) -> None:
    (run.checkpoint(50) / "metadata.json").write_bytes(b"[]")
    result = cli("prune", run.root, "--keep-last", 1)
    assert result.code == ExitCode.OK
    assert "does not verify, and is left as it is: step_000050" in result.err
    assert left(run) == ["step_000040", "step_000050"]


@pytest.mark.scenario("SEC15")
@pytest.mark.parametrize("linked", ["checkpoints", "checkpoints/quarantine", "partial"])
@pytest.mark.parametrize(
    "words", [["prune", "--keep-last", 1, "--quarantined"], ["verify", "--scrub", "--no-data"]]
)
def test_what_a_link_in_a_run_leads_to_is_left_alone(
    cli: Cli, run: RunPaths, tmp_path: Path, words: list[object], linked: str
) -> None:
    other = make_run(tmp_path / "other")
    for step in (1, 2):
        save(other, step)
    (other.checkpoint(1) / "metadata.json").write_bytes(b"[]")
    (other.quarantine / "thesis").mkdir(parents=True)
    target = {
        "checkpoints": other.checkpoints,
        "checkpoints/quarantine": other.quarantine,
        "partial": other.root,
    }
    place = run.root / linked
    if place.exists():
        place.rename(tmp_path / "mine")
    place.symlink_to(target[linked])
    before = sorted(other.root.rglob("*"))
    result = cli(words[0], run.root, *words[1:])
    assert sorted(other.root.rglob("*")) == before
    if (words[0], linked) != ("prune", "partial"):  # which it never looks at
        assert result.code == ExitCode.PERMISSION
        assert f"{place} (found a link to {target[linked]}, expected a directory)" in result.error


@pytest.mark.scenario("SEC15")
def test_a_scrub_leaves_the_frozen_models_that_a_link_leads_to(
    cli: Cli, run: RunPaths, tmp_path: Path
) -> None:
    (damaged := tmp_path / "frozen" / ("0" * 64)).mkdir(parents=True)
    (tmp_path / "frozen" / f"{damaged.name}.json").write_text("{}")
    (run.root / "frozen").symlink_to(tmp_path / "frozen")
    assert cli("verify", run.root, "--scrub", "--no-data").code == ExitCode.PERMISSION
    assert damaged.is_dir()


@pytest.mark.scenario("SEC15")
def test_only_what_was_set_aside_with_its_reason_goes_from_quarantine(cli: Cli, run: RunPaths) -> None:
    (run.checkpoint(50) / "metadata.json").write_bytes(b"[]")
    cli("verify", run.root, "--scrub", "--no-data")
    (aside,) = run.quarantine.glob("step_000050.????????")
    for name in ("thesis", "step_000001.0123abcd", "step_000001.x"):
        (run.quarantine / name).mkdir()
    (run.quarantine / "thesis.reason.json").write_text("{}")
    result = cli("prune", run.root, "--keep-last", 9, "--quarantined", "--json")
    assert result.json["removed"] == [aside.name]
    assert sorted(path.name for path in run.quarantine.iterdir()) == [
        "step_000001.0123abcd",
        "step_000001.x",
        "thesis",
        "thesis.reason.json",
    ]


def test_with_a_key_only_what_is_signed_is_good_enough_to_remove_others(
    cli: Cli, run: RunPaths, tmp_path: Path
) -> None:
    key = new_key_file(tmp_path / "run.key")
    write_config(run, key_file=tmp_path / "run.key")
    refused = cli("prune", run.root, "--keep-last", 1)
    assert refused.code == ExitCode.CORRUPT
    assert "no checkpoint verifies, so none is removed" in refused.error
    assert len(left(run)) == 5
    save_sealed(run, 60, key)
    save_sealed(run, 70, None)
    result = cli("prune", run.root, "--keep-last", 1)
    assert result.code == ExitCode.OK
    assert left(run) == ["step_000060", "step_000070"]
