"""Judges Slurm's configuration for a run: from scontrol's output to findings. Pure.

The rules rest on measurements with 22.05.8 and on the manual pages slurm.conf(5) and sbatch(1):

* a preemption leaves GraceTime, then KillWait between TERM and KILL; with GraceTime 0 it is KillWait alone;
* PreemptMode=CANCEL ends the job, unless it asks for its requeue; the daemon does that in the grace time, or in
  KillWait if there is no grace time;
* the end of a preemption or of a time limit comes up to 30 s late, never early: nothing here counts on that;
* `--signal=B:USR1@N` may come up to 60 s early, never late;
* slurmctld notices a lost node after 2 to 3 times SlurmdTimeout.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

from verl_slurm.checks import Finding, good, warn
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.history import History
from verl_slurm.slurm.facts import PartitionFacts

_OLDEST = (22, 5)
_LEAST_JOB_AGE_S = 60
# A guest saves at no other time (`loops.reach`).
_END_OF_STEP = "the end of a step and a save"
_SMALL_STEPS = "keep checkpoint.every_steps small (verl: verl.trainer.save_freq), and steps short"


class SaveTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a save, from the safe point until it is on shared storage."""

    seconds: float
    basis: str
    """The source of the number, in words."""


def judge_cluster(
    conf: Mapping[str, str],
    partition: PartitionFacts,
    config: RunConfig,
    save: SaveTime | None,
    others: Sequence[PartitionFacts] = (),
) -> list[Finding]:
    """Returns all findings that need no job.

    Args:
        conf: `scontrol show config`.
        save: the duration of a save; None: not known yet.
        others: partitions of which Slurm may take one instead.
    """
    findings = [_version(conf), _requeue(conf, partition)]
    findings += judge_deadlines(conf, partition, config, save, others)
    findings += [_lost_node(conf), _memory_of_jobs(conf), _neighbours(config)]
    return findings


def judge_deadlines(
    conf: Mapping[str, str],
    partition: PartitionFacts,
    config: RunConfig,
    save: SaveTime | None,
    others: Sequence[PartitionFacts] = (),
) -> list[Finding]:
    """Judges whether a save fits between a warning and the end, at a preemption and at the time limit."""
    each = [(facts.name, _preemption(conf, facts, config, save)) for facts in (partition, *others)]
    if others:
        each = [
            (name, msgspec.structs.replace(found, found=f"partition {name}: {found.found}"))
            for name, found in each
        ]
    return [*(found for _, found in each), _time_limit(conf, config, save)]


def _version(conf: Mapping[str, str]) -> Finding:
    text = conf.get("SLURM_VERSION", "")
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        return warn(
            "version", f"SLURM_VERSION is {text or 'not shown'}", "report it with `scontrol show config`"
        )
    if (int(match[1]), int(match[2])) < _OLDEST:
        return warn(
            "version", f"Slurm {text}", "tested from 22.05 on; try `verl-slurm doctor --fire-drill` first"
        )
    return good("version", f"Slurm {text}")


def _requeue(conf: Mapping[str, str], partition: PartitionFacts) -> Finding:
    # submit asks for --requeue, which counts against JobRequeue=0.
    if conf.get("JobRequeue", "1") != "1":
        return good(
            "requeue", "JobRequeue=0: jobs are not requeued unless they ask", "submit asks: --requeue"
        )
    return good("requeue", f"allowed; partition {partition.name}")


def _preemption(
    conf: Mapping[str, str], partition: PartitionFacts, config: RunConfig, save: SaveTime | None
) -> Finding:
    mode = partition.preempt_mode.upper()
    # First: with preempt/qos the partition's mode and grace time do not count.
    if conf.get("PreemptType", "").endswith("qos"):
        return warn(
            "preemption",
            "PreemptType=preempt/qos: mode and grace time are those of the QOS, which is not looked at here",
            "see `sacctmgr show qos format=name,preempt,preemptmode,gracetime`; a fire drill shows what happens",
        )
    # The mode may have a second word, as in `SUSPEND,GANG`.
    if conf.get("PreemptType", "preempt/none").endswith("none") or mode.split(",")[0] == "OFF":
        return good("preemption", f"nothing preempts jobs of partition {partition.name}")
    # Looked for in any place: `SUSPEND,GANG`, and from 25.05 `PRIORITY` beside the mode.
    if "SUSPEND" in mode:
        return good(
            "preemption",
            "PreemptMode=SUSPEND: a preempted job stands still and goes on where it stood",
            "nothing is saved for it; see that checkpoint.every_steps is not too far for a node that dies meanwhile",
        )
    kill_wait = kill_wait_s(conf)
    grace, margin = partition.grace_s, config.daemon.save_margin_s
    time = f"GraceTime {grace} s" if grace else f"GraceTime 0, KillWait {kill_wait} s"
    found = f"PreemptMode={mode}, {time}"
    # What comes after a grace time, KillWait and up to 30 s of delay, is not counted on.
    available = usable_s(grace or kill_wait, margin)
    if available <= 0:
        return warn(
            "preemption",
            f"{found}: daemon.save_margin_s={margin:g} leaves no time for a save",
            "a smaller daemon.save_margin_s; until then a preemption goes back to the newest periodic checkpoint",
        )
    # A guest saves at the end of a step alone, so the step has to fit in as well.
    guest = config.trainer.is_guest
    # A run that has not saved yet gets no verdict, but what is known of the time.
    if save is None:
        if grace:
            what = "a step and a save take" if guest else "a save takes"
            return good("preemption", f"{found}; what {what} will be known after the first")
        return warn(
            "preemption",
            f"{found}: no time but that one",
            _SMALL_STEPS if guest else "keep checkpoint.every_steps small; the ledger keeps rollouts",
        )
    what = _END_OF_STEP if guest else "a save"
    if save.seconds > available:
        return warn(
            "preemption",
            f"{found}: {available:.0f} s for {what} of {save.seconds:.1f} s ({save.basis}): "
            + ("not always in time" if guest else "it will not be done"),
            f"where it is not, the job is requeued at once and goes back to the newest checkpoint: {_SMALL_STEPS}"
            if guest
            else "a preemption then goes back to the newest periodic checkpoint and replays the ledger: make "
            "checkpoint.every_steps small, or use faster storage (checkpoint.local_dir)",
        )
    return good("preemption", f"{found}; {what} takes {save.seconds:.1f} s ({save.basis})")


