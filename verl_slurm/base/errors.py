"""Defines every error that users meet: the problem, the place, found against expected, and the next command.

The class tells who can fix it and the exit code. Messages are one line; text from outside is escaped.
"""

import errno
import os
import re
from collections.abc import Sequence
from typing import TypeVar

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import printable

# Their own errors are ValueErrors, as is the error for text that is not UTF-8. Nesting that is too deep is a
# RecursionError.
UNREADABLE = (ValueError, RecursionError)
"""Errors of msgspec and json for bytes that they cannot read."""


# Characters of each part of an error's line. Longer text was not written for people.
_MOST = 2000


def _shown(part: object) -> str:
    # An exception's lines, such as torch's list of missing names, are read as one.
    text = " ".join(str(part).split()) if isinstance(part, BaseException) else str(part)
    # Cut before it is escaped: a server's answer may have any length.
    return printable(text if len(text) <= _MOST else f"{text[:_MOST]}... ({len(text)} characters)")


class VerlSlurmError(Exception):
    """Base of all errors.

    Args:
        what: what was tried and did not work, a short clause.
        where: the path, key or host that the error concerns.
        remedy: the next command or action, always given to the user.
    """

    exit_code = ExitCode.INTERNAL
    others: tuple["VerlSlurmError", ...] = ()
    """Further errors that were found at the same time (`together`)."""
    not_looked_at: tuple[str, ...] = ()
    """What a check would have looked at, had this error not been, in plain words."""

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        found: object = None,
        expected: object = None,
        remedy: str | None = None,
    ) -> None:
        self.what, self.where, self.found = what, where, found
        self.expected, self.remedy = expected, remedy
        super().__init__(self.one_line())

    def one_line(self) -> str:
        """Returns e.g. `no such key: train.stepz (expected train.steps); fix it`, then further errors."""
        return " | ".join(self.lines())

    def lines(self) -> list[str]:
        """Returns one line for each error, and one for what was not looked at because of them."""
        unseen = "; ".join(map(_shown, self.not_looked_at))
        last = [f"not looked at yet, since it goes by what is wrong: {unseen}"] if unseen else []
        return [*(error._line() for error in (self, *self.others)), *last]

    def _line(self) -> str:
        # Each part is escaped by itself: text from outside cannot end its part and begin another.
        line = _shown(self.what)
        if self.where is not None:
            line += f": {_shown(self.where)}"
        facts = []
        if self.found is not None:
            facts.append(f"found {_shown(self.found)}")
        if self.expected is not None:
            facts.append(f"expected {_shown(self.expected)}")
        if facts:
            line += f" ({', '.join(facts)})"
        if self.remedy is not None:
            line += f"; {_shown(self.remedy)}"
        return line


E = TypeVar("E", bound=VerlSlurmError)


def together(errors: Sequence[E], not_looked_at: Sequence[str] = ()) -> E:
    """Returns the first error with all others in its message, each once; adds `not_looked_at` to what they name."""
    by_line: dict[str, VerlSlurmError] = {}
    for error in errors:
        found: list[VerlSlurmError] = [error, *error.others]
        for one in found:
            by_line.setdefault(one._line(), one)
    unseen = [name for error in errors for name in error.not_looked_at]
    first = errors[0]
    first.others = tuple(by_line.values())[1:]
    first.not_looked_at = tuple(dict.fromkeys([*unseen, *not_looked_at]))
    first.args = (first.one_line(),)
    return first


class ConfigError(VerlSlurmError):
    """The configuration is wrong. The user can fix it before anything is queued."""

    exit_code = ExitCode.CONFIG


class DataError(VerlSlurmError):
    """The data set, the model, the reward or the program is missing, empty, unreadable or wrong."""

    exit_code = ExitCode.DATA


class PermissionRefused(VerlSlurmError):
    """A path may not be read or written, or is open to other users."""

    exit_code = ExitCode.PERMISSION


class SlurmMissing(VerlSlurmError):
    """Slurm is not installed here, or its controller does not answer."""

    exit_code = ExitCode.NO_SLURM


class SlurmRefused(VerlSlurmError):
    """Slurm answered and refused."""

    exit_code = ExitCode.SLURM_REFUSED


class SchemaMismatch(VerlSlurmError):
    """A checkpoint has another state layout; `found` holds the differences."""

    exit_code = ExitCode.SCHEMA


class DatasetDrift(VerlSlurmError):
    """The data root no longer has the fingerprint the run started with."""

    exit_code = ExitCode.DATASET_DRIFT


class CheckpointCorrupt(VerlSlurmError):
    """A checkpoint, ledger segment or manifest does not verify."""

    exit_code = ExitCode.CORRUPT


