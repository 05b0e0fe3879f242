"""Reads files of torch.distributed.checkpoint from a directory that another user may have prepared. Needs torch.

DCP's own reader unpickles `.metadata` with every class that the file names, which runs any code. This reader allows the
classes of DCP's metadata alone, and a piece of a tensor must lie in a file of this directory.
"""

import dataclasses
import io
import pickle  # noqa: TID251 - an Unpickler with a list of classes
import re
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from verl_slurm.base import bounded
from verl_slurm.base.errors import CheckpointCorrupt

_METADATA = ".metadata"
_DATA = re.compile(r"__\d{1,9}_\d{1,9}\.distcp", re.ASCII)
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    (f"{_DCP}.filesystem", "_StorageInfo"),
    *(
        (f"{_DCP}.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}
"""All of them hold values and do nothing else. `torch.float32` and its kin are allowed besides."""


class ShardedFiles(FileSystemReader):
    """A `storage_reader` for DCP's `load` that accepts nothing but numbers from the directory.

    Raises:
        CheckpointCorrupt: `.metadata` names code, or a file that is not one of the directory's own.
        OSError: it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        # The base class finds pieces by the table in `_metadata`, which was checked; it opens no other names.
        super().__init__(directory)
        # Read here and not in `read_metadata`: DCP would report the error with the traceback of every rank.
        self._metadata = _checked(_unpickled(directory / _METADATA), directory / _METADATA)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


class TensorsOnly(DefaultLoadPlanner):
    """A `planner` for DCP's `load` that reads no bytes: DCP would unpickle them, with any class that they name."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointCorrupt("an object in the place of a tensor", found=read_item.storage_index.fqn)


_PythonUnpickler: Any = pickle._Unpickler
"""The pickler in Python: it allows refusing opcodes."""


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Any]] = dict(_PythonUnpickler.dispatch)

    def load_build(self) -> None:
        # On a class or a function it would set attributes for this whole process.
        if not dataclasses.is_dataclass(type(self.stack[-2])):
            raise pickle.UnpicklingError(f"it sets attributes of a {type(self.stack[-2]).__name__}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        # Dtypes cannot be listed: each torch release has new ones. Whatever is no dtype is refused.
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}"[:200])


def _unpickled(path: Path) -> object:
    try:
        return _Unpickler(io.BytesIO(bounded.read_regular(path, bounded.INDEX))).load()
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - a hostile pickle raises what it likes
        raise _corrupt(path, f"{type(error).__name__}: {error}"[:300]) from None


def _checked(metadata: object, path: Path) -> Metadata:
    if not isinstance(metadata, Metadata):
        raise _corrupt(path, f"an object of {type(metadata).__name__}")
    tensors = getattr(metadata, "state_dict_metadata", None)
    if not isinstance(tensors, dict):
        raise _corrupt(path, "no table of tensors")
    # BytesStorageMetadata would have DCP unpickle the piece, with any class.
    for value in tensors.values():
        if not isinstance(value, TensorStorageMetadata):
            raise _corrupt(path, f"{type(value).__name__} in the place of a tensor's")
    pieces = getattr(metadata, "storage_data", None)
    if not isinstance(pieces, dict):
        raise _corrupt(path, "no table of pieces")
    for piece in pieces.values():
        name = getattr(piece, "relative_path", None)
        # A path would read any file of ours as a tensor; transforms are programs of DCP's plug-ins.
        if not isinstance(name, str) or not _DATA.fullmatch(name):
            raise _corrupt(path, f"a piece in {name!r}"[:300])
        if getattr(piece, "transform_descriptors", None):
            raise _corrupt(path, "a piece that is transformed")
    return metadata


def _corrupt(path: Path, found: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "not what torch.distributed.checkpoint writes",
        where=path,
        found=found,
        expected="its own classes, and files named __RANK_NUMBER.distcp beside it",
        remedy="resume from another checkpoint",
    )