def _time_limit(conf: Mapping[str, str], config: RunConfig, save: SaveTime | None) -> Finding:
    # The warning may come up to 60 s early and never late (sbatch(1)): the lead is what can be counted on.
    lead, limit = config.slurm.signal_lead_s, config.slurm.time_limit_min * 60
    margin = config.daemon.save_margin_s
    if save is not None and save.seconds > usable_s(lead, margin):
        what = _END_OF_STEP if config.trainer.is_guest else "a save"
        return warn(
            "time limit",
            f"the warning comes {lead} s before it; {what} takes {save.seconds:.1f} s ({save.basis})",
            f"slurm.signal_lead_s={advised_lead_s(save.seconds, margin)}",
        )
    return good("time limit", f"the warning comes {lead} s before the limit of {limit // 60} min")


def _lost_node(conf: Mapping[str, str]) -> Finding:
    after = lost_after_s(conf)
    # slurm.conf(5): 0 means never.
    if after is None:
        return warn(
            "lost node",
            "SlurmdTimeout=0: Slurm never gives a node up",
            "cancel and submit by hand when one dies",
        )
    return good(
        # 27 and 30 s with SlurmdTimeout=10 (22.05.8).
        "lost node",
        f"Slurm gives one up after {after[0]} to {after[1]} s (SlurmdTimeout {after[0] // 2} s)",
    )


def _memory_of_jobs(conf: Mapping[str, str]) -> Finding:
    age = _seconds(conf, "MinJobAge", 300)
    # 0 means that no ended job is forgotten.
    if 0 < age < _LEAST_JOB_AGE_S:
        return warn(
            "memory of jobs",
            f"Slurm forgets an ended job after {age} s (MinJobAge)",
            "`verl-slurm status` then tells the end from the run's own journal",
        )
    return good("memory of jobs", f"MinJobAge {age} s")


def _neighbours(config: RunConfig) -> Finding:
    if config.slurm.extra.get("exclusive"):
        return good("neighbours", "slurm.extra.exclusive: no other job is on the job's nodes")
    # What other users could reach differs by backend: docs/security.md, "Left open".
    reached = ""
    if config.trainer.on_ray:
        reached = (
            "; ports of Ray, of verl's reward and rollout servers (HTTP) and of NCCL are open there. Ray asks for a "
            "token, the servers and NCCL do not"
        )
    elif config.distributed.device == "cuda":
        reached = ", and NCCL does not ask who connects to its sockets"
    if reached:
        remedy = (
            "slurm.extra: {exclusive: true}, or a partition that gives out whole nodes (docs/security.md)"
        )
        return warn("neighbours", f"other users may share the job's nodes{reached}", remedy)
    return good("neighbours", "other users may share the job's nodes; each rank proves itself to its peers")


def usable_s(warning_s: float, margin_s: float) -> float:
    """Returns the seconds of a warning that a save may take, with `daemon.save_margin_s`."""
    return warning_s - margin_s


def advised_lead_s(save_s: float, margin_s: float) -> int:
    """Returns the `slurm.signal_lead_s` that is safe for such a save: twice what it needs."""
    return 2 * (int(save_s + margin_s) + 1)


def lost_after_s(conf: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns the shortest and the longest time after which Slurm gives up a lost node; None: never."""
    timeout = _seconds(conf, "SlurmdTimeout", 300)
    return (2 * timeout, 3 * timeout) if timeout else None


def kill_wait_s(conf: Mapping[str, str]) -> int:
    """Returns the seconds between TERM and KILL."""
    return _seconds(conf, "KillWait", 30)


def _seconds(conf: Mapping[str, str], name: str, default: int) -> int:
    # `KillWait = 30 sec`
    match = re.match(r"\d+", conf.get(name, ""))
    return int(match[0]) if match else default


# Saves looked at: storage today differs from storage a week ago.
_LAST = 8


def measured_save(history: History) -> SaveTime | None:
    """Returns the slowest of a run's last saves; None: it has not saved yet."""
    seconds = [seconds for _, seconds in history.measured_saves(_LAST)]
    if not seconds:
        return None
    # The slowest, not the mean: a save has to be in time at each preemption.
    return SaveTime(seconds=max(seconds), basis=f"the slowest of this run's last {len(seconds)} saves")


def expected_save(num_bytes: int, bytes_per_s: float) -> SaveTime:
    """Returns the expected time of a save at a measured write speed, fsync included."""
    size, speed = num_bytes / 1e9, bytes_per_s / 1e6
    return SaveTime(
        seconds=num_bytes / bytes_per_s, basis=f"{size:.3g} GB at {speed:.0f} MB/s, as measured just now"
    )