class CheckpointsLost(CheckpointCorrupt):
    """A run that has had a checkpoint has none that can be used."""


class CheckpointsAbsent(CheckpointsLost):
    """The same, where RUN's own files answer and the directory of checkpoints is absent or empty: it may come back."""


class NoRoom(VerlSlurmError):
    """The file system of the run has no room for a single checkpoint."""

    exit_code = ExitCode.NO_ROOM


class NotFound(VerlSlurmError):
    """No such run, checkpoint or job."""

    exit_code = ExitCode.NOT_FOUND


class Fenced(VerlSlurmError):
    """A newer attempt owns the run; this one must not write."""

    exit_code = ExitCode.FENCED


class KeyRefused(VerlSlurmError):
    """An encryption key is missing, invalid or the wrong one, or data that a key should sign is unsigned."""

    exit_code = ExitCode.KEY


class WireError(VerlSlurmError):
    """The control channel got a frame that is not ours, too large, unauthenticated or out of order."""

    exit_code = ExitCode.WIRE


class OutputRefused(VerlSlurmError):
    """Standard output does not accept what is printed."""

    exit_code = ExitCode.OUTPUT


class TierError(VerlSlurmError):
    """A storage tier did not answer, refused, or returned other bytes than it was given."""

    exit_code = ExitCode.TIER


class TierAway(TierError):
    """A tier that has what is needed does not answer: it may later."""

    # The exit code by which a child of the lead says so (EX_TEMPFAIL of sysexits.h).
    child_code = 75


class RolloutMismatch(VerlSlurmError):
    """The rollout engine's log probabilities differ from those of the policy that it should have sampled from."""

    exit_code = ExitCode.ROLLOUT


class Diverged(VerlSlurmError):
    """A gradient is not finite."""

    exit_code = ExitCode.DIVERGED


RECORD_LOST = "is gone from a RUN that"
"""Words of the refusal of a save, and of all later ones of its attempt: `base.fence.require_attempt`."""
WAYS_IN = "verl_slurm.run, VerlSlurmCallback or VerlSlurmCheckpoint (docs/start.md)"
"""What a guest's program calls to be saved, one of them, and the page with the lines that it takes."""
NOT_SET_UP = "the node could not be set up for its ranks"
"""Begins the error of a node on which a program, a command or a secret of the ranks does not answer."""
# Without ENOENT and EACCES: they stay until somebody acts, and a run that ends at once is noticed sooner than one that
# uses up its starts.
_STORAGE = frozenset(
    {errno.EIO, errno.ESTALE, errno.ENOLCK, errno.EREMOTEIO}
    | {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # others free room; a file system is remounted after a fault
    | {errno.ENXIO, errno.ENODEV, errno.ESHUTDOWN, errno.ENOTCONN, errno.EHOSTDOWN}
)
# Errors of a storage or a node that may be gone at the next start.
_TRANSIENT = _STORAGE | frozenset(
    {errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
)
_STORAGE_WORDS = re.compile(
    "|".join([rf"\[Errno {number}\]" for number in _STORAGE] + [os.strerror(number) for number in _STORAGE])
    + r"|\(SIGBUS\)"  # a page of a mapped file that could not be read
)


def restart_may_help(error: VerlSlurmError) -> bool:
    """Decides whether another start of the ranks may help after an error. Every training loop asks here.

    True: the ranks end as after a crash, of which a bounded number in a row is allowed. False: they send
    `RankRefused`, which ends the run.
    """
    # A defect (INTERNAL) may depend on timing. A lost connection (WIRE) belongs to an agent that the next start
    # replaces.
    return error.exit_code in (ExitCode.INTERNAL, ExitCode.WIRE) or is_transient_storage_error(error)


def underlying(error: VerlSlurmError) -> VerlSlurmError:
    """Returns this rank's own error if `error` (RanksFailed) tells all ranks that one of them failed; else `error`."""
    cause = error.__cause__
    # By the code, not the class: `RanksFailed` lies above this package.
    if error.exit_code is ExitCode.INTERNAL and isinstance(cause, VerlSlurmError):
        return cause
    return error


def names_storage_error(text: str) -> bool:
    """Returns whether the last words of a process, of any program, name an error of storage."""
    return _STORAGE_WORDS.search(text) is not None


def names_missing_file(text: str) -> bool:
    """Returns whether an error's words name a file or a folder that is not there, or may not be read."""
    return os.strerror(errno.ENOENT) in text or os.strerror(errno.EACCES) in text


def is_transient_storage_error(error: BaseException | None) -> bool:
    """Returns whether `error`, its cause or its context is such an OSError."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in _TRANSIENT:
            return True
        seen.add(id(error))  # `raise error from error` makes a cycle
        # As Python prints a chain: `from None` hides the context, and so it does not count here.
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
