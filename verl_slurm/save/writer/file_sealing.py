"""The arena's bytes, encrypted while they are written: a stream of sealed chunks that every medium reads.

Chunks are sealed once, into a ring of buffers, hashed there, and written from there to all directories: a
nonce is used once however many media there are (`checkpoint.format.encryption`, section 4), the arena stays as it
is, and no plaintext leaves it. The price: a faster medium waits for the slower one, once it is a ring ahead.

But not for ever, or storage that hangs would hold up the other medium. Who keeps a faster reader waiting for longer
than `patience` is left behind: what it needs is in the ring no more, and it copies the sealed bytes from the file
that the faster one has written, checked against their digests, until it has caught up.

Threads: sealers take the chunks in order; a buffer is used again when every reader that was not left behind is past
it. A reader that gives up is waited for no longer.
"""

import errno
import hashlib
import mmap
import os
import threading
from collections.abc import Iterator, Sequence

from verl_slurm.base.errors import KeyRefused
from verl_slurm.base.keys import MasterKey
from verl_slurm.checkpoint.format.encryption import TAG_BYTES, CheckpointCipher, ChunkSealer
from verl_slurm.checkpoint.format.specification import CHUNK_BYTES, FileEntry
from verl_slurm.checkpoint.store.chunks import make_entry
from verl_slurm.save.writer.protocol import ArenaFile, Sealing

RING_CHUNKS = 16
PATIENCE_S = 2.0
"""Storage that takes longer for one chunk than this stands still, or might as well."""
_ALIGNMENT = 4096


