"""What is interrupted: the real code, on the smallest run that has the case."""

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from tests.faults.gates import gate
from tests.faults.world import World, plant, recover, tree_of
from verl_slurm.checkpoint.decide.retention import plan_prune
from verl_slurm.checkpoint.format.manifest import render, sealed
from verl_slurm.checkpoint.format.specification import MANIFEST, Topology
from verl_slurm.checkpoint.store import commit
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.chunks import entry_of
from verl_slurm.checkpoint.store.local_copy import assemble, list_parts, send_home
from verl_slurm.checkpoint.store.pruning import apply_prune, carry_out, look
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.save.ranks.collective import RanksFailed
from verl_slurm.save.ranks.saver import SavedCheckpoint

EXHAUSTIVE = bool(os.environ.get("VERL_SLURM_FAULTS"))


@contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory in memory, where there is such a thing: thousands of states are made in it."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="verl-slurm-faults-", dir=base) as name:
        yield Path(name)


@dataclass(frozen=True)
class Scenario:
    """`prepare`, which is durable when `act` begins; crashes are in `act`.

    Attributes:
        two_media: saves go to the node's disk, too.
        promised: names that count as promised from the beginning.
        removable: names that `act` may remove.
    """

    act: Callable[[World], object]
    prepare: Callable[[World], object] = lambda world: None
    two_media: bool = False
    promised: frozenset[str] = frozenset()
    removable: frozenset[str] = frozenset()


def _name(*steps: int) -> frozenset[str]:
    return frozenset(f"step_{step:06d}" for step in steps)


def _rot(directory: Path) -> None:
    path = directory / "optimizer/rank_0000.bin"
    path.write_bytes(b"rotten" + path.read_bytes()[6:])


def _saved(*steps: int) -> Callable[[World], None]:
    def save(world: World) -> None:
        for step in steps:
            world.save(step)

    return save


def _saved_and_rotten(world: World) -> None:
    _saved(1, 2)(world)
    _rot(world.paths.checkpoints / "step_000002")


def _save_and_prune(world: World) -> None:
    """As trainer.saving does it."""
    done = world.save(4)
    plan = plan_prune(list_checkpoints(world.paths), 1, verified={"step_000003", done.name}, num_verified=2)
    assert apply_prune(world.paths, plan) == ["step_000001", "step_000002"]


def _prune_by_hand(world: World) -> None:
    found = look(world.paths, 1, quarantine_too=True)
    assert carry_out(world.paths, found)[:2] == ["step_000001", "step_000002"]


def _prepare_prune_by_hand(world: World) -> None:
    _saved(1, 2, 3, 4)(world)
    _rot(world.paths.checkpoints / "step_000004")
    recover(world.root)  # sets it aside


def _local_only(*steps: int) -> Callable[[World], None]:
    def save(world: World) -> None:
        for step in steps:
            assert not world.save(step, seconds_left=0.0).on_shared

    return save


def _local_first(step: int, error: OSError | None = None) -> Callable[[World], None]:
    """The nodes' copy is promised while shared storage is still being written; then that fails, or is done, too."""

    def save(world: World) -> None:
        kept = threading.Event()

        def promise(done: SavedCheckpoint) -> None:
            if world.tracer is not None:
                world.tracer.ack(done.name)
            kept.set()

        with gate(world.paths.root) as shared:
            saving = world.begin(step, on_kept=promise)
            assert shared.reached.wait(60)
            assert kept.wait(60)
            shared.open(error)
            done = saving.result()
        assert done.on_shared == (error is None)
        if world.tracer is not None:
            world.tracer.ack(done.name)
        world.remember()

    return save


def _then(*acts: Callable[[World], object]) -> Callable[[World], None]:
    def all_of_them(world: World) -> None:
        for act in acts:
            act(world)

    return all_of_them


def _bring_home(world: World) -> None:
    for part in list_parts(world.local):
        if not (world.paths.checkpoints / part.name).exists():
            send_home(part, world.paths)
    assert [good for _, good, _ in assemble(world.paths)] == [True]


def _both_damaged(world: World) -> None:
    """step_000002 on both media; on each another file is damaged."""
    _saved(1, 2)(world)
    _rot(world.paths.checkpoints / "step_000002")
    part = world.local / "step_000002" / "actor/rank_0000.bin"
    part.write_bytes(part.read_bytes()[:-7])


def _fill(world: World) -> None:
    assert recover(world.root).name == "step_000002"
    assert os.listdir(world.paths.quarantine)


def _resume(world: World) -> None:
    assert recover(world.root).name == "step_000001"
    assert os.listdir(world.paths.quarantine)


