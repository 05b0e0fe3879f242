"""GRPO and PPO with verl on CPUs, as a configuration of ours: a few sums, a few thousand weights, seconds a step."""

import random
from pathlib import Path
from typing import Any

MODULES = "tests.verl.cpu_platform,tests.fakes.verl_cpu_rollout"


def make_prompts(path: Path, num_rows: int = 64) -> Path:
    """As verl's RL data set wants them, in a parquet file."""
    import pandas as pd

    draw = random.Random(0)
    rows = []
    for index in range(num_rows):
        a, b = draw.randint(0, 50), draw.randint(0, 50)
        rows.append(
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"{a}+{b}="}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"index": index, "split": "train"},
            }
        )
    pd.DataFrame(rows).to_parquet(path)
    return path


def grpo_words(model: Path, prompts: Path, steps: int) -> dict[str, Any]:
    """The section `verl`."""
    reward = Path(__file__).parent / "sums_reward.py"
    return {
        "algorithm.adv_estimator": "grpo",
        "trainer": {
            "device": "cpu",
            "logger": ["console"],
            "val_before_train": False,
            "test_freq": -1,
            "total_epochs": 10,
            "total_training_steps": steps,
        },
        "data": {
            "train_files": str(prompts),
            "val_files": str(prompts),
            "train_batch_size": 8,
            "max_prompt_length": 32,
            "max_response_length": 8,
            "dataloader_num_workers": 0,
            "shuffle": True,
            "seed": 1,
        },
        "actor_rollout_ref": {
            "model": {
                "path": str(model),
                "use_remove_padding": False,
                "+override_config": {"attn_implementation": "sdpa"},
            },
            "actor": {
                "strategy": "fsdp2",
                "use_torch_compile": False,
                "fsdp_config.dtype": "float32",
                "ppo_mini_batch_size": 8,
                "ppo_micro_batch_size_per_gpu": 4,
                "use_dynamic_bsz": False,
                "optim.lr": 1e-3,
            },
            "rollout": {
                "name": "hf_cpu",
                "tensor_model_parallel_size": 1,
                "n": 4,
                "log_prob_micro_batch_size_per_gpu": 4,
                "n_gpus_per_node": 1,
                "agent.num_workers": 1,
                "calculate_log_probs": True,
            },
        },
        # verl starts eight, each a process that imports torch.
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "reward": {"num_workers": 1, "custom_reward_function.path": str(reward)},
    }


def ppo_words(model: Path, critic: Path, prompts: Path, steps: int) -> dict[str, Any]:
    """The section `verl` of the same with PPO: GAE, and a critic."""
    return grpo_words(model, prompts, steps) | {
        "algorithm.adv_estimator": "gae",
        "critic": {
            "strategy": "fsdp2",
            "model": {
                "path": str(critic),
                "use_remove_padding": False,
                "+override_config": {"attn_implementation": "sdpa"},
            },
            "fsdp.use_torch_compile": False,
            "fsdp.dtype": "float32",
            "ppo_micro_batch_size_per_gpu": 4,
            "optim.lr": 1e-3,
        },
    }


def write_config(path: Path, root: Path, section: dict[str, Any], **daemon: Any) -> Path:
    """Two nodes with a rank each."""
    import yaml

    settings = {
        "name": "grpo",
        "run_dir": str(root),
        "trainer": {"backend": "verl", "entry": "ppo"},
        "verl": section,
        "distributed": {"dp_size": 2, "nodes": 2, "device": "cpu", "threads_per_rank": 1},
        "checkpoint": {"every_steps": 2, "keep_last": 3},
        "slurm": {"time_limit_min": 20},
        "daemon": {"backoff_s": 0.2, "requeue_delay_s": 2, **daemon},
    }
    path.write_text(yaml.safe_dump(settings))
    return path
