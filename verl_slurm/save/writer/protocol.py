"""What a rank and its saver process say to each other: the specification.

The saver is a child of the rank, without torch. It inherits one descriptor, the rank's staging arena (shared
memory), and talks over its standard input and output, one JSON object a line:

```
saver → rank   Ready()                                   once: the arena is mapped and faulted in
rank  → saver  Write(save, files, directories)           the bytes in the arena do not change until the last answer
saver → rank   Written(save, directory, files, error)    for each directory, once it is durable there, or why not
rank           closes the pipe; the saver ends
```

One `Write` at a time. `directories` are staging directories on one or several media (shared storage, a node's
own disk); each gets every file, and is made where nobody has yet. They are answered for one by one, whichever is
done first: one whose storage fails, or says nothing for ever, keeps no other from its answer. The write is over
when all are answered for. The digests are of the bytes in the arena, so they are the same for all. Nobody has read
back what was written: that is the verifier's work.

Where a key is configured, the saver was started with the name of its source and has read it for itself; a
`Write` then says for which checkpoint it is sealed (`sealing`, nothing of it secret), and one that does not, or a
`sealing` without a key, ends the process: no plaintext by mistake. The arena stays as it is.

The pipe comes from our own parent or child, and still nothing in it is believed beyond its type: unknown kinds
and fields end the process.
"""

import msgspec

from verl_slurm.checkpoint.format.specification import Encryption, FileEntry


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """A closed, typed map; the class name is its `type`."""


class ArenaFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file to be: `size` bytes of the arena from `at`, both multiples of 4096."""

    path: str
    """Below each directory, e.g. `actor/rank_0000.bin`."""
    at: int
    size: int


class Sealing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How files are to be encrypted. Good for one `Write`."""

    name: str
    """Of the checkpoint, `step_000012`."""
    encryption: Encryption


class Write(_Message, frozen=True, kw_only=True):
    """Make `files` durable below each of `directories`. Existing files are an error, never overwritten."""

    save: int = 0
    """Counts the requests; `SaverProcess.write` fills it in."""
    files: tuple[ArenaFile, ...]
    directories: tuple[str, ...]
    """No two alike."""
    sealing: Sealing | None = None


class SaverReady(_Message, frozen=True, kw_only=True):
    """The first word of a saver."""


class Written(_Message, frozen=True, kw_only=True):
    """The answer to `Write` for one directory."""

    save: int = 0
    directory: str
    files: tuple[FileEntry, ...] = ()
    """All that were hashed, whatever `error` says of this directory. Empty where the files are sealed and no directory
    has taken them so far."""
    error: str | None = None
    """Why not all of it is durable; None: it is."""
    errno: int | None = None
    direct: bool = True
    """Whether all of it went past the page cache."""


FromSaver = SaverReady | Written
