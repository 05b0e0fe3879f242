"""Decides which of a guest's checkpoints stay, and whether the next one will fit. No torch.

The daemon reads every checkpoint back after its commit. The trainer itself decides how many stay and checks that the
file system has room, so a guest must do so, too. One rank calls this, after a commit and before a save.
"""

from contextlib import suppress

from verl_slurm.base.errors import Fenced, VerlSlurmError
from verl_slurm.base.fence import require_attempt
from verl_slurm.checkpoint.decide.retention import ASSURED_KEPT, plan_prune
from verl_slurm.checkpoint.decide.storage import Need, Room, need_of_next
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.commit import SavedCheckpoint
from verl_slurm.checkpoint.store.medium import StorageWatch
from verl_slurm.checkpoint.store.pruning import Removing, apply_prune
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.config.schema import CheckpointConfig
from verl_slurm.loops.session import Session


class Keeper:
    """Keeps a guest's checkpoints in bounds, on rank 0.

    Args:
        config: `checkpoint` of the run.
    """

    def __init__(self, session: Session, config: CheckpointConfig) -> None:
        self._session, self._config, self._paths = session, config, session.paths
        # Verified by the lead, or written and hashed by this start: retention may rely on these.
        self._assured = {session.resume.name} if session.resume is not None else set()
        self._removing = Removing()
        self._watch = StorageWatch("shared storage", self._paths.checkpoints, estimate=_first_need(session))

    def before_save(self) -> Room | None:
        """Returns whether the file system has room for the next save; reports a change."""
        for notice in self._watch.before_save():
            self._session.notice(notice.text, topic="storage", loud=notice.loud)
        return self._watch.room

    def saved(self, done: SavedCheckpoint, *, tidy: bool = True) -> None:
        """A checkpoint is committed: let older ones go. Never raises for what cannot be removed.

        Args:
            tidy: False: the job ends, and the next start will do it.

        Raises:
            Fenced: a newer attempt owns the run.
        """
        # Before the pruning: the plan must count the checkpoint that has just been committed.
        self._assured.add(done.name)
        for notice in self._watch.saved(done.num_bytes, done.seconds, done.num_files):
            self._session.notice(notice.text, topic="storage", loud=notice.loud)
        if not tidy:
            return
        try:
            self._prune()
            need = need_of_next(done.num_bytes, done.num_files)
            self._removing.leave_room(self._paths.checkpoints, need)
        # A fenced start has to end: the run and its checkpoints belong to a newer attempt.
        except Fenced:
            raise
        except OSError as error:
            self._session.notice(f"older checkpoints cannot be removed: {error}", topic="storage", loud=True)

    def failed(self, reason: str) -> None:
        """Records a failed save."""
        for notice in self._watch.failed(reason):
            self._session.notice(notice.text, topic="storage", loud=notice.loud)

    def close(self) -> None:
        """Waits until all that is let go is removed."""
        self._removing.close()

    def _prune(self) -> None:
        attempt = self._session.attempt
        plan = plan_prune(
            list_checkpoints(self._paths),
            self._config.keep_last,
            keep_every=self._config.keep_every,
            # ASSURED_KEPT of these stay whatever `keep_last` says: a fresh save has not been read back yet.
            verified=self._assured,
            num_verified=ASSURED_KEPT,
        )
        # Checked at each removal: a process that slept since its plan must not remove what a newer attempt resumes
        # from.
        apply_prune(
            self._paths,
            plan,
            attempt_check=lambda: require_attempt(self._paths, attempt),
            remove=self._removing.remove,
        )


def _first_need(session: Session) -> Need:
    """Estimates the size of the first save from the resumed checkpoint."""
    if session.resume is not None:
        # An estimate for a warning: a checkpoint that is gone by now is no reason to fail.
        with suppress(OSError, VerlSlurmError):
            manifest = read_manifest(session.resume)
            return need_of_next(manifest.num_bytes, len(manifest.files))
    return need_of_next(0, 1, basis="an estimate")
