"""The lead, one per job: collects events, lets the policy decide, and has the actions carried out.

One attempt, in order:

1. `umask 077`, signals into the queue, the attempt taken (fencing), the journal opened. If storage does not
   allow it, the lead waits; after that the start has failed (`attempt_start.py`).
2. The data set is compared with its fingerprint, and the image with its digest; starts without progress are counted.
3. Restarts, until the policy says `Exit`.
4. Slurm is told what is to become of the job (`Requeue=0`, or when it may start again), and the end is recorded.
   After a requeue outside Slurm, the next attempt begins in this process.
"""

import asyncio
import math
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from verl_slurm.base.bounded import TooMuch
from verl_slurm.base.errors import Fenced, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import RunOwner, read_owner, take_attempt
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import known_run_id
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.store.lost import data_digest, newest_attempt
from verl_slurm.config.schema import RunConfig
from verl_slurm.containers.image import check_image
from verl_slurm.dataset.fingerprint.data_record import check_dataset
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import read_events, read_history
from verl_slurm.journal.history import History
from verl_slurm.journal.status import Status, read_status
from verl_slurm.slurm.slurm_environment import SlurmJob
from verl_slurm.verl.verl_inputs import data_of
from verl_slurm.wire.environment import LOCAL_RESTART_VARIABLE
from verl_slurm.wire.messages import Progress, RankSaved, RankSaveFailed
from verl_slurm_daemon.allocation.contract import Allocation
from verl_slurm_daemon.allocation.local import LocalAllocation
from verl_slurm_daemon.allocation.slurm_job import SlurmAllocation
from verl_slurm_daemon.decide import inputs
from verl_slurm_daemon.decide.lead_model import Limits, Model, State
from verl_slurm_daemon.decide.policy import decide
from verl_slurm_daemon.descendants import bury_orphans, listen
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.lead import attempt_start
from verl_slurm_daemon.lead.attempt import Attempt
from verl_slurm_daemon.lead.effects import Effects
from verl_slurm_daemon.lead.hook_runs import Hooks

if TYPE_CHECKING:
    from verl_slurm_daemon.lead.lead_metrics import LeadMetrics


_LAST_PASS_S = 600.0
"""Seconds, at most, for which a run that is done keeps its nodes until its last checkpoint is in its tiers."""
_LOOK_FOR_SIGNALS_S = 1.0
_STATUS_EVERY_S = 1.0
_FENCE_EVERY_S = 2.0
_LOOK_AGAIN_S = 300.0
"""Seconds between looks if the job has no limit."""
_LOOK_SOON_S = 15.0
"""The same if Slurm did not answer, or the end is near and no action followed."""


def _slurm_cluster() -> str:
    """Returns the name of the Slurm cluster that this process runs on; empty: none, or not known."""
    return os.environ.get("SLURM_CLUSTER_NAME", "")


