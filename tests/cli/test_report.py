"""`verl-slurm report`: the page, the facts as JSON, and what is refused."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interrupted_runs import make_interrupted_run
from verl_slurm.base.exit_codes import ExitCode

Cli = Callable[..., Any]


def test_the_page_is_one_file_for_its_owner_alone(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_interrupted_run(tmp_path / "run", 2)
    monkeypatch.chdir(tmp_path)
    done = cli("report", run.root)
    page = tmp_path / "report.html"
    assert done.out.splitlines()[0].split() == ["page", str(page)]
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    text = page.read_text()
    assert "What is 0 + 4?" in text
    assert "http" not in text.replace("http-equiv", "").split("<script>")[0]
    assert "What is 0 + 4?" not in (cli("report", run.root, "--samples", 0), page.read_text())[1]


def test_json_has_the_same_numbers_as_status_and_writes_no_page(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_interrupted_run(tmp_path / "run", 9)
    monkeypatch.chdir(tmp_path)
    facts = cli("report", run.root, "--json").json["runs"][0]
    status = cli("status", run.root, "--json").json
    assert facts["interruptions"] == status["interruptions"]
    assert facts["step"] == status["step"]
    assert not (tmp_path / "report.html").exists()
    both = cli("report", run.root, f"{run.root}/", "--json", "--out", tmp_path / "page.html")
    assert len(both.json["runs"]) == 1, "named twice, told once"
    assert both.json["runs"][0]["name"] == "run"
    assert (tmp_path / "page.html").exists()


def test_a_directory_that_is_no_run_and_a_place_that_cannot_be_written_are_refused(
    cli: Cli, tmp_path: Path
) -> None:
    refused = cli("report", tmp_path)
    assert refused.code == ExitCode.NOT_FOUND
    assert "not a run directory" in refused.error
    run = make_interrupted_run(tmp_path / "run", 0)
    assert "shows the runs below it" in cli("report", tmp_path).error
    closed = cli("report", run.root, "--out", tmp_path / "none" / "page.html")
    assert closed.code == ExitCode.PERMISSION
    assert "the page cannot be written" in closed.error


def test_a_damaged_run_says_so_beside_the_page(cli: Cli, tmp_path: Path) -> None:
    run = make_interrupted_run(tmp_path / "run", 1)
    run.run_yaml.unlink()
    out = cli("report", run.root, "--out", tmp_path / "page.html").out
    assert "missing  run: run.yaml" in out


def test_only_a_page_is_replaced_and_a_link_to_one_is_followed(cli: Cli, tmp_path: Path) -> None:
    """Found with /dev/full and a run's own run.yaml, which a report replaced."""
    run = make_interrupted_run(tmp_path / "run", 0)
    before = run.run_yaml.read_bytes()
    os.mkfifo(tmp_path / "fifo")
    for place in (run.run_yaml, tmp_path / "fifo", tmp_path):
        refused = cli("report", run.root, "--out", place)
        assert refused.code == ExitCode.PERMISSION
        assert "something else is in the way" in refused.error
    assert run.run_yaml.read_bytes() == before
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(page)
    for _ in range(2):
        cli("report", run.root, "--out", link)
    assert link.is_symlink()
    assert page.read_text().startswith("<!doctype html>")
