"""Decides which code of the user's a submission takes into the run (`program/code_record.py`), and makes the copy.

If the code of a run that has begun has changed, the user says how it goes on: `--code run` or `--code new`.
"""

import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Literal

import msgspec

from verl_slurm.base.bounded import SOURCE, read_regular
from verl_slurm.base.errors import WAYS_IN, ConfigError, DataError, PermissionRefused
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.search_path import PYTHONPATH, absolute_only
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint.entries import Drift
from verl_slurm.journal import events as ev
from verl_slurm.program.code_record import (
    COPIED,
    TOPIC,
    CodeRecord,
    CodeTree,
    files_of,
    package_drift,
    read_record,
)
from verl_slurm.program.copying import copy_tree, read_tree
from verl_slurm.program.git import Commit, commit_of, diff_of, work_tree
from verl_slurm.program.installed import Installed, look
from verl_slurm.program.listing import Listing, holds_other_things, included, list_code
from verl_slurm.program.programs import Moves, Program, is_ours, module_of, programs_of
from verl_slurm.slurm.rank_setup import python_of
from verl_slurm.submit.submission_plan import CodeContent, CodePlan
from verl_slurm.submit.undoing import names_in, remove_new, replace_content

CodeChoice = Literal["run", "new"]
_NO_DIFF = "the difference from the commit is over 16 MiB, or git cannot make it; it is not recorded"
TreesRead = dict[tuple[Path, tuple[str, ...]], CodeContent]
"""By root and names of the files."""
_OURS = re.compile(rb"^[^#\n]*verl_slurm", re.MULTILINE)
"""Our name, outside of comments: `verl-slurm init` writes it into one."""


def plan_code(
    config: RunConfig,
    caller: Path,
    paths: RunPaths,
    *,
    begun: bool,
    beside: Path | None = None,
    choice: CodeChoice | None = None,
    known: TreesRead | None = None,
    ask_python: bool = True,
) -> CodePlan:
    """Reads the user's code and decides what the run's attempts run. Makes nothing.

    Args:
        config: paths absolute.
        caller: the working directory of the submission.
        beside: the directory by which the words of the program's command go; None: the run is submitted by itself, and
            its program works where it did.
        known: trees that were read before, for other runs of a sweep. This one's are added.
        ask_python: False: `slurm.python` is not run, so its packages and where it finds modules are unknown.

    Raises:
        ConfigError: the code cannot be copied, or has changed and there is no choice; or packages have changed and
            `code.on_drift` is `refuse`.
        DataError: the run's record or copy cannot be read.
    """
    old, directory = None, ""
    if begun or choice == "run":
        # `new` needs no former record: it is the way on where that is gone or damaged.
        with suppress(*[DataError] * (choice == "new")):
            old = read_record(paths)
        directory = old.directory if old is not None and (choice is None or beside is None) else ""
    elif beside is None:
        with suppress(DataError, PermissionRefused):  # it is replaced
            directory = (read_record(paths) or CodeRecord()).directory
    if old is None and choice == "run":
        raise ConfigError(
            "the run has no code of its own to go on with",
            where=paths.root,
            found="a new run, or one without a record of its code",
            remedy="leave out --code",
        )
    installed, notes = _installed(config, ask_python=ask_python)
    if old is not None and choice == "run":
        # Not looked at: the code outside may be gone, or no longer be what can be copied.
        plan, changes = CodePlan(record=CodeRecord(python=installed.python, packages=installed.packages)), ""
    else:
        # The choice `new` takes all that is there now.
        trees = old.trees if old is not None and choice is None else ()
        former = {tree.root: files_of(paths, tree.digest) for tree in trees}
        places = (Path(directory),) if directory else (caller, beside or caller)
        plan = _present(config, places, installed, {} if known is None else known, former)
        not_found = module_of(config) and not plan.record.programs and config.slurm.container is None
        if not_found and not ask_python and config.slurm.python is not None:
            found_by = f"only {python_of(config.slurm)} finds it"
            notes = [f"whether {module_of(config)} is copied is not known: {found_by}"]
        plan = msgspec.structs.replace(plan, notes=(*plan.notes, *notes))
        changes = "" if old is None else _changes(paths, old, plan)
    plan = plan if old is None else _compared(config, old, plan, changes, choice)
    gone = Moves(paths, plan.record).lost_directory(config)
    return msgspec.structs.replace(plan, notes=(*plan.notes, gone)) if gone else plan


