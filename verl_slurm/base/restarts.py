"""Decides whether another start of the ranks may help after an error. Every training loop asks here.

The answer has a cost: a `Refused` ends the run, while a crash uses up one of a bounded number of starts in a row.
"""

import errno

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode

__all__ = ["is_transient_storage_error", "restart_may_help", "underlying"]

_TRANSIENT = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ENOLCK}
    | {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # others free room; a file system is remounted after a fault
    | {errno.ENXIO, errno.ENODEV, errno.ESHUTDOWN, errno.ENOTCONN, errno.EHOSTDOWN}
    | {errno.ENOMEM, errno.EMFILE, errno.ENFILE}
)
"""Errors of a storage or a node that may be gone at the next start. ENOENT and EACCES are not among them: they stay
until somebody acts, and a run that ends at once is noticed sooner than one that uses up its starts."""


def restart_may_help(error: VerlSlurmError) -> bool:
    """Returns whether the ranks should end as after a crash; otherwise they send `Refused`.

    A defect (INTERNAL) may depend on timing. A lost connection (WIRE) belongs to an agent that the next start replaces.
    """
    return error.exit_code in (ExitCode.INTERNAL, ExitCode.WIRE) or is_transient_storage_error(error)


def underlying(error: VerlSlurmError) -> VerlSlurmError:
    """Returns this rank's own error if `error` (RanksFailed) tells all ranks that one of them failed; else `error`."""
    cause = error.__cause__
    if error.exit_code is ExitCode.INTERNAL and isinstance(cause, VerlSlurmError):
        return cause
    return error


def is_transient_storage_error(error: BaseException | None) -> bool:
    """Returns whether `error`, its cause or its context is such an OSError."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in _TRANSIENT:
            return True
        seen.add(id(error))  # `raise error from error` makes a cycle
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
