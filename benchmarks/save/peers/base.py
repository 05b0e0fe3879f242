"""What the harness asks of everything it measures."""

from pathlib import Path

from benchmarks.save.workload import Workload


class Peer:
    """One way to save and load a `Workload`. Every method is collective: all ranks call it, in the same order.

    The harness times `save` and `fence` as stall of the training thread, and all until `wait` returns, plus the
    fsync of whatever the peer left unsynced, as time to durable. What a peer needs once (a worker process, a
    staging buffer) it makes in its first `save` or in `open`; repetition 0 pays for it and is in no median.

    Called by: turns, once.
    """

    def __init__(self, work: Workload) -> None:
        self.work = work

    def open(self, directories: tuple[Path, ...]) -> None:
        """Once, before the first save: into these, or others of the same name, it will save."""

    def save(self, directories: tuple[Path, ...]) -> None:
        """Save into fresh empty directories (one, but in `dual` two); return when training may go on reading."""
        raise NotImplementedError

    def fence(self) -> None:
        """Return when the state may be overwritten."""

    def wait(self) -> None:
        """Return when the peer says that the save is complete, on all ranks."""

    def load(self, directory: Path) -> None:
        """Fill the model and the optimizer (whose state may not be there yet) from a finished save."""
        raise NotImplementedError

    def close(self) -> None:
        """End processes and let go of memory."""
