"""Saves at the end of a step, for every loop that is not ours. Needs torch.

```
at a step's end, on every rank                                done by
─────────────────────────────────────────────────────────     ──────────────────────────────────────────────
step_done   the daemon and steps.jsonl hear of the step       the loop calls it
asked       all ranks agree whether a save is asked for       the loop, or its framework's callback
save        SaveStarted
            the state is copied, or a framework writes it     `Store`
            PartSaved, and the commit: manifest, rename       `Store`, and what it returns
            Saved or SaveFailed: the request is answered
leave       Stopped, where the request says so                the loop, which then ends
```

A `Store` is our own saver (`loops.plain`), or `files`, which moves and hashes what a framework has written. What it
returns a thread may do beside the next steps (`beside`), over its own group, for a periodic save alone: a requested
save and the last one are committed when `save` returns.

The loop looks at its control page at the ends of steps alone. A thread (`ReachWatch`) looks four times a second while a
step runs, and answers for the loop if its end will come too late.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import torch.distributed as dist

from verl_slurm.base.errors import ConfigError, Fenced, VerlSlurmError
from verl_slurm.base.fence import require_attempt
from verl_slurm.base.keys import Keyring, load_keys
from verl_slurm.checkpoint.decide.storage import Need, Room, need_of_next
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.format.specification import FileEntry, Guest, guest_directory
from verl_slurm.checkpoint.store import commit as door
from verl_slurm.checkpoint.store.commit import SavedCheckpoint
from verl_slurm.checkpoint.store.loop_checkpoint import LoopSave, clear_work, commit_tree
from verl_slurm.checkpoint.store.medium import StorageNotice, StorageWatch
from verl_slurm.checkpoint.store.pruning import Removing, prune_as_configured
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.config.load import dump, load_own
from verl_slurm.config.schema import CheckpointConfig
from verl_slurm.loops.session import LAST_TRIES_S, Session
from verl_slurm.save.ranks.collective import Collective, RanksFailed
from verl_slurm.wire.messages import SaveRequest
from verl_slurm.wire.stopping import Stopper

_LOOK_EVERY_S = 0.25


class ReachWatch:
    """A thread of rank 0.

    Args:
        busy: whether a save is in progress: the request is judged after it.
        leaves: whether the loop can save the last step's end and leave where it is. It looks for the request itself
            then.
    """

    def __init__(
        self,
        session: Session,
        *,
        busy: Callable[[], bool] = lambda: False,
        leaves: Callable[[], bool] = lambda: False,
        every_s: float = _LOOK_EVERY_S,
    ) -> None:
        self._session, self._busy, self._leaves, self._every_s = session, busy, leaves, every_s
        self._over, self._lock = threading.Event(), threading.Lock()
        self._judged = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="reach", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def taken(self, request_id: int) -> None:
        """Records that the loop has heard the request at a step's end: the watcher no longer answers it."""
        with self._lock:
            # Under the lock of `look`: a request is either taken by the loop or refused by the watcher, never both.
            self._judged = max(self._judged, request_id)

    def look(self) -> None:
        """Judges a new request, once, when it is first seen."""
        with self._lock:
            # Read from shared memory, without a collective: this thread runs while the loop is anywhere in its step.
            request = self._session.request()
            # A no ends the ranks at once, and a save in progress with them: it waits for that, as long as the daemon
            # allows.
            if request is None or request.request_id <= self._judged or self._busy() or self._leaves():
                return
            # Once: a second look could take back what the loop was promised. A step that outlasts all others is
            # waited for.
            self._judged = request.request_id
            if not request.stop:
                return  # no request is waiting
            found = self._session.reach(request)
            if not found.ok:
                why = f"the end of the step cannot be reached: {found.reason}"
                # The final answer: the daemon ends the ranks now instead of at the deadline, and requeues that much
                # earlier.
                self._session.save_failed(request.request_id, why)

    def _run(self) -> None:
        # A poll: the page is plain memory, and no event wakes this thread when the agent writes to it.
        while not self._over.wait(self._every_s):
            self.look()


_FILES_PER_RANK = 8
"""Of our own saver, which does not count them."""


