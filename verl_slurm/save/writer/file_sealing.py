"""Encryption of a save: the arena's bytes on their way to each medium, and a rank's small files.

Each medium has a ring of buffers of its own, into which the arena is sealed for it: so none waits for another, whatever
its storage does, and no plaintext leaves the arena. To seal a chunk once more costs a fifth to a ninth of hashing it.
The result must be the same: a chunk whose tag differs from its first one is refused (`ChunkSealer.seal_into`). So a
nonce serves for one text however many media there are. The digests are taken once.
"""

import hashlib
import mmap
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from verl_slurm.base.errors import KeyRefused
from verl_slurm.base.keys import Keyring, MasterKey
from verl_slurm.checkpoint.format.encryption import TAG_BYTES, CheckpointCipher, ChunkSealer
from verl_slurm.checkpoint.format.specification import CHUNK_BYTES, PLAIN_FILES, FileEntry, sealed_size
from verl_slurm.checkpoint.store.chunks import entry_of, make_entry
from verl_slurm.save.writer.protocol import ArenaFile, Sealing

RING_CHUNKS = 8
_ALIGNMENT = 4096
SealedFile = tuple[FileEntry, bytes]
"""A file as it will lie on disk, encrypted where a key is configured, and its entry of the manifest."""


def begin_sealing(keys: Keyring | None, name: str) -> Sealing | None:
    """Returns how a new save of `name` is encrypted: with a salt of its own. None: no key. Runs on rank 0."""
    if keys is None:
        return None
    return Sealing(name=name, encryption=CheckpointCipher.begin(keys.current, name).record)


def cipher_for(keys: Keyring | None, sealing: Sealing | None) -> CheckpointCipher | None:
    """Returns this rank's cipher for what rank 0 began. KeyRefused: one has no key, or another one."""
    # Rank 0's choice and this rank's key must agree. A rank without a key would otherwise write plaintext into an
    # encrypted checkpoint.
    if keys is None and sealing is None:
        return None
    if keys is None or sealing is None:
        raise KeyRefused(
            "the ranks do not agree on whether to encrypt",
            remedy="let every node see the same key (checkpoint.encryption)",
        )
    record = sealing.encryption
    # By the id that rank 0 named: nodes may read different key files, or the file may have been exchanged.
    return CheckpointCipher(keys.find(record.key_id, where="the key of rank 0"), sealing.name, record)


def seal_small(files: Mapping[str, bytes], cipher: CheckpointCipher | None) -> list[SealedFile]:
    """Encrypt and hash each file, in the order of their paths. Once a save: a nonce serves once."""
    sealed = []
    # Sorted, so that entries have the same order on each medium.
    for path in sorted(files):
        data = files[path] if cipher is None else cipher.seal(path, files[path])
        entry = entry_of(path, data)
        # A few files stay readable without the key (`PLAIN_FILES`); `cipher.seal` gives those back as they are.
        if cipher is not None and path not in PLAIN_FILES:
            entry = msgspec.structs.replace(entry, plain_size=len(files[path]))
        sealed.append((entry, data))
    return sealed


class Sealer:
    """A saver's key, for as long as it lives."""

    def __init__(self, key: MasterKey) -> None:
        self._key = key
        self._salts: set[str] = set()
        self._rings: list[memoryview] = []

    def begin(self, sealing: Sealing, source: memoryview, files: Sequence[ArenaFile]) -> "SealedFiles":
        """Returns `files`, to be sealed for the checkpoint that `sealing` names.

        Raises:
            KeyRefused: the rank that asks has another key.
            ValueError: its salt has served already.
        """
        record = sealing.encryption
        # The key file may have been exchanged since this process read it. The manifest would name one key, and the
        # files need another.
        if record.key_id != self._key.id:
            raise KeyRefused(
                "the key has changed since this rank started",
                found=f"key id {self._key.id}",
                expected=f"key id {record.key_id}",
                remedy="put the former key back, or start the job again",
            )
        # Asked of this process, which is the one that seals: a rank that sends a request again would repeat every nonce
        # of it.
        if record.salt in self._salts:
            raise ValueError("a salt for the second time: its nonces must not be used again")
        # Added before the first chunk: a save that fails half way has used its nonces as well.
        self._salts.add(record.salt)
        cipher = CheckpointCipher(self._key, sealing.name, record)
        sealers = [cipher.sealer(file.path, file.size) for file in files]
        return SealedFiles(source, files, sealers, self._rings)


