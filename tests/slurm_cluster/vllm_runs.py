"""GRPO by verl with vLLM itself, both on the CPU, on the embedded Slurm: one rank, and a step of many tokens."""

import time
from collections.abc import Mapping
from pathlib import Path

import yaml

from tests.harness import LiveRun
from tests.processes import python_path
from tests.verl.grpo import MODULES, grpo_words, make_prompts, write_config
from tests.verl.tiny import make_model
from verl_slurm.runtime_state.ledger import records
from verl_slurm.runtime_state.token_log import Calls, token_paths
from verl_slurm.slurm.devcluster.cluster import DevCluster

PATIENCE_S = 600.0
SESSIONS = 32
"""Of a step."""
LINEARS = 9
"""Linear layers of the tiny model, before each of which the engine pauses (`tests.verl.cpu_vllm`)."""


def environment() -> Mapping[str, str]:
    """What such a run is submitted with."""
    return {
        "VERL_USE_EXTERNAL_MODULES": f"{MODULES},tests.verl.cpu_vllm",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **python_path(),
    }


def make_run(cluster: DevCluster, place: Path, *, length: int, **more: str) -> LiveRun:
    """A run of one step, not yet submitted.

    Args:
        length: tokens of each response: none ends earlier.
        more: further keys of verl's.
    """
    place.mkdir(exist_ok=True)
    # vLLM's kernels for the CPU want heads of 32 at least.
    model = make_model(place / "model", head_dim=32, most_positions=1024)
    section = grpo_words(model, make_prompts(place / "sums.parquet"), 1)
    section["data"] |= {"max_prompt_length": 64, "max_response_length": length}
    section["actor_rollout_ref"]["rollout"] |= {
        "name": "vllm",
        "dtype": "float32",
        "enforce_eager": True,
        # Without a GPU vLLM cannot give its memory back.
        "free_cache_engine": False,
        "+enable_sleep_mode": False,
        "max_model_len": 64 + length,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": SESSIONS,
        "gpu_memory_utilization": 0.1,
        "ignore_eos": True,
    }
    config = write_config(place / "grpo.yaml", place / "run", section | more)
    settings = yaml.safe_load(config.read_text())
    settings["distributed"] |= {"dp_size": 1, "nodes": 1}
    config.write_text(yaml.safe_dump(settings))
    return LiveRun(cluster, place / "run", config=str(config))


def logged(run: LiveRun) -> list[tuple[tuple[int, int, int], int, int]]:
    """Call, tokens before, and new tokens, in the order in which they were sampled."""
    found = []
    for _, said, _ in records(token_paths(run.paths), Calls, from_step=0):
        found += [(call[:3], call[4], call[5]) for call in said.calls]
    return found


def wait_for_tokens(run: LiveRun, of_each: float) -> None:
    """Until so many tokens of each response are logged, on average."""
    deadline = time.monotonic() + PATIENCE_S
    # Polls: no event tells of a line in an engine's log.
    while sum(count for _, _, count in logged(run)) < SESSIONS * of_each:
        assert time.monotonic() < deadline, run.story()
        time.sleep(0.05)
