"""Carries out the policy's actions: has ranks started and ended, asks Slurm, reads checkpoints back.

Every effect runs as a task of its own and reports by an event. The loop waits for none of them, so a hanging
`scontrol` or a slow disk never delays the next decision. What belongs to one start of the ranks is in `restarts`.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import assert_never

from verl_slurm.base.bounded import TooMuch
from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.keys import load_keys
from verl_slurm.base.one_line import shell_word
from verl_slurm.checkpoint.store.lost import missing_in_tiers
from verl_slurm.checkpoint.store.scrub import SETTLE_S, scrub_next
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import read_history
from verl_slurm.wire.lead_file import remove_lead_address
from verl_slurm_daemon.decide import actions as act, inputs
from verl_slurm_daemon.lead.attempt import Attempt
from verl_slurm_daemon.lead.attempt_start import answered, patiently
from verl_slurm_daemon.lead.requeueing import requeue
from verl_slurm_daemon.lead.restarts import Restarts
from verl_slurm_daemon.lead.resume import ReadBack, read_back
from verl_slurm_daemon.lead.tier_child import TierMover

_ASK_AGAIN_S = 3.0
"""Seconds until Slurm, which did not say why a signal came, is asked again."""


class Effects:
    """Carries out the actions of one lead. `restarts` starts, hears and ends the ranks."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.restarts = Restarts(attempt)
        self._mover = TierMover(attempt)
        self._due: asyncio.TimerHandle | None = None
        self._is_open = False

    async def open(self) -> None:
        """Reads the key; listens for agents; starts moving checkpoints to their tiers. May be called again
        after an error.

        Raises KeyRefused, PermissionRefused: `keys.load_keys`, where storage fails, too (`storage_fault`). OSError,
        SlurmMissing: storage or Slurm does not answer.
        """
        attempt = self.attempt
        attempt.keys = load_keys(attempt.config.checkpoint.encryption)
        await self.restarts.open()
        if not self._is_open:
            self._is_open = True
            attempt.spawn(self._mover.run(), aside="the mover of checkpoints")
            attempt.spawn(scrub_forever(attempt, self.restarts.bring_home), aside="the scrub")

    async def close(self) -> None:
        # First: they hear it over the port that is closed below.
        await self.restarts.end_all()
        for task in self.attempt.tasks:
            task.cancel()
        self.restarts.close_port()
        # The attempt is checked there: a newer one's address stays.
        with contextlib.suppress(TimeoutError):
            await answered(lambda: remove_lead_address(self.attempt.paths, self.attempt.number))

    async def fill_tiers(self, name: str, limit_s: float, called: asyncio.Task[None]) -> None:
        """Lets a pass over the tiers that is due or under way end, for `limit_s` or until `called`; says what is left.

        `name`: of the run's last checkpoint.
        """
        attempt, idle = self.attempt, asyncio.create_task(self._mover.idle.wait())
        missing = await asyncio.to_thread(missing_in_tiers, attempt.paths, attempt.config, name)
        if missing and limit_s and not self._mover.idle.is_set():
            # Services and what stands by are for ranks.
            await self.restarts.end_all()
            attempt.journal.write(ev.Notice("tiers", f"{missing}: waits for it, {limit_s:.0f} s at most"))
            await asyncio.wait((idle, called), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            missing = await asyncio.to_thread(missing_in_tiers, attempt.paths, attempt.config, name)
        idle.cancel()
        if missing:
            command = f"verl-slurm tiers {shell_word(attempt.paths.root)} --offload"
            attempt.journal.write(ev.Tiers(f"{missing}: {command}"))

    def perform(self, action: act.Action) -> None:
        # Whatever takes time runs as a task and comes back as an event: the loop decides about the next one meanwhile.
        attempt, restarts = self.attempt, self.restarts
        match action:
            case act.Note(event):
                attempt.journal.write(event)
            case act.StartRanks(number, avoid):
                attempt.spawn(restarts.run(number, avoid))
            case act.AskCause(trigger):
                attempt.spawn(self._ask_cause(trigger))
            case act.SaveRequest():
                self._request_save(action)
            case act.ArmDeadline(seconds_left):
                self._arm(seconds_left)
            case act.Verify(name):
                attempt.spawn(self._verify(name))
            case act.TakeDown(stacks):
                attempt.spawn(restarts.take_down(stacks=stacks))
            case act.Pause(seconds):
                attempt.spawn(self._pause(seconds))
            case act.AskRequeue():
                attempt.spawn(self._requeue(action))
            case act.Exit(code, reason):
                attempt.exit = (code, reason)
            case _:
                assert_never(action)

    # ---- saves

    def _request_save(self, request: act.SaveRequest) -> None:
        left = request.seconds_left
        self.restarts.send(request)
        if left is not None:
            self._arm(left)
            self._mover.interrupt()
        seconds_left = left and round(left, 1)  # recorded last: a disk may be slow, and the time runs
        self.attempt.journal.write(ev.Save(request.stop, request.request_id, seconds_left))

    def _arm(self, seconds_left: float) -> None:
        seconds = max(0.0, seconds_left - self.attempt.config.daemon.save_margin_s)
        # No timer is cancelled: the earliest one counts, and the policy ignores `SaveDeadline` outside of a save.
        asyncio.get_running_loop().call_later(seconds, self.attempt.post, inputs.SaveDeadline())

    async def _verify(self, name: str) -> None:
        attempt, verdicts = self.attempt, self.restarts.verdicts
        read = partial(read_back, attempt.paths, name, attempt.number, attempt.keys, verdicts.read)

        async def readable() -> ReadBack:
            found = await asyncio.to_thread(read)
            if found.unreadable:
                raise OSError(found.detail)
            return found

        async def left() -> bool:
            return attempt.exit is not None

        def say(error: Exception, pause_s: float) -> None:
            attempt.journal.write(ev.Warned("storage", f"{error}: read again in {pause_s:.0f} s"))

        try:
            found = await patiently(readable, left, say)
        except OSError as error:
            found = ReadBack(False, str(error), unreadable=True)
        # The nodes may hold a whole second copy: it is fetched before the policy hears that the save is lost.
        if not (found.good or found.pruned or found.unreadable) and attempt.config.checkpoint.local_dir:
            damage = found.detail
            if await self.restarts.bring_home(""):
                found = await asyncio.to_thread(read)
            # Otherwise the policy writes it, and it would count twice.
            if found.good:
                attempt.journal.write(ev.Corrupt(name, damage))
        attempt.post(inputs.SaveReadBack(name, found.good, found.detail, found.pruned, found.unreadable))
        if found.good:
            self._mover.wake()

    # ---- the scheduler

    async def _ask_cause(self, trigger: str) -> None:
        cause = await self.attempt.allocation.cause(trigger)
        if self._due is not None:
            self._due.cancel()
        # Slurm may say it by no other word before the grace time is used up.
        if cause.kind == "unknown":
            signal, _, where = trigger.partition(" to ")
            again = inputs.SignalArrived(signal, where, again=True)
            self._due = asyncio.get_running_loop().call_later(_ASK_AGAIN_S, self.attempt.post, again)
        self.attempt.post(cause)

    async def _requeue(self, action: act.AskRequeue) -> None:
        self.attempt.spawn(self.restarts.standby.drop())
        self.attempt.post(await requeue(self.attempt, action))

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)  # the back-off itself
        stuck, reason, paths = 0, "", self.attempt.paths
        # Storage may work by now; if not, this code runs again soon.
        with contextlib.suppress(OSError, TooMuch):
            history = await answered(lambda: read_history(paths))
            stuck = history.stuck
            reason = history.no_progress(paths.root)
        self.attempt.post(inputs.BackoffOver(stuck, reason))


async def scrub_forever(attempt: Attempt, bring_home: Callable[[str], Awaitable[bool]]) -> None:
    """Reads checkpoints and frozen models back until cancelled. No error here ends a run; errors are recorded."""
    config, given = attempt.config.checkpoint, (attempt.paths, attempt.config.checkpoint, attempt.number)
    pause = min(SETTLE_S, config.scrub_every_h * 1800)
    while config.scrub_every_h > 0:
        await asyncio.sleep(pause)  # the due time, computed from the journal
        try:
            pause, told = await asyncio.to_thread(scrub_next, *given, time.time(), attempt.keys)
        except (OSError, VerlSlurmError) as error:
            pause, told = SETTLE_S, ev.Scrubbed(False, detail=str(error))
        if told is None:
            continue
        attempt.journal.write(told)
        of_checkpoint = not told.name.startswith("frozen/")  # nodes have no copy of a frozen model
        if not told.good and of_checkpoint and config.local_dir:
            await bring_home("")
