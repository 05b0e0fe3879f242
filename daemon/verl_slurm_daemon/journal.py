"""The daemon's side of the journal (`verl_slurm.journal`): writes `events.jsonl`, `status.json` and the log.

`log_line` formats one line of the lead's and the agents' logs: time, writer, event, facts.
"""

import errno
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.fence import read_owner
from verl_slurm.base.files import write_file
from verl_slurm.base.one_line import json_line
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import is_run
from verl_slurm.journal.events import AttemptFenced, Event, Warned, kind_of
from verl_slurm.journal.files import append_event, now, to_json
from verl_slurm.journal.status import Status

T = TypeVar("T")

# For one write. KillWait is 30 s, and the requeue is still to be asked for.
_PATIENCE_S = 3.0
_NOT_SAID = ("event", "time", "attempt", "job_id")


class Journal:
    """The journal of one attempt, open for writing. `heard` is called with each event after it was stamped."""

    def __init__(
        self, paths: RunPaths, *, attempt: int, job_id: str, heard: Callable[[Event], None] | None = None
    ) -> None:
        self.paths, self.attempt, self._job_id = paths, attempt, job_id
        self._heard = heard
        self._size = 0
        # Storage that does not answer must hold up neither a signal nor the requeue. One thread keeps the order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._last: Future[Any] | None = None
        with suppress(RuntimeError):  # started now: at the end of a job there may be no thread left
            self._last = self._thread.submit(lambda: None)

    def write(self, event: Event) -> None:
        """Writes one event durably and prints it to the log.

        What storage refuses is printed; where it does not answer, the event is written once it does. Neither
        raises.
        """
        event = msgspec.structs.replace(event, time=now(), attempt=self.attempt, job_id=self._job_id)

        # The journal is the newer attempt's. What its former owner still has to say is in its own log.
        def append() -> bool:
            if not isinstance(event, AttemptFenced) and self.attempt and self._is_closed():
                return False
            self._compare_size()
            append_event(self.paths, event)
            self._size = self.paths.events.stat().st_size
            return True

        if self.store(append) is not False and self._heard is not None:
            self._heard(event)
        fields = {key: value for key, value in to_json(event).items() if key not in _NOT_SAID}
        self._say(kind_of(event), fields, loud=event.loud)

    def _compare_size(self) -> None:
        """Writes a warning first if the file is shorter than this attempt has left it."""
        size = self.paths.events.stat().st_size if self.paths.events.exists() else 0
        if size < self._size:
            text = (
                f"{self.paths.events} was cut or replaced while attempt {self.attempt} ran: it had {self._size} bytes, "
                f"and now {size}. What is gone of starts, saves and costs no longer counts, unless the file is put "
                "back from a backup while no job of the run lives"
            )
            lost = Warned("journal", text, attempt=self.attempt, job_id=self._job_id)
            append_event(self.paths, lost)
            self._say(kind_of(lost), {"topic": lost.topic, "text": text}, loud=True)

    def store(self, work: Callable[[], T]) -> T | None:
        """Does `work` on the run's storage; returns None if that fails, which is printed, or is still to be done."""
        try:
            if self._last is None:  # no thread can be started here
                return work()
            is_silent = not self._last.done()
            future = self._thread.submit(work)
            self._last = future
            if is_silent:  # said before
                return None
            wait([future], timeout=_PATIENCE_S)
            if not future.done():
                raise TimeoutError(f"no answer in {_PATIENCE_S:.0f} s; written once there is one")
            return future.result()
        except OSError as error:
            self._say("no_journal", {"where": str(self.paths.events), "error": str(error)}, loud=True)
            return None

    def _say(self, event: str, fields: dict[str, object], *, loud: bool) -> None:
        try:
            sys.stdout.write(log_line(str(self.attempt), event, fields, loud=loud))
            sys.stdout.flush()
        except (OSError, ValueError):
            return

    def status(self, status: Status) -> None:
        """Replaces the snapshot, unless a newer attempt already writes it. Best effort: nothing depends on it."""
        status.updated = now()
        line = json_line(status)

        def replace() -> None:
            # A lead that has lost the run may not know it yet; a newer one's snapshot must stay.
            if not self._is_closed(if_unknown=True):
                # Not forced to disk: that would cost the training more than everything else a lead does.
                with suppress(OSError):
                    write_file(self.paths.status, line, durable=False)

        if self._last is None or self._last.done():  # the next one says more
            self.store(replace)

    def _is_closed(self, *, if_unknown: bool = False) -> bool:
        """Returns whether a newer attempt owns the run. Raises FileNotFoundError: RUN is away."""
        try:
            owner = read_owner(self.paths)
        except (OSError, VerlSlurmError):
            return if_unknown
        if owner is None and not is_run(self.paths.root):
            # A line would make a run of its own there.
            raise FileNotFoundError(
                errno.ENOENT, "RUN is away, or no file of the run is in it", str(self.paths.root)
            )
        return owner is not None and owner.attempt > self.attempt


_MAX_VALUE = 300
"""Maximum characters of one fact; the journal or the ranks' own log has the rest."""


def log_line(who: str, event: str, fields: Mapping[str, Any], *, loud: bool = False) -> str:
    """Formats `TIME +MONOTONIC verl-slurm[WHO] EVENT key=value ...`, always one line. WHO is the attempt, and
    an agent's node.

    MONOTONIC is CLOCK_MONOTONIC of this machine in seconds. Nodes disagree about dates, and dates are set
    while a run goes on. It still gives durations, and the order of events on one node.
    """
    told = " ".join(f"{key}={_short(value)}" for key, value in fields.items() if value is not None)
    when = f"{now()} +{time.monotonic():.3f}"
    line = f"{when} verl-slurm[{who}] {'!! ' if loud else ''}{event:<10} {told}".rstrip()
    return _plain(line) + "\n"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    text = _plain(text)[:_MAX_VALUE]
    # Quotes are escaped: what follows an unescaped one would read as a fact of ours.
    quote = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{quote}"' if " " in text else text


def _plain(text: str) -> str:
    """Replaces line breaks, so that no host name or error message starts a second line."""
    return "".join(c if c.isprintable() else " " for c in text)
