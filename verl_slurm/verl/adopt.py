"""Adopts verl's existing `global_step_N` into a run: selects them and makes each a checkpoint of the run.

```
judge    every byte of every step is read where it lies (`shards`), the tracker beside them (`tracker`)
plan     pure: which become checkpoints, and why each of the others does not
adopt    newest first: the files that were judged are copied into RUN/work, the copy is read and judged again, hashed
         and committed (`checkpoint.store.loop_checkpoint`)
repair   DIR's tracker points to the newest whole step, so that plain verl, too, resumes right
```

A broken step stays where it is. A repeated adoption finds its work done. A process killed in the middle leaves whole
checkpoints, and at most a work directory that the next start, or the next adoption, removes.
"""

import errno
import secrets
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from verl_slurm.base.errors import CheckpointCorrupt, ConfigError, Fenced, NoRoom, VerlSlurmError
from verl_slurm.base.fence import RunOwner, read_owner
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.retention import plan_prune
from verl_slurm.checkpoint.decide.storage import need_of_next
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.format.specification import guest_directory
from verl_slurm.checkpoint.store.commit import SavedCheckpoint, sweep
from verl_slurm.checkpoint.store.loop_checkpoint import LoopSave, commit_tree
from verl_slurm.checkpoint.store.medium import room_for
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.verl.shards import Judged, judge_step
from verl_slurm.verl.step_copying import How, copy_files, how_to_copy
from verl_slurm.verl.step_layout import way_out
from verl_slurm.verl.tracker import tracker_file

OnBytes = Callable[[int], None]
Choice = Literal["whole", "adopt", "there", "old", "refused", "broken", "adopted", "failed"]
"""whole: no run is to take it. there: the run has it already. old: whole, and retention would drop it. refused: whole,
and this run could not resume from it. failed: it could not be adopted after all.
"""

