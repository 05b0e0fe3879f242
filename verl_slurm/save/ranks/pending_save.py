"""One save on one rank: what the main thread asks for, what the other threads add, and the manifest made of it.

`save/THREADS.md` draws the threads and what crosses between them.

A save goes to one or two media. A resume reads shared storage. The node's own disk is the second copy, where the user
named one (`checkpoint.local_dir`): a save that only it took is `degraded`, and still a save.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import msgspec

from verl_slurm.base.files import require_safe_way
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.components import Components
from verl_slurm.checkpoint.format.specification import Algorithm, FileEntry, Guest, Manifest, Topology
from verl_slurm.checkpoint.store.commit import SavedCheckpoint, StagingDirectory
from verl_slurm.checkpoint.store.local_copy import LocalPart, local_directory, this_node
from verl_slurm.config.roles import ROLES, Role
from verl_slurm.config.schema import CheckpointConfig
from verl_slurm.runtime_state.format import RuntimeState
from verl_slurm.save.writer.file_sealing import SealedFile
from verl_slurm.save.writer.protocol import Sealing, Write, Written

# Second copies that stay on each node.
_SECOND_COPIES = 2
# A save under a preemption competes with every other job's; the last one's time is taken this many times.
_SLACK = 1.5


class Medium(StrEnum):
    """Where files go."""

    SHARED = "shared storage"
    LOCAL = "the nodes' disks"


class MediumResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a save on one medium, of one rank or of all.

    Attributes:
        entries: of the files that are written, the same on each medium. Of all ranks' files on rank 0 alone.
        num_bytes: of the committed checkpoint, over all ranks; 0 before the commit.
        problem: why not all files are durable there, or are not committed; empty: they are.
    """

    entries: tuple[FileEntry, ...] = ()
    num_bytes: int = 0
    problem: str = ""


def why_not_shared(last_seconds: float | None, seconds_left: float | None, *, has_local: bool) -> str:
    """Returns why a save is not tried on shared storage, which took `last_seconds` before; empty: it is."""
    # Without a second medium there is nothing to fall back to, and without a measured time no reason to skip one: the
    # save is tried.
    if not has_local or last_seconds is None or seconds_left is None or seconds_left >= last_seconds * _SLACK:
        return ""
    return f"{seconds_left:.1f} s are left, and the last save took {last_seconds:.1f} s there"


def problems_of(ranks: Sequence[str]) -> str:
    """Returns one text of each rank's problem, by rank; empty: there is none."""
    # Cut: a thousand ranks may say the same, and the text goes into messages of bounded size.
    return "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(ranks) if problem)[:500]


