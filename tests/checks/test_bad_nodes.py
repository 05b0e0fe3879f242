"""A user's bad nodes: remembered for their time, read by all of the user's runs, and hostile files passed over."""

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from verl_slurm.checks.bad_nodes import BadNode, folder, recall, remember


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def note(node: str, hours: float = 1.0) -> None:
    remember("c", node, "GPUs: off the bus", Path("/runs/a"), hours)


def test_a_bad_node_is_remembered_for_its_time_by_cluster_and_forgotten_by_removing_its_file() -> None:
    note("n1")
    note("n2")
    assert recall("c").names == ("n2", "n1")  # the newest first
    assert recall("other").names == ()
    assert recall("c").nodes[0].run == "/runs/a"
    (folder("c") / "n1.json").unlink()
    assert recall("c").names == ("n2",)
    note("n2", hours=0.0)
    assert recall("c").names == ()
    assert os.listdir(folder("c")) == [], "its time is over"


def test_two_runs_that_find_the_same_node_leave_one_whole_file_that_others_cannot_read() -> None:
    note("n1", hours=2.0)
    note("n1", hours=1.0)
    assert os.listdir(folder("c")) == ["n1.json"]
    assert recall("c").names == ("n1",)
    assert stat.S_IMODE(folder("c").stat().st_mode) == 0o700
    assert stat.S_IMODE((folder("c") / "n1.json").stat().st_mode) == 0o600


def of(node: str, until: datetime) -> bytes:
    return msgspec.json.encode(BadNode(node=node, reason="x", since=until, until=until))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[" * 100_000,
        b'{"node": "n1"}',
        of("n2", datetime.now(UTC) + timedelta(hours=1)),  # the file of another node
        of("n1", (datetime.now(UTC) + timedelta(hours=1)).replace(tzinfo=None)),
        b" " * (2 << 20),
    ],
)
def test_a_damaged_file_is_passed_over_with_a_word(data: bytes) -> None:
    note("n3")
    path = folder("c") / "n1.json"
    path.write_bytes(data)
    path.chmod(0o600)
    found = recall("c")
    assert found.names == ("n3",)
    (problem,) = found.problems
    assert str(path) in problem


def test_a_file_of_others_a_link_and_a_pipe_are_passed_over(tmp_path: Path) -> None:
    note("n1")
    (folder("c") / "n1.json").chmod(0o644)
    (folder("c") / "n2.json").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder("c") / "n3.json")
    found = recall("c")
    assert found.names == ()
    assert len(found.problems) == 3


@pytest.mark.parametrize("name", ["", "../n1", "-n", "a b", "n\n1"])
def test_no_other_name_than_a_nodes_becomes_a_file(name: str) -> None:
    with pytest.raises(ValueError, match="no name of a node"):
        note(name)
    assert folder(name).name == "cluster"