_WORK = "adopt."
_LEAST_KEPT = 2
"""A minimum whatever `keep_last` says: the run must not depend on the newest alone (`retention`, rule 2)."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True)
class AdoptedStep:
    """One step, its fate, and the reason. `how`, `saved`: of an adopted one."""

    judged: Judged
    choice: Choice
    why: str
    how: How | None = None
    saved: SavedCheckpoint | None = None


def judged_rows(judged: Sequence[Judged]) -> list[AdoptedStep]:
    """Returns a row for each step where no run is to take it."""
    return [
        AdoptedStep(judged=one, choice="whole" if one.ok else "broken", why=_problems(one)) for one in judged
    ]


def _problems(one: Judged) -> str:
    return "" if one.ok else one.one_line().partition(": ")[2]


def plan_adoption(
    judged: Sequence[Judged],
    committed: Sequence[CheckpointInfo],
    *,
    entry: str,
    world_size: int,
    keep_last: int,
    keep_every: int = 0,
    take_all: bool = False,
    another: Collection[int] = (),
) -> list[AdoptedStep]:
    """Decides for every step, newest first. Pure.

    Args:
        entry: of verl's trainers, that the run uses: `sft` or `ppo`.
        keep_last, keep_every: of the run's retention: steps that it would drop after its first save are not copied.
        take_all: copy them all the same.
        another: steps of which the run has a checkpoint with other files (`is_adopted`).
    """
    # verl saves at the end of a step, so a checkpoint of the run from inside one is another state.
    taken = {info.step: info for info in committed if not info.safe_point}
    fit = [one for one in judged if one.ok and not _misfit(one, entry, world_size)]
    # As if all were adopted, and the run's retention had its first say: what it would drop at once is not copied.
    infos = [_as_info(one) for one in fit if one.step not in taken] + list(committed)
    kept = max(keep_last, _LEAST_KEPT)
    plan = plan_prune(infos, kept, keep_every=keep_every, verified={info.name for info in infos})
    dropped = {item.name: item.reason for item in plan.drop}
    rows = []
    for one in sorted(judged, key=lambda item: item.step, reverse=True):
        name = RunPaths("/").checkpoint(one.step).name
        choice: Choice = "adopt"
        if not one.ok:
            choice, why = "broken", _problems(one)
        elif one.step in taken:
            what = "another" if one.step in another else "it as"
            choice, why = "there", f"the run has {what} {name} already"
        elif misfit := _misfit(one, entry, world_size):
            choice, why = "refused", misfit
        elif name in dropped and not take_all:
            choice, why = "old", f"{dropped[name]}; --all takes it, too"
        else:
            why = f"as {name}"
        rows.append(AdoptedStep(judged=one, choice=choice, why=why))
    return rows


def refuse_if_nothing_fits(rows: Sequence[AdoptedStep]) -> None:
    """Raises ConfigError, with the way out, if there are whole steps and the run could resume from none."""
    whole = [row for row in rows if row.choice != "broken"]
    # One that fits is enough: steps of former numbers of ranks may lie beside it.
    if not whole or any(row.choice != "refused" for row in whole):
        return
    newest = whole[0]
    raise ConfigError(
        "the run cannot go on from any of these checkpoints",
        where=newest.judged.path,
        found=newest.why,
        remedy=way_out(newest.judged.path, newest.judged.layout.entry, newest.judged.world_size),
    )


def adopt_steps(
    paths: RunPaths, rows: Sequence[AdoptedStep], *, link: bool = False, on_bytes: OnBytes = lambda _: None
) -> list[AdoptedStep]:
    """Makes each row of `adopt` a checkpoint of the run, newest first; returns these rows, adopted or failed.

    No other process may work on the run meanwhile (`submission.hold_run`).

    Args:
        link: hard links instead of copies (`step_copying`).
        on_bytes: told how many more bytes were copied, and read back.

    Raises:
        NoRoom: the copies would not fit.
        Fenced: the run was started meanwhile.
        OSError: the run's storage refused.
    """
    chosen = [row for row in rows if row.choice == "adopt"]
    if not chosen:
        return []
    # Noted before the first byte: a start in between makes it another one, and each commit asks.
    owner = read_owner(paths)
    private_dir(paths.checkpoints)
    private_dir(paths.root / "work")
    # Of adoptions that were killed. The caller holds the run, so none of them is alive.
    for left in (paths.root / "work").glob(f"{_WORK}*"):
        shutil.rmtree(left, ignore_errors=True)
    # What dead saves left goes first, and a checkpoint that one of them had set aside comes back.
    sweep(paths)
    work = private_dir(paths.root / "work" / f"{_WORK}{secrets.token_hex(8)}")
    try:
        # One step answers for all of them: they lie in one directory.
        how: How = "link" if link else how_to_copy(chosen[0].judged.path, work)
        # Clones and links take no room of their own.
        if how == "copy":
            _require_room(paths, [row.judged for row in chosen])
        # Newest first: if it is interrupted, the run has the one that it would resume from.
        done = [_adopt(paths, row, work, how, owner, on_bytes) for row in chosen]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    newest = next((one.saved for one in done if one.saved is not None), None)
    if newest is not None:
        # Each commit pointed the hint at itself, and the oldest one came last.
        write_file(paths.latest, newest.name.encode() + b"\n")
    return done


def _adopt(
    paths: RunPaths, row: AdoptedStep, work: Path, how: How, owner: RunOwner | None, on_bytes: OnBytes
) -> AdoptedStep:
    """Adopts one step; its own problem does not keep the others from being adopted."""
    one = row.judged
    # Below RUN, so that the commit can rename it into the checkpoint.
    copy = work / guest_directory("verl", one.step)
    try:
        # The very files that were judged, by their identities; names may lead to others since.
        copy_files(one.path, copy, one.identities, how, on_bytes=on_bytes)
        # The copy is judged as well: the digests of the manifest vouch for whatever bytes are in it from here on.
        again = judge_step(copy, on_bytes=on_bytes)
        # Names and sizes as well: a step may be whole and still be another save of the same number.
        if not again.ok or again.files != one.files:
            found = "its files changed while they were copied" if again.ok else again.one_line()
            return replace(row, choice="failed", why=f"not as it was judged: {found}")
        saved = commit_tree(
            paths,
            _save(one, how, owner),
            {copy.name: copy},
            # With a tracker of its own the checkpoint is a directory that verl's tools take.
            texts=tracker_file(one.step),
            # Not `require_attempt`: no attempt of ours owns the run; what counts is that none has begun since.
            attempt_check=lambda: _require_same(paths, owner),
        )
    except (CheckpointCorrupt, OSError) as error:
        # A full disk is no fault of one step: the others would not fit either.
        if isinstance(error, OSError) and error.errno in _FULL:
            raise NoRoom("the copy did not fit", where=paths.checkpoints, found=error.strerror) from error
        # One step's problem is its row's: the others are adopted all the same.
        words = error.one_line() if isinstance(error, VerlSlurmError) else str(error)
        if isinstance(error, OSError) and error.errno == errno.EXDEV:
            words = "the run is on another file system, which no hard link reaches: adopt without --link"
        return replace(row, choice="failed", why=words)
    # What the commit did not move goes now, so that it takes no room from the next step.
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    return replace(row, choice="adopted", how=how, saved=saved)


def _save(one: Judged, how: How, owner: RunOwner | None) -> LoopSave:
    metadata = {
        "adopted_from": str(one.path),
        "adopted_as": how,
        "entry": one.layout.entry,
        "unchecked": list(one.unchecked),
    }
    return LoopSave(
        guest="verl",
        step=one.step,
        # Attempt 0 comes before any: the run was never started.
        attempt=0 if owner is None else owner.attempt,
        world_size=one.world_size or 1,
        metadata=metadata,
    )


def _require_same(paths: RunPaths, owner: RunOwner | None) -> None:
    if (now := read_owner(paths)) != owner:
        raise Fenced(
            "the run was started while its checkpoints were adopted",
            where=paths.root,
            found="no attempt yet" if now is None else f"attempt {now.attempt} of job {now.job_id}",
            remedy="what was adopted before is whole; adopt the rest when that job has ended",
        )


def _require_room(paths: RunPaths, chosen: Sequence[Judged]) -> None:
    num_bytes, num_files = sum(one.num_bytes for one in chosen), sum(len(one.files) for one in chosen)
    basis = f"a copy of {len(chosen)} checkpoints" if len(chosen) > 1 else f"a copy of {chosen[0].name}"
    # Without the margin that a run's own saves have: the sizes are known exactly.
    room = room_for(paths.checkpoints, need_of_next(num_bytes, num_files, basis=basis, margin=0.0))
    if room.enough is False:
        raise NoRoom(
            "there is no room for the copies",
            where=paths.checkpoints,
            found=room.reason,
            remedy="free some, take fewer (checkpoint.keep_last), or --link (hard links share their fate with the "
            "originals: do not let plain verl save there again)",
        )


def _misfit(one: Judged, entry: str, world_size: int) -> str:
    """Returns why the run could not resume from a whole step."""
    if one.layout.entry != entry:
        return f"saved by verl's {one.layout.entry} trainer, the run has trainer.entry: {entry}"
    if one.world_size != world_size:
        return f"saved by {one.world_size} ranks, the run has {world_size}: `verl-slurm reshard` divides it"
    return ""


def _as_info(one: Judged) -> CheckpointInfo:
    path = RunPaths("/").checkpoint(one.step)
    return CheckpointInfo(kind="committed", name=path.name, path=path, step=one.step, safe_point=0)


def is_adopted(paths: RunPaths, one: Judged) -> bool:
    """Returns whether the run's checkpoint of this step has the same files, by their sizes."""
    try:
        manifest = read_manifest(paths.checkpoint(one.step))
    except (OSError, VerlSlurmError):
        return False
    prefix = f"{guest_directory('verl', one.step)}/"
    # By size, as reading both sides would take as long as adopting it again.
    sizes = {e.path.removeprefix(prefix): e.size for e in manifest.files if e.path.startswith(prefix)}
    return sizes == dict(one.files)