class Lead:
    """The lead of one attempt. `failed`: why this start can only ask for another (`attempt_start.prepare`)."""

    def __init__(
        self,
        paths: RunPaths,
        config: RunConfig,
        allocation: Allocation,
        failed: OSError | VerlSlurmError | None = None,
    ) -> None:
        self._paths, self._config, self._allocation = paths, config, allocation
        self._failed = failed
        self._events: asyncio.Queue[inputs.Input] = asyncio.Queue()
        self._calls = attempt_start.SignalsHeard(allocation.cause)
        self._model = Model(Limits.of(config))
        steps = 0 if config.trainer.is_guest else config.train.steps  # a guest's loop says it itself
        self._status = Status(job_id=allocation.job_id, steps=steps, requeues=allocation.restart)
        self._status_due = 0.0
        self._history = History()
        self._hooks: Hooks | None = None
        self._journal: Journal | None = None
        self._metrics: LeadMetrics | None = None
        if config.observability.metrics_port is not None:
            from verl_slurm_daemon.lead import lead_metrics as lead_metrics  # 2 MB, for a port

            self._metrics = lead_metrics.LeadMetrics(paths, config, self._status, lead_metrics.steady_clock())

    async def run(self) -> ExitCode:
        loop = asyncio.get_running_loop()
        # At once: when it reads a save back at the end of a job, the node may have no thread left to give.
        keep_threads(loop)
        bury_orphans(loop)
        for number in attempt_start.SIGNALS:
            name = signal.Signals(number).name
            listen(loop, number, partial(self._on_signal, name))
        # Who started us blocked them, so that none was lost, or deadly, before there was somebody to hear it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, attempt_start.SIGNALS)
        try:
            mine = await self._take_run()
        except VerlSlurmError:
            # This error ends the job for good, and Slurm must not start it again.
            await self._allocation.withdraw()
            raise
        attempt = 0 if mine is None else mine.attempt  # 0 owns nothing
        job_id = self._allocation.job_id
        journal = Journal(self._paths, attempt=attempt, job_id=job_id, heard=self._journaled)
        self._journal = journal
        self._hooks = Hooks(self._paths, self._config, lambda text: journal.write(ev.Warned("hooks", text)))
        effects = Effects(Attempt(self._config, self._allocation, journal, self._events.put_nowait))
        try:
            if mine is not None:
                await self._begins(mine, journal, effects)
            code, reason = await self._live(journal, effects)
            if code is ExitCode.OK and self._config.tiers:
                await self._fill_tiers(effects)
        except VerlSlurmError as error:
            code, reason = error.exit_code, str(error)
        finally:
            await effects.close()
            if self._metrics is not None:
                self._metrics.close()
        # After `close`, which ends what a next attempt would meet: the mover, the scrub, the port and lead.json.
        if code is ExitCode.REQUEUED:
            # Before Slurm is told when to start again: that counts from the end of this job's processes.
            await self._hooks.drain(requeued=True)
        await self._end(mine, journal, code, reason, clean=effects.restarts.left_clean)
        await self._hooks.drain()
        return code

    async def _take_run(self) -> RunOwner | None:
        """Takes the run; returns None, with the error in `self._failed`, if storage or Slurm does not allow
        it.

        Raises Fenced: another attempt has it, and lives. CheckpointCorrupt: its owner cannot be determined.
        """

        async def take() -> RunOwner:
            above = await asyncio.to_thread(newest_attempt, self._paths)  # before the owner: `take_attempt`
            former = await self._refuse_if_owned()
            return await asyncio.to_thread(
                take_attempt,
                self._paths,
                above=above,
                after=former,  # two leads that both found it over: one of them gets it
                job_id=self._allocation.job_id,
                restart=self._allocation.restart,
                cluster=self._allocation.cluster,
                slurm=_slurm_cluster() if self._allocation.cluster == "slurm" else "",
            )

        if self._failed is None:
            try:
                return await attempt_start.patiently(take, self._calls.are_final, attempt_start.say_again)
            except attempt_start.ENVIRONMENT as error:
                self._failed = error
        return None

    def _on_signal(self, name: str) -> None:
        # During the start nothing takes events from the queue: what ends the job is to end the wait for storage.
        self._calls.heard.append(name)
        self._events.put_nowait(inputs.SignalArrived(name, "lead"))

    async def _begins(self, mine: RunOwner, journal: Journal, effects: Effects) -> None:
        """Records that this attempt owns the run from here on."""
        if self._metrics is not None:
            await self._metrics.read_back()
            self._metrics.refused = effects.restarts.refusals.counts
        status = self._status
        status.attempt, status.cluster, status.host = mine.attempt, mine.cluster, mine.host
        status.slurm = _slurm_cluster()
        # Before the first event is written: `_journaled` adds that one, and it must not count twice.
        faults = self._take_over(mine.attempt)
        journal.write(
            ev.Started(
                "slurm" if mine.cluster == "slurm" else "local",
                mine.host,
                mine.restart,
                nodes=os.environ.get("SLURM_JOB_NODELIST", mine.host),
                pid=mine.pid,
                array=os.environ.get("SLURM_ARRAY_JOB_ID"),
                slurm=mine.slurm,
            )
        )
        for fault in faults:
            journal.write(fault)
        with suppress(OSError, ValueError):  # it makes the next requeue faster; the journal may hold anything
            if overruled := await self._allocation.learn(read_history(self._paths)):
                journal.write(overruled)

    async def _end(
        self, mine: RunOwner | None, journal: Journal, code: ExitCode, reason: str, *, clean: bool
    ) -> None:
        """Settles what is to become of the job, and records the end."""
        # Slurm ignores a start time that has passed by the end of COMPLETING and waits 120 s. So it is set again now,
        # when the processes here are gone.
        next_start = None
        if code is ExitCode.REQUEUED:
            next_start = await self._allocation.hasten(clean)
        # Not where Slurm took no requeue: it may still start the job by itself, and that is welcome.
        elif code is not ExitCode.REQUEUE_FAILED and (said := await self._allocation.withdraw()):
            journal.write(ev.Notice("Slurm", said))
        if (left := await self._allocation.exit_code(code)) != code:
            site = f"by slurm.conf a job that ends with {int(code)} starts again, or is held (RequeueExit...)"
            journal.write(ev.Notice("Slurm", f"{site}: this one ends with {left}"))
        try:
            ours = mine is None or await attempt_start.answered(lambda: read_owner(self._paths)) == mine
        except OSError:  # it cannot be told; the attempt is in the line
            ours = True
        if ours:
            self._status.state, self._status.services = State.ENDED, {}
            last = self._status.last_checkpoint or None
            starts = "" if next_start is None else next_start.isoformat()
            journal.write(ev.Ended(int(code), code.name, reason, last, starts))
            journal.status(self._status)
        else:  # the run goes on without us; its end is not ours to announce
            journal.write(ev.AttemptFenced(int(code), reason))

    def _take_over(self, attempt: int) -> list[ev.Warned]:
        """Copies the facts of former attempts into the snapshot: the run's progress and its interruptions; returns
        what the journal lacks of them.
        """
        with suppress(OSError, TooMuch):  # it informs, nothing depends on it
            former = read_status(self._paths)
            self._status.run = known_run_id(self._paths)
            self._status.step = max(former.get("step", 0), 0)
            # Up to the restart: by it is judged whether the ledger has all that was recorded.
            self._status.phase, self._status.index = former.get("phase", ""), former.get("index", 0)
            events = read_events(self._paths)
            self._history = History(events)
            return attempt_start.journal_faults(self._paths, events, attempt)
        return []

    def _journaled(self, event: ev.Event) -> None:
        if self._metrics is not None:
            self._metrics.journaled(event)
        if self._hooks is not None:
            self._hooks.hear(event)
        status = self._status
        if isinstance(event, ev.Restart):  # it may have gone back: then so has the run
            status.last_checkpoint = event.resume or ""
            status.step = (checkpoint_order(status.last_checkpoint) or (0, 0))[0]
            status.phase, status.index = "", 0
        is_saved = isinstance(event, ev.Verified) or (isinstance(event, ev.Saved) and not event.on_shared)
        if is_saved and self._journal is not None:
            # The run begins anew no longer: if this is lost, it must not begin again in silence.
            self._journal.store(lambda: self._paths.from_nothing.unlink(missing_ok=True))
        if isinstance(event, ev.NodesChosen):
            status.spare_nodes = event.spare
        self._service_seen(event)
        self._history.feed(event)
        if each := self._history.outages:
            status.interruptions, status.interrupted_s = len(each), self._history.interrupted_s
            status.last_interruption = msgspec.to_builtins(each[-1])

    def _service_seen(self, event: ev.Event) -> None:
        match event:
            case ev.ServiceStarted(service=name, node=node, address=address):
                said = f"starting, {address}"
            case ev.ServiceReady(service=name, node=node, address=address):
                said = f"ready, {address}"
            case ev.ServiceEnded(service=name, node=node, restarts=restarts, budget=budget):
                said = f"restart {restarts} of {budget}"
            case ev.ServiceFailed(service=name, node=node, detail=detail):
                said = f"failed: {detail}"
            case _:
                return
        self._status.services |= {f"{name} on {node}" if node else name: said}
        # At once: no rank speaks while they are waited for, and `_note` writes what happens to ranks.
        if self._journal is not None:
            self._journal.status(self._status)

    async def _refuse_if_owned(self) -> RunOwner | None:
        """Returns the run's former owner, which is over. Raises Fenced: it is not."""
        owner = await asyncio.to_thread(read_owner, self._paths)
        alive = "" if owner is None else await self._allocation.still_alive(owner)
        if alive:
            raise Fenced(
                "another job works on this run",
                where=self._paths.root,
                found=alive,
                remedy=f"wait for it, or end it on its cluster: verl-slurm cancel {shell_word(self._paths.root)}",
            )
        return owner

    async def _live(self, journal: Journal, effects: Effects) -> tuple[ExitCode, str]:
        self._events.put_nowait(await self._first_event(journal, effects))
        tasks = [asyncio.create_task(self._watch_the_clock()), asyncio.create_task(self._watch_the_fence())]
        try:
            while effects.attempt.exit is None:
                event = await self._events.get()
                decision = decide(self._model, event)
                self._model = decision.model
                effects.restarts.describe(self._status)
                self._note(event, journal)
                for action in decision.actions:
                    effects.perform(action)
        finally:
            for task in tasks:
                task.cancel()
        return effects.attempt.exit

    async def _fill_tiers(self, effects: Effects) -> None:
        """Waits for the last checkpoint's way to the tiers, as the run is done. The job's own end ends it."""
        calls = attempt_start.SignalsHeard(self._allocation.cause)

        async def signalled() -> None:
            while not await calls.are_final():
                with suppress(TimeoutError):
                    event = await asyncio.wait_for(self._events.get(), _LOOK_FOR_SIGNALS_S)
                    if isinstance(event, inputs.SignalArrived):
                        calls.heard.append(event.signal)

        outlook, margin_s = await self._allocation.outlook(), self._config.daemon.save_margin_s
        left = math.inf if outlook.seconds_left is None else outlook.seconds_left - margin_s
        limit_s = 0.0 if outlook.preempted else max(0.0, min(_LAST_PASS_S, left))
        called = asyncio.create_task(signalled())
        try:
            await effects.fill_tiers(self._status.last_checkpoint, limit_s, called)
        finally:
            called.cancel()

    async def _first_event(self, journal: Journal, effects: Effects) -> inputs.Input:
        if self._failed is not None:
            return await attempt_start.start_failed(self._paths, self._allocation, self._failed)

        def say(error: Exception, pause_s: float) -> None:
            journal.write(ev.Warned("start", f"{error}: tries again in {pause_s:.0f} s"))

        try:
            return await attempt_start.patiently(
                lambda: self._first_try(journal, effects), self._calls.are_final, say
            )
        except attempt_start.ENVIRONMENT as error:
            return await attempt_start.start_failed(self._paths, self._allocation, error)

    async def _first_try(self, journal: Journal, effects: Effects) -> inputs.Input:
        # Before the run is touched: a task of a chain, or a successor, whose predecessor was cancelled must not
        # continue it.
        if cancelled := await self._allocation.cancelled_before():
            return inputs.Over(ExitCode.CANCELLED, cancelled)
        if lacking := self._allocation.lacks():
            return inputs.NeedsPerson(1, lacking)
        history = await asyncio.to_thread(read_history, self._paths)
        limit = self._config.daemon.no_progress_limit
        stuck, short = history.stuck, history.short
        # Counted in the journal over all attempts: a requeue does not renew this limit.
        if stuck >= limit:
            reason = history.no_progress(self._paths.root)
            journal.write(ev.Held(stuck, reason))
            return inputs.Over(ExitCode.NO_PROGRESS, reason)
        if short >= limit:
            limit_s = (await self._allocation.outlook()).limit_s
            known = "" if limit_s is None else f", {limit_s / 60:.0f} min,"
            job = self._allocation.job_id
            reason = (
                f"{short} starts in a row reached the job's time limit{known} before their ranks trained: "
                f"scontrol update JobId={job} TimeLimit=MINUTES (an administrator), then scontrol release {job}"
            )
            return inputs.NeedsPerson(short, reason)
        return await attempt_start.spoken(
            self._begin(journal, effects), "the look at data, image and code", journal
        )

    async def _begin(self, journal: Journal, effects: Effects) -> inputs.Ready:
        """Checks the conditions for starting ranks. Raises OSError, SlurmMissing: storage or Slurm is away."""
        history = await asyncio.to_thread(read_history, self._paths)
        try:
            await self._look_at_inputs(history, journal)
            await effects.open()
        except VerlSlurmError as error:
            # Their words are those of `submit`, where the place is wrong. Here storage may be away.
            if (fault := attempt_start.storage_fault(error, self._config, history)) is not None:
                raise fault from None
            raise
        if self._metrics is not None and (problem := await self._metrics.open(self._allocation.address)):
            journal.write(ev.Warned("metrics", problem))
        history = await asyncio.to_thread(read_history, self._paths)
        failed = history.failed_starts(self._allocation.job_id, self._allocation.restart)
        counts = history.strangers, history.unfit, failed
        return inputs.Ready(self._config.speakers, *counts, trained=history.has_trained)

    async def _look_at_inputs(self, history: History, journal: Journal) -> None:
        """Compares data, image and code with what the run was submitted with."""
        notices: list[str] = []
        await asyncio.to_thread(attempt_start.require_mounted, self._config, history)
        await asyncio.to_thread(check_image, self._config)
        root = data_of(self._config)
        if root is not None:
            # The record names the files; without it the newest checkpoint still tells whether they are the same.
            is_recorded = await asyncio.to_thread(self._paths.fingerprint.exists)
            known = "" if is_recorded else await asyncio.to_thread(data_digest, self._paths)
            await asyncio.to_thread(check_dataset, self._paths, root, trained_on=known, notice=notices.append)
        for text in notices:
            journal.write(ev.Notice("data", text))
        for event in await asyncio.to_thread(attempt_start.check_code, self._paths, self._config):
            journal.write(event)

    async def _watch_the_fence(self) -> None:
        """Checks whether the run is still ours, while nothing else happens: a lead may wait for srun."""
        # Attempt 0 never took the run and has none to lose.
        while self._status.attempt:
            await asyncio.sleep(_FENCE_EVERY_S)
            try:
                # In a thread: storage that hangs must not hold up signals and messages.
                owner = await asyncio.to_thread(read_owner, self._paths)
            # No answer proves no newer owner; ranks check the attempt themselves before they commit.
            except (OSError, VerlSlurmError):
                continue
            if owner is not None and owner.attempt > self._status.attempt:
                self._events.put_nowait(
                    inputs.RunLost(f"attempt {owner.attempt} of job {owner.job_id} on {owner.host}")
                )

    async def _watch_the_clock(self) -> None:
        """Finds what no signal reported: a warning from before we listened, or one that was lost with a dead step."""
        said = False
        while True:
            outlook = await self._allocation.outlook()
            left, lead_s = outlook.seconds_left, outlook.lead_s or self._config.slurm.signal_lead_s
            if outlook.lead_s and not said and self._journal is not None:
                said = True
                text = (
                    f"the job's time limit, {outlook.limit_s:.0f} s, is short for slurm.signal_lead_s="
                    f"{self._config.slurm.signal_lead_s}: each attempt saves {lead_s:.0f} s before its end"
                )
                self._journal.write(ev.Warned("time limit", text))
            near = outlook.preempted or (left is not None and left <= lead_s)
            model = self._model
            # A save for a requested requeue has no deadline; when the time limit comes near, it gets one.
            listens = model.state in (State.LAUNCHING, State.RUNNING, State.PAUSED) or model.saves_unbounded
            if near and listens:
                self._events.put_nowait(inputs.SignalArrived("TIMER", "lead"))
            # Late on purpose: where the warning works, it comes first. Asked again, because limits are extended.
            if not outlook.answered or near:
                await asyncio.sleep(_LOOK_SOON_S)
            else:
                await asyncio.sleep(_LOOK_AGAIN_S if left is None else max(left - 0.75 * lead_s, 1.0))

    def _note(self, event: inputs.Input, journal: Journal) -> None:
        """Updates the snapshot for `verl-slurm status`."""
        status, model = self._status, self._model
        if self._metrics is not None and isinstance(event, inputs.RankSaid):
            self._metrics.heard(event.message)
        changed = status.state != model.state or status.restart != model.restart
        status.state, status.restart, status.cause = model.state, model.restart, model.cause
        match event:
            case inputs.RankSaid(Progress() as message) if message.rank == 0:
                changed = changed or message.phase != status.phase
                status.step, status.phase, status.index = message.step, message.phase, message.index
                status.steps = message.total or status.steps
                status.metrics = message.metrics or status.metrics
            case inputs.RankSaid(RankSaved() as message):
                changed = True
                status.save_problem = "" if message.on_shared else status.save_problem
            case inputs.RankSaid(RankSaveFailed() as message):
                changed = True
                status.save_problem = message.reason or "for an unknown reason"
            case inputs.AllDone(name, _):
                status.last_checkpoint, status.step = name, (checkpoint_order(name) or (0, 0))[0]
            case inputs.SaveReadBack(name, good, _) if good:
                status.last_checkpoint, changed = name, True
                status.last_checkpoint_time = status.updated
        now = asyncio.get_running_loop().time()
        # The snapshot lies on shared storage: progress within a phase writes it at most once a second.
        if changed or now >= self._status_due:
            self._status_due = now + _STATUS_EVERY_S
            journal.status(status)


