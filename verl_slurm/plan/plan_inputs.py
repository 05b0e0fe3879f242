"""All that a plan rests on, each value with its source; and the model of a run that follows from them. Pure.

An assumption is a measurement of this project on one machine (docs/figures.md, docs/gpu.md), or of Kokolis et al.,
"Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (HPCA 2025, arXiv 2410.21680), where a node
failed 6.50 times in a thousand days (RSC-1), or a round number for what a cluster alone can tell.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import msgspec

from verl_slurm.checkpoint.decide.cadence import Costs, decide, plan_interval
from verl_slurm.config.schema import CheckpointConfig, RunConfig
from verl_slurm.plan.simulate import RunModel, Schedule

Source = Literal["measured", "doctor", "Slurm", "configuration", "given", "derived", "assumed"]

_DAY_S = 86400.0


class KnownValue(msgspec.Struct, frozen=True):
    """A value, and where it is from."""

    value: float
    source: Source
    basis: str = ""
    samples: tuple[float, ...] = ()
    """All that was seen, where the spread matters; the value is their median."""


LABELS: dict[str, tuple[str, str]] = {
    "steps": ("steps", ""),
    "nodes": ("nodes that train", ""),
    "spare_nodes": ("spare nodes", ""),
    "step_s": ("a step", "s"),
    "warm_up_s": ("the first step of a start takes longer by", "s"),
    "sampling_share": ("share of a step that samples", "share"),
    "replay_cost": ("of its time, sampling done again takes", "share"),
    "state_bytes": ("a checkpoint", "bytes"),
    "save_s": ("a save takes from the training", "s"),
    "durable_s": ("a save is durable after", "s"),
    "local_durable_s": ("the same on the nodes' own disks", "s"),
    "emergency_s": ("from a warning to a verified save", "s"),
    "warning_s": ("warning of a preemption", "s"),
    "lead_s": ("warning of the time limit", "s"),
    "margin_s": ("of which the daemon keeps back", "s"),
    "limit_s": ("time limit", "s"),
    "leave_s": ("from that save to the end of the job", "s"),
    "queue_s": ("wait in the queue", "s"),
    "first_start_s": ("the first start", "s"),
    "start_s": ("a start, to the first safe point", "s"),
    "in_place_s": ("a restart in place", "s"),
    "standby_s": ("the same with ranks that stand by", "s"),
    "standby_after_s": ("which they do after", "s"),
    "spare_s": ("a restart on a spare node", "s"),
    "lost_node_s": ("a lost node without a spare one: to the end of the job", "s"),
    "finish_s": ("from the last step to the end", "s"),
    "notices_per_day": ("preemptions of the job", "per day"),
    "crashes_per_day": ("crashes of the ranks", "per day"),
    "losses_per_node_day": ("losses of a node", "per node and day"),
}
"""Input -> what it is, and its unit."""

Inputs = dict[str, KnownValue]
"""All inputs, by the names of `LABELS` and in its order and units."""


def assumed(value: float, basis: str) -> KnownValue:
    return KnownValue(value, "assumed", basis)


def complete(known: Mapping[str, KnownValue], config: RunConfig) -> Inputs:
    """Adds what the configuration says, what follows from what is known, and what has to be assumed; `known` wins."""
    found = _configured(config) | dict(known)

    def say(name: str, otherwise: KnownValue) -> KnownValue:
        return found.setdefault(name, otherwise)

    say("step_s", assumed(120.0, "--step-seconds, or the plan of a run of some steps, tells"))
    say("warm_up_s", assumed(0.0, ""))
    say("sampling_share", assumed(0.5, "0.40 to 0.47 on one H100 with a small model"))
    ledger = config.trainer.backend in ("native", "verl")
    say(
        "replay_cost",
        assumed(0.05, "") if ledger else KnownValue(1.0, "configuration", "this loop has no ledger"),
    )
    say("state_bytes", assumed(0.0, "not known before the first save"))
    durable = say("durable_s", assumed(30.0, "the run has not saved yet, and its size is not known"))
    twice = "writing as long as a save, reading back as long again"
    say("save_s", assumed(0.1 * durable.value, "a tenth of the time until it is durable"))
    say("emergency_s", _derived(2.0 * durable.value + 1.0, durable, twice))
    say("local_durable_s", _local(found["state_bytes"], found["nodes"], durable, config))
    say("warning_s", assumed(30.0, "the grace time of the partition"))
    leave = say("leave_s", assumed(1.0, ""))
    say("queue_s", assumed(600.0, "--queue-wait, or sacct, tells"))
    start = say("start_s", assumed(60.0 + durable.value, "imports, and loading as long as a save"))
    say("first_start_s", _derived(start.value, start, "as any start"))
    say("in_place_s", _derived(start.value, start, "as a start"))
    say("standby_s", assumed(0.5 * found["in_place_s"].value, "half of a restart in place"))
    say("spare_s", _derived(found["in_place_s"].value, found["in_place_s"], "as a restart in place"))
    limit_s = config.daemon.start_timeout_s
    say("lost_node_s", assumed(limit_s, "daemon.start_timeout_s: the ranks are tried once more"))
    say(
        "finish_s",
        _derived(found["emergency_s"].value + leave.value, durable, "a verified save, and the job's end"),
    )
    say("notices_per_day", assumed(1.0, "--preemptions-per-day, or sacct, tells"))
    say(
        "crashes_per_day",
        KnownValue(24.0 / config.checkpoint.expected_mtbi_h, "configuration", "checkpoint.expected_mtbi_h"),
    )
    say("losses_per_node_day", assumed(0.0065, "Kokolis et al. 2025, 6.50 in a thousand node days"))
    return {name: found[name] for name in LABELS}


def _configured(config: RunConfig) -> dict[str, KnownValue]:
    daemon, slurm = config.daemon, config.slurm
    standby_s = math.inf if daemon.standby_after_s is None else daemon.standby_after_s
    said: dict[str, tuple[float, str]] = {
        "nodes": (config.distributed.nodes, "distributed.nodes"),
        "spare_nodes": (slurm.spare_nodes, "slurm.spare_nodes"),
        "lead_s": (slurm.signal_lead_s, "slurm.signal_lead_s"),
        "margin_s": (daemon.save_margin_s, "daemon.save_margin_s"),
        "limit_s": (slurm.time_limit_min * 60, "slurm.time_limit_min"),
        "standby_after_s": (standby_s, "daemon.standby_after_s"),
    }
    found = {name: KnownValue(float(value), "configuration", key) for name, (value, key) in said.items()}
    # A guest's number of steps is known to the guest alone.
    if config.trainer.is_guest:
        found["steps"] = assumed(1000.0, "--steps tells")
    else:
        found["steps"] = KnownValue(float(config.train.steps), "configuration", "train.steps")
    return found


_LOCAL_BYTES_PER_S = 1.8e9


def _local(state: KnownValue, nodes: KnownValue, durable: KnownValue, config: RunConfig) -> KnownValue:
    if not state.value:
        return assumed(durable.value, "as on shared storage: the size of a checkpoint is not known")
    seconds = state.value / nodes.value / _LOCAL_BYTES_PER_S
    there = "" if config.checkpoint.local_dir else ", if there were any"
    return assumed(seconds, f"1.8 GB/s on each node, as measured on one{there}")


def _derived(value: float, origin: KnownValue, basis: str) -> KnownValue:
    # What follows from an assumption is one.
    return KnownValue(value, "assumed" if origin.source == "assumed" else "derived", basis)


def model_of(inputs: Inputs, config: RunConfig) -> RunModel:
    """Returns the model of the run as it is configured."""
    plain: dict[str, Any] = {
        name: inputs[name].value
        for name in RunModel.__struct_fields__
        if name in LABELS and name not in ("queue_s", "local_durable_s")
    }
    whole = {name: int(plain[name]) for name in ("steps", "nodes", "spare_nodes")}
    return RunModel(
        **plain | whole,
        queue_s=inputs["queue_s"].samples or (inputs["queue_s"].value,),
        local_durable_s=inputs["local_durable_s"].value if config.checkpoint.local_dir else None,
        # Nodes that were preempted are somebody else's now: whether they come back is a toss.
        same_nodes=0.5 if config.checkpoint.local_dir else 0.0,
        at_step_end=config.trainer.is_guest,
        keeps_step_before=config.trainer.backend == "verl" and config.trainer.entry == "ppo",
        notices_per_s=inputs["notices_per_day"].value / _DAY_S,
        crashes_per_s=inputs["crashes_per_day"].value / _DAY_S,
        losses_per_node_s=inputs["losses_per_node_day"].value / _DAY_S,
    )


def costs_of(model: RunModel) -> Costs:
    """Returns the costs by which `young_daly` plans: those that a training would measure in the long run."""
    lossy = model.crashes_per_s + model.losses_per_node_s * model.nodes
    # A notice whose save comes too late loses work like a crash.
    if not model.at_step_end and model.emergency_s > model.warning_s - model.margin_s:
        lossy += model.notices_per_s
    return Costs(
        step_s=model.step_s,
        save_s=model.save_s,
        durable_s=model.durable_s,
        mtbi_s=1.0 / lossy if lossy else math.inf,
    )


def cadence_of(config: RunConfig) -> CheckpointConfig:
    """Returns when the run saves."""
    own = config.checkpoint
    if not config.trainer.is_guest:
        return own
    said = config.verl.get("trainer.save_freq") if config.trainer.backend == "verl" else None
    # A guest saves at multiples of `every_steps`, verl at those of its own `save_freq`.
    every = said if isinstance(said, int) and said > 0 else own.every_steps
    return msgspec.structs.replace(own, cadence="fixed", every_steps=every, runtime_every_steps=every)


def interval_of(cadence: CheckpointConfig, model: RunModel, step: int = 1) -> tuple[int, str]:
    """Returns (steps between two saves, the reason), by the function that a training asks."""
    planned = plan_interval(cadence, step=step, costs=costs_of(model))
    return planned.steps, planned.reason


def schedule_of(cadence: CheckpointConfig, model: RunModel) -> Schedule:
    """Returns when saves are due, by the functions that a training asks at the end of each step."""
    costs = costs_of(model)
    constant = None if cadence.cadence == "adaptive" else plan_interval(cadence, step=1, costs=costs)

    # Kept: the same answer for each of some hundred simulations.
    @cache
    def next_due(last: int) -> int:
        for step in range(last + 1, model.steps):
            due = decide(
                cadence,
                step=step,
                total_steps=model.steps,
                last_save=last,
                interval=constant or plan_interval(cadence, step=step, costs=costs),
                under_way=(step - last) * model.step_s < model.durable_s,
            )
            if due.save:
                return step
        return model.steps

    return next_due
