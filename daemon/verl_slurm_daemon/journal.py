"""What happened to a run, for people and for programs: `events.jsonl`, `status.json` and the log.

The journal (`verl_slurm.events`) is also the daemon's memory over restarts: how often a run started without getting
anywhere is counted in it.
"""

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from verl_slurm.errors import VerlSlurmError
from verl_slurm.events import Event, append_event
from verl_slurm.fence import read_epoch
from verl_slurm.files import write_file
from verl_slurm.one_line import json_line
from verl_slurm.paths import RunPaths
from verl_slurm_daemon.log_line import log_line, now

__all__ = ["Journal", "Status", "stranger_starts", "stuck_starts"]

_LOUD = frozenset(
    {"crash", "hang", "corrupt", "degraded", "one_copy", "save_failed", "refused", "held", "warning"}
)


class Status(msgspec.Struct, kw_only=True):
    """The snapshot behind `verl-slurm status`. Steps count from 0: `step` are done."""

    state: str = "starting"
    job_id: str = ""
    epoch: int = 0
    generation: int = 0
    restarts: int = 0
    step: int = 0
    steps: int = 0
    phase: str = ""
    index: int = 0
    metrics: dict[str, float] = {}
    last_checkpoint: str = ""
    last_checkpoint_time: str = ""
    cause: str = ""
    cluster: str = ""
    host: str = ""
    slurm: str = ""
    """The Slurm cluster's name: job numbers of two clusters are alike."""
    interruptions: int = 0
    """So far (`verl_slurm.outages`): the sum is here, so that who lists a thousand runs reads no journal whole."""
    interrupted_s: float = 0.0
    last_interruption: dict[str, Any] = {}
    updated: str = ""


class Journal:
    """One lead's pen. Called by: `lead`, `effects`.

    Args:
        heard: is told each event, too.
    """

    def __init__(
        self,
        paths: RunPaths,
        *,
        epoch: int,
        job_id: str,
        heard: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        self._paths, self._epoch, self._job_id = paths, epoch, job_id
        self._heard = heard

    def event(self, event: str, **fields: Any) -> None:
        """Write one event down, durably, and say it in the log.

        A full or broken log must not stop a save: standard output is best effort, the journal is not, and
        where the journal cannot be written the error is said on standard output and the lead goes on.
        """
        try:
            append_event(self._paths, event, epoch=self._epoch, job_id=self._job_id, **fields)
        except OSError as error:
            self._say("no_journal", {"where": str(self._paths.events), "error": str(error)}, loud=True)
        if self._heard is not None:
            self._heard(event, {"job_id": self._job_id, **fields})
        self._say(event, fields, loud=event in _LOUD)

    def _say(self, event: str, fields: dict[str, Any], *, loud: bool) -> None:
        try:
            sys.stdout.write(log_line(str(self._epoch), event, fields, loud=loud))
            sys.stdout.flush()
        except (OSError, ValueError):
            return

    def status(self, status: Status) -> None:
        """Replace the snapshot, unless a newer incarnation writes it by now.

        Best effort: it informs, nothing depends on it. So it is not forced to disk, which would cost the training more
        than all else that a lead does.
        """
        status.updated = now()
        try:
            owner = read_epoch(self._paths)
            if owner is None or owner.epoch <= self._epoch:
                write_file(self._paths.status, json_line(status), durable=False)
        except (OSError, VerlSlurmError):
            return


def stuck_starts(events: list[Event]) -> int:
    """How many generations in a row, up to now, came to nothing: nothing new to show, and ended by a fault.

    A generation's `progress` is what it started from (newest verified checkpoint, rollouts in the ledger); one was
    fruitless where a later one starts at the same place. Faults are crashes, a lead that was killed (`orphaned`), and a
    time limit that came before the ranks trained. A preempted or requeued generation is no fault, and a start that
    storage stopped is counted by `start.failed_starts`, and one that met a stranger by `stranger_starts`. What people
    submit again is counted afresh.
    """
    return _fruitless(events)[0]


def stranger_starts(events: list[Event]) -> int:
    """The same of starts that met a stranger among the ranks."""
    return _fruitless(events)[1]


def _fruitless(events: list[Event]) -> tuple[int, int]:
    stuck, strangers, last, trained = 0, 0, None, False
    for event in events:
        match event["event"]:
            case "submitted":
                stuck, strangers, last = 0, 0, None
            case "generation":
                if event.get("progress") != last:
                    stuck, strangers, last = 0, 0, event.get("progress")
                trained = False
            case "training":
                trained = True
            case "crash" if event.get("kind") == "stranger":
                strangers += 1
            case "crash" | "orphaned":
                stuck += 1
            case "cause" if event.get("cause") == "time_limit" and not trained:
                stuck += 1
    return stuck, strangers
