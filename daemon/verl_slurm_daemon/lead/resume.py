"""Picks a restart's checkpoint, decides whether a fresh one can be trusted, and divides one of verl's among the ranks.

Reads files; no torch. What was found good in this attempt need not be read again at a restart in place (`Verdicts`).
Our own ranks check each byte that they load as well. So a disk that has lost a bit since is found by them; and the
next restart reads everything, because a verdict is used once. A guest's loop checks nothing: its checkpoints are read.
"""

import asyncio
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from verl_slurm.base import bounded
from verl_slurm.base.errors import CheckpointsAbsent, CheckpointsLost, TierError
from verl_slurm.base.fence import require_attempt
from verl_slurm.base.files import fsync_path, private_dir, rename, write_file
from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import note_adopted
from verl_slurm.checkpoint.format.encryption import CheckpointCipher
from verl_slurm.checkpoint.format.info import Verdict
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.format.specification import MANIFEST, Manifest
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.commit import sweep
from verl_slurm.checkpoint.store.loop_checkpoint import sweep_work
from verl_slurm.checkpoint.store.lost import (
    gone_back,
    lost_rollouts,
    may_be_in_tiers,
    missing_checkpoint,
    require_never_saved,
)
from verl_slurm.checkpoint.store.quarantine import move_strays, move_to_quarantine
from verl_slurm.checkpoint.store.recover import ResumeChoice, choose_resume
from verl_slurm.checkpoint.store.verify import named_paths, verify
from verl_slurm.config.schema import RunConfig
from verl_slurm.containers.runtimes import contained_argv
from verl_slurm.journal import events as ev
from verl_slurm.journal.events import Resume, Warned
from verl_slurm.journal.files import read_history
from verl_slurm.journal.history import History
from verl_slurm.runtime_state.segment import HEAD_BYTES
from verl_slurm.verl.reshard.checkpoint import prepare_start
from verl_slurm_daemon.decide.lead_model import IN_PLACE_S
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.lead.attempt_start import say_again
from verl_slurm_daemon.lead.tier_child import restore_newest

Verifier = Callable[[Path, Keyring | None], Verdict]
"""Judges a checkpoint; the keys are those with one of which it must be signed."""
_Seen = tuple[tuple[str, int, int, int, int, int, int], ...]


def read_all(path: Path, keys: Keyring | None) -> Verdict:
    """Reads a checkpoint, every byte."""
    return verify(path, keys=keys)


class Verdicts:
    """The verdicts of one lead. Its threads may use it at the same time."""

    def __init__(self) -> None:
        self._good: dict[Path, tuple[_Seen, Verdict]] = {}
        self._lock = threading.Lock()

    def read(self, path: Path, keys: Keyring | None) -> Verdict:
        """Does the same as `read_all`, and remembers a checkpoint that is good."""
        seen = _seen(path)
        verdict = read_all(path, keys)
        with self._lock:
            self._good.pop(path, None)
            if verdict.ok:
                self._good[path] = seen, verdict
        return verdict

    def recall(self, path: Path, keys: Keyring | None) -> Verdict:
        """Returns what `read` has found, once, if nothing has been touched since; else reads."""
        with self._lock:
            seen, verdict = self._good.pop(path, ((), None))
        if verdict is not None and seen == _seen(path):
            return verdict
        return self.read(path, keys)


def _seen(path: Path) -> _Seen:
    """Returns what changes when anything below a directory does, even if its old times are set again (ctime)."""
    return tuple(sorted(_entries(path, ".")))


def _entries(path: Path, name: str) -> Iterator[tuple[str, int, int, int, int, int, int]]:
    try:
        here = os.stat(path / name, follow_symlinks=False)
        yield name, here.st_dev, here.st_ino, here.st_mode, here.st_size, here.st_mtime_ns, here.st_ctime_ns
        with os.scandir(path / name) as entries:
            inner = [(entry.name, entry.is_dir(follow_symlinks=False), entry) for entry in entries]
    except OSError:
        # Never equal to anything: it is read.
        yield name, os.getpid(), id(path), 0, 0, 0, 0
        return
    for below, is_directory, entry in inner:
        if is_directory:
            yield from _entries(path, f"{name}/{below}")
        else:
            try:
                stat = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            yield (
                f"{name}/{below}",
                stat.st_dev,
                stat.st_ino,
                stat.st_mode,
                stat.st_size,
                stat.st_mtime_ns,
                stat.st_ctime_ns,
            )


