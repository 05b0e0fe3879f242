"""Examines the data of a run before it is queued: every row, as far as time allows, and the length of the prompts.

It runs in a process of its own (`python -m verl_slurm.dataset.prompts`). The ranks read every row in any case.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from verl_slurm.base.bounded import TOKENIZER, TooMuch, decode_json, open_regular, read_regular
from verl_slurm.base.errors import UNREADABLE, DataError
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.config.schema import DataConfig
from verl_slurm.dataset.prompts.chat_template import (
    no_conversations,
    no_template,
    refuses,
    renderer,
    require_asked,
    template_refuses,
    tokens_of,
)
from verl_slurm.dataset.prompts.directory import data_files, no_rows
from verl_slurm.dataset.prompts.formats import records
from verl_slurm.dataset.prompts.rows import (
    Messages,
    MissingValue,
    found_at,
    number_of,
    prompts_of,
    reads_missing,
    refuse_halves,
    value_at_key,
)

_AT_LEAST_ROWS = 2000
"""Rows that are examined however slow the machine is."""
_TEXTS_AT_ONCE = 1000
MOST_TEXTS = 1000
_MOST_NUMBERS = 1 << 18
_MEDIA = re.compile("<(?:image|video|audio)>")


class PromptsRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request for a look."""

    data: DataConfig
    root: str
    key: str
    """`data.root` or `data.eval_root`."""
    tokenizer: str | None
    """A tokenizer.json; None: the length of the prompts is not examined."""
    has_template: bool
    """There is a chat template."""
    vocabulary: int | None = None
    """Number of the model's tokens; None: not known."""
    template: str | None = None
    """Its text; None: it is not known here, and conversations are not rendered."""
    seconds: float = 2.0


