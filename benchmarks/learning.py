"""Does it learn? The quick start with PPO and with GRPO, three seeds each, as a user starts them, and a picture of it.

    python benchmarks/learning.py [--to DIR] [--seed N ...] [--json] [KEY=VALUE ...]
    python benchmarks/learning.py --plot-only [--to DIR]

Each run is `verl-slurm submit CONFIG --cluster local --wait seed=N`, one after the other (about 75 s each on 2 cores).
Its rows are read from `RUN/steps.jsonl`. DIR (`docs`) gets `learning.json`, the rows, and `learning.svg`, drawn from
nothing else: `--plot-only` makes the same picture from the rows that are there. KEY=VALUE goes to every run. No time is
in the rows: who runs it again on such a machine has the same file.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.curves import picture
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import load_resolved
from verl_slurm.journal.steps import last_steps

CONFIGS = {"PPO": "configs/quickstart.yaml", "GRPO": "configs/quickstart_grpo.yaml"}
_NUMBERS = ("reward", "reward_std", "kl", "response_tokens")

Document = dict[str, Any]
"""`seeds`, `overrides`, `responses_per_step`, and `rows`: `algorithm`, `seed`, `step` and `_NUMBERS` of each step."""


def run_once(algorithm: str, seed: int, run: Path, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of one run from its first step to its last.

    Raises:
        SystemExit: it did not end well, or has not a row for each step.
    """
    command = [sys.executable, "-m", "verl_slurm.cli"]
    words = [str(ROOT / CONFIGS[algorithm]), f"run_dir={run}", f"seed={seed}", *overrides]
    try:
        code = subprocess.run(
            [*command, "submit", *words, "--cluster", "local", "--wait"], stdout=sys.stderr, check=False
        ).returncode
    except BaseException:
        subprocess.run(
            [*command, "cancel", str(run)], stdout=sys.stderr, check=False
        )  # it would go on without us
        raise
    steps = load_resolved(RunPaths(run).run_yaml).train.steps if code == 0 else 0
    rows = last_steps(RunPaths(run), steps)
    if code != 0 or [row["step"] for row in rows] != list(range(1, steps + 1)):
        raise SystemExit(f"{algorithm}, seed {seed}: ended with {code}, {len(rows)} rows for {steps} steps")
    numbers = [{name: round(row[name], 6) for name in _NUMBERS} for row in rows]
    heads = ({"algorithm": algorithm, "seed": seed, "step": step} for step in range(1, steps + 1))
    return [head | row for head, row in zip(heads, numbers, strict=True)]


def measure(seeds: Sequence[int], overrides: Sequence[str]) -> Document:
    """All runs, one after the other."""
    rows: list[dict[str, Any]] = []
    responses = set()
    with tempfile.TemporaryDirectory(prefix="vs-learning-") as name:
        for algorithm in CONFIGS:
            for seed in seeds:
                run = Path(name) / f"{algorithm.lower()}-{seed}"
                rows += run_once(algorithm, seed, run, overrides)
                config = load_resolved(RunPaths(run).run_yaml)
                responses.add(config.train.batch_size_per_device * config.distributed.dp_size)
    assert len(responses) == 1, (
        "the two configurations no longer have steps of one size: one axis for both misleads"
    )
    return {
        "seeds": list(seeds),
        "overrides": list(overrides),
        "responses_per_step": responses.pop(),
        "rows": rows,
    }


def curves(document: Document) -> dict[str, list[list[float]]]:
    """algorithm → its runs, [seeds, steps] mean rewards."""
    return {
        algorithm: [
            [
                row["reward"]
                for row in document["rows"]
                if (row["algorithm"], row["seed"]) == (algorithm, seed)
            ]
            for seed in document["seeds"]
        ]
        for algorithm in CONFIGS
    }


def draw(document: Document) -> str:
    """The picture of a document, as SVG."""
    return picture(
        curves(document),
        title="The quick start learns to add: mean reward of a step",
        x=f"training step ({document['responses_per_step']} sampled responses each)",
        y="mean reward of a response (0 to 1, no unit)",
        legend=f"thin: one seed each ({len(document['seeds'])}); bold: their mean",
    )


def written(document: Document) -> str:
    """JSON with a row a line: a difference shows which step of which run."""
    head = json.dumps({name: value for name, value in document.items() if name != "rows"})
    rows = ",\n".join(json.dumps(row) for row in document["rows"])
    return f'{head[:-1]}, "rows": [\n{rows}\n]}}\n'


def table(document: Document) -> str:
    lines = ["algorithm  runs  first step      last step       least / most at the last"]
    for algorithm, runs in curves(document).items():
        first, last = [run[0] for run in runs], [run[-1] for run in runs]
        lines.append(
            f"{algorithm:9}  {len(runs):4}  {statistics.mean(first):<14.3f}  {statistics.mean(last):<14.3f}"
            f"  {min(last):.3f} / {max(last):.3f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=ROOT / "docs", metavar="DIR", help="where both files go")
    parser.add_argument(
        "--seed", type=int, action="append", metavar="N", help="may be repeated; without: 0, 1, 2"
    )
    parser.add_argument("--plot-only", action="store_true", help="draw DIR/learning.json again")
    parser.add_argument("--json", action="store_true", help="print the rows")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for every run: train.steps=4")
    options = parser.parse_intermixed_args(argv)
    rows, image = options.to / "learning.json", options.to / "learning.svg"
    if options.plot_only:
        document = json.loads(rows.read_text())
    else:
        document = measure(options.seed or [0, 1, 2], options.overrides)
        rows.write_text(written(document))
    image.write_text(draw(document))
    print(json.dumps(document) if options.json else f"{table(document)}\n{rows}\n{image}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
