"""Carries out `restore.decide_resume`: verifies, sets aside, checks the schema, and names what to load."""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from verl_slurm.base.errors import (
    CheckpointCorrupt,
    KeyRefused,
    NotFound,
    PermissionRefused,
    SchemaMismatch,
    VerlSlurmError,
)
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import names_in
from verl_slurm.checkpoint.decide.restore import decide_resume
from verl_slurm.checkpoint.format.components import require_full
from verl_slurm.checkpoint.format.info import Verdict
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.format.specification import Manifest
from verl_slurm.checkpoint.format.state_schema import (
    check_schema,
    current_schema,
    read_schema,
)
from verl_slurm.checkpoint.store.quarantine import move_strays, move_to_quarantine
from verl_slurm.checkpoint.store.verify import verify

# Directories without a manifest that one start sets aside, the newest first.
_MOST_MOVED = 20


@dataclass(frozen=True, kw_only=True)
class ResumeChoice:
    """The state that a start begins from; `name` and `path` are None: from the beginning.

    Attributes:
        path: for an explicit `resume_from`, possibly outside the run.
        verdicts: of everything that was checked, newest first.
        set_aside: the new places of damaged ones.
        strays: one line if what is used held names that its manifest lacks, and what becomes of them; else empty.
        reasons: one line per judgement, for the journal and the user.
    """

    name: str | None
    path: Path | None
    manifest: Manifest | None = None
    verdicts: tuple[Verdict, ...] = ()
    set_aside: tuple[Path, ...] = ()
    strays: str = ""
    reasons: tuple[str, ...] = ()


def choose_resume(
    paths: RunPaths,
    resume_from: str | None,
    *,
    move_damaged: bool = True,
    verifier: Callable[[Path], Verdict] = verify,
) -> ResumeChoice:
    """Finds the checkpoint to resume from. Runs at every start.

    Args:
        resume_from: `auto`: the newest of this run that verifies (none: from the beginning). None: from the
            beginning. Else a checkpoint's directory, or the name of one of this run.
        move_damaged: False only looks and leaves everything in place.

    Raises:
        SchemaMismatch: the chosen one has a state layout that we do not read.
        CheckpointCorrupt: an explicit one does not verify; or with `auto`, those left cannot be judged.
        KeyRefused: the same, for one that was not made with our key.
        PermissionRefused: it, or with `auto` the newest that is not damaged, is open to others.
        NotFound: this run has none of that name.
        OSError: storage does not give all bytes of the one to resume from, or a path is not there, which may pass.
        ConfigError: an explicit one is partial.
    """
    if resume_from is None:
        return ResumeChoice(name=None, path=None, reasons=("resume_from is null: from the beginning",))
    if resume_from == "auto":
        return _auto(paths, move_damaged, verifier)
    return _explicit(paths, resume_from, move_damaged, verifier)


def set_aside(paths: RunPaths, name: str, reason: str) -> Path | None:
    """Moves checkpoint `name` to quarantine; returns its new place, None: it is gone. ValueError: no name."""
    # The name may come from a rank's message, and becomes a path.
    if checkpoint_order(name) is None:
        raise ValueError(f"{name!r} is no checkpoint's name")
    return move_to_quarantine(paths.checkpoints / name, [reason])


def _auto(paths: RunPaths, move_damaged: bool, verifier: Callable[[Path], Verdict]) -> ResumeChoice:
    # By names alone: a manifest is read when its checkpoint is verified, one by one, since each costs all its bytes.
    places = {name: paths.checkpoints / name for name in names_in(paths.run, paths.checkpoints)}
    names = [name for name, path in places.items() if path.is_dir() and not path.is_symlink()]
    verdicts: dict[str, Verdict] = {}
    decision = decide_resume(names, verdicts)
    # The decision is pure and asked again after each verification: the newest good one ends it, and nothing older is
    # read.
    while decision.action == "verify" and decision.name is not None:
        verdicts[decision.name] = verifier(places[decision.name])
        decision = decide_resume(names, verdicts)
    # Without a manifest that can be read nothing counts them: each move costs several syncs, and a start must not wait
    # for thousands. What a manifest names would be kept as a good one, and goes at once.
    stay = [name for name in decision.set_aside if verdicts[name].manifest is None][_MOST_MOVED:]
    moved = [
        move_to_quarantine(places[name], [str(p) for p in verdicts[name].problems])
        # After the decision, not during it: a `refuse` must know every verdict first.
        for name in decision.set_aside
        if move_damaged and name not in set(stay)
    ]
    told = {verdicts[name].one_line() for name in stay}
    reasons = [line for line in decision.reasons if line not in told]
    if stay:
        reasons.insert(
            -1, f"{len(stay)} more, {stay[-1]} to {stay[0]}, have no manifest that verifies: left there"
        )
    fresh = ResumeChoice(
        name=None,
        path=None,
        verdicts=tuple(verdicts.values()),
        set_aside=tuple(path for path in moved if path is not None),
        reasons=tuple(reasons),
    )
    if decision.action == "fresh" or decision.name is None:
        return fresh
    # Raised after the damaged ones are set aside: the next start need not read them again.
    verdict = verdicts[decision.name]
    if decision.action == "wait":
        raise _not_readable(verdict)
    if decision.action == "refuse":
        raise _refusal(places[decision.name], verdict)
    return _without_strays(paths, _use(fresh, places[decision.name], verdict), verdict, move_damaged)


