"""Turns a row of a data file into a prompt and an answer.

A key is a name at the top of the row, or a path with dots into nested columns (`reward_model.ground_truth`). A prompt
is text, or a conversation: a list of `{role, content}`, which the model's chat template turns into text. The reward
gets an answer that is no text as JSON.

A missing value is refused in every spelling: no key, null, NaN, empty or blank text, text of characters that are not
seen, a list or an object of nothing else. A prompt is refused as well where its whole text is a table's word for a
missing value (`reads_missing`); as an answer, `None` and the text `[]` may be right. So is a prompt whose whole text is
a conversation, as JSON or as Python or NumPy print it: no template would be applied to it.

Text that UTF-8 cannot encode is refused: JSON can write half of a surrogate pair (`"\\ud83d"`), which no tokenizer, no
template and no journal takes.
"""

import ast
import hashlib
import json
import re
import unicodedata
import warnings
from collections.abc import Callable, Collection, Iterator
from decimal import Decimal
from pathlib import PurePath
from typing import Any, BinaryIO

from verl_slurm.base.errors import DataError
from verl_slurm.config.schema import DataConfig
from verl_slurm.dataset.prompts.formats import records

Messages = list[dict[str, Any]]
"""A conversation as chat templates take it: `role` and `content`, and further keys (`name`, `tool_calls`)."""
Prompt = str | Messages

_SHOWN = 12
_MISSING = object()
_WORDS_FOR_MISSING = frozenset(
    ("null", "none", "nan", "-nan", "na", "n/a", "#n/a", "#na", "<na>", "nat", "nil", "undefined", "\\n")
)
"""Of pandas, R, SQL, spreadsheets and JavaScript, in lower case."""
_LONGEST_WORD = 32
"""With brackets and blanks around it."""
_AROUND_WORDS = "[](){}\"' \t\r\n\xa0\u200b\u200c\u200d\u2060\ufeff"
_UNSEEN = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0" + "".join(map(chr, range(0xFE00, 0xFE10)))
)
"""Characters without a form that Unicode counts as letters, marks or symbols: fillers, variation selectors."""
_BEGINS_AS_MESSAGES = re.compile(r"\s*(?:\[\s*)?\{\s*[\"']")
_SPEAKERS = frozenset(("system", "developer", "user", "human"))
_BETWEEN_MESSAGES = re.compile(r"\}\s+\{")
_OF_NUMPY = re.compile(r"\barray(?=\()|,\s*dtype=object(?=\))")


class MissingValue(DataError):
    """A row without its prompt or its answer."""

    key = ""


