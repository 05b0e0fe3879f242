"""One lead a job: gathers what happens, lets the policy decide, and has it done. The order of a life, top to bottom.

1. `umask 077`, signals into the queue, the epoch taken (fencing), the journal opened.
2. The data set is held against its fingerprint, starts without progress are counted.
3. Generations, until the policy says `Exit`.
4. The end is written down; where this was a requeue outside Slurm, the next life begins in this process.
"""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from verl_slurm.checkpoint.fingerprint import check_dataset
from verl_slurm.checkpoint.manifest import checkpoint_order
from verl_slurm.config.load import load_resolved
from verl_slurm.config.roles import data_root
from verl_slurm.config.schema import RunConfig
from verl_slurm.errors import Fenced, VerlSlurmError
from verl_slurm.events import read_events
from verl_slurm.exit_codes import ExitCode
from verl_slurm.fence import Epoch, read_epoch, take_epoch
from verl_slurm.files import private_dir
from verl_slurm.outages import Outages
from verl_slurm.paths import RunPaths
from verl_slurm.slurm.environment import SlurmJob
from verl_slurm.snapshot import read_status
from verl_slurm.wire.messages import Progress, Saved
from verl_slurm_daemon import events as ev
from verl_slurm_daemon.allocation import Allocation
from verl_slurm_daemon.burying import bury_orphans
from verl_slurm_daemon.effects import Effects
from verl_slurm_daemon.hostfile import check_hosts, parse_hostfile
from verl_slurm_daemon.journal import Journal, Status, stuck_starts
from verl_slurm_daemon.local_allocation import HostfileAllocation, LocalAllocation
from verl_slurm_daemon.log_line import now
from verl_slurm_daemon.model import Limits, Model
from verl_slurm_daemon.policy import decide
from verl_slurm_daemon.reserve import keep_threads
from verl_slurm_daemon.signals import listen
from verl_slurm_daemon.slurm_allocation import SlurmAllocation
from verl_slurm_daemon.states import State

if TYPE_CHECKING:
    from verl_slurm_daemon.lead_metrics import LeadMetrics

