"""The common part of the callbacks of Hugging Face and Lightning: the session, the saver, and how a run ends.

Without a daemon (`Session.has_daemon`) a callback leaves the framework alone, and no saver is made.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn, Self, TypeVar

from verl_slurm.base.errors import ConfigError, VerlSlurmError
from verl_slurm.base.run_id import is_adopted
from verl_slurm.checkpoint.format.specification import guest_directory
from verl_slurm.checkpoint.store.loop_checkpoint import require_guest
from verl_slurm.loops.session import Session
from verl_slurm.loops.step_end import StepEndSaver, own_ranks

T = TypeVar("T")


class Served:
    """A framework's callback, placed before the framework's own class in the method resolution order.

    Used as a context, the run counts as finished at the end of the `with` block, not of the training. An interruption
    repeats any work on the trained model inside the block.

    Args:
        session: default: the one that this process's environment describes.

    Attributes:
        resume: the framework's argument to resume from; None: from the start.
        is_adopted: the checkpoint is another run's, which `checkpoint.resume_from` named.
    """

    def __init__(self, session: Session | None = None) -> None:
        self.session = Session.open() if session is None else session
        self._saver: StepEndSaver | None = None
        self._metrics: dict[str, float] = {}
        self._held = self._closed = self.is_adopted = False
        self._finished_at: int | None = None
        try:
            self.resume = self._resume()
        # The daemon is told here, too: an error of the constructor reaches no method of `fit` or `train`.
        except VerlSlurmError as error:
            self.session.ended_by(error)
            raise

    def __enter__(self) -> Self:
        self._held = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Cleared first: `_finish` below is the end that the block has held back.
        self._held = False
        if kind is None:
            self._finish()
        self._close(broken=kind is not None)

    def _resume(self) -> str | None:
        """Computes `resume`; reads the necessary parts of the checkpoint."""
        raise NotImplementedError

    def _own_files(self, needed: str, whose: str) -> Path | None:
        """Returns the framework's own directory in the verified checkpoint to resume from; None: from the start.

        Args:
            needed: a file that it must contain to be of this framework.

        Raises:
            ConfigError: it is of another loop, or of another number of ranks.
        """
        resume = self.session.resume
        # The first start of the run, or no daemon.
        if resume is None:
            return None
        # Before the framework loads anything: generators and places in the data are per rank, for this number of
        # ranks.
        manifest = require_guest(
            resume, "loop", world_size=self.session.world_size, needed=needed, whose=whose
        )
        self.is_adopted = is_adopted(self.session.paths, manifest.digest)
        return resume / guest_directory("loop", manifest.step)

    def _begin(self, step: int, total: int, metadata: Mapping[str, object]) -> StepEndSaver:
        """Makes the saver at the start of the training, once the framework has its process group. Collective."""
        # Both would number their checkpoints from step 1, and a start could not tell which one to go on with.
        if self._closed or self._saver is not None:
            raise ConfigError(
                "a run is one training, and this is another one",
                where=type(self).__name__,
                found="a callback that has served a training before",
                expected="one training for each callback and each run",
                remedy="submit the later one as a run of its own, which begins with the model that the first one "
                "saved. After an error, let the process end: it is started again",
            )
        ranks = own_ranks(
            self.session, "have it find its ranks in torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK)"
        )
        # Not in the constructor of the callback: the framework makes its process group when the training starts.
        self._saver = StepEndSaver(self.session, ranks, guest="loop", step=step, metadata=metadata)
        self._saver.begin(step, total)
        return self._saver

    def _chosen(self, argument: str, own: T, *, looked_up: bool) -> T | str | None:
        """Returns the checkpoint to go on from, which is the daemon's choice wherever there is one.

        Args:
            looked_up: `own` has the framework look for a checkpoint; at a run's first start there is none of it.
        """
        # A path stays at a first start: `StepEndSaver.begin` refuses a training that does not begin with step 0.
        if not own or (self.resume is None and not looked_up):
            return self.resume or own or None
        self.session.notice(
            f"{argument}={own} is not used: the run goes on from {self.resume or 'its first step'}",
            topic="storage",
        )
        return self.resume

    def _finish(self) -> None:
        if self._finished_at is not None:
            self.session.finished(self._finished_at)
            self._finished_at = None
            self._close()

    def _leave(self) -> NoReturn:
        self._close()
        # Python flushes at its end; a rank that is killed in its shutdown would lose the last lines of its log.
        sys.stdout.flush()
        raise SystemExit(0)

    def _close(self, *, broken: bool = False) -> None:
        """Ends the session; without collective work if it is `broken`: other ranks may be anywhere."""
        # Taken away first: hooks that the framework still calls find no saver and do nothing.
        self._closed = True
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close(broken=broken)


def require_served(unserved: Iterable[tuple[object, str, str]]) -> None:
    """Raises ConfigError if a setting is set that a daemon cannot serve.

    Args:
        unserved: for each, whether it is set, how, and what to do.
    """
    for is_set, found, remedy in unserved:
        if is_set:
            raise ConfigError("the Trainer is set to what a daemon cannot serve", found=found, remedy=remedy)
