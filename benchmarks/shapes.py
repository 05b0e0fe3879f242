"""How far apart are two shapes of one run? Short runs of the quick start, and a table of their differences.

    python benchmarks/shapes.py [--steps N] [--json] [DP,TP,PP ...]

Each shape (2,1,1 4,1,1 1,2,1 1,1,2 2,2,1 2,1,2, if none is named) does N steps (3) from nothing as a user would start
it, `verl-slurm submit configs/quickstart.yaml --cluster local --wait`, with a quarter of the quick start's batch: 256
responses a step over all ranks, in 8 mini-batches. It is held against 1,1,1: the largest difference of any weight, and
how many tokens of the steps after the first are others. No time is measured.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state.ledger import load
from verl_slurm.save.ranks.loader import read_whole

Shape = tuple[int, int, int]

ALONE: Shape = (1, 1, 1)
SHAPES: list[Shape] = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)]
RESPONSES, MINI_BATCHES = 256, 8


def overrides(shape: Shape, steps: int) -> list[str]:
    """The same step in every shape."""
    dp, tp, pp = shape
    mini_batch = RESPONSES // MINI_BATCHES // dp
    return [
        f"train.steps={steps}",
        f"train.batch_size_per_device={RESPONSES // dp}",
        f"train.mini_batch_size_per_device={mini_batch}",
        # A pipeline wants as many in a mini-batch as it has stages.
        f"train.micro_batch_size_per_device={mini_batch // pp}",
        f"distributed.dp_size={dp}",
        f"distributed.tp_size={tp}",
        f"distributed.pp_size={pp}",
        "distributed.nodes=1",
        # The journal reaches back to the oldest checkpoint that is kept: to the end of the first step.
        "checkpoint.every_steps=1",
        f"checkpoint.keep_last={steps}",
    ]


def run_once(shape: Shape, steps: int, run: Path) -> None:
    """From nothing to the last step.

    Raises:
        SystemExit: it did not end well.
    """
    command = [sys.executable, "-m", "verl_slurm.cli"]
    words = [str(ROOT / "configs/quickstart.yaml"), f"run_dir={run}", *overrides(shape, steps)]
    try:
        code = subprocess.run(
            [*command, "submit", *words, "--cluster", "local", "--wait"], stdout=sys.stderr, check=False
        ).returncode
    except BaseException:
        # It would go on without us.
        subprocess.run([*command, "cancel", str(run)], stdout=sys.stderr, check=False)
        raise
    if code:
        raise SystemExit(f"{shape} ended with {code}")


def tokens(run: Path) -> dict[int, list[int]]:
    """Sample id → its response, of every step but the first."""
    batches = load(RunPaths(run), from_step=1).values()
    return {
        sample: response
        for batch in batches
        for sample, response in zip(batch["sample_id"].tolist(), batch["response_ids"].tolist(), strict=True)
    }


def difference(one: Path, other: Path, steps: int) -> dict[str, Any]:
    """The largest of each domain after the last step, and tokens that are not the same."""
    row: dict[str, Any] = {}
    for domain in ("actor", "critic", "optimizer"):
        mine, theirs = (read_whole(RunPaths(run).checkpoint(steps), domain) for run in (one, other))
        row[domain] = max(float((mine[name] - theirs[name]).abs().max()) for name in mine)
    mine_by_id, theirs_by_id = tokens(one), tokens(other)
    assert mine_by_id.keys() == theirs_by_id.keys(), "other prompts"
    row["tokens"] = sum(len(response) for response in mine_by_id.values())
    row["other_tokens"] = sum(
        a != b
        for sample, response in mine_by_id.items()
        for a, b in zip(response, theirs_by_id[sample], strict=True)
    )
    return row


def measure(shapes: Sequence[Shape], steps: int) -> list[dict[str, Any]]:
    """One row a shape."""
    with tempfile.TemporaryDirectory(prefix="vs-shapes-") as name:
        alone = Path(name) / "alone"
        run_once(ALONE, steps, alone)
        rows = []
        for shape in shapes:
            run = Path(name) / "-".join(map(str, shape))
            run_once(shape, steps, run)
            rows.append({"shape": list(shape)} | difference(run, alone, steps))
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("shapes", nargs="*", metavar="DP,TP,PP")
    given = parser.parse_args()
    shapes: list[Shape] = []
    for text in given.shapes:
        dp, tp, pp = (int(part) for part in text.split(","))
        shapes.append((dp, tp, pp))
    rows = measure(shapes or SHAPES, given.steps)
    if given.json:
        print(json.dumps(rows))
        return
    print(f"| dp, tp, pp | actor | critic | AdamW | other tokens, of {rows[0]['tokens']} |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        numbers = " | ".join(f"{row[domain]:.1e}" for domain in ("actor", "critic", "optimizer"))
        print(f"| {', '.join(map(str, row['shape']))} | {numbers} | {row['other_tokens']} |")


if __name__ == "__main__":
    main()