class ResumePoint(msgspec.Struct, frozen=True):
    """The point from which a restart begins."""

    name: str
    """A directory in checkpoints/; empty: the run starts from nothing."""
    reasons: tuple[str, ...]
    progress: str
    """A measure of progress: two starts with the same value brought nothing new in between."""
    manifest: Manifest | None = None
    """The checkpoint's manifest; None: the run starts from nothing."""
    rollouts: bool = False
    """The ledger has rollouts."""
    strays: str = ""
    """What the checkpoint held beside all that is its own, and where that is now."""

    @property
    def begun(self) -> bool:
        """Returns whether something was trained or sampled with a configuration."""
        return bool(self.name) or self.rollouts

    @property
    def steps_done(self) -> int:
        """Returns the number of steps that are done or begun."""
        return 0 if self.manifest is None else self.manifest.step + bool(self.manifest.safe_point)


def find_resume_point(
    paths: RunPaths,
    resume_from: str | None,
    attempt: int,
    keys: Keyring | None = None,
    verifier: Verifier = read_all,
    has_tiers: bool = False,
) -> ResumePoint:
    """Verifies checkpoints from the newest back and takes the first that is good; sets corrupt ones aside.

    If the user named a checkpoint (or null: none), the first start after the submission
    (`RUN/control/resume_once`) goes on from there, and newer ones are set aside. A checkpoint of another run
    is copied in first.

    If none of the run itself verifies and it has tiers, the newest one in the tiers is brought back; if only
    its newest is lost, that one; as an attempt begins, also one that is newer, and of which the journal never
    told. This is not done if the run was told to begin from nothing and has saved nothing since.

    Raises KeyRefused: what is left to resume from needs a key that is not there. TierError: none that a tier
    has can be used. OSError: storage, or a tier, does not answer, or not with all bytes of the newest
    checkpoint.
    """

    def checked(path: Path) -> Verdict:
        return verifier(path, keys)

    require_attempt(
        paths, attempt
    )  # an earlier attempt that still runs must not clean up under the present one
    if not paths.resume_once.exists():
        resume_from = "auto"
    # Staging directories here belong to attempts that are closed: what they began can no longer be committed.
    sweep(paths)
    sweep(paths.partial)
    sweep_work(paths)
    choice = choose_resume(paths, resume_from, verifier=checked)
    # `from_nothing` remembers that the user began afresh. Without it a crash before the first save would bring back
    # from a tier what the user wanted to leave.
    if choice.name is not None:
        paths.from_nothing.unlink(missing_ok=True)
        if has_tiers and resume_from == "auto":
            choice = _newer_from_tiers(paths, choice, checked, attempt)
    elif resume_from is None:
        write_file(private_dir(paths.control, inside=paths.run) / paths.from_nothing.name, b"")
    elif has_tiers and not paths.from_nothing.exists():
        restore_newest(paths)
        found = choose_resume(paths, "auto", verifier=checked)
        choice = replace(found, reasons=(*choice.reasons, "asked the run's tiers", *found.reasons))
    if choice.manifest is not None:
        # Verifying encrypted data needs no key. It is better to report a missing key now than to have every
        # rank fail.
        CheckpointCipher.of(choice.manifest, keys, where=choice.path)
    if choice.path is not None and choice.path.parent != paths.checkpoints and choice.manifest is not None:
        # First: in this run's directory nothing counts that is another run's, unless it was adopted.
        note_adopted(paths, choice.manifest.digest)
        strays = choice.strays
        choice = choose_resume(paths, _adopt(paths, choice.path, choice.manifest), verifier=checked)
        if strays:
            choice = replace(choice, strays=strays, reasons=(*choice.reasons, strays))
    reasons = list(choice.reasons)
    if resume_from != "auto":
        # Set aside, or the next requeue, which takes the newest again, would return to them.
        reasons += _abandon_newer(paths, choice)
        write_file(paths.parts_since, str(attempt).encode())
    name = choice.name or ""
    # Sizes are enough: the ledger grows with each rollout, and two starts with equal sizes brought nothing new.
    segments = paths.ledger.glob("*.ledger") if paths.ledger.is_dir() else ()
    journaled = sum(max(0, segment.stat().st_size - HEAD_BYTES) for segment in segments)
    progress = f"{name or 'start'}+{journaled}"
    return ResumePoint(name, tuple(reasons), progress, choice.manifest, journaled > 0, choice.strays)


