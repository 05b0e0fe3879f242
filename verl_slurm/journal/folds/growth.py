"""How a run's attempts to get more nodes came out, from its journal. Pure."""

from collections.abc import Iterable

import msgspec

from verl_slurm.journal.events import Cause, Event, NodesChosen


class Growths(msgspec.Struct):
    """The times that a run was requeued in order to grow."""

    last: float | None = None
    """Seconds since 1970; None: never."""
    fruitless: int = 0
    """Of these the last ones in a row that brought no node."""


def growths(events: Iterable[Event]) -> Growths:
    """Returns what became of them."""
    found, nodes, asked = Growths(), 0, False
    for event in events:
        match event:
            case Cause(cause="growth"):
                found.last, asked = event.at, True
            case NodesChosen(train=train):
                if len(train) > nodes:
                    found.fruitless = 0
                elif asked:
                    found.fruitless += 1
                nodes, asked = len(train), False
    return found
