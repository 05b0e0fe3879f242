"""A fire drill: a small job that is warned and ended for real, and records which process got which signal, when.

```
queue the job → every node has reported → scancel -b -s USR1
  → requeue it (or preempt it by a job of another partition)
  → Slurm ends it for the first time → the requeued job reports → the records are judged
```

The job, its output and its directory are gone afterwards, whatever happened.
"""

import asyncio
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from verl_slurm.base.errors import NotFound, SlurmMissing, SlurmRefused
from verl_slurm.base.one_line import counted
from verl_slurm.config.schema import RunConfig
from verl_slurm.doctor.node_probe import NodeReport
from verl_slurm.doctor.node_rules import DrillRecord, judge_drill, judge_nodes
from verl_slurm.health import Finding, bad
from verl_slurm.slurm.batch import sbatch_options, submission_environment
from verl_slurm.slurm.commands import NODE_LIST
from verl_slurm.slurm.slurm_client import SlurmClient

_LIMIT_MIN = 5
_LOOK_S = 0.3
"""Polling interval: Slurm and shared file systems report nothing by themselves."""
_SIGNAL_S = 10.0
_WARNING = "SIGUSR1"
_OURS = ("job-name", "time", "signal", "requeue", "nodes")


async def fire_drill(
    config: RunConfig,
    parent: Path,
    kill_wait_s: int,
    *,
    preempt_by: str | None,
    wait_s: float,
    show: Callable[[str], None],
) -> list[Finding]:
    """Runs one drill.

    Args:
        config: of the run whose job it imitates: partition, account, nodes, options.
        parent: an existing directory that all nodes see.
        kill_wait_s: Slurm's KillWait.
        preempt_by: a partition whose jobs preempt; None: the job is requeued instead, which ends it the same way.
        wait_s: the longest wait for the job to start, each of two times.
        show: called with what is being waited for.

    Raises:
        SlurmRefused, SlurmMissing: the job was not accepted, or Slurm does not answer.
    """
    directory = parent / f".verl-slurm-drill-{secrets.token_hex(6)}"
    directory.mkdir(mode=0o700)
    # A forgotten SBATCH_NO_REQUEUE would falsify the cluster's answer; so would the job that we may be inside of.
    client = SlurmClient(submission_environment(os.environ, config))
    jobs: list[int] = []
    try:
        job = await _queue(client, _argv(config, directory))
        # At once: `finally` ends what is in this list.
        jobs.append(job)
        nodes = config.distributed.nodes
        # ---- every node has reported; now the warning, then the end
        if problem := await _start(client, job, directory, nodes, wait_s, show):
            return [
                bad("fire drill", problem, "look at `squeue --me` and at the partition's state; try again")
            ]
        show(f"job {job} runs on {counted(nodes, 'node')}; warning its batch process")
        warned = time.time()
        await client.signal_batch(job, "USR1")
        await _until(lambda: _seen(directory, "batch", _WARNING) is not None, _SIGNAL_S)
        how = f"preemption by {preempt_by}" if preempt_by else "requeue"
        show(f"ending it: {how}")
        ended = time.time()
        if preempt_by:
            where = (await client.job(job)).node_list
            jobs.append(await _queue(client, _rival_argv(config, directory, preempt_by, where)))
        else:
            await client.requeue(job, config.daemon.requeue_delay_s, own_restarts=0)
        show(f"waiting until {_clock(wait_s + kill_wait_s)} at most for Slurm to start it again")
        # ---- the requeued job reports, and the records are judged
        again = directory / "again"
        await _until(again.exists, wait_s + kill_wait_s)
        record = _record(directory, nodes, how, kill_wait_s, warned, ended)
        return [*judge_nodes(_reports(directory, nodes)), *judge_drill(record)]
    finally:
        # The drill's processes outlive every signal but KILL, and look for this file. Where storage is gone, the jobs
        # are ended all the same.
        with suppress(OSError):
            (directory / "over").touch()
        for number in jobs:
            # Also the requeued job, which would run again.
            await _end(client, number)
        shutil.rmtree(directory, ignore_errors=True)


