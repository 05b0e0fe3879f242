"""Stores copies of the models that do not train, and reads them back, beside the training: rank 0's work."""

import threading
from collections.abc import Callable
from pathlib import Path

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.frozen import read_back_others, store_frozen
from verl_slurm.dataset.fingerprint.data_record import Fingerprint
from verl_slurm.loops.session import Session
from verl_slurm.trainer.measures import console

_STORED_AT_ONCE, _READ_AT_ONCE = 1 << 30, 16 << 20
"""Bytes of copies that a start waits for: until they are made, and until they are read back."""


class FrozenCopies:
    """Those of one run. A failure is reported, and the next start tries again.

    What a start does not wait for begins with `begin`: until then the disk and the cores are the start's.
    """

    def __init__(self, paths: RunPaths, session: Session) -> None:
        self._paths, self._session = paths, session
        # One at a time: each cleans up RUN/frozen.
        self._alone = threading.Lock()
        self._begun, self._waiting = False, list[Callable[[], None]]()

    def store(self, models: dict[Path, Fingerprint]) -> None:
        """Copies small models at once, and large ones while the training runs."""

        def work() -> None:
            for model, seen in models.items():
                try:
                    store_frozen(self._paths, model, seen, notice=self._notice)
                # A copy is a precaution. Storage that refuses it must not keep the run from training.
                except (OSError, VerlSlurmError) as error:
                    self._notice(f"no copy of {model} in {self._paths.frozen}: {error}")

        there = all((self._paths.frozen / seen.digest).is_dir() for seen in models.values())
        at_once = _READ_AT_ONCE if there else _STORED_AT_ONCE
        self._do(work, at_once=sum(seen.num_bytes for seen in models.values()) <= at_once)

    def read_back(self, used: set[str]) -> None:
        """Reads back the copies that this start does not use; `used` holds the digests of the others."""
        size = sum(path.stat().st_size for path in self._paths.frozen.rglob("*") if path.is_file())

        def work() -> None:
            try:
                read_back_others(self._paths, used, notice=self._notice)
            except OSError as error:
                self._notice(f"{self._paths.frozen} could not be read back: {error}")

        self._do(work, at_once=size <= _READ_AT_ONCE)

    def begin(self) -> None:
        """Starts what has waited. Call it when the training begins."""
        self._begun = True
        for work in self._waiting:
            self._start(work)
        self._waiting.clear()

    def _do(self, work: Callable[[], None], *, at_once: bool) -> None:
        if at_once:
            with self._alone:
                work()
        elif self._begun:
            self._start(work)
        else:
            self._waiting.append(work)

    def _start(self, work: Callable[[], None]) -> None:
        def alone() -> None:
            with self._alone:
                work()

        # A daemon thread: the end of a run does not wait for a copy, and the next start makes it.
        threading.Thread(target=alone, name="frozen", daemon=True).start()

    def _notice(self, text: str) -> None:
        self._session.notice(text, topic="frozen", loud=True)
        console.complain(text)