@dataclass(frozen=True, kw_only=True)
class SaveContents:
    """Input of one save from one rank, beside its tensors.

    Attributes:
        runtime: this rank's state. Its arrays must not change any more.
        texts: further files by name; rank 0's are written, the other ranks' may be empty.
        metrics: for the manifest, of the step that it ends; rank 0's count.
        frozen: by role, digests of parts that do not train and may differ in the next save.
    """

    runtime: RuntimeState
    texts: Mapping[str, bytes]
    metrics: Mapping[str, float] = field(default_factory=dict)
    frozen: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Manifest fields that are the same for all saves of one attempt."""

    run_id: str
    attempt: int
    parent: str | None
    schema_id: str
    dataset_fingerprint: str
    topology: Topology
    frozen: Mapping[str, str] = field(default_factory=dict)
    trained: tuple[Role, ...] = ROLES
    algorithm: Algorithm | msgspec.UnsetType = msgspec.UNSET
    guest: Guest | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, kw_only=True)
class LocalPlace:
    """The node's own disk, as one of its ranks sees it; `keep` parts stay.

    `is_first`: this rank commits and cleans up for its node; exactly one rank of a node does.
    """

    directory: Path
    is_first: bool
    keep: int

    @classmethod
    def of(cls, config: CheckpointConfig, paths: RunPaths, local_rank: int) -> "LocalPlace | None":
        """Returns the place of a rank of this node; None: `checkpoint.local_dir` is not set."""
        directory = local_directory(config.local_dir, paths, this_node())
        if directory is None:
            return None
        require_safe_way(directory, "checkpoint.local_dir")  # the node's directory is not the login node's
        return cls(directory=directory, is_first=local_rank == 0, keep=_SECOND_COPIES)


class SavePlan(msgspec.Struct, frozen=True):
    """Rank 0 broadcasts it at the start of a save."""

    name: str
    """Of the staging directory, on every medium."""
    not_shared: str
    """Why shared storage takes no part; empty: it does."""
    sealing: Sealing | None
    """How this save is encrypted, on all media alike; None: not at all."""


@dataclass(kw_only=True, eq=False)
class PendingSave:
    """One save under way on one rank, shared by four threads.

    Each field has one writer. The main thread sets the first group before another thread sees the object, and
    it never changes. A field of another group is set once, or not at all where its thread failed before.

    Attributes:
        on_kept: called once, when every node's disk has the save, read back, and shared storage does not; or None.
        on_part: called when this rank's own files are durable on a medium; or None.

        directories: this rank's directory on each medium that takes part; empty until the plan is known.
        staging: rank 0's, on shared storage; None: not made, or shared storage takes no part.
        request: sent to the writer process by the staging thread, which waits for it; has the plan's failure
            where there is no plan.
        small: this rank's files that are not tensors, or why they could not be made.
        on_shared: set when shared storage has the checkpoint.

        written: the writer process's answer for each medium, as soon as there is one.

        owned: set on rank 0 when it is known whether this attempt still owns the run; raises `Fenced`. The thread
            "checkpoint" sets it, or one started for that question where storage may never answer.

        part: this node's committed part, on the rank that committed it.
        read_back: problems found in the parts on their disks; None: nobody waits for that.
    """

    # Set by the main thread.
    paths: RunPaths
    contents: SaveContents
    components: Components
    local: LocalPlace | None
    started: float
    seconds_left: float | None
    on_kept: Callable[[SavedCheckpoint], None] | None = None
    on_part: Callable[[], None] | None = None

    # Set by the thread "checkpoint".
    directories: dict[Medium, Path] = field(init=False, default_factory=dict)
    staging: StagingDirectory | None = field(init=False, default=None)
    request: "Future[Write]" = field(init=False, default_factory=Future)
    small: "Future[list[SealedFile]]" = field(init=False, default_factory=Future)
    on_shared: threading.Event = field(init=False, default_factory=threading.Event)

    # Set by the thread "staging".
    written: "Mapping[Medium, Future[Written]]" = field(
        init=False, default_factory=lambda: {medium: Future() for medium in Medium}
    )

    # Set by the thread "checkpoint" or "owner", on rank 0.
    owned: "Future[None]" = field(init=False, default_factory=Future)

    # Set by the thread "second-copy".
    part: LocalPart | None = field(init=False, default=None)
    read_back: "Future[str] | None" = field(init=False, default=None)

    # Set on rank 0 by "checkpoint" or "second-copy", whichever commits first; the lock makes it one manifest.
    _manifest: Manifest | None = field(init=False, default=None)
    _manifest_lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    @property
    def name(self) -> str:
        """Of the checkpoint."""
        runtime = self.contents.runtime
        return self.paths.checkpoint(runtime.step, runtime.safe_point).name

    def takes(self, path: str) -> bool:
        """Whether a file of a domain belongs to this save."""
        return not self.components or path.split("/")[0] in self.components

    def planned(self, plan: SavePlan) -> None:
        """Derive the directories. Thread "checkpoint", before it sets `request`."""
        # A medium that is absent here is neither written, waited for, nor removed by any thread.
        if not plan.not_shared:
            self.directories[Medium.SHARED] = self.paths.checkpoints / plan.name
        if self.local is not None:
            self.directories[Medium.LOCAL] = self.local.directory / plan.name

    def answered(self, written: Written) -> None:
        """Take the writer process's answer for one directory. Thread "staging", so `request` is set."""
        # The process answers by directory, not by medium: it knows nothing of media.
        for medium, directory in self.directories.items():
            if str(directory) == written.directory:
                self.written[medium].set_result(written)

    def ended(self, staged: "Future[None]") -> None:
        """Fail what the writer process has not answered and will not. Callback of the staging thread's future."""
        error = staged.exception()
        # The threads "checkpoint" and "second-copy" wait for these without a time limit, so none may stay open. Answers
        # that came before the process died still count: their files are durable.
        for answer in self.written.values():
            if error is not None and not answer.done():
                answer.set_exception(error)

    def manifest(self, make: Callable[[], Manifest]) -> Manifest:
        """One manifest for all media, made by the first that asks. Rank 0; any thread."""
        # Both media commit at once, and a manifest holds the time of its making. Two of them would differ, and the
        # copies with them: parts from both media could not be put together.
        with self._manifest_lock:
            if self._manifest is None:
                self._manifest = make()
            return self._manifest

    def saved(self, *, num_bytes: int, on_shared: bool, problem: str) -> SavedCheckpoint:
        """Returns the result, as of now."""
        return SavedCheckpoint(
            name=self.name,
            # Monotonic: a clock that is set during the save must not make the next one look too slow for its deadline.
            seconds=time.monotonic() - self.started,
            num_bytes=num_bytes,
            on_shared=on_shared,
            problem=problem,
        )


def manifest_of(
    save: PendingSave, provenance: Provenance, entries: tuple[FileEntry, ...], sealing: Sealing | None
) -> Manifest:
    """Of the whole checkpoint, not yet sealed or signed. Runs on rank 0."""
    runtime = save.contents.runtime
    return Manifest(
        name=save.name,
        step=runtime.step,
        safe_point=runtime.safe_point,
        phase=runtime.phase,
        run_id=provenance.run_id,
        attempt=provenance.attempt,
        parent=provenance.parent,
        schema_id=provenance.schema_id,
        dataset_fingerprint=provenance.dataset_fingerprint,
        world_size=runtime.world_size,
        topology=provenance.topology,
        files=entries,
        components=save.components,
        # Left out where it says the default.
        trained=msgspec.UNSET if provenance.trained == ROLES else provenance.trained,
        algorithm=provenance.algorithm,
        guest=provenance.guest,
        frozen={**provenance.frozen, **save.contents.frozen},
        # For people, and for the `keep_days` of tiers: checkpoints are not ordered by a clock.
        created_utc=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        save_seconds=round(time.monotonic() - save.started, 3),
        metrics=dict(save.contents.metrics) or msgspec.UNSET,
        encryption=msgspec.UNSET if sealing is None else sealing.encryption,
    )
