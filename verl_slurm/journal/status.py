"""`RUN/status.json`: where a run stands, replaced by its lead about once a second. This module specifies it."""

from types import UnionType
from typing import Any, get_origin

import msgspec

from verl_slurm.base.bounded import SMALL, decode_json, read_regular
from verl_slurm.base.errors import UNREADABLE
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import known_run_id


class Status(msgspec.Struct, kw_only=True):
    """The snapshot. Steps count from 0: `step` are done."""

    state: str = "starting"
    """`verl_slurm_daemon.decide.lead_model.State`."""
    run: str = ""
    """The run's id (`RUN/run_id`). A snapshot with another one is not believed."""
    job_id: str = ""
    attempt: int = 0
    restart: int = 0
    """Of the attempt."""
    requeues: int = 0
    """By Slurm."""
    step: int = 0
    steps: int = 0
    phase: str = ""
    index: int = 0
    metrics: dict[str, float] = {}
    stragglers: list[str] = []
    """Ranks that work longer than the others between two safe points: `rank 3 on node2`."""
    train_nodes: list[str] = []
    """Nodes of the ranks, in their order; empty until the agents of a restart have met."""
    spare_nodes: list[str] = []
    """Nodes that the job holds, and that wait for the loss of another."""
    last_checkpoint: str = ""
    """Verified."""
    last_checkpoint_time: str = ""
    save_problem: str = ""
    """Why the newest save has failed; empty: it has not."""
    cause: str = ""
    cluster: str = ""
    host: str = ""
    slurm: str = ""
    """The Slurm cluster's name: two clusters may use the same job number."""
    interruptions: int = 0
    """So far (`journal.history`). The sum is here, so that a list of a thousand runs reads no journal whole."""
    interrupted_s: float = 0.0
    last_interruption: dict[str, Any] = {}
    services: dict[str, str] = {}
    """What is known of each service on each of its nodes, `judge on node3`: `ready, 10.0.0.3:8000`."""
    updated: str = ""


_TYPES: dict[str, type | UnionType] = {
    field.name: get_origin(field.type) or field.type for field in msgspec.structs.fields(Status)
}


def read_status(paths: RunPaths, unread: list[str] | None = None) -> dict[str, Any]:
    """The snapshot's fields that are of their type, or none where no daemon ever ran. It is replaced
    atomically, so it is always whole. What a daemon of another version did not write is left out.

    `unread` gets a sentence if the snapshot is another run's, which counts as none.

    Raises TooMuch: something else than a file of some KB has its name.
    """
    try:
        data = read_regular(paths.status, SMALL)
    except FileNotFoundError:
        return {}
    try:
        status = decode_json(data, dict[str, Any], SMALL, doubles=False)
    except UNREADABLE:
        return {}
    named = status.get("run", "")
    if named and (own := known_run_id(paths)) and named != own:
        if unread is not None:
            unread.append(f"status.json is of another run ({str(named)[:40]}), and was passed over")
        return {}
    # Each value is held to its type: `list` shows thousands of runs, and one damaged file must not end it.
    return {key: value for key, value in status.items() if isinstance(value, _TYPES.get(key, object))}
