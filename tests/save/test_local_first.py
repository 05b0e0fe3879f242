"""A dual save in which the nodes' disks are done first: what is there, from when on, and what it is good for."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.gates import gate
from tests.faults.world import SHARED, World, recover
from tests.processes import python_path
from tests.save.nodes import Nodes
from tests.save.parts import Parts, load_tensors
from verl_slurm.base.errors import Fenced
from verl_slurm.checkpoint.store.local_copy import assemble, list_parts, part_problems, send_home
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.save.ranks import saver, second_copy
from verl_slurm.save.ranks.collective import Collective, RanksFailed
from verl_slurm.save.ranks.pending_save import PendingSave
from verl_slurm.save.ranks.saver import SavedCheckpoint
from verl_slurm.save.ranks.second_copy import NodeCopies

pytestmark = pytest.mark.torch

NAME = "step_000002"


class Told:
    """Remembers what is said of the nodes' copy; `said` is set then."""

    def __init__(self) -> None:
        self.words: list[SavedCheckpoint] = []
        self.said = threading.Event()

    def __call__(self, done: SavedCheckpoint) -> None:
        self.words.append(done)
        self.said.set()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    tmp_path.chmod(0o700)
    with World.at(tmp_path / "w", two_media=True) as found:
        yield found


def test_the_nodes_copy_is_committed_while_shared_storage_still_writes_and_then_both_are(
    world: World,
) -> None:
    told = Told()
    with gate(world.paths.root) as shared:
        saving = world.begin(2, on_kept=told)
        assert told.said.wait(60)
        (part,) = list_parts(world.local)
        assert (part.name, part_problems(part)) == (NAME, [])
        assert not (world.paths.checkpoints / NAME).exists()
        assert not saving.done()
        shared.open()
        done = saving.result(60)
    assert (done.on_shared, done.problem) == (True, "")
    assert verify(world.paths.checkpoints / NAME).ok
    manifests = [
        (place / NAME / "manifest.json").read_bytes() for place in (world.paths.checkpoints, world.local)
    ]
    assert manifests[0] == manifests[1]
    assert [word.on_shared for word in told.words] == [False]
    assert os.listdir(world.local) == [NAME]
    assert not list(world.paths.checkpoints.glob(".*.tmp"))


def test_where_shared_storage_is_first_nothing_is_said_of_one_copy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, begun, has_begun = Told(), list[PendingSave](), threading.Event()
    begin = NodeCopies.begin

    def remembered(self: NodeCopies, save: PendingSave, *more: Any) -> Any:
        begun.append(save)
        has_begun.set()
        return begin(self, save, *more)

    monkeypatch.setattr(NodeCopies, "begin", remembered)
    with gate(world.local) as local:
        saving = world.begin(2, on_kept=told)
        assert local.reached.wait(60)
        assert has_begun.wait(60)  # the saver may write before that
        assert begun[0].on_shared.wait(60)
        assert verify(world.paths.checkpoints / NAME).ok
        local.open()
        assert saving.result(60).problem == ""
    assert told.words == []
    assert len(list_parts(world.local)) == 1


def test_a_periodic_save_is_not_read_back_on_the_nodes_unless_shared_storage_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(second_copy.local_copy, "part_problems", lambda part: read.append(part.name) or [])
    assert world.save(1).problem == ""
    assert read == []
    with gate(world.paths.root) as shared:
        saving = world.begin(2)
        assert shared.reached.wait(60)
        shared.open(OSError(errno.EIO, "Input/output error"))
        done = saving.result(60)
    assert (done.on_shared, "Input/output error" in done.problem) == (False, True)
    assert read == [NAME]
    assert not list(world.paths.checkpoints.glob(".*.tmp"))


def test_a_dead_saver_does_not_take_what_the_nodes_have_along(world: World) -> None:
    told = Told()
    with gate(world.paths.root) as shared:
        saving = world.begin(2, on_kept=told)
        assert told.said.wait(60)
        shared.open(RuntimeError("the saver process is gone"))
        done = saving.result(60)
    assert (done.on_shared, "is gone" in done.problem) == (False, True)
    assert recover(world.root).name == NAME


