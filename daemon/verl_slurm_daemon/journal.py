"""The lead's side of the journal (`verl_slurm.journal`): writes `events.jsonl`, `status.json` and the log."""

import sys
from collections.abc import Callable

import msgspec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.fence import read_epoch
from verl_slurm.base.files import write_file
from verl_slurm.base.one_line import json_line
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.events import Event, kind_of
from verl_slurm.journal.files import append_event, now, to_json
from verl_slurm.journal.status import Status
from verl_slurm_daemon.log_line import log_line

__all__ = ["Journal"]

_NOT_SAID = ("event", "time", "attempt", "job_id")


class Journal:
    """The journal of one attempt, open for writing.

    Args:
        heard: is called with each event after it was stamped.
    """

    def __init__(
        self, paths: RunPaths, *, epoch: int, job_id: str, heard: Callable[[Event], None] | None = None
    ) -> None:
        self._paths, self._epoch, self._job_id = paths, epoch, job_id
        self._heard = heard

    def write(self, event: Event) -> None:
        """Writes one event durably and prints it to the log.

        A full or broken log must not stop a save, so standard output is best effort. If the journal cannot be
        written, the lead prints the error on standard output and goes on.
        """
        event = msgspec.structs.replace(event, time=now(), attempt=self._epoch, job_id=self._job_id)
        try:
            append_event(self._paths, event)
        except OSError as error:
            self._say("no_journal", {"where": str(self._paths.events), "error": str(error)}, loud=True)
        if self._heard is not None:
            self._heard(event)
        fields = {key: value for key, value in to_json(event).items() if key not in _NOT_SAID}
        self._say(kind_of(event), fields, loud=event.loud)

    def _say(self, event: str, fields: dict[str, object], *, loud: bool) -> None:
        try:
            sys.stdout.write(log_line(str(self._epoch), event, fields, loud=loud))
            sys.stdout.flush()
        except (OSError, ValueError):
            return

    def status(self, status: Status) -> None:
        """Replaces the snapshot, unless a newer attempt already writes it.

        Best effort: nothing depends on the snapshot. It is not forced to disk: that would cost the training
        more than everything else a lead does.
        """
        status.updated = now()
        try:
            owner = read_epoch(self._paths)
            if owner is None or owner.epoch <= self._epoch:
                write_file(self._paths.status, json_line(status), durable=False)
        except (OSError, VerlSlurmError):
            return
