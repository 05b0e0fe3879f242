"""What verl's trainer does between two steps for a run that may be interrupted, without verl: the part that decides.

verl saves at the end of a step only. A periodic save is written by verl and committed beside the next step, by a
thread of its own; a save that was asked for is committed before anything else happens. While a step runs a watcher asks
whether its end can still be reached before the deadline: where not, it says so at once, and the last verified step
counts.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from verl_slurm.checkpoint.free_space import room_for
from verl_slurm.checkpoint.storage import Need, Room, need_of_next
from verl_slurm.checkpoint.verify import read_manifest
from verl_slurm.errors import Fenced, VerlSlurmError
from verl_slurm.guest.keeping import Keeper
from verl_slurm.guest.reach import STEPS_LOOKED_AT, Reach, reach
from verl_slurm.guest.session import Session
from verl_slurm.guest.tree import GuestSave, SavedTree, commit_tree
from verl_slurm.verl.tracker import TRACKER
from verl_slurm.wire.messages import SaveRequest

__all__ = ["EndNotSaved", "NothingDone", "Saves"]

_LOOK_EVERY_S = 0.25
"""The control page is memory: nothing tells that it was written. A look costs one read."""


class NothingDone(VerlSlurmError):
    """verl's loop ended with steps left and none done: it would do the same at every start."""


class EndNotSaved(VerlSlurmError):
    """All steps are done, and what came of the last one is in no checkpoint: a crash; another start may save it."""


@dataclass
class _Known:
    """What two threads look at; under `Saves._lock`."""

    saving: bool = False
    """The loop is at a step's end: it answers, and the watcher does not."""
    given_up: int = 0
    """The request that got no for an answer."""
    committed: dict[int, SavedTree] = field(default_factory=dict)


