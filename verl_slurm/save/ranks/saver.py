"""Saves live tensors and runtime states of all ranks as one committed checkpoint, while training goes on.

Collective, in the background: each rank has the thread "checkpoint" for it, and these threads have a process group of
their own. Three stages, each entered when every rank has left the one before:

1. rank 0 names the staging directory, while every rank copies its tensors;
2. every rank's writer process writes and hashes the copy, and its thread the small files;
3. rank 0 gathers the entries and commits.

A second copy (`save.ranks.second_copy`) takes the same way at the same time, and is committed when it is durable on
every node. Neither medium waits for the other. The way to the nodes' disks asks shared storage one thing, who owns
the run, and waits a second at most for the answer. The save is done when both are committed or have failed. If no
medium took it all, all ranks raise `RanksFailed` and the staging directories are removed.

`save/THREADS.md` draws the threads. `checkpoint/format/specification.py` specifies the files.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

from verl_slurm.base.errors import CheckpointCorrupt, Fenced
from verl_slurm.base.files import private_dir
from verl_slurm.base.keys import load_keys
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.components import Components
from verl_slurm.checkpoint.format.manifest import sealed
from verl_slurm.checkpoint.format.signature import sign
from verl_slurm.checkpoint.format.specification import FileEntry, Manifest
from verl_slurm.checkpoint.store import commit as door
from verl_slurm.checkpoint.store.commit import SavedCheckpoint as SavedCheckpoint
from verl_slurm.config.schema import EncryptionConfig
from verl_slurm.runtime_state.codec import encode
from verl_slurm.runtime_state.format import runtime_state_name
from verl_slurm.save.ranks.collective import Collective, RanksFailed
from verl_slurm.save.ranks.medium_results import write_to_medium
from verl_slurm.save.ranks.pending_save import (
    LocalPlace as LocalPlace,
    Medium,
    MediumResult,
    PendingSave,
    Provenance as Provenance,
    SaveContents as SaveContents,
    SavePlan,
    manifest_of,
    why_not_shared,
)
from verl_slurm.save.ranks.second_copy import NodeCopies
from verl_slurm.save.ranks.staging import Staging
from verl_slurm.save.ranks.tensors import Tensors
from verl_slurm.save.writer.file_sealing import begin_sealing, cipher_for, seal_small
from verl_slurm.save.writer.protocol import Sealing, Write

# Reachable storage answers who owns the run in less.
_PATIENCE_S = 1.0


class CheckpointSaver:
    """Saves the same tensors again and again. Collective; made on the main thread of every rank.

    Args:
        domains: `actor`, `critic`, `optimizer` → the live tensors of this rank (`save.ranks.tensors`), which
            stay where they are until the next `lay_out`.
        attempt_check: raises `Fenced` when this attempt of the run no longer owns it; asked by rank 0.
        usual_seconds: that a save to shared storage took before; None: not known.

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
        attempt_check: Callable[[], None],
        local: LocalPlace | None = None,
        usual_seconds: float | None = None,
        encryption: EncryptionConfig | None = None,
    ) -> None:
        # First: a missing or open key ends the run here, before threads and processes exist that would have to be
        # ended.
        self._keys = load_keys(encryption)
        self._paths, self._provenance, self._attempt_check = paths, provenance, attempt_check
        self._local = local
        # Before `another` and `Staging` below, in the same order on every rank: making a process group is collective.
        self._second = None if local is None else NodeCopies(ranks, local)
        self._last_seconds = usual_seconds
        # The main thread talks over `ranks` meanwhile: two conversations on one group would mix.
        self._ranks = ranks.another()
        self._staging = Staging(domains, ranks, encryption=encryption)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    @property
    def arena_bytes(self) -> int:
        """Memory of this rank that saving takes, beside the state itself."""
        return self._staging.num_bytes

    def lay_out(self, domains: Mapping[str, Tensors]) -> None:
        """Takes other tensors from the next save on (`Staging.lay_out`). Collective, on the main thread."""
        self._staging.lay_out(domains)

    def begin(
        self,
        contents: SaveContents,
        then: Callable[[Collective, SavedCheckpoint], None] | None = None,
        *,
        seconds_left: float | None = None,
        components: Components = (),
        on_kept: Callable[[SavedCheckpoint], None] | None = None,
        on_part: Callable[[], None] | None = None,
    ) -> "Future[SavedCheckpoint]":
        """Saves the state as it is now, at the position that `contents.runtime` names. Returns at once.

        The tensors must not change until `fence` has returned. The save before must be done. Main thread.

        Args:
            then: called on every rank after the commit, by the thread "checkpoint"; it may use the collective
                that it is given. It must not raise.
            seconds_left: until the ranks must be gone: where shared storage would take longer, only the local
                copy is written. Rank 0's counts.
            components: of a partial save, the domains; it goes to `RunPaths.partial` and has no second copy.
            on_kept: given on all ranks or none. With it the local copy is read back once it is committed. If
                shared storage does not have the checkpoint by then, this is called with a save that nothing
                can undo. By the thread "second-copy", once at most, before or after the result is there.
            on_part: called when this rank's own files are durable on a medium, by the medium's thread.

        Returns:
            The same on every rank, once it is durable. It raises `RanksFailed` on every rank alike if some
            rank failed; nothing is left of the save then. If rank 0 was fenced off, its `kinds` have `Fenced`.
        """
        # A partial save has neither a second copy nor a place among the full ones: no resume may find it.
        save = PendingSave(
            paths=self._paths.partial if components else self._paths,
            contents=contents,
            components=components,
            local=None if components else self._local,
            started=time.monotonic(),
            seconds_left=seconds_left,
            on_kept=on_kept,
            on_part=on_part,
        )
        # The copy begins at once, on its own thread. The plan needs an exchange between ranks, which may take longer
        # than the copy, and training waits for the copy.
        staged = self._staging.begin(save.request, save.answered)
        staged.add_done_callback(save.ended)
        # One worker: two saves never overlap, since the arena holds one state.
        return self._thread.submit(self._save, save, staged, then)

    def fence(self) -> float:
        """Wait until the tensors may be changed; the seconds it took."""
        return self._staging.fence()

    def close(self) -> None:
        """Wait for a save under way, end the writer process and release the arena."""
        self._thread.shutdown()
        if self._second is not None:
            self._second.close()
        self._staging.close()

    def _save(
        self,
        save: PendingSave,
        staged: "Future[None]",
        then: Callable[[Collective, SavedCheckpoint], None] | None,
    ) -> SavedCheckpoint:
        try:
            try:
                # Rank 0 decides name, media and salt, because ranks that decided for themselves (by their own clock,
                # their own random bits) would write to different places.
                plan = self._ranks.on_first("starting the save", lambda: self._plan(save), SavePlan)
                # `directories` is complete before `request` is set: the staging thread reads it when the answers come.
                save.planned(plan)
                save.request.set_result(self._request(save, plan))
            except BaseException as error:
                save.request.set_exception(error)  # the staging thread waits for it
                # The copy still reads live tensors; nobody may clean up or start the next save before it is over.
                wait([staged])
                raise
            done = self._write_and_commit(save, plan)
        # Whatever failed: what a dead save leaves takes room until the next start sweeps it.
        except BaseException:
            self._clean(save)
            raise
        if then is not None:
            then(self._ranks, done)
        return done

    def _plan(self, save: PendingSave) -> SavePlan:
        """Rank 0: the staging directory's name, and why shared storage takes no part, if it does not."""
        runtime, paths = save.contents.runtime, save.paths
        has_local = save.local is not None
        # By rank 0's clock and measure for all: ranks that judged for themselves could disagree about the media.
        reason = why_not_shared(self._last_seconds, save.seconds_left, has_local=has_local)
        if save.components:
            private_dir(paths.root, inside=paths.run)
        # With a second copy shared storage is asked for nothing here: it may be gone and never answer. Each rank,
        # and its writer process, makes the directory for itself.
        make = door.name_staging if has_local else door.begin
        staging = make(paths, runtime.step, runtime.safe_point)
        # None means for `_clean` that nothing on shared storage is ours to remove.
        save.staging = None if reason else staging
        # One salt for each save, drawn here: a chunk's nonce is its number, so a salt that served twice would repeat
        # nonces.
        sealing = begin_sealing(self._keys, staging.final.name)
        return SavePlan(staging.directory.name, reason, sealing)

    def _request(self, save: PendingSave, plan: SavePlan) -> Write:
        return Write(
            files=tuple(file for file in self._staging.layout.files if save.takes(file.path)),
            directories=tuple(str(directory) for directory in save.directories.values()),
            sealing=plan.sealing,
        )

    def _write_and_commit(self, save: PendingSave, plan: SavePlan) -> SavedCheckpoint:
        # Training may be waiting for the copy; the work below would take the interpreter from it.
        self._staging.fence()
        # Before the second copy begins: both media write these very bytes.
        self._seal_small_files(save, plan.sealing)
        copying: Future[MediumResult] | None = None
        if self._second is not None and Medium.LOCAL in save.directories:
            # Before anything of shared storage, whose first system call may never return.
            copying = self._second.begin(
                save, lambda entries: self._manifest_for_nodes(save, plan.sealing, entries)
            )
        failed: dict[Medium, str] = {}
        kinds: frozenset[str] = frozenset()
        num_bytes = 0
        try:
            if plan.not_shared:
                # Storage that is not tried because it is slow may not answer this, either.
                # A daemon thread: a call that hangs in the kernel cannot be ended, and must not keep the process alive.
                threading.Thread(target=self._ask_owner, args=(save,), name="owner", daemon=True).start()
                # Counts as failed from here on: the save is then reported with one copy, and that copy is read back.
                failed[Medium.SHARED] = plan.not_shared
            else:
                shared = self._commit_shared(save, plan)
                num_bytes = shared.num_bytes
                if shared.problem:
                    failed[Medium.SHARED] = shared.problem
        except RanksFailed as error:
            # With one medium there is nothing left to save.
            if copying is None:
                raise
            # A dead writer process, too: the parts on the nodes' disks count, and the next save reports it dead.
            failed[Medium.SHARED], kinds = _text(error), error.kinds
        finally:
            if copying is not None:
                # In any case: the thread "second-copy" uses `save` and its collectives, and must be out of them before
                # `_clean`.
                wait([copying])
        if self._second is not None and copying is not None:
            try:
                local = copying.result()
                problem, num_bytes = local.problem, num_bytes or local.num_bytes
                if Medium.SHARED in failed and not problem and Fenced.__name__ not in kinds:
                    # With a single copy left, "written" is not enough for a promise. A fenced attempt has nothing to
                    # promise.
                    problem = self._second.read_back(save)  # nobody else will
            except RanksFailed as error:
                problem, kinds = _text(error), kinds | error.kinds
            if problem:
                failed[Medium.LOCAL] = problem
        # `Fenced` outweighs a medium that succeeded: another attempt owns the run, and this save must not be reported.
        if all(medium in failed for medium in save.directories) or Fenced.__name__ in kinds:
            lost = RanksFailed("writing the checkpoint failed", found="; ".join(failed.values()))
            lost.kinds = kinds
            raise lost
        # Older parts go after the new one is known to be kept: before, a crash here could leave none.
        if self._second is not None and Medium.LOCAL in save.directories and Medium.LOCAL not in failed:
            self._second.prune()
        return save.saved(
            num_bytes=num_bytes,
            on_shared=Medium.SHARED not in failed,
            problem="; ".join(f"not on {medium}: {text}" for medium, text in failed.items()),
        )

    def _commit_shared(self, save: PendingSave, plan: SavePlan) -> MediumResult:
        two = save.local is not None
        result = write_to_medium(
            self._ranks,
            save,
            Medium.SHARED,
            # With one medium the commit asks right before the rename, and that is enough. With two, the nodes' parts
            # are committed without shared storage, so the owner is asked before they can be.
            first=(lambda: self._require_owner(save)) if two else (lambda: None),
        )
        # `result` is the same on every rank, so all ranks raise or none does.
        if result.problem and not two:
            raise RanksFailed("writing the checkpoint failed", found=result.problem)
        if not result.problem:
            entries = result.entries
            result = self._ranks.on_first(
                "committing the checkpoint", lambda: self._commit(save, plan.sealing, entries), MediumResult
            )
        if result.problem:
            if save.staging is not None:
                with suppress(OSError):  # broken storage cannot be tidied, either; the next sweep does that
                    door.abort(save.staging)
        else:
            # After the commit has returned, which is after the fsync of the directory: "second-copy" takes this for a
            # promise.
            save.on_shared.set()
            if not save.components:
                # A partial save is smaller: its time would promise too much for the next full one.
                self._last_seconds = time.monotonic() - save.started
        return result

    def _commit(
        self, save: PendingSave, sealing: Sealing | None, entries: tuple[FileEntry, ...]
    ) -> MediumResult:
        assert save.staging is not None
        problem = ""
        manifest = self._manifest(save, sealing, entries)
        try:
            door.commit(save.staging, manifest, attempt_check=self._attempt_check, keys=self._keys)
        except (OSError, CheckpointCorrupt) as error:
            # With a second copy a failed commit is a problem of one medium. Other errors, `Fenced` among them, are
            # raised either way and end the save on both.
            if save.local is None:
                raise
            problem = f"{type(error).__name__}: {error}"
        return MediumResult(num_bytes=manifest.num_bytes, problem=problem)

    def _manifest_for_nodes(
        self, save: PendingSave, sealing: Sealing | None, entries: tuple[FileEntry, ...]
    ) -> Manifest:
        """Rank 0: as `_manifest`; raises `Fenced` if it is known by now that another attempt owns the run."""
        wait([save.owned], timeout=_PATIENCE_S)
        # Not answered within the limit: the storage is away. Then the parts are committed for an owner that is not
        # known, and the start that brings them home compares attempts.
        if save.owned.done():
            save.owned.result()
        return self._manifest(save, sealing, entries)

    def _manifest(
        self, save: PendingSave, sealing: Sealing | None, entries: tuple[FileEntry, ...]
    ) -> Manifest:

        def make() -> Manifest:
            manifest = sealed(manifest_of(save, self._provenance, entries, sealing))
            return manifest if self._keys is None else sign(manifest, self._keys.current)

        return save.manifest(make)

    def _ask_owner(self, save: PendingSave) -> None:
        """Rank 0: whether the run is still ours, for a medium that cannot tell."""
        if self._ranks.rank:
            return
        try:
            with suppress(OSError):  # unreachable storage does not say
                self._attempt_check()
        # Whatever happens the future is set: "second-copy" waits for it.
        except Exception as error:  # noqa: BLE001 - raised where `owned` is read
            save.owned.set_exception(error)
        else:
            save.owned.set_result(None)

    def _require_owner(self, save: PendingSave) -> None:
        self._ask_owner(save)
        if not self._ranks.rank:
            save.owned.result()

    def _clean(self, save: PendingSave) -> None:
        with suppress(OSError):
            if save.staging is not None:
                door.abort(save.staging)
            if self._second is not None and Medium.LOCAL in save.directories:
                self._second.drop(save.directories[Medium.LOCAL])

    def _seal_small_files(self, save: PendingSave, sealing: Sealing | None) -> None:
        """Set `save.small`, once for all media: with a key its nonces serve once."""
        try:
            indexes = {path: data for path, data in self._staging.layout.indexes.items() if save.takes(path)}
            # The index describes all ranks' files and is the same everywhere, so one rank writes it.
            files = dict(save.contents.texts) | indexes if self._ranks.rank == 0 else {}
            files[runtime_state_name(self._ranks.rank)] = encode(save.contents.runtime)
            save.small.set_result(seal_small(files, cipher_for(self._keys, sealing)))
        except Exception as error:  # noqa: BLE001 - all ranks hear of it where they write
            save.small.set_exception(error)


def _text(error: RanksFailed) -> str:
    return str(error.found or error)
