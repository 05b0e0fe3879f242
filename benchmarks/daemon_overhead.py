"""What the daemon takes from the training: step times of the quick start with it and without it, in one run.

    python benchmarks/daemon_overhead.py [--rounds 4] [--steps 10] [--frozen-steps 40] [--json]

Two measurements, since other work on the machine moves step times by more than the daemon does:

* apart: in turn, the quick start under `verl-slurm submit --cluster local` (lead, agent, launcher, control channel) and
  the same two ranks by `torchrun` alone, `--rounds` times each; the first two steps of each are left out. Given is the
  ratio of the medians, with, of all pairs of neighbours, the smallest and the largest.
* paired: one run, in which lead and agent stand still (SIGSTOP) in every second step and go on (SIGCONT) in the others;
  what a step costs more while they are awake, as the median over pairs of neighbouring steps.

Both runs give the same weights: the same seeds, the same ranks.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import psutil

from verl_slurm.fence import take_epoch
from verl_slurm.paths import RunPaths
from verl_slurm.step_log import last_steps
from verl_slurm.submit.follow import follow_lines

_SKIP = 2
_ONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_SHAPE = ("distributed.dp_size=2", "distributed.nodes=1")


def _words(run: Path, steps: int) -> list[str]:
    never = [f"checkpoint.every_steps={steps + 1}", f"checkpoint.runtime_every_steps={steps + 1}"]
    return [str(ROOT / "configs/quickstart.yaml"), f"run_dir={run}", f"train.steps={steps}", *_SHAPE, *never]


def _cli(*argv: str) -> list[str]:
    return [sys.executable, "-m", "verl_slurm.cli", *argv]


def _seconds(run: Path, steps: int) -> list[float]:
    return [float(row["step_s"]) for row in last_steps(RunPaths(run), steps)][_SKIP:]


def alone(run: Path, steps: int) -> list[float]:
    """Step times of two ranks under torchrun, without any daemon."""
    subprocess.run(
        _cli("submit", *_words(run, steps), "--prepare-only"), stdout=subprocess.DEVNULL, check=True
    )
    epoch = take_epoch(RunPaths(run), job_id="benchmark", restart=0).epoch
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--no-python",
    ]
    ranks = ["--", sys.executable, "-u", "-m", "verl_slurm.trainer", "--run", str(run), "--epoch", str(epoch)]
    subprocess.run(
        [*launcher, f"--log-dir={run.parent}", *ranks],
        env=os.environ | _ONE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return _seconds(run, steps)


def with_daemon(run: Path, steps: int) -> list[float]:
    """Step times of the same ranks under lead and agent."""
    command = _cli("submit", *_words(run, steps), "--cluster", "local", "--wait")
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return _seconds(run, steps)


def paired(run: Path, steps: int) -> tuple[list[float], list[float]]:
    """Step times with the daemons frozen (the odd steps) and awake (the even ones) of one run."""
    command = _cli("submit", *_words(run, steps), "--cluster", "local", "--wait")
    run.mkdir(mode=0o700)  # so that there is something to watch
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        frozen: list[psutil.Process] = []
        try:
            for seen, line in enumerate(follow_lines(RunPaths(run).steps, 0, silence_s=lambda: 120.0)):
                if line is None or seen >= steps - 2:
                    break
                frozen = _wake(frozen) if frozen else _freeze(run)
        finally:
            _wake(frozen)
        process.wait()
    rows = [float(row["step_s"]) for row in last_steps(RunPaths(run), steps)]
    # The row of step k is written at its end: what was frozen behind row k held for step k + 1.
    pairs = list(zip(rows[1::2], rows[2::2], strict=False))[1:-1]
    return [first for first, _ in pairs], [second for _, second in pairs]


def _daemons(run: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            argv = process.cmdline()
            if "verl_slurm_daemon" in argv and str(run) in argv:
                yield process


def _freeze(run: Path) -> list[psutil.Process]:
    found = list(_daemons(run))
    assert len(found) >= 2, "neither lead nor agent is there to be frozen"
    for process in found:
        process.send_signal(signal.SIGSTOP)
    return found


def _wake(processes: list[psutil.Process]) -> list[psutil.Process]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
    return []


def measure(rounds: int, steps: int, frozen_steps: int) -> dict[str, Any]:
    """Both measurements; ratios are with by without, so 1.005 is half a per cent."""
    before = os.getloadavg()[0]
    bare: list[list[float]] = []
    under: list[list[float]] = []
    with tempfile.TemporaryDirectory(prefix="vs-overhead-") as name:
        for number in range(rounds):
            (Path(name) / f"bare{number}").mkdir()
            (Path(name) / f"under{number}").mkdir()
            turns = [(alone, bare, "bare"), (with_daemon, under, "under")]
            for how, seen, place in turns if number % 2 == 0 else turns[::-1]:
                seen.append(how(Path(name) / f"{place}{number}" / "run", steps))
        (Path(name) / "paired").mkdir()
        asleep, awake = paired(Path(name) / "paired" / "run", frozen_steps)
    there = [statistics.median(a) / statistics.median(b) for a, b in zip(under, bare, strict=True)]
    every_bare, every_under = ([s for one in all_ for s in one] for all_ in (bare, under))
    differences = [b / a - 1 for a, b in zip(asleep, awake, strict=True)]
    quartiles = statistics.quantiles(differences, n=4)
    return {
        "load_before": round(before, 2),
        "apart": {
            "without_step_s": statistics.median(every_bare),
            "with_step_s": statistics.median(every_under),
            "ratio": statistics.median(every_under) / statistics.median(every_bare),
            "ratios_of_rounds": [round(ratio, 4) for ratio in there],
            "steps_each": len(every_bare),
        },
        "paired": {
            "frozen_step_s": statistics.median(asleep),
            "awake_step_s": statistics.median(awake),
            "percent": 100 * statistics.median(differences),
            "percent_quartiles": [round(100 * quartiles[0], 2), round(100 * quartiles[2], 2)],
            "pairs": len(differences),
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, metavar="N")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="of each run; at least 4")
    parser.add_argument("--frozen-steps", type=int, default=40, metavar="N", help="of the paired run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    found = measure(options.rounds, options.steps, options.frozen_steps)
    if options.json:
        print(json.dumps(found))
        return 0
    for what, figures in found.items():
        print(what, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
