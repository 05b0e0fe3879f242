"""A run of one rank without torch: real lead, real agent, real line; a Slurm of two shell scripts where one is wanted.

The scripts stand for `srun` and `scontrol` of a job on one node. They know the few answers that the lead asks for,
start no second attempt and keep no queue. On a real cluster a lead cannot be killed between two given writes.

Everything is awaited: the journal by inotify, processes by their end.
"""

import contextlib
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.harness import ROOT, wait_until_gone
from tests.journals import Line, read_events
from tests.local_runs import QUICK
from tests.processes import python_path
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.runs.follow import follow_lines
from verl_slurm.submit.submission import carry_out, plan_submission

PATIENCE_S = 300.0
"""For a run's end, and for a sign of life: four ranks that import torch on two busy cores take minutes."""
STAND_IN = Path(__file__).with_name("faulty_processes.py")
_SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_NODEID=0 exec "$@"
"""
_SCONTROL = """#!/bin/sh
echo "$1 $2" >> %(box)s/asked
case "$*" in update*Requeue=0*) : > %(box)s/final;; esac
case "$1 $2" in
requeue*) : > %(box)s/requeued;;
"show job")
    restarts=0; preempted=None; end=9999999999; requeue=1
    [ -e %(box)s/final ] && requeue=0
    [ -e %(box)s/requeued ] && restarts=1
    [ -e %(box)s/preempted ] && read -r preempted end < %(box)s/preempted
    [ -e %(box)s/ends ] && read -r end < %(box)s/ends
    # it starts again soon, as it was asked to
    eligible=$(($(date +%%s)+3))
    # It has run for an hour until then: a short time limit would shorten the lead time.
    start=$((eligible-3600))
    [ $restarts = 1 ] && start=$eligible
    echo "JobId=7 JobName=x"
    echo "   JobState=RUNNING Reason=None Dependency=(null)"
    echo "   Requeue=$requeue Restarts=$restarts EligibleTime=$eligible StartTime=$start EndTime=$end"
    echo "   PreemptTime=$preempted"
    echo "   UserId=ada(1000) Partition=p TimeLimit=00:10:00 ExitCode=0:0 NumNodes=1";;
"show node") echo "NodeName=n1 NodeAddr=127.0.0.1 NodeHostName=n1 State=ALLOCATED CPUTot=2";;
"show config")
    wait=30
    [ -e %(box)s/kill_wait ] && read -r wait < %(box)s/kill_wait
    echo "KillWait = $wait sec";;
esac
"""


def prepared(root: Path, *overrides: str) -> RunPaths:
    """A run directory of one rank, nothing started."""
    # More steps than any test has: a start that finds all of them done would end at once.
    one = ("distributed.nodes=1", "distributed.dp_size=1", "daemon.requeue_delay_s=1", "train.steps=2000")
    plan = plan_submission(
        ROOT / "configs/quickstart.yaml", [*QUICK, *one, *overrides, f"run_dir={root}"], cluster="local"
    )
    carry_out(plan, prepare_only=True)
    return RunPaths(root)


class Stage:
    """One run directory; leads are started on it one after the other.

    Args:
        slurm: the lead finds itself in job 7 of a cluster that is two scripts.
    """

    def __init__(self, root: Path, *overrides: str, slurm: bool = False) -> None:
        root.chmod(0o700)
        self.paths = prepared(root / "run", *overrides)
        self.box, self.slurm = private_dir(root / "box"), slurm
        for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL % {"box": self.box})):
            program = self.box / name
            program.write_text(text)
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.marks = self.box / "marks"
        self.process: subprocess.Popen[str] | None = None

    def environment(self, **bent: object) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        kept |= python_path()  # faulty_processes.py uses tests.builders
        kept["VS_HOSTILE"] = json.dumps(bent | {"marks": str(self.marks)})
        if self.slurm:
            kept |= {"PATH": f"{self.box}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
            kept |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
            kept |= {"SLURM_JOB_PARTITION": "p"}
        return kept

    def lead(
        self, *, before: tuple[str, ...] = (), stdout: int = subprocess.DEVNULL, **bent: object
    ) -> "subprocess.Popen[str]":
        """Start it; `before` are the words in front of its command line."""
        (self.box / "final").unlink(missing_ok=True)  # a new job
        argv = [*before, sys.executable, str(STAND_IN), "lead", "--run", str(self.paths.root)]
        self.process = subprocess.Popen(
            argv, env=self.environment(**bent), stdout=stdout, stderr=subprocess.STDOUT, text=True
        )
        return self.process

    def preempt(self, end: int = 9999999999) -> None:
        """Slurm says so, and sends its TERM to the batch process."""
        assert self.process is not None
        (self.box / "preempted").write_text(f"1795222234 {end}\n")
        self.process.terminate()

    def events(self, name: str) -> list[Line]:
        return [event for event in read_events(self.paths) if event["event"] == name]

    def wait(self, name: str, count: int = 1, **wanted: object) -> Line:
        """The `count`-th event of that name."""
        with contextlib.closing(follow_lines(self.paths.events, 0, silence_s=lambda: PATIENCE_S)) as lines:
            for line in lines:
                found = [e for e in self.events(name) if all(e.get(k) == v for k, v in wanted.items())]
                if len(found) >= count:
                    return found[count - 1]
                if line is None:
                    break
        raise AssertionError(f"no {name} in:\n{self.story()}")

    def marked(self, word: str) -> None:
        """Until a stand-in has written this down."""
        with contextlib.closing(follow_lines(self.marks, 0, silence_s=lambda: PATIENCE_S)) as lines:
            for line in lines:
                if line is None:
                    break
                if line.decode() == word:
                    return
        raise AssertionError(f"no {word!r} in:\n{self.story()}")

    def end(self) -> int:
        """The lead's exit code; whatever was below it is gone then."""
        assert self.process is not None
        try:
            code = self.process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.story()}") from None
        wait_until_gone(str(self.paths.root))
        return code

    def story(self) -> str:
        logs = [path.read_text() for path in sorted(self.paths.logs.glob("*.log"))]
        return "\n".join([*(str(event) for event in read_events(self.paths)), *logs])

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.paths.checkpoints.glob("step_*"))

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.paths.root) in process.cmdline():
                    process.kill()
        wait_until_gone(str(self.paths.root))


@contextlib.contextmanager
def control_group(controller: str, name: str) -> Iterator[Path]:
    """A control group of our own, and what is left in it goes back to where we are.

    Raises:
        OSError: there is none to be had here.
    """
    root = Path("/sys/fs/cgroup") / controller
    group = root / f"verl-slurm-test-{os.getpid()}-{name}"
    group.mkdir()
    try:
        yield group
    finally:
        _remove(group, root)


def _remove(group: Path, root: Path) -> None:
    """What was killed in a starved group dies slowly, cannot be moved any more, and holds the group until then."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for pid in (group / "tasks").read_text().split():
            with contextlib.suppress(OSError):
                (root / "tasks").write_text(pid)
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)  # that a process is gone from its group is no event
