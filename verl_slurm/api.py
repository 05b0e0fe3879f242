"""The Python interface: submits a run, follows it and ends it, as the commands do.

```python
run = verl_slurm.submit("my.yaml", {"train.actor_lr": 1e-6, "seed": 2})
print(run.status().state)
assert run.wait() == ExitCode.OK
```

A function here checks, refuses and raises what the command of its name does; `VerlSlurmError` has the exit code and the
line for people. It may be called where an event loop runs (a notebook): then it works in a thread of its own.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import msgspec

from verl_slurm.base.errors import NotFound
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.shipped import example
from verl_slurm.config.load import override_word
from verl_slurm.journal.events import Event
from verl_slurm.journal.files import read_events
from verl_slurm.runs.follow import follow_run
from verl_slurm.runs.glance import ask_for, glance, state_of
from verl_slurm.runs.requests import ask_for_save, cancel_run, requeue_run
from verl_slurm.runs.run_record import last_job, require_run
from verl_slurm.submit.submission import carry_out, plan_submission

P = ParamSpec("P")
T = TypeVar("T")


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands, from its files and one question to the scheduler."""

    state: str
    """As in `verl-slurm list`: prepared, queued, starting, running, saving, suspended, gone, done, cancelled, ...
    A `?` behind it: this machine cannot tell whether the run lives."""
    step: int
    """Completed steps."""
    steps: int
    """All steps; 0: the loop has not said yet."""
    checkpoint: str | None
    """Name of the newest checkpoint."""
    job_id: str | None
    interruptions: int
    interrupted_s: float
    """Seconds that the interruptions cost, those that are over."""


def submit(
    config: str | os.PathLike[str],
    overrides: Mapping[str, object] | None = None,
    *,
    cluster: Literal["auto", "slurm", "local"] = "auto",
    verl: Sequence[str] = (),
    code: Literal["run", "new"] | None = None,
) -> "Run":
    """Checks a configuration and starts the run that it describes, as `verl-slurm submit` does.

    Args:
        config: a YAML file, the directory of a run that is to go on, or the name of a shipped example.
        overrides: values of keys, e.g. `{"train.steps": 50}`; they win over the file.
        cluster: `auto` is Slurm where its commands are installed, else this machine.
        verl: words for verl itself, e.g. `trainer.total_epochs=3`.
        code: if the program's code has changed since the run was submitted: `run` goes on with the run's copy, `new`
            takes the code as it is now; None: refuse.

    Raises:
        VerlSlurmError: what is wrong; nothing half-made stays.
    """
    source = example(os.fspath(config)) or Path(config)
    words = [override_word(key, value) for key, value in (overrides or {}).items()]

    def work() -> Run:
        plan = plan_submission(source, words, verl=verl, cluster=cluster, code=code)
        done = carry_out(plan)
        return Run(done.run_dir, notes=done.notes)

    return _beside_any_loop(work)


class Run:
    """A run: its directory, and the jobs that work on it.

    Args:
        notes: what `submit` had to say.

    Raises:
        NotFound: there is no run.
    """

    def __init__(self, path: str | os.PathLike[str], *, notes: Sequence[str] = ()) -> None:
        self._paths = require_run(RunPaths(Path(os.path.realpath(path))))
        self.notes = tuple(notes)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        return self._paths.root

    @property
    def job_id(self) -> str | None:
        """The id of the newest job; None: it was never submitted."""
        try:
            return last_job(self._paths).job_id
        except NotFound:
            return None

    def status(self) -> RunStatus:
        """Returns where the run stands; if Slurm does not answer, the state has a `?`."""
        return _beside_any_loop(self._status)

    def _status(self) -> RunStatus:
        found = glance(self.path)
        seen, _ = ask_for([found])
        return RunStatus(
            state=state_of(found, seen.get(self.path)),
            step=max(int(found.status.get("step") or 0), 0),
            steps=max(int(found.status.get("steps") or 0), 0),
            checkpoint=None if found.checkpoint is None else found.checkpoint.name,
            job_id=None if found.job is None else found.job.job_id,
            interruptions=found.interruptions,
            interrupted_s=found.interrupted_s,
        )

    def events(self) -> list[Event]:
        """Returns what has happened until now, oldest first (`verl_slurm.journal.events`)."""
        return read_events(self._paths)

    def wait(self, on_event: Callable[[Event], None] | None = None) -> ExitCode:
        """Waits over all requeues until the run has ended; returns its exit code.

        Args:
            on_event: gets each event, from the first on.

        Raises:
            NotFound: it was never submitted.
        """
        return _beside_any_loop(follow_run, self._paths, 0, on_event or (lambda event: None))

    def cancel(self) -> None:
        """Ends the run's job for good. Returns at once; `wait` tells of the end.

        Raises:
            NotFound: it has no living job.
            SlurmMissing, SlurmRefused: the request failed.
        """
        _beside_any_loop(cancel_run, self._paths)

    def requeue(self, *, at_once: bool = False) -> None:
        """Has the running job save, end and start again.

        Args:
            at_once: Slurm does it, for a daemon that does not answer.

        Raises:
            NotFound: it has no living job.
            SlurmMissing, SlurmRefused: the request failed.
        """
        _beside_any_loop(requeue_run, self._paths, at_once=at_once)

    def save(self) -> bool:
        """Has the running job save and go on; returns whether there is one.

        Raises:
            SlurmMissing, SlurmRefused: the request failed.
        """
        return bool(_beside_any_loop(ask_for_save, self._paths))


def _beside_any_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls the function, in a thread if an event loop runs in this one: `asyncio.run` refuses to work in it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function(*args, **kwargs)
    result: Future[Any] = Future()

    def work() -> None:
        try:
            result.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - raised again where it was called
            result.set_exception(error)

    # A daemon: Ctrl-C ends the waiting here, and the program need not wait for it.
    threading.Thread(target=work, daemon=True, name="verl-slurm").start()
    answer: T = result.result()
    return answer
