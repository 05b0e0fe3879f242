"""Stands for the process that divides a checkpoint of verl by torch, whose import takes seconds.

The files of the new ranks are rank 0's of any bytes, under the right names; nothing is compared. Where the plan, the
files and the numbers are right is shown with torch itself, in tests/verl/test_reshard.py.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_slurm.verl.reshard.dividing import Command


def fake_divider(module: Sequence[str], places: Sequence[Path]) -> Command:
    """The Python of the ranks."""
    return Command([sys.executable, "-P", __file__, *module[1:]], dict(os.environ), "a fake")


def shard_step(directory: Path, step: int, ranks: int) -> Path:
    """`directory/global_step_N` with the names of FSDP's files, without numbers in them."""
    path = directory / f"global_step_{step}"
    (path / "actor").mkdir(parents=True)
    (path / "actor" / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    (path / "data.pt").write_bytes(b"data")
    for kind in ("model", "optim", "extra_state"):
        for rank in range(ranks):
            (path / "actor" / f"{kind}_world_size_{ranks}_rank_{rank}.pt").write_bytes(kind.encode())
    return path


def _main(words: list[str]) -> None:
    step, after = Path(words[0]), int(words[1])
    first = next((step / "actor").glob("model_world_size_*_rank_0.pt"))
    before = int(first.name.split("_")[3])
    role = {"role": "actor", "engine": 2, "num_tensors": 1, "num_divided": 1, "num_bytes": 8}
    plan = {"before": before, "after": after, "roles": [role], "num_data": None}
    print(json.dumps({"type": "plan", **plan, "written_bytes": 8, "largest_bytes": 8}), flush=True)
    target = Path(sys.stdin.read())
    if not target.name:
        return
    shutil.copytree(step, target, ignore=shutil.ignore_patterns("*_rank_*"))
    for kind in ("model", "optim", "extra_state"):
        source = step / "actor" / f"{kind}_world_size_{before}_rank_0.pt"
        for rank in range(after):
            shutil.copy(source, target / "actor" / f"{kind}_world_size_{after}_rank_{rank}.pt")
    print(json.dumps({"type": "worked", "num_bytes": 24}))
    print(json.dumps({"type": "divided", "tensors": "ab" * 32}))


if __name__ == "__main__":
    _main(sys.argv[1:])
