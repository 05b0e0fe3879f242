"""`tiers` and its --offload and --fetch-back on checkpoints made through the real commit."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.builders import cold_tier, write_config
from tests.checkpoint.conftest import manifest_of, owns_it, stage
from tests.checkpoint.sealed import save_sealed
from tests.journals import append_event
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
from verl_slurm.base.keys import new_key_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.commit import commit
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config.load import dump, load_resolved
from verl_slurm.config.schema import CheckpointConfig, EncryptionConfig

Cli = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """One checkpoint, and an archive."""
    paths = RunPaths(tmp_path / "run")
    private_dir(paths.root)
    private_dir(tmp_path / "cold")
    write_config(paths, root=tmp_path, tiers=(cold_tier(tmp_path / "cold"),))
    staging = stage(paths, 10)
    commit(staging, manifest_of(staging), attempt_check=owns_it)
    return paths


def test_a_checkpoint_goes_out_and_comes_back(cli: Cli, run: RunPaths) -> None:
    plan = cli("tiers", run.root, "--offload", "--dry-run", "--json").json
    assert [(a["name"], a["tier"], a["reason"]) for a in plan["copy"]] == [
        ("step_000010", "cold", "not here yet")
    ]
    assert plan["drop"] == []
    assert "would copy 1 and drop 0" in cli("tiers", run.root, "--offload", "--dry-run").out
    assert cli("tiers", run.root, "--json").json["last_good"] is None
    assert "copied 1, dropped 0" in cli("tiers", run.root, "--offload").out
    shown = cli("tiers", run.root)
    assert shown.code == ExitCode.OK
    assert shown.out.count("the last good one") == 2
    assert "incomplete" not in shown.out
    shutil.rmtree(run.checkpoints / "step_000010")
    append_event(run, "verified", name="step_000011")
    back = cli("tiers", run.root, "--fetch-back", "--json").json
    assert "step_000011 was verified and is gone" in back["lost"][0]
    assert (back["name"], back["tier"]) == ("step_000010", "cold")
    assert verify(Path(back["path"])).ok
    assert "is there and verifies" in cli("tiers", run.root, "--fetch-back", "step_000010").out
    for words in (("step_000010",), ("--dry-run",), ("--offload", "--fetch-back")):
        assert cli("tiers", run.root, *words).code == ExitCode.USAGE


def test_the_newest_comes_first_also_where_a_step_has_seven_digits(cli: Cli, run: RunPaths) -> None:
    for step in (999_999, 1_000_000):
        staging = stage(run, step)
        commit(staging, manifest_of(staging), attempt_check=owns_it)
    names = [line.split()[0] for line in cli("tiers", run.root).out.splitlines() if line.startswith("step_")]
    assert names == ["step_1000000", "step_999999", "step_000010"]


def test_a_tier_that_is_not_mounted_is_said_with_its_own_exit_code(cli: Cli, run: RunPaths) -> None:
    (run.root.parent / "cold").rmdir()
    for words in ((), ("--offload",), ("--offload", "--dry-run")):
        result = cli("tiers", run.root, *words)
        assert result.code == ExitCode.TIER
        assert "tier cold does not answer" in result.error
    answer = cli("tiers", run.root, "--json")
    assert (answer.code, answer.json["ok"], answer.json["tiers"][1]["reachable"]) == (
        ExitCode.TIER,
        False,
        False,
    )


def test_a_run_that_is_over_is_shown_with_the_tier_that_lacks_its_last_checkpoint(
    cli: Cli, run: RunPaths
) -> None:
    append_event(run, "submitted", cluster="local", job_id="local-1")
    append_event(run, "started", attempt=1, job_id="local-1", cluster="local")
    warned = f"WARNING, step_000010 is not whole in tier cold: verl-slurm tiers {run.root} --offload"
    assert warned not in " ".join(cli("status", run.root).out.split())
    append_event(run, "ended", attempt=1, job_id="local-1", exit_code=0)
    assert warned in " ".join(cli("status", run.root).out.split())
    assert cli("tiers", run.root, "--offload").code == ExitCode.OK
    assert "WARNING" not in cli("status", run.root).out


def test_what_no_tier_has_is_not_found(cli: Cli, run: RunPaths) -> None:
    result = cli("tiers", run.root, "--fetch-back")
    assert result.code == ExitCode.NOT_FOUND
    assert "no tier has a checkpoint of this run" in result.error
    write_config(run, root=run.root)
    result = cli("tiers", run.root)
    assert (result.code, "no tiers in" in result.out) == (ExitCode.OK, True)


@pytest.fixture
def keyed(run: RunPaths, tmp_path: Path) -> Path:
    """The run has a key now, which signed step_000020; step_000010 is from before it. Returns the key's file."""
    tmp_path.chmod(0o700)
    file = tmp_path / "run.key"
    save_sealed(run, 20, new_key_file(file))
    checkpoint = CheckpointConfig(encryption=EncryptionConfig(key_file=str(file)))
    run.run_yaml.write_bytes(
        dump(msgspec.structs.replace(load_resolved(run.run_yaml), checkpoint=checkpoint))
    )
    return file


def test_what_the_runs_key_did_not_sign_is_shown_as_refused_and_stays(
    cli: Cli, run: RunPaths, keyed: Path
) -> None:
    assert "refused" in cli("tiers", run.root).out
    result = cli("tiers", run.root, "--offload")
    assert "not copied: the checkpoint is not signed" in result.out
    assert "copied 1, dropped 0" in result.out


def test_without_the_key_nothing_is_moved_and_a_look_says_what_it_did_not_check(
    cli: Cli, run: RunPaths, keyed: Path
) -> None:
    keyed.unlink()
    assert cli("tiers", run.root, "--offload").code == ExitCode.KEY
    assert not list((run.root.parent / "cold").iterdir())
    for words in ((), ("--offload", "--dry-run")):
        seen = cli("tiers", run.root, *words)
        assert seen.code == ExitCode.OK
        assert "signature not checked: no key" in seen.err
        answer = cli("tiers", run.root, *words, "--json").json
        assert answer["signature"].startswith("not checked: no key")


@pytest.mark.parametrize(("lives", "keeps"), [(True, {}), (True, {"keep_every": 10}), (False, {})])
def test_what_a_living_run_will_remove_again_is_named_as_it_comes_home(
    cli: Cli, run: RunPaths, tmp_path: Path, lives: bool, keeps: dict[str, int]
) -> None:
    write_config(run, root=tmp_path, tiers=(cold_tier(tmp_path / "cold"),), keep_last=2, **keeps)
    assert cli("tiers", run.root, "--offload").code == ExitCode.OK
    shutil.rmtree(run.checkpoints / "step_000010")
    for step in (22, 24):
        staging = stage(run, step)
        commit(staging, manifest_of(staging), attempt_check=owns_it)
    if lives:
        append_event(run, "submitted", job_id="7", cluster="local", host="another-host")
    back = cli("tiers", run.root, "--fetch-back", "step_000010")
    assert (back.code, "was fetched" in back.out) == (ExitCode.OK, True)
    says = "and removes step_000010 with one of its next saves (keep_last): `cp -a "
    assert (says in back.err) is (lives and not keeps)
    assert cli("tiers", run.root, "--fetch-back", "step_000024").err == "", "it stays for now"
