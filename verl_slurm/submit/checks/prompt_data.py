"""Checks the data of a run for `submit`: refuses what the ranks would refuse, and describes it in one line."""

import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from verl_slurm.base.bounded import vocabulary_of
from verl_slurm.base.errors import UNREADABLE, DataError, together
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.checks.probe_command import run_to_end
from verl_slurm.config.schema import BUILTIN, RunConfig
from verl_slurm.dataset.prompts.chat_template import has_template, model_template, read_template
from verl_slurm.dataset.prompts.choice import (
    data_names,
    is_data,
    missing_shards,
    names_shards,
    splits_of,
    takes,
    unfinished_downloads,
)
from verl_slurm.dataset.prompts.directory import data_files, names_below, refuse_empty_side
from verl_slurm.dataset.prompts.look import PromptsLook, PromptsRequest, Rows, WantedRows
from verl_slurm.dataset.prompts.rows import is_held_out
from verl_slurm.submit.checks.model_files import refuse_pointers

_TIMEOUT_S = 120.0
_PROMPTS = ("prompt", "question", "problem", "messages", "instruction", "query", "input")
# Names of columns in public data sets, the more telling first.
_ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth", "solution", "target", "label", "output")
_ANY_LENGTH = 1 << 20
_TOO_LARGE = "a row that takes more than 352 MiB of memory"
_OF_MEMORY = re.compile(r"MemoryError|memory allocation of|bad_alloc|[Oo]ut of memory|Cannot allocate memory")
_MOST_NAMED = 4


class _Answer(msgspec.Struct, frozen=True):
    look: PromptsLook | None = None
    rows: Rows | None = None
    error: dict[str, str | None] | None = None


class DataSeen(NamedTuple):
    """The data of a root, as far as it was read."""

    text: str
    """Describes it in one line."""
    notes: list[str]
    """For the user."""
    look: PromptsLook


def check_data(config: RunConfig, key: str = "data.root", *, begun: bool = False) -> DataSeen:
    """Reads `data.root` or `data.eval_root` (`key`), paths absolute: every row, as far as two seconds reach.

    `begun`: the run has trained on this data, and can only go on with it: what is missing is a note.

    Raises:
        DataError: missing, empty, unreadable or of another form, with file and row.
    """
    data = config.data
    root = data.root if key == "data.root" else data.eval_root or ""
    # Each file by itself: rows are read for two seconds, which may not reach the last files.
    names = data_files(Path(root), data, key=key)
    for name in names:
        if not os.access(path := Path(root) / name, os.R_OK, effective_ids=True):
            raise DataError(
                "a data file cannot be read",
                where=path,
                found=os.strerror(errno.EACCES),
                remedy=f"chmod u+r {shell_word(path)}",
            )
    pattern = data.files if key == "data.root" else data.eval_files
    files_key = key.replace("root", "files")
    notes = refuse_partial(
        Path(root),
        names,
        names_below(Path(root), pattern),
        takes(pattern, names),
        remedy=f"copy or download them; to use a part, name its numbers: {files_key}='train-0000?-of-00003.jsonl'",
        known=begun or names_shards(pattern),
        key=key,
    )
    found = _look(_wanted(config, key))
    kind = "conversations" if found.conversations else "prompts"
    rows = f"{found.rows} {kind if found.rows != 1 else kind[:-1]}"
    text = f"{root}: {counted(found.files, 'file')}, {rows if found.whole else f'more than {rows}'}"
    if found.begin:
        text += f"; each {'that is text ' if found.conversations else ''}begins with {found.begin}"
    # The pattern is the user's, so it is taken; that it reaches into a test split may be an oversight.
    if len(splits := splits_of(names) - {""}) > 1:
        notes.append(f"{files_key} takes files of several splits: {', '.join(sorted(splits))}")
    if pattern is None and (unread := _beside(Path(root), names)):
        notes.append(f"{key}: not read, set {files_key} if they belong to it: {', '.join(unread)}")
    if found.doubtful:
        notes.append(
            f"{key}: {counted(found.doubtful, 'answer')} read like a missing value, the first at {found.first_doubtful}"
        )
    if found.media:
        notes.append(
            f"{key}: no image, video or sound is given to the model: its mark is text, the first at {found.media}"
        )
    # Two seconds of rows, and no more: a data set of hours would hold the submission up, and the ranks read it all.
    if not found.whole:
        notes.append(f"{key}: only the first {found.rows} rows were looked at; the ranks read them all")
    elif not found.measured and not config.model.path.startswith(BUILTIN):
        taken = "" if found.rendered else "the chat template takes each, and that "
        text += f"; the ranks check that {taken}none has more than {data.max_prompt_tokens} tokens"
    return DataSeen(text, notes, found)


