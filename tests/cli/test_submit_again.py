"""What `submit` says of a run that is there already, and of what will be trained."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.test_checkpoints import save
from tests.journals import append_event
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.submit.submission import carry_out, plan_submission

Cli = Callable[..., Any]


def test_a_run_that_is_done_is_not_queued_again(workplace: Path, cli: Cli) -> None:
    words = ("submit", "config.yaml", "--cluster", "local", "train.steps=3", "run_dir=run")
    assert cli(*words, "--dry-run").code == ExitCode.OK
    carry_out(plan_submission(Path("config.yaml"), list(words[4:]), cluster="local"), prepare_only=True)
    run = RunPaths(workplace / "run")
    save(run, 3)
    job = {"job_id": "999999999", "cluster": "local", "host": socket.gethostname()}
    append_event(run, "started", attempt=1, **job)
    append_event(run, "ended", attempt=1, job_id="999999999", exit_code=0, reason="done")
    for more in ((), ("--dry-run",)):
        result = cli(*words, *more)
        assert result.code == ExitCode.CONFIG
        assert "all 3 steps are done" in result.error
        assert "raise train.steps" in result.error
    again = ("submit", "config.yaml", "--cluster", "local", "run_dir=run", "--dry-run")
    assert cli(*again, "train.steps=4").code == ExitCode.OK
    append_event(run, "started", attempt=2, **job)
    assert cli(*again, "train.steps=3").code == ExitCode.OK, "the newest attempt has not ended well"


def test_what_will_be_trained_is_one_line_that_marks_the_defaults(workplace: Path, cli: Cli) -> None:
    words = ("train.algorithm=grpo", "train.steps=100", "train.actor_lr=1e-6", "rollout.samples_per_prompt=4")
    err = cli("submit", "config.yaml", "--cluster", "local", "--dry-run", *words, "distributed.dp_size=2").err
    [line] = [line for line in err.splitlines() if "trains  " in line]
    assert line.endswith(
        "trains  grpo, 100 steps of 128 responses (default), 4 to a prompt, up to 6 tokens (default), lr 1e-06, 2 ranks"
    )


def test_another_learning_rate_names_the_way_on(workplace: Path, cli: Cli) -> None:
    carry_out(plan_submission(Path("config.yaml"), ["run_dir=run"], cluster="local"), prepare_only=True)
    save(RunPaths(workplace / "run"), 1)
    error = cli("submit", "config.yaml", "--cluster", "local", "run_dir=run", "train.actor_lr=1e-9").error
    assert f"name=NEW run_dir=NEW), with checkpoint.resume_from={workplace}/run/checkpoints/NAME" in error
    other = ("submit", "config.yaml", "--cluster", "local", "run_dir=new", "train.actor_lr=1e-9", "--dry-run")
    result = cli(*other, f"checkpoint.resume_from={workplace}/run")
    assert result.code == ExitCode.NOT_FOUND, "a run is not the checkpoint that the ranks would look for"
    assert f"set checkpoint.resume_from={workplace}/run/checkpoints/step_000001" in result.error


def test_a_run_whose_machine_is_gone_goes_on_after_a_cancel(workplace: Path, cli: Cli) -> None:
    """A container has another name at each start, and what it ran was killed without a word."""
    words = ("submit", "config.yaml", "--cluster", "local", "run_dir=run")
    carry_out(plan_submission(Path("config.yaml"), ["run_dir=run"], cluster="local"), prepare_only=True)
    run = RunPaths(workplace / "run")
    save(run, 1)
    append_event(run, "submitted", job_id="17", cluster="local", host="gone-1")
    append_event(run, "started", attempt=1, job_id="17", cluster="local", host="gone-1")
    for refused in (cli(*words, "--dry-run").error, cli("requeue", run.root).error):
        assert "it was started on gone-1" in refused
        assert f"verl-slurm cancel {run.root}" in refused
        assert "if gone-1 is gone" in refused
    cancelled = cli("cancel", run.root)
    assert cancelled.code == ExitCode.OK
    assert "the same cancel there ends it" in cancelled.err
    assert cli("watch", run.root).code == ExitCode.CANCELLED
    assert [one["state"] for one in cli("list", workplace, "--json").json] == ["cancelled"]
    assert "cancelled by its user\n" in cli("status", run.root).out
    again = cli(*words, "--dry-run")
    assert again.code == ExitCode.OK, again.err
    append_event(run, "started", attempt=2, job_id="18", cluster="local", host="gone-2")
    assert cli(*words, "--dry-run").code == ExitCode.FENCED, "the cancel was of the job before"
