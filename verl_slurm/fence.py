"""The fencing token: which incarnation of a run may write.

A requeued job can start while ranks of its former life still write (seen: a slurmd that lost its controller).
No lease stops a paused writer, so the token is checked where it counts: every manifest carries its epoch, and a
rank reads `RUN/epoch` once more just before the rename that commits. An epoch is won by creating its claim file
(O_EXCL: one winner on POSIX and on NFSv3 and later), and only then written to `RUN/epoch`.
"""

import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from verl_slurm.errors import UNREADABLE, CheckpointCorrupt, Fenced
from verl_slurm.files import private_dir, write_file
from verl_slurm.paths import RunPaths

__all__ = ["Epoch", "read_epoch", "require_epoch", "take_epoch"]


_Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Epoch(msgspec.Struct, frozen=True, kw_only=True):
    """Who owns a run: the content of `RUN/epoch` (JSON)."""

    epoch: _Number
    cluster: str
    """`slurm` or `local`: what `job_id` is a number of."""
    job_id: str
    restart: _Number
    host: str
    pid: _Number
    taken: str


def read_epoch(paths: RunPaths) -> Epoch | None:
    """The present owner, or None where the run never started.

    Raises:
        CheckpointCorrupt: the file is not what `take_epoch` writes.
    """
    try:
        return msgspec.json.decode(paths.epoch.read_bytes(), type=Epoch)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise CheckpointCorrupt(
            "the epoch of the run cannot be read",
            where=paths.epoch,
            found=error,
            remedy=f"make sure that no job of the run lives, then remove the file ({paths.control} has the claims)",
        ) from error


def require_epoch(paths: RunPaths, epoch: int) -> None:
    """Called by every rank that is about to make something of its own visible.

    Raises:
        Fenced: `epoch` is closed: a newer incarnation owns the run.
    """
    owner = read_epoch(paths)
    if owner is None or owner.epoch != epoch:
        raise Fenced(
            "this incarnation no longer owns the run; nothing was written",
            where=paths.root,
            found="no epoch" if owner is None else f"epoch {owner.epoch} of job {owner.job_id}",
            expected=f"epoch {epoch}",
        )


def take_epoch(paths: RunPaths, *, job_id: str, restart: int, cluster: str = "local") -> Epoch:
    """Close the present epoch and open the next one, as its only owner.

    Raises:
        Fenced: another incarnation took it in the same moment.
    """
    private_dir(paths.control)
    before = read_epoch(paths)
    number = _claim(paths, 1 if before is None else before.epoch + 1)
    mine = Epoch(
        epoch=number,
        cluster=cluster,
        job_id=job_id,
        restart=restart,
        host=socket.gethostname(),
        pid=os.getpid(),
        taken=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )
    write_file(paths.epoch, msgspec.json.encode(mine))
    return mine


def _claim(paths: RunPaths, number: int) -> int:
    """The first number from `number` on that we are the one to create the claim file of."""
    while True:
        claim = paths.control / f"epoch_{number:06d}.claim"
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            return number
        except FileExistsError:
            if not _abandoned(paths, claim):
                raise Fenced(
                    "another job took this run at the same moment",
                    where=paths.root,
                    found=f"a claim for epoch {number}",
                    remedy=f"verl-slurm status {paths.root}",
                ) from None
        number += 1


_CLAIM_PATIENCE_S = 30.0
"""From claim to `RUN/epoch` are two system calls; who needs longer was killed in between."""


def _abandoned(paths: RunPaths, claim: Path) -> bool:
    """Whether the claimant died between claiming and writing. Ages are measured by the file server's clock."""
    probe = paths.control / f".probe.{os.getpid()}"
    try:
        probe.touch()
        age = probe.stat().st_mtime - claim.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
    return age > _CLAIM_PATIENCE_S
