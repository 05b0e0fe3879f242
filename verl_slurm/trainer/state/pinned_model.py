"""Loads a model directory safely against changes between its fingerprint and its loading.

`from_pretrained` opens files by name, so another writer of the directory could swap files while it loads, and restore
the true ones afterwards. It gets a private directory instead:

* small files (configuration, tokenizer, templates) as copies, hashed as they were read;
* each `*.safetensors` as a link to `/proc/self/fd/N`: the file that was opened first, whatever has its name by now. It
  is hashed through the same descriptor, in threads beside the loading. Inode, size, mtime and ctime must be the
  same before and after: the kernel sets the ctime at each write, and no program can set it back.

Everything else (pickles, weights of other formats) is absent: nothing here reads it.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from verl_slurm.base.errors import DataError, DatasetDrift, VerlSlurmError
from verl_slurm.base.files import hash_fd, num_threads
from verl_slurm.base.scratch import Scratch
from verl_slurm.dataset.fingerprint.file_hashing import Stamp, stamp_of
from verl_slurm.wire.environment import CONTROL_VARIABLE

_SMALL_BYTES = 64 << 20
_TEMPLATES = "additional_chat_templates"


class PinnedModel:
    """See the module; made by `pinned_model`.

    Attributes:
        path: the private directory to load from.
    """

    def __init__(self, original: Path, recorded: Mapping[str, str], path: Path) -> None:
        self.path, self._original, self._recorded = path, original, recorded
        self._pool = ThreadPoolExecutor(num_threads(), thread_name_prefix="pinned")
        self._held: dict[str, tuple[int, Stamp, Future[tuple[int, str]]]] = {}

    def fill(self) -> None:
        """Copies and opens the files of the directory.

        Raises:
            DatasetDrift: a small file is not what was recorded.
            DataError: a file cannot be read.
        """
        for name in sorted(self._recorded):
            folder, _, _ = name.rpartition("/")
            # Loaders look at the top of the directory, and for templates into this one folder below it.
            if folder not in ("", _TEMPLATES):
                continue
            try:
                self._take(name)
            except OSError as error:
                raise DataError(
                    "a model file cannot be read",
                    where=self._original / name,
                    found=error.strerror,
                    remedy="restore it, or set model.path",
                ) from error

    def _take(self, name: str) -> None:
        # O_NONBLOCK: a FIFO that was put in its place would block the rank.
        fd = os.open(self._original / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        place = self.path / name
        if name.endswith(".safetensors"):
            # Before the loading: a write while it is read leaves another ctime, which no program can set back.
            stamp = stamp_of(os.fstat(fd))
            self._held[name] = fd, stamp, self._pool.submit(hash_fd, fd)
            # The open file, whatever has its name by now: safetensors maps it by this path.
            place.symlink_to(f"/proc/self/fd/{fd}")
            return
        with open(fd, "rb") as file:
            # Copied as it was hashed: from_pretrained opens these files by name.
            data = file.read(_SMALL_BYTES + 1)
        # Weights of another format, which nothing here reads.
        if len(data) > _SMALL_BYTES:
            return
        if (found := hashlib.sha256(data).hexdigest()) != self._recorded[name]:
            raise self._drift(name, f"SHA-256 {found[:16]}")
        place.parent.mkdir(mode=0o700, exist_ok=True)
        place.write_bytes(data)

    def verify(self) -> None:
        """Checks that the loaded files are the recorded ones. Call once all are loaded; waits for the hashing.

        Raises:
            DatasetDrift: they are not; the file is named.
            OSError: a file could not be read to its end.
        """
        for name, (fd, before, hashing) in self._held.items():
            # The digest alone is not enough: the loader may have read between two writes.
            _, found = hashing.result()
            if found != self._recorded[name]:
                raise self._drift(name, f"SHA-256 {found[:16]}")
            if stamp_of(os.fstat(fd)) != before:
                raise self._drift(name, "a file that was written to, renamed or linked while it was loaded")

    def close(self) -> None:
        """Closes the descriptors."""
        # First: its threads read through these descriptors, whose numbers the next open file would get.
        self._pool.shutdown(cancel_futures=True)
        for fd, _, _ in self._held.values():
            os.close(fd)

    def blamed(self, error: VerlSlurmError) -> VerlSlurmError:
        """Returns the error with the user's directory instead of the private one, or with its cause."""
        try:
            # A file that was swapped is a better answer than the loader's error about it.
            self.verify()
        except DatasetDrift as drift:
            return drift
        except (OSError, RuntimeError):
            pass  # the first error says more
        parts = {
            name: str(value).replace(str(self.path), str(self._original)) if value is not None else None
            for name, value in (("where", error.where), ("found", error.found), ("expected", error.expected))
        }
        return type(error)(error.what, remedy=error.remedy, **parts)

    def _drift(self, name: str, found: str) -> DatasetDrift:
        return DatasetDrift(
            "a model file is not the one that was fingerprinted",
            where=self._original / name,
            found=found,
            expected=f"SHA-256 {self._recorded[name][:16]}",
            remedy="restore the model, and see who else may write there",
        )


@contextmanager
def pinned_model(directory: Path, recorded: Mapping[str, str]) -> Iterator[PinnedModel]:
    """Yields a `PinnedModel` of `directory`, empty before `fill`.

    Args:
        recorded: path below `directory` → SHA-256, of each file of its fingerprint.
    """
    control = os.environ.get(CONTROL_VARIABLE)
    # The agent's own directory is removed with the agent, even after a SIGKILL.
    base = Path(control).parent if control else None
    scratch = Scratch("verl-slurm-", base)
    pinned = PinnedModel(directory, recorded, scratch.path)
    try:
        yield pinned
    except VerlSlurmError as error:
        raise pinned.blamed(error) from error
    finally:
        pinned.close()
        scratch.close()