def _newer_from_tiers(
    paths: RunPaths, choice: ResumeChoice, verifier: Callable[[Path], Verdict], attempt: int
) -> ResumeChoice:
    history, present = read_history(paths), choice.name or ""
    lost, _ = missing_checkpoint(paths, history, present)
    lost = lost if lost and may_be_in_tiers(paths, lost) else ""
    # A former copy of RUN knows nothing of what came after it. Not at a restart in place, which is to be quick: RUN is
    # what it was, or its attempt can save nothing any more.
    is_first = history.restart is None or history.restart.attempt != attempt
    if not (lost or is_first):
        return choice
    try:
        brought = restore_newest(paths, lost, above=present if is_first else "")
    except TierError as error:  # it answers, and has it no more: the older one is what is left
        return replace(choice, reasons=(*choice.reasons, error.one_line()))
    if not brought:
        return choice
    told = ["asked the run's tiers"]
    if brought != lost:
        told.append(
            f"{brought} is newer than {present}, and the journal never told of it: RUN was put back to a former copy"
        )
    found = choose_resume(paths, "auto", verifier=verifier)
    return replace(found, reasons=(*choice.reasons, *told, *found.reasons))


async def wait_for_checkpoints(
    find: Callable[[], ResumePoint], config: RunConfig, journal: Journal, leaving: asyncio.Event
) -> ResumePoint:
    """Returns the resume point that `find` finds, but never the beginning of a run that has had a checkpoint.
    A directory of checkpoints that is absent or empty, as one that is not mounted, is looked at again for
    half a minute.

    Raises CheckpointsLost: none of those that the run has had can be used. InterruptedError: `leaving` was
    set meanwhile.
    """

    for pause in (*IN_PLACE_S, None):
        point = await asyncio.to_thread(find)
        try:
            if not point.name:
                await asyncio.to_thread(require_never_saved, journal.paths, config, journal.attempt)
            # A user who named the checkpoint knows what the run goes back to.
            if not journal.paths.resume_once.exists():
                await asyncio.to_thread(_warn_of_losses, journal, config, point.name)
            if point.name:
                return point
            again = ("from step 0 again, with the rollouts that the ledger holds",) * point.rollouts
            return msgspec.structs.replace(point, reasons=(*point.reasons, *again))
        except CheckpointsLost as error:
            if pause is None or not isinstance(error, CheckpointsAbsent):
                for line in dict.fromkeys(point.reasons):
                    journal.write(Resume(line))
                raise
            say_again(error, pause)
        # Slurm's grace time, or a cancel, is not slept through.
        with suppress(TimeoutError):
            await asyncio.wait_for(leaving.wait(), pause)
            raise InterruptedError("it is being ended while its checkpoints are waited for")
    raise AssertionError("the last look returns or raises")


def _warn_of_losses(journal: Journal, config: RunConfig, name: str) -> None:
    paths, history = journal.paths, read_history(journal.paths)
    lost = {
        "checkpoint": gone_back(paths, history, name),
        "rollouts": lost_rollouts(paths, config, history, name),
    }
    for topic, text in lost.items():
        if text:
            journal.write(Warned(topic, text))


def _manifest_of(checkpoint: Path) -> bytes | None:
    with suppress(FileNotFoundError, bounded.TooMuch):  # an error of that storage says nothing about our own
        return bounded.read_regular(checkpoint / MANIFEST, bounded.MANIFEST)
    return None


def _adopt(paths: RunPaths, source: Path, manifest: Manifest) -> str:
    """Copies another run's verified checkpoint into this one; sets ours of that name, and rollouts, aside."""
    final = paths.checkpoints / source.name
    if final.exists():
        if _manifest_of(final) == bounded.read_regular(source / MANIFEST, bounded.MANIFEST):
            return final.name
        move_to_quarantine(final, [f"replaced by {source}, as checkpoint.resume_from says"])
    # Copied beside the target, synced and then renamed: a kill leaves a staging directory, which the next start sweeps
    # away.
    staging = paths.staging(final, secrets.token_hex(4))
    named = set[str]().union(*named_paths(manifest))

    def strays(folder: str, names: list[str]) -> set[str]:
        below = Path(folder).relative_to(source)
        return {name for name in names if (below / name).as_posix() not in named}

    shutil.copytree(source, staging, symlinks=True, ignore=strays)
    for path in [*staging.rglob("*"), staging]:
        path.chmod(0o700 if path.is_dir() else 0o600)
        fsync_path(path)
    rename(staging, final)
    # Other weights than those that now continue have sampled these rollouts; they are kept under another name.
    if paths.ledger.is_dir() and any(paths.ledger.iterdir()):
        rename(paths.ledger, paths.ledger.with_name(f"ledger.before.{final.name}.{secrets.token_hex(4)}"))
        private_dir(paths.ledger, inside=paths.run)
    return final.name


def _abandon_newer(paths: RunPaths, choice: ResumeChoice) -> list[str]:
    chosen = checkpoint_order(choice.name) if choice.name else None
    reasons = []
    # Partial saves, too: one that was left by the abandoned path would stand in for the new one of its name.
    infos = [*list_checkpoints(paths), *list_checkpoints(paths.partial, partial=True)]
    for info in infos:
        order = checkpoint_order(info.name)
        if info.kind != "committed" or order is None or (chosen is not None and order <= chosen):
            continue
        reason = f"{info.name}: newer than what this run was told to resume from; set aside"
        move_to_quarantine(info.path, [reason])
        reasons.append(reason)
    return reasons


