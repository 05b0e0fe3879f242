"""Both copies of the newest checkpoint are damaged, each in another file: a start takes the good files of both."""

import json
import shutil
from pathlib import Path

import pytest

from tests.daemon.test_second_copy import (
    Node,
    node as node,  # a fixture
)
from tests.journals import read_events
from tests.local_runs import finish, lead, prepared
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.checkpoint.format.specification import MANIFEST

pytestmark = pytest.mark.scenario("FLT-H03")


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.long
@pytest.mark.torch
def test_a_run_goes_on_from_what_two_damaged_copies_have_together(short_dir: Path) -> None:
    local = short_dir / "nvme"
    local.mkdir(mode=0o700)
    run = prepared(short_dir / "run", f"checkpoint.local_dir={local}", "checkpoint.every_steps=1")
    first = lead(run)
    assert finish(first) == ExitCode.OK
    newest = "step_000002"
    before = {p.name: p.read_bytes() for p in (run.checkpoints / newest).rglob("*.bin")}
    flip(run.checkpoints / newest / "actor/rank_0000.bin")
    (critic,) = local.glob(f"*/*/{newest}/critic/rank_0000.bin")
    cut(critic)
    again = lead(run)
    assert finish(again) == ExitCode.OK
    # All steps are done, so the checkpoint is verified and no rank is started.
    resumed = [event["name"] for event in read_events(run) if event["event"] == "done"]
    assert resumed == [newest], [e for e in read_events(run) if e["event"] in ("resume", "second_copy")]
    assert before == {p.name: p.read_bytes() for p in (run.checkpoints / newest).rglob("*.bin")}
    (aside,) = [path for path in run.quarantine.iterdir() if path.is_dir()]
    assert aside.name.startswith(newest)
    told = [event["reason"] for event in read_events(run) if event["event"] == "second_copy"]
    assert "1 files are from the copy in quarantine" in told[-1]


def damaged_twice(node: Node) -> Path:
    """Step 20 as the node has it, damaged; and in quarantine with another damage. Gives that one."""
    aside = node.paths.quarantine / "step_000020.0123abcd"
    shutil.copytree(node.directory / "step_000020", aside)
    flip(aside / "critic/__0_0.distcp")
    cut(node.directory / "step_000020" / "actor/__0_0.distcp")
    return aside


def test_a_copy_with_another_manifest_gives_nothing(node: Node) -> None:
    aside = damaged_twice(node)
    text = (aside / MANIFEST).read_text()
    (aside / MANIFEST).write_text(text.replace("\n", "\n\n", 1))
    assert json.loads((aside / MANIFEST).read_text()) == json.loads(text)
    (line,) = node.bring_home()
    assert "do not hold it whole" in line
    assert not node.paths.checkpoint(20).exists()


def test_the_same_file_damaged_in_both_copies_makes_no_checkpoint(node: Node) -> None:
    aside = damaged_twice(node)
    flip(aside / "actor/__0_0.distcp")
    (line,) = node.bring_home()
    assert "do not hold it whole: step_000020: actor/__0_0.distcp" in line
    assert not node.paths.checkpoint(20).exists()
    assert not list(node.paths.checkpoints.glob(".*.tmp"))


def test_a_link_in_a_copy_is_not_followed(node: Node, tmp_path: Path) -> None:
    aside = damaged_twice(node)
    good = aside / "actor/__0_0.distcp"
    shutil.move(good, tmp_path / "good")
    good.symlink_to(tmp_path / "good")
    (line,) = node.bring_home()
    assert "do not hold it whole" in line