def run_lead(root: Path, hostfile: Path | None = None) -> NoReturn:
    """Runs the lead of this job, and leaves the process. `hostfile`: the hosts of a run without Slurm."""
    # Blocked, not ignored: a signal that comes during the start stays pending until the lead listens.
    signal.pthread_sigmask(signal.SIG_BLOCK, attempt_start.SIGNALS)
    os.environ["PYTHONSAFEPATH"] = "1"  # for all we start: nothing is imported from the submitter's directory

    async def live() -> NoReturn:
        try:
            ground = await attempt_start.prepare(root, hostfile)
        except VerlSlurmError as error:
            # The next start would fail in the same way, so Slurm is told not to make one.
            if hostfile is None and (job := SlurmJob.from_environ(dict(os.environ))) is not None:
                allocation = SlurmAllocation(job, RunConfig(), RunPaths(root))
                await allocation.withdraw()
                if (left := await allocation.exit_code(error.exit_code)) != error.exit_code:
                    sys.stderr.write("".join(f"{line}\n" for line in error.lines()))
                    os._exit(left)
            raise
        code = await Lead(*ground).run()
        _leave(code, ground.allocation, await ground.allocation.exit_code(code))

    asyncio.run(live())
    raise AssertionError("unreachable")


def _leave(code: ExitCode, allocation: Allocation, left: int) -> NoReturn:
    """Leaves at once, from inside the loop. Outside Slurm the next attempt begins here."""
    # The loop would wait for a read-back in a thread while the requeue's delay runs.
    sys.stdout.flush()
    sys.stderr.flush()
    if code is ExitCode.REQUEUED and isinstance(allocation, LocalAllocation):
        # Blocked until the next attempt listens: a cancel in between is kept.
        signal.pthread_sigmask(signal.SIG_BLOCK, attempt_start.SIGNALS)
        os.environ[LOCAL_RESTART_VARIABLE] = str(allocation.restart + 1)
        argv = [sys.executable, "-P", "-m", "verl_slurm_daemon", *sys.argv[1:]]
        os.execv(sys.executable, argv)  # noqa: S606 - an argument list of ours; no shell is what we want
    os._exit(left)


_THREADS = 8
"""More than a lead was ever seen to use at once: a scrub, a read-back, a look at the journal, and requests to Slurm."""


def keep_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Makes `asyncio.to_thread` use threads that are started now."""
    # The executor starts a thread when none is idle; the barrier keeps all of them busy until the last one has started.
    # Reading a save back and asking Slurm each need a thread. If the node or the job's control group cannot
    # start one at the end of a job, the lead would leave without asking for the requeue.
    pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="lead")
    all_there = threading.Barrier(_THREADS + 1)
    with suppress(RuntimeError, threading.BrokenBarrierError):  # none can be started now
        try:
            for _ in range(_THREADS):
                pool.submit(all_there.wait)
        except RuntimeError:
            # Releases those that did start; they serve as the pool.
            all_there.abort()
        all_there.wait()
    loop.set_default_executor(pool)
