"""A training loop's line to the daemon: its reports, the requests to it, and the facts of its run. No torch.

Each speaking process of a loop has one `Session`, including our own trainer's ranks. A guest, a loop that is not ours,
opens its session by `Session.open`. That sends the first message, so open it before any heavy import.

The environment set by the agent describes this process (`wire.environment`): VERL_SLURM_CONTROL (the agent's
directory), VERL_SLURM_RUN, VERL_SLURM_ATTEMPT, VERL_SLURM_RESUME (the checkpoint that the lead has verified, by name;
empty: from the start). The launcher of the ranks sets RANK and WORLD_SIZE. Without VERL_SLURM_CONTROL there is no
daemon: every call is allowed and does nothing.
"""

import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Self

from verl_slurm.base.errors import (
    CheckpointCorrupt,
    ConfigError,
    VerlSlurmError,
    restart_may_help,
    underlying,
)
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.checkpoint.decide.best import metrics_of
from verl_slurm.journal.steps import append_step
from verl_slurm.loops.reach import STEPS_LOOKED_AT, Reach, reach
from verl_slurm.wire import environment, messages
from verl_slurm.wire.client import NoDaemon, RankClient, RankLine
from verl_slurm.wire.hang_records import answer_with_stacks
from verl_slurm.wire.lifeline import die_with_launcher
from verl_slurm.wire.standing_by import remember_imports

if TYPE_CHECKING:  # a session is opened before anything that takes time to import
    from verl_slurm.checkpoint.store.commit import SavedCheckpoint

_ALIVE_EVERY_S = 1.0

LAST_TRIES_S = (1.0, 5.0, 15.0)
"""Pauses before the last save is tried again. Storage that fails for longer costs a restart, which waits, too."""


