"""Shows the main job for real: submit, preempt in mid-step, save, requeue, resume, and the proof.

Two runs of one configuration. A more urgent job preempts the first in the middle of a step's generation; the
second, its twin, is left alone. Then all weights of the two are compared, as by `verl-slurm inspect --bits`.
Without Slurm the same happens on submitit's local executor. A signal then stands for the preemption.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from verl_slurm.base.errors import NotFound, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import read_owner
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.inspect.compare import Comparison, compare
from verl_slurm.checkpoint.store.catalog import newest_checkpoint
from verl_slurm.journal.events import Cause, Event, FirstRollout, Requeue, Saved, Started, Training, Verified
from verl_slurm.journal.files import read_events
from verl_slurm.runs.follow import follow_run
from verl_slurm.runs.liveness import controller
from verl_slurm.runs.run_record import last_job
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.conf import ClusterOptions
from verl_slurm.slurm.devcluster.faults import preempt
from verl_slurm.slurm.runner import telling
from verl_slurm.submit.submission import carry_out, plan_submission
from verl_slurm.submit.submission_plan import SubmissionPlan

_PREEMPT_AT_STEP = 4


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How the preempted run spent its time, in seconds. Taken from the events in its journal."""

    cause_to_saved: float
    saved_to_verified: float
    verified_to_requeued: float
    requeued_to_started: float
    started_to_training: float
    cause_to_first_rollout: float


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the demo."""

    cluster: str
    interrupted_run: str
    undisturbed_run: str
    preempted_at: str
    checkpoint: str
    timing: Timing
    interrupted_s: float
    undisturbed_s: float
    first_reward: float
    last_reward: float
    comparison: Comparison


class Teller(msgspec.Struct, frozen=True):
    """The demo's output functions; the CLI provides them."""

    say: Callable[[str], None]
    event: Callable[[Event], None]
    status: Callable[[dict[str, Any]], None]


def run_demo(
    config: Path, overrides: list[str], directory: Path, tell: Teller, *, without_slurm: bool = False
) -> DemoResult:
    """Runs the whole demo.

    Args:
        overrides: `key=value` words for both runs.
        directory: where the two runs are made.
        without_slurm: stay on this machine, even if Slurm is installed.

    Raises:
        VerlSlurmError: a run did not end well; its messages have been shown.
    """
    # Both runs in one cluster, which ends before the comparison: that needs no Slurm.
    with _cluster(directory, tell, without_slurm) as cluster:
        kind = "local" if cluster is None else "slurm"
        tell.say(
            f"1. the run that will be preempted, on {'a real Slurm' if cluster else 'this machine, no Slurm'}"
        )
        interrupted = directory / "interrupted"
        strike = _Preemption(cluster, RunPaths(interrupted), tell)
        began = time.monotonic()
        _run(config, [*overrides, f"run_dir={interrupted}", "name=interrupted"], kind, tell, strike)
        # A run that was not preempted proves nothing, however equal the weights are.
        if not strike.where:
            raise VerlSlurmError(
                "the run was over before it could be preempted",
                where=interrupted,
                remedy=f"give it more than {_PREEMPT_AT_STEP} steps",
            )
        between = time.monotonic()
        tell.say("2. its twin, undisturbed")
        undisturbed = directory / "undisturbed"
        _run(config, [*overrides, f"run_dir={undisturbed}", "name=undisturbed"], kind, tell, None)
        ended = time.monotonic()
    tell.say("3. the proof: every weight of the two, bit for bit")
    comparison = compare(newest_checkpoint(interrupted), newest_checkpoint(undisturbed))
    # Of the run that was preempted: the journal has the times, written by the processes that did the work.
    events, rewards = read_events(RunPaths(interrupted)), _rewards(RunPaths(interrupted))
    saved = next(e for e in events if isinstance(e, Saved) and e.emergency)
    return DemoResult(
        cluster=kind,
        interrupted_run=str(interrupted),
        undisturbed_run=str(undisturbed),
        preempted_at=strike.where,
        checkpoint=saved.name,
        timing=timings(events),
        interrupted_s=round(between - began, 1),
        undisturbed_s=round(ended - between, 1),
        first_reward=rewards[0],
        last_reward=rewards[-1],
        comparison=comparison,
    )


@contextmanager
def _cluster(directory: Path, tell: Teller, without_slurm: bool) -> Iterator[DevCluster | None]:
    """Yields the embedded cluster of four nodes, or None if Slurm is not available."""
    # Daemons lie in sbin, which is not in the PATH of users.
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_SBIN) is None]
    if missing or without_slurm:
        why = f"Slurm is not here ({', '.join(missing)})" if missing else "without Slurm, as asked"
        tell.say(f"{why}: on submitit's local executor, a signal standing for the preemption")
        # Without the embedded cluster the plans below ask for `local`: another Slurm of this machine is left alone.
        yield None
        return
    cluster = DevCluster(directory / "cluster")
    before = os.environ.get("SLURM_CONF")
    try:
        with telling(tell.say):
            status = cluster.start(ClusterOptions(nodes=4, gpus="auto"))
        gpus = f" and {counted(sum(status.gpus.values()), 'GPU')}" if status.gpus else ""
        tell.say(
            f"Slurm {status.slurm_version}: {counted(len(status.nodes), 'node')}{gpus}, up in {status.seconds:.1f} s"
        )
        # In this process, since submit, squeue and scontrol are called from it.
        os.environ.update(cluster.env())
        yield cluster
    finally:
        # Also where the start failed half way: daemons that came up must not stay.
        cluster.stop()
        if before is None:
            os.environ.pop("SLURM_CONF", None)
        else:
            os.environ["SLURM_CONF"] = before