class SealedFiles:
    """Files of one `Write`, as they will lie on disk; `rings`: page-aligned memory, one for each medium."""

    def __init__(
        self,
        source: memoryview,
        files: Sequence[ArenaFile],
        sealers: Sequence[ChunkSealer],
        rings: list[memoryview],
    ) -> None:
        self._source, self._rings, self._num_readers = source, rings, 0
        self._files = {file.path: (file, sealer) for file, sealer in zip(files, sealers, strict=True)}
        # By chunk, each taken by the medium that reaches it first; of the last one, those of the file's end.
        self._leaves: dict[str, dict[int, Future[list[bytes]]]] = {file.path: {} for file in files}

    def reader(self, threads: int) -> "SealedReader":
        """Returns one more directory's view of the files, sealed by so many threads of its own."""
        # Kept for the next save: fresh memory would cost its page faults again.
        while len(self._rings) <= self._num_readers:
            self._rings.append(memoryview(mmap.mmap(-1, RING_CHUNKS * CHUNK_BYTES)))
        self._num_readers += 1
        return SealedReader(self, self._rings[self._num_readers - 1], threads)

    def entries(self) -> tuple[FileEntry, ...]:
        """Returns what the manifest will say of the files; nothing if no directory has taken all of them so far."""
        if any(len(self._leaves[path]) < sealer.num_chunks for path, (_, sealer) in self._files.items()):
            return ()
        return tuple(
            make_entry(path, sealed_size(file.size), self._all_leaves(path), file.size)
            for path, (file, _) in self._files.items()
        )

    def sealer(self, path: str) -> ChunkSealer:
        """Returns the sealer of a file."""
        return self._files[path][1]

    def seal(self, path: str, chunk: int, out: memoryview) -> bytes:
        """Seals a chunk into `out`, and hashes it if no other medium has; returns its tag."""
        file, sealer = self._files[path]
        start = file.at + chunk * CHUNK_BYTES
        tag = sealer.seal_into(chunk, self._source[start : start + len(out)], out)
        # The last one is hashed together with the tags.
        if chunk < sealer.num_chunks - 1:
            self._hash_once(path, chunk, [out])
        return tag

    def end(self, path: str, last: memoryview, tags: memoryview) -> None:
        """Hashes the file's end on disk, from where its last chunk begins: that chunk, then the tags."""
        fits = min(len(tags), CHUNK_BYTES - len(last))
        rest = [tags[start : start + CHUNK_BYTES] for start in range(fits, len(tags), CHUNK_BYTES)]
        self._hash_once(path, self.sealer(path).num_chunks - 1, [last, tags[:fits]], rest)

    def _hash_once(
        self, path: str, chunk: int, first: Sequence[memoryview], rest: Sequence[memoryview] = ()
    ) -> None:
        mine: Future[list[bytes]] = Future()
        if self._leaves[path].setdefault(chunk, mine) is mine:
            try:
                digest = hashlib.sha256()
                for part in first:
                    digest.update(part)
                mine.set_result([digest.digest(), *(hashlib.sha256(part).digest() for part in rest)])
            except BaseException as error:  # another medium's answer waits for it
                mine.set_exception(error)
                raise

    def _all_leaves(self, path: str) -> list[bytes]:
        leaves = self._leaves[path]
        return [leaf for chunk in sorted(leaves) for leaf in leaves[chunk].result()]


class SealedReader:
    """One directory's view of sealed files; each is to be asked for once, in their order."""

    def __init__(self, files: SealedFiles, ring: memoryview, threads: int) -> None:
        self._files = files
        self._slots = [ring[at : at + CHUNK_BYTES] for at in range(0, len(ring), CHUNK_BYTES)]
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="seal")

    def size(self, file: ArenaFile) -> int:
        """Returns the bytes of the file on disk."""
        return sealed_size(file.size)

    def blocks(self, file: ArenaFile) -> Iterator[tuple[int, memoryview]]:
        """Yields where each block of the file belongs, and the block; it changes when the next one is asked for.

        The last one is longer than what belongs to the file: cut it to `size`.
        """
        sealer = self._files.sealer(file.path)
        num_tag_bytes = TAG_BYTES * sealer.num_chunks
        # Whole pages, so that it can be written past the page cache.
        tags = memoryview(mmap.mmap(-1, -(-num_tag_bytes // _ALIGNMENT) * _ALIGNMENT))
        ahead: deque[tuple[Future[bytes], memoryview]] = deque()
        chunks = iter(range(sealer.num_chunks))
        free = list(self._slots)
        for number in range(sealer.num_chunks):
            # The ring is kept full: the next chunks are sealed while the caller writes this one.
            while free and (chunk := next(chunks, None)) is not None:
                slot = free.pop()
                job = self._pool.submit(self._files.seal, file.path, chunk, slot[: sealer.length(chunk)])
                ahead.append((job, slot))
            job, slot = ahead.popleft()
            tags[number * TAG_BYTES : (number + 1) * TAG_BYTES] = job.result()
            out = slot[: sealer.length(number)]
            if number == sealer.num_chunks - 1:
                self._files.end(file.path, out, tags[:num_tag_bytes])
            yield number * CHUNK_BYTES, out
            # After the write: from here on the buffer may be used again.
            free.append(slot)
        # The tags last, after all plain-sized chunks: so every plain byte keeps its offset in the file.
        yield file.size, tags

    def close(self) -> None:
        """Ends its threads; what they seal now is dropped."""
        self._pool.shutdown(cancel_futures=True)