def test_a_run_that_is_another_s_commits_nothing_on_the_nodes_either(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fenced() -> None:
        raise Fenced("attempt 2 owns the run")

    monkeypatch.setattr(world.saver, "_attempt_check", fenced)
    for left in (None, 0.0):  # with shared storage, and without
        world.saver._last_seconds = 1.0
        with pytest.raises(RanksFailed) as caught:
            world.begin(2, seconds_left=left).result(60)
        assert caught.value.kinds == {"Fenced"}
        assert list_parts(world.local) == []
        assert list(world.paths.checkpoints.glob("*")) == []


def test_a_shared_storage_that_does_not_say_who_owns_the_run_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_PATIENCE_S", 0.01)
    asked, let_go, told = threading.Event(), threading.Event(), Told()

    def hang() -> None:
        asked.set()
        assert let_go.wait(60)

    monkeypatch.setattr(world.saver, "_attempt_check", hang)
    saving = world.begin(2, on_kept=told)
    assert told.said.wait(60)
    assert asked.is_set()
    assert [part.name for part in list_parts(world.local)] == [NAME]
    let_go.set()
    assert saving.result(60).problem == ""


KILLED = """
import os, sys
from pathlib import Path
from tests.faults.gates import gate
from tests.faults.world import World
with World.at(Path(sys.argv[1]), two_media=True) as world:
    world.save(1)
    with gate(world.paths.root) as shared:
        world.begin(2, on_kept=lambda done: print(done.name, world.parts.digest(), flush=True))
        sys.stdin.read()
"""


@pytest.mark.scenario("P09")
def test_after_kill_9_while_shared_storage_hangs_the_run_goes_on_from_the_nodes_copy(tmp_path: Path) -> None:
    root = tmp_path / "w"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(root)],
        env=os.environ | python_path(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as rank:
        assert rank.stdout is not None
        name, digest = rank.stdout.readline().split()
        rank.send_signal(signal.SIGKILL)
    assert name == NAME
    (half,) = (root / SHARED / "checkpoints").glob(".*.tmp")  # begun, and never to be finished
    assert (half / "actor").is_dir()
    choice = recover(root)
    assert choice.name == NAME
    assert choice.path is not None
    found = Parts(seed=9)
    load_tensors(choice.path, found.tensors(), Collective(None))
    assert found.digest() == digest
    assert not list((root / SHARED / "checkpoints").glob(".*.tmp"))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    tmp_path.chmod(0o700)
    found = Nodes(tmp_path)
    yield found
    found.close()


def _bring_home(nodes: Nodes, *disks: Path) -> list[bool]:
    for disk in disks:
        for part in list_parts(disk):
            if not (nodes.paths.checkpoints / part.name).exists():
                send_home(part, nodes.paths)
    return [good for _, good, _ in assemble(nodes.paths)]


def test_all_nodes_have_their_parts_before_anything_is_said_and_only_all_of_them_make_a_checkpoint(
    nodes: Nodes,
) -> None:
    told = [Told(), Told()]
    with gate(nodes.paths.root) as shared:
        saving = nodes.begin(2, lambda rank, done: told[rank](done))
        assert all(word.said.wait(60) for word in told)
        assert [len(list_parts(disk)) for disk in nodes.disks] == [1, 1]
        assert _bring_home(nodes, nodes.disks[0]) == [False]
        assert not (nodes.paths.checkpoints / NAME).exists()
        assert _bring_home(nodes, *nodes.disks) == [True]
        assert verify(nodes.paths.checkpoints / NAME).ok
        # Brought home meanwhile: what was written there before is as good, and is kept.
        shared.open()
        assert [one.result(60).problem for one in saving] == ["", ""]
    assert verify(nodes.paths.checkpoints / NAME).ok


def test_a_node_without_its_part_keeps_all_nodes_from_committing_theirs(nodes: Nodes) -> None:
    shutil.rmtree(nodes.disks[1].parent, ignore_errors=True)
    nodes.disks[1].parent.write_bytes(b"")
    told = [Told(), Told()]
    done = [one.result(60) for one in nodes.begin(2, lambda rank, done: told[rank](done))]
    assert [(one.on_shared, "rank 1: " in one.problem) for one in done] == [(True, True)] * 2
    assert list_parts(nodes.disks[0]) == []
    assert [word.words for word in told] == [[], []]
    assert verify(nodes.paths.checkpoints / NAME).ok
