"""What one save is made of: what the ranks bring, what rank 0 tells them, and the manifest that comes of it."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.components import Components
from verl_slurm.checkpoint.format.specification import FileEntry, Manifest, Topology
from verl_slurm.config.roles import ROLES, Role
from verl_slurm.runtime_state.format import RuntimeState
from verl_slurm.save.writer.media import Medium
from verl_slurm.save.writer.protocol import Sealing, Written

__all__ = [
    "Attempt",
    "Committed",
    "Contents",
    "LocalPlace",
    "Once",
    "Plan",
    "Provenance",
    "SavedCheckpoint",
    "manifest_of",
]


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What one rank brings to a save, beside its tensors.

    Attributes:
        runtime: this rank's state. Nobody may change its arrays any more.
        texts: further files by name; those of rank 0 are written, the other ranks' may be empty.
        metrics: for the manifest, of the step that it ends; rank 0's count.
        frozen: digests of what does not train and may be another in the next save, by role.
    """

    runtime: RuntimeState
    texts: Mapping[str, bytes]
    metrics: Mapping[str, float] = field(default_factory=dict)
    frozen: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What the manifest says of where a checkpoint comes from; the same for all saves of one attempt of the run."""

    epoch: int
    parent: str | None
    schema_id: str
    dataset_fingerprint: str
    frozen: Mapping[str, str]
    topology: Topology
    trained: tuple[Role, ...] = ROLES


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint; `num_bytes` over all ranks, `seconds` from `begin` to the rename."""

    name: str
    seconds: float
    num_bytes: int
    on_shared: bool = True
    """Whether shared storage has it. If not, the nodes' own disks do, read back."""
    problem: str = ""
    """Which medium does not have it, and why."""


@dataclass(frozen=True, kw_only=True)
class LocalPlace:
    """The node's own disk, as one of its ranks sees it.

    Attributes:
        directory: `checkpoint.store.local_copy.local_directory`.
        is_first: this rank commits and cleans up for its node; exactly one a node does.
        keep: parts that stay.
    """

    directory: Path
    is_first: bool
    keep: int


class Once(Generic[T]):
    """Something that is made by whoever needs it first, on any thread, and is the same for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: T | None = None

    def get(self, make: Callable[[], T]) -> T:
        with self._lock:
            if self._made is None:
                self._made = make()
            return self._made


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One save, as a rank was asked for it.

    Attributes:
        on_kept: told, once, that every node's disk has it, read back, while shared storage does not yet; None:
            nobody wants to know.
        on_part: told when this rank's own files are durable on a medium; None: nobody wants to know.
        answers: the saver's word on each medium, as soon as there is one.
        owned: whether this attempt of the run still owns it, as far as rank 0 could find out; it raises `Fenced`.
        on_shared: set when shared storage has it.
        made: rank 0's manifest, made once, by the medium that was durable first.
    """

    paths: RunPaths
    contents: Contents
    components: Components
    local: LocalPlace | None
    started: float
    seconds_left: float | None
    on_kept: Callable[[SavedCheckpoint], None] | None = None
    on_part: Callable[[], None] | None = None
    answers: Mapping[Medium, "Future[Written]"] = field(
        default_factory=lambda: {medium: Future() for medium in Medium}
    )
    owned: "Future[None]" = field(default_factory=Future)
    on_shared: threading.Event = field(default_factory=threading.Event)
    made: "Once[Manifest]" = field(default_factory=lambda: Once())

    def takes(self, path: str) -> bool:
        """Whether a file of a domain belongs to this save."""
        return not self.components or path.split("/")[0] in self.components

    def directories(self, plan: "Plan") -> dict[Medium, Path]:
        """This rank's directory on each medium that takes part."""
        found = {} if plan.not_shared else {Medium.SHARED: self.paths.checkpoints / plan.name}
        if self.local is not None:
            found[Medium.LOCAL] = self.local.directory / plan.name
        return found

    def answered(self, plan: "Plan", written: Written) -> None:
        """The saver's word on one directory."""
        for medium, directory in self.directories(plan).items():
            if str(directory) == written.outcome.directory:
                self.answers[medium].set_result(written)

    def ended(self, staged: "Future[None]") -> None:
        """The saver says nothing more."""
        error = staged.exception()
        for answer in self.answers.values():
            if error is not None and not answer.done():
                answer.set_exception(error)


class Plan(msgspec.Struct, frozen=True):
    """Rank 0's word to all at the start of a save: the staging directory's name, on every medium."""

    name: str
    not_shared: str
    """Why shared storage takes no part; empty: it does."""
    sealing: Sealing | None
    """How this attempt is encrypted, on all media alike; None: not at all."""


class Committed(msgspec.Struct, frozen=True):
    """Rank 0's word to all when shared storage was asked to commit."""

    num_bytes: int
    problem: str
    """Why it does not have it."""


def manifest_of(
    name: str, attempt: Attempt, provenance: Provenance, entries: list[FileEntry], sealing: Sealing | None
) -> Manifest:
    """Of the whole checkpoint, not yet sealed or signed. Runs on rank 0."""
    runtime = attempt.contents.runtime
    return Manifest(
        name=name,
        step=runtime.step,
        safe_point=runtime.safe_point,
        phase=runtime.phase,
        epoch=provenance.epoch,
        parent=provenance.parent,
        schema_id=provenance.schema_id,
        dataset_fingerprint=provenance.dataset_fingerprint,
        world_size=runtime.world_size,
        topology=provenance.topology,
        files=tuple(entries),
        components=attempt.components,
        trained=msgspec.UNSET if provenance.trained == ROLES else provenance.trained,
        frozen={**provenance.frozen, **attempt.contents.frozen},
        created_utc=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        save_seconds=round(time.monotonic() - attempt.started, 3),
        metrics=dict(attempt.contents.metrics) or msgspec.UNSET,
        encryption=msgspec.UNSET if sealing is None else sealing.encryption,
    )
