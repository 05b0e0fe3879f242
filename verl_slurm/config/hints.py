"""Suggests the key that a user meant by a key that does not exist. Pure.

A wrong suggestion is worse than none: it costs another look, and may set something else. So other programs' words are
a table, held to the schema by a test, and a key is suggested for its letters only if it is very near.
"""

import difflib
from collections.abc import Iterable

VERLS_SECTIONS = frozenset(
    {
        "actor_rollout_ref",
        "algorithm",
        "critic",
        "custom_reward_function",
        "global_profiler",
        "ray_init",
        "ray_kwargs",
        "reward_manager",
        "sandbox_fusion",
        "transfer_queue",
    }
)
"""Sections of verl's files that no configuration of ours has."""

_FEWEST = 0.8
_EXTRA = "slurm.extra, which holds further options of sbatch"
WORDS: dict[str, str] = {
    # A word, or a section and a word, in small letters. The longer one wins.
    # verl's guides
    "adaptive_checkpoint": "checkpoint.cadence=adaptive, with checkpoint.intervals",
    "async_checkpoint": "no key: every save is asynchronous",
    "async_save": "no key: every save is asynchronous",
    "actor.name_or_path": "model.path",
    "data.fingerprint": "no key: the run keeps the fingerprint of its data by itself",
    "data.max_length": "data.max_prompt_tokens and rollout.max_new_tokens, which are separate limits",
    "data.split": "data.files, a glob that names the files of one split",
    "dataset_name": "data.root, a directory: download the data set first (hf download --repo-type dataset)",
    "distributed.backend": "distributed.device",
    "enable_recompute": "distributed.recompute",
    "hybrid_engine": "no key: the ranks that train also sample",
    "train.include_optimizer": "no key: each full checkpoint holds the optimizer",
    "keep_last_n_checkpoints": "checkpoint.keep_last",
    "model.actor": "model.path",
    "model.name": "model.path",
    "model.name_or_path": "model.path",
    "model.tokenizer": "model.path: the tokenizer is read from there",
    "model.fingerprint": "no key: the run keeps the fingerprint of its models by itself",
    "reward.dtype": "no key: a reward model computes in float32",
    "reward.name_or_path": "model.reward=classifier:DIR",
    "save_dir": "run_dir",
    "save_every_n_steps": "checkpoint.every_steps",
    "save_interval": "checkpoint.every_steps",
    "storage_backend": "tiers, places to which verified checkpoints are copied",
    "total_steps": "train.steps",
    "use_flash_attn": "model.attn_implementation=flash_attention_2",
    "world_size": "distributed.dp_size, times distributed.tp_size and distributed.pp_size",
    # verl's own keys
    "adv_estimator": "train.algorithm",
    "default_local_dir": "run_dir",
    "kl_loss_coef": "train.kl_coef, with train.kl_in=loss",
    "max_actor_ckpt_to_keep": "checkpoint.keep_last",
    "max_ckpt_to_keep": "checkpoint.keep_last",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "n_gpus_per_node": "slurm.gpus_per_node, and distributed.dp_size for the ranks of all nodes",
    "nnodes": "distributed.nodes",
    "ppo_micro_batch_size_per_gpu": "train.micro_batch_size_per_device",
    "prompt_length": "data.max_prompt_tokens",
    "response_length": "rollout.max_new_tokens",
    "resume_from_path": "checkpoint.resume_from",
    "resume_mode": "checkpoint.resume_from",
    "rollout.n": "rollout.samples_per_prompt",
    "rollout.name": "rollout.engine",
    "save_freq": "checkpoint.every_steps",
    "tensor_model_parallel_size": "rollout.tensor_parallel_size, or distributed.tp_size for training",
    "test_freq": "train.eval_every_steps",
    "total_training_steps": "train.steps",
    "train_files": "data.root",
    "val_files": "data.eval_root",
    # TRL and Hugging Face's Trainer
    "beta": "train.kl_coef",
    "bf16": "distributed.mixed_precision=bfloat16",
    "epsilon": "train.clip_ratio",
    "epsilon_high": "train.clip_ratio_high",
    "eval_steps": "train.eval_every_steps",
    "fp16": "distributed.mixed_precision=bfloat16, since float16 is not offered",
    "gradient_accumulation_steps": "train.mini_batch_size_per_device, of which train.micro_batch_size_per_device"
    " is computed at once",
    "gradient_checkpointing": "distributed.recompute",
    "learning_rate": "train.actor_lr or train.critic_lr",
    "logging_steps": "no key: every step is recorded",
    "lr": "train.actor_lr or train.critic_lr",
    "lr_scheduler_type": "train.lr_schedule",
    "max_completion_length": "rollout.max_new_tokens",
    "max_steps": "train.steps",
    "max_tokens": "rollout.max_new_tokens",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.samples_per_prompt",
    "num_iterations": "train.ppo_epochs",
    "output_dir": "run_dir",
    "pretrained_model_name_or_path": "model.path",
    "per_device_train_batch_size": "train.micro_batch_size_per_device",
    "resume_from_checkpoint": "checkpoint.resume_from",
    "reward_funcs": "model.reward",
    "save_steps": "checkpoint.every_steps",
    "save_strategy": "checkpoint.cadence",
    "save_total_limit": "checkpoint.keep_last",
    "torch_dtype": "model.dtype",
    "use_vllm": "rollout.engine=vllm",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "warmup_ratio": "train.warmup_steps, a number of steps",
    # Lightning
    "accumulate_grad_batches": "train.mini_batch_size_per_device, of which train.micro_batch_size_per_device"
    " is computed at once",
    "default_root_dir": "run_dir",
    "devices": "distributed.dp_size, the ranks of all nodes",
    "every_n_train_steps": "checkpoint.every_steps",
    "gradient_clip_val": "train.max_grad_norm",
    "num_nodes": "distributed.nodes",
    "precision": "distributed.mixed_precision",
    "save_top_k": "checkpoint.keep_best",
    "val_check_interval": "train.eval_every_steps",
    # Slurm and submitit
    "conda_env": "slurm.python",
    "constraint": _EXTRA,
    "cpus": "slurm.cpus_per_node",
    "cpus_per_task": "slurm.cpus_per_node, of all ranks of a node",
    "dependency": _EXTRA,
    "slurm.exclude": _EXTRA,
    "exclusive": _EXTRA,
    "gpus": "slurm.gpus_per_node",
    "gres": "slurm.gpus_per_node",
    "job_name": "name",
    "licenses": _EXTRA,
    "mail_type": _EXTRA,
    "mail_user": _EXTRA,
    "mem": "slurm.mem_mb_per_node",
    "mem_gb": "slurm.mem_mb_per_node, in MB",
    "memory": "slurm.mem_mb_per_node",
    "nodelist": _EXTRA,
    "ntasks_per_node": "distributed.dp_size, the ranks of all nodes",
    "requeue": "no key: the job is always one that Slurm may requeue",
    "reservation": _EXTRA,
    "slurm.output": "no key: the logs lie in RUN/logs",
    "slurm.signal": "slurm.signal_lead_s",
    "slurm_partition": "slurm.partition",
    "tasks_per_node": "distributed.dp_size, the ranks of all nodes",
    "time": "slurm.time_limit_min",
    "time_limit": "slurm.time_limit_min",
    "timeout_min": "slurm.time_limit_min",
    "venv": "slurm.python",
    "walltime": "slurm.time_limit_min",
    # What several call so
    "checkpoint.keep": "checkpoint.keep_last",
    "device": "distributed.device",
    "nodes": "distributed.nodes",
    "batch_size": "train.batch_size_per_device",
    "data.path": "data.root",
    "data_path": "data.root",
    "dataset": "data.root",
    "dataset.path": "data.root",
    "env_vars": "env",
    "epochs": "train.steps: a number of steps, not of passes",
    "grad_clip": "train.max_grad_norm",
    "max_epochs": "train.steps: a number of steps, not of passes",
    "num_epochs": "train.steps: a number of steps, not of passes",
    "num_train_epochs": "train.steps: a number of steps, not of passes",
    "resume": "checkpoint.resume_from",
    "reward_model": "model.reward",
    "save_every": "checkpoint.every_steps",
    "scheduler": "train.lr_schedule",
    "total_epochs": "train.steps: a number of steps, not of passes",
    "warmup": "train.warmup_steps",
}
"""Other programs' words, and what takes their place here."""
_COMMON = frozenset(
    {
        "backend",
        "command",
        "device",
        "engine",
        "entry",
        "env",
        "extra",
        "files",
        "group",
        "image",
        "limit",
        "name",
    }
    | {"nodes", "path", "port", "root", "type"}
)
"""Names that mean something else in each section."""


