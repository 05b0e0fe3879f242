"""Reading back what nobody has asked for: disks lose bits in silence, and a resume is a bad moment to find out.

`next_due` says which checkpoint comes next, and why: pure. `scrub_one` reads it, every byte, slowly if asked, and
sets aside what is damaged beyond doubt. What the system would not read, others may write, or nobody with the run's key
has signed, is reported and left: a resume judges it the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.info import CheckpointInfo, Verdict
from verl_slurm.checkpoint.store.frozen_check import check_frozen
from verl_slurm.checkpoint.store.quarantine import move_to_quarantine
from verl_slurm.checkpoint.store.verify import verify

__all__ = ["Due", "Scrubbed", "next_due", "scrub_frozen", "scrub_one"]


@dataclass(frozen=True, kw_only=True)
class Due:
    """The next thing to scrub.

    Attributes:
        name: None: there is nothing to scrub at all.
        in_s: seconds until then; 0: now.
        reason: one line.
    """

    name: str | None
    in_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Scrubbed:
    """What one scrub found.

    Attributes:
        set_aside: where a damaged one was moved; None: it was not.
        gone: it was removed, by the retention of a living run, while it was read: no judgement.
    """

    verdict: Verdict
    set_aside: Path | None
    gone: bool = False

    @property
    def is_signed(self) -> bool:
        """There is a signature, whether anybody could check it or not."""
        manifest = self.verdict.manifest
        return manifest is not None and not isinstance(manifest.hmac, msgspec.UnsetType)


def next_due(
    infos: Sequence[CheckpointInfo], read_at: Mapping[str, float], *, now: float, every_s: float
) -> Due:
    """Which committed checkpoint is read next, and when.

    Args:
        read_at: name → when it was read back last, in seconds of the same clock as `now`. One that is missing
            there was not read in this clock's life, and is due.
        every_s: how old the last look may become.
    """
    committed = [info for info in infos if info.kind == "committed"]
    if not committed:
        return Due(name=None, in_s=every_s, reason="there is no checkpoint yet")
    # The newest first among those that were never read: it is the one that a resume would take.
    oldest = min(committed, key=lambda info: (read_at.get(info.name, -1.0), -info.step, -info.safe_point))
    last = read_at.get(oldest.name)
    if last is None:
        return Due(name=oldest.name, in_s=0.0, reason="not read back yet")
    age = now - last
    return Due(name=oldest.name, in_s=max(0.0, every_s - age), reason=f"read back {age:.0f} s ago")


def scrub_one(
    path: Path,
    *,
    set_aside: bool,
    keys: Keyring | None = None,
    bytes_per_s: float | None = None,
    verifier: Callable[..., Verdict] = verify,
) -> Scrubbed:
    """Read one checkpoint back.

    Args:
        set_aside: move it to quarantine where it is damaged.
        keys: where given, its manifest must be signed with one of them. What is not, is never moved: it may be a
            good checkpoint of another key.
        bytes_per_s: read no faster; None: as fast as it goes.
    """
    verdict = verifier(path, keys=keys, bytes_per_s=bytes_per_s)
    moved = None
    if not verdict.ok and not path.exists():
        return Scrubbed(verdict=verdict, set_aside=None, gone=True)
    if set_aside and not verdict.ok and verdict.damaged:
        moved = move_to_quarantine(path, [f"scrub: {problem}" for problem in verdict.problems])
    return Scrubbed(verdict=verdict, set_aside=moved)


def scrub_frozen(
    paths: RunPaths, digest: str, *, set_aside: bool, bytes_per_s: float | None = None
) -> Scrubbed:
    """Read one copy in RUN/frozen back; the arguments are those of `scrub_one`. The next start makes a new one."""
    path = paths.frozen / digest
    verdict = check_frozen(paths, digest, bytes_per_s=bytes_per_s)
    if not verdict.ok and not path.exists():
        return Scrubbed(verdict=verdict, set_aside=None, gone=True)
    moved = None
    if set_aside and verdict.damaged:
        moved = move_to_quarantine(path, [f"scrub: {problem}" for problem in verdict.problems])
    return Scrubbed(verdict=verdict, set_aside=moved)
