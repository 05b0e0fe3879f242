"""`verl-slurm update-reward`, and what status says of the reward in force."""

import errno
import os
from pathlib import Path

import msgspec
import pytest

from tests.builders import reward_switch
from tests.cli.conftest import Cli, fail_storage
from tests.cli.test_checkpoints import save
from tests.cli.test_submit_local import wait_for_event
from tests.journals import append_event, read_events
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.wire.reward_plan import RewardPlan, read_reward_request, write_reward_plan

pytestmark = pytest.mark.slow

LOCAL = ("--cluster", "local")
RUNNING_JOB = Path(__file__).parents[1] / "slurm" / "golden" / "running.txt"
SOURCE = "def score(prompts, responses, answers): ...\n"


@pytest.fixture
def run(workplace: Path, cli: Cli) -> Path:
    result = cli("submit", "config.yaml", "--prepare-only")
    assert result.code == 0, result.err
    (workplace / "mine.py").write_text(SOURCE)
    return workplace / "runs" / "demo"


def test_a_wish_is_kept_with_absolute_paths_and_counts_from_the_next_start(
    workplace: Path, run: Path, cli: Cli
) -> None:
    result = cli(
        "update-reward",
        "--checkpoint",
        run,
        "--new-model",
        "python:mine.py:score",
        "--warm-start-steps",
        3,
        "--json",
    )
    assert result.code == 0, result.err
    reward = f"python:{workplace / 'mine.py'}:score"
    assert result.json["reward"] == reward
    assert result.json["when"] == "it counts from the next start on"
    request = read_reward_request(RunPaths(run))
    assert request is not None
    assert (request.number, request.reward, request.warm_start_steps) == (1, reward, 3)
    assert read_events(RunPaths(run))[-1]["event"] == "reward_asked"
    assert f"{reward} is asked for" in cli("status", run).out


def test_a_wish_that_the_journal_does_not_take_is_kept_and_the_job_is_asked(
    run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_storage("write", errno.ENOSPC, "events.jsonl", monkeypatch)
    result = cli("update-reward", "--checkpoint", run, "--new-model", "rule:arithmetic")
    assert result.code == 0, result.err
    assert "rule:arithmetic is asked for, and the journal could not be told: [Errno 28]" in result.error
    assert read_reward_request(RunPaths(run)) is not None


def test_a_directory_is_a_classifier(workplace: Path, run: Path, cli: Cli) -> None:
    refused = cli("update-reward", "--checkpoint", run, "--new-model", "model")
    assert "does not give one score" in refused.error, "the ranks would refuse it"
    config = workplace / "model/config.json"
    head = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "good"}}
    config.write_bytes(msgspec.json.encode(msgspec.json.decode(config.read_bytes()) | head))
    assert cli("update-reward", "--checkpoint", run, "--new-model", "model").code == 0
    of_the_run = run / "checkpoints/step_000004"
    assert cli("update-reward", "--checkpoint", of_the_run, "--new-model", "model").code == 0
    for half in ([run], ["--checkpoint", run], ["--new-model", "model"]):
        assert cli("update-reward", *half).code == ExitCode.USAGE
    request = read_reward_request(RunPaths(run))
    assert request is not None
    assert request.reward == f"classifier:{workplace / 'model'}"