def _compared(
    config: RunConfig, old: CodeRecord, plan: CodePlan, changes: str, choice: CodeChoice | None
) -> CodePlan:
    drift = package_drift(old, plan.record)
    if choice == "new":
        told = f"takes the code as it is now: {changes}" if changes else ""
        return msgspec.structs.replace(plan, notes=(*plan.notes, *([told] if told else [])))
    if changes:
        raise ConfigError(
            "the code is not what the run was submitted with",
            where=", ".join(tree.root for tree in plan.record.trees or old.trees),
            found=changes,
            expected="the same files",
            remedy="--code run goes on with the run's own copy, --code new takes the code as it is now",
        )
    if drift and config.code.on_drift == "refuse":
        raise ConfigError(
            "the packages are not those that the run was submitted with",
            where=python_of(config.slurm) or sys.executable,
            found="; ".join(drift),
            remedy="install the former ones, accept these with --code new, or set code.on_drift=report",
        )
    notes = [f"packages have changed since the run was submitted: {'; '.join(drift)}"] if drift else []
    if choice == "run" and old.trees:
        notes.append("the run goes on with its own copy of the code")
    # The record stays as it is: later starts are compared with the first submission, not with the newest.
    return msgspec.structs.replace(plan, record=old, contents=(), notes=(*plan.notes, *notes), kept=True)


def _installed(config: RunConfig, *, ask_python: bool) -> tuple[Installed, list[str]]:
    """Returns what the ranks' Python has, and notes."""
    # In an image the packages are the image's. PYTHONPATH reaches into it.
    if config.slurm.container is not None or not (ask_python or config.slurm.python is None):
        # PYTHONPATH alone tells where modules are, if Python is not asked.
        inherited = absolute_only(os.environ.get(PYTHONPATH, ""))[0]
        return Installed(search=tuple(place for place in inherited.split(os.pathsep) if place)), []
    python = python_of(config.slurm) or sys.executable
    installed = look(python)
    unknown = f"{python} does not tell which packages it has; they are not recorded"
    return installed, [] if installed.python else [unknown]


def _present(
    config: RunConfig,
    places: Sequence[Path],
    installed: Installed,
    known: TreesRead,
    former: Mapping[str, Collection[str]],
) -> CodePlan:
    programs = programs_of(config, installed.search)
    notes = []
    looked = installed.python or config.slurm.container is not None
    if not programs and looked and config.code.tree is not None and (module := module_of(config)):
        notes.append(
            f"{module} is not copied: it is part of an installed package, or the nodes alone have it"
        )
    contents = []
    for found in _trees(config, programs, former):
        key = (found.root, tuple(found.names))
        if key not in known:
            known[key] = _content(found)
        contents.append(known[key])
        notes += [*found.notes, *known[key].notes]
    place, told = _working_directory(config, places, contents)
    trees = [content.tree for content in contents]
    record = CodeRecord(
        submitted_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        trees=tuple(trees),
        programs={
            str(program.path): f"{tree.digest}/{path.relative_to(tree.root)}"
            for program in programs
            for tree in trees
            if (path := program.path.resolve()).is_relative_to(tree.root)
        },
        directory=str(place),
        search=tuple(
            path
            for path in installed.search
            if not is_ours(path) and any(Path(path).resolve().is_relative_to(tree.root) for tree in trees)
        ),
        python=installed.python,
        packages=installed.packages,
    )
    # The code of a run that goes on with it unchanged is known by what it did.
    if contents and not former and not _may_call_us(config, contents):
        notes.append(
            f"no file of the copied code names verl_slurm: unless an installed package of yours calls {WAYS_IN}, "
            "nothing is saved, and the run fails once the program has ended"
        )
    _require_words(config, place, contents)
    return CodePlan(record=record, contents=tuple(contents), notes=(*notes, *told))


def _may_call_us(config: RunConfig, contents: Sequence[CodeContent]) -> bool:
    """Returns whether the program, or what is copied with it, names this package."""
    words = config.trainer.command
    if config.trainer.backend != "command" or any("verl_slurm" in word for word in words):
        return True
    programs = {Path(word).resolve() for word in words[:1]}
    for content in contents:
        for name in content.fingerprint.files:
            path = Path(content.tree.root, name)
            # A class may be named in settings, as Lightning's and Hydra's are.
            if not name.endswith((".py", ".yaml", ".yml")) and path not in programs:
                continue
            try:
                if _OURS.search(read_regular(path, SOURCE, follow=True)):
                    return True
            # Too large, or gone: it is not known to lack it.
            except (OSError, ValueError):
                return True
    return False


