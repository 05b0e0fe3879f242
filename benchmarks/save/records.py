"""What the benchmark's processes tell one another, and what a run leaves behind: one JSON document.

The launcher hands a `Job` to the ranks of one process group; rank 0 answers with a `Answer`; the launcher
gathers all samples in a `Run`. Everything shown later (terminal, page) is computed from the
`Run`; nothing is written by hand.
"""

from pathlib import Path
from typing import Literal

import msgspec

Mode = Literal["loop", "direct", "busy", "dual", "memory", "keep", "load", "commit", "verify"]
"""What one process group does:

* loop    save, a generation phase that only reads, the fence, the update in place (a trainer's own order)
* direct  save, the fence, the update at once; nothing else runs until the checkpoint is durable
* busy    training goes on with both cores while the save is under way
* dual    one save into two directories, and the raw writes of the same bytes
* memory  two saves while the launcher watches the process tree
* keep    one save that stays, for `load`
* load    a fresh process loads what `keep` left
* commit  one whole committed checkpoint, for `verify`
* verify  no group: the launcher itself reads that checkpoint, as the daemon does
"""

MODES: dict[str, tuple[Mode, ...]] = {
    "stall": ("loop",),
    "durable": ("direct",),
    "busy": ("busy",),
    "dual": ("dual",),
    "load": ("keep", "load"),
    "verify": ("commit", "verify"),
    "memory": ("memory",),
}
"""What `--what` offers, and the modes it needs."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measurement of one peer."""

    peer: str
    mode: Mode
    group: str
    """Peers with the same group were measured in the same processes, in turn."""
    rep: int
    """0 is the cold first time, shown apart and in no median."""
    values: dict[str, float] = {}
    """Seconds, CPU seconds or bytes by name; the greatest (times) or the sum (CPU, bytes) over all ranks."""
    bit_exact: bool | None = None
    """Was the checkpoint, loaded after the live state had been overwritten, the state at the save? None: not asked."""
    error: str = ""
    """Why the peer failed; it is left out from then on."""
    idle: float = 1.0
    """Share of all cores that was idle just before (0..1): below 0.85 something else was running."""


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one process group is to do."""

    group: str
    modes: tuple[Mode, ...]
    peers: tuple[str, ...]
    plugins: dict[str, str] = {}
    reps: int
    """Timed repetitions, the cold one not among them."""
    gib: float
    directories: tuple[str, ...]
    """Where to write: the first, for `dual` the second as well."""
    generation_s: float
    """Length of the phase that only reads."""
    busy_s: float
    """How long training goes on in `busy`."""
    quiet_s: float
    """How long to wait for a quiet machine before each measurement, at most."""
    until: float = float("inf")
    """CLOCK_MONOTONIC seconds from which on no further repetition is begun."""
    rep: int = 0
    """`load`: which repetition this fresh process is."""
    answer: str
    """File for the `Answer`."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What rank 0 says at the end."""

    state_bytes: int
    """Of the model and the optimizer, over all ranks."""
    num_tensors: int
    samples: list[Sample]
    """In the file `part_of(answer)`: those so far. It is what remains of a group that is stopped."""
    marks: dict[str, float] = {}
    """`memory`: CLOCK_MONOTONIC seconds at which something began."""


def part_of(answer: Path) -> Path:
    """Beside it: the samples so far, replaced atomically after each."""
    return answer.with_suffix(".part")


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine and the software a run was made with."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    file_systems: dict[str, str]
    """Directory → type and device of its file system."""
    load_before: tuple[float, float, float]
    load_after: tuple[float, float, float] = (0.0, 0.0, 0.0)
    caches_dropped: bool
    """False (not root): every cold figure is in truth a warm one."""
    versions: dict[str, str]
    commit: str
    started_utc: str


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of the benchmark, whole."""

    format: Literal[1] = 1
    command: str
    environment: Environment
    ranks: int
    gib: float
    reps: int
    what: tuple[str, ...]
    peers: tuple[str, ...]
    labels: dict[str, str]
    kinds: dict[str, str]
    """Peer → `peer`, `ours` or `reference`."""
    absent: dict[str, str] = {}
    """Peer → why it was not measured."""
    state_bytes: int
    num_tensors: int
    same_medium: bool
    """Do both directories of `dual` lie on one device? Then its two writes share one bandwidth."""
    stopped: bool = False
    """By a signal: what had been measured until then."""
    done: dict[str, int] = {}
    """The parts that are measured whole, in their order, and how many samples there were behind each."""
    samples: list[Sample]
