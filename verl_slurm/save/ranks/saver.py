"""Live tensors and runtime states of all ranks into one committed checkpoint, while training goes on.

Collective, and in the background: each rank has a thread for it, and the threads talk over a process group of
their own. Order: rank 0 names the staging directory, while every rank copies its tensors → every rank's saver
process writes and hashes the copy, and the thread the small files → rank 0 gathers the entries and commits. Each
stage is entered only when every rank has done the one before.

Where there is a second copy (`save.ranks.second_copy`), it goes the same way at the same time, and is committed when
it is durable on every node: neither medium waits for the other, and nothing on the way to the nodes' disks asks shared
storage anything (but who owns the run, and not for long). The save is done when both are committed or have failed.
Where no medium took it all, all raise `RanksFailed` and the staging directories are removed.
`checkpoint/format/specification.py` specifies what lies there in the end.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import msgspec

from verl_slurm.base.errors import CheckpointCorrupt, Fenced
from verl_slurm.base.files import private_dir
from verl_slurm.base.keys import load_keys
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.components import Components
from verl_slurm.checkpoint.format.manifest import sealed
from verl_slurm.checkpoint.format.signature import sign
from verl_slurm.checkpoint.format.specification import FileEntry, Manifest
from verl_slurm.checkpoint.store import commit as door
from verl_slurm.config.schema import EncryptionConfig
from verl_slurm.runtime_state.codec import encode
from verl_slurm.runtime_state.format import runtime_state_name
from verl_slurm.save.ranks.attempt import (
    Attempt,
    Committed,
    Contents,
    LocalPlace,
    Plan,
    Provenance,
    SavedCheckpoint,
    manifest_of,
)
from verl_slurm.save.ranks.collective import Collective, RanksFailed
from verl_slurm.save.ranks.medium_results import Small, write_side
from verl_slurm.save.ranks.second_copy import Kept, SecondCopy
from verl_slurm.save.ranks.staging import Staging
from verl_slurm.save.ranks.tensors import Tensors
from verl_slurm.save.writer.media import Medium, why_not_shared
from verl_slurm.save.writer.metadata_files import begin_sealing, cipher_for, seal_small
from verl_slurm.save.writer.protocol import Sealing

__all__ = ["CheckpointSaver", "Contents", "LocalPlace", "Provenance", "SavedCheckpoint"]

_PATIENCE_S = 1.0
"""Storage that is there says who owns the run in less."""


class CheckpointSaver:
    """Saves the same tensors again and again. Collective; made on the main thread of every rank.

    Args:
        domains: `actor`, `critic`, `optimizer` → the live tensors of this rank (`save.ranks.tensors`),
            which stay where they are for as long as this lives.
        epoch_check: raises `Fenced` when this attempt of the run no longer owns it; asked by rank 0.
        local: where this node keeps its second copy; None: nowhere.
        usual_seconds: that a save to shared storage took before; None: nobody knows.
        encryption: where the key is that everything is encrypted and signed with; None: with none.

    Raises:
        KeyRefused, PermissionRefused: `keys.load_keys`.
    """

    def __init__(
        self,
        paths: RunPaths,
        domains: Mapping[str, Tensors],
        provenance: Provenance,
        ranks: Collective,
        *,
        epoch_check: Callable[[], None],
        local: LocalPlace | None = None,
        usual_seconds: float | None = None,
        encryption: EncryptionConfig | None = None,
    ) -> None:
        self._keys = load_keys(encryption)
        self._paths, self._provenance, self._epoch_check = paths, provenance, epoch_check
        self._local = local
        self._second = None if local is None else SecondCopy(ranks, local)
        self._last_seconds = usual_seconds
        self._staging_dir: door.Staging | None = None
        # The main thread talks over `ranks` meanwhile: two conversations on one group would mix.
        self._ranks = ranks.another()
        self._staging = Staging(domains, ranks, encryption=encryption)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    @property
    def arena_bytes(self) -> int:
        """Memory of this rank that saving takes, beside the state itself."""
        return self._staging.num_bytes

    def begin(
        self,
        contents: Contents,
        then: Callable[[Collective, "SavedCheckpoint"], None] | None = None,
        *,
        seconds_left: float | None = None,
        components: Components = (),
        on_kept: Callable[["SavedCheckpoint"], None] | None = None,
        on_part: Callable[[], None] | None = None,
    ) -> "Future[SavedCheckpoint]":
        """Save the state as it is now, at the position that `contents.runtime` names. Returns at once.

        Until `fence` was called, nobody may change the tensors. The save before must be done.

        Args:
            then: done on every rank after the commit, in the background; it may talk to the other ranks'. It
                must not raise.
            seconds_left: until the ranks must be gone: where shared storage would take longer, only the local
                copy is written. Rank 0's counts.
            components: of a partial save, the domains; it goes to `RunPaths.partial` and has no second copy. Empty:
                a full one.
            on_kept: where this is given (on all ranks or none), the local copy is read back as soon as it is
                committed, and if shared storage still has not got it then, this is told so: what it is told is a
                save that nothing can undo, and the answer if there is to be one at once. Called from a thread of
                its own, once at most, before or after the result is there.
            on_part: told when this rank's own files are durable on a medium, from a thread of its own.

        Returns:
            The same on every rank, once it is durable. It raises `RanksFailed` on every rank alike when some
            rank failed; nothing is left of the attempt then. Where rank 0 was fenced off, `Fenced` is among
            its `kinds`.
        """
        attempt = Attempt(
            paths=self._paths.partial if components else self._paths,
            contents=contents,
            components=components,
            local=None if components else self._local,
            started=time.monotonic(),
            seconds_left=seconds_left,
            on_kept=on_kept,
            on_part=on_part,
        )
        plan: Future[Plan] = Future()
        staged = self._staging.begin(
            lambda: list(attempt.directories(plan.result()).values()),
            components,
            lambda: plan.result().sealing,
            lambda written: attempt.answered(plan.result(), written),
            hurry=on_kept is not None,
        )
        staged.add_done_callback(attempt.ended)
        return self._thread.submit(self._save, attempt, plan, staged, then)

    def fence(self) -> float:
        """Wait until the tensors may be changed; the seconds it took."""
        return self._staging.fence()

    def close(self) -> None:
        """Let a save that is under way come to its end, and give the memory back."""
        self._thread.shutdown()
        if self._second is not None:
            self._second.close()
        self._staging.close()

    def _save(
        self,
        attempt: "Attempt",
        plan: "Future[Plan]",
        staged: "Future[None]",
        then: Callable[[Collective, "SavedCheckpoint"], None] | None,
    ) -> "SavedCheckpoint":
        self._staging_dir = None
        try:
            try:
                plan.set_result(
                    msgspec.msgpack.decode(
                        self._ranks.on_first("starting the save", lambda: self._plan(attempt)),
                        type=Plan,
                    )
                )
            except BaseException as error:
                plan.set_exception(error)  # the staging thread waits for it
                wait([staged])
                raise
            done = self._write_and_commit(attempt, plan.result())
        except BaseException:
            self._clean(attempt, plan)
            raise
        if then is not None:
            then(self._ranks, done)
        return done

    def _plan(self, attempt: "Attempt") -> bytes:
        """Rank 0: the staging directory's name, and why shared storage takes no part, if it does not."""
        runtime, paths = attempt.contents.runtime, attempt.paths
        has_local = attempt.local is not None
        reason = why_not_shared(self._last_seconds, attempt.seconds_left, has_local=has_local)
        if attempt.components:
            private_dir(paths.root)
        # With a second copy shared storage is asked for nothing here: it may be gone and never answer. Each rank,
        # and its saver, makes the directory for itself.
        make = door.name_staging if has_local else door.begin
        staging = make(paths, runtime.step, runtime.safe_point)
        self._staging_dir = None if reason else staging
        sealing = begin_sealing(self._keys, staging.final.name)
        return msgspec.msgpack.encode(Plan(staging.directory.name, reason, sealing))

    def _write_and_commit(self, attempt: "Attempt", plan: "Plan") -> "SavedCheckpoint":
        media = attempt.directories(plan)
        # Training may be waiting for the copy; what comes now would only take the interpreter from it.
        self._staging.fence()
        small = self._small_files(attempt, plan.sealing)
        keeping: Future[Kept] | None = None
        if self._second is not None and Medium.LOCAL in media:
            keeping = self._second.begin(
                attempt,
                media[Medium.LOCAL],
                small,
                lambda entries: self._manifest_for_nodes(attempt, plan.sealing, entries),
            )
        failed: dict[Medium, str] = {}
        kinds: frozenset[str] = frozenset()
        num_bytes = 0
        try:
            if plan.not_shared:
                # Storage that is not tried because it is slow may not answer this, either.
                threading.Thread(target=self._ask_owner, args=(attempt,), daemon=True).start()
                failed[Medium.SHARED] = plan.not_shared
            else:
                committed = self._commit_shared(attempt, plan, media[Medium.SHARED], small)
                num_bytes = committed.num_bytes
                if committed.problem:
                    failed[Medium.SHARED] = committed.problem
        except RanksFailed as error:
            if keeping is None:
                raise
            # A dead saver, too: what the nodes' disks have by then counts, and the next save says that it is dead.
            failed[Medium.SHARED], kinds = _text(error), error.kinds
        finally:
            if keeping is not None:
                wait([keeping])
        if self._second is not None and keeping is not None:
            try:
                kept = keeping.result()
                problem, num_bytes = kept.problem, num_bytes or kept.num_bytes
                if Medium.SHARED in failed and not problem and Fenced.__name__ not in kinds:
                    problem = self._second.read_back(kept)  # nobody else will
            except RanksFailed as error:
                problem, kinds = _text(error), kinds | error.kinds
            if problem:
                failed[Medium.LOCAL] = problem
        if all(medium in failed for medium in media) or Fenced.__name__ in kinds:
            lost = RanksFailed("writing the checkpoint failed", found="; ".join(failed.values()))
            lost.kinds = kinds
            raise lost
        if self._second is not None and Medium.LOCAL in media and Medium.LOCAL not in failed:
            self._second.prune()
        runtime = attempt.contents.runtime
        return SavedCheckpoint(
            name=attempt.paths.checkpoint(runtime.step, runtime.safe_point).name,
            seconds=time.monotonic() - attempt.started,
            num_bytes=num_bytes,
            on_shared=Medium.SHARED not in failed,
            problem="; ".join(f"not on {medium}: {text}" for medium, text in failed.items()),
        )

    def _commit_shared(
        self, attempt: "Attempt", plan: "Plan", directory: Path, small: "Future[Small]"
    ) -> "Committed":
        """What became of the save on shared storage."""
        two = attempt.local is not None
        side = write_side(
            self._ranks,
            directory,
            small,
            attempt.answers[Medium.SHARED],
            first=(lambda: self._require_owner(attempt)) if two else (lambda: None),
            on_part=attempt.on_part,
        )
        if side.problem and not two:
            raise RanksFailed("writing the checkpoint failed", found=side.problem)
        committed = Committed(0, side.problem)
        if not side.problem:
            committed = msgspec.msgpack.decode(
                self._ranks.on_first(
                    "committing the checkpoint", lambda: self._commit(attempt, plan.sealing, side.entries)
                ),
                type=Committed,
            )
        if committed.problem:
            if self._staging_dir is not None:
                with suppress(OSError):  # what is broken cannot be tidied, either; the next sweep does that
                    door.abort(self._staging_dir)
        else:
            attempt.on_shared.set()
            if not attempt.components:
                self._last_seconds = time.monotonic() - attempt.started
        return committed

    def _commit(self, attempt: "Attempt", sealing: Sealing | None, entries: list[FileEntry]) -> bytes:
        """Rank 0: shared storage has it all."""
        assert self._staging_dir is not None
        problem = ""
        manifest = self._manifest(attempt, sealing, entries)
        try:
            door.commit(self._staging_dir, manifest, epoch_check=self._epoch_check, keys=self._keys)
        except (OSError, CheckpointCorrupt) as error:
            if attempt.local is None:
                raise
            problem = f"{type(error).__name__}: {error}"
        return msgspec.msgpack.encode(Committed(manifest.num_bytes, problem))

    def _manifest_for_nodes(
        self, attempt: "Attempt", sealing: Sealing | None, entries: list[FileEntry]
    ) -> Manifest:
        """Rank 0: the same, unless it is known by now that the run belongs to somebody else.

        Without shared storage nobody can say so; whoever brings the parts home asks again.
        """
        wait([attempt.owned], timeout=_PATIENCE_S)
        if attempt.owned.done():
            attempt.owned.result()
        return self._manifest(attempt, sealing, entries)

    def _manifest(self, attempt: "Attempt", sealing: Sealing | None, entries: list[FileEntry]) -> Manifest:
        """Rank 0: one for all media, so that the copies are the same."""

        def make() -> Manifest:
            runtime = attempt.contents.runtime
            name = attempt.paths.checkpoint(runtime.step, runtime.safe_point).name
            manifest = sealed(manifest_of(name, attempt, self._provenance, entries, sealing))
            return manifest if self._keys is None else sign(manifest, self._keys.current)

        return attempt.made.get(make)

    def _ask_owner(self, attempt: "Attempt") -> None:
        """Rank 0: whether the run is still ours, for a medium that cannot tell."""
        if self._ranks.rank:
            return
        try:
            with suppress(OSError):  # nobody can say
                self._epoch_check()
        except Exception as error:  # noqa: BLE001 - for whoever asks
            attempt.owned.set_exception(error)
        else:
            attempt.owned.set_result(None)

    def _require_owner(self, attempt: "Attempt") -> None:
        """Before anything is written: the nodes' parts are not to be committed for a run that is another's."""
        self._ask_owner(attempt)
        if not self._ranks.rank:
            attempt.owned.result()

    def _clean(self, attempt: "Attempt", plan: "Future[Plan]") -> None:
        """Nothing half-made of a failed save stays behind."""
        with suppress(OSError):
            if self._staging_dir is not None:
                door.abort(self._staging_dir)
            if self._second is not None and attempt.local is not None and plan.exception() is None:
                self._second.drop(plan.result().name)

    def _small_files(self, attempt: "Attempt", sealing: Sealing | None) -> "Future[Small]":
        """What is not a tensor, encrypted once where a key is configured: its nonces serve once."""
        done: Future[Small] = Future()
        try:
            contents = attempt.contents
            indexes = {
                path: data for path, data in self._staging.layout.indexes.items() if attempt.takes(path)
            }
            files = dict(contents.texts) | indexes if self._ranks.rank == 0 else {}
            files[runtime_state_name(self._ranks.rank)] = encode(contents.runtime)
            done.set_result(Small(*seal_small(files, cipher_for(self._keys, sealing))))
        except Exception as error:  # noqa: BLE001 - all ranks hear of it where they write
            done.set_exception(error)
        return done


def _text(error: RanksFailed) -> str:
    return str(error.found or error)