class ReadBack(msgspec.Struct, frozen=True):
    """The result of reading a committed checkpoint back; the fields are as in `inputs.SaveReadBack`."""

    good: bool
    detail: str
    pruned: bool = False
    unreadable: bool = False


def read_back(
    paths: RunPaths, name: str, attempt: int, keys: Keyring | None = None, verifier: Verifier = read_all
) -> ReadBack:
    """Reads a committed checkpoint again, every byte. It is set aside if it is damaged beyond doubt."""
    verdict = verifier(paths.checkpoints / name, keys)
    took = f"{verdict.num_bytes} bytes in {verdict.seconds:.3f} s"
    if verdict.ok:
        return ReadBack(True, took)
    if verdict.has_strays:
        require_attempt(paths, attempt)
        try:
            where = f"moved to {move_strays(paths.checkpoints / name, verdict)}"
        except OSError as error:  # the next start tries again; the save is whole
            where = f"not moved: {error}"
        return ReadBack(True, f"{took}; {verdict.one_line()}; {where}")
    if _was_pruned(paths, name):
        return ReadBack(
            False, "removed as older than those that are kept, before it was read back", pruned=True
        )
    # A disk that did not answer proves no damage, and may answer at the next start.
    if verdict.damaged:
        require_attempt(paths, attempt)
        move_to_quarantine(paths.checkpoints / name, [str(problem) for problem in verdict.problems])
    return ReadBack(False, verdict.one_line(), unreadable=verdict.unreadable)


def _was_pruned(paths: RunPaths, name: str) -> bool:
    """Returns whether retention removed it, rather than damage or loss."""
    if os.path.lexists(paths.checkpoints / name):
        return False
    infos, order = list_checkpoints(paths), checkpoint_order(name) or (-1, -1)
    # One in quarantine was damaged: the scrub set it aside first.
    if any(info.kind == "quarantined" and info.name.startswith(f"{name}.") for info in infos):
        return False
    # Retention never takes the newest: one that is gone and was the newest is lost.
    return any(info.kind == "committed" and info.order > order for info in infos)


class _Leaving(Exception):
    """Ends the work: the attempt is to end."""


async def fit_ranks(config: RunConfig, point: ResumePoint, leaving: asyncio.Event, journal: Journal) -> bool:
    """Prepares verl's checkpoint for the ranks that the run has now; returns False if `leaving` has ended the
    work.

    Raises ConfigError: it cannot be divided so, or not by the ranks' Python. VerlSlurmError, OSError: it was
    not.
    """
    if config.trainer.backend != "verl":
        return True

    def stop_if_leaving(_: int) -> None:
        if leaving.is_set():
            raise _Leaving

    began = time.monotonic()
    run, ranks = (config, contained_argv, journal.paths, journal.attempt), config.distributed.world_size
    before = ranks if point.manifest is None else point.manifest.world_size
    if before != ranks:
        # Before it, too: with large models it takes minutes.
        journal.write(ev.Resume(f"{point.name} is of {before} ranks: divided among {ranks}"))
    try:
        # In a thread: it may take as long as a save and a verification, and the lead has to hear Slurm meanwhile.
        made = await asyncio.to_thread(prepare_start, *run, point.manifest, stop_if_leaving)
    except _Leaving:
        return False
    if made is not None:
        took_s = round(time.monotonic() - began, 3)
        journal.write(ev.Resharded(point.name, before, ranks, took_s, made.num_bytes))
    return True


def nothing_left(
    config: RunConfig, manifest: Manifest | None, history: History, job_id: str, array: str | None
) -> str:
    """Returns why nothing is left to do after this checkpoint, which is verified; empty: something is. Pure.

    A guest's loop counts as done if this very job, or an earlier task of its `array`, ended well with this checkpoint,
    and no new submission came since.
    """
    # Slurm may start a job again that has ended well (23.02 to 25.11 do so after a preemption,
    # docs/slurm-versions.md), and the tasks of a chain follow one another whatever became of the run.
    if manifest is None:
        return ""
    if not config.trainer.is_guest:
        # A safe point lies within a step: the last one is then still to be finished.
        whole = manifest.safe_point == 0 and manifest.step >= config.train.steps
        return f"all {config.train.steps} steps are done: {manifest.name}" if whole else ""
    # The length of a guest's loop is known to its own program, which may have been changed since.
    if history.ended_well_with(manifest.name, job_id, array):
        return f"the loop has ended with {manifest.name}"
    return ""
