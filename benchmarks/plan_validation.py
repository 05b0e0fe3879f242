"""How near `verl-slurm plan` comes to real runs: predicted goodput beside the measured one.

    python benchmarks/plan_validation.py [--record NAME] [--to DIR] [--json]

Each run is on an embedded cluster, two nodes of it, one rank each: the quick start, or (`loop_...`) the PyTorch loop of
`configs/`, whose steps wait a second in the place of an accelerator. A `calibration` is preempted once and has a rank
killed twice; all that the simulation knows of step time, saves, queue and restarts is read from its journal
(`verl_slurm.plan.calibrate`). The others are then predicted, each with its own settings, and with the steps at which it
was interrupted:

* calm: nothing happens;
* preempted: three real preemptions by a more urgent job;
* killed: SIGKILL of a rank, three times, and a save in 15 steps instead of 10;
* mixed: both kinds, and another interval between saves.

`--record NAME` makes one of these runs and keeps its journals below DIR/NAME; without it the missing ones are made, one
after the other. Nothing else may work on the machine meanwhile. DIR (`tests/plan/recorded`) holds those of the figures
in docs/plan.md, so that the tests compare without Slurm.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec
import psutil

from tests.harness import LiveRun
from verl_slurm.base.one_line import json_line
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import load
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import parse_event, read_events, to_json
from verl_slurm.journal.history import History
from verl_slurm.plan.calibrate import happened, measure, strikes_again
from verl_slurm.plan.plan_inputs import KnownValue, cadence_of, complete, model_of, schedule_of
from verl_slurm.plan.simulate import RunModel, simulate
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.conf import ClusterOptions
from verl_slurm.slurm.devcluster.faults import preempt
from verl_slurm.wire.environment import RUN_VARIABLE

_ROOT = Path(__file__).parents[1]
RECORDED = _ROOT / "tests/plan/recorded"
CALIBRATION, LOOP_CALIBRATION = "calibration", "loop_calibration"
_PAUSE_S = 1.0
"""Of a step of the loop, in the place of an accelerator's work: what else runs on the machine changes it little."""
_PATIENCE_S = 280.0
_KEPT = (ev.Started, ev.Restart, ev.Training, ev.Cause, ev.Crash, ev.Saved, ev.Verified, ev.Ended)
_KEPT_OF_A_STEP = ("time", "attempt", "step", "step_s", "generate_s", "score_s", "update_s")


class Scenario(NamedTuple):
    """A run: its steps, the steps between two saves, and what happens once so many steps are done."""

    steps: int
    every: int
    faults: tuple[tuple[int, str], ...] = ()
    is_loop: bool = False

    @property
    def config(self) -> Path:
        return _ROOT / "configs" / ("pytorch_loop.yaml" if self.is_loop else "quickstart.yaml")

    @property
    def overrides(self) -> list[str]:
        every = self.every
        saves = [f"checkpoint.every_steps={every}", f"checkpoint.runtime_every_steps={every}"]
        if not self.is_loop:
            return [f"train.steps={self.steps}", *saves]
        program = _ROOT / "configs/pytorch_loop.py"
        return [f'trainer.command=[{program}, --steps, "{self.steps}", --pause, "{_PAUSE_S}"]', *saves]

    @property
    def calibration(self) -> str:
        return LOOP_CALIBRATION if self.is_loop else CALIBRATION


class Compared(NamedTuple):
    """A run as it was, and as it was predicted."""

    name: str
    measured: float
    predicted: float
    measured_s: float
    predicted_s: float
    """Allocated seconds."""

    @property
    def off(self) -> float:
        """Relative error of the goodput."""
        return self.predicted / self.measured - 1.0


SCENARIOS = {
    CALIBRATION: Scenario(50, 10, ((12, "preempt"), (24, "kill"), (37, "kill"))),
    "calm": Scenario(90, 10),
    "preempted": Scenario(60, 10, ((13, "preempt"), (29, "preempt"), (46, "preempt"))),
    "killed": Scenario(60, 15, ((19, "kill"), (33, "kill"), (53, "kill"))),
    "mixed": Scenario(60, 8, ((13, "kill"), (31, "preempt"), (47, "kill"))),
    LOOP_CALIBRATION: Scenario(50, 10, ((12, "preempt"), (24, "kill"), (37, "kill")), is_loop=True),
    "loop_preempted": Scenario(80, 10, ((16, "preempt"), (37, "preempt"), (62, "preempt")), is_loop=True),
    "loop_killed": Scenario(90, 15, ((22, "kill"), (41, "kill"), (72, "kill")), is_loop=True),
    "loop_mixed": Scenario(90, 20, ((17, "preempt"), (38, "kill"), (65, "preempt")), is_loop=True),
}
PREDICTED = [name for name in SCENARIOS if name not in (CALIBRATION, LOOP_CALIBRATION)]


