"""Carries out a prune plan, and prunes by hand: reads back, plans, shows the plan, and carries out that very plan.

`look` reads and decides, and changes nothing. `carry_out` removes what the given plan names, and nothing else. A dry
run is the first without the second. Both, and the ranks after a save, delete through `apply_prune`, and only while a
good checkpoint is left. A checkpoint is first renamed to a staging name, so a crash during removal leaves nothing that
looks like a checkpoint (`commit.sweep` finishes it).
"""

import os
import queue
import secrets
import shutil
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.keys import Keyring
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import open_own
from verl_slurm.checkpoint.decide.best import Best
from verl_slurm.checkpoint.decide.retention import ASSURED_KEPT, PrunePlan, plan_prune
from verl_slurm.checkpoint.decide.storage import Need
from verl_slurm.checkpoint.format.info import CheckpointInfo, Verdict
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.store.catalog import list_checkpoints, no_checkpoint
from verl_slurm.checkpoint.store.medium import room_for
from verl_slurm.checkpoint.store.quarantine import is_set_aside
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config.schema import CheckpointConfig


@dataclass(frozen=True, kw_only=True)
class PruningLook:
    """Result of a look, and the plan.

    Attributes:
        good: the newest that verifies; the plan keeps it.
        bad: newer ones that do not verify, one line each. They stay: the recovery decides about them.
        quarantined: entries to be removed in addition; empty unless requested.
        sizes: bytes by name, of all of these.
    """

    plan: PrunePlan
    good: str
    bad: tuple[str, ...]
    quarantined: tuple[str, ...]
    sizes: dict[str, int]


def look(
    paths: RunPaths,
    keep_last: int,
    *,
    keep_every: int = 0,
    best: Best | None = None,
    protected: Collection[str] = (),
    quarantine_too: bool = False,
    verifier: Callable[[Path], Verdict] = verify,
) -> PruningLook:
    """Reads checkpoints back from the newest on until one is good, and plans with that one alone as good.

    Raises:
        NotFound: there is no committed checkpoint.
        CheckpointCorrupt: none verifies, so nothing may be removed.
    """
    # One listing for look and plan: what a live run adds afterwards is in neither, and stays.
    infos = list_checkpoints(paths)
    committed = sorted((i for i in infos if i.kind == "committed"), key=lambda i: i.order, reverse=True)
    if not committed:
        raise no_checkpoint(paths.root)
    # Read back, every byte: removing older ones relies on it.
    good, bad = _newest_good(committed, verifier)
    if good is None:
        raise CheckpointCorrupt(
            "no checkpoint verifies, so none is removed",
            where=paths.root,
            found=bad[0],
            remedy=f"verl-slurm verify {shell_word(paths.root)}",
        )
    # Until something good is left these may be all that can still be rescued by hand.
    # Entries that were put there in another way are not ours to remove.
    aside = [i for i in infos if i.kind == "quarantined" and quarantine_too and is_set_aside(i.path)]
    sizes = {info.name: info.num_bytes for info in committed}
    sizes |= {info.name: _tree_bytes(info.path) for info in aside}
    return PruningLook(
        plan=plan_prune(
            committed,
            keep_last,
            keep_every=keep_every,
            best=best,
            verified={good},
            # One is enough here, because it was read back just now; the ranks' plan keeps more of them.
            num_verified=1,
            protected=protected,
        ),
        good=good,
        bad=tuple(bad),
        quarantined=tuple(info.name for info in aside),
        sizes=sizes,
    )


def carry_out(paths: RunPaths, found: PruningLook) -> list[str]:
    """Removes what `found` names, oldest first, unless it is gone already; returns the names removed.

    OSError: one could not be removed; those before it are gone, those after it are whole.
    """
    removed = apply_prune(paths, found.plan)
    if not found.quarantined:
        return removed
    with open_own(paths.run, paths.quarantine) as quarantine:
        for name in found.quarantined:
            # The look may have been made of a hostile tree; a name with `/` would remove elsewhere.
            if Path(name).name != name:
                raise ValueError(f"{name!r} is no name")
            # Below the descriptor, so that a directory exchanged by a link since the look removes nothing elsewhere.
            shutil.rmtree(name, dir_fd=quarantine)
            with suppress(FileNotFoundError):
                os.unlink(f"{name}.reason.json", dir_fd=quarantine)  # last: no entry lies here without one
            removed.append(name)
        os.fsync(quarantine)  # noqa: TID251 - by descriptor
    return removed


def _newest_good(
    newest_first: Collection[CheckpointInfo], verifier: Callable[[Path], Verdict]
) -> tuple[str | None, list[str]]:
    bad: list[str] = []
    for info in newest_first:
        verdict = verifier(info.path)
        if verdict.ok:
            return info.name, bad
        # Passed over and kept: whether it is set aside is the recovery's decision.
        bad.append(verdict.one_line())
    return None, bad


