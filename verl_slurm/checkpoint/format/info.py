"""Describes what is known of a checkpoint: plain values, no I/O."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.checkpoint.format.specification import Manifest

Kind = Literal["committed", "torn", "foreign", "quarantined"]
"""committed: a final name and a manifest that parses (its files are not read). torn: a staging directory, or a final
name without a good manifest. quarantined: set aside. foreign: not ours, or another run's."""

ProblemKind = Literal["damaged", "unreadable", "untrusted", "version", "key", "extra"]
"""damaged: not what the run committed there: other bytes, or another run's. unreadable: the system refused to read (may
pass). untrusted: others own or may write it. version: the format is unknown to this code. key: it has no signature, or
one by a key that we lack. extra: a name that the manifest lacks. Damaged checkpoints may be set aside; the others may
be good and never are. What is extra may be moved out of one."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One fault, at one path relative to the checkpoint; `.` is the checkpoint itself."""

    path: str
    what: str
    kind: ProblemKind = "damaged"

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of a full check of one directory.

    Attributes:
        ok: it is, byte for byte, what was committed; only then is `problems` empty.
        manifest: present when the manifest itself verified.
        num_bytes: read and hashed.
    """

    name: str
    ok: bool
    problems: tuple[Problem, ...]
    manifest: Manifest | None
    num_bytes: int
    seconds: float

    @property
    def needs_key(self) -> bool:
        """Returns whether a missing key is its sole problem."""
        return bool(self.problems) and all(p.kind == "key" for p in self.problems)

    @property
    def unreadable(self) -> bool:
        """Returns whether the system refused to read some of it, which may pass."""
        return any(p.kind == "unreadable" for p in self.problems)

    @property
    def is_open(self) -> bool:
        """Returns whether its bytes are what was committed, and others may write it or own it."""
        kinds = {p.kind for p in self.problems}
        return self.manifest is not None and "untrusted" in kinds and kinds <= {"untrusted", "extra"}

    @property
    def has_strays(self) -> bool:
        """Returns whether names that its manifest lacks are its sole problem: `quarantine.move_strays`."""
        return bool(self.problems) and all(p.kind == "extra" for p in self.problems)

    @property
    def is_whole(self) -> bool:
        """Returns whether all that its manifest names is, byte for byte, what was committed, and ours alone."""
        return self.ok or self.has_strays

    @property
    def damaged(self) -> bool:
        """Returns whether its bytes differ beyond doubt; nothing else permits setting it aside."""
        # One file that cannot be read now leaves it open whether the storage also gave the damage.
        return any(p.kind == "damaged" for p in self.problems) and not any(
            p.kind in {"unreadable", "version"} for p in self.problems
        )

    def require(self, what: str, where: Path, remedy: str | None = None) -> Manifest:
        """Returns the manifest of a checkpoint that verified; else CheckpointCorrupt with the problems."""
        if self.has_strays:
            remedy = "move elsewhere what is extra; `verl-slurm verify RUN --scrub` moves it to quarantine"
        if not self.ok or self.manifest is None:
            raise CheckpointCorrupt(what, where=where, found=self.one_line(), remedy=remedy)
        return self.manifest

    def one_line(self, limit: int = 3) -> str:
        """Returns `step_000012: verified, 120 bytes`, or the first `limit` problems."""
        if self.ok:
            return f"{self.name}: verified, {self.num_bytes} bytes"
        more = len(self.problems) - limit
        text = "; ".join(str(p) for p in self.problems[:limit])
        return f"{self.name}: {text}" + (f"; and {more} more" if more > 0 else "")


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """One entry of a run's checkpoint directory, from its name and manifest alone.

    Attributes:
        step, safe_point: from the name; -1 if it has none.
        num_bytes: of its files by the manifest; 0 without one.
        metrics: of the step it ends, by name; empty for one from the middle of a step.
        detail: why its kind is not `committed`.
    """

    kind: Kind
    name: str
    path: Path
    step: int = -1
    safe_point: int = -1
    attempt: int | None = None
    phase: str | None = None
    world_size: int | None = None
    parent: str | None = None
    created_utc: str | None = None
    num_files: int = 0
    num_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    detail: str = ""

    @property
    def has_own_name(self) -> bool:
        """Returns whether it has the place and the name of a checkpoint, whatever lies there."""
        return self.step >= 0 and self.kind != "quarantined" and not self.name.startswith(".")

    @property
    def order(self) -> tuple[int, int]:
        return self.step, self.safe_point
