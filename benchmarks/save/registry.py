"""The names of what is measured, and where each lives. Torch-free: a name is imported by the rank that runs it."""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.save.records import Mode

if TYPE_CHECKING:
    from benchmarks.save.peers.base import Peer


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing to measure.

    Attributes:
        label: as tables show it.
        target: `module:Class`, a `peers.base.Peer`.
        kind: `reference` is no checkpoint, but what the machine itself takes for the same bytes.
        apart: name of a group. It changes the process for the others (its class says how), so it gets processes
            of its own, with those of the same group and `COMPANIONS` beside it for the comparison.
        needs: module that must be there.
        loads: is loading in a fresh process measured? Not where the files are another peer's, too, and not where it
            is far behind (a fresh process a load costs a minute a peer).
        hashes: are digests computed and kept? The rest pays nothing for that.
        modes: of those in which peers take turns, the ones it is measured in.
        only: figures that say something of it; empty: all.
        checked: are there files, and a way to load them, to compare with what was to be saved?
    """

    label: str
    target: str
    kind: Literal["peer", "ours", "reference"] = "peer"
    apart: str = ""
    needs: str = "torch"
    loads: bool = True
    hashes: bool = False
    modes: tuple[Mode, ...] = ("loop", "direct", "busy")
    only: tuple[str, ...] = ()
    checked: bool = True


_HERE = "benchmarks.save.peers"

PEERS: dict[str, Entry] = {
    "torch_full": Entry(
        label="torch.save, gathered on rank 0",
        target=f"{_HERE}.files:TorchFull",
        loads=False,
        modes=("loop", "direct"),
    ),
    "torch_rank": Entry(label="torch.save, a file per rank (verl)", target=f"{_HERE}.files:TorchPerRank"),
    "safetensors": Entry(
        label="safetensors, a file per rank", target=f"{_HERE}.files:Safetensors", needs="safetensors"
    ),
    "dcp": Entry(label="DCP save", target=f"{_HERE}.dcp:Dcp"),
    "dcp_async": Entry(
        label="DCP async, thread, cached staging",
        target=f"{_HERE}.dcp:DcpThread",
        apart="dcp_threads",
        loads=False,
    ),
    "dcp_default": Entry(
        label="DCP async, thread, default staging",
        target=f"{_HERE}.dcp:DcpDefault",
        apart="dcp_threads",
        loads=False,
    ),
    "dcp_process": Entry(
        label="DCP async, process, shared staging", target=f"{_HERE}.dcp:DcpProcess", loads=False
    ),
    "nvrx_fork": Entry(
        label="NVIDIA Resiliency Extension, fork",
        target=f"{_HERE}.nvrx:NvrxFork",
        needs="nvidia_resiliency_ext",
        loads=False,
    ),
    "nvrx_worker": Entry(
        label="NVIDIA Resiliency Extension, worker",
        target=f"{_HERE}.nvrx:NvrxWorker",
        needs="nvidia_resiliency_ext",
        apart="nvrx_worker",
        loads=False,
        modes=("loop", "direct"),
    ),
    "bytecheckpoint": Entry(
        label="ByteCheckpoint, fast_saving",
        target=f"{_HERE}.bytecheckpoint:ByteCheckpoint",
        needs="bytecheckpoint",
        apart="bytecheckpoint",
        loads=False,
        modes=("loop", "direct"),
    ),
    "torchsnapshot": Entry(
        label="torchsnapshot, async_take",
        target=f"{_HERE}.snapshot:TorchSnapshot",
        needs="torchsnapshot",
        apart="torchsnapshot",
        loads=False,
        modes=("loop", "direct"),
    ),
    "ours": Entry(
        label="verl-slurm, lazy staging",
        target=f"{_HERE}.ours:Ours",
        kind="ours",
        needs="verl_slurm.save.ranks.staging",
        hashes=True,
        modes=("loop", "direct", "busy", "dual"),
    ),
    "ours_eager": Entry(
        label="verl-slurm, eager staging",
        target=f"{_HERE}.ours:OursEager",
        kind="ours",
        needs="verl_slurm.save.ranks.staging",
        loads=False,  # the same files as `ours`
        hashes=True,
    ),
    "copy": Entry(
        label="plain copy into warm shared memory",
        target=f"{_HERE}.reference:Copy",
        kind="reference",
        loads=False,
        modes=("loop", "direct"),
        only=("stall", "generation"),
        checked=False,
    ),
    "raw": Entry(
        label="raw write + fsync of the same bytes",
        target=f"{_HERE}.reference:Raw",
        kind="reference",
        loads=False,
        modes=("direct",),
        only=("durable", "cpu", "bytes"),
        checked=False,
    ),
}

DEFAULT = tuple(PEERS)

COMPANIONS = ("ours",)
"""Measured again in the processes of every peer that is `apart`: ratios are within the same processes."""


def entry(name: str, plugins: dict[str, str]) -> Entry:
    """Of a registered name, or of a plugin (`NAME=module:Class`), which is measured as if it were ours."""
    if name in plugins:
        return Entry(
            label=name,
            target=plugins[name],
            kind="ours",
            hashes=True,
        )
    return PEERS[name]


def load_class(name: str, plugins: dict[str, str]) -> "type[Peer]":
    """Import the class behind a name; whatever its import raises goes through."""
    module, _, cls = entry(name, plugins).target.partition(":")
    found: Any = getattr(importlib.import_module(module), cls)
    return found  # type: ignore[no-any-return]


def absent(name: str, plugins: dict[str, str]) -> str:
    """Why `name` cannot be measured here; empty if it can."""
    needs = entry(name, plugins).needs
    try:
        found = importlib.util.find_spec(needs)
    except ModuleNotFoundError:
        found = None
    if found is not None:
        return ""
    return (
        "not there yet"
        if needs.startswith("verl_slurm")
        else f"{needs} is not installed (make bench does it)"
    )


def groups(names: tuple[str, ...], plugins: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Which peers share processes: all in `main`, but for those that are apart.

    Returns:
        Group → peers, its own first, then those that only keep them company.
    """
    main = tuple(name for name in names if not entry(name, plugins).apart)
    company = tuple(name for name in main if name in COMPANIONS or name in plugins)
    found = {"main": main} if main else {}
    for name in names:
        if group := entry(name, plugins).apart:
            found[group] = (*found.get(group, ()), name)
    return {group: peers if group == "main" else (*peers, *company) for group, peers in found.items()}
