"""Takes single files of a checkpoint from another damaged copy of the same save.

Two damaged copies are often whole together. A file is taken if its bytes have the digest in the manifest, which both
copies must share byte for byte. The copies themselves are only read. The result is verified as a whole before it
counts, like any other copy.
"""

import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from verl_slurm.base.files import rename, write_new
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.specification import CHUNK_BYTES, MANIFEST, FileEntry
from verl_slurm.checkpoint.store.chunks import hash_file
from verl_slurm.checkpoint.store.tree import open_below, open_directory

__all__ = ["fill", "set_aside_copies"]


def set_aside_copies(paths: RunPaths, name: str, manifest: bytes) -> list[Path]:
    """Lists the copies of checkpoint `name` in the run's quarantine that have exactly this manifest."""
    found = []
    for path in sorted(paths.quarantine.glob(f"{name}.*")):
        try:
            with open_directory(path) as root, open_below(root, MANIFEST) as fd:
                info = os.fstat(fd)
                if info.st_size == len(manifest) and os.pread(fd, info.st_size + 1, 0) == manifest:
                    found.append(path)
        except OSError:
            continue  # a reason's record, or a copy that cannot be read
    return found


def fill(directory: Path, wanted: Iterable[FileEntry], copies: Sequence[Path]) -> list[str]:
    """Replaces files of `directory`, which is being assembled, by those of `copies`. Durable when it returns.

    A crash leaves the old file or the new one, and perhaps a name that no manifest has. The directory then does not
    verify, and the next sweep removes it.

    Returns:
        The paths that were replaced. A file stays as it was if no copy has it, or if the storage refuses.
    """
    return [entry.path for entry in wanted if any(_take(directory, entry, copy) for copy in copies)]


def _take(directory: Path, entry: FileEntry, copy: Path) -> bool:
    to = directory / entry.path
    half = to.with_name(f".fill.{secrets.token_hex(4)}")
    try:
        with open_directory(copy) as root, open_below(root, entry.path) as source:
            info = os.fstat(source)
            if not stat.S_ISREG(info.st_mode) or info.st_size != entry.size:
                return False
            to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_new(half, iter(partial(os.read, source, CHUNK_BYTES), b""))
        with half.open("rb") as file:
            # Hash what was written, not what was read before: the source may change meanwhile.
            found = hash_file(file.fileno(), entry.path)
        if (found.size, found.sha256) == (entry.size, entry.sha256):
            rename(half, to)
            return True
    except OSError:
        pass  # this copy lacks it, too, or there is no room: the verdict stays
    half.unlink(missing_ok=True)
    return False
