"""Both copies of the newest checkpoint are damaged, each in another file: a start takes the good files of both."""

import errno
import json
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.test_second_copy import (
    Node,
    node as node,  # a fixture
)
from verl_slurm.checkpoint.format.specification import MANIFEST
from verl_slurm.checkpoint.store import copies
from verl_slurm.checkpoint.store.verify import verify

pytestmark = pytest.mark.scenario("FLT-H03")


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def damaged_twice(node: Node) -> Path:
    """Step 20 as the node has it, damaged; and in quarantine with another damage. Gives that one."""
    aside = node.paths.quarantine / "step_000020.0123abcd"
    shutil.copytree(node.directory / "step_000020", aside)
    flip(aside / "critic/__0_0.distcp")
    cut(node.directory / "step_000020" / "actor/__0_0.distcp")
    return aside


def test_what_two_damaged_copies_have_together_comes_home(node: Node) -> None:
    damaged_twice(node)
    (line,) = node.bring_home()
    assert "1 files are from the copy in quarantine" in line
    assert verify(node.paths.checkpoint(20)).ok


def test_a_copy_that_cannot_be_read_does_not_keep_the_next_one_from_giving_its_file(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = damaged_twice(node)
    shutil.copytree(aside, aside.with_name("step_000020.00000000"))
    opened = copies.open_below

    def bad_sector(root: int, path: str, **how: Any) -> AbstractContextManager[int]:
        if os.readlink(f"/proc/self/fd/{root}").endswith(".00000000") and path.startswith("actor/"):
            raise OSError(errno.EIO, "Input/output error")
        return opened(root, path, **how)

    monkeypatch.setattr(copies, "open_below", bad_sector)
    (line,) = node.bring_home()
    assert "1 files are from the copy in quarantine" in line
    assert verify(node.paths.checkpoint(20)).ok


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