def nearest_keys(wanted: str, keys: Iterable[str], sections: Iterable[str]) -> list[str]:
    """Returns at most two keys, sections or sentences, the likeliest first; empty if nothing is near.

    In this order: another program's word in its section, the right name in the wrong section, another program's word,
    a typing error. Only the last parts are compared: a section that two keys share says nothing about what was meant.
    """
    known = list(keys)
    section, _, last = wanted.rpartition(".")
    if (wanted.partition(".")[0]) in VERLS_SECTIONS:
        return [f"verl.{wanted}, with trainer.backend=verl"]
    if not section and (close := difflib.get_close_matches(wanted, sorted(sections), n=1, cutoff=0.75)):
        return close
    inner = f"{section.rpartition('.')[2]}.{last}".lower()
    if inner in WORDS:
        return [WORDS[inner]]
    same = [key for key in known if key.rpartition(".")[2] == last]
    if last in _COMMON:
        same = [key for key in same if _likeness(key.rpartition(".")[0], section) >= _FEWEST]
    if same:
        return sorted(same, key=lambda key: -_likeness(key.rpartition(".")[0], section))[:2]
    if last.lower() in WORDS:
        return [WORDS[last.lower()]]
    if last in _COMMON:
        return []
    # The section breaks ties and never improves a bad match.
    rated = [
        ((_near(last, key.rpartition(".")[2]), _likeness(section, key.rpartition(".")[0])), key)
        for key in known
    ]
    # Two keys that are equally near are both shown.
    best = max(rate for rate, _ in rated)
    return [key for rate, key in rated if rate == best and best[0] >= _FEWEST][:2]


def _near(wanted: str, name: str) -> float:
    """Rates how near a name is: by its letters, or fully if it is a part of the other, of two words at least."""
    words, others = wanted.lower().split("_"), name.split("_")
    fewer = min(len(words), len(others))
    if fewer > 1 and len(set(words) & set(others)) == fewer:
        return _FEWEST
    return _likeness(wanted.lower(), name)


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
