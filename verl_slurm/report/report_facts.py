"""Everything that is on the page of a report, as closed structs: the output of `verl-slurm report --json`.

Times are seconds since 1970, durations are in seconds, sizes in bytes; steps count from 1.
"""

from typing import Any

import msgspec

from verl_slurm.journal.history import LifeInterval, TimeUse
from verl_slurm.runtime_state.samples import Sample


class RunCurve(msgspec.Struct, frozen=True, kw_only=True):
    """A number over the steps that count."""

    name: str
    """reward, kl, loss, ...; or the loop's own name."""
    title: str
    source: str
    """The column of steps.jsonl that it is from."""
    points: list[tuple[float, float]]
    """(step, value). Of a long run each point is the mean of neighbouring steps."""
    each: int = 1
    """Steps that a point stands for, at most."""
    first: float
    last: float
    least: float
    most: float


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of responses. None: the loop does not report it."""

    sampled: int | None = None
    """By engines, in all steps that ended, those done again included."""
    used: int | None = None
    """That steps which count trained on, each once."""
    repeated: int | None = None
    """That steps trained on which were thrown back."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Hours that the run's job had."""

    unit: str
    """GPU, or core where the job asks for no GPU."""
    hours: float
    useful_hours: float | None = None


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One save, or a checkpoint that is there and of which the journal has no save."""

    name: str
    time: float | None = None
    attempt: int | None = None
    num_bytes: int | None = None
    seconds: float | None = None
    """From the safe point until it was durable."""
    stall_s: float | None = None
    """That training waited for saves, from this one to the next. None: not measured."""
    emergency: bool = False
    reason: str = ""
    verified: str = ""
    """verified, corrupt, removed unread, on the nodes' disks; empty: not read back."""
    kept: bool = False
    """It is in the run's directory now."""


class NodeFact(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was wrong with a node."""

    node: str
    time: float | None = None
    what: str
    """crash, hang, lost, avoided, link, or slow."""
    detail: str = ""


class WarningFact(msgspec.Struct, frozen=True, kw_only=True):
    """A warning of the journal."""

    time: float | None = None
    topic: str = ""
    text: str = ""


class SampleFacts(Sample, frozen=True, kw_only=True):
    """A response of the policy."""

    step: int
    kind: str
    """best or worst of its step."""


class RewardFact(msgspec.Struct, frozen=True, kw_only=True):
    """A replacement of the run's reward (`verl-slurm update-reward`)."""

    step: int
    """The first step that it scores."""
    reward: str
    replaced: str
    warm_start_steps: int


class RunFacts(msgspec.Struct, kw_only=True):
    """One run."""

    name: str
    run_dir: str
    state: str
    """As `verl-slurm list` says it."""
    provisional: bool
    """The run has not ended for good, so the numbers may still change."""
    backend: str = ""
    """native, verl, command, ray; empty: its configuration cannot be read."""
    description: dict[str, str] = {}
    """Model, algorithm, job, nodes: what and value, for people."""
    began: float | None = None
    until: float | None = None
    """The end, now, or the last word of a run that is gone."""
    step: int = 0
    steps: int = 0
    attempts: int = 0
    restarts: dict[str, int] = {}
    """Starts of the ranks after the first, by cause; without zeros."""
    timeline: list[LifeInterval] = []
    interruptions: dict[str, Any] = {}
    """As `verl-slurm status --json` has them."""
    time_use: TimeUse | None = None
    cost: Cost | None = None
    tokens: Tokens = Tokens()
    engine_start_s: float | None = None
    """Of services, from each start until it answered; those of engines inside of ranks are in the ranks' start."""
    weight_sync_s: float | None = None
    """Of weights to the engines, where the loop reports it."""
    phases: dict[str, float] = {}
    """Seconds of the parts of the steps that count."""
    curves: list[RunCurve] = []
    rewards: list[RewardFact] = []
    """Replacements of the reward. Rewards before and after one need not have the same scale."""
    attempts_at: list[tuple[int, int]] = []
    """(attempt, its first step that counts)."""
    samples: list[SampleFacts] = []
    checkpoints: list[CheckpointFacts] = []
    """Newest first."""
    nodes: list[NodeFact] = []
    warnings: list[WarningFact] = []
    """The newest."""
    missing: list[str] = []
    """Parts of the run that could not be read, and why."""


class DifferingSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A key of the configuration in which runs differ."""

    key: str
    values: list[str | None]
    """One of each run, as YAML has it; None: the run has no such key, or no configuration."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The page."""

    version: str
    made: float
    runs: list[RunFacts]
    differences: list[DifferingSetting] = []
    """Where there are several runs."""
