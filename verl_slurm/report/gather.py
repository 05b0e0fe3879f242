"""Gathers the facts of a report from run directories. A missing or damaged part is named, and costs no other part."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from verl_slurm import __version__
from verl_slurm.base.bounded import JOURNAL, TooMuch, open_regular
from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.lost import gone_back
from verl_slurm.checkpoint.store.run_config import keys_for
from verl_slurm.config.load import differences, load_resolved
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.events import Avoid, Crash, Ended, Event, Hang, Link, ServiceReady, Warned
from verl_slurm.journal.files import read_events
from verl_slurm.journal.history import History, LifeInterval, TimeUse, interruption_facts
from verl_slurm.journal.status import read_status
from verl_slurm.journal.steps import every_row
from verl_slurm.report import report_facts as shown
from verl_slurm.report.curves import Steps
from verl_slurm.report.report_facts import Report, RunFacts
from verl_slurm.runs.glance import ask_for, glance, is_over, state_of, steps_done
from verl_slurm.runs.run_record import has_ledger
from verl_slurm.runtime_state.samples import best_and_worst, read_samples
from verl_slurm.wire.reward_plan import read_reward_plan

T = TypeVar("T")

# Its address is often a secret, and a page may be handed on. Other secrets are files: a configuration refuses them.
_HIDDEN = "hooks.webhook"
_MOST_CHECKPOINTS = 300
_MOST_NODES = 100
_MOST_WARNINGS = 30


def gather(
    runs: Sequence[RunPaths],
    *,
    num_samples: int = 3,
    known: Mapping[Path, tuple[str, bool | None]] | None = None,
) -> Report:
    """Reads all runs.

    Args:
        num_samples: of the best and of the worst responses of the newest step; 0: none.
        known: state, and whether the job lives, of runs about which no scheduler has to be asked.
    """
    now = time.time()
    said = known or {}
    made = [_Reader(paths, now, num_samples, said.get(paths.root)) for paths in runs]
    found = [one.read() for one in made]
    _tell_apart(found)
    return Report(
        version=__version__,
        made=now,
        runs=found,
        differences=_differences([one.config for one in made]) if len(made) > 1 else [],
    )


def _tell_apart(runs: Sequence[RunFacts]) -> None:
    if len({run.name for run in runs}) < len(runs):
        # Where two have one name, their directories tell them apart.
        above = os.path.commonpath([run.run_dir for run in runs])
        for run in runs:
            run.name = os.path.relpath(run.run_dir, above)


class _Reader:
    def __init__(
        self,
        paths: RunPaths,
        now: float,
        num_samples: int,
        known: tuple[str, bool | None] | None,
    ) -> None:
        self.paths, self._now, self._num_samples = paths, now, num_samples
        self._known = known
        self._missing: list[str] = []
        self.config = self._try("run.yaml", self._configuration, None)

    def read(self) -> RunFacts:
        paths, config = self.paths, self.config
        nothing: dict[str, Any] = {}
        silent: list[Event] = []
        status = self._try("status.json", lambda: read_status(paths, self._missing), nothing)
        if not status:
            self._missing.append("status.json is not there, or cannot be read: no position of the ranks")
        events = self._try("events.jsonl", self._events, silent)
        damaged: list[int] = []
        steps, history = Steps(responses=_responses(config)), History(events)
        for row in every_row(paths, damaged, self._missing):
            steps.feed(row)
            history.feed_row(row)
        self._look_at_steps(damaged)

        unknown: tuple[str, bool | None, CheckpointInfo | None] = ("unknown", None, None)
        state, alive, newest = self._try("the state of its job", self._state, unknown)
        word = history.word
        ended = isinstance(word, Ended) and word.is_final if word else status.get("state") == "ended"
        if word is None:
            # `list` would say "prepared", which a run without its journal need not be.
            state = "unknown" if status or steps.last else state
        # A run that is gone is told up to its last word, not up to now.
        until = self._now if alive else history.last_at
        intervals = history.intervals(until or 0.0)
        use = history.time_use(until or 0.0) if intervals else None
        never: list[shown.RewardFact] = []
        rewards = self._try("rewards.json", self._rewards, never)
        facts = RunFacts(
            name=config.name if config is not None else paths.root.name,
            run_dir=str(paths.root),
            state=state,
            # An end in the journal, and a job that lives: it was requeued since.
            provisional=not ended or bool(alive),
            backend=config.trainer.backend if config is not None else "",
            description=_description(config, status, history, rewards),
            began=history.first_at,
            until=until,
            step=steps_done(status, newest) if status else steps.last,
            steps=int(status.get("steps") or 0),
            attempts=len(history.attempts),
            restarts={cause: count for cause, count in history.restarts.items() if count},
            timeline=intervals,
            time_use=use,
            cost=_allocation_of(history, intervals, config, use),
            tokens=steps.tokens(),
            phases=steps.phases(),
            curves=steps.curves(),
            rewards=rewards,
            attempts_at=steps.attempts_at(),
            nodes=_nodes_of(events, status),
            warnings=_warnings_of(events),
        )
        ready = [event.seconds for event in events if isinstance(event, ServiceReady)]
        facts.engine_start_s = round(sum(ready), 3) if ready else None
        facts.weight_sync_s = facts.phases.get("weight sync")
        if until is not None:
            at = datetime.fromtimestamp(until, UTC)
            outages = history.outages_until(at)
            facts.interruptions = interruption_facts(outages, at, has_ledger=has_ledger(paths))
        facts.checkpoints = self._try("checkpoints", lambda: _checkpoints_of(paths, history, steps), [])
        if lost := self._try("the newest checkpoint", lambda: self._lost(history, newest), ""):
            facts.warnings.insert(0, shown.WarningFact(time=None, topic="checkpoint", text=lost))
        if self._num_samples:
            facts.samples = self._try("samples.jsonl", self._samples, [])
        facts.missing = self._missing
        return facts

    def _try(self, what: str, read: Callable[[], T], otherwise: T) -> T:
        """What cannot be read is missing on the page, with the reason, and all the rest is there."""
        try:
            return read()
        except VerlSlurmError as error:
            self._missing.append(f"{what}: {error.one_line()}")
        except (OSError, ValueError, RecursionError) as error:
            self._missing.append(f"{what}: {error}")
        return otherwise

    def _configuration(self) -> RunConfig | None:
        # An empty file is a configuration of defaults, and no run's.
        if not self._is_readable(self.paths.run_yaml, "no configuration, no hours"):
            return None
        return load_resolved(self.paths.run_yaml)

    def _is_readable(self, path: Path, without: str) -> bool:
        """Whether there is a file to read; otherwise says what the page lacks `without` it."""
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                if not file.read(1):
                    self._missing.append(f"{path.name} is empty: {without}")
                    return False
        except FileNotFoundError:
            self._missing.append(f"{path.name} is not there: {without}")
        except (OSError, TooMuch) as error:
            self._missing.append(f"{path.name} cannot be read ({error}): {without}")
        else:
            return True
        return False

    def _events(self) -> list[Event]:
        path = self.paths.events
        if not self._is_readable(path, "no timeline, no interruptions, no goodput"):
            return []
        damaged: list[bytes] = []
        events = read_events(self.paths, damaged)
        if damaged:
            lost, lines = counted(len(damaged), "line"), len(events) + len(damaged)
            self._missing.append(f"events.jsonl: {lost} of {lines} are no events, and were passed over")
        if path.stat().st_size > JOURNAL.num_bytes:
            self._missing.append("events.jsonl is longer than what is read: its beginning is left out")
        return events

    def _look_at_steps(self, damaged: Sequence[int]) -> None:
        if not self._is_readable(self.paths.steps, "no curves, and no goodput, which is made of steps"):
            return
        if damaged:
            first = ", ".join(map(str, damaged[:5]))
            self._missing.append(
                f"steps.jsonl: {counted(len(damaged), 'line')} (the first: {first}) are no rows, and were passed over"
            )

    def _state(self) -> tuple[str, bool | None, CheckpointInfo | None]:
        """As `list` says it, whether the job lives, and the newest checkpoint."""
        one = glance(self.paths.root)
        if self._known is not None:
            return *self._known, one.checkpoint
        seen, problem = ask_for([one])
        if problem and not (is_over(one) and one.job is not None):
            self._missing.append(f"the scheduler's answer: {problem}")
        answer = seen.get(one.root)
        return state_of(one, answer), None if answer is None else answer.alive, one.checkpoint

    def _lost(self, history: History, newest: CheckpointInfo | None) -> str:
        return "" if newest is None else gone_back(self.paths, history, newest.name, self.config)

    def _rewards(self) -> list[shown.RewardFact]:
        return [
            shown.RewardFact(
                step=one.step + 1,
                reward=one.reward,
                replaced=one.replaced,
                warm_start_steps=one.warm_start_steps,
            )
            for one in read_reward_plan(self.paths).switches
        ]

    def _samples(self) -> list[shown.SampleFacts]:
        # Without a configuration it is not known whether they are encrypted; `read_samples` says so if they are.
        keys = keys_for(self.paths.root) if self.config is not None else None
        kept = read_samples(self.paths, keys)
        if not kept:
            return []
        step = kept[max(kept)]
        best, worst = best_and_worst(step.samples, self._num_samples, self._num_samples)
        return [
            shown.SampleFacts(**msgspec.structs.asdict(sample), step=step.step, kind=kind)
            for kind, some in (("best", best), ("worst", worst))
            for sample in some
        ]


def _checkpoints_of(paths: RunPaths, history: History, steps: Steps) -> list[shown.CheckpointFacts]:
    """The newest saves of the journal, and what is in the directory; newest first. OSError: it cannot be read."""
    saves = {name: save.event for name, save in history.saves.items()}
    # A colleague of a group sees none of them, as in `status`.
    try:
        present = {info.name: info for info in list_checkpoints(paths) if info.kind == "committed"}
    except PermissionError:
        present = {}
    found = []
    stalls = _stalls(list(saves), steps)
    # A checkpoint without a save in the journal is older than what was read of it.
    for name in [*sorted(present.keys() - saves.keys()), *saves]:
        saved, there = saves.get(name), present.get(name)
        known = shown.CheckpointFacts(name=name, stall_s=stalls.get(name), kept=there is not None)
        if saved is not None:
            unread = "" if saved.on_shared else "on the nodes' disks"
            taken = ("attempt", "num_bytes", "seconds", "emergency", "reason")
            own = {field: getattr(saved, field) for field in taken}
            known = msgspec.structs.replace(known, time=saved.at, verified=unread, **own)
        elif there is not None:
            known = msgspec.structs.replace(known, attempt=there.attempt, num_bytes=there.num_bytes)
        found.append(msgspec.structs.replace(known, verified=history.verdicts.get(name, known.verified)))
    return found[::-1][:_MOST_CHECKPOINTS]


def _stalls(names: Sequence[str], steps: Steps) -> dict[str, float]:
    """Name of a save -> seconds of stalls after it; of those whose steps measured any."""
    at = {name: int(match[1]) for name in names if (match := CHECKPOINT_NAME.fullmatch(name))}
    # Of several saves in one step, the stall is the last one's.
    last = {step: name for name, step in at.items()}
    order = sorted(last)
    found = zip(order, steps.stall_after(order), strict=True)
    return {last[step]: round(seconds, 3) for step, seconds in found if seconds is not None}


def _nodes_of(events: Sequence[Event], status: dict[str, Any]) -> list[shown.NodeFact]:
    """What was wrong with nodes, newest first; the stragglers of the present come first of all."""
    found: list[shown.NodeFact] = []

    def note(node: str, what: str, detail: str) -> None:
        found.append(shown.NodeFact(node=node, time=event.at, what=what, detail=detail))

    for event in events:
        match event:
            case Crash(node=str(node), kind=kind, detail=detail) if node:
                note(node, "lost" if kind == "node" else kind, detail)
            case Hang(node=node, detail=detail) if node:
                note(node, "hang", detail)
            case Avoid(nodes=nodes, detail=detail):
                for node in nodes:
                    note(node, "avoided", detail)
            case Link(node=node, error=error) if node:
                note(node, "link", error)
            case Warned(topic="straggler", text=text):
                node, _, said = text.partition(": ")
                note(node, "slow", said)
    slow = [
        shown.NodeFact(node=str(one).rpartition(" on ")[2], what="slow", detail=f"{one}, now")
        for one in status.get("stragglers", [])
    ]
    return [*slow, *found[::-1]][:_MOST_NODES]


def _warnings_of(events: Sequence[Event]) -> list[shown.WarningFact]:
    """The newest warnings, newest first; those of nodes are among the nodes."""
    warned = [event for event in events if isinstance(event, Warned) and event.topic != "straggler"]
    return [
        shown.WarningFact(time=event.at, topic=event.topic, text=event.text)
        for event in warned[: -_MOST_WARNINGS - 1 : -1]
    ]


def _allocation_of(
    history: History,
    intervals: Sequence[LifeInterval],
    config: RunConfig | None,
    use: TimeUse | None,
) -> shown.Cost | None:
    """The hours of all GPUs, or cores, that the attempts held. None: the configuration or the time is not known."""
    if config is None or use is None:
        return None
    most = config.distributed.nodes + config.slurm.spare_nodes
    # Of an attempt that may have other nodes than it asked for, the journal says which it got.
    chosen = {one.number: one.num_nodes for one in history.attempts}
    node_s = sum(
        interval.seconds * (chosen.get(interval.attempt) or most)
        for interval in intervals
        if interval.kind != "queued"
    )
    gpus = config.slurm.gpus_per_node
    hours = node_s * (gpus or config.slurm.cpus_per_node) / 3600
    return shown.Cost(
        unit="GPU" if gpus else "core",
        hours=round(hours, 3),
        useful_hours=round(hours * use.goodput, 3) if use.goodput is not None else None,
    )


def _responses(config: RunConfig | None) -> int | None:
    if config is None:
        return None
    if not config.trainer.is_guest:
        return config.distributed.dp_size * config.train.batch_size_per_device
    prompts = config.verl.get("data.train_batch_size")
    each = config.verl.get("actor_rollout_ref.rollout.n", 1)
    return prompts * each if isinstance(prompts, int) and isinstance(each, int) else None


def _description(
    config: RunConfig | None, status: dict[str, Any], history: History, rewards: Sequence[shown.RewardFact]
) -> dict[str, str]:
    found: dict[str, str] = {}
    if config is not None:
        shape = config.distributed
        if not config.trainer.is_guest:
            found["Model"] = config.model.path
            words = [f"{config.train.algorithm}, reward {config.model.reward}"]
            words += [f"since step {one.step} {one.reward}" for one in rewards]
            found["Algorithm"] = "; ".join(words)
        elif config.trainer.backend == "verl":
            found["Program"] = f"verl, {config.trainer.entry}"
            found["Model"] = str(
                config.verl.get("actor_rollout_ref.model.path", config.verl.get("model.path", ""))
            )
        else:
            found["Program"] = " ".join(config.trainer.command)
        found["Ranks"] = f"{shape.world_size} on {counted(shape.nodes, 'node')}"
    if history.attempts:
        newest = history.attempts[-1].event
        where = f"Slurm {status.get('slurm', '')}".strip() if newest.cluster == "slurm" else "this machine"
        found["Job"] = f"{newest.job_id or '?'} ({where})"
        found["Nodes"] = newest.nodes or newest.host
    if history.restart is not None:
        found["Resumed from"] = history.restart.resume or "the beginning"
    return {what: value for what, value in found.items() if value}


def _differences(configs: Sequence[RunConfig | None]) -> list[shown.DifferingSetting]:
    """The keys in which any run differs from the first one, in the order of the schema; names and places left out."""
    first = next((config for config in configs if config is not None), None)
    if first is None:
        return []
    changed = [
        {} if config is None else {key: (before, after) for key, before, after in differences(first, config)}
        for config in configs
    ]
    firsts = {key: before for changes in changed for key, (before, _) in changes.items()}
    return [
        shown.DifferingSetting(
            key=key,
            values=[
                None if config is None else _text(key, changes[key][1] if key in changes else before)
                for config, changes in zip(configs, changed, strict=True)
            ],
        )
        for key, before in firsts.items()
        if key not in ("name", "run_dir")
    ]


def _text(key: str, value: object) -> str | None:
    if value is None:
        return None
    if key == _HIDDEN:
        return "(not shown)"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