class _Keeper:
    """Keeps a loop's checkpoints in bounds, and looks whether the next one will fit. On rank 0."""

    def __init__(self, session: Session, config: CheckpointConfig, keys: Keyring | None) -> None:
        self._session, self._config, self._keys = session, config, keys
        # Verified by the lead, or written and hashed by this start: retention may rely on these.
        self._assured = {session.resume.name} if session.resume is not None else set()
        self._removing = Removing()
        self._watch = StorageWatch("shared storage", session.paths.checkpoints, estimate=_first_need(session))

    def before_save(self) -> Room | None:
        """Returns whether the file system has room for the next save; reports a change."""
        self._tell(self._watch.before_save())
        return self._watch.room

    def saved(self, done: SavedCheckpoint, *, tidy: bool = True) -> None:
        """Counts a committed checkpoint and lets older ones go, unless `tidy` is False: the next start does it then.

        Raises:
            Fenced: a newer attempt owns the run.
        """
        # Before the pruning: the plan must count the checkpoint that has just been committed.
        self._assured.add(done.name)
        num_files = done.num_files or _FILES_PER_RANK * self._session.world_size
        self._tell(self._watch.saved(done.num_bytes, done.seconds, num_files))
        if not tidy:
            return
        try:
            self._prune()
            need = need_of_next(done.num_bytes, num_files)
            self._removing.leave_room(self._session.paths.checkpoints, need)
        # A fenced start has to end: the run and its checkpoints belong to a newer attempt.
        except Fenced:
            raise
        # What cannot be removed is said, and stops nothing.
        except OSError as error:
            self._session.notice(f"older checkpoints cannot be removed: {error}", topic="storage", loud=True)

    def failed(self, reason: str) -> None:
        self._tell(self._watch.failed(reason))

    def close(self) -> None:
        """Waits until all that is let go is removed."""
        self._removing.close()

    def _tell(self, notices: Sequence[StorageNotice]) -> None:
        for notice in notices:
            self._session.notice(notice.text, topic="storage", loud=notice.loud)

    def _prune(self) -> None:
        session = self._session
        # Checked at each removal: a process that slept since its plan must not remove what a newer attempt resumes
        # from.
        check = partial(require_attempt, session.paths, session.attempt)
        prune_as_configured(
            session.paths, self._config, self._removing, self._assured, self._keys, attempt_check=check
        )


def _first_need(session: Session) -> Need:
    """Estimates the size of the first save from the resumed checkpoint."""
    if session.resume is not None:
        # An estimate for a warning: a checkpoint that is gone by now is no reason to fail.
        with suppress(OSError, VerlSlurmError):
            manifest = read_manifest(session.resume)
            return need_of_next(manifest.num_bytes, len(manifest.files))
    return need_of_next(0, 1, basis="an estimate")


Commit = Callable[[], SavedCheckpoint]
Store = Callable[[LoopSave, SaveRequest | None], Commit]
"""Takes the state of a step, or has it written; what it returns commits it, perhaps in a thread. Both are collective,
and raise RanksFailed on all ranks or none."""

Seal = Callable[[Collective], Sequence[FileEntry]]


def _wait_for_all(ranks: Collective) -> Sequence[FileEntry]:
    """The `Seal` of files that rank 0 makes durable: every rank has written by then."""
    ranks.max([0])
    return ()


