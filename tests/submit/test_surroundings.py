"""Where a run and its second copies may lie: where others cannot put theirs in the place of ours."""

import os
import stat
from pathlib import Path

import pytest

from tests.cli.conftest import (
    Cli,
    cli as cli,  # a fixture
    workplace as workplace,
)
from tests.hostile.another_user import NOBODY
from tests.local_runs import finish, lead, prepared
from verl_slurm.base.exit_codes import ExitCode

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: only root can give a directory away")


def open_to_all(place: Path, *, sticky: bool = False) -> Path:
    place.mkdir()
    place.chmod(0o777 | (stat.S_ISVTX if sticky else 0))
    return place


def dry_run(cli: Cli, local: Path):  # type: ignore[no-untyped-def]
    return cli("submit", "config.yaml", "--dry-run", "--cluster", "local", f"checkpoint.local_dir={local}")


@pytest.mark.scenario("SEC12")
@pytest.mark.parametrize("below", ["", "mine", "mine/deeper"])
def test_second_copies_in_an_open_directory_are_refused(cli: Cli, workplace: Path, below: str) -> None:
    place = open_to_all(workplace / "open") / below
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    refused = dry_run(cli, place)
    assert refused.code == ExitCode.PERMISSION
    assert f"checkpoint.local_dir: {workplace / 'open'}" in refused.error
    assert "mode 0777" in refused.error
    # Nor by a link through it; one with the sticky bit is good enough.
    (workplace / "private").mkdir(mode=0o700)
    (workplace / "open/link").symlink_to(workplace / "private")
    assert dry_run(cli, workplace / "open/link").code == ExitCode.PERMISSION
    assert dry_run(cli, open_to_all(workplace / "sticky", sticky=True) / "mine").code == ExitCode.OK


@as_root
@pytest.mark.scenario("SEC12")
def test_second_copies_in_another_users_directory_are_refused(cli: Cli, workplace: Path) -> None:
    place = workplace / "eves"
    place.mkdir(mode=0o755)
    os.chown(place, NOBODY, NOBODY)
    refused = dry_run(cli, place / "mine")
    assert (refused.code, f"uid {NOBODY}" in refused.error) == (ExitCode.PERMISSION, True)


def test_a_run_directory_that_is_a_link_is_refused_and_one_below_a_link_is_taken(
    cli: Cli, workplace: Path
) -> None:
    (workplace / "large/run").mkdir(parents=True, mode=0o700)
    (workplace / "run").symlink_to("large/run")
    (workplace / "runs").symlink_to("large")
    dry = ("submit", "config.yaml", "--dry-run", "--cluster", "local")
    refused = cli(*dry, f"run_dir={workplace / 'run'}")
    assert refused.code == ExitCode.PERMISSION
    assert "found a link to large/run" in refused.err
    assert "a directory above the run may be a link" in refused.err
    assert cli(*dry, f"run_dir={workplace / 'runs/run'}").code == ExitCode.OK


@pytest.mark.scenario("SEC12")
def test_a_run_in_a_groups_directory_is_told_of(cli: Cli, workplace: Path) -> None:
    place = open_to_all(workplace / "group")
    place.chmod(0o775)
    done = cli("submit", "config.yaml", "--dry-run", "--cluster", "local", f"run_dir={place / 'run'}")
    assert done.code == ExitCode.OK
    assert (
        f"others can rename the run, or put another one in its place ({place}: mode 0775"
        in done.out + done.err
    )


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.scenario("SEC12")
def test_the_nodes_refuse_what_the_login_node_could_not_see(short_dir: Path) -> None:
    place = short_dir / "nvme"
    run = prepared(short_dir / "run", f"checkpoint.local_dir={place}")
    open_to_all(place)
    started = lead(run)
    finish(started)
    assert started.returncode == ExitCode.PERMISSION
    assert list(place.iterdir()) == []


@pytest.mark.scenario("FLT-N01")
@pytest.mark.parametrize("name", ["a\\b", "a%b", "\\"])
def test_a_run_directory_that_sbatch_would_change_is_refused(cli: Cli, workplace: Path, name: str) -> None:
    refused = cli("submit", "config.yaml", "--dry-run", "--cluster", "slurm", f"run_dir=runs/{name}")
    assert refused.code == ExitCode.CONFIG
    assert "sbatch" in refused.error
    assert not (workplace / "runs").exists()