def _content(found: Listing) -> CodeContent:
    files = read_tree(found.root, found.names)
    commit = commit_of(found.root) if found.of_git else Commit()
    diff = diff_of(found.root, found.names) if commit.commit else b""
    notes = () if diff is not None else (_NO_DIFF,)
    tree = CodeTree(
        root=str(found.root),
        digest=files.digest,
        num_files=len(files.files),
        num_bytes=files.num_bytes,
        commit=commit.commit,
        branch=commit.branch,
        dirty=commit.dirty,
        diff=sha256(diff).hexdigest() if diff else "",
    )
    return CodeContent(tree=tree, fingerprint=files, diff=diff or b"", notes=notes)


def _trees(
    config: RunConfig, programs: Sequence[Program], former: Mapping[str, Collection[str]]
) -> list[Listing]:
    """Returns the trees that are copied; `former`: root → files of a tree of the run that goes on."""
    code = config.code
    if code.tree is None:
        return []
    left_out = _left_out(config, programs)

    def listed(root: Path, *, ask_git: bool) -> Listing:
        return list_code(
            root,
            include=code.include,
            exclude=code.exclude,
            left_out=left_out,
            max_mb=code.max_mb,
            ask_git=ask_git,
            former=former.get(str(root)),
        )

    if code.tree != "auto":
        root = _directory(code.tree)
        return [_with_all(listed(root, ask_git=_git_answers(root)), programs)]
    trees: dict[Path, Listing] = {}
    for program in programs:
        if any(tree.has(program.path) for tree in trees.values()):
            continue
        folder = program.path.resolve().parent
        top, note = work_tree(folder)
        # Settings of the whole home are kept in a repository by some.
        if (
            top is not None
            and not holds_other_things(top)
            and (tree := listed(top, ask_git=True)).has(program.path)
        ):
            trees[top] = tree
        elif program.alone:
            # Git ignores it, or does not know it: nothing tells what belongs to it.
            beside = trees[folder].names if folder in trees else []
            # Globs that are meant for a tree need not fit here.
            globs = [] if top or trees else code.include
            further = [name for glob in globs for name in included(folder, glob, left_out)]
            names = sorted({*beside, program.path.resolve().name, *further})
            trees[folder] = Listing(folder, names, [note] if note else [], of_git=False)
        else:
            tree = _with_all(listed(folder, ask_git=False), [program])
            trees[folder] = tree._replace(notes=[*([note] if note else []), *tree.notes])
    return list(trees.values())


def _git_answers(root: Path) -> bool:
    # The user has named what is copied, so git is a help and no condition.
    try:
        return work_tree(root).top is not None
    except ConfigError:
        return False


def _directory(text: str) -> Path:
    root = Path(text).resolve()
    if not root.is_dir():
        raise ConfigError(
            "no such directory", where="code.tree", found=text, expected="a directory, auto or null"
        )
    return root


def _with_all(tree: Listing, programs: Sequence[Program]) -> Listing:
    for program in programs:
        # That program would run from where it lies, and not from the copy.
        if not tree.has(program.path):
            raise ConfigError(
                "a program is not in the code that is copied",
                where=f"{program.key}: {program.path}",
                expected=f"one of the {counted(len(tree.names), 'file')} of {tree.root}",
                remedy="name it in code.include"
                if program.path.resolve().is_relative_to(tree.root)
                else "set code.tree to a directory that holds it",
            )
    return tree


def _left_out(config: RunConfig, programs: Sequence[Program]) -> set[Path]:
    """Lists what lies in a tree and is no code: secrets, the run, models and data, and where this command prints to."""
    encryption = config.checkpoint.encryption
    secret = [*config.env_from_files.values(), config.hooks.webhook_token_file]
    if encryption is not None:
        secret += [encryption.key_file, *encryption.old_key_files]
    places = [
        *(
            config.run_dir,
            config.model.path,
            config.data.root,
            config.data.eval_root,
            config.checkpoint.local_dir,
        ),
        config.model.reward.removeprefix("classifier:"),
    ]
    printed = [os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2) if os.path.exists(f"/proc/self/fd/{fd}")]
    found = {Path(text).resolve() for text in [*secret, *places, *printed] if text and text.startswith("/")}
    # `data.root: .` is the directory of the program as well.
    return {place for place in found if not any(p.path.resolve().is_relative_to(place) for p in programs)}