def check_sides(config: RunConfig, root: PromptsLook, held_out: PromptsLook | None) -> str:
    """Returns how many prompts of `data.root` train, for its description; empty: all of them.

    `held_out`: the look at `data.eval_root`; None: there is none, or a built-in one.

    Raises:
        DataError: nothing would train, or nothing is held out.
    """
    data = config.data
    if data.eval_root is not None:
        # A conversation is never compared with a text, which may have the special tokens.
        alike = held_out is not None and held_out.conversations is root.conversations
        known = held_out.numbers if held_out and alike else None
        chosen = None if known is None else set(known)
    elif data.eval_fraction:
        # By the very text: of a rendered conversation, the special tokens are not known here.
        known = None if root.conversations else root.numbers
        chosen = None if known is None else {one for one in known if is_held_out(one, data.eval_fraction)}
    else:
        return ""
    if chosen is None or root.numbers is None:
        return "; the ranks find which of them are held out"
    train = sum(one not in chosen for one in root.numbers)
    refuse_empty_side(Path(data.root), data, train, root.rows - train if held_out is None else held_out.rows)
    return "" if train == root.rows else f"; {train} train, {root.rows - train} are held out"


def refuse_partial(
    root: Path,
    chosen: Sequence[str],
    names: Sequence[str],
    belongs: Callable[[str], bool],
    *,
    remedy: str,
    known: bool,
    key: str,
) -> list[str]:
    """Refuses data of which a part is not there; returns notes.

    Args:
        chosen: the files that are read, relative to `root`.
        names: all that lies there.
        belongs: whether a further file would be read, too (`unfinished_downloads`).
        remedy: for shards.
        known: the user knows: it is said and not refused.

    Raises:
        DataError: shards are missing, or a download is not finished.
    """
    refuse_pointers(root / name for name in chosen)
    problems = []
    if lacking := missing_shards(chosen, names):
        problems.append(
            DataError(
                "shards of the data are missing",
                where=root,
                found=lacking,
                expected="every shard that the files' names count",
                remedy=remedy,
            )
        )
    if unfinished := unfinished_downloads(chosen, names, belongs):
        problems.append(
            DataError(
                "a download of the data is not finished",
                where=root,
                found=unfinished[0] + (f" and {len(unfinished) - 1} more" if unfinished[1:] else ""),
                remedy=f"finish it, or remove what is left of it: {shell_word(root / unfinished[0])}",
            )
        )
    if problems and not known:
        raise together(problems)
    return [f"{key}: {problem.what}: {problem.found}" for problem in problems]


def _beside(root: Path, names: Sequence[str]) -> list[str]:
    """Lists up to four files of data beside those that are read."""
    folder = Path(names[0]).parent
    if (root / folder / "state.json").exists():
        return []  # of `datasets`, whose caches lie beside its files
    there = sorted(os.path.normpath(folder / name) for name in os.listdir(root / folder))
    return [name for name in data_names(there) if is_data(name) and name not in names][:_MOST_NAMED]


def recognize(config: RunConfig, answer_key: str | None = None) -> tuple[RunConfig, str]:
    """Returns `config` with the columns of prompt and answer that the first row has, and room for the longest prompt.

    Args:
        config: paths absolute; `data.max_prompt_tokens` is the least room.
        answer_key: as the user named it; None: by the names that such columns usually have.

    Returns:
        Also the keys of the first row, as text, if none of them is known to hold answers; else empty.

    Raises:
        DataError: as `check_data`; or no column has a name that prompts usually have.
    """
    data_files(Path(config.data.root), config.data)

    def with_data(**changes: Any) -> RunConfig:
        return msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, **changes))

    def refusal(**keys: str | None) -> DataError | None:
        try:
            _look(_wanted(with_data(limit=1, max_prompt_tokens=_ANY_LENGTH, **keys), "data.root"))
        except DataError as error:
            return error
        return None

    refused = []
    for prompt in _PROMPTS:
        if (error := refusal(prompt_key=prompt, answer_key=None)) is None:
            break
        refused.append(error)
    else:
        # Of a column that is there: why it is refused. Else the error lists the columns that are there.
        raise next((error for error in refused if not str(error.found).startswith("keys ")), refused[0])
    answer, keys = answer_key, ""
    if answer_key is None:
        answer = next((key for key in _ANSWERS if refusal(prompt_key=prompt, answer_key=key) is None), None)
    # A key that no row has: the refusal lists the keys that are there.
    if answer is None and (lacking := refusal(prompt_key=prompt, answer_key="\0")) is not None:
        keys = str(lacking.found) if str(lacking.found) != f"keys {prompt}" else ""
    chosen = with_data(prompt_key=prompt, answer_key=answer, max_prompt_tokens=_ANY_LENGTH)
    longest = _look(_wanted(chosen, "data.root")).longest
    room = max(config.data.max_prompt_tokens, 1 << max(longest - 1, 0).bit_length())
    return with_data(prompt_key=prompt, answer_key=answer, max_prompt_tokens=room), keys


