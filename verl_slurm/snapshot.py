"""`RUN/status.json`, read: the lead's latest snapshot of a run. Who writes it: `verl_slurm_daemon.journal`."""

from typing import Any

from verl_slurm.bounded import SMALL, decode_json, read_regular
from verl_slurm.errors import UNREADABLE
from verl_slurm.paths import RunPaths

__all__ = ["read_status"]

_STATUS: dict[str, type] = {
    **dict.fromkeys(("epoch", "generation", "restarts", "step", "steps", "index", "interruptions"), int),
    **dict.fromkeys(
        (
            "state",
            "job_id",
            "cluster",
            "host",
            "phase",
            "last_checkpoint",
            "last_checkpoint_time",
            "cause",
            "updated",
        ),
        str,
    ),
    "metrics": dict,
    "interrupted_s": float,
    "last_interruption": dict,
}


def read_status(paths: RunPaths) -> dict[str, Any]:
    """The daemon's snapshot, or an empty one where no daemon ever ran. Replaced atomically, so always whole.

    It informs, nothing depends on it: a value that is not of its type is left out.

    Called by: cli, submit, the lead of the next incarnation.
    """
    try:
        status = decode_json(read_regular(paths.status, SMALL), dict[str, Any], SMALL, doubles=False)
    except (FileNotFoundError, *UNREADABLE):
        return {}
    return {key: value for key, value in status.items() if isinstance(value, _STATUS.get(key, object))}
