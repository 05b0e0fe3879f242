"""What the daemon takes from the training: step times of the quick start with it and without it, in one run.

    python benchmarks/daemon_overhead.py [--rounds 4] [--steps 10] [--frozen-steps 40] [--json]

Two measurements, since other work on the machine moves step times by more than the daemon does:

* apart: in turn, the quick start under `verl-slurm submit --cluster local` (lead, agent, launcher, control channel) and
  the same two ranks by `torchrun` alone, `--rounds` times each; the first two steps of each are left out. Given is the
  ratio of the medians, with, of all pairs of neighbours, the smallest and the largest.
* paired: two runs. In one, lead and agent stand still in the even steps, in the other one in the odd steps, so that
  each step, which computes the same in both, was measured with them and without them. Given is what it costs more with
  them: the median over the steps, and the 95 % interval of that median. They are frozen by a control group (needs root,
  and cgroup v1's freezer or cgroup v2), unnoticed: SIGCONT
  would be a warning of Slurm's to them, and the answer to it a save.

Both runs give the same weights: the same seeds, the same ranks.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import psutil

from tests.lines import follow_lines
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.steps import last_steps

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
    attempt = take_attempt(RunPaths(run), job_id="benchmark", restart=0).attempt
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--no-python",
    ]
    ranks = [
        "--",
        sys.executable,
        "-u",
        "-m",
        "verl_slurm.trainer",
        "--run",
        str(run),
        "--attempt",
        str(attempt),
    ]
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


class Freezer:
    """A control group whose processes stand still between `freeze` and `thaw`, without a signal.

    Raises:
        OSError: it cannot be made here.
    """

    def __init__(self) -> None:
        old = Path("/sys/fs/cgroup/freezer")
        root = next(
            place for place in (old, Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")) if place.is_dir()
        )
        self._switch, self._words = (
            ("freezer.state", ("FROZEN", "THAWED")) if root == old else ("cgroup.freeze", ("1", "0"))
        )
        self._root, self._group = root, root / f"verl-slurm-overhead-{os.getpid()}"
        self._group.mkdir()

    def take(self, pids: Iterable[int]) -> None:
        for pid in pids:
            (self._group / "cgroup.procs").write_text(str(pid))

    def freeze(self) -> None:
        (self._group / self._switch).write_text(self._words[0])

    def thaw(self) -> None:
        (self._group / self._switch).write_text(self._words[1])

    def close(self) -> None:
        self.thaw()
        for pid in (self._group / "cgroup.procs").read_text().split():
            (self._root / "cgroup.procs").write_text(pid)
        self._group.rmdir()


def half_frozen(run: Path, steps: int, parity: int) -> list[float]:
    """Step times of one run whose daemons stand still in the steps of that parity, from the third on."""
    command = _cli("submit", *_words(run, steps), "--cluster", "local", "--wait")
    run.mkdir(mode=0o700)  # so that there is something to watch
    freezer = Freezer()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            # The row of step k is written at its end: what is frozen behind it stands still in step k + 1.
            for done, line in enumerate(
                follow_lines(RunPaths(run).steps, 0, silence_s=lambda: 120.0), start=1
            ):
                if line is None or done >= steps - 2:
                    break
                if done == 1:
                    freezer.take(_daemons(run))
                (freezer.freeze if (done + 1) % 2 == parity else freezer.thaw)()
        finally:
            freezer.close()
        process.wait()
    return [float(row["step_s"]) for row in last_steps(RunPaths(run), steps)]


def paired(place: Path, steps: int) -> tuple[list[float], list[float]]:
    """(frozen, awake): step times of the same steps."""
    even, odd = (half_frozen(place / f"{parity}", steps, parity) for parity in (0, 1))
    frozen, awake = [], []
    for index in range(2, steps - 3):  # of step index + 1
        pair = (even[index], odd[index])
        asleep, up = pair if (index + 1) % 2 == 0 else pair[::-1]
        frozen.append(asleep)
        awake.append(up)
    return frozen, awake


def _daemons(run: Path) -> list[int]:
    argvs = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    found = [pid for pid, argv in argvs.items() if "verl_slurm_daemon" in argv and str(run) in argv]
    assert len(found) >= 2, "neither lead nor agent is there to be frozen"
    return found


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The distribution-free 95 % interval of a median: order statistics (Conover 1999, section 3.2)."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = int(len(values) / 2 - half), int(len(values) / 2 + half)
    return ordered[max(low, 0)], ordered[min(high, len(values) - 1)]


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
        asleep, awake = paired(Path(name) / "paired", frozen_steps)
    there = [statistics.median(a) / statistics.median(b) for a, b in zip(under, bare, strict=True)]
    every_bare, every_under = ([s for one in all_ for s in one] for all_ in (bare, under))
    differences = [b / a - 1 for a, b in zip(asleep, awake, strict=True)]
    low, high = median_interval(differences)
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
            "percent_95": [round(100 * low, 2), round(100 * high, 2)],
            "pairs": len(differences),
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, metavar="N")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="of each run; at least 4")
    parser.add_argument("--frozen-steps", type=int, default=40, metavar="N", help="of each paired run")
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
