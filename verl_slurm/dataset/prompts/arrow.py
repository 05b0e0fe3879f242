"""Reads the rows of Parquet and Arrow files with pyarrow, a few hundred at a time.

Nothing of a file is executed: extension types stay as they are stored, and pyarrow has no type here that unpickles.
"""

from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

from verl_slurm.base.errors import DataError

__all__ = ["INSTALL", "arrow_records"]

INSTALL = "pip install 'verl-slurm[data]'"
_ROWS_AT_ONCE = 256
_BUFFER_BYTES = 1 << 20


def arrow_records(file: BinaryIO, name: str, columns: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yields every row as a dictionary of plain Python values.

    Args:
        columns: the needed ones; a file that lacks one of them is read with all its columns, for the message.

    Raises:
        DataError: pyarrow is missing, or the file cannot be read.
    """
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            "pyarrow is not installed, which reads this file",
            where=name,
            remedy=f"{INSTALL}, or convert the file to .jsonl",
        ) from None
    number = 0
    try:
        for batch in _parquet(file, columns) if name.endswith(".parquet") else _arrow(file, columns):
            # Row groups and batches may be large; a slice of them takes no memory of its own.
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                for row in batch.slice(start, _ROWS_AT_ONCE).to_pylist():
                    number += 1
                    yield f"{name}: row {number}", row
    # MemoryError: pyarrow's own for content that does not fit. OverflowError and KeyError: for values that Python
    # lacks.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, KeyError, MemoryError) as error:
        words = str(error).splitlines() or [type(error).__name__]
        raise DataError(
            "the data file cannot be read",
            where=name,
            found=words[0],
            expected="a whole Parquet file" if name.endswith(".parquet") else "a whole Arrow file",
            remedy="copy or save it again",
        ) from None


def _parquet(file: BinaryIO, columns: Collection[str]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    # With a buffer: otherwise a whole column of a row group is read at once.
    with pq.ParquetFile(
        file, buffer_size=_BUFFER_BYTES, pre_buffer=False, arrow_extensions_enabled=False
    ) as parquet:
        wanted = _wanted(parquet.schema_arrow.names, columns)
        yield from parquet.iter_batches(batch_size=_ROWS_AT_ONCE, use_threads=False, columns=wanted)


def _arrow(file: BinaryIO, columns: Collection[str]) -> Iterator[Any]:
    import pyarrow.ipc

    options = pyarrow.ipc.IpcReadOptions(use_threads=False)
    start = file.read(6)
    file.seek(0)
    if start == b"ARROW1":  # the format with a footer, which some tools write
        with pyarrow.ipc.open_file(file, options=options) as opened:
            for index in range(opened.num_record_batches):
                yield opened.get_batch(index).select(_wanted(opened.schema.names, columns))
        return
    with pyarrow.ipc.open_stream(file, options=options) as stream:
        wanted = _wanted(stream.schema.names, columns)
        yield from (batch.select(wanted) for batch in stream)


def _wanted(names: list[str], columns: Collection[str]) -> list[str]:
    return [name for name in names if name in columns] if set(columns) <= set(names) else names
