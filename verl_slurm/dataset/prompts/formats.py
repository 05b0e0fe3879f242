"""Yields the rows of one data file, one after the other, as dictionaries: JSON Lines, JSON arrays, CSV, TSV, Parquet
and Arrow.

The text of a row has at most `MAX_ROW_CHARS`, because JSON may take 30 times its size in memory.

pyarrow reads Parquet and Arrow, a few hundred rows at a time. Nothing of a file is executed: extension types stay as
they are stored, and pyarrow has no type here that unpickles.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

from verl_slurm.base.errors import UNREADABLE, DataError
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.packages import install_command

MAX_ROW_CHARS = 8 << 20

Place = tuple[str, Any]
"""Place of a row (`FILE:LINE`), and the row as the file has it."""

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def records(
    file: BinaryIO, name: str, columns: Collection[str], also: Collection[str] = ()
) -> Iterator[Place]:
    """Yields every row of `file`, in its order.

    Args:
        file: at its beginning; it can seek.
        name: its path: the suffix decides the format, and errors name it.
        columns: needed keys at the top of a row; a format with columns may leave out the others.
        also: further keys to read, where they are there.

    Raises:
        DataError: it cannot be read; the error names the place.
    """
    suffix = name[name.rindex(".") :]
    if suffix in (".parquet", ".arrow"):
        return _arrow_records(file, name, columns, also)
    # Before the text formats: a UTF-16 file would be called broken JSON, and its user would look for a wrong line.
    _refuse_utf16(file, name)
    if suffix in (".csv", ".tsv"):
        return _csv(file, name, "," if suffix == ".csv" else "\t")
    # Under this suffix there may be JSON Lines, too, so the content decides.
    if suffix == ".json" and _first_character(file) == b"[":
        return _json_array(file, name)
    return _json_lines(file, name)


def _refuse_utf16(file: BinaryIO, name: str) -> None:
    start = file.read(4)
    if start[:2] in _UTF16 or b"\0" in start:
        raise DataError(
            "the data file is not UTF-8",
            where=name,
            found="UTF-16 or UTF-32" if start[:2] in _UTF16 else "a NUL byte at its start, as UTF-16 has",
            expected="UTF-8",
            remedy=f"iconv -f UTF-16 -t UTF-8 {shell_word(name)} > NEW, and NEW in its place",
        )
    file.seek(len(_BOM) if start.startswith(_BOM) else 0)


def _first_character(file: BinaryIO) -> bytes:
    at = file.tell()
    start = file.read(4096).lstrip()
    file.seek(at)
    return start[:1]


def _json_lines(file: BinaryIO, name: str) -> Iterator[Place]:
    number = 0
    # Bounded: a file without a line break would be one line of its whole size.
    while line := file.readline(MAX_ROW_CHARS + 1):
        if len(line) > MAX_ROW_CHARS:
            raise _too_long(f"{name}:{number + 1}")
        # A lone carriage return ends a line, too, as in earlier versions.
        for piece in line.splitlines() if b"\r" in line else (line,):
            number += 1
            if not piece.strip():
                continue
            where = f"{name}:{number}"
            try:
                yield where, json.loads(piece, object_pairs_hook=_without_doubles)
            except UNREADABLE as error:
                raise DataError(
                    "a line is not JSON",
                    where=where,
                    found=error,
                    expected="one JSON object a line",
                    remedy="fix or remove the line",
                ) from None


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses a key that an object has twice: readers differ in the value that they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        double = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {double!r} twice in one object")
    return found


def _json_array(file: BinaryIO, name: str) -> Iterator[Place]:
    """Yields element by element from a window of the text: the whole is never decoded at once."""
    # surrogatepass: as json itself does it for a line, so that the row's reader names the row.
    text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogatepass", newline="")
    decoder = json.JSONDecoder(object_pairs_hook=_without_doubles)
    window, at, number, done = "", 0, 0, False
    remedy = "fix the file, or write one JSON object a line as .jsonl"

    def more() -> bool:
        nonlocal window, at
        try:
            # At least 64 KiB, so that a window that is full still grows by one read and shows whether a row ends.
            read = text.read(max(MAX_ROW_CHARS - (len(window) - at), 1 << 16))
        except UnicodeDecodeError as error:
            raise DataError("the data file is not UTF-8", where=name, found=error, remedy=remedy) from None
        window, at = window[at:] + read, 0
        return bool(read)

    def skip(characters: str) -> str:
        """Returns the next character that is none of these; empty at the end of the file."""
        nonlocal at
        while True:
            while at < len(window) and window[at] in characters:
                at += 1
            if at < len(window) or not more():
                return window[at : at + 1]

    try:
        skip(" \t\r\n")
        at += 1  # the bracket
        done = skip(" \t\r\n") == "]"
        while not done:
            number += 1
            where = f"{name}: element {number}"
            try:
                value, end = decoder.raw_decode(window, at)
                if end == len(window) and more():  # a number may go on
                    value, end = decoder.raw_decode(window, at)
            except UNREADABLE as error:
                # Perhaps the element does not end in the window. Beyond the limit it is one that is too long.
                if len(window) - at > MAX_ROW_CHARS:
                    raise _too_long(where) from None
                if not more():
                    raise DataError("not JSON", where=where, found=error, remedy=remedy) from None
                # The same element again, with more text.
                number -= 1
                continue
            yield where, value
            at = end
            match skip(" \t\r\n"):
                case ",":
                    at += 1
                    skip(" \t\r\n")
                case "]":
                    done = True
                case found:
                    raise DataError(
                        "not JSON", where=where, found=found or "the end", expected=", or ]", remedy=remedy
                    )
        at += 1  # the bracket
        if found := skip(" \t\r\n"):
            # Files that were joined: the prompts behind the first array would be lost without a word.
            raise DataError(
                "text behind the array", where=name, found=found, expected="one array", remedy=remedy
            )
    finally:
        # The caller closes the file, and a TextIOWrapper that goes would close it as well.
        text.detach()


def _csv(file: BinaryIO, name: str, delimiter: str) -> Iterator[Place]:
    # csv's own limit is 128 KiB, which long prompts exceed. It is one setting for the whole process.
    csv.field_size_limit(MAX_ROW_CHARS)

    # csv asks for whole lines; these are bounded like all others.
    def lines() -> Iterator[str]:
        # Decoded line by line, so that an error has the number of its line. Line breaks stay: those within quotes are a
        # part of the text.
        while line := file.readline(MAX_ROW_CHARS + 1):
            if len(line) > MAX_ROW_CHARS:
                raise _too_long(name)
            yield from (piece.decode() for piece in line.splitlines(keepends=True))

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if not cells:
                continue
            if header is None:
                header = cells
                if twice := [title for title in header if header.count(title) > 1]:
                    raise DataError(
                        "a column stands twice in the header",
                        where=f"{name}:{reader.line_num}",
                        found=twice[0],
                        remedy="rename or remove one of them",
                    )
                continue
            where = f"{name}:{reader.line_num}"
            if len(cells) != len(header):
                raise DataError(
                    "a row has another number of fields than the header",
                    where=where,
                    found=len(cells),
                    expected=len(header),
                    remedy="fix the row; text with commas, quotes or newlines stands in double quotes",
                )
            yield where, dict(zip(header, cells, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            "the table cannot be read",
            # A line that cannot be decoded has not reached the reader.
            where=f"{name}:{reader.line_num + isinstance(error, UnicodeDecodeError)}",
            found=error,
            expected="UTF-8, a header line, fields in double quotes where they need them",
            remedy="fix the file",
        ) from None


def _too_long(where: str) -> DataError:
    return DataError(
        "a row is too long",
        where=where,
        found=f"more than {MAX_ROW_CHARS >> 20} MiB",
        expected="one prompt a row",
        remedy="fix or remove the row",
    )


_ROWS_AT_ONCE = 256
_BUFFER_BYTES = 1 << 20


def _arrow_records(
    file: BinaryIO, name: str, columns: Collection[str], also: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """Yields every row as plain Python values: of a file that lacks one of `columns` all, for the message."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            "pyarrow is not installed, which reads this file",
            where=name,
            remedy=f"{install_command('data')}, or convert the file to .jsonl",
        ) from None
    number = 0
    try:
        read = _parquet if name.endswith(".parquet") else _arrow
        for batch in read(file, columns, also):
            # Row groups and batches may be large; a slice of them takes no memory of its own.
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                part = batch.slice(start, _ROWS_AT_ONCE)
                try:
                    rows = part.to_pylist()
                except (ValueError, OverflowError, KeyError):
                    rows = _one_by_one(part, name, number)
                for row in rows:
                    number += 1
                    yield f"{name}: row {number}", row
    # MemoryError: pyarrow's own for content that does not fit.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, KeyError, MemoryError) as error:
        words = str(error).splitlines() or [type(error).__name__]
        raise DataError(
            "the data file cannot be read",
            where=name,
            found=words[0],
            expected="a whole Parquet file" if name.endswith(".parquet") else "a whole Arrow file",
            remedy="copy or save it again",
        ) from None