def _tree_bytes(directory: Path) -> int:
    # On disk: a quarantined entry's manifest may be wrong.
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            total += os.lstat(os.path.join(folder, name)).st_size
    return total


def prune_as_configured(
    paths: RunPaths,
    config: CheckpointConfig,
    removing: "Removing",
    assured: Collection[str],
    keys: Keyring | None,
    *,
    partial: bool = False,
    attempt_check: Callable[[], None] = lambda: None,
) -> PrunePlan:
    """Removes what a run's configuration does not keep, after a save. Runs on rank 0.

    `assured`: names known to be whole. With `keys`, what must be whole before others go must be signed, too.
    Raises as `apply_prune`.
    """
    infos, best = list_checkpoints(paths, partial=partial), Best.of(config)
    # So many stay whatever `keep_last` says: a fresh save has not been read back yet, and is not read here, which would
    # take the disk from the training. No run resumes from partial ones, so the newest one is assurance enough.
    least, every = 1 if partial else ASSURED_KEPT, config.keep_every
    plan = plan_prune(
        infos, config.keep_last, keep_every=every, best=best, verified=assured, num_verified=least
    )

    def verifier(path: Path) -> Verdict:
        return verify(path, keys=keys)

    apply_prune(paths, plan, verifier=verifier, attempt_check=attempt_check, remove=removing.remove)
    return plan


def apply_prune(
    paths: RunPaths,
    plan: PrunePlan,
    *,
    verifier: Callable[[Path], Verdict] = verify,
    attempt_check: Callable[[], None] = lambda: None,
    remove: Callable[[int, str], None] | None = None,
) -> list[str]:
    """Removes what `plan` drops, oldest first; returns the names removed. Runs on rank 0.

    When the plan is not `assured`, the kept ones are verified from the newest on until one is good. If none
    is, nothing is removed.

    Args:
        attempt_check: raises `Fenced` when this attempt no longer owns the run. Called before each removal.
        remove: removes a renamed directory, by its name below a descriptor, now or later. None: now.

    Raises:
        Fenced: by `attempt_check`; those before it are gone.
        ValueError: the plan names something that is no checkpoint (a bug of its maker).
        OSError: one could not be removed; those before it are gone, those after it are whole.
    """
    # Oldest first: an error half way leaves the newer ones.
    names = [item.name for item in reversed(plan.drop)]
    # All names are checked before the first removal.
    for name in [*names, *(item.name for item in plan.keep)]:
        if checkpoint_order(name) is None:
            raise ValueError(f"{name!r} is no checkpoint's name")
    # A plan that keeps nothing removes nothing, whatever it says.
    if not names or not plan.keep:
        return []
    # Nothing is removed before one of the kept is known to be good: the newest save may not have been read back yet.
    if not plan.assured and not any(verifier(paths.checkpoints / item.name).ok for item in plan.keep):
        return []
    removed = []
    with open_own(paths.run, paths.checkpoints) as folder:
        for name in names:
            doomed = paths.staging(paths.checkpoints / name, secrets.token_hex(8)).name
            # Before each: this rank may have slept since the plan was made, and the run belong to another attempt.
            attempt_check()
            try:
                os.rename(name, doomed, src_dir_fd=folder, dst_dir_fd=folder)  # noqa: TID251 - by descriptor
            except FileNotFoundError:
                # Somebody else removed it first, by the same rules.
                continue
            # The rename is durable before the files go: after a power cut a half-removed directory must not have a
            # checkpoint's name.
            os.fsync(folder)  # noqa: TID251 - by descriptor
            (remove or _remove)(folder, doomed)
            removed.append(name)
    return removed


class Removing:
    """Removes the files of pruned checkpoints on a thread of its own, one after the other.

    What is left when the process ends has the name of a staging directory, which the next start sweeps.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[int, str] | None] = queue.Queue()
        # The 40,000 files of 10,000 ranks take a minute, and a save before the end of the job must not wait for that.
        # A daemon thread: it must not keep a process that has to leave.
        self._thread = threading.Thread(target=self._run, name="removing", daemon=True)
        self._error: OSError | None = None

    def remove(self, folder: int, name: str) -> None:
        """Removes the directory `name` below `folder`, later. OSError: an earlier one was not removed."""
        error, self._error = self._error, None
        if self._thread.ident is None:
            self._thread.start()
        self._queue.put((os.dup(folder), name))
        if error is not None:
            raise error

    def leave_room(self, place: Path, need: Need) -> None:
        """Waits until all are removed if `place` has no room for the next save before that."""
        if room_for(place, need).enough is False:
            self._queue.join()

    def close(self) -> None:
        """Waits until all are removed, and ends the thread."""
        if self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            folder, name = item
            try:
                _remove(folder, name)
            except OSError as error:
                self._error = error
            finally:
                os.close(folder)
                self._queue.task_done()


def _remove(folder: int, name: str) -> None:
    shutil.rmtree(name, dir_fd=folder)
