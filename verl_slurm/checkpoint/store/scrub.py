"""Reads checkpoints back before they are needed: disks lose bits silently, and a resume is a bad moment to find out.

`next_due` decides which checkpoint comes next, and why: pure. `scrub_one` reads it, every byte, slowly if asked, and
sets aside what is damaged beyond doubt. A checkpoint that the system would not read, that others may write, or that is
not signed with the run's key is reported and left: a resume judges it the same way.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.fence import require_attempt
from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import is_missing
from verl_slurm.checkpoint.format.info import CheckpointInfo, Problem, Verdict
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.frozen import check_frozen, frozen_digests
from verl_slurm.checkpoint.store.quarantine import move_strays, move_to_quarantine
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config.schema import CheckpointConfig
from verl_slurm.journal.events import Scrubbed
from verl_slurm.journal.files import read_history

SETTLE_S = 600.0
"""Seconds after a start before the first scrub of a running job: the start itself has enough to do."""

_LEAST_BYTES_PER_S = 50e6
_FROZEN = "frozen/"


@dataclass(frozen=True, kw_only=True)
class ScrubDue:
    """The next thing to scrub, `in_s` seconds from now, and why; `name` is None: there is nothing."""

    name: str | None
    in_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class ScrubResult:
    """Result of one scrub: the new place of a damaged one that was moved, or of the strays of a good one.

    `gone`: the retention of a live run removed it while it was read: no judgement. `not_moved`: why a damaged one that
    was to be set aside is still there.
    """

    verdict: Verdict
    set_aside: Path | None
    gone: bool = False
    not_moved: str = ""

    @property
    def is_good(self) -> bool:
        """Returns whether it verifies, now that strays were moved out of it."""
        return self.verdict.ok or (self.verdict.has_strays and self.set_aside is not None)

    @property
    def is_signed(self) -> bool:
        """Returns whether it has a signature, checked or not."""
        manifest = self.verdict.manifest
        return manifest is not None and not isinstance(manifest.hmac, msgspec.UnsetType)


def next_due(
    infos: Sequence[CheckpointInfo], read_at: Mapping[str, float], *, now: float, every_s: float
) -> ScrubDue:
    """Decides which checkpoint is read next, no later than `every_s` after its last reading.

    One that has lost its manifest, or is another run's, has its turn, too.

    `read_at`: name → when it was last read back, on the clock of `now`. A missing one is due.
    """
    present = [info for info in infos if info.kind == "committed" or info.has_own_name]
    if not present:
        return ScrubDue(name=None, in_s=every_s, reason="there is no checkpoint yet")
    # Among those never read, the newest first: a resume would take it.
    oldest = min(present, key=lambda info: (read_at.get(info.name, -1.0), -info.step, -info.safe_point))
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
    """Reads one checkpoint back, no faster than `bytes_per_s`; `set_aside`: a damaged one, or its strays alone, go to
    quarantine.

    With `keys`, one that is not signed with them is never moved: it may be a good one of another key.
    """
    return _judged(path, verify(path, keys=keys, bytes_per_s=bytes_per_s), set_aside=set_aside)


def scrub_frozen(
    paths: RunPaths, digest: str, *, set_aside: bool, bytes_per_s: float | None = None
) -> ScrubResult:
    """Reads one copy in RUN/frozen back, as `scrub_one`. The next start replaces a damaged one."""
    path = paths.frozen / digest
    try:
        # Without the source: on a login node it may be elsewhere, and the record beside the copy suffices.
        verdict = check_frozen(paths, digest, bytes_per_s=bytes_per_s)
    except OSError as error:
        problem = Problem(path=".", what=f"its record cannot be read: {error}", kind="unreadable")
        verdict = Verdict(
            name=_FROZEN + digest, ok=False, problems=(problem,), manifest=None, num_bytes=0, seconds=0.0
        )
    return _judged(path, verdict, set_aside=set_aside)


def _judged(path: Path, verdict: Verdict, *, set_aside: bool) -> ScrubResult:
    # Without the folder around it, it is the storage that is away.
    if not verdict.ok and is_missing(path) and not is_missing(path.parent):
        return ScrubResult(verdict=verdict, set_aside=None, gone=True)
    moved, not_moved = None, ""
    # `damaged` leaves out what could not be read, belongs to others or has another key. A link stays: what it leads to
    # may be a good one, which its user moved.
    if set_aside and (verdict.damaged or verdict.has_strays) and not os.path.islink(path):
        try:
            if verdict.has_strays:
                moved = move_strays(path, verdict)
            else:
                moved = move_to_quarantine(path, [f"scrub: {problem}" for problem in verdict.problems])
        # A full disk must not hide the verdict, nor keep the next ones from being read.
        except (OSError, VerlSlurmError) as error:
            not_moved = str(error)
    return ScrubResult(verdict=verdict, set_aside=moved, not_moved=not_moved)


def scrub_next(
    paths: RunPaths, config: CheckpointConfig, attempt: int, now: float, keys: Keyring | None = None
) -> tuple[float, Scrubbed | None]:
    """Reads one checkpoint back, slowly, if it is due. Returns seconds to the next look, and what to journal."""
    every_s = config.scrub_every_h * 3600
    infos = [*list_checkpoints(paths), *_frozen(paths)]
    # The journal has the time of each last read, so the schedule survives requeues.
    due = next_due(infos, read_history(paths).judged_at, now=now, every_s=every_s)
    if due.name is None or due.in_s > 0:
        return min(due.in_s, every_s), None
    # It sets damaged ones aside, which an attempt that lost the run must not do.
    require_attempt(paths, attempt)
    # Twice as fast as they have to be, so that all get their turn.
    bytes_per_s = max(_LEAST_BYTES_PER_S, 2 * sum(info.num_bytes for info in infos) / every_s)
    if due.name.startswith(_FROZEN):
        digest = due.name.removeprefix(_FROZEN)
        one = scrub_frozen(paths, digest, set_aside=True, bytes_per_s=bytes_per_s)
    else:
        path = paths.checkpoints / due.name
        one = scrub_one(path, set_aside=True, keys=keys, bytes_per_s=bytes_per_s)
    # Retention of the living run took it in between, which is no damage.
    if one.gone:
        return 0.0, None
    detail = "; ".join(str(problem) for problem in one.verdict.problems[:3])
    detail += f"; not set aside: {one.not_moved}" * bool(one.not_moved)
    detail += f"; moved to {one.set_aside}" * (one.verdict.has_strays and one.is_good)
    told = Scrubbed(one.is_good, due.name, one.verdict.num_bytes, detail)
    if one.is_good or one.set_aside:
        return 0.0, told
    # A checkpoint that cannot be read now stays due, and is not tried again at once. One whose owner or
    # signature is wrong is judged: otherwise it would keep all others from their turn.
    if not any(problem.kind == "unreadable" for problem in one.verdict.problems):
        told.judged = True
    return SETTLE_S, told


def _frozen(paths: RunPaths) -> list[CheckpointInfo]:
    """Returns the copies in RUN/frozen, to be queued after all checkpoints."""
    return [
        CheckpointInfo(kind="committed", name=_FROZEN + digest, path=paths.frozen / digest)
        for digest in frozen_digests(paths)
    ]
