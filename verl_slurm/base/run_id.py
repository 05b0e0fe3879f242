"""`RUN/run_id`: 16 hex digits that tell a run from others of its name; tiers, alerts and all that it writes bear it."""

import re
import secrets
from contextlib import suppress

from verl_slurm.base.bounded import SMALL, TooMuch, read_regular
from verl_slurm.base.errors import TierError
from verl_slurm.base.files import create_file, write_file
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths

RUN_ID = re.compile(r"[0-9a-f]{16}")
# Bytes. A segment without a record has a head alone, which is shorter (`runtime_state.segment.HEAD_BYTES`).
_EMPTY_SEGMENT = 64


def run_id(paths: RunPaths) -> str:
    """Returns this run's id; the first call of a new run makes it.

    Raises:
        TierError: the file is no id, or is lost while the run has rollouts or checkpoints, which bear it.
    """
    if not paths.run_id.exists():
        records = any(path.stat().st_size > _EMPTY_SEGMENT for path in paths.ledger.glob("attempt_*.ledger"))
        # With another id they would all count as another run's.
        if records or any(RunPaths(paths.run).checkpoints.glob("step_*")):
            raise TierError(
                f"the run's id is lost, and its {'rollouts' if records else 'checkpoints'} bear it",
                where=paths.run_id,
                expected="16 hex digits",
                remedy=f"`verl-slurm submit {shell_word(paths.run)}` says which",
            )
        create_file(paths.run_id, secrets.token_hex(8).encode() + b"\n")
    try:
        text = read_regular(paths.run_id, SMALL).decode("ascii", errors="replace").strip()
    except TooMuch as error:
        text = str(error)
    if not RUN_ID.fullmatch(text):
        raise TierError(
            "not a run's id",
            where=paths.run_id,
            found=text[:40],
            expected="16 hex digits",
            remedy="it is the end of PREFIX/NAME-ID in every tier of this run; write it there again. Without tiers, "
            f"remove the file, and `verl-slurm submit {shell_word(paths.run)}` says whether the ledger has it",
        )
    return text


def known_run_id(paths: RunPaths) -> str:
    """Returns this run's id, and makes none; empty: it has none, or it cannot be read."""
    with suppress(OSError, TierError):
        if paths.run_id.exists():
            return run_id(paths)
    return ""


def other_run(paths: RunPaths, run: str, digest: str) -> str:
    """Returns why a checkpoint is not of this run; empty: it is, or was adopted, or the run's own id is not known.

    Args:
        run, digest: in its manifest.
    """
    # A start refuses without an id of its own (`checkpoint.store.lost`); to look at the run needs none.
    own = known_run_id(paths)
    if own in ("", run) or is_adopted(paths, digest):
        return ""
    return f"of another run, {run} (this one is {own}); checkpoint.resume_from=PATH_IN_THAT_RUN would go on from it"


def is_adopted(paths: RunPaths, digest: str) -> bool:
    """Returns whether `note_adopted` was told of this digest."""
    return digest in _adopted(paths)


def note_adopted(paths: RunPaths, digest: str) -> None:
    """Lets the checkpoint of another run whose manifest has this digest count as this run's own."""
    lines = [*_adopted(paths), digest]
    write_file(paths.adopted, "".join(f"{line}\n" for line in dict.fromkeys(lines)).encode())


def _adopted(paths: RunPaths) -> list[str]:
    try:
        return read_regular(paths.adopted, SMALL).decode("ascii", errors="replace").split()
    except (FileNotFoundError, TooMuch):
        return []