def _saved_by_two_ranks(world: World) -> None:
    """step_000002 by another number of ranks: of that name, and not the same state."""
    _saved(1, 2)(world)
    final = world.paths.checkpoint(2)
    data = (final / "runtime_state.rank_0000.msgpack.zst").read_bytes()
    (final / "runtime_state.rank_0001.msgpack.zst").write_bytes(data)
    (final / "runtime_state.rank_0001.msgpack.zst").chmod(0o600)
    manifest = read_manifest(final)
    files = (*manifest.files, entry_of("runtime_state.rank_0001.msgpack.zst", data))
    by_two = msgspec.structs.replace(manifest, world_size=2, topology=Topology(dp=2), files=files)
    (final / MANIFEST).write_bytes(render(sealed(by_two)))
    world.truth["step_000002"] = []
    world.remember()
    assert world.truth["step_000002"]


def _die_before_the_fsync_and_save_again(world: World) -> None:
    """The rename was done and is not durable; the second save finds the name taken by what verifies."""

    def refuse(_: Path) -> None:
        raise OSError(errno.EIO, "died here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "fsync_path", refuse)
        with pytest.raises(RanksFailed):
            world.save(2)
    world.remember()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            commit, "_point_latest", lambda staging: None
        )  # the hint may fail, and fsyncs otherwise
        world.save(2)


def _die_with_the_nodes_first(world: World) -> None:
    """A kill that strikes now leaves the nodes' copy and a half-written staging directory on shared storage."""
    kept = threading.Event()
    with gate(world.paths.root) as shared:
        saving = world.begin(2, on_kept=lambda _: kept.set())
        assert shared.reached.wait(60)
        assert kept.wait(60)
        (half,) = world.paths.checkpoints.glob(".*.tmp")
        left = tree_of(half)
        shared.open(OSError(errno.EIO, "killed"))
        saving.result()
    plant(dict(sorted(left.items())), half)
    world.remember()


def _start_anew(world: World) -> None:
    assert recover(world.root).name == "step_000002"


SCENARIOS = {
    "the first save": Scenario(_saved(1)),
    "a save": Scenario(_saved(2), _saved(1), promised=_name(1)),
    "the same step again": Scenario(_saved(2), _saved(1, 2), promised=_name(1, 2)),
    "the name is taken by a rotten one": Scenario(_saved(2), _saved_and_rotten, promised=_name(1)),
    "the same step again, after a death before the fsync": Scenario(
        _die_before_the_fsync_and_save_again, _saved(1), promised=_name(1)
    ),
    "the name is taken by one of two ranks": Scenario(_saved(2), _saved_by_two_ranks, promised=_name(1, 2)),
    "save and prune": Scenario(
        _save_and_prune, _saved(1, 2, 3), promised=_name(1, 2, 3), removable=_name(1, 2)
    ),
    "prune by hand": Scenario(
        _prune_by_hand, _prepare_prune_by_hand, promised=_name(1, 2, 3), removable=_name(1, 2)
    ),
    "the first dual write": Scenario(_saved(1), two_media=True),
    "a dual write": Scenario(_saved(3), _saved(1, 2), two_media=True, promised=_name(1, 2)),
    "local only": Scenario(_local_only(2, 3), _saved(1), two_media=True, promised=_name(1)),
    "the nodes first, shared storage late": Scenario(
        _local_first(3), _saved(1, 2), two_media=True, promised=_name(1, 2)
    ),
    "the nodes first, shared storage never": Scenario(
        _local_first(3, OSError(errno.EIO, "Input/output error")),
        _saved(1, 2),
        two_media=True,
        promised=_name(1, 2),
    ),
    "the same step again, the nodes first": Scenario(
        _local_first(2),
        _then(_saved(1), _local_only(2)),
        two_media=True,
        promised=_name(1, 2),
    ),
    "a start after the nodes were first": Scenario(
        _start_anew, _then(_saved(1), _die_with_the_nodes_first), two_media=True, promised=_name(1, 2)
    ),
    "the same step again, local only": Scenario(
        _local_only(2), _then(_saved(1), _local_only(2)), two_media=True, promised=_name(1, 2)
    ),
    "bring home": Scenario(
        _bring_home, _then(_saved(1), _local_only(2)), two_media=True, promised=_name(1, 2)
    ),
    "one of two damaged copies": Scenario(_fill, _both_damaged, two_media=True, promised=_name(1, 2)),
    "a start sets a rotten one aside": Scenario(_resume, _saved_and_rotten, promised=_name(1)),
}