__all__ = ["run_lead"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_STATUS_EVERY_S = 1.0
_LOOK_AGAIN_S = 300.0
"""Where the job has no limit."""
_LOOK_SOON_S = 15.0
"""Where Slurm did not answer, or the end is near and nothing came of it."""


class Lead:
    """See the module. Called by: `run_lead`."""

    def __init__(self, paths: RunPaths, config: RunConfig, allocation: Allocation) -> None:
        self._paths, self._config, self._allocation = paths, config, allocation
        self._events: asyncio.Queue[ev.Event] = asyncio.Queue()
        limits = Limits(
            crash_budget=config.daemon.crash_budget,
            backoff_s=config.daemon.backoff_s,
            no_progress_limit=config.daemon.no_progress_limit,
            hang_budget=config.daemon.hang_budget,
            node_budget=config.daemon.node_budget,
        )
        self._model = Model(limits)
        steps = 0 if config.trainer.is_guest else config.train.steps  # a guest's loop says it itself
        self._status = Status(job_id=allocation.job_id, steps=steps, restarts=allocation.restart)
        self._status_due = 0.0
        self._outages = Outages()
        self._lost = False
        self._metrics: LeadMetrics | None = None
        if config.observability.metrics_port is not None:
            from verl_slurm_daemon import lead_metrics  # 2 MB, and only here

            self._metrics = lead_metrics.LeadMetrics(paths, config, self._status, lead_metrics.steady_clock())

    async def run(self) -> ExitCode:
        loop = asyncio.get_running_loop()
        keep_threads(loop)
        bury_orphans(loop)
        for number in _SIGNALS:
            name = signal.Signals(number).name
            listen(loop, number, partial(self._events.put_nowait, ev.SignalArrived(name, "lead")))
        # Who started us blocked them, so that none was lost, or deadly, before there was somebody to hear it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        try:
            former = await self._refuse_if_owned()
        except Fenced:
            await self._allocation.withdraw()
            raise
        mine = take_epoch(
            self._paths,
            after=former,  # two leads that both found it over: one of them gets it
            job_id=self._allocation.job_id,
            restart=self._allocation.restart,
            cluster=self._allocation.cluster,
        )
        if self._metrics is not None:
            await self._metrics.read_back()
        journal = Journal(self._paths, epoch=mine.epoch, job_id=mine.job_id, heard=self._journaled)
        self._status.epoch, self._status.cluster, self._status.host = mine.epoch, mine.cluster, mine.host
        self._take_over()
        nodes = os.environ.get("SLURM_JOB_NODELIST", mine.host)
        journal.event(
            "started",
            cluster=mine.cluster,
            host=mine.host,
            restart=mine.restart,
            nodes=nodes,
            pid=mine.pid,
            array=os.environ.get("SLURM_ARRAY_JOB_ID"),
        )
        effects = Effects(
            self._paths, self._config, self._allocation, journal, mine.epoch, self._events.put_nowait
        )
        if self._metrics is not None:
            self._metrics.refused = effects.refusals.counts
        try:
            code, reason = await self._live(journal, effects)
        except VerlSlurmError as error:
            code, reason = error.exit_code, str(error)
        finally:
            await effects.close()
            if self._metrics is not None:
                self._metrics.close()
        if read_epoch(self._paths) == mine:
            # One that comes back does so because Slurm has taken the requeue: nothing of it is taken back.
            if code is not ExitCode.REQUEUED and (said := await self._allocation.withdraw()):
                journal.event("notice", reason=said)
            self._status.state = State.ENDED
            journal.event("ended", exit_code=int(code), exit=code.name, reason=reason)
            journal.status(self._status)
        else:  # the run goes on without us; its end is not ours to announce
            journal.event("fenced", exit_code=int(code), reason=reason)
        return code

    def _take_over(self) -> None:
        """What the former incarnations leave to the snapshot: how far the run is, and what it has gone through."""
        with suppress(OSError):  # it informs, nothing depends on it
            former = read_status(self._paths)
            self._status.step = max(former.get("step", 0), 0)
            self._outages = Outages(read_events(self._paths))

    def _journaled(self, event: str, fields: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.journaled(event, fields)
        status = self._status
        if event == "generation":  # it may have gone back: then so has the run
            status.last_checkpoint = fields.get("resume") or ""
            status.step = (checkpoint_order(status.last_checkpoint) or (0, 0))[0]
            status.phase = ""
        self._outages.feed({**fields, "event": event, "time": now(), "epoch": status.epoch})
        if each := self._outages.each:
            status.interruptions, status.interrupted_s = len(each), self._outages.seconds
            status.last_interruption = msgspec.to_builtins(each[-1])

    async def _refuse_if_owned(self) -> Epoch | None:
        """The run's former owner, which is over.

        Raises:
            Fenced: it is not.
        """
        owner = read_epoch(self._paths)
        alive = "" if owner is None else await self._allocation.still_alive(owner)
        if alive:
            raise Fenced(
                "another job works on this run",
                where=self._paths.root,
                found=alive,
                remedy=f"wait for it, or verl-slurm cancel {self._paths.root}",
            )
        return owner

    async def _live(self, journal: Journal, effects: Effects) -> tuple[ExitCode, str]:
        try:
            if cancelled := await self._allocation.cancelled_before():
                return ExitCode.CANCELLED, cancelled
            stuck = stuck_starts(read_events(self._paths))
        except (
            OSError
        ) as error:  # the journal cannot be read: not a run that is over, but a start that failed
            self._events.put_nowait(ev.StartFailed(str(error)))
        else:
            if stuck >= self._config.daemon.no_progress_limit:
                journal.event("held", stuck=stuck, reason="every start crashed at the same place")
                return ExitCode.NO_PROGRESS, f"{stuck} starts in a row crashed without anything new"
            self._events.put_nowait(await self._begin(journal, effects))
        clock = asyncio.create_task(self._watch_the_clock())
        try:
            while effects.exit is None:
                event = await self._events.get()
                decision = decide(self._model, event)
                self._model = decision.model
                self._note(event, journal)
                for action in decision.actions:
                    effects.perform(action)
        finally:
            clock.cancel()
        return effects.exit

    async def _begin(self, journal: Journal, effects: Effects) -> ev.Ready | ev.StartFailed:
        """What has to hold before a rank may start."""
        notices: list[str] = []
        root = data_root(self._config)
        try:
            if root is not None:
                await asyncio.to_thread(check_dataset, self._paths, root, notice=notices.append)
            for text in notices:
                journal.event("notice", reason=text)
            await effects.open()
            if self._metrics is not None and (problem := await self._metrics.open(self._allocation.address)):
                journal.event("warning", topic="metrics", text=problem)
        except OSError as error:
            return ev.StartFailed(str(error))
        return ev.Ready(self._config.speakers)

    async def _watch_the_clock(self) -> None:
        """What no signal tells: a warning from before we listened, or one that was lost with a dead step."""
        lead_s = self._config.slurm.signal_lead_s
        while True:
            outlook = await self._allocation.outlook()
            left = outlook.seconds_left
            near = outlook.preempted or (left is not None and left <= lead_s)
            model = self._model
            listens = model.state in (State.LAUNCHING, State.RUNNING, State.PAUSED) or model.saves_unbounded
            if near and listens:
                self._events.put_nowait(ev.SignalArrived("TIMER", "lead"))
            # Late on purpose: where the warning works, it comes first. Asked again, because limits are extended.
            if not outlook.answered or near:
                await asyncio.sleep(_LOOK_SOON_S)
            else:
                await asyncio.sleep(_LOOK_AGAIN_S if left is None else max(left - 0.75 * lead_s, 1.0))

    def _note(self, event: ev.Event, journal: Journal) -> None:
        """Keep the snapshot for `verl-slurm status`."""
        status, model = self._status, self._model
        if self._metrics is not None and isinstance(event, ev.RankSaid):
            self._metrics.heard(event.message)
        changed = status.state != model.state or status.generation != model.generation
        status.state, status.generation, status.cause = model.state, model.generation, model.cause
        match event:
            case ev.RankSaid(Progress() as message) if message.rank == 0:
                changed = changed or message.phase != status.phase
                status.step, status.phase, status.index = message.step, message.phase, message.index
                status.steps = message.total or status.steps
                status.metrics = message.metrics or status.metrics
            case ev.RankSaid(Saved() as message):
                changed = True
            case ev.Verified(name, good, _) if good:
                status.last_checkpoint, changed = name, True
                status.last_checkpoint_time = status.updated
        now = asyncio.get_running_loop().time()
        if changed or now >= self._status_due:
            self._status_due = now + _STATUS_EVERY_S
            if (owner := journal.status(status)) and not self._lost:
                self._lost = True
                self._events.put_nowait(ev.RunLost(owner))


def run_lead(root: Path, hostfile: Path | None = None) -> NoReturn:
    """The lead of this job, from start to end. Leaves the process by itself: see `_leave`.

    Args:
        hostfile: the hosts of a run without Slurm; this is the first of them.
    """
    paths = RunPaths(root)
    config = load_resolved(paths.run_yaml)
    os.environ["PYTHONSAFEPATH"] = "1"  # for all we start: nothing is imported from the submitter's directory
    for directory in (paths.control, paths.logs, paths.ledger, paths.checkpoints):
        private_dir(directory)
    host = None
    if hostfile is not None:
        hosts = parse_hostfile(hostfile.read_bytes(), hostfile)
        check_hosts(hosts, config)
        host = hosts[0].name
    allocation = _find_allocation(config, paths, host)

    async def live() -> NoReturn:
        _leave(await Lead(paths, config, allocation).run(), allocation)

    asyncio.run(live())
    raise AssertionError("unreachable")


def _leave(code: ExitCode, allocation: Allocation) -> NoReturn:
    """Out at once, from inside the loop: it would wait for a read-back in a thread, while the requeue's delay runs.

    Outside Slurm the next life begins here. Signals are blocked until it listens: a cancel in between is kept.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code is ExitCode.REQUEUED and isinstance(allocation, LocalAllocation):
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        os.environ["VERL_SLURM_LOCAL_RESTART"] = str(allocation.restart + 1)
        argv = [sys.executable, "-P", "-m", "verl_slurm_daemon", *sys.argv[1:]]
        os.execv(sys.executable, argv)  # noqa: S606 - an argument list of ours; no shell is what we want
    os._exit(int(code))


def _find_allocation(config: RunConfig, paths: RunPaths, host: str | None) -> Allocation:
    """The Slurm job of this process, the hosts that `host` leads, or this machine."""
    if host is not None:
        return HostfileAllocation(config, paths, host)
    job = SlurmJob.from_environ(dict(os.environ))
    return LocalAllocation(config, paths) if job is None else SlurmAllocation(job, config, paths)
