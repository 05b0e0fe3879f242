"""Judges the reports of a job's nodes, and the records of a fire drill. Pure."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from verl_slurm.base.one_line import counted
from verl_slurm.doctor.node_probe import NodeReport
from verl_slurm.doctor.storage_probe import judge_place
from verl_slurm.health import Finding, bad, good, warn

_SKEW_S = 1.0
_LEAST_FILES = 4096
_LEAST_SHM_BYTES = 1 << 30
_SLOW_START_S = 60.0
_OWN_REQUEUE = (
    "Slurm's own requeue waits for its credentials to expire (AuthInfo cred_expire, 120 s); a run's daemon asks "
    "first, in the grace time, and waits daemon.requeue_delay_s instead"
)


def judge_nodes(reports: Sequence[NodeReport]) -> list[Finding]:
    """Judges whether all nodes are alike, reach one another, and agree about the time.

    Args:
        reports: one per node, node 0 first.
    """
    # ---- the same software on all nodes
    findings = [
        _alike("python", {r.node: r.python for r in reports}),
        _alike("packages", {r.node: ", ".join(f"{k} {v}" for k, v in r.packages.items()) for r in reports}),
        _alike("driver", {r.node: r.driver or "no NVIDIA driver" for r in reports}),
        _alike("GPUs", {r.node: str(r.num_gpus) for r in reports}),
    ]
    findings += [
        bad(
            "ports",
            f"{report.node} cannot reach {reports[0].node}: {report.problem}",
            "the job's nodes have to reach one another on ports that are not known beforehand: ask for that",
        )
        for report in reports
        if report.problem
    ]
    # ---- nodes that reach one another. Node 0 tells the time, so it has no offset of its own.
    offsets = {r.node: r.clock_offset_s for r in reports if r.clock_offset_s is not None}
    if offsets and not any(r.problem for r in reports):
        findings.append(good("ports", f"{counted(len(offsets) + 1, 'node')} reach one another"))
    far = {node: offset for node, offset in offsets.items() if abs(offset) > _SKEW_S}
    # A warning, no refusal: deadlines are taken from slurmctld's clock, and claims by their numbers.
    if far:
        told = ", ".join(f"{node} {offset:+.1f} s" for node, offset in far.items())
        findings.append(
            warn("clocks", f"apart: {told}", "nothing here depends on it, but logs will; have NTP mended")
        )
    elif offsets:
        most = max(abs(offset) for offset in offsets.values())
        findings.append(good("clocks", f"within {most * 1e3:.1f} ms"))
    for report in reports:
        # ---- each node's limits and its disk
        if report.open_files < _LEAST_FILES:
            findings.append(
                warn(
                    "open files",
                    f"{report.open_files} on {report.node}",
                    "`ulimit -n` of 4096 or more, for Ray and vLLM",
                )
            )
        if report.shm_free_bytes < _LEAST_SHM_BYTES:
            free = report.shm_free_bytes / 1e9
            findings.append(
                warn(
                    "shared memory",
                    f"{free:.2g} GB free in /dev/shm on {report.node}",
                    "data loaders and NCCL want a gigabyte there",
                )
            )
        findings += [
            bad(
                one.topic,
                f"{report.node}: {one.found}",
                "a run would leave the node (docs/health.md); report it",
            )
            for one in report.gpus
            if one.verdict == "bad"
        ]
        if report.local is not None:
            found = judge_place("checkpoint.local_dir", report.local, must_outlive_node=False)
            findings += [msgspec.structs.replace(f, found=f"{report.node}: {f.found}") for f in found]
    return findings


def _alike(topic: str, said: dict[str, str]) -> Finding:
    """Compares the nodes; the value that most of them have is taken for the intended one."""
    most, count = Counter(said.values()).most_common(1)[0]
    if count == len(said):
        return good(topic, f"{most} on {'all ' if count > 1 else ''}{count} node{'s' if count > 1 else ''}")
    others = "; ".join(f"{node}: {text}" for node, text in said.items() if text != most)
    return bad(
        topic,
        f"{most} on {count} of {len(said)} nodes; {others}",
        "results would differ from node to node: the same environment everywhere (--exclude the others meanwhile)",
    )


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


def judge_drill(record: DrillRecord) -> list[Finding]:
    """Returns the findings of a fire drill."""
    findings = []
    if record.warning_to_batch_s is None:
        findings.append(
            bad(
                "warning",
                "`scancel -b -s USR1` did not reach the batch process",
                "emergency saves by a time limit or an operator do not work here: report your Slurm version",
            )
        )
    else:
        findings.append(
            good("warning", f"USR1 reached the batch process after {record.warning_to_batch_s:.1f} s")
        )
    if record.warning_to_steps:
        findings.append(
            warn(
                "warning",
                "USR1 reached the steps as well",
                "nothing: ranks ignore it here; other programs would die",
            )
        )
    steps, batch = (
        ", ".join(record.signals_to_steps) or "nothing",
        ", ".join(record.signals_to_batch) or "nothing",
    )
    told = f"{record.how}: steps got {steps}; the batch process got {batch}"
    # Told without a verdict: which processes get which signal differs from site to site, and slurm.conf does not say.
    findings.append(good("end", told))
    if record.kill_after_s is not None:
        text = f"processes that ignored TERM lived {record.kill_after_s:.0f} s more (KillWait {record.kill_wait_s} s)"
        if record.kill_after_s < record.kill_wait_s / 2:
            findings.append(warn("KILL", text, "a save has that long after TERM, whatever slurm.conf says"))
        else:
            findings.append(good("KILL", text))
    if record.again_after_s is None:
        findings.append(
            bad(
                "again",
                f"{record.how}: the job did not run again while we waited",
                "see `squeue --me`: is the partition full, or requeueing forbidden (scontrol show job: Requeue)?",
            )
        )
    else:
        told = f"it ran again {record.again_after_s:.0f} s after the {record.how}"
        # About two minutes are Slurm's own delay, which a run's daemon avoids.
        slow = record.again_after_s > _SLOW_START_S
        findings.append(good("again", told, _OWN_REQUEUE if slow else ""))
    return findings
