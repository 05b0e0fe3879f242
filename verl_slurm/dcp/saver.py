"""Live tensors and runtime states of all ranks into one committed checkpoint, while training goes on.

Collective, and in the background: each rank has a thread for it, and the threads talk over a process group of
their own. Order: rank 0 begins and names the staging directory, while every rank copies its tensors → every
rank's saver process writes and hashes the copy, and the thread seals the small files → rank 0 gathers the
entries and commits → the first rank of each node commits the node's own part (`checkpoint/local_copy.py`), where
there is one. Each stage is entered only when every rank has done the one before; where no medium took it all, all
raise `RanksFailed` and the staging directories are removed. `checkpoint/format.py` specifies what lies there in
the end.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import msgspec

from verl_slurm.checkpoint import commit as door
from verl_slurm.checkpoint.components import Components
from verl_slurm.checkpoint.format import FileEntry, Manifest
from verl_slurm.checkpoint.local_copy import (
    commit_part,
    drop_staging,
    part_problems,
    prune_parts,
)
from verl_slurm.checkpoint.manifest import parse, render, sealed
from verl_slurm.checkpoint.signature import sign
from verl_slurm.config.schema import EncryptionConfig
from verl_slurm.dcp.attempt import (
    Attempt,
    Committed,
    Contents,
    LocalPlace,
    Plan,
    Provenance,
    SavedCheckpoint,
    manifest_of,
)
from verl_slurm.dcp.collective import Collective, RanksFailed
from verl_slurm.dcp.staging import Staging
from verl_slurm.dcp.tensors import Tensors
from verl_slurm.errors import CheckpointCorrupt, VerlSlurmError
from verl_slurm.files import private_dir
from verl_slurm.keys import load_keys
from verl_slurm.paths import RunPaths
from verl_slurm.runtime_state.codec import encode
from verl_slurm.runtime_state.format import runtime_state_name
from verl_slurm.save_path.media import Medium, Share, failures, why_not_shared
from verl_slurm.save_path.protocol import Sealing, Written
from verl_slurm.save_path.small_files import begin_sealing, cipher_for, seal_small, write_small

__all__ = ["CheckpointSaver", "Contents", "LocalPlace", "Provenance", "SavedCheckpoint"]


class CheckpointSaver:
    """Saves the same tensors again and again. Collective; made on the main thread of every rank.

    Args:
        domains: `actor`, `critic`, `optimizer` → the live tensors of this rank (`dcp.tensors`),
            which stay where they are for as long as this lives.
        epoch_check: raises `Fenced` when this incarnation no longer owns the run; asked by rank 0.
        local: where this node keeps its second copy; None: nowhere.
        usual_seconds: that a save to shared storage took before; None: nobody knows.
        encryption: where the key is that everything is encrypted and signed with; None: with none.

    Raises:
        KeyRefused, PermissionRefused: `keys.load_keys`.

    Called by: trainer.saving.
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
        )
        plan: Future[Plan] = Future()
        written = self._staging.begin(
            lambda: list(attempt.directories(plan.result()).values()),
            components,
            lambda: plan.result().sealing,
        )
        return self._thread.submit(self._save, attempt, plan, written, then)

    def fence(self) -> float:
        """Wait until the tensors may be changed; the seconds it took."""
        return self._staging.fence()

    def close(self) -> None:
        """Let a save that is under way come to its end, and give the memory back."""
        self._thread.shutdown()
        self._staging.close()

    def _save(
        self,
        attempt: "Attempt",
        plan: "Future[Plan]",
        written: "Future[Written]",
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
                wait([written])
                raise
            done = self._write_and_commit(attempt, plan.result(), written)
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
        if not reason:
            try:
                if attempt.components:
                    private_dir(paths.root)
                self._staging_dir = door.begin(paths, runtime.step, runtime.safe_point)
            except (OSError, VerlSlurmError) as error:
                if not has_local:
                    raise
                reason = f"{type(error).__name__}: {error}"
        if self._staging_dir is not None:
            name = self._staging_dir.directory.name
        else:
            name = door.staging_path(paths, runtime.step, runtime.safe_point).name
        sealing = begin_sealing(self._keys, paths.checkpoint(runtime.step, runtime.safe_point).name)
        return msgspec.msgpack.encode(Plan(name, reason, sealing))

    def _write_and_commit(
        self, attempt: "Attempt", plan: "Plan", written: "Future[Written]"
    ) -> "SavedCheckpoint":
        media = attempt.directories(plan)

        def write() -> Share:
            try:
                small, failed = self._write_small(media, attempt, plan.sealing)
            finally:
                wait([written])  # whoever cleans up must not do so under a saver that writes
            answer = written.result()
            for medium, outcome in zip(media, answer.outcomes, strict=True):
                if outcome.error is not None:
                    failed.setdefault(medium, outcome.error)
            return Share((*small, *answer.files), {str(medium): text for medium, text in failed.items()})

        mine = self._ranks.together("writing the checkpoint", write)
        shares = [
            msgspec.msgpack.decode(part, type=Share)
            for part in self._ranks.gather(msgspec.msgpack.encode(mine))
        ]
        failed = failures(shares)
        if plan.not_shared:
            failed[Medium.SHARED] = plan.not_shared
        self._require_one(media, failed)
        entries = [entry for share in shares for entry in share.entries]
        verdict = msgspec.msgpack.decode(
            self._ranks.on_first(
                "committing the checkpoint",
                lambda: self._commit_shared(attempt, plan.sealing, entries, failed),
            ),
            type=Committed,
        )
        manifest = parse(verdict.manifest, where=plan.name)
        if verdict.problem:
            failed[Medium.SHARED] = verdict.problem
            if self._staging_dir is not None:
                with suppress(OSError):  # what is broken cannot be tidied, either; the next sweep does that
                    door.abort(self._staging_dir)
        if Medium.LOCAL in media and Medium.LOCAL not in failed:
            problem = self._commit_local(attempt, media[Medium.LOCAL], manifest, check=bool(verdict.problem))
            if problem:
                failed[Medium.LOCAL] = problem
        self._require_one(media, failed)
        seconds = time.monotonic() - attempt.started
        if Medium.SHARED not in failed and not attempt.components:
            self._last_seconds = seconds
        return SavedCheckpoint(
            name=manifest.name,
            seconds=seconds,
            num_bytes=manifest.num_bytes,
            on_shared=Medium.SHARED not in failed,
            problem="; ".join(f"not on {medium}: {text}" for medium, text in failed.items()),
        )

    def _require_one(self, media: Mapping[Medium, Path], failed: Mapping[Medium, str]) -> None:
        """The same on every rank."""
        if all(medium in failed for medium in media):
            raise RanksFailed("writing the checkpoint failed", found="; ".join(failed.values()))

    def _commit_shared(
        self,
        attempt: "Attempt",
        sealing: Sealing | None,
        entries: list[FileEntry],
        failed: Mapping[Medium, str],
    ) -> bytes:
        """Rank 0: the manifest, and what kept shared storage from being committed, if anything did."""
        runtime = attempt.contents.runtime
        name = attempt.paths.checkpoint(runtime.step, runtime.safe_point).name
        manifest = sealed(manifest_of(name, attempt, self._provenance, entries, sealing))
        if self._keys is not None:
            manifest = sign(manifest, self._keys.current)  # for the nodes' parts, too
        problem = failed.get(Medium.SHARED, "")
        if self._staging_dir is not None and not problem:
            try:
                door.commit(self._staging_dir, manifest, epoch_check=self._epoch_check, keys=self._keys)
            except (OSError, CheckpointCorrupt) as error:
                if attempt.local is None or Medium.LOCAL in failed:
                    raise
                problem = f"{type(error).__name__}: {error}"
        else:
            self._check_epoch_if_readable()
        return msgspec.msgpack.encode(Committed(render(manifest), problem))

    def _check_epoch_if_readable(self) -> None:
        """Without shared storage nobody can say who owns the run; whoever brings the parts home asks again."""
        with suppress(OSError):
            self._epoch_check()

    def _commit_local(self, attempt: "Attempt", staging: Path, manifest: Manifest, *, check: bool) -> str:
        """This node's part; what is wrong on any node, the same text on every rank.

        Args:
            check: read it back: nobody else will.
        """
        local, problem = attempt.local, ""
        assert local is not None
        if local.is_first:
            try:
                part = commit_part(staging, manifest)
                problem = "; ".join(part_problems(part)[:3]) if check else ""
                if problem:
                    drop_staging(part.path)
            except (OSError, VerlSlurmError) as error:
                problem = f"{type(error).__name__}: {error}"
        texts = [text.decode() for text in self._ranks.gather(problem.encode())]
        if local.is_first and not any(texts):  # older ones go only when every node has this one
            with suppress(OSError):
                prune_parts(local.directory, local.keep)
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)[:500]

    def _clean(self, attempt: "Attempt", plan: "Future[Plan]") -> None:
        """Nothing of a failed save stays behind."""
        with suppress(OSError):
            if self._staging_dir is not None:
                door.abort(self._staging_dir)
            local = attempt.local
            if local is not None and local.is_first and plan.exception() is None:
                drop_staging(local.directory / plan.result().name)

    def _write_small(
        self, media: Mapping[Medium, Path], attempt: "Attempt", sealing: Sealing | None
    ) -> tuple[list[FileEntry], dict[Medium, str]]:
        """What is not a tensor, encrypted once where a key is configured, and made durable on each medium."""
        contents = attempt.contents
        indexes = {path: data for path, data in self._staging.layout.indexes.items() if attempt.takes(path)}
        files = dict(contents.texts) | indexes if self._ranks.rank == 0 else {}
        files[runtime_state_name(self._ranks.rank)] = encode(contents.runtime)
        files, entries = seal_small(files, cipher_for(self._keys, sealing))
        failed: dict[Medium, str] = {}
        for medium, directory in media.items():
            try:
                write_small(directory, files)
            except OSError as error:
                failed[medium] = f"{type(error).__name__}: {error}"
        return entries, failed