@pytest.mark.parametrize(
    ("scontrol", "scancel"),
    [("cat job.txt", "echo 'scancel: error: Access denied' >&2; exit 1"), ("exit 1", "exit 1")],
    ids=["refused", "no answer"],
)
def test_a_wish_that_slurm_does_not_hand_on_is_kept_and_said_to_be(
    workplace: Path, run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, scontrol: str, scancel: str
) -> None:
    (workplace / "job.txt").write_text(RUNNING_JOB.read_text().replace("/home/ada/run/o", f"{run}/logs/o"))
    monkeypatch.setenv("PATH", str(workplace / "bin"), prepend=os.pathsep)
    (workplace / "bin").mkdir()
    for name, script in (("scontrol", scontrol), ("scancel", scancel)):
        program = workplace / "bin" / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
    append_event(RunPaths(run), "submitted", cluster="slurm", job_id="1")
    result = cli("update-reward", "--checkpoint", run, "--new-model", "rule:arithmetic", "--json")
    assert result.code == ExitCode.OK
    assert "the run's job could not be told" in result.error
    said = result.json
    assert "taken at the next start" in said["when"]
    assert said["problem"] in result.error
    request = read_reward_request(RunPaths(run))
    assert request is not None
    assert request.number == said["request"] == 1


@pytest.mark.parametrize(
    ("new", "code", "said"),
    [
        ("rule:nosuch", ExitCode.CONFIG, "rule:arithmetic"),
        ("nosuch", ExitCode.CONFIG, "no such reward"),
        ("classifier:data", ExitCode.DATA, "config.json"),
        ("python:mine.py:other", ExitCode.CONFIG, "nothing named 'other'"),
        ("python:nosuch_module_of_ours:score", ExitCode.CONFIG, "no module"),
    ],
)
def test_what_is_no_reward_is_refused_before_the_run_hears_of_it(
    run: Path, cli: Cli, new: str, code: ExitCode, said: str
) -> None:
    result = cli("update-reward", "--checkpoint", run, "--new-model", new)
    assert result.code == code
    assert said in result.error
    assert read_reward_request(RunPaths(run)) is None


def test_a_living_run_is_woken_as_for_any_request_of_an_operator(workplace: Path, cli: Cli) -> None:
    assert cli("submit", "config.yaml", *LOCAL).code == 0
    run = workplace / "runs" / "demo"
    wait_for_event(run, "started")
    result = cli("update-reward", "--checkpoint", run, "--new-model", "rule:arithmetic")
    assert result.code == 0, result.err
    assert "takes it at the end of a step" in result.out
    cli("watch", run)
    causes = [event["cause"] for event in read_events(RunPaths(run)) if event["event"] == "cause"]
    assert causes == ["SIGUSR1"]


def test_status_shows_the_reward_in_force_and_a_refusal(run: Path, cli: Cli) -> None:
    assert cli("status", run, "--json").json["reward"]["reward"] == "rule:arithmetic"
    switch = reward_switch("python:m:f", 2, warm_start_steps=5)
    plan = RewardPlan(handled=2, refused="trying the new reward failed", switches=(switch,))
    write_reward_plan(RunPaths(run), plan)
    RunPaths(run).status.write_text('{"step": 4}')
    out = cli("status", run).out
    assert (
        "python:m:f, since step 3, warm start for 3 more steps, another one was REFUSED: trying the new reward failed"
        in out
    )
    # A start whose ranks have said nothing yet, behind a checkpoint that has the replacement behind it.
    RunPaths(run).status.write_text('{"step": 0, "phase": ""}')
    assert "rule:arithmetic, another one" in cli("status", run).out
    save(RunPaths(run), 3)
    assert "python:m:f, since step 3, warm start for 4 more steps" in cli("status", run).out
    RunPaths(run).reward_plan.write_bytes(b"{")
    result = cli("status", run)
    assert result.code == 0
    assert "not known: " in result.out


def test_a_link_in_the_place_of_the_wish_is_refused_and_not_written_over(
    workplace: Path, run: Path, cli: Cli
) -> None:
    wish = RunPaths(run).reward_request
    wish.parent.mkdir(mode=0o700, exist_ok=True)
    (workplace / "theirs").write_text("{}")
    wish.symlink_to(workplace / "theirs")
    result = cli("update-reward", "--checkpoint", run, "--new-model", "python:mine.py:score")
    assert result.code == ExitCode.PERMISSION
    assert "no regular file, but a link" in result.error
    assert (workplace / "theirs").read_text() == "{}"