class Saves:
    """Of one generation. Called by: `verl.ppo`, in verl's driver.

    Args:
        world_size: ranks that write a save together.
        metadata: of every save, for people.
        keeper: lets older checkpoints go; None: nobody does.
        clock: CLOCK_MONOTONIC in seconds, as the deadlines of requests.
    """

    def __init__(
        self,
        session: Session,
        world_size: int,
        metadata: Mapping[str, object] | None = None,
        *,
        keeper: Keeper | None = None,
        room: Callable[[Path, Need], Room] = room_for,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session, self._world_size = session, world_size
        self._keeper, self._room = keeper, room
        self._last: tuple[int, int] | None = None  # bytes and files of a save
        self._metadata = dict(metadata or {})
        self._total, self._began = 0, 0
        self._metrics: Mapping[str, object] = {}
        self._said = 0
        self._clock, self._step_began = clock, clock()
        self._steps_s: deque[float] = deque(maxlen=STEPS_LOOKED_AT)
        self._save_began: float | None = None
        self._taken_up: SaveRequest | None = None
        self._known, self._lock, self._over = _Known(), threading.Lock(), threading.Event()
        self._pool = ThreadPoolExecutor(1, "verl-slurm-commit")
        self._pending: Future[None] | None = None
        self._watcher: threading.Thread | None = None
        self.left_at: int | None = None
        """The step behind which the loop was told to leave."""

    def begin(self, step: int, total: int) -> None:
        """The loop goes on behind `step` of `total` steps."""
        self._began, self._said, self._total = step, step, total
        self._step_began = self._clock()
        self.session.started(step, total)
        if self.session.has_daemon:
            self._watcher = threading.Thread(target=self._watch, name="verl-slurm-watch", daemon=True)
            self._watcher.start()

    def numbers(self, metrics: Mapping[str, object]) -> None:
        """Where verl collects the running step's numbers, as far as they are known when it is saved."""
        self._metrics = metrics

    def may_write(self, step: int) -> bool:
        """Whether verl may save behind `step`: it would die of a full disk, and a periodic save is not worth that. The
        last one, and one that was asked for, are tried in any case."""
        if step >= self._total or self._request() is not None or not self.session.has_run:
            return True
        if self._keeper is not None:
            self._keeper.before_save()
        if self._last is None and (resume := self.session.resume) is not None:
            with suppress(OSError, VerlSlurmError):
                manifest = read_manifest(resume)
                self._last = (manifest.num_bytes, len(manifest.files))
        if self._last is None:
            return True
        room = self._room(self.session.paths.root, need_of_next(*self._last))
        if room.enough is False:
            self.session.notice(f"step {step} is not saved: {room.reason}", loud=True)
        return room.enough is not False

    def writing(self) -> None:
        """verl begins to write: its time is part of what a save takes."""
        self._save_began = time.monotonic()
        with self._lock:
            # Until the step's end: who says no is ended at once, and the save with him.
            self._known.saving = True

    def written(self, step: int, directory: Path) -> None:
        """verl has written `directory`, whole, and goes on when this returns. Never raises for a periodic save that
        does not get committed: the one before it counts, and people are told."""
        self._wait()
        if (request := self._request()) is None:
            self._pending = self._pool.submit(self._commit, step, directory, 0, self._save_began)
        else:
            self._take_up(request, step)
            self._commit(step, directory, request.request_id, self._save_began)

    def step_end(self, step: int, save: Callable[[], None]) -> bool:
        """Behind a step, and behind its periodic save.

        Args:
            save: has verl save this step now; it calls `written`.

        Returns:
            Whether the loop is to end here.
        """
        try:
            request = self._taken_up or self._request()
            if request is None:
                return False
            self._take_up(request, step)
            self._wait()  # it may be of this very step
            if self._is_open(request):
                if (known := self._known.committed.get(step)) is not None:
                    self._say(known, request.request_id)
                else:
                    save()
            if self._is_open(request):  # nobody waits for what never comes
                self.session.save_failed(request.request_id, "verl did not hand over what it saved")
            if request.stop:
                self.left_at = step
                self.session.stopped(request.request_id)
            return request.stop
        finally:
            with self._lock:
                self._taken_up, self._known.saving = None, False

    def step_done(self, step: int, metrics: Mapping[str, object]) -> None:
        """All of a step's work is done and its numbers are known; said once."""
        if step != self._said:
            now = self._clock()
            if self._said > self._began:  # in the first one actors warm up: it tells little of the next
                self._steps_s.append(now - self._step_began)
            self._said, self._step_began = step, now
            self.session.step_done(step, metrics, self._total)

    def end(self, step: int) -> None:
        """verl's loop has ended behind `step`.

        Raises:
            NothingDone: before its last step, and nobody had asked it to.
            EndNotSaved: a run that lost its end is not done.
        """
        self._wait()
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()
        if step >= self._total:
            if not self.session.has_run or step == self._began or step in self._known.committed:
                self.session.finished(step)
            elif self.left_at is None:
                raise EndNotSaved(
                    "the last step is done and could not be saved",
                    where=self.session.paths.root,
                    found=f"no checkpoint of step {step}",
                    remedy="the reason stands above, and in `verl-slurm status`",
                )
        elif self.left_at is None:
            done = f"{step - self._began} steps of this start" if step > self._began else "no step at all"
            raise NothingDone(
                "verl's loop ended before its last step",
                found=f"step {step} of {self._total}, {done}",
                remedy="look at trainer.total_epochs and at the data's length; see the log above",
            )

    def _take_up(self, request: SaveRequest, step: int) -> None:
        """From here on the loop answers it, and the watcher does not."""
        with self._lock:
            self._known.saving = True
        if self._taken_up is None:
            self._taken_up = request
            if request.stop:
                self.step_done(step, self._metrics)  # verl's last numbers of a step that it leaves never come
            self.session.save_started(request.request_id, step)

    def _is_open(self, request: SaveRequest) -> bool:
        now = self._request()
        return now is not None and now.request_id == request.request_id

    def _commit(self, step: int, directory: Path, request_id: int, began: float | None) -> None:
        session = self.session
        if not session.has_run:
            return
        resume = session.resume
        save = GuestSave(
            guest="verl",
            step=step,
            epoch=session.epoch,
            world_size=self._world_size,
            parent=None if resume is None else resume.name,
            metrics=session.numbers(self._metrics),
            metadata=self._metadata,
            began=began,
        )
        num_files = sum(len(names) for _, _, names in os.walk(directory))
        try:
            tracker = {TRACKER: str(step).encode()}
            tree = commit_tree(session.paths, save, {directory.name: directory}, texts=tracker)
        except Fenced:
            raise  # whatever it trained from here on would be for nobody
        except (OSError, VerlSlurmError) as error:
            told = error.one_line() if isinstance(error, VerlSlurmError) else str(error)
            if self._keeper is not None:
                self._keeper.failed(told)
            if request_id:
                session.save_failed(request_id, told)
            else:
                session.notice(f"the save of step {step} was not committed: {told}", loud=True)
            return
        with self._lock:
            self._known.committed = {step: tree}
        self._say(tree, request_id)
        self._last = (tree.num_bytes, num_files)
        if self._keeper is not None:  # who is asked for a save is in a hurry; the next start tidies up
            self._keeper.saved(tree, tidy=not request_id)

    def _say(self, tree: SavedTree, request_id: int) -> None:
        reason = "asked for" if request_id else "periodic"
        self.session.saved(
            request_id, tree.name, seconds=tree.seconds, num_bytes=tree.num_bytes, reason=reason
        )

    def _wait(self) -> None:
        """Until the periodic save before is committed."""
        try:
            if self._pending is not None:
                self._pending.result()
        finally:
            self._pending = None

    def _request(self) -> SaveRequest | None:
        request = self.session.request()
        return None if request is None or request.request_id <= self._known.given_up else request

    def _reach(self, request: SaveRequest) -> Reach:
        now = self._clock()
        return reach(
            seconds_left=request.seconds_left,
            running_s=now - self._step_began,
            steps_s=tuple(self._steps_s),
            save_s=self.session.save_s,
        )

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        with self._lock:
            request, pending = self._request(), self._pending
            # A save of the step before is worth more than the seconds that its commit takes.
            if request is None or not request.stop or self._known.saving:
                return
            if pending is not None and not pending.done():
                return
            verdict = self._reach(request)
            if verdict.ok:
                return
            self._known.given_up = request.request_id
        self.session.save_failed(
            request.request_id, f"the end of the step cannot be reached: {verdict.reason}"
        )
