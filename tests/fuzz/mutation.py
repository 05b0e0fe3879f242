"""Valid bytes made hostile. Pure: the same generator in the same state gives the same bytes.

Two ways. `mutate_bytes` knows nothing of the form: flips, cuts, splices, length fields blown up, digits replaced, deep
nests. `mutate_tree` takes JSON or msgpack apart and changes a value in it, so that what comes out is still well-formed
and reaches the checks behind the syntax.
"""

import json
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

import msgpack

MAX_BYTES = 64 << 10
"""Of one input. A bomb has to come in less."""

_BOUNDS = sorted({(1 << n) + d for n in (0, 7, 8, 15, 16, 24, 31, 32, 53, 62, 63, 64) for d in (-1, 0, 1)})
_WORDS = tuple(
    struct.pack(order + code, value & (1 << 8 * width) - 1)
    for code, width in (("H", 2), ("I", 4), ("Q", 8))
    for order in "<>"
    for value in (*_BOUNDS, -1, -2, 1 << 20, 1 << 28)
)
_DIGITS = tuple(
    text.encode()
    for text in (
        *map(str, _BOUNDS),
        "-1",
        "-0",
        "1e999",
        "1e-999",
        "010",
        "1_0",
        "9" * 400,
        "9" * 5000,
        "٣",
        "²",
    )
)
_TEXTS = (
    *(b"\x00", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", "\u2028".encode(), b"\r\n", b"\n\n", b" ", b"\x1b[31m", b"%s%n"),
    *(b"null", b"true", b"NaN", b"Infinity", b'"', b"\\", b'"\\ud800"', b"../", b"/etc/passwd", b"=", b":", b"#", b"'"),
    *(b"{}", b"[]", b"{", b"}", b"[", b"]", b",", b"\xef\xbb\xbf", b"---\n", b"- ", b"&a ", b"*a", b"!!str "),
    # msgpack: maps, arrays, strings and extensions that promise more than there is
    *(b"\xdf\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\x10\x00\x00\x00"),
    *(b"\xd6\xff\x00\x00\x00\x00", b"\xc9\xff\xff\xff\xff\x01", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\x90"),
    # zstd: magics, a block of one byte 128 KiB long, a skippable frame
    *(b"\x28\xb5\x2f\xfd", b"\x02\x00\x10\x00" * 64, b"\x50\x2a\x4d\x18\xff\xff\xff\xff", b"\x37\xa4\x30\xec"),
)  # fmt: skip
_OPENERS = (b"[", b'{"a":', b"\x91", b"\x81\xa1a", b"- ", b"{a: ", b"(", b"\xdc\x00\x01")
_HOSTILE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, *_BOUNDS, -(1 << 31), -(1 << 63), 10**30, 0.0, -0.0, 0.5, 1e308, 5e-324),
    *(
        float("nan"),
        float("inf"),
        "",
        "\x00",
        "../../etc/passwd",
        "/",
        ".",
        "a" * 5000,
        "\ud800",
        "٠٠٠٠٠٠١",
        "a\nb",
    ),
    *(
        "step_000001",
        "1e5",
        "\u202e",
        "x" * 65,
        [],
        {},
        [[]],
        {"": ""},
        [0] * 300,
        {"a": {"b": {}}},
        [{}] * 70,
    ),
)
_HOSTILE_BINARY: tuple[Any, ...] = (
    b"",
    b"\x00" * 4096,
    b"\xff" * 17,
    b"\x00" * (1 << 20),
    b"\x00" * ((1 << 20) + 1),
)


def mutate_bytes(draw: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """`data` with one to a dozen changes, at most MAX_BYTES long; `others` are what it may be spliced with."""
    made = bytearray(data)
    for _ in range(min(1 + int(draw.expovariate(0.6)), 12)):
        draw.choice(_CHANGES)(draw, made, others)
        del made[MAX_BYTES:]
    return bytes(made)


def mutate_tree(draw: Random, data: bytes, form: str) -> bytes:
    """`data`, of `form` json or msgpack, with one to four of its values changed.

    Raises:
        ValueError: `data` is not of that form.
    """
    tree = json.loads(data) if form == "json" else msgpack.unpackb(data, strict_map_key=False)
    for _ in range(min(1 + int(draw.expovariate(0.9)), 4)):
        tree = _change_one(draw, tree, form)
    try:
        if form == "json":
            return json.dumps(tree).encode()
        return bytes(msgpack.packb(tree, unicode_errors="surrogatepass"))
    except OverflowError:  # an integer that msgpack cannot hold
        return data


def _span(draw: Random, made: bytearray, most: int = 64) -> tuple[int, int]:
    at = draw.randrange(len(made) + 1)
    return at, min(at + draw.randint(1, most), len(made))


def _flip(draw: Random, made: bytearray, _: Sequence[bytes]) -> None:
    for _ in range(draw.choice((1, 1, 1, 8)) if made else 0):
        made[draw.randrange(len(made))] ^= 1 << draw.randrange(8)


def _set(draw: Random, made: bytearray, _: Sequence[bytes]) -> None:
    if made:
        made[draw.randrange(len(made))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))


def _word(draw: Random, made: bytearray, _: Sequence[bytes]) -> None:
    word = draw.choice(_WORDS)
    at = draw.randrange(max(len(made) - len(word), 0) + 1)
    made[at : at + len(word)] = word


def _cut(draw: Random, made: bytearray, _: Sequence[bytes]) -> None:
    start, end = _span(draw, made)
    del made[start:end]


def _end(draw: Random, made: bytearray, _: Sequence[bytes]) -> None:
    if draw.random() < 0.5:
        del made[draw.randrange(len(made) + 1) :]
    else:
        made += draw.choice(_TEXTS)


def _twice(draw: Random, made: bytearray, _: Sequence[bytes]) -> None:
    start, end = _span(draw, made, 256)
    at = draw.randrange(len(made) + 1)
    made[at:at] = made[start:end] * draw.choice((1, 1, 2, 50))


def _insert(draw: Random, made: bytearray, _: Sequence[bytes]) -> None:
    at = draw.randrange(len(made) + 1)
    made[at:at] = draw.choice(_TEXTS)


def _splice(draw: Random, made: bytearray, others: Sequence[bytes]) -> None:
    other = draw.choice(others)
    start = draw.randrange(len(other) + 1)
    at = draw.randrange(len(made) + 1)
    made[at : draw.choice((at, len(made)))] = other[start : start + draw.choice((8, 64, len(other)))]


def _number(draw: Random, made: bytearray, others: Sequence[bytes]) -> None:
    """Replace a run of digits."""
    begin = draw.randrange(len(made) + 1)
    start = next((at for at in range(begin, len(made)) if 48 <= made[at] <= 57), -1)
    if start < 0:
        _word(draw, made, others)
        return
    end = next((at for at in range(start, len(made)) if not 48 <= made[at] <= 57), len(made))
    made[start:end] = draw.choice(_DIGITS)


def _nest(draw: Random, made: bytearray, _: Sequence[bytes]) -> None:
    at = draw.randrange(len(made) + 1)
    made[at:at] = draw.choice(_OPENERS) * draw.choice(
        (10, 100, 1500, 20_000) if draw.random() < 0.2 else (2, 5)
    )


_CHANGES = (_flip, _flip, _set, _word, _word, _cut, _end, _twice, _insert, _insert, _splice, _number, _nest)


def _change_one(draw: Random, tree: Any, form: str) -> Any:
    """A copy of `tree` with one of its values changed; the rest is shared."""
    places = list(_places(tree))
    path, whole = draw.choice(places), draw.choice(places)
    what = draw.randrange(8)
    if what == 0:
        return _replace(tree, path, lambda _: _at(tree, whole))  # one value in another's place
    if what == 1:
        return _replace(tree, path, lambda value: _smaller(draw, value))
    if what == 2:
        return _replace(tree, path, lambda value: _larger(draw, value))
    if what == 3:
        return _replace(tree, path, lambda value: _near(draw, value))
    if what == 4:
        return _replace(tree, path, lambda value: [value])
    hostile = _HOSTILE + (_HOSTILE_BINARY if form == "msgpack" else ())
    return _replace(tree, path, lambda _: draw.choice(hostile))


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Any:
    yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _places(value, (*path, key))
    elif isinstance(tree, list) and len(path) < 20:
        for at, value in enumerate(tree[:64]):
            yield from _places(value, (*path, at))


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _replace(tree: Any, path: tuple[Any, ...], change: Any) -> Any:
    if not path:
        return change(tree)
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = _replace(tree[path[0]], path[1:], change)
    return copy


def _smaller(draw: Random, value: Any) -> Any:
    if not isinstance(value, dict | list | str | bytes) or not value:
        return None
    if isinstance(value, str | bytes):
        return value[: draw.randrange(len(value))]
    gone = draw.randrange(len(value))
    if isinstance(value, list):
        return value[:gone] + value[gone + 1 :]
    return {key: value[key] for at, key in enumerate(value) if at != gone}


def _larger(draw: Random, value: Any) -> Any:
    if isinstance(value, dict):
        return value | {draw.choice(("", "a/b", "x" * 200, "\ud800", "Z", "\x00")): draw.choice(_HOSTILE)}
    if isinstance(value, list):
        return value + (value[-1:] or [0]) * draw.choice((1, 2, 300))
    if isinstance(value, str | bytes):
        return value * draw.choice((2, 3, 100)) if len(value) < 1000 else value
    return [value, value]


def _near(draw: Random, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return draw.choice(
            (value + 1, value - 1, -value, value * 8, value << 32, float(value) if value < 1e9 else 0)
        )
    if isinstance(value, float):
        return draw.choice((-value, value * 1e300, int(value) if abs(value) < 1e9 else 0))
    if isinstance(value, str | bytes) and value:
        at = draw.randrange(len(value))
        return value[:at] + value[at + 1 :] + value[at : at + 1]
    return value
