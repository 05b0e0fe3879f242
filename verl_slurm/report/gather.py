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
from verl_slurm.base.errors import NotFound, PermissionRefused, VerlSlurmError
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.store.lost import gone_back
from verl_slurm.checkpoint.store.run_config import keys_for
from verl_slurm.config.load import differences, load_resolved
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.events import Ended, Event, ServiceReady
from verl_slurm.journal.files import read_events
from verl_slurm.journal.history import History, interruption_facts
from verl_slurm.journal.status import read_status
from verl_slurm.journal.steps import every_row
from verl_slurm.report.curves import Steps
from verl_slurm.report.from_events import allocation_of, checkpoints_of, nodes_of, warnings_of
from verl_slurm.report.report_facts import (
    DifferingSetting,
    Report,
    RewardFact,
    RunFacts,
    SampleFacts,
    WarningFact,
)
from verl_slurm.runs.glance import ask_for, glance, state_of, steps_done
from verl_slurm.runs.run_record import has_ledger
from verl_slurm.runtime_state.samples import best_and_worst, read_samples
from verl_slurm.wire.reward_plan import read_reward_plan

T = TypeVar("T")

# Its address is often a secret, and a page may be handed on. Other secrets are files: a configuration refuses them.
_HIDDEN = "hooks.webhook"


def require_traces(paths: RunPaths) -> RunPaths:
    """Refuses a directory in which no file of a run is left.

    Raises:
        NotFound: none is there.
        PermissionRefused: the directory is closed to us.
    """
    if paths.root.is_dir() and not os.access(paths.root, os.R_OK | os.X_OK):
        raise PermissionRefused("the run cannot be read", where=paths.root, remedy="ask its owner for access")
    traces = (paths.run_yaml, paths.events, paths.steps, paths.status, paths.checkpoints)
    if not any(os.path.lexists(trace) for trace in traces):
        raise NotFound(
            "not a run directory",
            where=paths.root,
            expected=f"one of {', '.join(trace.name for trace in traces)}",
            remedy=f"it has runs below it: give one of them, or {shell_word(paths.root)}/* for all"
            if any(paths.root.glob("*/run.yaml"))
            else "give the run directory that submit printed; `verl-slurm list` shows those below runs/",
        )
    return paths


def gather(
    runs: Sequence[RunPaths],
    *,
    price_per_hour: float | None = None,
    num_samples: int = 3,
    known: Mapping[Path, tuple[str, bool | None]] | None = None,
) -> Report:
    """Reads all runs.

    Args:
        price_per_hour: of a GPU, or of a core where a run asks for no GPU.
        num_samples: of the best and of the worst responses of the newest step; 0: none.
        known: state, and whether the job lives, of runs about which no scheduler has to be asked.
    """
    now = time.time()
    said = known or {}
    made = [_Reader(paths, now, price_per_hour, num_samples, said.get(paths.root)) for paths in runs]
    found = [one.read() for one in made]
    _tell_apart(found)
    return Report(
        version=__version__,
        made=now,
        runs=found,
        differences=_differences([one.config for one in made]) if len(made) > 1 else [],
    )


def _tell_apart(runs: Sequence[RunFacts]) -> None:
    """Names runs by their directories where two have one name."""
    if len({run.name for run in runs}) < len(runs):
        above = os.path.commonpath([run.run_dir for run in runs])
        for run in runs:
            run.name = os.path.relpath(run.run_dir, above)


class _Reader:
    """Reads one run."""

    def __init__(
        self,
        paths: RunPaths,
        now: float,
        price_per_hour: float | None,
        num_samples: int,
        known: tuple[str, bool | None] | None,
    ) -> None:
        self.paths, self._now, self._price, self._num_samples = paths, now, price_per_hour, num_samples
        self._known = known
        self._missing: list[str] = []
        self.config = self._try("run.yaml", self._configuration, None)

    def read(self) -> RunFacts:
        paths, config = self.paths, self.config
        nothing: dict[str, Any] = {}
        silent: list[Event] = []
        status = self._try("status.json", lambda: read_status(paths), nothing)
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
        never: list[RewardFact] = []
        rewards = self._try("rewards.json", self._rewards, never)
        facts = RunFacts(
            name=config.name if config is not None else paths.root.name,
            run_dir=str(paths.root),
            state=state,
            provisional=not ended,
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
            cost=allocation_of(history, intervals, config, use, self._price),
            tokens=steps.tokens(),
            phases=steps.phases(),
            curves=steps.curves(),
            rewards=rewards,
            attempts_at=steps.attempts_at(),
            nodes=nodes_of(events, status),
            warnings=warnings_of(events),
        )
        ready = [event.seconds for event in events if isinstance(event, ServiceReady)]
        facts.engine_start_s = round(sum(ready), 3) if ready else None
        facts.weight_sync_s = facts.phases.get("weight sync")
        if until is not None:
            facts.interruptions = interruption_facts(
                history.outages, datetime.fromtimestamp(until, UTC), has_ledger=has_ledger(paths)
            )
        facts.checkpoints = self._try("checkpoints", lambda: checkpoints_of(paths, history, steps), [])
        if lost := self._try("the newest checkpoint", lambda: self._lost(history, newest), ""):
            facts.warnings.insert(0, WarningFact(time=None, topic="checkpoint", text=lost))
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
        if problem:
            self._missing.append(f"the scheduler's answer: {problem}")
        answer = seen.get(one.root)
        return state_of(one, answer), None if answer is None else answer.alive, one.checkpoint

    def _lost(self, history: History, newest: CheckpointInfo | None) -> str:
        return "" if newest is None else gone_back(self.paths, history, newest.name, self.config)

    def _rewards(self) -> list[RewardFact]:
        return [
            RewardFact(
                step=one.step + 1,
                reward=one.reward,
                replaced=one.replaced,
                warm_start_steps=one.warm_start_steps,
            )
            for one in read_reward_plan(self.paths).switches
        ]

    def _samples(self) -> list[SampleFacts]:
        # Without a configuration it is not known whether they are encrypted; `read_samples` says so if they are.
        keys = keys_for(self.paths.root) if self.config is not None else None
        kept = read_samples(self.paths, keys)
        if not kept:
            return []
        step = kept[max(kept)]
        best, worst = best_and_worst(step.samples, self._num_samples, self._num_samples)
        return [
            SampleFacts(**msgspec.structs.asdict(sample), step=step.step, kind=kind)
            for kind, some in (("best", best), ("worst", worst))
            for sample in some
        ]


def _responses(config: RunConfig | None) -> int | None:
    """Responses that are sampled for a step."""
    if config is None:
        return None
    if not config.trainer.is_guest:
        return config.distributed.dp_size * config.train.batch_size_per_device
    prompts = config.verl.get("data.train_batch_size")
    each = config.verl.get("actor_rollout_ref.rollout.n", 1)
    return prompts * each if isinstance(prompts, int) and isinstance(each, int) else None


def _description(
    config: RunConfig | None, status: dict[str, Any], history: History, rewards: Sequence[RewardFact]
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


def _differences(configs: Sequence[RunConfig | None]) -> list[DifferingSetting]:
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
        DifferingSetting(
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