def _working_directory(
    config: RunConfig, places: Sequence[Path], contents: Sequence[CodeContent]
) -> tuple[Path, list[str]]:
    """Returns the first of `places`, or the last, the configuration's directory, if only that is copied; and notes."""
    here, there = (Path(os.path.realpath(place)) for place in (places[0], places[-1]))
    # Nobody works in the directory of our examples.
    if here == there or not config.trainer.command or is_ours(str(there)) or _copied_names(here, contents):
        return here, []
    pairs = [(word, text) for word in config.trainer.command[1:] for text in _relative(word)]
    only_here, only_there = (
        [word for word, text in pairs if os.path.exists(one / text) and not os.path.exists(other / text)]
        for one, other in ((here, there), (there, here))
    )
    if _copied_names(there, contents) and not only_here:
        note = f"the program works in {there}, beside the configuration: {here} is not copied with it"
        return there, [note]
    said = [
        *(
            [f"{', '.join(only_there)} of trainer.command: beside the configuration and not there"]
            * bool(only_there)
        ),
        *(
            [f"{', '.join(only_here)} of trainer.command: there and not beside the configuration"]
            * bool(only_here)
        ),
    ]
    remedy = f"write absolute paths, or submit in {there}"
    return here, [f"the program works in {here}; {'; '.join(said)}; {remedy}"] * bool(said)


def _relative(word: str) -> list[str]:
    """Returns what a word of a command may name relative to the working directory."""
    texts = dict.fromkeys((word, word.partition("=")[2]))
    return [text for text in texts if text and not text.startswith(("/", "-"))]


def _copied_names(here: Path, contents: Sequence[CodeContent]) -> set[str]:
    """Returns the files and directories of the tree whose copy has this directory; empty: none has."""
    for content in contents:
        if here.is_relative_to(content.tree.root):
            known = set(content.fingerprint.files)
            known |= {str(above) for path in known for above in Path(path).parents}
            # The copy has this directory only if it has a file of it.
            return known if os.path.relpath(here, content.tree.root) in known else set()
    return set()


def _require_words(config: RunConfig, here: Path, contents: Sequence[CodeContent]) -> None:
    """Refuses arguments that name files of the tree that are not copied. `here`: where the program works."""
    # The program runs in the copy, if there is one of this directory.
    known = _copied_names(here, contents)
    if not known:
        return
    root = next(Path(one.tree.root) for one in contents if here.is_relative_to(one.tree.root))
    for word in config.trainer.command[1:]:
        for text in _relative(word):
            path = Path(os.path.normpath(here / text))
            inside = path.is_relative_to(root) and path != root
            if inside and os.path.exists(path) and os.path.relpath(path, root) not in known:
                raise ConfigError(
                    "the program gets the name of a file that is not copied with it",
                    where="trainer.command",
                    found=word,
                    expected=f"a file of the copied code of {root}, or an absolute path",
                    remedy=f"write {path}, or name it in code.include",
                )


def _changes(paths: RunPaths, old: CodeRecord, plan: CodePlan) -> str:
    """Returns the differences between the run's code and the present one; empty: none."""
    before = {tree.root: tree.digest for tree in old.trees}
    now = {content.tree.root: content.fingerprint for content in plan.contents}
    said = []
    for root in sorted(before.keys() | now.keys()):
        if root not in now:
            said.append(f"{root} is not copied any more")
        elif root not in before:
            said.append(f"{root} was not copied")
        elif before[root] != now[root].digest:
            said.append(Drift.between(files_of(paths, before[root]), now[root].files).one_line())
    return "; ".join(said)


def keep_code(undo: ExitStack, paths: RunPaths, plan: CodePlan) -> list[ev.Notice]:
    """Makes the copies and writes the record; returns what the journal is told.

    Raises:
        Fenced: the code has changed since it was read.
        OSError: no room, or no permission.
    """
    if plan.kept:
        return []
    for content in plan.contents:
        private_dir(paths.code)
        undo.callback(remove_new, paths.code, names_in(paths.code))
        copy_tree(paths, Path(content.tree.root), content.fingerprint)
        if content.diff:
            # 0600: a diff may hold what was not meant for others.
            write_file(paths.code_diff(content.tree.diff), content.diff)
    replace_content(undo, paths.code_record, msgspec.json.encode(plan.record) + b"\n")
    return [ev.Notice(TOPIC, f"{COPIED}{line}") for line in plan.lines()]