class StepEndSaver:
    """See the module. Belongs to one start of a loop, on every rank that speaks. Its construction is collective.

    Without a daemon there are no requests; without a run nothing is saved. Every method may still be called.

    Args:
        ranks: all that speak, over a CPU group.
        step: whole steps done.
        world_size: ranks that the files are for; None: those that speak.
        metadata: for people, in each checkpoint.
        texts: further small files of the checkpoint of a step (`checkpoint.store.loop_checkpoint.commit_tree`).
        beside: periodic saves are committed beside the next steps. A framework's save without room is not begun.
        any_ranks: the loop can go on with another number of ranks.
        by_our_saver: it is saved by that, and not by a framework.

    Raises:
        ConfigError: the run is configured for what this loop cannot do.
        KeyRefused, PermissionRefused: `keys.load_keys`.

    Attributes:
        work: where this start writes; below the run, empty at the start.
        checkpoint: of the run's configuration; None: there is no run.
        every_steps: `checkpoint.every_steps`; 0: there is no run.
        request: the request that the ranks agreed on and `save` has not answered yet.
        stopping: the request after which the loop must leave.
        saved_step: of the newest checkpoint, including the resumed one; -1: none.
        leaves_early: the loop is where it can save the last step and leave (`leave_early`). The loop sets it.
        saving: a save is being written. A framework that writes by itself says so (`begins`), and may withdraw it.
    """

    work: Path

    def __init__(
        self,
        session: Session,
        ranks: Collective,
        *,
        guest: Guest,
        step: int = 0,
        world_size: int | None = None,
        metadata: Mapping[str, object] | None = None,
        texts: Callable[[int], Mapping[str, bytes]] = lambda step: {},
        beside: bool = False,
        any_ranks: bool = False,
        by_our_saver: bool = False,
    ) -> None:
        self.session, self.ranks = session, ranks
        self.checkpoint: CheckpointConfig | None = None
        self._guest, self._metadata, self._texts = guest, dict(metadata or {}), texts
        self._world_size = world_size or ranks.world_size
        self.request: SaveRequest | None = None
        self.stopping: SaveRequest | None = None
        # A resumed step is on disk already: a stop before the first step is answered with that checkpoint.
        self.saved_step = step if session.resume is not None else -1
        self.saving, self._announced, self.leaves_early = False, -1, False
        self._total, self.every_steps, self._config = 0, 0, b""
        # The agents write the request at different moments; without agreement ranks would save at different steps.
        self._stopper = Stopper(session.line, ranks.max)
        self._watch: ReachWatch | None = None
        self._keeper: _Keeper | None = None
        if session.has_run:
            self.work = session.paths.work(session.attempt)
            config = load_own(session.paths.run_yaml)
            # At the first start, not at the first lost node.
            if config.distributed.min_nodes is not None and not any_ranks:
                raise ConfigError(
                    "this loop goes on with as many ranks as it was saved by",
                    where="distributed.min_nodes",
                    found=config.distributed.min_nodes,
                    expected="null, or a loop in verl_slurm.run(any_ranks=True, ...)",
                    remedy="docs/guests.md, `Another number of ranks`",
                )
            if not by_our_saver:
                _require_frameworks_own(config.checkpoint)
            # Kept: run.yaml may be edited or gone by the time of a save.
            self._config = dump(config)
            self.checkpoint, self.every_steps = config.checkpoint, config.checkpoint.every_steps
            # Rank 0 alone removes checkpoints and looks for room: the plan is one for the run, not one per rank.
            keys = load_keys(config.checkpoint.encryption)
            self._keeper = _Keeper(session, config.checkpoint, keys) if session.rank == 0 else None
            # Collective, so no rank writes before the remains of a dead start are gone: they could mix with its
            # files.
            ranks.first_does("preparing to save", lambda: clear_work(session.paths, session.attempt))
        # A framework would die of the full disk.
        self._skips_full = beside and not by_our_saver
        # One worker: commits must stay in the order of their steps.
        self._pool = ThreadPoolExecutor(1, "verl-slurm-commit") if beside else None
        # A group of its own: collectives of the commit thread and of the loop on one group would pair up wrongly.
        self._side = ranks.another() if beside else ranks
        self._pending: Future[RanksFailed | None] | None = None

    def begin(self, step: int, total: int) -> None:
        """Reports that the loop continues after `step` of `total` steps (0: unknown), also where it begins once more.

        Raises:
            ConfigError: the loop begins at another step than the checkpoint that it was given.
        """
        self._require_resumed(step)
        # verl's driver learns it only now. Begun again, a step that was saved is another state.
        self.saved_step = step if self.session.resume is not None else -1
        self._total = total
        self.session.started(step, total)
        if self.session.has_daemon and self.session.rank == 0 and self._watch is None:
            # Started after `started`: until then the daemon ends the ranks at once, because none of them could save.
            self._watch = ReachWatch(self.session, busy=self._is_busy, leaves=lambda: self.leaves_early)
            self._watch.start()

    def _require_resumed(self, step: int) -> None:
        # A framework may have loaded another state, or its own, after ours: the steps would be trained twice.
        order = checkpoint_order(self.session.resume.resolve().name) if self.session.resume else (0, 0)
        if self.session.has_daemon and order is not None and step != order[0]:
            raise ConfigError(
                "the training did not begin where the daemon told it to",
                where=self.session.resume or "a run without a checkpoint",
                found=f"step {step}",
                expected=f"step {order[0]}",
                remedy="remove from the program what loads or resets a training state by itself, such as "
                "resume_from_checkpoint, ckpt_path or a callback that trains",
            )

    def step_done(self, step: int, metrics: Mapping[str, object], total: int = 0) -> None:
        """Reports that `step` whole steps are done. `total` 0: as given to `begin`."""
        self._total = total or self._total
        self.session.step_done(step, metrics, self._total)

    def asked(self) -> SaveRequest | None:
        """Returns the daemon's request, on all ranks alike, until it is answered. Collective, each step."""
        # All ranks hold the same `request`, so either all of them enter the collective or none.
        if self.request is None and self.session.has_daemon:
            self.request = self._stopper.agree().request
            if self.request is not None and self._watch is not None:
                # The step has ended after all: the loop saves, even where the watcher has refused. The job is being
                # taken down then.
                self._watch.taken(self.request.request_id)
            if self.request is not None and self.request.stop:
                self.stopping = self.request
        return self.request

    def leave_early(self) -> bool:
        """Returns whether the loop has to leave in the middle of its step: the end cannot be reached in time, and the
        state is still that of the last step's end. `asked` then returns the request. For a loop with one speaking
        rank.
        """
        request = self.session.request()
        if request is None or not request.stop or self.session.reach(request).ok:
            return False
        return self.asked() is not None

    def require_run(self) -> None:
        """Raises RanksFailed if RUN is not there: a framework that saves now would make it again. Collective."""
        self.ranks.together("looking for the run", self.session.paths.root.stat)

    def may_write(self, step: int, *, last: bool) -> bool:
        """Returns whether a framework may write its save of `step`. Where not, that save has failed. Collective.

        Raises RanksFailed: the last one has.
        """
        try:
            self.require_run()
        except RanksFailed as error:
            request, self.request = self.request, None
            failure = self._failed(step, error, request)
            if last:
                raise failure from None
            return False
        return True

    def begins(self, step: int) -> None:
        """Marks the begin of the save of `step`, after its `step_done`. A framework that writes by itself calls this
        before; otherwise `save` does.
        """
        # `saving` before the message: from here on the watcher must not end the ranks in the middle of this save.
        self.saving, self._announced = True, step
        # Sent for periodic saves, too: without it the daemon takes a slow save for silence, and at last for a hang.
        self.session.save_started(self.request.request_id if self.request else 0, step)

    def save(
        self,
        step: int,
        store: Store,
        *,
        metrics: Mapping[str, object],
        why: str,
        last: bool = False,
        began: float | None = None,
    ) -> RanksFailed | None:
        """Makes a checkpoint of `step`; answers the open request. Collective.

        A failed save is reported, and the previous checkpoint counts. A step that has a checkpoint is not written
        again: the answer names that one. The last save is tried again if it fails (`LAST_TRIES_S`).

        Args:
            metrics: values that are not finite numbers are left out.
            why: reason for a save that is neither requested nor the last one, for people.
            began: `time.monotonic` when a framework began to write by itself; None: `store` writes.

        Returns:
            The failure; None: it is committed, or is being committed beside the next steps.

        Raises:
            Fenced: a newer attempt owns the run, according to this save or the previous one.
        """
        if not self.session.has_run:
            return None
        since = self.session.clock()
        once = partial(self._save_once, step, store, metrics, why, last)
        failure = once(began)
        # Without the last save all steps since the one before would be done again.
        # What a framework has written by itself is gone with its failed commit.
        for pause_s in LAST_TRIES_S if last and began is None else ():
            if failure is None:
                break
            self.session.notice(f"the last save failed: it is tried again in {pause_s:.0f} s", loud=True)
            self.saving = True  # the watcher must not give the run up in between
            # Alike on all ranks: a failed save fails on all of them.
            time.sleep(pause_s)
            failure = once(None)
        self.session.leave_out(since)
        return failure

    def files(self, name: str, write: Callable[[], None] | None = None, seal: Seal = _wait_for_all) -> Store:
        """Returns a store of what a framework writes: the directory `name` below `work`, which is moved away, or
        removed.

        Args:
            write: writes this rank's files; None: they are written, or `seal` does it.
            seal: collective over the group that it is given, perhaps in a thread. Returns the entries of all files
                that their ranks have made durable and hashed; rank 0 does the others.
        """

        def put(save: LoopSave, request: SaveRequest | None) -> Commit:
            if write is not None:
                self.require_run()
                write()
            written, session = self.work / name, self.session
            # Now: what they tell belongs to this step, and the next one may begin while the files are committed.
            texts = self._texts(save.step)
            # Moved, not copied: the work directory is on the run's file system. So the framework's rotation finds
            # none to delete.
            parts = {guest_directory(self._guest, save.step): written}

            def commit() -> SavedCheckpoint:
                try:
                    # Durable on every rank before rank 0 names the files in a manifest: a commit promises them.
                    sealed = seal(self._side)
                    session.part_saved(request.request_id if request else 0)
                    return self._side.on_first(
                        "committing the checkpoint",
                        lambda: commit_tree(session.paths, save, parts, texts=texts, sealed=sealed),
                        SavedCheckpoint,
                    )
                except RanksFailed:
                    if session.rank == 0:
                        # What was not moved would fill the disk, and make the next save fail, too.
                        shutil.rmtree(written, ignore_errors=True)
                    raise

            return commit

        return put

    def _save_once(
        self,
        step: int,
        store: Store,
        metrics: Mapping[str, object],
        why: str,
        last: bool,
        began: float | None,
    ) -> RanksFailed | None:
        # At most one save is under way, and a fence that it met is raised here, before another one is written.
        self.settle()
        # A save that is due by a request or by the end is tried even on a full disk; a framework's periodic one is
        # skipped there, since it would die of it.
        must = self.request is not None or last
        if self._skips_full and not must and self.saved_step != step and not self._fits(step):
            return None
        if self._announced != step:
            self.begins(step)
        # Taken off before any work: whatever happens below is the answer, and `asked` may look for the next request.
        request, self.request = self.request, None
        if request is not None:
            why = request.why
        elif last:
            why = "all steps are done"
        # The same state: writing it again would spend the grace period on nothing.
        if self.saved_step == step:
            self._answer_with_old(request, f"{why}; nothing new since")
            return None
        if self._keeper is not None:
            # For the notice alone: only the write itself is proof.
            self._keeper.before_save()
        save = LoopSave(
            guest=self._guest,
            step=step,
            attempt=self.session.attempt,
            world_size=self._world_size,
            parent=self.session.resume.name if self.session.resume is not None else None,
            metrics=self.session.numbers(metrics),
            metadata=self._metadata,
            config=self._config,
            began=time.monotonic() if began is None else began,
        )
        try:
            # In the loop's thread: the next step changes the state.
            commit = store(save, request)
            if self._pool is None:
                return self._commit(save, commit, request, why, last)
            # Set before `saving` is cleared: `_is_busy` must not see a gap between the two.
            self._pending = self._pool.submit(self._commit, save, commit, request, why, last)
        except RanksFailed as error:
            return self._failed(step, error, request)
        finally:
            self.saving, self._announced = False, -1
        # A request is answered before the loop goes on to leave; a periodic save ends beside the next steps.
        return self.settle() if must else None

    def settle(self) -> RanksFailed | None:
        """Waits until the previous save is committed, or known to have failed. Raises Fenced as `save`."""
        try:
            return None if self._pending is None else self._pending.result()
        finally:
            self._pending = None  # not before: the watcher must not give up a save that is being waited for

    def leave(self) -> None:
        """Reports that this rank leaves as asked (`stopping`)."""
        assert self.stopping is not None
        self.session.stopped(self.stopping.request_id)

    def end(self) -> None:
        """Ends the loop's saves: no more steps follow. May be called twice. Raises Fenced as `save`."""
        if self._watch is not None:
            # Before the last commit is waited for: the watcher could refuse a request that nobody can answer any
            # more.
            self._watch.stop()
        self.settle()
        if self._pool is not None:
            self._pool.shutdown()
        # Before a stop every second counts, and the next start removes what is left.
        if self._keeper is not None and self.stopping is None:
            self._keeper.close()

    def close(self, *, broken: bool = False) -> None:
        """Ends the loop's saves, its reports, and the group of `own_ranks`. Collective, unless other ranks may be
        anywhere (`broken`).
        """
        # Before the session: a commit that is still running reports its end over it.
        self.end()
        self.session.close()
        if not broken and self.ranks.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.ranks.group)

    def _is_busy(self) -> bool:
        # Read once: the main thread may set it to None between the two questions.
        pending = self._pending
        return self.saving or (pending is not None and not pending.done())

    def _fits(self, step: int) -> bool:
        """Returns whether there is room for a save, as far as the file system says. Collective."""
        room = self._keeper.before_save() if self._keeper is not None else None
        full = room is not None and room.enough is False
        if room is not None and full:
            self.session.notice(f"step {step} is not saved: {room.reason}", loud=True)
        # Rank 0's answer for all: free space changes, and ranks that disagree would hang in the save's collectives.
        return not self.ranks.share(b"full" if full else b"", source=0)

    def _answer_with_old(self, request: SaveRequest | None, why: str) -> None:
        self.saving, self._announced = False, -1
        request_id = request.request_id if request else 0
        name = self.session.paths.checkpoint(self.saved_step).name
        # 0 seconds: this answer measures no save, so it must not enter the prediction of the next one.
        self.session.saved(request_id, name, seconds=0.0, num_bytes=0, reason=why)

    def _commit(
        self, save: LoopSave, commit: Commit, request: SaveRequest | None, why: str, last: bool
    ) -> RanksFailed | None:
        """Collective over `_side`; with `beside` in the thread."""
        failure: RanksFailed | None = None
        try:
            done = commit()
            self._side.first_does("removing older checkpoints", lambda: self._keep(done, request))
        except RanksFailed as error:
            return self._failed(save.step, error, request)
        if done.on_shared:
            # Set by the commit thread with `beside`; the loop reads it after `settle` has waited for that thread.
            self.saved_step = save.step
        elif last:
            # A copy on the nodes' disks alone is no end: the nodes may never come back.
            failure = RanksFailed("the last checkpoint is not on shared storage", found=done.problem)
        self.session.saved(
            request.request_id if request else 0,
            done.name,
            seconds=done.seconds,
            num_bytes=done.num_bytes,
            reason=why,
            on_shared=done.on_shared,
            problem=done.problem,
        )
        return failure

    def _keep(self, done: SavedCheckpoint, request: SaveRequest | None) -> None:
        assert self._keeper is not None
        if done.on_shared:
            # Not tidied before a stop: removing old checkpoints would cost seconds of the grace period.
            self._keeper.saved(done, tidy=request is None or not request.stop)
        else:
            self._keeper.failed(done.problem)

    def _failed(self, step: int, error: RanksFailed, request: SaveRequest | None) -> RanksFailed:
        # A failed save costs that save alone: the previous checkpoint counts, and training goes on.
        self.session.save_failed(request.request_id if request else 0, error.one_line())
        if self._keeper is not None:
            # Here, too: without a daemon nobody else says it.
            sys.stderr.write(f"verl_slurm: save failed: {error.one_line()}\n")
            self._keeper.failed(error.one_line())
        # By class name: another rank may have raised the error, and its text and class name are what travels.
        if Fenced.__name__ in error.kinds:
            where = self.session.paths.checkpoint(step)
            raise Fenced("a newer attempt owns the run", where=where, found=error.found) from error
        return error


