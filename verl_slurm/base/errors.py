"""Every error a user can meet: what, where, found against expected, and the next command.

The class says whose fault it is and which exit code the program ends with. Messages are one line;
text that came from outside is escaped, so a hostile file name cannot forge a second one.
"""

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import printable

__all__ = [
    "UNREADABLE",
    "CheckpointCorrupt",
    "ConfigError",
    "DataError",
    "DatasetDrift",
    "Diverged",
    "Fenced",
    "KeyRefused",
    "NoRoom",
    "NotFound",
    "OutputRefused",
    "PermissionRefused",
    "RolloutMismatch",
    "SchemaMismatch",
    "SlurmMissing",
    "SlurmRefused",
    "TierError",
    "VerlSlurmError",
    "WireError",
]


UNREADABLE = (ValueError, RecursionError)
"""What msgspec and json raise for bytes that they cannot read.

Their own errors are ValueErrors, and so is text that is not UTF-8; nesting that is too deep is a RecursionError.
"""


_MOST = 2000
"""Characters of each part of an error's line: who put more there did not do it for people."""


def _shown(part: object) -> str:
    text = str(part)
    return printable(text if len(text) <= _MOST else f"{text[:_MOST]}... ({len(text)} characters)")


class VerlSlurmError(Exception):
    """Base of all of them.

    Args:
        what: what was tried and did not work, a short clause.
        where: the path, key or host it is about.
        found: what was there.
        expected: what should have been there.
        remedy: the next command or action, always given to the user.
    """

    exit_code = ExitCode.INTERNAL

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
        """The whole error as one line, e.g. `no such key: train.stepz (expected train.steps); fix it`."""
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


class ConfigError(VerlSlurmError):
    """The configuration is wrong. The user's to mend, before anything is queued."""

    exit_code = ExitCode.CONFIG


class DataError(VerlSlurmError):
    """The data set or the model is missing, empty or unreadable."""

    exit_code = ExitCode.DATA


class PermissionRefused(VerlSlurmError):
    """A path may not be read or written, or is open to other users."""

    exit_code = ExitCode.PERMISSION


class SlurmMissing(VerlSlurmError):
    """There is no Slurm here, or its controller does not answer."""

    exit_code = ExitCode.NO_SLURM


class SlurmRefused(VerlSlurmError):
    """Slurm answered, and the answer was no."""

    exit_code = ExitCode.SLURM_REFUSED


class SchemaMismatch(VerlSlurmError):
    """A checkpoint of another state layout; the differences are in `found`."""

    exit_code = ExitCode.SCHEMA


class DatasetDrift(VerlSlurmError):
    """The data root no longer has the fingerprint the run started with."""

    exit_code = ExitCode.DATASET_DRIFT


class CheckpointCorrupt(VerlSlurmError):
    """A checkpoint, ledger segment or manifest that does not verify."""

    exit_code = ExitCode.CORRUPT


class NoRoom(VerlSlurmError):
    """The file system of the run cannot take a single checkpoint: it could train, and never save."""

    exit_code = ExitCode.NO_ROOM


class NotFound(VerlSlurmError):
    """No such run, checkpoint or job."""

    exit_code = ExitCode.NOT_FOUND


class Fenced(VerlSlurmError):
    """A newer attempt owns the run; this one must not write."""

    exit_code = ExitCode.FENCED


class KeyRefused(VerlSlurmError):
    """An encryption key is missing, no key, or not the one; or what a key should vouch for is unsigned."""

    exit_code = ExitCode.KEY


class WireError(VerlSlurmError):
    """The control channel: a frame that is not ours, too large, unauthenticated or out of order."""

    exit_code = ExitCode.WIRE


class OutputRefused(VerlSlurmError):
    """Standard output does not take what is printed."""

    exit_code = ExitCode.OUTPUT


class TierError(VerlSlurmError):
    """A storage tier did not answer, refused, or gave back other bytes than it was given."""

    exit_code = ExitCode.TIER


class RolloutMismatch(VerlSlurmError):
    """The rollout engine's log probabilities are not those of the policy it should have sampled from."""

    exit_code = ExitCode.ROLLOUT


class Diverged(VerlSlurmError):
    """A gradient is not finite: to go on would spoil the weights, and to start again would come here again."""

    exit_code = ExitCode.DIVERGED
