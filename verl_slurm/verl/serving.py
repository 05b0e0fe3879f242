"""The other side of `sft_loop`: what the daemon is told, what it asks for, and how a save of all ranks is committed.

Every rank makes its own files durable and hashes them, so that neither the bytes of a node nor the work of hashing
pass through another one; rank 0 does it for the rest (tokenizer, configuration, data loaders) and commits.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.checkpoint.commit import seal
from verl_slurm.checkpoint.format import FileEntry, guest_directory
from verl_slurm.checkpoint.free_space import room_for
from verl_slurm.checkpoint.storage import need_of_next
from verl_slurm.config.schema import RunConfig
from verl_slurm.dcp.collective import Collective, RanksFailed
from verl_slurm.errors import Fenced
from verl_slurm.guest.keeping import Keeper
from verl_slurm.guest.reach_watch import ReachWatch
from verl_slurm.guest.session import Session
from verl_slurm.guest.tree import GuestSave, SavedTree, commit_tree
from verl_slurm.verl.tracker import TRACKER
from verl_slurm.wire.messages import SaveRequest
from verl_slurm.wire.stopping import Stopper

__all__ = ["Serving"]


class Serving:
    """The `sft_wraps.Service` of a run under a daemon. Called by: verl.sft.

    Args:
        session: this rank's.
        ranks: all of them, over gloo.
        work: where verl writes (`RunPaths.work`).
        metadata: for people, into each checkpoint.

    Attributes:
        saved_step: the newest that is committed; what was resumed from counts.
    """

    def __init__(
        self,
        session: Session,
        ranks: Collective,
        work: Path,
        *,
        config: RunConfig,
        resume_step: int,
        metadata: Mapping[str, Any],
    ) -> None:
        self._session, self._ranks, self._work, self._metadata = session, ranks, work, dict(metadata)
        self._side = ranks.another()
        self._thread, self._pending = ThreadPoolExecutor(1, "verl-slurm-commit"), _done()
        self._keeper = Keeper(session, config.checkpoint) if session.rank == 0 else None
        self._stopper = Stopper(session.line, ranks.max)
        self._watch = ReachWatch(session, busy=lambda: self._writing or not self._pending.done())
        self._total, self.saved_step, self._writing = 0, resume_step, False
        self._last: tuple[int, int] | None = None  # bytes and files of the last save

    def begin(self, step: int, total: int) -> None:
        """The loop starts behind `step`; from here on it may be asked to save."""
        self._total = total
        self._session.started(step, total)
        if self._session.rank == 0:
            self._watch.start()

    def end(self) -> None:
        """The loop has ended.

        Raises:
            Fenced: as `settle`.
        """
        self._watch.stop()
        self.settle()
        self._thread.shutdown()

    def settle(self) -> None:
        """Until the save before is committed, or known to have failed.

        Raises:
            Fenced: a newer incarnation owns the run.
        """
        try:
            self._pending.result()
        finally:
            self._pending = _done()

    def step_done(self, step: int, metrics: dict[str, float]) -> SaveRequest | None:
        self._session.step_done(step, metrics, self._total)
        order = self._stopper.agree().request
        if order is not None:
            self._watch.taken(order.request_id)
        return order

    def save(
        self, step: int, order: SaveRequest | None, metrics: dict[str, float], write: Callable[[], None]
    ) -> None:
        """verl writes, and what it has written is committed: beside the next steps, over a group of its own, unless
        somebody waits for it or nothing comes behind it. Collective.

        A save that fails is said, and training goes on: the checkpoint before it counts.

        Raises:
            Fenced: as `settle`, of this save or the one before.
        """
        self.settle()
        must = order is not None or step >= self._total
        if not must and not self._ranks.share(self._room(step) if self._ranks.rank == 0 else b"", source=0):
            return  # verl would die of it
        request_id, began = (order.request_id if order else 0), time.monotonic()
        self._session.save_started(request_id, step)
        if self._keeper is not None:
            self._keeper.before_save()
        self._writing = True
        write()
        self._pending = self._thread.submit(self._commit, step, order, metrics, began)
        self._writing = False
        if must:
            self.settle()

    def _commit(self, step: int, order: SaveRequest | None, metrics: dict[str, float], began: float) -> None:
        """In the thread; collective over its group."""
        ranks, request_id = self._side, order.request_id if order else 0
        try:
            entries = ranks.together("making the files durable", lambda: self._seal(step))
            self._session.part_saved(request_id)
            parts = ranks.gather(msgspec.json.encode(entries))
            raw = ranks.on_first(
                "the commit", lambda: msgspec.json.encode(self._put(step, order, metrics, parts, began))
            )
        except RanksFailed as error:
            if "Fenced" in error.kinds:
                raise Fenced(
                    "a newer incarnation owns the run", where=self._work, found=error.found
                ) from error
            self._session.save_failed(request_id, error.one_line())
            if self._keeper is not None:
                self._keeper.failed(error.one_line())
                shutil.rmtree(self._work / guest_directory("verl", step), ignore_errors=True)
            return
        self.saved_step = step
        name, num_bytes, num_files = msgspec.json.decode(raw, type=tuple[str, int, int])
        self._last = (num_bytes, num_files)
        self._session.saved(
            request_id,
            name,
            seconds=round(time.monotonic() - began, 3),
            num_bytes=num_bytes,
            reason=self._why(step, order),
        )

    def _room(self, step: int) -> bytes:
        if self._last is None:
            return b"yes"
        room = room_for(self._work, need_of_next(*self._last))
        if room.enough is not False:
            return b"yes"
        self._session.notice(f"step {step} is not saved: {room.reason}", loud=True)
        return b""

    def _seal(self, step: int) -> list[FileEntry]:
        own = self._work / guest_directory("verl", step)
        mine = sorted(path.name for path in own.glob(f"*_rank_{self._ranks.rank}.pt"))
        return seal(self._work, [f"{own.name}/{name}" for name in mine])

    def _put(
        self,
        step: int,
        order: SaveRequest | None,
        metrics: dict[str, float],
        parts: list[bytes],
        began: float,
    ) -> tuple[str, int, int]:
        """Rank 0's part; (name, bytes, files)."""
        session, own = self._session, guest_directory("verl", step)
        sealed = [entry for part in parts for entry in msgspec.json.decode(part, type=list[FileEntry])]
        save = GuestSave(
            guest="verl",
            step=step,
            epoch=session.epoch,
            world_size=session.world_size,
            parent=session.resume.name if session.resume else None,
            metrics=metrics,
            metadata=self._metadata,
            began=began,
        )
        done: SavedTree = commit_tree(
            session.paths,
            save,
            {own: self._work / own},
            texts={TRACKER: str(step).encode()},
            sealed=sealed,
        )
        if self._keeper is not None:
            self._keeper.saved(done, tidy=order is None or not order.stop)
        return done.name, done.num_bytes, len(sealed) + 1

    def _why(self, step: int, order: SaveRequest | None) -> str:
        if order is not None:
            return "asked to stop" if order.stop else "asked to save"
        return "the last step" if step == self._total else "trainer.save_freq"


def _done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future
