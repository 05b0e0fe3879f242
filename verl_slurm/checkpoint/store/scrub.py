"""Reads checkpoints back before they are needed: disks lose bits silently, and a resume is a bad moment to find out.

`next_due` decides which checkpoint comes next, and why: pure. `scrub_one` reads it, every byte, slowly if asked, and
sets aside what is damaged beyond doubt. A checkpoint that the system would not read, that others may write, or that is
not signed with the run's key is reported and left: a resume judges it the same way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.info import CheckpointInfo, Verdict
from verl_slurm.checkpoint.store.frozen import check_frozen
from verl_slurm.checkpoint.store.quarantine import move_to_quarantine
from verl_slurm.checkpoint.store.verify import verify


@dataclass(frozen=True, kw_only=True)
class ScrubDue:
    """The next thing to scrub, `in_s` seconds from now, and why; `name` is None: there is nothing."""

    name: str | None
    in_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class ScrubResult:
    """Result of one scrub: the new place of a damaged one that was moved.

    `gone`: the retention of a live run removed it while it was read: no judgement.
    """

    verdict: Verdict
    set_aside: Path | None
    gone: bool = False

    @property
    def is_signed(self) -> bool:
        """Returns whether it has a signature, checked or not."""
        manifest = self.verdict.manifest
        return manifest is not None and not isinstance(manifest.hmac, msgspec.UnsetType)


def next_due(
    infos: Sequence[CheckpointInfo], read_at: Mapping[str, float], *, now: float, every_s: float
) -> ScrubDue:
    """Decides which committed checkpoint is read next, no later than `every_s` after its last reading.

    `read_at`: name → when it was last read back, on the clock of `now`. A missing one is due.
    """
    committed = [info for info in infos if info.kind == "committed"]
    if not committed:
        return ScrubDue(name=None, in_s=every_s, reason="there is no checkpoint yet")
    # Among those never read, the newest first: a resume would take it.
    oldest = min(committed, key=lambda info: (read_at.get(info.name, -1.0), -info.step, -info.safe_point))
    # Not known means due: `read_at` starts empty with each process.
    last = read_at.get(oldest.name)
    if last is None:
        return ScrubDue(name=oldest.name, in_s=0.0, reason="not read back yet")
    # One clock for both, given by the caller: this function stays pure.
    age = now - last
    return ScrubDue(name=oldest.name, in_s=max(0.0, every_s - age), reason=f"read back {age:.0f} s ago")


def scrub_one(
    path: Path,
    *,
    set_aside: bool,
    keys: Keyring | None = None,
    bytes_per_s: float | None = None,
) -> ScrubResult:
    """Reads one checkpoint back, no faster than `bytes_per_s`; `set_aside`: a damaged one goes to quarantine.

    With `keys`, one that is not signed with them is never moved: it may be a good one of another key.
    """
    return _judged(path, verify(path, keys=keys, bytes_per_s=bytes_per_s), set_aside=set_aside)


def scrub_frozen(
    paths: RunPaths, digest: str, *, set_aside: bool, bytes_per_s: float | None = None
) -> ScrubResult:
    """Reads one copy in RUN/frozen back, as `scrub_one`. The next start replaces a damaged one."""
    path = paths.frozen / digest
    # Without the source: on a login node it may be elsewhere, and the record beside the copy suffices.
    return _judged(path, check_frozen(paths, digest, bytes_per_s=bytes_per_s), set_aside=set_aside)


def _judged(path: Path, verdict: Verdict, *, set_aside: bool) -> ScrubResult:
    if not verdict.ok and not path.exists():
        return ScrubResult(verdict=verdict, set_aside=None, gone=True)
    moved = None
    # `damaged` leaves out what could not be read, belongs to others or has another key.
    if set_aside and not verdict.ok and verdict.damaged:
        moved = move_to_quarantine(path, [f"scrub: {problem}" for problem in verdict.problems])
    return ScrubResult(verdict=verdict, set_aside=moved)
