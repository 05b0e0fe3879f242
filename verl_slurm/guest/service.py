"""What a framework's callback does for the daemon, whatever the framework: agree, commit, say so, leave.

The framework owns the loop and its own checkpoint files; it calls us at the end of each step, on every rank. Where no
daemon is (`Session.has_daemon`), a callback leaves the framework alone, and none of this is made.
"""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from verl_slurm.checkpoint.format import guest_directory
from verl_slurm.config.load import load_own
from verl_slurm.dcp.collective import Collective, RanksFailed
from verl_slurm.errors import ConfigError, Fenced, VerlSlurmError
from verl_slurm.exit_codes import ExitCode
from verl_slurm.guest.keeping import Keeper
from verl_slurm.guest.reach_watch import ReachWatch
from verl_slurm.guest.session import Session
from verl_slurm.guest.tree import GuestSave, clear_work, commit_tree, require_guest
from verl_slurm.wire.messages import SaveRequest
from verl_slurm.wire.stopping import Stopper

__all__ = ["Service", "own_files", "refuse"]


class Service:
    """The ranks of a framework's run, as one, towards the daemon.

    Made on every rank at the start of the training, when the framework has its process group.

    Args:
        session: with a daemon.
        step: whole steps done.
        total: steps that there are to do; 0: nobody knows.
        metadata: for people, in each checkpoint: the library and its version.

    Attributes:
        work: where the framework writes its checkpoints; empty at the start.
        every_steps: `checkpoint.every_steps` of the run.
        committed: the step of the newest checkpoint, which need not be saved again.
        saving: the framework writes one; `commit` ends that.

    Called by: guest.huggingface, guest.lightning.
    """

    def __init__(self, session: Session, *, step: int, total: int, metadata: Mapping[str, object]) -> None:
        self.session = session
        # A group of our own: the framework's may be one of GPUs, and in use by its reducer.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.ranks = Collective(self._group)
        if self.ranks.world_size != session.world_size:
            raise ConfigError(
                "the framework does not train with the ranks that were started",
                found=f"a process group of {self.ranks.world_size}",
                expected=f"{session.world_size} ranks (distributed.nodes, distributed.ranks_per_node)",
                remedy="have it find its ranks in torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK)",
            )
        self._stopper = Stopper(session.line, self.ranks.max)
        self._metadata, self._total = dict(metadata), total
        self.saving = False
        self.committed = step if session.resume is not None else -1
        self.work = session.paths.work(session.epoch)
        config = load_own(session.paths.run_yaml).checkpoint
        self.every_steps = config.every_steps
        self._keeper = Keeper(session, config) if session.rank == 0 else None
        self.ranks.on_first("preparing to save", self._prepare)
        session.started(step, total)
        self._watch = ReachWatch(session, busy=lambda: self.saving) if session.rank == 0 else None
        if self._watch is not None:
            self._watch.start()

    def _prepare(self) -> bytes:
        clear_work(self.session.paths, self.session.epoch)
        return b""

    def close(self, *, broken: bool = False) -> None:
        """Nothing more will be asked or said; may be called twice.

        Args:
            broken: other ranks may be anywhere: nothing is done that they would have to join.
        """
        if self._watch is not None:
            self._watch.stop()
        self.session.close()
        if self._group is not None and dist.is_initialized() and not broken:
            dist.destroy_process_group(self._group)
            self._group = None

    def step_done(self, step: int, metrics: Mapping[str, object]) -> None:
        """A step is done."""
        self.session.step_done(step, metrics, self._total)

    def asked(self, step: int) -> SaveRequest | None:
        """What the daemon wants at the end of step `step`, the same on all ranks. Collective."""
        order = self._stopper.agree().request
        if order is not None:
            if self._watch is not None:
                self._watch.taken(order.request_id)
            self.session.save_started(order.request_id, step)
        return order

    def commit(
        self,
        step: int,
        written: Path,
        order: SaveRequest | None,
        *,
        metrics: Mapping[str, float],
        began: float,
        last: bool = False,
    ) -> None:
        """Make what all ranks wrote below `written` the checkpoint of `step`. Collective.

        A save that fails loses itself only: the checkpoint before it counts, and the training goes on.

        Args:
            written: a directory below `work`; it is moved away, or removed.
            order: that it answers; None: a periodic save.
            began: `time.monotonic` when the save began.
            last: of the last step.

        Raises:
            RanksFailed: the last step could not be saved: a run that lost its end is not done.
            Fenced: a newer incarnation owns the run; on all ranks.
        """
        session, keeper = self.session, self._keeper
        self.saving = True
        request_id = 0 if order is None else order.request_id
        why = "all steps are done" if last else f"step {step} is one to save"
        if order is not None:
            why = "the job ends" if order.stop else "asked for"
        save = GuestSave(
            guest="loop",
            step=step,
            epoch=session.epoch,
            world_size=session.world_size,
            parent=session.resume.name if session.resume is not None else None,
            metrics=session.numbers(metrics),
            metadata=self._metadata,
            began=began,
        )
        self.ranks.max([0])  # until every rank has written its part
        session.part_saved(request_id)

        def put() -> bytes:
            assert keeper is not None
            keeper.before_save()
            tree = commit_tree(session.paths, save, {guest_directory("loop", step): written})
            keeper.saved(tree, tidy=order is None or not order.stop)
            return f"{tree.name} {tree.num_bytes}".encode()

        try:
            name, num_bytes = self.ranks.on_first("committing the checkpoint", put).decode().split()
        except RanksFailed as failed:
            self.saving = False
            shutil.rmtree(written, ignore_errors=True)
            session.save_failed(request_id, failed.one_line())
            if keeper is not None:
                keeper.failed(failed.one_line())
            if Fenced.__name__ in failed.kinds:
                raise Fenced("this incarnation no longer owns the run", found=failed.found) from failed
            if last:
                raise
            return
        seconds = time.monotonic() - began
        session.saved(request_id, name, seconds=seconds, num_bytes=int(num_bytes), reason=why)
        self.committed, self.saving = step, False


def own_files(session: Session, needed: str, whose: str) -> Path | None:
    """The framework's own directory in the verified checkpoint to go on from; None: from the start.

    Args:
        needed: what must be in it, for it to be of this framework.
        whose: its name, for people.

    Raises:
        ConfigError: it is of another loop, or of another number of ranks.
    """
    if session.resume is None:
        return None
    manifest = require_guest(session.resume, "loop", world_size=session.world_size)
    directory = session.resume / guest_directory("loop", manifest.step)
    if not (directory / needed).exists():
        raise ConfigError(
            f"the checkpoint is not one of {whose}",
            where=directory,
            found=", ".join(sorted(path.name for path in directory.iterdir())[:5]),
            expected=needed,
            remedy="go on with the loop that wrote it, or start with checkpoint.resume_from=null",
        )
    return directory


def refuse(session: Session, error: VerlSlurmError) -> None:
    """Tell the daemon that another start would end in the same way; a bug of ours is a crash like any other."""
    if error.exit_code is not ExitCode.INTERNAL and not isinstance(error.__cause__, OSError):
        session.refused(error)