def _require_frameworks_own(config: CheckpointConfig) -> None:
    """Refuses settings that only our own saver can follow."""
    for key in ("encryption", "local_dir"):
        if getattr(config, key) is not None:
            raise ConfigError(
                "this loop's framework writes its checkpoints itself, as they are and in one place",
                where=f"checkpoint.{key}",
                found="a value",
                expected="null, or a loop in `with verl_slurm.run(...)`",
                remedy="remove it, or see docs/guests.md",
            )


def seal_own(root: Path, names: Callable[[], Sequence[str]], ranks: Collective) -> tuple[FileEntry, ...]:
    """Makes this rank's files durable and hashes them; returns the entries of all ranks' files on rank 0. Collective.

    Args:
        names: of its files, below `root`.

    Raises:
        RanksFailed: some rank could not.
    """
    # `together`: a full disk on one node must stop all ranks here, not leave the others waiting in the gather.
    made = ranks.together("making the files durable", lambda: door.seal(root, list(names())))
    return gather_entries(made, ranks)


def gather_entries(mine: Sequence[FileEntry], ranks: Collective) -> tuple[FileEntry, ...]:
    """Returns the entries of all ranks on rank 0, and nothing on the others. Collective."""
    everyone = ranks.gather_to_first(msgspec.msgpack.encode(mine))
    return tuple(entry for raw in everyone for entry in msgspec.msgpack.decode(raw, type=list[FileEntry]))


def own_ranks(session: Session, remedy: str) -> Collective:
    """Returns all ranks of a loop, over our own CPU group: the loop's own may be on GPUs, and in use by its reducer.

    Raises:
        ConfigError: they are not those that were started.
    """
    # gloo whatever the loop uses: NCCL would need the messages on a GPU that is busy with the step.
    ranks = Collective(dist.new_group(backend="gloo") if dist.is_initialized() else None)
    if ranks.world_size != session.world_size:
        raise ConfigError(
            "the loop does not train with the ranks that were started",
            found=f"a process group of {ranks.world_size}",
            expected=f"one of {session.world_size} (WORLD_SIZE)",
            remedy=remedy,
        )
    return ranks