class Session:
    """One speaking process of a training loop.

    Args:
        clock: monotonic seconds, for the time that steps take. Stays as an attribute.

    Attributes:
        rank, world_size: among those that speak.
        attempt: 0 without a run.
        resume: the verified checkpoint to resume from; None: from the start.
        step: whole steps done, as reported here.
        save_s: seconds of the last save, until it was committed; None: there was none.
        safe_points: passed so far. The daemon tells a hang by a rank that says nothing of them.
    """

    def __init__(
        self,
        line: RankLine,
        *,
        rank: int,
        world_size: int,
        paths: RunPaths | None = None,
        attempt: int = 0,
        resume: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.line = line
        self.rank, self.world_size, self.attempt, self.resume = rank, world_size, attempt, resume
        self.has_daemon = not isinstance(line, NoDaemon)
        self.step = 0
        self.save_s: float | None = None
        self._paths, self.clock = paths, clock
        self._answered, self.safe_points = 0, 0
        self._step_began = self._told_at = self._spoke_at = clock()
        # What a sign of life repeats, so that the daemon's limit for loading, or for a save, holds on; None: a step.
        self._limited_by: messages.RankStarted | messages.SaveStarted | None = messages.RankStarted(
            rank=rank, pid=os.getpid()
        )
        # Written by the loop, read by the thread "reach": `reach` gets a copy as a tuple.
        self._steps_s: deque[float] = deque(maxlen=STEPS_LOOKED_AT)
        self._logs_steps, self._has_row = rank == 0 and paths is not None, False

    @classmethod
    def open(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        lifeline: bool = True,
    ) -> Self:
        """Connects to the agent of this node and reports that this rank lives; without a daemon, a session of no
        effect.

        Under a daemon this process from here on ends with its launcher, and answers the daemon's question where its
        threads are (`faulthandler`). The umask stays the user's: what is ours is made with its mode.

        Args:
            rank, world_size: default: RANK and WORLD_SIZE, or the only one.
            lifeline: False: the parent of this process is not its launcher (Ray's workers).

        Raises:
            ConfigError: the environment of a daemon is set, but incomplete.
        """
        here = os.environ if environ is None else environ
        rank = _number(here, "RANK", 0) if rank is None else rank
        world_size = _number(here, "WORLD_SIZE", 1) if world_size is None else world_size
        control = here.get(environment.CONTROL_VARIABLE)
        # No daemon: torchrun, or a plain start by hand. None of the process-wide settings below may touch that
        # program.
        if not control:
            return cls(NoDaemon(), rank=rank, world_size=world_size)
        # Without it a rank that outlives a killed agent would go on and write (`wire.lifeline`).
        if lifeline:
            die_with_launcher()
        paths, attempt, resume = _the_run(here)
        answer_with_stacks()
        line = RankClient.connect(Path(control))
        # The daemon's limit for a start runs until this message, so it is sent before torch and the framework are
        # imported.
        line.send(messages.RankStarted(rank=rank, pid=os.getpid()))
        return cls(line, rank=rank, world_size=world_size, paths=paths, attempt=attempt, resume=resume)

    @property
    def has_run(self) -> bool:
        """Returns whether there is a run's directory to save into."""
        return self._paths is not None

    @property
    def paths(self) -> RunPaths:
        """The run's paths; raises ConfigError if there is no run."""
        if self._paths is None:
            raise ConfigError(
                "there is no run to save into",
                found=f"no {environment.RUN_VARIABLE} in the environment",
                remedy="start it with `verl-slurm submit`",
            )
        return self._paths

    def started(self, step: int = 0, total: int = 0) -> None:
        """Reports that the loop begins after `step` steps, of `total` (0: unknown). From here on it can be asked to
        save; before, Slurm's end of the job ends the ranks at once.
        """
        self.step, self._limited_by = step, None
        self._step_began = self._told_at = self.clock()
        self.tell_progress(step, {}, total=total)
        if self._logs_steps:
            remember_imports(self.paths)

    def step_done(self, step: int, metrics: Mapping[str, object] | None = None, total: int = 0) -> None:
        """Reports that step `step` (from 1) is done: a sign of life, and a row of `RUN/steps.jsonl` by rank 0. Never
        raises.

        Args:
            metrics: values that are not finite numbers are left out.
            total: number of steps in all; 0: unknown.
        """
        # A monotonic clock: a corrected wall clock would give a step of minutes, and `reach` would refuse every
        # request.
        now = self.clock()
        seconds, self._step_began = now - self._step_began, now
        # For people: with the evaluations and saves since the last one.
        whole_s, self._told_at = now - self._told_at, now
        self.step, self._limited_by = step, None
        self.safe_points += 1
        if self.safe_points > 1:  # the first step of a start includes warm-up: it predicts little
            self._steps_s.append(seconds)
        # other ranks skip this: a tensor on a GPU would be waited for
        kept = self.numbers(metrics or {}) if self.rank == 0 else {}
        self.tell_progress(step, kept, total=total)
        if problem := self.log_step({"step": step, **kept, "step_s": round(whole_s, 6)}):
            self.notice(problem, loud=True)

    def alive(self) -> None:
        """Reports, at most once a second, that this rank works in what is no step: an evaluation, batch by batch."""
        # To be called where work was done, never by a thread or in a wait: a rank that hangs must fall silent.
        if self.clock() - self._spoke_at < _ALIVE_EVERY_S:
            return
        if self._limited_by is None:
            self.tell_progress(self.step, {}, phase="evaluate")
        else:
            self._spoke_at = self.clock()
            self.line.send(self._limited_by)

    def leave_out(self, since: float) -> None:
        """Leaves the time since `since`, of `clock`, out of the running step's duration: an evaluation, a save."""
        # `reach` would expect as much of the next steps, and give up what can be saved.
        now = self.clock()
        self._step_began = min(self._step_began + now - since, now)

    def evaluated(self, since: float) -> float:
        """Reports that a batch of an evaluation is done: `alive` and `leave_out`. Returns the present time."""
        self.alive()
        self.leave_out(since)
        return self.clock()

    def log_step(self, row: Mapping[str, float]) -> str:
        """Writes a row of `RUN/steps.jsonl`, by rank 0; returns once why there are no more rows. Never raises."""
        if not self._logs_steps:
            return ""
        if not self._has_row:
            # Once more: a first step imports what a start did not need.
            self._has_row = True
            remember_imports(self.paths)
        try:
            append_step(self.paths, self.attempt, dict(row))
        # It informs, and nothing depends on it.
        except OSError as error:
            self._logs_steps = False
            return f"no rows in steps.jsonl from here on: {error}"
        return ""

    @staticmethod
    def numbers(metrics: Mapping[str, object]) -> dict[str, float]:
        """Selects the finite numbers of `metrics`, including tensors of one element."""
        return metrics_of(plain_numbers(metrics))

    def request(self) -> messages.SaveRequest | None:
        """Returns the newest request that was not answered here. Costs one memory read.

        Nodes see it at different moments: agree on it (`wire.stopping.Stopper`, over `line`).
        """
        # The page goes on showing a request after its answer; the number tells a new one from an answered one.
        asked = self.line.request()
        return asked if asked is not None and asked.request_id > self._answered else None

    def reach(self, request: messages.SaveRequest) -> Reach:
        """Decides whether the running step can end, and be saved, before the request's deadline."""
        running_s = self.clock() - self._step_began
        return reach(
            seconds_left=request.seconds_left,
            running_s=running_s,
            steps_s=tuple(self._steps_s),
            save_s=self.save_s,
        )

    def save_started(self, request_id: int, step: int, safe_point: int = 0) -> None:
        """Reports that this rank begins to save the state after `step`. Every rank calls it.

        Args:
            safe_point: of the running step; 0: at its beginning.
        """
        said = messages.SaveStarted(rank=self.rank, request_id=request_id, step=step, safe_point=safe_point)
        self._limited_by, self._spoke_at = said, self.clock()
        self.line.send(said)

    def part_saved(self, request_id: int) -> None:
        """Reports that this rank's own files are durable. From any thread."""
        # Sent by each rank: the daemon names the ranks that it still waits for when the deadline is over.
        self.line.send(messages.PartSaved(rank=self.rank, request_id=request_id))

    def saved(
        self,
        request_id: int,
        name: str,
        *,
        seconds: float,
        num_bytes: int,
        reason: str = "",
        on_shared: bool = True,
        problem: str = "",
    ) -> None:
        """Reports that the checkpoint `name` is committed (`RankSaved`). Every rank calls it; rank 0 tells the daemon.

        Args:
            request_id: 0: a periodic save.
        """
        # On every rank, also where rank 0 alone sends: `request` must give all ranks of the run the same answer.
        self._answered = max(self._answered, request_id)
        # 0: the answer names an existing checkpoint, and measures nothing
        self.save_s = seconds or self.save_s
        if self.rank == 0:
            said = messages.RankSaved(
                rank=0,
                request_id=request_id,
                name=name,
                seconds=seconds,
                num_bytes=num_bytes,
                on_shared=on_shared,
                problem=problem,
                reason=reason[: messages.MAX_REASON],
            )
            self.line.send(said)

    def saved_on_nodes(self, request_id: int, done: "SavedCheckpoint") -> None:
        """Reports that the nodes' disks have the checkpoint; shared storage may not. From any thread."""
        # The daemon keeps it as the answer, in case shared storage never gets the save.
        if self.rank == 0:
            self.line.send(
                messages.SavedOnNodes(
                    rank=0,
                    request_id=request_id,
                    name=done.name,
                    seconds=done.seconds,
                    num_bytes=done.num_bytes,
                )
            )

    def save_failed(self, request_id: int, reason: str) -> None:
        """Reports that the save failed, the final answer to the request: the previous checkpoint counts."""
        self._answered = max(self._answered, request_id)
        if self.rank == 0:
            self.line.send(
                messages.RankSaveFailed(rank=0, request_id=request_id, reason=reason[: messages.MAX_STORY])
            )

    def stopped(self, request_id: int) -> None:
        """Reports that this rank leaves as asked. Every rank calls it."""
        self.line.send(messages.Stopped(rank=self.rank, request_id=request_id))

    def finished(self, step: int) -> None:
        """Reports, once, that this rank has done all steps: the run ends when all ranks have."""
        self.line.send(messages.Finished(rank=self.rank, step=step))

    def refused(
        self, error: VerlSlurmError, *, told: str = "", place: str = "", worked: bool = False
    ) -> None:
        """Reports that this rank ends because of an error that another start would not change.

        Args:
            told: the error as the user is to read it; empty: as it is.
            place, worked: where code of the user's raised, as in `wire.messages.RankRefused`.
        """
        # Cut: a packet holds 64 KiB. The agent takes a longer one for a stranger's, and later messages would be lost.
        code, reason = int(error.exit_code), (told or error.one_line())[: messages.MAX_STORY]
        self.line.send(
            messages.RankRefused(rank=self.rank, exit_code=code, reason=reason, place=place, worked=worked)
        )

    def ended_by(self, error: BaseException) -> None:
        """Reports the error that ends this rank's loop, if another start would end in the same way."""
        # All others are crashes, errors of a framework and of the user's code among them: the daemon counts them and
        # starts again.
        if self.resume is not None and type(error).__name__ == "UnpicklingError":
            error = _not_loaded(error, self.resume) or error
        # Of a failure of several ranks, this rank's own decides.
        if isinstance(error, VerlSlurmError) and not restart_may_help(own := underlying(error)):
            self.refused(own)

    def notice(
        self, text: str, *, topic: messages.Topic = "storage", loud: bool = False, own: bool = False
    ) -> None:
        """Reports something for people that stops nothing, for the journal; from rank 0, unless it is `own`."""
        if self.rank == 0 or own:
            said = f"rank {self.rank}: {text}" if own and self.world_size > 1 else text
            self.line.send(
                messages.RankNotice(rank=self.rank, topic=topic, text=said[: messages.MAX_NOTICE], loud=loud)
            )

    def close(self) -> None:
        """Ends all reports; may be called twice."""
        # Replaced first: a thread that still reports (the watch, a commit) must not write to a closed socket.
        line, self.line = self.line, NoDaemon()
        if isinstance(line, RankClient):
            line.close()

    def tell_progress(self, step: int, metrics: Mapping[str, float], **facts: Any) -> None:
        """Reports where this rank is. `facts`: fields of `Progress` where it is not between two steps."""
        told: dict[str, Any] = {"phase": "step_end", "index": 0, "new_rollouts": 0} | facts
        points, self._spoke_at = self.safe_points, self.clock()
        progress = messages.Progress(
            rank=self.rank, step=step, safe_points=points, metrics=dict(metrics), **told
        )
        self.line.send(progress)


def plain_numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    """Selects the values that are numbers, including tensors of one element."""
    found = {}
    for name, value in metrics.items():
        # A value that is no number (text, a tensor of many elements, a huge int) is left out: metrics are for people.
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            detach = getattr(value, "detach", None)  # converting a tensor that needs a gradient warns
            found[str(name)] = float(value if detach is None else detach())  # type: ignore[arg-type]
    return found


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    # Strict: a rank that guesses its number would write another rank's files.
    if not text.isdigit():
        raise ConfigError(
            "this process is not told its place", where=name, found=text, expected="a whole number"
        )
    return int(text)


def _not_loaded(error: BaseException, checkpoint: Path) -> CheckpointCorrupt | None:
    """Returns the refusal of a file of the checkpoint that holds more than torch loads (`weights_only`); None: it was
    another file."""
    for frame, _ in walk_tb(error.__traceback__):
        file = frame.f_locals.get("f") if frame.f_code.co_name == "load" else None
        name = str(getattr(file, "name", file))
        if name.startswith(f"{checkpoint}{os.sep}"):
            return CheckpointCorrupt(
                "a file of the checkpoint is not loaded, since it would run code",
                where=name,
                found=(re.findall(r"GLOBAL ([\w.]+)", str(error)) or [str(error)[:200]])[0],
                expected="tensors and plain values, as torch.load takes them with weights_only",
                remedy="resume from a checkpoint that you have made; of a class of your own program: "
                "torch.serialization.add_safe_globals",
            )
    return None


def _the_run(environ: Mapping[str, str]) -> tuple[RunPaths, int, Path | None]:
    """Returns the run, the attempt and the checkpoint that the environment names."""
    root = environ.get(environment.RUN_VARIABLE, "")
    # A relative path would depend on the program's working directory, which the user's code may change.
    if not root.startswith("/"):
        raise ConfigError(
            "a daemon started this process and did not say for which run",
            where=environment.RUN_VARIABLE,
            found=root or "nothing",
            expected="the run's directory",
        )
    paths, attempt = RunPaths(root), _number(environ, environment.ATTEMPT_VARIABLE, 0)
    name = environ.get(environment.RESUME_VARIABLE, "")
    # The name becomes a path below the run; only the form of a checkpoint's name keeps it there.
    if name and CHECKPOINT_NAME.fullmatch(name) is None:
        raise ConfigError(
            "what to resume from is no checkpoint's name",
            where=environment.RESUME_VARIABLE,
            found=name,
            expected="a name such as step_000012",
        )
    return paths, attempt, paths.checkpoints / name if name else None
