"""What lies on the nodes' own disks comes home, and what the user has left behind does not."""

import errno
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from verl_slurm_daemon.allocation.launcher import daemon_argv
from verl_slurm_daemon.lead.nodes_copies import collect, left_behind, run_bring_home
from verl_slurm_daemon.lead.resume import find_resume_point

from tests.builders import write_config
from tests.cli.test_checkpoints import make_run, save
from tests.journals import make_event
from verl_slurm.base.errors import Fenced
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.local_copy import list_parts, local_directory
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config.load import load_resolved
from verl_slurm.config.schema import CheckpointConfig
from verl_slurm.journal.events import Event
from verl_slurm.journal.history import History


class Node:
    """A run whose node n1 holds a second copy of steps 10 and 20; shared storage has step 10 alone."""

    def __init__(self, root: Path) -> None:
        self.paths = make_run(root / "run")
        config = load_resolved(self.paths.run_yaml)
        checkpoint = CheckpointConfig(local_dir=str(root / "nvme"))
        write_config(self.paths, msgspec.structs.replace(config, checkpoint=checkpoint))
        self.attempt = take_attempt(self.paths, job_id="1", restart=0).attempt
        directory = local_directory(str(root / "nvme"), self.paths, "n1")
        assert directory is not None
        self.directory = directory
        for step in (10, 20):
            shutil.copytree(save(self.paths, step), directory / f"step_{step:06d}")
        shutil.rmtree(self.paths.checkpoint(20))

    def bring_home(self, after: str = "") -> list[str]:
        run_bring_home(self.paths.root, self.attempt, after)
        return list(collect(self.paths, self.attempt))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    return Node(tmp_path)


def test_what_shared_storage_lacks_comes_home_and_is_resumed_from(node: Node) -> None:
    (line,) = node.bring_home("step_000010")
    assert line.startswith("step_000020: brought home")
    assert verify(node.paths.checkpoint(20)).ok
    assert find_resume_point(node.paths, "auto", node.attempt).name == "step_000020"
    assert node.bring_home("step_000010") == []


def test_another_node_has_nothing_to_send(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    assert node.bring_home() == []


def test_what_is_older_than_the_checkpoint_to_resume_from_stays_where_it_is(node: Node) -> None:
    shutil.rmtree(node.paths.checkpoint(10))
    assert len(node.bring_home("step_000010")) == 1
    assert not node.paths.checkpoint(10).exists()


def test_parts_from_before_the_user_went_back_do_not_return(node: Node) -> None:
    """He named step 10: step 20 lies on the nodes' disks still, and is not what the run goes on from."""
    node.paths.resume_once.write_bytes(b"")
    attempt = take_attempt(node.paths, job_id="2", restart=0).attempt
    find_resume_point(node.paths, "step_000010", attempt)
    node.attempt = attempt
    assert node.bring_home("step_000010") == []


def test_a_part_without_the_others_is_named_and_makes_nothing(node: Node) -> None:
    shutil.rmtree(node.directory / "step_000020" / "critic")
    (line,) = node.bring_home()
    assert "do not hold it whole" in line
    assert "critic" in line
    assert not node.paths.checkpoint(20).exists()


def test_a_fenced_attempt_sends_nothing(node: Node) -> None:
    take_attempt(node.paths, job_id="2", restart=0)
    with pytest.raises(Fenced):
        node.bring_home()
    assert not [path for path in node.paths.checkpoints.iterdir() if path.name.endswith(".tmp")]


def test_the_command_of_a_node_is_one_that_the_daemon_knows(node: Node) -> None:
    from verl_slurm_daemon.__main__ import _parser

    argv = daemon_argv("python", "bring-home", RunPaths("/run"), 7, "--after", "step_000010")
    parsed = _parser().parse_args(argv[4:])
    assert (parsed.command, parsed.attempt, parsed.after) == ("bring-home", 7, "step_000010")


def test_what_lies_on_nodes_that_are_not_here_is_named_until_a_newer_save_is_on_shared_storage() -> None:
    def told(kind: str, attempt: int, **fields: object) -> Event:
        return make_event(kind, attempt=attempt, time="2026-11-01T08:00:00+00:00", **fields)

    started, later = told("started", 1, nodes="n[1-2]"), told("started", 2, nodes="n3")
    alone = told("saved", 1, name="step_000020", on_shared=False)
    assert History([started, alone, later]).on_nodes_alone(["step_000010"]) == {"step_000020": "n[1-2]"}
    assert left_behind("step_000020", "n3").startswith("step_000020 is on the disks of n3 alone")
    assert History([started, alone]).on_nodes_alone(["step_000020"]) == {}
    newer = told("saved", 1, name="step_000030", on_shared=True)
    assert History([started, alone, newer]).on_nodes_alone(["step_000030"]) == {}
    assert History([started, alone]).on_nodes_alone([], since=2) == {}, (
        "its user went back to an older checkpoint"
    )


def test_a_disk_that_does_not_answer_is_not_taken_for_one_without_parts(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, **_: object) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(os, "lstat", fails)
    monkeypatch.setattr(os, "listdir", fails)
    with pytest.raises(OSError, match="Input/output error"):
        list_parts(node.directory)
