"""The attempt that a lead leads: what all parts of the lead share, and the tasks that run beside its loop."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal import events as ev
from verl_slurm_daemon.allocation.contract import Allocation
from verl_slurm_daemon.decide import inputs
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.lead.attempt_start import ENVIRONMENT


@dataclass
class Attempt:
    """One attempt, while it is led. `post` takes events; once `exit` is set, the lead ends with it."""

    config: RunConfig
    allocation: Allocation
    journal: Journal
    post: Callable[[inputs.Input], None]
    keys: Keyring | None = None
    exit: tuple[ExitCode, str] | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def paths(self) -> RunPaths:
        return self.journal.paths

    @property
    def number(self) -> int:
        """Returns the attempt's number; 0 owns nothing."""
        return self.journal.attempt

    def spawn(self, work: Coroutine[Any, Any, None], aside: str = "") -> None:
        """Runs `work` beside the loop. `aside`: what the run goes on without if `ENVIRONMENT` fails it."""
        task = asyncio.create_task(self._beside(work, aside) if aside else work)
        self.tasks.add(task)
        task.add_done_callback(self._reap)

    async def _beside(self, work: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await work
        except ENVIRONMENT as error:
            self.journal.write(ev.Warned(what, f"stopped until the next start: {error}"))

    def _reap(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # An effect that breaks must not leave the lead waiting for its event.
            self.journal.write(ev.Internal(f"{type(error).__name__}: {error}"))
            if self.exit is None:
                code = error.exit_code if isinstance(error, VerlSlurmError) else ExitCode.INTERNAL
                self.exit = (code, str(error))
                # The loop waits for an event before it looks at `exit`; any event wakes it.
                self.post(inputs.SignalArrived("internal", "effects"))
