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
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from verl_slurm.base.errors import NotFound, SlurmMissing, SlurmRefused
from verl_slurm.base.one_line import counted
from verl_slurm.checks import Finding, bad, good, warn
from verl_slurm.checks.drill_job import NodeReport
from verl_slurm.checks.storage_probe import judge_place
from verl_slurm.config.schema import RunConfig
from verl_slurm.slurm.batch import sbatch_options, submission_environment
from verl_slurm.slurm.commands import NODE_LIST
from verl_slurm.slurm.slurm_client import SlurmClient

_SKEW_S = 1.0
_LEAST_FILES = 4096
_LEAST_SHM_BYTES = 1 << 30
_SLOW_START_S = 60.0
_OWN_REQUEUE = (
    "Slurm's own requeue waits for its credentials to expire (AuthInfo cred_expire, 120 s); a run's daemon asks "
    "first, in the grace time, and waits daemon.requeue_delay_s instead"
)
_NO_WARNING = "by a time limit or an operator do not work here: report your Slurm version"
_NOT_AGAIN = "see `squeue --me`: is the partition full, or requeueing forbidden (scontrol show job: Requeue)?"
_ASK_FOR_PORTS = (
    "the job's nodes have to reach one another on ports that are not known beforehand: ask for that"
)
_MEND_CLOCKS = "nothing here depends on it, but logs will; have NTP mended"
_LIMIT_MIN = 5
# Polling interval: Slurm and shared file systems report nothing by themselves.
_LOOK_S = 0.3
_SIGNAL_S = 10.0
_WARNING = "SIGUSR1"
_OURS = ("job-name", "time", "signal", "requeue", "nodes")


class DrillRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a fire drill. Times are seconds after the event named; None: it never came."""

    how: str
    """`requeue` or `preemption by PARTITION`: the way in which the job was ended for the first time."""
    kill_wait_s: int
    warning_to_batch_s: float | None
    """From `scancel -b -s USR1` to the batch process."""
    warning_to_steps: bool
    """A step got the warning, too: it would kill ranks."""
    signals_to_batch: tuple[str, ...]
    signals_to_steps: tuple[str, ...]
    """The signals that ended the job for the first time: names in alphabetical order, each once."""
    kill_after_s: float | None
    """From the first TERM to the last sign of life of a process that ignored it."""
    again_after_s: float | None
    """From asking for the end to the first message of the requeued job."""


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
            jobs.append(await _queue(client, rival_argv(config, directory, preempt_by, where)))
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
    script = directory / "drill.py"
    # Python itself: no shell reads any of it.
    script.write_text(
        f"#!{sys.executable} -P\nimport sys\nfrom verl_slurm.checks.drill_job import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    # The run's own options, so that account, partition and constraints are tried, but for those that the drill sets.
    options = [o for o in sbatch_options(config) if o[2:].split("=")[0] not in _OURS]
    mine = ["--job-name=verl-slurm-doctor", f"--time={_LIMIT_MIN}", f"--nodes={config.distributed.nodes}"]
    logs = str(directory).replace("%", "%%")  # sbatch replaces %x by words of its own
    mine += ["--requeue", "--signal=B:USR1@10", "--open-mode=append", f"--output={logs}/batch.log"]
    local = [config.checkpoint.local_dir] if config.checkpoint.local_dir else []
    return [*options, *mine, str(script), "batch", str(directory), *local]


def rival_argv(config: RunConfig, directory: Path, partition: str, where: str | None) -> list[str]:
    """Asks for the drill's own nodes."""
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
    # On any other nodes it would end other users' jobs.
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


