"""Suggests the key that a user meant by a key that does not exist. Pure."""

import difflib
from collections.abc import Iterable

__all__ = ["nearest_keys"]

_FEWEST = 0.68
# Other tools' names that no edit distance leads from. The last part of a key is compared.
_ALIASES = {
    "adv_estimator": "train.algorithm",
    "batch_size": "train.batch_size_per_device",
    "beta": "train.kl_coef",
    "cpus": "slurm.cpus_per_node",
    "cpus_per_task": "slurm.cpus_per_node",
    "data_path": "data.root",
    "dataset": "data.root",
    "epochs": "train.steps",
    "grad_clip": "train.max_grad_norm",
    "gradient_checkpointing": "distributed.recompute",
    "gpus": "slurm.gpus_per_node",
    "gres": "slurm.gpus_per_node",
    "learning_rate": "train.actor_lr train.critic_lr",
    "lr": "train.actor_lr train.critic_lr",
    "max_response_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "train.steps",
    "max_tokens": "rollout.max_new_tokens",
    "mem": "slurm.mem_mb_per_node",
    "memory": "slurm.mem_mb_per_node",
    "model_name_or_path": "model.path",
    "nnodes": "distributed.nodes",
    "num_epochs": "train.steps",
    "num_generations": "rollout.samples_per_prompt",
    "num_nodes": "distributed.nodes",
    "num_train_epochs": "train.steps",
    "output_dir": "run_dir",
    "precision": "distributed.mixed_precision",
    "resume": "checkpoint.resume_from",
    "reward_model": "model.reward",
    "save_every": "checkpoint.every_steps",
    "save_freq": "checkpoint.every_steps",
    "save_steps": "checkpoint.every_steps",
    "scheduler": "train.lr_schedule",
    "time": "slurm.time_limit_min",
    "time_limit": "slurm.time_limit_min",
    "total_steps": "train.steps",
    "train_files": "data.root",
    "walltime": "slurm.time_limit_min",
    "warmup": "train.warmup_steps",
    "world_size": "distributed.dp_size",
}


def nearest_keys(wanted: str, keys: Iterable[str], sections: Iterable[str]) -> list[str]:
    """Returns at most two keys or sections, the likeliest first; empty if nothing is near.

    The commonest slip is a right name in the wrong section, then another tool's name, then a typing error. Only the
    last parts are compared: a section that two keys share says nothing about what was meant.
    """
    known = list(keys)
    section, _, last = wanted.rpartition(".")
    if not section and (close := difflib.get_close_matches(wanted, sorted(sections), n=1, cutoff=0.75)):
        return close
    # The right name in the wrong section, the commonest slip.
    same = [key for key in known if key.rpartition(".")[2] == last]
    if same:
        return sorted(same, key=lambda key: -_likeness(key.rpartition(".")[0], section))[:2]
    if last.lower() in _ALIASES:
        return _ALIASES[last.lower()].split()
    # The section breaks ties and never improves a bad match.
    rated = [
        ((_near(last, key.rpartition(".")[2]), _likeness(section, key.rpartition(".")[0])), key)
        for key in known
    ]
    # Two keys that are equally near are both shown.
    best = max(rate for rate, _ in rated)
    return [key for rate, key in rated if rate == best and best[0] >= _FEWEST][:2]


def _near(wanted: str, name: str) -> float:
    """Rates how near a name is: by its letters, or, if one is a word of the other, by the share that it covers."""
    words, others = set(wanted.lower().split("_")), set(name.split("_"))
    shared = len(words & others) / max(len(words), 1) if words & others else 0.0
    return max(_likeness(wanted.lower(), name), 0.7 * shared)


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
