"""Makes checkpoints, nodes, warnings and hours of a report from the events of a run."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.events import Avoid, Crash, Event, Hang, Link, Warned
from verl_slurm.journal.history import History, LifeInterval, TimeUse
from verl_slurm.report.curves import Steps
from verl_slurm.report.report_facts import CheckpointFacts, Cost, NodeFact, WarningFact

_MOST_CHECKPOINTS = 300
_MOST_NODES = 100
_MOST_WARNINGS = 30


def checkpoints_of(paths: RunPaths, history: History, steps: Steps) -> list[CheckpointFacts]:
    """The newest saves of the journal, and what is in the directory; newest first.

    Raises:
        OSError: the directory cannot be read.
    """
    saves = {name: save.event for name, save in history.saves.items()}
    # A colleague of a group sees none of them, as in `status`.
    try:
        present = {info.name: info for info in list_checkpoints(paths) if info.kind == "committed"}
    except PermissionError:
        present = {}
    found = []
    stalls = _stalls(list(saves), steps)
    # A checkpoint without a save in the journal is older than what was read of it.
    for name in [*sorted(present.keys() - saves.keys()), *saves]:
        saved, there = saves.get(name), present.get(name)
        known = CheckpointFacts(name=name, stall_s=stalls.get(name), kept=there is not None)
        if saved is not None:
            unread = "" if saved.on_shared else "on the nodes' disks"
            taken = ("attempt", "num_bytes", "seconds", "emergency", "reason")
            own = {field: getattr(saved, field) for field in taken}
            known = replace(known, time=saved.at, verified=unread, **own)
        elif there is not None:
            known = replace(known, attempt=there.attempt, num_bytes=there.num_bytes)
        found.append(replace(known, verified=history.verdicts.get(name, known.verified)))
    return found[::-1][:_MOST_CHECKPOINTS]


def _stalls(names: Sequence[str], steps: Steps) -> dict[str, float]:
    """Name of a save -> seconds of stalls after it; of those whose steps measured any."""
    at = {name: int(match[1]) for name in names if (match := CHECKPOINT_NAME.fullmatch(name))}
    # Of several saves in one step, the stall is the last one's.
    last = {step: name for name, step in at.items()}
    order = sorted(last)
    found = zip(order, steps.stall_after(order), strict=True)
    return {last[step]: round(seconds, 3) for step, seconds in found if seconds is not None}


def nodes_of(events: Sequence[Event], status: dict[str, Any]) -> list[NodeFact]:
    """What was wrong with nodes, newest first; the stragglers of the present come first of all."""
    found: list[NodeFact] = []

    def note(node: str, what: str, detail: str) -> None:
        found.append(NodeFact(node=node, time=event.at, what=what, detail=detail))

    for event in events:
        match event:
            case Crash(node=str(node), kind=kind, detail=detail) if node:
                note(node, "lost" if kind == "node" else kind, detail)
            case Hang(node=node, detail=detail) if node:
                note(node, "hang", detail)
            case Avoid(nodes=nodes, detail=detail):
                for node in nodes:
                    note(node, "avoided", detail)
            case Link(node=node, error=error) if node:
                note(node, "link", error)
            case Warned(topic="straggler", text=text):
                node, _, said = text.partition(": ")
                note(node, "slow", said)
    slow = [
        NodeFact(node=str(one).rpartition(" on ")[2], what="slow", detail=f"{one}, now")
        for one in status.get("stragglers", [])
    ]
    return [*slow, *found[::-1]][:_MOST_NODES]


def warnings_of(events: Sequence[Event]) -> list[WarningFact]:
    """The newest warnings, newest first; those of nodes are among the nodes."""
    warned = [event for event in events if isinstance(event, Warned) and event.topic != "straggler"]
    return [
        WarningFact(time=event.at, topic=event.topic, text=event.text)
        for event in warned[: -_MOST_WARNINGS - 1 : -1]
    ]


def allocation_of(
    history: History,
    intervals: Sequence[LifeInterval],
    config: RunConfig | None,
    use: TimeUse | None,
    price_per_hour: float | None,
) -> Cost | None:
    """The hours of all GPUs, or cores, that the attempts held. None: the configuration or the time is not known."""
    if config is None or use is None:
        return None
    most = config.distributed.nodes + config.slurm.spare_nodes
    # Of an attempt that may have other nodes than it asked for, the journal says which it got.
    chosen = {one.number: one.num_nodes for one in history.attempts}
    node_s = sum(
        interval.seconds * (chosen.get(interval.attempt) or most)
        for interval in intervals
        if interval.kind != "queued"
    )
    gpus = config.slurm.gpus_per_node
    hours = node_s * (gpus or config.slurm.cpus_per_node) / 3600
    return Cost(
        unit="GPU" if gpus else "core",
        hours=round(hours, 3),
        useful_hours=round(hours * use.goodput, 3) if use.goodput is not None else None,
        price_per_hour=price_per_hour,
        price=round(hours * price_per_hour, 4) if price_per_hour is not None else None,
    )
