"""The lead's Prometheus page: its numbers, their names and their help texts. docs/observability.md lists them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.events import Event, Restart
from verl_slurm.journal.files import read_events
from verl_slurm.journal.history import History
from verl_slurm.journal.status import Status
from verl_slurm.journal.steps import every_row
from verl_slurm.wire.connection_limits import REASONS
from verl_slurm.wire.messages import FromRank, Progress
from verl_slurm_daemon.decide.lead_model import State
from verl_slurm_daemon.metrics.exporter import Exporter, counter, gauge, labelled, renderer
from verl_slurm_daemon.metrics.live_numbers import LiveNumbers, queue_length

_LEARNING = (
    "reward",
    "kl",
    "kl_coef",
    "policy_loss",
    "value_loss",
    "entropy",
    "learning_rate",
    "eval/reward",
)
"""Columns of a step's row that are shown to those who have the token."""

_SAFE_POINT_AGE = "Since the last safe point of the rank that is furthest behind."


def steady_clock() -> Callable[[], float]:
    """Returns a clock: seconds since the epoch as of this call, continued by the monotonic clock."""
    # The wall clock is read once: a clock that is set later changes no age.
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class LeadMetrics:
    """Collects the numbers and renders the page. `clock`: seconds since the epoch."""

    def __init__(
        self,
        paths: RunPaths,
        config: RunConfig,
        status: Status,
        clock: Callable[[], float],
    ) -> None:
        self._paths, self._config, self._status, self._clock = paths, config, status, clock
        self.run, self.live = History(), LiveNumbers(range(config.speakers))
        self.refused: Mapping[str, int] = dict.fromkeys(REASONS, 0)
        """Refused connections at the control port, by reason; the lead counts them."""
        self._queue: int | None = None
        self._exporter = Exporter(
            paths,
            config,
            "lead",
            page=renderer(self.families),
            up=lambda: self._status.state not in (State.LEAVING, State.ENDED),
        )

    async def read_back(self) -> None:
        """Reads the run's history. Call it before anything is journaled."""
        # In a thread: a long journal on slow storage must not hold up the lead's loop.
        await asyncio.to_thread(self._read_back)

    async def open(self, own_host: Callable[[], Awaitable[str]]) -> str:
        """Listens, as `Exporter.open`."""
        return await self._exporter.open(own_host, self._config.observability.metrics_port or 0)

    def _read_back(self) -> None:
        # Events of this attempt come by `journaled`; read back as well, they would count twice.
        for event in read_events(self._paths):
            self.run.feed(event)
        for row in every_row(self._paths):
            self.run.feed_row(row)

    def close(self) -> None:
        self._exporter.close()

    def journaled(self, event: Event) -> None:
        """Takes note of an event that the lead is writing now."""
        if isinstance(event, Restart):
            self.live.new_restart()
        # Ages follow the steady clock of this process: setting the wall clock must not make a save older.
        steady = datetime.fromtimestamp(self._clock(), UTC).isoformat()
        self.run.feed(msgspec.structs.replace(event, time=steady))

    def heard(self, message: FromRank) -> None:
        """Takes note of a message from a rank."""
        self.live.feed(message, self._clock())
        # Rank 0's alone: all ranks are in the same step, and the others report once a second at most.
        if isinstance(message, Progress) and message.rank == 0:
            self._queue = queue_length(self._config, message.phase, message.index)
            if message.phase == "step_end" and "step_s" in message.metrics:
                self.run.step_took(message.step, message.metrics["step_s"])

    def families(self) -> Iterator[Metric]:
        """Yields all families of the page except the process' own."""
        now, live, status = self._clock(), self.live, self._status
        yield from self._of_issue(now)
        states = {str(state): float(state == status.state) for state in State}
        yield labelled(GaugeMetricFamily, "verl_run_state", "1 for the state it is in.", "state", states)
        in_step = status.metrics.get
        rows: tuple[tuple[str, str, float | None], ...] = (
            ("verl_run_step", "Whole steps done.", status.step),
            ("verl_run_steps", "Steps that the run is to do.", status.steps),
            ("verl_run_attempt", "Attempt: how often the job of the run was started.", status.attempt),
            ("verl_run_restart", "Restart: how often this attempt started the ranks.", status.restart),
            ("verl_ranks_expected", "Ranks of the run that speak.", self._config.speakers),
            ("verl_ranks_heard", "Ranks of this restart that have said something.", len(live.heard)),
            ("verl_safe_point_age_seconds", _SAFE_POINT_AGE, live.safe_point_age(now)),
            ("verl_tokens_per_second", "Sampled, in the newest step.", in_step("tokens_per_second")),
            ("verl_step_duration_seconds", "Of the newest step.", in_step("step_s")),
        )
        for row in rows:
            yield gauge(*row)
        yield counter("verl_rollouts_sampled", "Sampled, not replayed; of this lead.", live.num_rollouts)
        links = self.run.counts["link"]
        yield counter("verl_links_broken", "Agents' connections that failed; of this run.", links)
        yield from self._of_restarts(now)
        yield from self._of_saves()
        refused = "Connections to the control port that were not let in, since this lead began."
        yield labelled(CounterMetricFamily, "verl_control_refused", refused, "reason", self.refused)
        # Every user of the node can reach the port.
        if self._config.observability.token_file is not None:
            numbers = {name: status.metrics[name] for name in _LEARNING if name in status.metrics}
            yield labelled(GaugeMetricFamily, "verl_learning", "Of the newest step.", "number", numbers)

    def _of_issue(self, now: float) -> Iterator[Metric]:
        """Yields the four numbers that alerts are built from."""
        run, live = self.run, self.live
        # A run without a checkpoint loses everything since its beginning: that is its age.
        saved = run.last_save_at
        if saved is None and run.attempts:
            saved = run.attempts[0].began
        yield gauge(
            "verl_checkpoint_last_save_seconds_ago",
            "Since the newest checkpoint that was read back was written; before the first, since the run began.",
            None if saved is None else max(now - saved, 0.0),
        )
        # A save holds the rollouts, too, so the younger of both counts.
        written = run.all_saves[-1].at if run.all_saves else None
        durable = [at for at in (written, live.rollouts_at, saved) if at is not None]
        yield gauge(
            "verl_runtime_state_age_seconds",
            "Since rollouts were journaled or a save written; before the first, since the run began.",
            max(now - max(durable), 0.0) if durable else None,
        )
        yield gauge(
            "verl_gpu_memory_utilization_percent",
            "Memory in use of the run's fullest GPU, by whomever. Absent without GPUs.",
            max(live.gpu_percent.values(), default=None),
        )
        yield gauge(
            "verl_rollout_queue_length",
            "Responses of the running step that are sampled and not trained on to the end.",
            self._queue,
        )

    def _of_restarts(self, now: float) -> Iterator[Metric]:
        run = self.run
        for name, text, label, values in (
            ("verl_restarts", "Starts after the first, by cause.", "cause", run.restarts),
            ("verl_requeues", "Requeues that were asked for.", "outcome", run.requeues),
        ):
            yield labelled(CounterMetricFamily, name, text, label, values)
        yield counter("verl_crashes", "Restarts that crashed.", run.counts["crash"])
        yield counter("verl_hangs", "Restarts that hung; they are among the crashes.", run.counts["hang"])
        yield gauge("verl_useful_seconds", "Of the steps that count.", run.useful_seconds)
        yield counter("verl_allocated_seconds", "From each start to its end.", run.allocated_seconds(now))
        yield gauge("verl_goodput_ratio", "Useful of allocated seconds.", run.goodput(now))

    def _of_saves(self) -> Iterator[Metric]:
        run = self.run
        emergency = sum(save.event.emergency for save in run.all_saves)
        kinds = {"periodic": len(run.all_saves) - emergency, "emergency": emergency}
        yield labelled(CounterMetricFamily, "verl_checkpoint_saves", "Written.", "kind", kinds)
        for name, event, text in (
            ("verl_checkpoint_verified", "verified", "Read back and found good."),
            ("verl_checkpoint_corrupt", "corrupt", "Read back and not found good."),
            ("verl_checkpoint_one_copy", "one_copy", "Written to one medium only."),
            ("verl_checkpoint_save_failures", "save_failed", "Saves that failed."),
            ("verl_degraded_ends", "degraded", "Ends of a job without a verified save."),
            ("verl_warnings", "warning", "Warnings in the journal."),
        ):
            yield counter(name, text, run.counts[event])
        costs = [cost for save in run.all_saves if (cost := save.cost) is not None]
        seconds, size = costs[-1] if costs else (None, None)
        yield gauge("verl_checkpoint_save_duration_seconds", "Of the newest save, until durable.", seconds)
        yield gauge("verl_checkpoint_save_bytes", "Of the newest save.", size)
        yield counter("verl_checkpoint_save_seconds", "Of all saves.", sum(cost[0] for cost in costs))
        yield counter("verl_checkpoint_saved_bytes", "Of all saves.", sum(cost[1] for cost in costs))