class PromptsLook(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a look."""

    files: int
    rows: int
    whole: bool
    """All rows were examined."""
    conversations: bool
    """One of the prompts is a list of messages."""
    measured: bool
    """The length of every prompt was measured, too."""
    rendered: bool = True
    """The chat template took each conversation."""
    longest: int = 0
    """Tokens of the longest prompt that was measured."""
    doubtful: int = 0
    """Answers that read like a missing value, e.g. `nan`."""
    first_doubtful: str = ""
    """Place and text of the first of them."""
    media: str = ""
    """Place of the first prompt with a mark for an image, a video or sound, which is text to the trainer."""
    numbers: list[int] | None = None
    """`number_of` each row's prompt, of a conversation as it is rendered here; None: no side is asked for, or not all
    are known."""
    begin: str = ""
    """The token that the tokenizer puts before each prompt that is text."""


class WantedRows(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request for a look at the data of another trainer, which names the keys that it reads."""

    files: list[str]
    keys: list[str]
    """Keys that each row needs."""
    messages: str
    """The one that holds a conversation."""
    texts: str = ""
    """The one whose different texts are told."""
    also: list[str] = []
    """Columns that are read, too, if they are there: text in them has to be UTF-8."""
    seconds: float = 2.0


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Result of that look."""

    rows: int
    whole: bool
    """All rows were examined."""
    lacking: dict[str, tuple[str, str]]
    """Key to the first row without it, and what is there instead; a null counts as well."""
    no_messages: tuple[str, str] | None = None
    """The first row without a list of messages, and what is there."""
    texts: dict[str, str] = {}
    """Text to the first row that has it; the first `MOST_TEXTS`."""


class _Tokenizer(Protocol):
    def encode(self, text: str) -> Any: ...
    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]: ...


def look_at(wanted: PromptsRequest) -> PromptsLook:
    """Examines the data. Raises DataError if the ranks would refuse it."""
    root, config = Path(wanted.root), wanted.data
    files = data_files(root, config, key=wanted.key)
    limit = config.limit if wanted.key == "data.root" else None
    tokenizer = _load(wanted.tokenizer)
    begin = _begin(tokenizer, Path(wanted.tokenizer).parent) if tokenizer and wanted.tokenizer else None
    lengths = _Lengths(tokenizer, config.max_prompt_tokens, begin, wanted.vocabulary)
    render = renderer(wanted.template) if wanted.template is not None else None
    # A time, not a number of rows: a user waits for the submission, and the ranks read every row in any case.
    until = time.monotonic() + wanted.seconds
    rows, whole, conversations = 0, True, False
    missing, doubtful, first_doubtful, media = _Missing(), 0, "", ""
    numbers, has_sides = list[int](), bool(config.eval_root is not None or config.eval_fraction)
    for name in files:
        # Rows behind `data.limit` never train, so nothing is asked of them.
        if rows == limit:
            break
        path = root / name
        try:
            with os.fdopen(open_regular(path, follow=True), "rb") as file:
                # By the same function as the ranks: what passes here fails there for its content alone.
                for where, prompt, answer in prompts_of(file, path, config, missing.add):
                    rows += 1
                    if reads_missing(answer):
                        doubtful += 1
                        first_doubtful = first_doubtful or f"{where}: {answer!r}"
                    media = media or where * bool(_MEDIA.search(str(prompt)))
                    text = None
                    if isinstance(prompt, str):
                        lengths.add(where, text := prompt)
                    elif config.chat_template == "none":
                        raise no_conversations(where)
                    elif not wanted.has_template:
                        raise no_template(where)
                    else:
                        # Their length is not measured: that needs the special tokens, and so transformers.
                        conversations = True
                        if render is not None:
                            text = _rendered(render, where, prompt)
                    if has_sides and text is not None and rows <= _MOST_NUMBERS:
                        numbers.append(number_of(text))
                    if rows == limit:
                        break
                    # After the first row of each file, so that each file is examined.
                    if rows >= _AT_LEAST_ROWS and time.monotonic() > until:
                        whole = False
                        break
        except (TooMuch, OSError) as error:
            raise _unreadable(path, wanted.key, error) from None
    missing.refuse(rows, wanted.key)
    # The rest of the last batch.
    lengths.look()
    if not rows:
        raise no_rows(root, len(files), wanted.key)
    return PromptsLook(
        files=len(files),
        rows=rows,
        whole=whole,
        conversations=conversations,
        measured=whole and lengths.there and not conversations,
        rendered=not conversations or render is not None,
        longest=lengths.longest,
        doubtful=doubtful,
        first_doubtful=first_doubtful,
        media=media,
        numbers=numbers if has_sides and whole and len(numbers) == rows else None,
        begin=begin.tokens[0] if begin is not None and lengths.any else "",
    )


def _unreadable(path: Path, key: str, error: TooMuch | OSError) -> DataError:
    if isinstance(error, TooMuch):
        return DataError(
            "not a file", where=path, found=error, expected="a regular file", remedy=f"set {key}"
        )
    remedy = f"chmod u+r {shell_word(path)}"
    return DataError("a data file cannot be read", where=path, found=error.strerror, remedy=remedy)


def _rendered(render: Callable[[Messages], str], where: str, prompt: Messages) -> str:
    try:
        return require_asked(where, prompt, render(prompt))
    except Exception as error:
        if not refuses(error):
            raise
        raise template_refuses(where, error) from None


def look_at_rows(wanted: WantedRows) -> Rows:
    """Examines the rows of some files, as far as time reaches; the first row of each file in any case. Raises DataError
    for content that cannot be read or encoded, OSError and TooMuch for a file that cannot be opened.
    """
    until, rows, whole = time.monotonic() + wanted.seconds, 0, True
    lacking, texts = dict[str, tuple[str, str]](), dict[str, str]()
    no_messages: tuple[str, str] | None = None
    columns = {key.partition(".")[0] for key in wanted.keys}
    for name in wanted.files:
        with os.fdopen(open_regular(name, follow=True), "rb") as file:
            for where, row in records(file, name, columns, wanted.also):
                rows += 1
                told = row if isinstance(row, dict) else {}
                # Of each column that was read: readers of whole tables refuse the file for any of them.
                refuse_halves(row, where)
                for key in wanted.keys:
                    if key not in lacking and value_at_key(told, key) is None:
                        lacking[key] = where, found_at(told, key)
                value = value_at_key(told, wanted.messages)
                if no_messages is None and value is not None and not _is_conversation(value):
                    no_messages = where, found_at(told, wanted.messages)
                if wanted.texts and len(texts) < MOST_TEXTS:
                    text = value_at_key(told, wanted.texts)
                    if isinstance(text, str) and text not in texts:
                        texts[text] = where
                if time.monotonic() > until:
                    whole = False
                    break
    return Rows(rows=rows, whole=whole, lacking=lacking, no_messages=no_messages, texts=texts)


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and "role" in message for message in value)
    )


class _Missing:
    """Counts the rows without a prompt or an answer, so that one message tells how many there are."""

    def __init__(self) -> None:
        self._first: dict[str, MissingValue] = {}
        self._counts: Counter[str] = Counter()

    def add(self, error: MissingValue) -> None:
        self._first.setdefault(error.key, error)
        self._counts[error.key] += 1

    def refuse(self, rows: int, root: str) -> None:
        """Raises MissingValue if there was one; `rows` were looked at, of the root with this key."""
        for key, error in self._first.items():
            count = self._counts[key]
            if count > 1:
                error.what = f"{count} of {counted(rows, 'row')} have no text under {key!r}"
            if root == "data.eval_root":  # another key would be the training rows', too
                error.remedy = "write what is held out under the keys of the training rows"
            if count < rows:
                error.remedy = f"fix or remove {'it' if count == 1 else 'them'}, or {error.remedy}"
            raise error


class _Lengths:
    """Counts tokens, a batch of prompts at a time."""

    def __init__(self, tokenizer: _Tokenizer | None, most: int, begin: Any, vocabulary: int | None) -> None:
        self._tokenizer, self._most, self._vocabulary = tokenizer, most, vocabulary
        self._begin, self.any = [] if begin is None else begin.ids[:1], False
        self._held: list[tuple[str, str]] = []
        self.there = tokenizer is not None
        self.longest = 0

    def add(self, where: str, prompt: str) -> None:
        if self._tokenizer is not None:
            self._held.append((where, prompt))
            self.any = True
            # In batches: a call for each prompt costs more than its tokens, and all texts at once would not fit.
            if len(self._held) == _TEXTS_AT_ONCE:
                self.look()

    def look(self) -> None:
        held, self._held = self._held, []
        if self._tokenizer is None or not held:
            return
        tokenizer = self._tokenizer

        def encode(texts: list[str]) -> list[list[int]]:
            return [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

        def place(text: str) -> str:
            return next(where for where, prompt in held if prompt == text)

        found = tokens_of(encode, [prompt for _, prompt in held], place, self._vocabulary)
        for (where, prompt), tokens in zip(held, found, strict=True):
            # As `trainer.data` puts it there.
            length = len(tokens) + (len(self._begin) if tokens[:1] != self._begin else 0)
            self.longest = max(self.longest, length)
            if length > self._most:
                raise DataError(
                    "a prompt is too long",
                    where=f"{where}, prompt {prompt[:40]!r}",
                    found=f"{length} tokens",
                    expected=f"at most data.max_prompt_tokens={self._most}",
                    remedy="raise data.max_prompt_tokens",
                )


def _begin(tokenizer: _Tokenizer, model: Path) -> Any:
    """Returns the tokens of a text if the model's BOS is put before it; else None."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            data = read_regular(model / name, TOKENIZER, follow=True)
            said = decode_json(data, dict[str, msgspec.Raw], TOKENIZER, doubles=False).get("bos_token")
        except (OSError, *UNREADABLE):
            continue
        if said is not None:
            token = msgspec.json.decode(said)
            text = token.get("content") if isinstance(token, dict) else token
            encoded = tokenizer.encode("x")
            return encoded if encoded.tokens[:1] == [text] else None
    return None


def _load(path: str | None) -> _Tokenizer | None:
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer  # type: ignore[import-untyped]

        tokenizer = Tokenizer.from_file(path)
        # The file may ask for both: a cut prompt would never be too long, and a padded one always.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except Exception:  # noqa: BLE001 - it raises plain Exception; the ranks have more ways to load a tokenizer
        return None
    loaded: _Tokenizer = tokenizer
    return loaded