def judge_nodes(reports: Sequence[NodeReport]) -> list[Finding]:
    """Judges whether all nodes are alike, reach one another, and agree about the time; node 0's report is the first."""
    findings = [
        _alike("python", {r.node: r.python for r in reports}),
        _alike("packages", {r.node: ", ".join(f"{k} {v}" for k, v in r.packages.items()) for r in reports}),
        _alike("driver", {r.node: r.driver or "no NVIDIA driver" for r in reports}),
        _alike("GPUs", {r.node: str(r.num_gpus) for r in reports}),
    ]
    first, parted = reports[0].node, [report for report in reports if report.problem]
    findings += [bad("ports", f"{r.node} cannot reach {first}: {r.problem}", _ASK_FOR_PORTS) for r in parted]
    # Node 0 tells the time, so it has no offset of its own.
    offsets = {r.node: r.clock_offset_s for r in reports if r.clock_offset_s is not None}
    if offsets and not parted:
        findings.append(good("ports", f"{counted(len(offsets) + 1, 'node')} reach one another"))
    # A warning, no refusal: deadlines are taken from slurmctld's clock, and claims by their numbers.
    if far := [f"{node} {offset:+.1f} s" for node, offset in offsets.items() if abs(offset) > _SKEW_S]:
        findings.append(warn("clocks", f"apart: {', '.join(far)}", _MEND_CLOCKS))
    elif offsets:
        findings.append(good("clocks", f"within {max(map(abs, offsets.values())) * 1e3:.1f} ms"))
    return [*findings, *(finding for report in reports for finding in _judge_node(report))]


def _judge_node(report: NodeReport) -> list[Finding]:
    findings = []
    if report.open_files < _LEAST_FILES:
        files = "`ulimit -n` of 4096 or more, for Ray and vLLM"
        findings.append(warn("open files", f"{report.open_files} on {report.node}", files))
    if report.shm_free_bytes < _LEAST_SHM_BYTES:
        free = f"{report.shm_free_bytes / 1e9:.2g} GB free in /dev/shm on {report.node}"
        findings.append(warn("shared memory", free, "data loaders and NCCL want a gigabyte there"))
    left = "a run would leave the node (docs/health.md); report it"
    wrong = [one for one in report.gpus if one.verdict == "bad"]
    findings += [bad(one.topic, f"{report.node}: {one.found}", left) for one in wrong]
    if report.local is not None:
        found = judge_place("checkpoint.local_dir", report.local, must_outlive_node=False)
        findings += [msgspec.structs.replace(f, found=f"{report.node}: {f.found}") for f in found]
    return findings


def _alike(topic: str, said: dict[str, str]) -> Finding:
    # The value that most of them have is taken for the intended one.
    most, count = Counter(said.values()).most_common(1)[0]
    if count == len(said):
        return good(topic, f"{most} on {'all ' if count > 1 else ''}{count} node{'s' if count > 1 else ''}")
    others = "; ".join(f"{node}: {text}" for node, text in said.items() if text != most)
    return bad(
        topic,
        f"{most} on {count} of {len(said)} nodes; {others}",
        "results would differ from node to node: the same environment everywhere (--exclude the others meanwhile)",
    )


def judge_drill(record: DrillRecord) -> list[Finding]:
    """Returns the findings of a fire drill."""
    if record.warning_to_batch_s is None:
        missed = "`scancel -b -s USR1` did not reach the batch process"
        findings = [bad("warning", missed, f"emergency saves {_NO_WARNING}")]
    else:
        reached = f"USR1 reached the batch process after {record.warning_to_batch_s:.1f} s"
        findings = [good("warning", reached)]
    if record.warning_to_steps:
        nothing = "nothing: ranks ignore it here; other programs would die"
        findings.append(warn("warning", "USR1 reached the steps as well", nothing))
    steps, batch = (
        ", ".join(names) or "nothing" for names in (record.signals_to_steps, record.signals_to_batch)
    )
    # Told without a verdict: which processes get which signal differs from site to site, and slurm.conf does not say.
    findings.append(good("end", f"{record.how}: steps got {steps}; the batch process got {batch}"))
    if record.kill_after_s is not None:
        text = f"processes that ignored TERM lived {record.kill_after_s:.0f} s more (KillWait {record.kill_wait_s} s)"
        early = record.kill_after_s < record.kill_wait_s / 2
        as_long = "a save has that long after TERM, whatever slurm.conf says"
        findings.append(warn("KILL", text, as_long) if early else good("KILL", text))
    if record.again_after_s is None:
        waited = f"{record.how}: the job did not run again while we waited"
        return [*findings, bad("again", waited, _NOT_AGAIN)]
    # About two minutes are Slurm's own delay, which a run's daemon avoids.
    slow = record.again_after_s > _SLOW_START_S
    again = f"it ran again {record.again_after_s:.0f} s after the {record.how}"
    return [*findings, good("again", again, _OWN_REQUEUE if slow else "")]
