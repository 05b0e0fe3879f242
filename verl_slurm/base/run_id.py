"""`RUN/run_id`: 16 hex digits that tell a run from others of its name, in shared tiers, alerts, ledger and journal."""

import re
import secrets
from contextlib import suppress

from verl_slurm.base.bounded import SMALL, TooMuch, read_regular
from verl_slurm.base.errors import TierError
from verl_slurm.base.files import create_file
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths

RUN_ID = re.compile(r"[0-9a-f]{16}")
# Bytes. A segment without a record has a head alone, which is shorter (`runtime_state.segment.HEAD_BYTES`).
_EMPTY_SEGMENT = 64


def run_id(paths: RunPaths) -> str:
    """Returns this run's id; the first call of a new run makes it.

    Raises:
        TierError: the file is no id, or is lost while the ledger has records, which bear it.
    """
    if not paths.run_id.exists():
        if any(path.stat().st_size > _EMPTY_SEGMENT for path in paths.ledger.glob("attempt_*.ledger")):
            raise TierError(
                "the run's id is lost, and its ledger holds records that bear it",
                where=paths.run_id,
                expected="16 hex digits",
                remedy=f"`verl-slurm submit {shell_word(paths.run)}` says which; or move {paths.ledger} out of the "
                "run, and its rollouts are sampled again",
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
