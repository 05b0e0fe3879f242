"""Stores the models that do not train in `RUN/frozen`, and reads the copies back: at once, or beside the training."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.frozen import read_back_others, store_frozen
from verl_slurm.dataset.fingerprint.record import Fingerprint
from verl_slurm.loops.session import Session
from verl_slurm.trainer.measures import console

__all__ = ["read_back_models", "store_models"]

_STORED_AT_ONCE, _READ_AT_ONCE = 1 << 30, 16 << 20
"""Bytes of copies that a start waits for: until they are made, and until they are read back."""
_FROZEN = threading.Lock()


def store_models(
    paths: RunPaths, models: dict[Path, Fingerprint], session: Session, memory: Path | None = None
) -> None:
    """Copies small models at once, and large ones while the training runs. A failure is reported, and the next start
    tries again.

    Args:
        models: fingerprints by directory, taken just before.
        memory: `RunPaths.models_read` of the attempt, which reads each copy back once; None: at each start.
    """

    def work() -> None:
        for model, seen in models.items():
            stored = memory and memory / f"{seen.digest}.stored"
            # A restart in place has no time for it.
            if stored and stored.exists() and (paths.frozen / seen.digest).is_dir():
                continue
            try:
                store_frozen(paths, model, seen, notice=partial(_notice, session))
                if stored:
                    stored.touch(mode=0o600)
            # A copy is a precaution. Storage that refuses it must not keep the run from training.
            except (OSError, VerlSlurmError) as error:
                _notice(session, f"no copy of {model} in {paths.frozen}: {error}")

    there = all((paths.frozen / seen.digest).is_dir() for seen in models.values())
    at_once = _READ_AT_ONCE if there else _STORED_AT_ONCE
    _beside(work, at_once=sum(seen.num_bytes for seen in models.values()) <= at_once)


def read_back_models(paths: RunPaths, used: set[str], session: Session) -> None:
    """Reads back the copies that this start does not use.

    Args:
        used: digests of the others.
    """
    size = sum(path.stat().st_size for path in paths.frozen.rglob("*") if path.is_file())

    def work() -> None:
        try:
            read_back_others(paths, used, notice=partial(_notice, session))
        except OSError as error:
            _notice(session, f"{paths.frozen} could not be read back: {error}")

    _beside(work, at_once=size <= _READ_AT_ONCE)


def _notice(session: Session, text: str) -> None:
    session.notice(text, topic="frozen", loud=True)
    console.complain(text)


def _beside(work: Callable[[], None], *, at_once: bool) -> None:
    """Runs `work` now or in a thread. Never two at a time: each cleans up RUN/frozen."""

    def alone() -> None:
        with _FROZEN:
            work()

    if at_once:
        alone()
    else:
        # A daemon thread: the end of a run does not wait for a copy, and the next start makes it.
        threading.Thread(target=alone, name="frozen", daemon=True).start()
