"""The cases of the campaign: both algorithms, both rollout engines, four shapes. Sixteen, and two more by their names.

Called by: tests/slurm_cluster/test_campaign.py, tests/benchmarks/test_campaign.py.
"""

from tests.harness import SMALL

_SHAPES: dict[str, tuple[str, ...]] = {
    "": (),  # (dp, tp, pp) = (2, 1, 1), as in configs/quickstart.yaml
    "-tp": ("distributed.dp_size=1", "distributed.tp_size=2"),
    # Four ranks: smaller batches, so that a step does not take the longer for it.
    "-2x2": ("distributed.dp_size=2", "distributed.tp_size=2", "train.batch_size_per_device=64"),
    # A pipeline of two wants two micro-batches to an update.
    "-pp": ("distributed.dp_size=1", "distributed.pp_size=2", "train.micro_batch_size_per_device=8"),
}
_ALGORITHMS: dict[str, tuple[str, ...]] = {
    "ppo": (),
    "grpo": ("train.algorithm=grpo", "rollout.samples_per_prompt=4"),
}
_ENGINES: dict[str, tuple[str, ...]] = {"": (), "-vllm": ("rollout.engine=vllm", "model.path=builtin:tiny32")}

CASES: dict[str, tuple[str, ...]] = {
    f"{algorithm}{engine}{shape}": (*_ALGORITHMS[algorithm], *_ENGINES[engine], *_SHAPES[shape])
    for engine in _ENGINES
    for algorithm in _ALGORITHMS
    for shape in _SHAPES
}
"""Name → what is set beside the campaign's own settings."""
ENVIRONMENT = "ppo-environment"
"""Its storage, its Slurm and its limits fail, in place of its processes."""
ELASTIC = "ppo-elastic"
"""Ends with other bits than its twin: sums over fewer ranks are made in another order."""
BY_NAME = {
    ENVIRONMENT: ("slurm.signal_lead_s=30",),
    "ppo-spares": ("slurm.spare_nodes=1", "daemon.standby_after_s=1"),
    ELASTIC: ("distributed.min_nodes=1", "daemon.standby_after_s=1"),
}
"""More of them, which `all` leaves out."""


def settings(case: str, steps: int) -> tuple[str, ...]:
    """Everything that a case sets in configs/quickstart.yaml."""
    return (
        *SMALL,
        f"train.steps={steps}",
        "train.batch_size_per_device=128",
        "checkpoint.every_steps=2",
        "checkpoint.runtime_every_steps=2",
        "daemon.crash_budget=1000",
        "daemon.hang_budget=1000",
        "daemon.node_budget=1000",
        "daemon.requeue_delay_s=1",
        "daemon.backoff_s=0.05",
        "daemon.no_progress_limit=1000",
        "daemon.start_timeout_s=900",
        "slurm.time_limit_min=1000",
        "checkpoint.keep_last=1000",  # nothing is pruned from the ledger, so that it can be counted at the end
        *(CASES | BY_NAME)[case],
    )