def number_of(text: str) -> int:
    """Returns the first 64 bits of the SHA-256 of a prompt's text, as the policy sees it."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def is_held_out(number: int, fraction: float) -> bool:
    """Returns whether `data.eval_fraction` holds out the prompts of this `number_of`."""
    return number < fraction * 2.0**64


def reads_missing(text: str) -> bool:
    """Returns whether a whole text is a word for a missing value, in brackets or quotes (`[null]`), or `[]`."""
    if len(text) > _LONGEST_WORD or not text:
        return False
    word = text.strip(_AROUND_WORDS).lower()
    return not word or word in _WORDS_FOR_MISSING


def _is_written_conversation(text: str) -> bool:
    """Returns whether a whole text is messages in JSON, or as Python or NumPy print them."""
    if not _BEGINS_AS_MESSAGES.match(text) or not ("role" in text or "from" in text):
        return False
    try:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            # NumPy writes no comma between the messages. It may change a message's text, and that is not read.
            literal = _OF_NUMPY.sub("", _BETWEEN_MESSAGES.sub("},{", text)).strip()
            with warnings.catch_warnings():  # of the escapes in it
                warnings.simplefilter("ignore")
                value = ast.literal_eval(literal)
    # A text like code stays a prompt, and so does one that is nested too deeply to be read.
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    messages = value if isinstance(value, list) else [value]
    return all(isinstance(message, dict) for message in messages) and any(
        # Other objects may have such keys: {"from": "USD", "value": 3}.
        str(message.get(speaker)).lower() in _SPEAKERS and text in message
        for message in messages
        for speaker, text in (("role", "content"), ("from", "value"))
    )


def _is_blank(text: str) -> bool:
    """Returns whether nothing of the text is seen: empty, white space, zero-width and control characters."""
    return all(
        char.isspace() or char in _UNSEEN or unicodedata.category(char) in ("Cc", "Cf") for char in text
    )


def _says_nothing(value: Any) -> bool:
    """Returns whether a value holds only nulls, NaN and blank text, at any depth."""
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            rest += part.values()
        elif isinstance(part, list | tuple):
            rest += part
        elif isinstance(part, str):
            if not _is_blank(part):
                return False
        # NaN is a float, or a Decimal, that is not itself.
        elif part is not None and part == part:
            return False
    return True


def prompts_of(
    file: BinaryIO,
    name: str | PurePath,
    config: DataConfig,
    missing: Callable[[MissingValue], None] | None = None,
) -> Iterator[tuple[str, Prompt, str]]:
    """Yields (place, prompt, answer) of every row of a data file.

    Args:
        missing: is told of each missing value, which is then yielded as empty text. None: the first one is raised.

    Raises:
        DataError: a row has no prompt or no answer, or one that cannot be used; or the file cannot be read.
    """
    prompt_key, answer_key = config.prompt_key, config.answer_key
    for where, row in records(file, str(name), _columns(config)):
        if not isinstance(row, dict):
            raise DataError(
                "a line is not an object",
                where=where,
                found=type(row).__name__,
                expected=f"an object with {prompt_key!r}",
                remedy="fix or remove it",
            )
        prompt: Prompt = ""
        answer = ""
        for key in (prompt_key, answer_key):
            if key is not None:
                refuse_halves(_value(row, key), where, key)
        try:
            prompt = _prompt(_value(row, prompt_key), row, where, prompt_key)
            answer = "" if answer_key is None else _answer(row, where, answer_key)
        except MissingValue as error:
            if missing is None:
                raise
            missing(error)
        except RecursionError as error:
            raise DataError(
                "a row is nested too deeply", where=where, found=error, remedy="fix or remove the row"
            ) from None
        yield where, prompt, answer


def refuse_halves(value: Any, where: str, key: str = "") -> None:
    """Raises DataError for text that UTF-8 cannot encode, at any depth. `key`: of the value; empty: a row."""
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            rest += [*part, *part.values()]
        elif isinstance(part, list | tuple):
            rest += part
        elif isinstance(part, str) and not part.isascii():
            try:
                part.encode()
            except UnicodeEncodeError as error:
                half, begin = part[error.start], max(error.start - _SHOWN, 0)
                raise DataError(
                    f"{repr(key) if key else 'a row'} holds half of a surrogate pair",
                    where=where,
                    found=f"{ascii(half)[1:-1]} in {part[begin : error.start + _SHOWN]!a}",
                    expected="text that UTF-8 can encode",
                    remedy="fix or remove the row; text that was cut within an emoji is like that",
                ) from None


def _columns(config: DataConfig) -> Collection[str]:
    keys = [key for key in (config.prompt_key, config.answer_key) if key is not None]
    # The top of each path: formats with columns read no other.
    return {key.partition(".")[0] for key in keys}


def _value(row: dict[str, Any], key: str) -> Any:
    """Returns the value; `_MISSING` if there is none. A name with dots in it counts before a path."""
    # A column may be called `a.b`; only without one is it a path.
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return _MISSING
        value = value[part]
    return value


def value_at_key(row: dict[str, Any], key: str) -> Any:
    """Returns the value under a key; None: there is none, or it is null."""
    value = _value(row, key)
    return None if value is _MISSING else value


def found_at(row: dict[str, Any], key: str) -> str:
    """Describes what a row has under a key, or which keys it has."""
    value = _value(row, key)
    return f"keys {', '.join(_keys(row)) or 'none'}" if value is _MISSING else _kind(value)


def _prompt(value: Any, row: dict[str, Any], where: str, key: str) -> Prompt:
    # An empty prompt has no token to start from, and `nan` is what a table writes for a prompt that it lacks.
    if isinstance(value, str) and not _is_blank(value) and not reads_missing(value):
        if _is_written_conversation(value):
            raise DataError(
                "a conversation that is written as text",
                where=where,
                found=f"{value[:_SHOWN]!r} under {key!r}",
                expected="a list of {role, content}, or the text of a prompt",
                remedy="write it as a list into .jsonl or Parquet: as text, no chat template is applied to it",
            )
        return value
    if isinstance(value, bytes):
        raise _binary(where, key)
    if not isinstance(value, list) or not value:
        raise _no_text(value, row, where, key, "text, or a list of {role, content}", "data.prompt_key")
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _no_conversation(where, key, f"message {number + 1}: {_kind(message)}")
        # Formats with columns have every key in every row, as null.
        message = {name: part for name, part in message.items() if part is not None}
        content = message.get("content")
        # Parts of text are joined; a message with an image or other media is refused.
        if isinstance(content, list):
            kinds = {part.get("type") if isinstance(part, dict) else None for part in content}
            if kinds - {"text"}:
                raise _no_conversation(where, key, f"message {number + 1} with {_kind(content)}")
            content = message["content"] = "".join(str(part.get("text", "")) for part in content)
        # A call of a tool has no text of its own.
        if not isinstance(content, str) and "tool_calls" not in message:
            raise _no_conversation(where, key, f"message {number + 1}: {_kind(message)}")
        asked = content if message["role"] == "user" else None
        if isinstance(asked, str) and (_is_blank(asked) or reads_missing(asked)):
            found = f"message {number + 1}: {_kind(asked)}"
            raise _no_text(value, row, where, key, "text from the user", "data.prompt_key", found)
        messages.append(message)
    if all(_is_blank(message.get("content", "")) and "tool_calls" not in message for message in messages):
        raise _no_text(value, row, where, key, "text in a message", "data.prompt_key")
    # The template would open another turn behind the answer that is wanted.
    if messages[-1]["role"] == "assistant":
        raise DataError(
            "a conversation ends with the assistant's message",
            where=where,
            expected=f"a user's message at the end of {key!r}: the policy answers it",
            remedy="leave out the last message, or put it under data.answer_key",
        )
    return messages


def _answer(row: dict[str, Any], where: str, key: str) -> str:
    value = _value(row, key)
    if value is _MISSING or _says_nothing(value):
        remedy = "data.answer_key; data.answer_key=null if there are no answers"
        if isinstance(value, list | dict):
            remedy += f"; write {json.dumps(type(value)())} as text where that is the answer"
        raise _no_text(value, row, where, key, "an answer", remedy)
    if isinstance(value, str):
        return value

    def plain(part: Any) -> Any:
        """Returns what Parquet has and JSON lacks, within an object: decimals, dates."""
        if isinstance(part, bytes):
            raise _binary(where, key)
        return json.loads(f"{part:f}") if isinstance(part, Decimal) else str(part)

    if isinstance(value, dict | list | tuple | int | float):
        return json.dumps(value, ensure_ascii=False, default=plain)
    # By itself it gets no quotation marks, and a decimal keeps its digits: `1.50`.
    return f"{value:f}" if isinstance(value, Decimal) else str(plain(value))


def _binary(where: str, key: str) -> DataError:
    return DataError(
        f"{key!r} holds binary data",
        where=where,
        found="bytes",
        expected="text, numbers, or lists and objects of them",
        remedy="cast the column to text in the program that wrote it, or set another key",
    )


def _no_text(
    value: Any, row: dict[str, Any], where: str, key: str, expected: str, remedy: str, found: str = ""
) -> MissingValue:
    there = ", ".join(_keys(row)) or "none"
    error = MissingValue(
        f"a row has no text under {key!r}",
        where=where,
        found=found or (f"keys {there}" if value is _MISSING else f"{_kind(value)} there"),
        expected=f"{expected} under {key!r}",
        remedy=f"set {remedy}",
    )
    error.key = key
    return error


def _no_conversation(where: str, key: str, found: str) -> DataError:
    return DataError(
        "a conversation that cannot be used",
        where=where,
        found=found,
        expected=f"a list of {{role, content}} under {key!r}, content being text",
        remedy="fix the row; images and other media are not served",
    )


def _keys(row: dict[str, Any]) -> list[str]:
    """Lists the present keys, those in sections with their paths."""
    keys = []
    for name, value in row.items():
        keys += [f"{name}.{inner}" for inner in value] if isinstance(value, dict) and value else [str(name)]
    return keys if len(keys) <= _SHOWN else [*keys[:_SHOWN], f"and {len(keys) - _SHOWN} more"]


def _kind(value: Any) -> str:
    if isinstance(value, str):
        # ascii: characters that are not seen are shown by their numbers.
        shown = ascii(value[:_SHOWN]) if _is_blank(value) else repr(value[:_SHOWN])
        return shown if value.strip() else "blank text" if value else "empty text"
    if isinstance(value, float) and value != value:
        return "NaN"
    names = {type(None): "null", list: "a list", dict: "an object", bool: "a truth value"}
    names |= {int: "a number", float: "a number"}
    if isinstance(value, list) and value:
        return f"a list of {_kind(value[0])}" if not isinstance(value[0], str) else "a list of text"
    if isinstance(value, dict) and value:
        return f"an object with {', '.join(map(str, list(value)[:_SHOWN]))}"
    return names.get(type(value), type(value).__name__)