def record(name: str, to: Path) -> None:
    """Makes one run on a cluster of its own, and keeps its journals."""
    scenario = SCENARIOS[name]
    with tempfile.TemporaryDirectory(prefix="vs-") as made:
        cluster = DevCluster(Path(made) / "c")
        try:
            cluster.start(ClusterOptions())
            run = LiveRun(
                cluster, Path(made) / "run", *scenario.overrides, config=str(scenario.config)
            ).submit()
            for step, kind in scenario.faults:
                run.wait(partial(_trains_beyond, run, step), _PATIENCE_S)
                if kind == "preempt":
                    preempt(cluster, int(run.job_id), hold_s=1)
                else:
                    run.kill((_loops(run) if scenario.is_loop else run.ranks())[-1:])
            run.wait_end(timeout_s=_PATIENCE_S)
            _keep(run.paths, to / name)
        finally:
            cluster.stop()


def _trains_beyond(run: LiveRun, step: int) -> bool:
    now = run.status()
    assert not any(event["exit_code"] not in (0, 25) for event in run.events("ended")), run.story()
    return now.get("state") == "running" and now.get("step", 0) >= step


def _loops(run: LiveRun) -> list[psutil.Process]:
    """The ranks of a loop: processes of its program."""
    found = []
    for process in psutil.process_iter():
        try:
            argv, environment = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        mine = environment.get(RUN_VARIABLE) == str(run.paths.root) and "RANK" in environment
        if mine and any(word.endswith("pytorch_loop.py") for word in argv):
            found.append(process)
    return found


def _keep(paths: RunPaths, to: Path) -> None:
    """Copies of the journals what a prediction reads: some kinds of events, and of a step, the times."""
    to.mkdir(parents=True, exist_ok=True)
    events = [event for event in read_events(paths) if isinstance(event, _KEPT)]
    (to / "events.jsonl").write_bytes(b"".join(json_line(to_json(event)) + b"\n" for event in events))
    rows = [msgspec.json.decode(line) for line in paths.steps.read_bytes().splitlines()]
    kept = [{key: _short(row[key]) for key in _KEPT_OF_A_STEP if key in row} for row in rows]
    (to / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


def _short(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def read(name: str, kept: Path) -> tuple[History, list[dict[str, float]]]:
    """Returns the history and the rows of steps of a recorded run."""
    events = [parse_event(line) for line in (kept / name / "events.jsonl").read_bytes().splitlines()]
    rows = [msgspec.json.decode(line) for line in (kept / name / "steps.jsonl").read_bytes().splitlines()]
    history = History(event for event in events if event is not None)
    for row in rows:
        history.feed_row(row)
    return history, rows


def compare(
    name: str, kept: Path, changed: Callable[[RunModel], dict[str, Any]] = lambda model: {}
) -> Compared:
    """Predicts one run from the journal of a calibration, its own settings and its own interruptions.

    Args:
        changed: fields of the model to replace, to see what a wrong model comes to.
    """
    scenario = SCENARIOS[name]
    config = load(scenario.config, scenario.overrides)
    known = measure(*read(scenario.calibration, kept), config.checkpoint.expected_mtbi_h)
    # Of a guest the configuration does not tell it.
    known["steps"] = KnownValue(float(scenario.steps), "given")
    model = model_of(complete(known, config), config)
    model = msgspec.structs.replace(model, **changed(model))
    history, rows = read(name, kept)
    strikes = strikes_again(happened(history, rows))
    outcome = simulate(model, schedule_of(cadence_of(config), model), strikes, random.Random(0))
    now = history.last_at or 0.0
    goodput = history.goodput(now)
    assert goodput is not None
    assert outcome.finished
    return Compared(name, goodput, outcome.goodput, history.allocated_seconds(now), outcome.allocated_s)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", choices=list(SCENARIOS))
    parser.add_argument("--to", type=Path, default=RECORDED)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.record:
        record(options.record, options.to)
        return 0
    for name in SCENARIOS:
        if not (options.to / name / "steps.jsonl").exists():
            record(name, options.to)
    rows = [compare(name, options.to) for name in PREDICTED]
    if options.json:
        print(json.dumps([{**row._asdict(), "off": round(row.off, 4)} for row in rows]))
        return 0
    print(f"{'run':<12} {'goodput':>8} {'predicted':>10} {'off':>7} {'seconds':>9} {'predicted':>10}")
    for row in rows:
        print(
            f"{row.name:<12} {row.measured:8.3f} {row.predicted:10.3f} {row.off:7.1%} {row.measured_s:9.1f} "
            f"{row.predicted_s:10.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
