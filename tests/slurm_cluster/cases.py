"""The cases of the campaign: both algorithms, both rollout engines, four shapes. Sixteen in all.

Called by: tests/slurm_cluster/test_campaign.py, tests/benchmarks/test_campaign.py.
"""

__all__ = ["CASES"]

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