_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
_SBIN = f"{os.defpath}:/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin"


class _Preemption:
    """Watches the status of a run and preempts it once, in the middle of a step's generation."""

    def __init__(self, cluster: DevCluster | None, paths: RunPaths, tell: Teller) -> None:
        self._cluster, self._paths, self._tell = cluster, paths, tell
        self.where = ""

    def __call__(self, status: dict[str, Any]) -> None:
        # In the middle: some micro-batches of the step are done, and others are not.
        middle = status.get("phase") == "generate" and status.get("index", 0) >= 1
        if (
            self.where
            or status.get("state") != "running"
            or status.get("step", 0) < _PREEMPT_AT_STEP
            or not middle
        ):
            return
        # Set before the preemption, as the status is told again while that goes on.
        self.where = f"step {status['step']}, generation micro-batch {status['index']}"
        if self._cluster is None:
            owner = read_owner(self._paths)
            assert owner is not None, "a running run has an owner"
            self._tell.say(f"   preempting at {self.where}: SIGUSR2 stands for it")
            # The owner of the attempt is the lead: the process that listens for it.
            os.kill(owner.pid, signal.SIGUSR2)
        else:
            self._tell.say(f"   preempting at {self.where}: a more urgent job wants the nodes")
            preempt(self._cluster, int(status["job_id"]))


def _run(
    config: Path,
    overrides: list[str],
    kind: str,
    tell: Teller,
    strike: Callable[[dict[str, Any]], None] | None,
) -> None:
    plan = plan_submission(config, overrides, cluster="slurm" if kind == "slurm" else "local")
    paths = RunPaths(plan.run_dir)
    try:
        code = _follow(plan, paths, tell, strike)
    # Ctrl-C as well: without Slurm nothing else would end the run.
    except BaseException:
        if kind == "local":
            _end_local(paths)  # with Slurm it ends with the cluster
        raise

    if code is not ExitCode.OK:
        failure = VerlSlurmError(
            "the run did not end well", where=paths.root, found=code.description, remedy=f"see {paths.logs}"
        )
        failure.exit_code = code
        raise failure


def _follow(
    plan: SubmissionPlan, paths: RunPaths, tell: Teller, strike: Callable[[dict[str, Any]], None] | None
) -> ExitCode:
    submitted = carry_out(plan)
    tell.say(f"   job {submitted.job_id}, {submitted.run_dir}")

    def on_status(status: dict[str, Any]) -> None:
        tell.status(status)
        if strike is not None:
            strike(status)

    return follow_run(paths, 0, tell.event, on_status)


def _end_local(paths: RunPaths) -> None:
    """Kills a run without Slurm: all processes below submitit's controller, and those that they start meanwhile."""
    with suppress(NotFound, psutil.NoSuchProcess):
        process = controller(paths, last_job(paths))
        while process is not None:
            # Listed before the first is killed: the children of a dead process are no longer found below it.
            tree = [*process.children(recursive=True), process]
            for each in tree:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(tree, timeout=10)
            process = controller(paths, last_job(paths))


def _rewards(paths: RunPaths) -> list[float]:
    """Returns the mean reward of each step in the newest checkpoint's history, oldest first."""
    metadata = msgspec.json.decode((newest_checkpoint(paths.root) / "metadata.json").read_bytes())
    return [row["reward"] for row in metadata["history"]]


def timings(events: list[Event]) -> Timing:
    """Returns the times of a run's first preemption; raises StopIteration if a part is missing. Pure."""
    # The first of each kind after the one before it: a second interruption would bring all of them again.
    cause = _first(events, lambda event: isinstance(event, Cause) and event.cause == "preemption")
    saved = _first(events, lambda event: isinstance(event, Saved) and event.emergency, cause)
    verified = _first(events, lambda event: isinstance(event, Verified), saved)
    requeued = _first(events, lambda event: isinstance(event, Requeue) and event.accepted, cause)
    started = _first(events, lambda event: isinstance(event, Started), requeued)
    training = _first(events, lambda event: isinstance(event, Training), started)
    first_rollout = _first(events, lambda event: isinstance(event, FirstRollout), started)
    return Timing(
        cause_to_saved=round(saved - cause, 3),
        saved_to_verified=round(verified - saved, 3),
        verified_to_requeued=round(requeued - verified, 3),
        requeued_to_started=round(started - requeued, 3),
        started_to_training=round(training - started, 3),
        cause_to_first_rollout=round(first_rollout - cause, 3),
    )


def _first(events: list[Event], wanted: Callable[[Event], bool], since: float = 0.0) -> float:
    """Returns when the first such event was written, in seconds since 1970."""
    return next(at for event in events if wanted(event) and (at := event.at) is not None and at >= since)
