"""The benchmark's small form: the files of dozens of ranks, through each part of the work."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import many_ranks, rank_files
from verl_slurm.checkpoint.store import chunks

pytestmark = pytest.mark.torch

IN_THIS_PROCESS = (
    "lay out",
    "collect, rank 0",
    "collect, another rank",
    "commit",
    "verify",
    "list",
    "messages",
    "prune",
)
"""The others want a process group of their own."""


def figures(root: Path, ranks: int) -> dict[str, dict[str, Any]]:
    root.mkdir()
    with rank_files.without_fsync():
        found: dict[str, dict[str, Any]] = {"files": rank_files.write_files(root, ranks, layers=1)}
    for part in IN_THIS_PROCESS:
        found[part] = many_ranks.measured(many_ranks._PARTS[part](root, ranks, 1))
    return found


def test_what_a_rank_reads_does_not_grow_with_the_ranks_but_for_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = chunks.open_below
    monkeypatch.setattr(chunks, "open_below", lambda root, path: opened.append(path) or real(root, path))  # type: ignore[func-returns-value]
    few = figures(tmp_path / "few", 24)
    opened.clear()
    many = figures(tmp_path / "many", 96)
    # Three files of tensors and a runtime state a rank, and eight for all.
    assert (few["files"]["files"], many["files"]["files"]) == (4 * 24 + 8, 4 * 96 + 8)
    assert many["files"]["index_bytes"] < 1.5 * few["files"]["index_bytes"]
    # The manifest, and what the ranks say of their files, in proportion.
    for part, key in (("commit", "manifest_bytes"), ("files", "said_bytes"), ("files", "layout_words_bytes")):
        assert many[part][key] < 4.2 * few[part][key], key
    assert many["messages"]["longest_message_bytes"] < 64
    assert len(opened) == len(set(opened)) == many["files"]["files"], "verification opens each file once"
    assert not list((tmp_path / "many" / "run" / "checkpoints").glob("*step*")), "pruned"
