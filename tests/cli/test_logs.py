"""`logs`: which file, how much of it, and on into the next start's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.journals import append_event
from tests.many_runs import make_run
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.runs.follow import follow_newest

Cli = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = make_run(tmp_path / "run")
    paths.run_yaml.write_text(
        "name: run\nmodel: {path: m}\ndata: {root: d}\ndistributed: {nodes: 2, dp_size: 4}\n"
    )
    paths.logs.mkdir()
    paths.rank_log(1, 1, 0).write_text("a\nb\nc\n")
    paths.rank_log(1, 1, 1).write_text("old\n")
    paths.rank_log(2, 1, 1).write_text("new\n")
    return paths


def test_a_rank_is_found_on_its_node(cli: Cli, run: RunPaths) -> None:
    assert cli("logs", run.root, "--rank", 1).out == "a\nb\nc\n"
    assert cli("logs", run.root, "--rank", 2).out == "new\n"
    missing = cli("logs", run.root, "--rank", 4)
    assert missing.code == ExitCode.NOT_FOUND
    assert "expected 0 to 3" in missing.error
    assert cli("logs", run.root, "--rank", 1, "--node", 1).code == ExitCode.USAGE


def test_ranks_that_stand_by_are_no_start_yet(cli: Cli, run: RunPaths) -> None:
    append_event(run, "restart", attempt=9, number=1)
    run.rank_log(9, 1, 0).write_text("trains\n")
    run.rank_log(9, 2, 0).write_text("")
    assert cli("logs", run.root, "--rank", 0).out == "trains\n"


def test_the_last_lines_only_and_as_json(cli: Cli, run: RunPaths) -> None:
    assert cli("logs", run.root, "--node", 0, "-n", 2).out == "b\nc\n"
    line = cli("logs", run.root, "--node", 1, "--json").json
    assert line == {"file": str(run.rank_log(2, 1, 1)), "line": "new"}
    assert len(cli("logs", run.root, "--all", "--json").json) == 3


def test_following_goes_on_in_the_next_starts_file(run: RunPaths) -> None:
    def newest() -> Path:
        return max(run.logs.glob("*.node_0000.log"))

    first, second = run.rank_log(1, 1, 0), run.rank_log(2, 1, 0)
    lines = follow_newest(run.logs, newest, 5)
    assert [next(lines) for _ in range(3)] == [(first, word) for word in (b"a", b"b", b"c")], "of fewer, all"
    lines.close()
    lines = follow_newest(run.logs, newest, 1)
    assert next(lines) == (first, b"c")
    with first.open("a") as file:
        file.write("d\nkilled in the mid")
    assert next(lines) == (first, b"d")
    second.write_text("again\n")
    assert [next(lines), next(lines)] == [(first, b"killed in the mid"), (second, b"again")]
    with second.open("a") as file:
        file.write("more\n")
    assert next(lines) == (second, b"more")
    lines.close()


@pytest.mark.scenario("USE-SMALL")
def test_lines_of_slurm_s_own_are_marked_as_such(cli: Cli, run: RunPaths) -> None:
    lines = [
        "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED ***",
        "srun: error: Broken pipe",
        "srun is a word",
    ]
    run.rank_log(1, 1, 0).write_text("\n".join([*lines, "submitit INFO (2026): Job has started"]) + "\n")
    shown = cli("logs", run.root, "--rank", 1).out.splitlines()
    assert [line.split()[0] for line in shown] == ["[Slurm]", "[Slurm]", "srun", "[submitit]"]


def test_a_service_has_a_log_for_each_of_its_nodes(cli: Cli, run: RunPaths) -> None:
    for attempt, index, text in ((1, 0, "old\n"), (2, 0, "first\n"), (2, 1, "second\n")):
        run.service_log(attempt, "judge", index).write_text(text)
    assert cli("logs", run.root, "--service", "judge").out == "first\n"
    assert cli("logs", run.root, "--service", "judge", "--node", 1).out == "second\n"
    assert cli("logs", run.root, "--service", "sandbox").code == ExitCode.NOT_FOUND
    assert cli("logs", run.root, "--service", "judge", "--rank", 0).code == ExitCode.USAGE
