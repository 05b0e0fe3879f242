"""A run on this machine through submitit's local executor, with a stub lead: from submit to the end."""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.journals import append_event
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import load_resolved

pytestmark = pytest.mark.slow

Cli = Callable[..., Any]
ROOT = Path(__file__).parents[2]
LOCAL = ("--cluster", "local")


def wait_for_event(run: Path, event: str) -> dict[str, Any]:
    """Block until the run's journal has this event."""
    from tests.lines import follow_lines

    for line in follow_lines(run / "events.jsonl", silence_s=lambda: 60.0):
        assert line is not None, f"no {event} for a minute"
        found: dict[str, Any] = json.loads(line)
        if found["event"] == event:
            return found
    raise AssertionError


def begin(run: Path) -> None:
    """Give the run a rollout, as the ranks would: it has begun."""
    (run / "ledger").mkdir(mode=0o700)
    (run / "ledger" / "attempt_000001.rank_0000.ledger").write_bytes(bytes(100))
    append_event(RunPaths(run), "started", attempt=1)


def test_a_run_is_made_private_with_absolute_paths_and_told_to_its_end(workplace: Path, cli: Cli) -> None:
    assert "no runs in" in cli("list", workplace).out
    result = cli("submit", "config.yaml", "name=demo-quick", "train.steps=7", *LOCAL, "--wait")
    run = workplace / "runs" / "demo-quick"
    assert result.code == 0
    assert f"run directory  {run}" in result.out
    assert f"verl-slurm watch {run}" in result.out
    assert "runs on here, attempt 1" in result.out
    assert "ended with 0, done" in result.out
    for path in [run, *run.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    config = load_resolved(run / "run.yaml")
    assert (config.train.steps, config.run_dir) == (7, str(run))
    assert (config.data.root, config.model.path) == (str(workplace / "data"), str(workplace / "model"))
    assert [Path(run["run_dir"]).name for run in cli("list", "--json").json] == ["demo-quick"]
    assert "demo-quick" in cli("list", "runs").out
    assert "no checkpoints" in cli("list", "runs/demo-quick").out


def test_json_says_the_same_to_a_script(workplace: Path, cli: Cli) -> None:
    result = cli("submit", "config.yaml", "name=demo-quick", *LOCAL, "--json", "--wait")
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert lines[0]["cluster"] == "local"
    assert lines[0]["new_run"] is True
    assert int(lines[0]["job_id"]) > 1
    # The run may have ended before the command writes that it was submitted.
    assert sorted(line["event"] for line in lines[1:]) == ["ended", "started", "submitted"]


@pytest.mark.parametrize(
    ("name", "code"), [("demo-crash", ExitCode.CRASHED), ("demo-mute", ExitCode.CRASHED)]
)
def test_wait_ends_with_the_run_s_own_code(workplace: Path, cli: Cli, name: str, code: ExitCode) -> None:
    result = cli("submit", "config.yaml", f"name={name}", *LOCAL, "--wait")
    assert result.code == code


def test_the_lead_is_the_process_that_submitit_started_with_a_clean_environment(
    workplace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1")
    monkeypatch.setenv("SBATCH_NO_REQUEUE", "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    result = cli("submit", "config.yaml", "name=demo-quick", *LOCAL, "--json", "--wait")
    run = workplace / "runs" / "demo-quick"
    job_id = json.loads(result.out.splitlines()[0])["job_id"]
    _, parent, *_ = (run / "pid").read_text().split()
    assert parent == job_id
    environment = json.loads((run / "environment.json").read_text())
    left = {name for name in environment if name.startswith(("SLURM_", "SBATCH_"))}
    assert left == {"SLURM_CONF"}
    assert os.getsid(os.getpid()) != int(job_id)


@pytest.mark.scenario("SEC13")
def test_submit_imports_nothing_from_the_directory_it_stands_in(
    workplace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    eves = workplace / "eve"
    eves.mkdir()
    for module in ("submitit", "verl_slurm", "msgspec", "typing", "logging"):
        (eves / f"{module}.py").write_text(f"open({str(workplace / 'witness')!r}, 'a').write(__name__)\n")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.chdir(eves)
    words = (
        f"data.root={workplace}/data",
        f"model.path={workplace}/model",
        f"run_dir={workplace}/demo-quick",
    )
    result = cli("submit", workplace / "config.yaml", *words, *LOCAL, "--wait")
    assert not (workplace / "witness").exists(), (workplace / "witness").read_text()
    assert result.code == 0, result.err


@pytest.mark.scenario("SEC16")
def test_the_name_of_an_example_means_the_example_whatever_lies_here(workplace: Path, cli: Cli) -> None:
    (workplace / "config.yaml").rename(workplace / "quickstart")
    dry = ("--dry-run", "--json", *LOCAL)
    result = cli("submit", "quickstart", *dry)
    assert result.json["run_dir"] == str(workplace / "runs" / "quickstart"), result.err
    assert "what lies here is ./quickstart" in result.err
    assert cli("submit", "./quickstart", *dry).json["run_dir"] == str(workplace / "runs" / "demo")


@pytest.mark.scenario("SEC16")
def test_a_configuration_that_others_own_or_may_write_is_named(workplace: Path, cli: Cli) -> None:
    config, words = workplace / "config.yaml", ("submit", "config.yaml", "--dry-run", *LOCAL)
    config.chmod(0o600)
    assert "can have programs run as you" not in cli(*words).err
    config.chmod(0o666)
    assert f"the configuration is {config}, which others may write (mode 0666)" in cli(*words).err
    if os.geteuid() == 0:
        config.chmod(0o644)
        os.chown(config, 65534, 65534)
        assert f"the configuration is {config}, which uid 65534 owns" in cli(*words).err


def test_cancel_ends_the_job_for_good(workplace: Path, cli: Cli) -> None:
    cli("submit", "config.yaml", *LOCAL)
    run = workplace / "runs" / "demo"
    wait_for_event(run, "started")
    controller = psutil.Process(int(cli("status", run, "--json").json["job_id"]))
    assert cli("cancel", run).code == 0
    assert cli("watch", run).code == ExitCode.CANCELLED
    psutil.wait_procs([controller], timeout=20)
    state = cli("status", run, "--json").json
    assert (state["job_state"], state["job_over"]) == ("GONE", True)
    assert "ended with 23" in state["ended"]
    result = cli("cancel", run)
    assert result.code == ExitCode.NOT_FOUND
    assert "no living job" in result.error


def test_requeue_ends_one_life_and_watch_follows_into_the_next(workplace: Path, cli: Cli) -> None:
    cli("submit", "config.yaml", *LOCAL)
    run = workplace / "runs" / "demo"
    wait_for_event(run, "started")
    assert cli("requeue", run).code == 0
    result = cli("watch", run)
    assert result.code == 0
    told = result.out
    assert told.index("ended with 25") < told.index("attempt 2") < told.index("ended with 0")
    assert "PREEMPTION" not in told


def test_a_run_with_a_living_job_is_not_submitted_again(workplace: Path, cli: Cli) -> None:
    cli("submit", "config.yaml", *LOCAL)
    run = workplace / "runs" / "demo"
    wait_for_event(run, "started")
    result = cli("submit", "config.yaml", *LOCAL)
    assert result.code == ExitCode.FENCED
    assert "the run has a job already" in result.error
    cli("cancel", run)


def test_the_same_run_goes_on_with_other_slurm_settings_only(workplace: Path, cli: Cli) -> None:
    base = ("submit", "config.yaml", "name=demo-quick", *LOCAL, "--wait")
    cli(*base)
    run = workplace / "runs" / "demo-quick"
    begin(run)
    again = cli(*base, "slurm.time_limit_min=99", "--json")
    assert json.loads(again.out.splitlines()[0])["changed"] == ["slurm.time_limit_min"]
    assert load_resolved(run / "run.yaml").slurm.time_limit_min == 99
    before = (run / "run.yaml").read_bytes()
    refused = cli(*base, "train.actor_lr=0.5", "seed=3")
    assert refused.code == ExitCode.CONFIG
    assert "seed: 0 -> 3; train.actor_lr: 0.001 -> 0.5" in refused.error
    assert (run / "run.yaml").read_bytes() == before


def test_a_run_directory_is_a_configuration_too(workplace: Path, cli: Cli) -> None:
    cli("submit", "config.yaml", "name=demo-quick", *LOCAL, "--wait")
    result = cli("submit", "runs/demo-quick", *LOCAL, "--wait")
    assert result.code == 0
    assert "goes on" in result.out


def test_changed_data_is_refused_with_the_files_until_it_is_accepted(workplace: Path, cli: Cli) -> None:
    base = ("submit", "config.yaml", "name=demo-quick", *LOCAL, "--wait")
    cli(*base)
    run = workplace / "runs" / "demo-quick"
    begin(run)
    (workplace / "data" / "train.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    (workplace / "data" / "more.jsonl").write_text('{"prompt": "3+3=", "answer": "6"}\n')
    before = (run / ".dataset_fingerprint").read_bytes()
    assert cli(*base, "--dry-run").code == ExitCode.DATASET_DRIFT
    refused = cli(*base)
    assert refused.code == ExitCode.DATASET_DRIFT
    assert "more.jsonl" in refused.error
    assert "train.jsonl" in refused.error
    assert "--force-resume" in refused.error
    unconfirmed = cli(*base, "--force-resume")
    assert unconfirmed.code == ExitCode.DATASET_DRIFT
    assert "--yes" in unconfirmed.err
    assert (run / ".dataset_fingerprint").read_bytes() == before
    drift = cli("fingerprint", run, "--json")
    assert drift.code == ExitCode.DATASET_DRIFT
    assert (drift.json["added"], drift.json["changed"]) == (["more.jsonl"], ["train.jsonl"])
    accepted = cli(*base, "--force-resume", "--yes")
    assert accepted.code == 0
    assert "goes on with changed data, as asked: 1 added, 0 removed, 1 changed" in accepted.out
    assert "rows may come again, or never" in accepted.err
    assert cli("fingerprint", run).code == 0


def test_prepare_only_makes_the_run_and_says_how_to_sbatch_it(workplace: Path, cli: Cli) -> None:
    for words in (LOCAL, ["--wait"]):
        assert cli("submit", "config.yaml", "--prepare-only", *words).code == ExitCode.USAGE
    result = cli("submit", "config.yaml", "--prepare-only")
    run = workplace / "runs" / "demo"
    assert result.code == 0
    assert "sbatch --cpus-per-task=1" in result.out
    assert f"{ROOT}/sbatch/multi_node.sbatch {run}" in result.out
    assert (run / "run.yaml").exists()
    status = cli("status", run)
    assert "none yet" in status.out
    for_scripts = cli("submit", "config.yaml", "--prepare-only", "--json").json
    assert shlex.join(for_scripts["sbatch"]) == result.out.splitlines()[-1]


@pytest.mark.scenario("M11")
def test_logs_are_shown_without_their_escape_sequences(workplace: Path, cli: Cli) -> None:
    cli("submit", "config.yaml", "name=demo-quick", *LOCAL, "--wait")
    result = cli("logs", "runs/demo-quick")
    assert "the stub lead prints \\x1b[31mred" in result.out
    assert "\x1b" not in result.out
    assert "_0_log.out" in cli("logs", "--all", "runs/demo-quick").out
    logs = workplace / "runs/demo-quick/logs"
    for attempt in (1, 2):
        (logs / f"attempt_00000{attempt}.node_0001.agent.log").write_text(f"agent of {attempt}\n")
    assert cli("logs", "--node", "1", "--agent", "runs/demo-quick").out == "agent of 2\n"
    assert "agent.log" in cli("logs", "--all", "runs/demo-quick").out
    assert cli("logs", "--node", "1", "runs/demo-quick").code == 18, "the ranks' are others"
    assert cli("logs", "--agent", "runs/demo-quick").code == 2
    missing = cli("logs", "--node", "0", "runs/demo-quick")
    assert missing.code == ExitCode.NOT_FOUND


def test_a_run_that_came_to_nothing_may_be_submitted_with_any_change(workplace: Path, cli: Cli) -> None:
    base = ("submit", "config.yaml", "name=demo-crash", *LOCAL)
    cli(*base, "--wait")
    run = workplace / "runs" / "demo-crash"
    (run / "orchestration.json").write_text("{}")
    (workplace / "data" / "train.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    assert "failed with 22" in cli("status", run).out
    assert "failed with 22" in cli("list").out
    assert "has not begun" in cli(*base, "seed=3", "--dry-run").err
    again = cli(*base, "seed=3", "--wait", "--json")
    assert json.loads(again.out.splitlines()[0])["changed"] == ["seed"]
    assert load_resolved(run / "run.yaml").seed == 3
    assert not (run / "orchestration.json").exists()
    assert cli("fingerprint", run).code == 0


def test_steps_of_a_run_may_be_raised(workplace: Path, cli: Cli) -> None:
    base = ("submit", "config.yaml", "name=demo-quick", "train.steps=7", *LOCAL)
    cli(*base, "--wait")
    run = workplace / "runs" / "demo-quick"
    begin(run)
    (run / "status.json").write_text('{"step": 7}')
    assert cli(*base, "train.steps=9", "--dry-run").code == 0
    assert cli(*base, "train.steps=6", "--dry-run").code == ExitCode.CONFIG


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "inverse_sqrt"])
def test_more_steps_of_a_falling_rate_are_pointed_out(workplace: Path, cli: Cli, schedule: str) -> None:
    decay = ["train.lr_decay_steps=2"] if schedule == "wsd" else []
    base = ("submit", "config.yaml", "name=demo-quick", f"train.lr_schedule={schedule}", *decay)
    cli(*base, "train.steps=7", "--prepare-only")
    begin(workplace / "runs" / "demo-quick")
    result = cli(*base, "train.steps=9", *LOCAL, "--dry-run")
    assert result.code == 0
    told = f"changes the {schedule} schedule" in result.err
    assert told is (schedule != "inverse_sqrt")


def test_a_copy_of_a_run_is_not_submitted(workplace: Path, cli: Cli) -> None:
    cli("submit", "config.yaml", "--prepare-only")
    shutil.copytree("runs/demo", "runs/copy")
    result = cli("submit", "runs/copy", *LOCAL)
    assert result.code == ExitCode.CONFIG
    assert f"made as {workplace}/runs/demo and lies in {workplace}/runs/copy" in result.error