def _one_by_one(part: Any, name: str, before: int) -> Iterator[Any]:
    """Yields the rows of a batch that `before` rows precede, and refuses the first that cannot be read."""
    for index in range(part.num_rows):
        try:
            row = part.slice(index, 1).to_pylist()
        # Text that is not UTF-8, or a value that Python lacks.
        except (ValueError, OverflowError, KeyError) as error:
            raise DataError(
                "a row cannot be read",
                where=f"{name}: row {before + index + 1}",
                found=error,
                expected="text in UTF-8, and values that Python has",
                remedy="fix or remove the row",
            ) from None
        yield from row


def _parquet(file: BinaryIO, columns: Collection[str], also: Collection[str]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    # With a buffer: otherwise a whole column of a row group is read at once.
    # Without extensions: such a column stays as it is stored, and no class of its type reads it.
    with pq.ParquetFile(
        file, buffer_size=_BUFFER_BYTES, pre_buffer=False, arrow_extensions_enabled=False
    ) as parquet:
        wanted = _wanted(parquet.schema_arrow.names, columns, also)
        yield from parquet.iter_batches(batch_size=_ROWS_AT_ONCE, use_threads=False, columns=wanted)


def _arrow(file: BinaryIO, columns: Collection[str], also: Collection[str]) -> Iterator[Any]:
    import pyarrow.ipc

    options = pyarrow.ipc.IpcReadOptions(use_threads=False)
    start = file.read(6)
    file.seek(0)
    if start == b"ARROW1":  # the format with a footer, which some tools write
        with pyarrow.ipc.open_file(file, options=options) as opened:
            for index in range(opened.num_record_batches):
                yield opened.get_batch(index).select(_wanted(opened.schema.names, columns, also))
        return
    with pyarrow.ipc.open_stream(file, options=options) as stream:
        wanted = _wanted(stream.schema.names, columns, also)
        yield from (batch.select(wanted) for batch in stream)


def _wanted(names: list[str], columns: Collection[str], also: Collection[str]) -> list[str]:
    return [name for name in names if name in {*columns, *also}] if set(columns) <= set(names) else names
