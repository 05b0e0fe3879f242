"""`verl_slurm.submit` and `Run`, as a script and a notebook use them."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import assert_type

import pytest

import verl_slurm
from tests.harness import ROOT
from tests.local_runs import QUICK
from tests.many_runs import make_run
from verl_slurm.base.errors import ConfigError, NotFound
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.config.load import override_word, parse_config
from verl_slurm.journal.events import Ended, Event, Submitted

WORDS: dict[str, object] = dict(word.split("=", 1) for word in QUICK)


def submit(tmp_path: Path, **more: object) -> verl_slurm.Run:
    values = (
        WORDS | more | {"run_dir": str(tmp_path / "run"), "distributed.nodes": 1, "distributed.dp_size": 1}
    )
    # As text they would be texts: the interface takes values.
    values = {key: int(value) if str(value).isdigit() else value for key, value in values.items()}
    values["daemon.backoff_s"] = 0.2
    return verl_slurm.submit("quickstart", values, cluster="local")


@pytest.mark.usefixtures("ranks_without_torch")
def test_a_run_is_submitted_waited_for_and_looked_at(tmp_path: Path) -> None:
    run = submit(tmp_path)
    seen: list[Event] = []
    code = run.wait(seen.append)
    assert_type(code, ExitCode)
    assert code is ExitCode.OK
    assert isinstance(seen[-1], Ended)
    assert any(isinstance(event, Submitted) for event in run.events())
    status = run.status()
    assert (status.state, status.step, status.steps, status.job_id) == ("done", 2, 2, run.job_id)
    assert status.checkpoint == "step_000002"
    with pytest.raises(NotFound, match="no living job"):
        run.cancel()


@pytest.mark.usefixtures("ranks_without_torch")
def test_a_run_that_goes_on_is_saved_and_cancelled_from_within_an_event_loop(tmp_path: Path) -> None:
    async def as_in_a_notebook() -> ExitCode:
        run = submit(tmp_path, **{"train.steps": 500})
        loop, training = asyncio.get_running_loop(), asyncio.Event()

        def hear(event: Event) -> None:
            if type(event).__name__ == "FirstRollout":
                loop.call_soon_threadsafe(training.set)

        ended = asyncio.create_task(asyncio.to_thread(run.wait, hear))
        await training.wait()
        assert run.status().state == "running"
        assert run.save()
        run.cancel()
        return await ended

    assert asyncio.run(as_in_a_notebook()) is ExitCode.CANCELLED


def test_what_the_command_refuses_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.step"):
        verl_slurm.submit("quickstart", {"train.step": 3, "run_dir": str(tmp_path / "run")}, cluster="local")
    with pytest.raises(NotFound):
        verl_slurm.Run(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "007"),
        ("name", "true"),
        ("slurm.partition", None),
        ("slurm.partition", "gpu"),
        ("train.lr_schedule", "cosine"),
        ("train.actor_lr", 1e-6),
        ("deterministic", False),
        ("slurm.extra", {"constraint": "a100 & nvme", "nice": 5}),
        ("slurm.setup", ["echo 'a b'", 'export X="ä"']),
    ],
)
def test_a_value_arrives_as_it_was_given(key: str, value: object) -> None:
    found: object = parse_config(b"", "my.yaml", [override_word(key, value)])
    for part in key.split("."):
        found = getattr(found, part)
    assert (list(found) if isinstance(found, tuple) else found) == value


def test_an_existing_run_is_opened_by_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run", "done", job_id="4")
    monkeypatch.chdir(tmp_path)
    run = verl_slurm.Run("run")
    assert (run.path, run.job_id) == (tmp_path / "run", "4")
    assert repr(run) == f"Run('{tmp_path}/run')"
    assert_type(run.status(), verl_slurm.RunStatus)
    assert run.status().state == "done"


@pytest.mark.parametrize(
    "before",
    [
        "",
        "import verl_slurm.submit.submission_plan; ",
        "from verl_slurm import submit; assert callable(submit); ",
    ],
)
def test_the_function_is_there_whatever_of_the_package_was_imported_before(before: str) -> None:
    program = (
        f"{before}import sys, verl_slurm\n"
        "from verl_slurm.base.errors import VerlSlurmError\n"
        "for _ in range(2):\n"
        "    try: verl_slurm.submit('/no/such.yaml')\n"
        "    except VerlSlurmError as error: print(int(error.exit_code))\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout.split() == ["10", "10"], done.stderr


@pytest.mark.long  # each of its calls is shown above
@pytest.mark.torch
def test_the_page_s_program_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "RunStatus(state='done', step=3, steps=3" in done.stdout
