"""The fencing token: decides which attempt of a run may write.

A requeued job can start while ranks of its former attempt still write (seen with a slurmd that lost its controller).
No lease stops a paused writer, so the token is checked where writes become visible. Every manifest carries its
attempt, and a rank reads the current owner once more just before the rename that commits.

An attempt wins number N by making the name `control/attempt_N.claim` with link(2); the file already holds all facts
about the winner. So a number has one winner on POSIX and on NFS, permanently, and a claim is never empty.
`RUN/attempt` is a copy of the newest claim; the owner is the claim with the greatest number, whenever the copy is
written. No clock and no age decide anything here.
"""

import errno
import os
import re
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from verl_slurm.base.bounded import SMALL, decode_json, read_regular
from verl_slurm.base.errors import RECORD_LOST, UNREADABLE, CheckpointCorrupt, Fenced
from verl_slurm.base.files import create_file, private_dir, write_file
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.processes import birth_of

# Nine digits: ledger segments have the attempt in their names, and in 32 bits of their heads.
_Number = Annotated[int, msgspec.Meta(ge=0, le=999_999_999)]
_CLAIM = re.compile(r"attempt_(\d{6,9})\.claim", re.ASCII)
_TEMP = re.compile(r"\.?attempt_(\d{6,18})\.")


class RunOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `RUN/attempt` (JSON)."""

    attempt: _Number
    cluster: str
    """`slurm` or `local`: the system that `job_id` belongs to."""
    job_id: str
    restart: _Number
    host: str
    pid: _Number
    taken: str
    slurm: str = ""
    """Name of the Slurm cluster: `job_id` means nothing on another one. Empty: not known."""
    born: str = ""
    """`processes.birth_of(pid)`: tells this process from a later one of the same number."""


def read_owner(paths: RunPaths) -> RunOwner | None:
    """Returns the present owner, or None if the run never started. CheckpointCorrupt: neither the copy nor a claim can
    be read.
    """
    # The copy is a place to start from and no more: a winner that slept may have written an older number over a newer
    # one. The claims above it decide.
    owner, unreadable = None, None
    try:
        owner = read_copy(paths)
    except CheckpointCorrupt as error:  # as if it were missing: the next winner writes it again
        unreadable = error
    with suppress(FileNotFoundError):
        # A purge takes files by age: without the copy older claims may be gone, too.
        for claim in sorted(paths.control.glob("attempt_*.claim")) if owner is None else ():
            if named := _CLAIM.fullmatch(claim.name):
                owner = _read_claim(paths, int(named[1])) or owner
    number = 1 if owner is None else owner.attempt + 1
    with suppress(FileNotFoundError):
        while True:  # once, nearly always: the copy is written right after the claim
            owner = _read_claim(paths, number) or owner
            number += 1
    if owner is None and unreadable is not None:
        raise unreadable
    return owner


def require_attempt(paths: RunPaths, attempt: int) -> None:
    """Checks the owner; a rank calls it before it makes anything of its own visible.

    Raises:
        Fenced: `attempt` is closed: a newer attempt owns the run.
        FileNotFoundError: the record of the attempt is away, and maybe all of RUN.
    """
    owner = read_owner(paths)
    if owner is not None and owner.attempt > attempt:
        raise Fenced(
            "this attempt no longer owns the run; nothing was written",
            where=paths.root,
            found=f"attempt {owner.attempt} of job {owner.job_id}",
            expected=f"attempt {attempt}",
        )
    if owner is None or owner.attempt < attempt:
        what = f"the record of attempt {attempt} is away; is RUN's file system mounted, or was RUN moved?"
        if paths.run_yaml.exists():
            # A claim is never made twice: only another attempt can own this RUN.
            now = "none" if owner is None else f"attempt {owner.attempt}"
            what = (
                f"the record of attempt {attempt} {RECORD_LOST} has {now}, as a former copy of itself would: this "
                f"attempt cannot save any more; verl-slurm requeue {shell_word(paths.root)} starts one that can, "
                "from the newest checkpoint there"
            )
        # Nobody else owns the run for that: its file system may not be mounted.
        raise FileNotFoundError(errno.ENOENT, what, str(paths.control))


def take_attempt(
    paths: RunPaths,
    *,
    job_id: str,
    restart: int,
    cluster: str = "local",
    slurm: str = "",
    after: RunOwner | msgspec.UnsetType | None = msgspec.UNSET,
    above: int = 0,
) -> RunOwner:
    """Closes the present attempt and opens the next one, as its owner.

    Args:
        after: the owner that the caller has found to be over, to take the attempt from it alone. Unset: from the
            present owner.
        above: a number that was used, whatever became of its claim. To be read before `after` was: a faster rival's
            number must not let this call take the next one.

    Raises:
        Fenced: another attempt took it at the same moment.
    """
    # Claims lie where no other user can make names: who can make a claim owns the run.
    private_dir(paths.control, inside=paths.run)
    # Two leads may both have found the former one over. Both ask for the same number then, and link(2) lets one of them
    # have it; taking it from the present owner would let the slower one close the faster one's attempt.
    before = read_owner(paths) if isinstance(after, msgspec.UnsetType) else after
    mine = RunOwner(
        attempt=max(above, 0 if before is None else before.attempt) + 1,
        cluster=cluster,
        job_id=job_id,
        restart=restart,
        slurm=slurm,
        host=socket.gethostname(),
        pid=os.getpid(),
        taken=datetime.now(UTC).isoformat(timespec="milliseconds"),
        born=birth_of(os.getpid()),
    )
    # From here on the attempt is taken. All that follows serves people and readers, and a crash in it changes no owner.
    mine = _claim(paths, mine)
    write_file(paths.attempt, msgspec.json.encode(mine))
    _sweep(paths, mine.attempt)
    return mine


def _claim(paths: RunPaths, mine: RunOwner) -> RunOwner:
    """Wins the number of `mine`, or the next number that is not spoilt."""
    while True:
        # The claim names its owner from its first moment, so a start that dies after it leaves nothing that only time
        # could resolve.
        claim = _claim_path(paths, mine.attempt)
        if create_file(claim, msgspec.json.encode(mine)):
            return mine
        there = _read_claim(paths, mine.attempt)
        if there == mine:
            return mine  # NFS: the answer to our first try was lost
        if there is not None:
            raise Fenced(
                "another job took this run at the same moment",
                where=paths.root,
                found=f"attempt {there.attempt} of job {there.job_id}, process {there.pid} on {there.host}",
                remedy=f"verl-slurm status {shell_word(paths.root)}",
            )
        # An unreadable claim names no owner. The next number closes it, whoever it was, without asking how old it is.
        mine = msgspec.structs.replace(mine, attempt=mine.attempt + 1)


def _sweep(paths: RunPaths, won: int) -> None:
    """Removes temporary files of attempts that died during a claim."""
    for temp in paths.control.glob("*attempt_*.tmp"):
        number = _TEMP.match(temp.name)
        if number is not None and int(number[1]) <= won:
            # A live attempt that loses its temporary file here finds the number taken, and is fenced as any loser
            # (`create_file`).
            temp.unlink(missing_ok=True)


def read_copy(paths: RunPaths) -> RunOwner | None:
    """Returns the owner as `RUN/attempt` has it, maybe an older one; None: no file. May raise CheckpointCorrupt."""
    try:
        # Bounded and typed: the file may have been handed over or damaged.
        return decode_json(read_regular(paths.attempt, SMALL), RunOwner, SMALL, doubles=False)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise CheckpointCorrupt(
            "the number of the run's attempt cannot be read",
            where=paths.attempt,
            found=error,
            expected=f"the number, or a claim in {paths.control.name}/ that tells it",
            remedy=f"make sure that no job of the run lives, then `rm {shell_word(paths.attempt)}`: the next start "
            "takes a number above all that the run's files bear",
        ) from error


def _read_claim(paths: RunPaths, number: int) -> RunOwner | None:
    """Returns the winner of `number`; None: the number is spoilt. FileNotFoundError: it is not claimed."""
    try:
        claimed = decode_json(read_regular(_claim_path(paths, number), SMALL), RunOwner, SMALL, doubles=False)
    # Empty: it is read before it is written, on a file system without links. The next number is taken.
    except UNREADABLE:
        return None
    # A claim that was copied or renamed by hand counts for no other number.
    return claimed if claimed.attempt == number else None


def _claim_path(paths: RunPaths, number: int) -> Path:
    return paths.control / f"attempt_{number:06d}.claim"