class Sealer:
    """A saver's key, for as long as it lives."""

    def __init__(self, key: MasterKey) -> None:
        self._key = key
        self._salts: set[str] = set()
        # Made once and kept: fresh memory for each save would cost its page faults again. Page-aligned, as direct
        # writes need.
        self._ring = mmap.mmap(-1, RING_CHUNKS * CHUNK_BYTES)

    def begin(
        self,
        sealing: Sealing,
        source: memoryview,
        files: Sequence[ArenaFile],
        patience: float = PATIENCE_S,
    ) -> "SealedStream":
        """A stream of `files`, sealed for the checkpoint that `sealing` names.

        Args:
            patience: seconds that a faster medium waits for a slower one.

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
        return SealedStream(source, files, sealers, memoryview(self._ring), patience)


class _File:
    """One file of the stream: how far it is sealed."""

    def __init__(self, file: ArenaFile, sealer: ChunkSealer, first: int) -> None:
        self.file, self.sealer, self.first = file, sealer, first
        self.left = sealer.num_chunks
        self.leaves: list[bytes] = [b""] * (sealer.num_chunks - 1)
        """Of all chunks of the file as it lies on disk; the last ones come with the last chunk."""
        self.tag_bytes = TAG_BYTES * sealer.num_chunks
        # Whole pages, so that it can be written past the page cache; the file is cut to size behind it.
        self.tags = memoryview(mmap.mmap(-1, -(-self.tag_bytes // _ALIGNMENT) * _ALIGNMENT))


class SealedStream:
    """Files of one `Write`, as they will lie on disk. Make the readers first, then `run` on every sealing thread.

    Args:
        sealers: one a file, in the order of `files`.
        ring: at least two chunks of page-aligned memory.
        patience: see `Sealer.begin`.
    """

    def __init__(
        self,
        source: memoryview,
        files: Sequence[ArenaFile],
        sealers: Sequence[ChunkSealer],
        ring: memoryview,
        patience: float = PATIENCE_S,
    ) -> None:
        self._source, self._ring, self._patience = source, ring, patience
        self._slots = len(ring) // CHUNK_BYTES
        self._files: list[_File] = []
        first = 0
        for file, sealer in zip(files, sealers, strict=True):
            self._files.append(_File(file, sealer, first))
            first += sealer.num_chunks
        # One sequence over all files: sealers take its chunks in order, so that readers, who need them in order, never
        # wait for a chunk that nobody seals.
        self._jobs = iter([(file, chunk) for file in self._files for chunk in range(file.left)])
        self._ready = [False] * first
        self._readers: list[StreamReader] = []
        self._failed = False
        # Guards everything below: what is sealed, how far each reader is, and who has given up.
        self._changed = threading.Condition()

    def reader(self) -> "StreamReader":
        """For one more directory; all must be made before the first `run`."""
        # Before the first `run`: a reader that came later would find chunks gone from the ring.
        reader = StreamReader(self, {file.file.path: file for file in self._files})
        self._readers.append(reader)
        return reader

    def run(self) -> None:
        """Seal until nothing is left, or nobody reads any more."""
        try:
            while True:
                # Taking a chunk and waiting for its buffer are one step: otherwise a later chunk could take the buffer
                # that an earlier one still waits for.
                with self._changed:
                    job = next(self._jobs, None)
                    if job is None or not self._wait_for_slot(*job):
                        return
                self._seal(*job)
        except BaseException:
            with self._changed:
                # Readers wait for chunks that will never come, and would wait without end.
                self._failed = True
                self._changed.notify_all()
            raise

    def entries(self) -> tuple[FileEntry, ...]:
        """What the manifest will say of the files; none where not all of it was sealed."""
        # All readers gave up. Entries of part of the files would make a manifest that no medium satisfies.
        if not all(self._ready):
            return ()
        return tuple(
            make_entry(file.file.path, file.file.size + file.tag_bytes, file.leaves, file.file.size)
            for file in self._files
        )

    def _wait_for_slot(self, file: _File, chunk: int) -> bool:
        number = file.first + chunk
        # The buffer still holds a chunk that some reader has not written.
        while late := self._late(number):
            if len(late) == sum(not reader.closed for reader in self._readers):
                self._changed.wait()  # nobody is faster
            # Patience is counted anew for each chunk: storage that is slow and moves is waited for, one that stands
            # still is not.
            elif not self._changed.wait_for(lambda: not self._late(number), self._patience):
                for reader in self._late(number):
                    reader.behind = True
        return not self._failed and not all(reader.closed for reader in self._readers)

    def _late(self, number: int) -> "list[StreamReader]":
        """Who still needs the buffer that chunk `number` is to go into."""
        at_work = [] if self._failed else [reader for reader in self._readers if not reader.closed]
        # Readers that were left behind are heeded again if they are all that is left: then there is no faster medium to
        # copy from.
        heeded = [reader for reader in at_work if not reader.behind] or at_work
        return [reader for reader in heeded if reader.done <= number - self._slots]

    def ahead_of(self, reader: "StreamReader", number: int) -> "StreamReader | None":
        """Whose file to copy chunk `number` from; None: it is in the ring, and stays there until `reader` is past it,
        unless it is left behind meanwhile."""
        with self._changed:
            if not reader.behind:
                return None
            ahead = next((r for r in self._readers if r is not reader and r.done > number), None)
            if ahead is None:  # caught up: nobody is past it, so nothing has taken its buffer
                reader.behind = False
            return ahead

    def close(self) -> None:
        """When nobody writes any more."""
        for reader in self._readers:
            reader.close_files()

    def slot(self, file: _File, chunk: int) -> memoryview:
        """Where a chunk's sealed bytes are."""
        start = (file.first + chunk) % self._slots * CHUNK_BYTES
        return self._ring[start : start + file.sealer.length(chunk)]

    def _seal(self, file: _File, chunk: int) -> None:
        # Each chunk is sealed by one thread, outside the lock. Encryption and hashing release the interpreter lock.
        start, out = file.file.at + chunk * CHUNK_BYTES, self.slot(file, chunk)
        # From the arena into the ring: the arena keeps its plaintext unchanged, as another medium or a later look needs
        # it.
        tag = file.sealer.seal_into(chunk, self._source[start : start + len(out)], out)
        file.tags[chunk * TAG_BYTES : (chunk + 1) * TAG_BYTES] = tag
        if chunk < file.sealer.num_chunks - 1:
            file.leaves[chunk] = hashlib.sha256(out).digest()
        else:
            with self._changed:
                # The file's end on disk has this chunk and all tags in common chunks of the digest, so every other
                # chunk's tag has to be there.
                self._changed.wait_for(lambda: self._failed or file.left == 1)
                if self._failed:
                    return
            file.leaves += _end_leaves(out, file.tags[: file.tag_bytes])
        with self._changed:
            file.left -= 1
            self._ready[file.first + chunk] = True
            self._changed.notify_all()

    def wait_ready(self, number: int) -> None:
        """Until chunk `number` of the stream is sealed.

        Raises:
            RuntimeError: it never will be; the thread that failed says why.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._ready[number])
            if self._failed:
                # Not an OSError: no medium is to blame, so the whole save fails, on all of them.
                raise RuntimeError("sealing broke")

    def advance(self, reader: "StreamReader", done: int, *, closed: bool = False) -> None:
        """`reader` needs no chunk before `done` any more, or none at all."""
        with self._changed:
            reader.done, reader.closed = done, reader.closed or closed
            self._changed.notify_all()


class StreamReader:
    """One directory's view of the stream; files are to be asked for in their order.

    Attributes:
        done: chunks that it is past.
        closed: it wants no more.
        behind: it was left behind, and what it has just been given may have changed since.
    """

    def __init__(self, stream: SealedStream, files: dict[str, _File]) -> None:
        self._stream, self._files = stream, files
        self.done, self.closed, self.behind = 0, False, False
        self._written: dict[str, int] = {}
        self._copy = memoryview(b"")

    def size(self, file: ArenaFile) -> int:
        """Bytes of the file on disk."""
        return file.size + self._files[file.path].tag_bytes

    def opened(self, file: ArenaFile, fd: int) -> None:
        """What is read from here goes into this file."""
        # A descriptor of its own, for reading: the writer's may be closed, and has O_DIRECT, while another reader still
        # copies from the file.
        self._written[file.path] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)

    def blocks(self, file: ArenaFile) -> Iterator[tuple[int, memoryview]]:
        """Where each block of the file belongs, and the block; it may change when the next one is asked for.

        A block may come twice: then the first one changed while it was being written. The last one is longer than
        what belongs to the file: cut it to `size`.

        Raises:
            OSError: the faster medium does not give back what was written there.
        """
        sealed = self._files[file.path]
        for chunk in range(sealed.sealer.num_chunks):
            number = sealed.first + chunk
            self._stream.wait_ready(number)
            again = True
            while again:
                ahead = self._stream.ahead_of(self, number)
                block = (
                    self._stream.slot(sealed, chunk) if ahead is None else self._copied(ahead, sealed, chunk)
                )
                # While the caller writes the block, this reader may be left behind and the buffer be used again. So it
                # is asked afterwards, and the chunk is given once more, then from the other file.
                yield chunk * CHUNK_BYTES, block
                again = ahead is None and self.behind
            # After the write: from here on the buffer may be used again.
            self._stream.advance(self, number + 1)
        # The tags last, after all plain-sized chunks: so every plain byte keeps its offset in the file.
        yield sealed.file.size, sealed.tags

    def _copied(self, ahead: "StreamReader", file: _File, chunk: int) -> memoryview:
        if not self._copy:
            self._copy = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        block = self._copy[: file.sealer.length(chunk)]
        count = os.preadv(ahead._written[file.file.path], [block], chunk * CHUNK_BYTES)
        found = hashlib.sha256(block)
        if chunk == file.sealer.num_chunks - 1:
            found.update(file.tags[: min(file.tag_bytes, CHUNK_BYTES - len(block))])
        # The copy is not sealed again, which would repeat a nonce, so its bytes must be the very ones that were sealed.
        if count != len(block) or found.digest() != file.leaves[chunk]:
            raise OSError(
                errno.EIO, "the faster medium does not give back what was written there", file.file.path
            )
        return block

    def close_files(self) -> None:
        """Nobody copies from here any more."""
        for fd in self._written.values():
            os.close(fd)
        self._written.clear()

    def close(self) -> None:
        """Nobody waits for this reader any more."""
        # A directory whose storage failed must not keep the ring full for the other one.
        self._stream.advance(self, self.done, closed=True)


def _end_leaves(last: memoryview, tags: memoryview) -> list[bytes]:
    """Digests of the file's end on disk, from where its last chunk begins: that chunk, then the tags."""
    fits = min(len(tags), CHUNK_BYTES - len(last))
    first = hashlib.sha256(last)
    first.update(tags[:fits])
    rest = range(fits, len(tags), CHUNK_BYTES)
    return [
        first.digest(),
        *(hashlib.sha256(tags[start : start + CHUNK_BYTES]).digest() for start in rest),
    ]