def _argv(config: RunConfig, directory: Path) -> list[str]:
    """Builds a command like the run's own sbatch, but short. The script is Python itself: no shell reads any of it."""
    script = directory / "drill.py"
    script.write_text(
        f"#!{sys.executable} -P\nimport sys\nfrom verl_slurm.doctor.drill_job import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    # The run's own options, so that account, partition and constraints are tried, but for those that the drill sets.
    options = [o for o in sbatch_options(config) if o[2:].split("=")[0] not in _OURS]
    mine = ["--job-name=verl-slurm-doctor", f"--time={_LIMIT_MIN}", f"--nodes={config.distributed.nodes}"]
    logs = str(directory).replace("%", "%%")  # sbatch replaces %x by words of its own
    mine += ["--requeue", "--signal=B:USR1@10", "--open-mode=append", f"--output={logs}/batch.log"]
    local = [config.checkpoint.local_dir] if config.checkpoint.local_dir else []
    return [*options, *mine, str(script), "batch", str(directory), *local]


def _rival_argv(config: RunConfig, directory: Path, partition: str, where: str | None) -> list[str]:
    """Asks for the drill's own nodes: on any others it would end other users' jobs."""
    script = directory / "rival.py"
    script.write_text(f"#!{sys.executable} -P\nimport time\ntime.sleep(1)\n")
    asked = ["--job-name=verl-slurm-doctor", "--time=1", f"--nodes={config.distributed.nodes}", "--exclusive"]
    asked += [f"--partition={partition}", "--output=/dev/null"]
    if where is None or NODE_LIST.fullmatch(where) is None:
        raise SlurmRefused(
            "the job of the fire drill has no nodes that could be asked for",
            found=where or "none",
            remedy="try again; without --preempt-by it is requeued instead",
        )
    asked.append(f"--nodelist={where}")
    return [*asked, str(script)]


async def _queue(client: SlurmClient, words: list[str]) -> int:
    remedy = "change the slurm section of the configuration; a run would be refused as well"
    queueing = asyncio.ensure_future(client.submit(words, "the job of the fire drill", remedy=remedy))
    try:
        return await asyncio.shield(queueing)
    except asyncio.CancelledError:
        await _end(client, await queueing)  # Ctrl-C does not stop sbatch
        raise


async def _start(
    client: SlurmClient, job: int, directory: Path, nodes: int, wait_s: float, show: Callable[[str], None]
) -> str:
    """Waits until every node has reported; returns why not, or an empty text."""
    deadline, until = time.monotonic() + wait_s, _clock(wait_s)
    while time.monotonic() < deadline:
        # batch.alive: the batch process has begun to take signals.
        if len(list(directory.glob("node-*.json"))) >= nodes and (directory / "batch.alive").exists():
            return ""
        if (directory / "problem").exists():
            return (directory / "problem").read_text()
        facts = await client.job(job)
        if facts.is_over:
            log = directory / "batch.log"
            said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            return f"the job ended by itself: {facts.state} {said[-1] if said else ''}".strip()
        shown = " ".join(word for word in (facts.state.lower(), facts.reason) if word)
        show(f"job {job}: {shown}; waiting for it until {until}")
        await asyncio.sleep(_LOOK_S)
    return f"job {job} did not start within {wait_s:.0f} s"


def _clock(seconds: float) -> str:
    """Returns the time of day in so many seconds."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))


async def _until(there: Callable[[], bool], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not there() and time.monotonic() < deadline:  # noqa: ASYNC110 - see _LOOK_S
        await asyncio.sleep(_LOOK_S)


async def _end(client: SlurmClient, job: int) -> None:
    try:
        if not (await client.job(job)).is_over:
            await client.cancel(job)
    except (NotFound, SlurmMissing, SlurmRefused):
        return  # it has a time limit of minutes


def _reports(directory: Path, nodes: int) -> list[NodeReport]:
    return [
        msgspec.json.decode((directory / f"node-{number}.json").read_bytes(), type=NodeReport)
        for number in range(nodes)
    ]


def _signals(directory: Path, who: str) -> list[tuple[str, float]]:
    path = directory / f"{who}.seen"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(name, float(at)) for name, _, at in (line.partition(" ") for line in lines) if at]


def _seen(directory: Path, who: str, name: str) -> float | None:
    return next((at for seen, at in _signals(directory, who) if seen == name), None)


def _record(
    directory: Path, nodes: int, how: str, kill_wait_s: int, warned: float, ended: float
) -> DrillRecord:
    steps = [f"step-{number}" for number in range(nodes)]
    told = {who: _signals(directory, who) for who in ("batch", *steps)}
    warning = _seen(directory, "batch", _WARNING)
    terms = [at for signals in told.values() for name, at in signals if name == "SIGTERM"]
    # Each process touches its file every 0.2 s, so the newest of them is the last sign of life.
    signs = [path.stat().st_mtime for path in directory.glob("*.alive")]
    again = directory / "again"

    def after(who: list[str]) -> tuple[str, ...]:
        # By name: the kernel delivers pending signals by number, so the times say little about their order.
        return tuple(sorted({name for one in who for name, at in told[one] if at >= ended}))

    return DrillRecord(
        how=how,
        kill_wait_s=kill_wait_s,
        warning_to_batch_s=None if warning is None else max(warning - warned, 0.0),
        warning_to_steps=any(name == _WARNING and at < ended for who in steps for name, at in told[who]),
        signals_to_batch=after(["batch"]),
        signals_to_steps=after(steps),
        kill_after_s=max(signs) - min(terms) if terms and signs else None,
        again_after_s=float(again.read_text()) - ended if again.exists() else None,
    )
