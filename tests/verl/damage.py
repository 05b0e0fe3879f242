"""What can happen to a checkpoint of verl's SFT trainer: each case as a function that does it.

A case gets the directory of the newest `global_step_N` and the tracker, wherever they are: below a `default_local_dir`
of plain verl, or in a checkpoint of ours.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_MODEL = "model_world_size_2_rank_1.pt"
_OPTIM = "optim_world_size_2_rank_1.pt"
_EXTRA = "extra_state_world_size_2_rank_1.pt"
_DATA = "data_1.pt"
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Case:
    """One kind of damage.

    Attributes:
        what: for the table.
        strike: takes the newest global_step directory and the tracker beside it.
        ranks: of the start after it.
        silent: verl can train on with it, and does not know.
    """

    name: str
    what: str
    strike: Callable[[Path, Path], None]
    ranks: int = 2
    silent: bool = False


def _halve(name: str) -> Callable[[Path, Path], None]:
    def strike(newest: Path, tracker: Path) -> None:
        path = newest / name
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])

    return strike


def _empty(newest: Path, tracker: Path) -> None:
    (newest / _MODEL).write_bytes(b"")


def _remove(name: str) -> Callable[[Path, Path], None]:
    return lambda newest, tracker: (newest / name).unlink()


def _empty_directory(newest: Path, tracker: Path) -> None:
    shutil.rmtree(newest)
    newest.mkdir(mode=0o700)


def _no_data(newest: Path, tracker: Path) -> None:
    for path in newest.glob("data_*.pt"):
        path.unlink()


def _flip(newest: Path, tracker: Path) -> None:
    """One bit in the middle of the largest tensor's bytes."""
    path = newest / _MODEL
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _say(text: str) -> Callable[[Path, Path], None]:
    def strike(newest: Path, tracker: Path) -> None:
        tracker.write_text(text)

    return strike


CASES = (
    Case("model", "model shard of one rank cut to half", _halve(_MODEL)),
    Case("optim", "optimizer shard cut to half", _halve(_OPTIM)),
    Case("extra", "extra_state (scheduler, RNG) cut to half", _halve(_EXTRA)),
    Case("data", "data_1.pt (where the data loader was) cut to half", _halve(_DATA)),
    Case("zero", "model shard of no bytes", _empty),
    Case("missing", "optimizer shard missing", _remove(_OPTIM)),
    Case("empty_directory", "the newest global_step directory empty", _empty_directory),
    Case("no_data", "all data_*.pt missing", _no_data),
    Case("tracker_empty", "tracker empty", _say("")),
    Case("tracker_garbage", "tracker says `abc`", _say("abc")),
    Case("tracker_nowhere", "tracker says a step that is not there", _say("8")),
    Case("tracker_missing", "tracker missing", lambda newest, tracker: tracker.unlink()),
    Case("bit", "one flipped bit in a model shard", _flip, silent=True),
    Case("ranks", "started with 1 rank, saved by 2", lambda newest, tracker: None, ranks=1),
)
