"""Puts text from outside on one line: it cannot end a line, colour a terminal or hide the text beside it.

Every character that Unicode does not call printable is escaped: C0 and C1 controls (ESC, and U+009B, which is ESC [
as one character), line and paragraph separators, marks that turn the direction of writing, and lone surrogates.
"""

import os
import re
import shlex
from typing import Any

_PLAIN = re.compile(r"[ -~]*")


def counted(number: int, noun: str) -> str:
    """Returns `1 file`, `2 files`, `3 processes`."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{number} {noun}{ending}"


def span(seconds: float) -> str:
    """Formats a duration: `0.3 s`, `42 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    for size, unit, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {unit} {rest} {smaller}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def printable(text: str) -> str:
    """Returns `text` with Python's escapes for each character that cannot be printed."""
    # Nearly all text is plain ASCII and needs no look at each character.
    if _PLAIN.fullmatch(text):
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shell_word(path: "str | os.PathLike[str]") -> str:
    """Returns a path as one word of a command that is printed to be copied."""
    return shlex.quote(os.fspath(path))


def json_line(value: object, *, ascii_only: bool = False) -> bytes:
    """Returns one JSON value on one line by every reader's definition of a line; decoding gives the same value."""
    import msgspec  # errors import this module, and `--help` avoids msgspec

    try:
        data = msgspec.json.encode(value)
    except UnicodeEncodeError:
        # JSON has no lone surrogates, and a file name that is not UTF-8 has them.
        data = msgspec.json.encode(_without_surrogates(msgspec.to_builtins(value)))
    # DEL is ASCII and cannot be printed; JSON does not escape it.
    if data.isascii() and b"\x7f" not in data:
        return data
    # After the encoding: outside strings JSON has none of these characters, so each one stands in a string.
    return "".join(
        c if c.isprintable() and not (ascii_only and c > "~") else _u(c) for c in data.decode()
    ).encode()


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value


def _u(character: str) -> str:
    """Returns `\\uXXXX`. Outside strings JSON needs none of these characters."""
    code = ord(character)
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\u{0xD800 + (code - 0x10000 >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