def _wanted(config: RunConfig, key: str) -> PromptsRequest:
    data = config.data
    # A built-in model may not be built yet.
    model = None if config.model.path.startswith(BUILTIN) else Path(config.model.path)
    if data.chat_template in ("auto", "none"):
        # `auto` takes the model's own template, so whether conversations can be read depends on it.
        there = model is not None and has_template(model)
        template = model_template(model) if there and model is not None else None
    else:
        refuse_pointers([Path(data.chat_template)])
        template = read_template(Path(data.chat_template))
        there = bool(template)
    tokenizer = model / "tokenizer.json" if model is not None else None
    return PromptsRequest(
        data=data,
        root=data.root if key == "data.root" else data.eval_root or "",
        key=key,
        tokenizer=str(tokenizer) if tokenizer is not None and tokenizer.is_file() else None,
        has_template=there,
        vocabulary=_vocabulary(model),
        template=template,
    )


def _vocabulary(model: Path | None) -> int | None:
    try:
        return None if model is None else vocabulary_of(model)
    # Whoever loads the model says it with its reason.
    except (OSError, *UNREADABLE):
        return None


def _look(wanted: PromptsRequest) -> PromptsLook:
    answer, words = _ask(wanted, wanted.root)
    if answer.look is not None:
        return answer.look
    files_key = wanted.key.replace("root", "files")
    of = wanted.data.chat_template
    template = "the model's chat template" if of == "auto" else f"the chat template {of}"
    rendered = f"whether {template} ends, and " * bool(wanted.template)
    raise DataError(
        "the data cannot be looked at",
        where=wanted.root,
        found=words,
        expected="rows of moderate size" if words == _TOO_LARGE else None,
        remedy=f"see {rendered}which row that is: set {files_key} to one file after the other, or to smaller ones",
    )


def look_at_files(wanted: WantedRows, where: str) -> Rows | str:
    """Returns what the files of another trainer hold, or why they cannot be looked at. May raise DataError."""
    answer, words = _ask(wanted, where)
    return words if answer.rows is None else answer.rows


def _ask(wanted: PromptsRequest | WantedRows, where: str) -> tuple[_Answer, str]:
    """Returns the answer of the process that looks; empty if it died, with its last words or `_TOO_LARGE`."""
    # A process of its own with bounded memory: a compressed page may need a thousand times its size.
    command = [sys.executable, "-P", "-m", "verl_slurm.dataset.prompts"]
    done = run_to_end(command, _TIMEOUT_S, text=msgspec.json.encode(wanted).decode())
    if done.exit_code is None:
        raise DataError(
            "the data cannot be read in time",
            where=where,
            found=f"no answer after {_TIMEOUT_S:.0f} s",
            remedy="see whether its storage answers, and whether its chat template ends",
        )
    try:
        answer = msgspec.json.decode(done.out, type=_Answer)
    # It died without an answer: killed, of a library's crash, or of an exception of its own.
    except UNREADABLE:
        # The kernel kills for memory, a library written in Rust or C++ ends itself.
        if done.exit_code != -signal.SIGKILL and not _OF_MEMORY.search(done.last_words):
            return _Answer(), done.last_words
        answer = _Answer()
    if answer.error is not None:
        parts: dict[str, Any] = dict(answer.error)
        raise DataError(parts.pop("what"), **parts)
    return answer, _TOO_LARGE