def _explicit(
    paths: RunPaths, resume_from: str, move_damaged: bool, verifier: Callable[[Path], Verdict]
) -> ResumeChoice:
    named = checkpoint_order(resume_from) is not None
    # A name is one of this run's, and a relative path the user's: `step_000012` in the working directory is not meant.
    path = paths.checkpoints / resume_from if named else Path(os.path.expanduser(resume_from)).resolve()
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        # As `lost_error`: with nothing beside it, its file system is away.
        if named and set(names_in(paths.run, paths.checkpoints)) - {paths.latest.name}:
            raise NotFound(
                "there is no such checkpoint",
                where=path,
                expected="a checkpoint directory, auto or null as checkpoint.resume_from",
                remedy="verl-slurm list RUN shows what there is",
            ) from None
        # It was there as the run was submitted, and may lie on another file system than the run.
        what = (
            "what checkpoint.resume_from names is gone: its run has removed it, or its file system is not mounted; "
            f"another one: verl-slurm submit {shell_word(paths.root)} checkpoint.resume_from=PATH"
        )
        raise FileNotFoundError(errno.ENOENT, what, str(path)) from None
    verdict = verifier(path)
    # Neither replaced by an older one nor set aside: the user named this one, and it may be another run's.
    if verdict.unreadable:
        raise _not_readable(verdict)
    if not verdict.is_whole:
        raise _refusal(path, verdict)
    reasons = (verdict.one_line(), f"checkpoint.resume_from names {path}")
    choice = ResumeChoice(name=None, path=None, verdicts=(verdict,), reasons=reasons)
    return _without_strays(paths, _use(choice, path, verdict), verdict, move_damaged)


def _without_strays(paths: RunPaths, choice: ResumeChoice, verdict: Verdict, move: bool) -> ResumeChoice:
    """Moves strays out of the chosen one, if it is this run's; says what becomes of them."""
    if not verdict.has_strays or choice.path is None:
        return choice
    where = f"the next start moves them to {paths.quarantine}"
    if choice.path.parent != paths.checkpoints:
        where = "they are not copied"  # the other run's, to which nothing is done
    elif move:
        where = f"moved to {move_strays(choice.path, verdict)}"
    strays = f"{verdict.one_line()}; all that its manifest names is whole, and is used; {where}"
    return replace(choice, strays=strays, reasons=(*choice.reasons, strays))


def _use(choice: ResumeChoice, path: Path, verdict: Verdict) -> ResumeChoice:
    """Returns `choice` with the verified checkpoint at `path` in it, after checking that its schema fits."""
    # After the verification: the file's bytes are the committed ones.
    saved = read_schema(path)
    if verdict.manifest is None or saved.schema_id != verdict.manifest.schema_id:
        raise CheckpointCorrupt(
            "the manifest and the schema file disagree",
            where=path,
            found=saved.schema_id,
            expected=verdict.manifest.schema_id if verdict.manifest else None,
            remedy="resume from another checkpoint (verl-slurm list RUN)",
        )
    # A partial one verifies as well, and lacks what a resume needs.
    require_full(verdict.manifest, path)
    check_schema(saved, current_schema(), where=path)
    return replace(choice, name=path.name, path=path, manifest=verdict.manifest)


def untrusted(path: Path, found: str) -> PermissionRefused:
    """Returns the refusal of a checkpoint that another user could have written, and what makes it the user's own."""
    above = path.parent.stat()
    taken = f"mv {shell_word(path)} {shell_word(f'{path}.theirs')}, and cp -r it back if it is what you saved"
    if above.st_uid != os.geteuid():
        taken = f"cp -r {shell_word(path)} DIR if you trust them, then checkpoint.resume_from=DIR/{path.name}"
    return PermissionRefused(
        "the checkpoint is not used: others could have written it",
        where=path,
        found=found,
        remedy=f"if all of it is yours: chmod -R go-w {shell_word(path.parent.parent)}; what belongs to another "
        f"user: {taken}",
    )


def _not_readable(verdict: Verdict) -> OSError:
    remedy = "nothing older is used in its place; checkpoint.resume_from=NAME goes on from an older one"
    return OSError(errno.EIO, f"{verdict.one_line()}; {remedy}")


def _refusal(path: Path, verdict: Verdict) -> VerlSlurmError:
    for problem in verdict.problems:
        # First: with an unknown version nothing else that was found means anything.
        if problem.kind == "version":
            return SchemaMismatch(
                "the checkpoint is of another format version",
                where=path,
                found=problem.what,
                remedy="resume with the version of verl-slurm that wrote it",
            )
    if verdict.needs_key:
        return KeyRefused(
            "the checkpoint was not made with our key",
            where=path,
            found=verdict.one_line(),
            remedy="name the key it was made with in checkpoint.encryption",
        )
    kinds = {problem.kind for problem in verdict.problems}
    if "untrusted" in kinds and kinds <= {"untrusted", "extra"}:
        return untrusted(path, verdict.one_line())
    return CheckpointCorrupt(
        "the checkpoint does not verify",
        where=path,
        found=verdict.one_line(),
        expected="every file as its manifest says",
        remedy="set checkpoint.resume_from=auto, or name another (verl-slurm list RUN)"
        if verdict.damaged
        else "check the storage and who owns the files, then start again",
    )
