"""Asks Slurm and the storage for what a plan needs. What does not answer is told in a line, and assumed."""

import os
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

from verl_slurm.base.errors import NotFound, SlurmMissing
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checks.cluster_rules import expected_save, kill_wait_s, lost_after_s
from verl_slurm.checks.storage_probe import PlaceReport, probe_place
from verl_slurm.config.schema import RunConfig
from verl_slurm.plan.plan_inputs import KnownValue, assumed
from verl_slurm.slurm.batch import asked_partition
from verl_slurm.slurm.slurm_client import SlurmClient
from verl_slurm.submit.checks.run_directory import checkpoint_size

_DAYS = 30
_DAY_S = 86400.0
# Of fewer past jobs nothing follows.
_FEWEST_STARTS = 3
# Bytes of a checkpoint below which the storage's speed is not what counts, and is not tried.
_WORTH_TRYING = 64 << 20


async def from_slurm(config: RunConfig, client: SlurmClient) -> tuple[dict[str, KnownValue], list[str]]:
    """Returns what Slurm tells, by the names of `plan_inputs.LABELS`, and what it did not tell, a line each."""
    try:
        conf = await client.config()
        name = asked_partition(os.environ, config)
        first = name.partition(",")[0] if name else None
        partition = await (client.partition(first) if first else client.default_partition())
    except (SlurmMissing, NotFound) as error:
        return {}, [f"Slurm was not asked: {error.one_line()}"]
    found: dict[str, KnownValue] = {}
    notes: list[str] = []
    if name and name != first:
        notes.append(f"of the partitions {name} the first one is looked at: {first}")
    lost = lost_after_s(conf)
    if lost is not None and fmean(lost) < config.daemon.start_timeout_s:
        found["lost_node_s"] = KnownValue(fmean(lost), "Slurm", "SlurmdTimeout, two to three times")
    mode = partition.preempt_mode.upper()
    preempts = not conf.get("PreemptType", "preempt/none").endswith("none") and mode.split(",")[0] != "OFF"
    if not preempts:
        found["notices_per_day"] = KnownValue(
            0.0, "Slurm", f"nothing preempts jobs of partition {partition.name}"
        )
    elif conf.get("PreemptType", "").endswith("qos"):
        notes.append(
            "preempt/qos: the grace time is that of the QOS, which is not looked at; --grace-seconds tells"
        )
    else:
        grace = partition.grace_s
        basis = f"GraceTime of {partition.name}" if grace else "KillWait; GraceTime is 0"
        found["warning_s"] = KnownValue(float(grace or kill_wait_s(conf)), "Slurm", basis)
    try:
        past = await client.past_jobs(partition.name, _DAYS)
    except (SlurmMissing, NotFound) as error:
        return found, [*notes, f"no accounting: {error.one_line()}"]
    starts, lived = len(past.waits_s), f"your jobs in {partition.name}, last {_DAYS} days"
    if starts >= _FEWEST_STARTS:
        found["queue_s"] = KnownValue(
            median(past.waits_s), "Slurm", f"sacct: {starts} starts of {lived}", past.waits_s
        )
    if preempts and past.ran_s >= _DAY_S / 24:
        rate = past.thrown_out / (past.ran_s / _DAY_S)
        basis = f"sacct: {past.thrown_out} in {past.ran_s / 3600:.3g} h of {lived}"
        found["notices_per_day"] = KnownValue(rate, "Slurm", basis)
    return found, notes


def from_storage(
    config: RunConfig, paths: RunPaths, probe: Callable[[Path], PlaceReport] = probe_place
) -> tuple[dict[str, KnownValue], list[str]]:
    """Returns the size of a checkpoint, and how long its save takes at the speed that the storage shows now.

    Paths are absolute. `probe` writes 64 MiB to the place of the checkpoints, and removes them.
    """
    size = checkpoint_size(config, [info for info in list_checkpoints(paths) if info.kind == "committed"])
    if size is None:
        return {}, []
    num_bytes, _, basis = size
    found = {"state_bytes": KnownValue(float(num_bytes), "doctor", basis)}
    if num_bytes < _WORTH_TRYING:
        return found | {"durable_s": assumed(1.0, "small: the speed of storage hardly matters")}, []
    report = probe(paths.checkpoints)
    if report.problem:
        return found, [f"the storage was not tried: {report.problem}"]
    save = expected_save(num_bytes, report.write_bytes_per_s)
    return found | {"durable_s": KnownValue(save.seconds, "doctor", f"{save.basis}, by one node")}, []
