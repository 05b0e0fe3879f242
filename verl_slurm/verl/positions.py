"""The place of a prompt in the order in which verl's data gives prompts out, and the file that keeps it. No verl.

```
CHECKPOINT/positions.json   {"format": 1, "next": N, "open": {uid: position}}
```

N prompts were given out when the checkpoint was written; the next one has position N. Epochs do not begin anew. `open`
has those that were given out and not trained on yet, by the `uid` under which verl's queue keeps them: in
`colocate_async` a checkpoint holds that queue. The file lies beside verl's `global_step_<number>`, which stays as verl
wrote it. A checkpoint that was adopted (`verl/adopt.py`) has none.
"""

from pathlib import Path

import msgspec

from verl_slurm.base.bounded import RECORD, decode_json, read_regular
from verl_slurm.base.errors import DataError

POSITION = "verl_slurm_position"
"""The field of a prompt."""
POSITIONS_FILE = "positions.json"


class Positions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module."""

    next: int
    open: dict[str, int] = {}
    format: int = 1


def positions_file(positions: Positions) -> dict[str, bytes]:
    """Returns the file of a checkpoint, by name."""
    return {POSITIONS_FILE: msgspec.json.encode(positions)}


def read_positions(checkpoint: Path) -> Positions | None:
    """Returns what a checkpoint says; None: nothing.

    Raises:
        DataError: the file says nothing that can be read.
        OSError: storage does not answer.
    """
    file = checkpoint / POSITIONS_FILE
    try:
        return decode_json(read_regular(file, RECORD), Positions, RECORD)
    except FileNotFoundError:
        return None
    except ValueError as error:  # not OSError: storage that fails says nothing about the file
        raise DataError(
            "the position in verl's data cannot be read",
            where=file,
            found=error,
            remedy="verl-slurm verify says whether the checkpoint is whole",
        ) from error
