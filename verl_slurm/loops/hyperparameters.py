"""Says that a resumed loop trains with other hyperparameters than its program has now.

Optimizers and schedulers restore theirs (learning rate, weight decay, ...) with their state, in torch as in Hugging
Face's Trainer and in Lightning. Whoever changes one between two attempts would take it for used. So each checkpoint's
metadata.json has, as `made_with`, what the program made its objects with, before any state was restored.

The functions of a LambdaLR are the other way round: they are the program's, called at the restored place. A longer run
changes its rates so, at once. `rates` in metadata.json has what those functions were made with. A place in the data is
counted in the batches that the program has now. What those are made of is saved, too (`data` in metadata.json;
Lightning: its place).
"""

import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Subset

from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.checkpoint.store.run_config import keys_for
from verl_slurm.loops.session import Session

_MOST_NAMED = 5
_MOST_INDICES = 10_000
_ROWS = "digest_of_rows"


class _Metadata(msgspec.Struct, frozen=True):
    made_with: dict[str, Any] = {}
    rates: dict[str, Any] = {}
    data: dict[str, int] = {}


def hyperparameters(named: Mapping[str, object]) -> dict[str, Any]:
    """What optimizers and schedulers among `named` were made with, by `name.key`; before their state is restored."""
    made_with: dict[str, Any] = {}
    for name, thing in sorted(named.items()):
        if isinstance(thing, Optimizer):
            for at, group in enumerate(thing.param_groups):
                place = f"{name}[{at}]" if at else name
                made_with |= {f"{place}.{key}": value for key, value in group.items() if key != "params"}
        elif isinstance(schedule := _bare(thing), LRScheduler):
            made_with |= _of_schedule(name, schedule)
    return _as_saved(made_with)


def rates(named: Mapping[str, object]) -> dict[str, Any]:
    """What the rates of the schedules among `named` follow from, and no checkpoint restores."""
    found: dict[str, Any] = {}
    for name, thing in sorted(named.items()):
        if isinstance(schedule := _bare(thing), LRScheduler):
            found |= _rates_of(name, schedule)
    return _as_saved(found)


def _bare(thing: object) -> object:
    # accelerate's `prepare` wraps a schedule.
    return getattr(thing, "scheduler", thing)


def _rates_of(name: str, schedule: LRScheduler) -> dict[str, Any]:
    found: dict[str, Any] = {f"{name}.class": type(schedule).__name__}
    # One function that is given for all groups is in the list once for each.
    functions = {id(one): one for one in getattr(schedule, "lr_lambdas", ())}
    for at, function in enumerate(functions.values()):
        place = f"{name}[{at}]" if at else name
        # As each schedule of transformers is made.
        made = function if isinstance(function, partial) else partial(function)
        found[f"{place}.function"] = getattr(made.func, "__name__", type(made.func).__name__)
        found |= {f"{place}.{key}": value for key, value in (*enumerate(made.args), *made.keywords.items())}
    for at, part in enumerate(getattr(schedule, "_schedulers", ())):
        found |= _rates_of(f"{name}[{at}]", part)
    return found


def _as_saved(found: Mapping[str, Any]) -> dict[str, Any]:
    """`found` as a checkpoint gives it back: NaN, for one, is null there. What is not plain is left out."""
    plain = {key: _plain(value) for key, value in found.items()}
    kept = {key: value for key, value in plain.items() if value is not ...}
    return msgspec.json.decode(msgspec.json.encode(kept), type=dict[str, Any])


def _of_schedule(name: str, schedule: LRScheduler) -> dict[str, Any]:
    # The rates that it begins with are the optimizer's, and its place is no choice.
    moving = ("base_lrs", "last_epoch")
    state = schedule.state_dict()
    kept = [key for key in state if key == "_milestones" or (key not in moving and key[0] != "_")]
    made_with = {f"{name}.{key.lstrip('_')}": state[key] for key in kept}
    # Of SequentialLR and ChainedScheduler, whose own state has no choices: those that they are made of.
    for at, part in enumerate(getattr(schedule, "_schedulers", ())):
        made_with |= _of_schedule(f"{name}[{at}]", part)
    return made_with


def _plain(value: Any) -> Any:
    """`value` without tensors; `...`: it is no number, text, or list of them."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()  # a rate that a captured graph reads
    if isinstance(value, tuple | list):
        items = [_plain(item) for item in value]
        return ... if ... in items else items
    return value if value is None or type(value) in (bool, int, float, str) else ...


def tell_replaced(
    session: Session,
    now: Mapping[str, Any],
    remedy: str,
    *,
    rates: Mapping[str, Any],
    data: Mapping[str, int] | None = None,
) -> None:
    """Tells people which of `now` the resumed checkpoint's replace, which of `rates` make the schedules other ones, and
    which of `data` move its place in the data."""
    if session.rank or session.resume is None:
        return
    reader = CheckpointReader(session.resume, keys_for(session.paths.root))
    then = msgspec.json.decode(reader.read("metadata.json"), type=_Metadata)
    if differing := _differing(then.made_with, now):
        session.notice(
            f"the program's {differing} are not used: the run goes on with those that it began with, in brackets, "
            f"which are restored with its state. {remedy}",
            topic="rates",
            loud=True,
        )
    if differing := _differing(then.rates, rates):
        session.notice(
            f"the program's {differing} change the schedule, before in brackets: learning rates differ from here on. "
            "Set them back to go on as before",
            topic="rates",
            loud=True,
        )
    tell_moved(session, then.data, data or {})


def tell_moved(session: Session, then: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Tells people which values the place in the data was counted in `then`, and is not `now`."""
    if differing := _differing(then, now):
        session.notice(
            f"the program's {differing} are not those of the checkpoint, in brackets: its place in the data is counted "
            "in the new values, and samples of this epoch come again or never. Set them back to go on where it was; "
            f"{_ROWS} is another where rows are shuffled or split without a seed",
            topic="rates",
            loud=True,
        )


def tell_used(session: Session, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Tells people which values of `now` are used in place of those that the checkpoint has, as they want it."""
    if differing := _differing(then, now):
        session.notice(f"the program's {differing} are used from here on, before in brackets", topic="rates")


def _differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns e.g. `lr=1e-05 (0.01)`, with what it was in brackets; empty: nothing that both have."""
    differing = [f"{key}={now[key]} ({then[key]})" for key in now if key in then and now[key] != then[key]]
    more = f" and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
    return ", ".join(differing[:_MOST_NAMED]) + more


def _rows(data: Any, num: int) -> object:
    """Returns what another order or choice of rows changes. No sample is made: it may be augmented at random."""
    if isinstance(data, Subset):
        return [int(index) for index in data.indices[:_MOST_INDICES]]
    # A data set of `datasets`: the rows as they are stored.
    return data.with_format("arrow")[[0, num // 2, num - 1]].to_pylist()


def counted_in(loader: Any, prefix: str = "", **values: object) -> dict[str, int]:
    """Returns those of `values` that are whole numbers, and of the loader's data set the length and the order of rows,
    where they can be told."""
    with suppress(AttributeError, TypeError, NotImplementedError):
        values["samples"] = num = len(loader.dataset)
        with suppress(Exception):  # the training itself says what cannot be read
            values[_ROWS] = zlib.crc32(repr(_rows(loader.dataset, num)).encode())
    return {f"{prefix}{name}": int(value) for name, value in values.items() if isinstance(value, int)}
