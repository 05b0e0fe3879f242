"""Suggests the key that a user meant by a key that does not exist. Pure."""

import difflib
from collections.abc import Iterable

VERLS_SECTIONS = frozenset(
    (
        *(
            "actor_rollout_ref",
            "algorithm",
            "critic",
            "custom_reward_function",
            "global_profiler",
            "ray_init",
        ),
        *("ray_kwargs", "reward_manager", "sandbox_fusion", "transfer_queue"),
    )
)
"""Sections of verl's files that no configuration of ours has."""

# A wrong suggestion is worse than none: it costs another look, and may set something else. So other programs'
# words are a table, and a key is suggested for its letters only if it is very near.
_FEWEST = 0.8
# Words of verl and its guides, TRL, Hugging Face's Trainer, Lightning, Slurm, submitit, and what several call so. A
# word, or a section and a word, in small letters. The longer one wins.
_WORDS: dict[str, str] = {
    "checkpoint.cadence=adaptive, with checkpoint.intervals": "adaptive_checkpoint",
    "no key: every save is asynchronous": "async_checkpoint async_save",
    "model.path": (
        "actor.name_or_path model.actor model.name model.name_or_path model_name model_name_or_path"
        " pretrained_model_name_or_path"
    ),
    "no key: the run keeps the fingerprint of its data by itself": "data.fingerprint",
    "data.max_prompt_tokens and rollout.max_new_tokens, which are separate limits": "data.max_length",
    "data.files, a glob that names the files of one split": "data.split",
    "data.root, a directory: download the data set first (hf download --repo-type dataset)": "dataset_name",
    "distributed.device": "distributed.backend device",
    "distributed.recompute": "enable_recompute gradient_checkpointing",
    "no key: the ranks that train also sample": "hybrid_engine",
    "no key: each full checkpoint holds the optimizer": "train.include_optimizer",
    "checkpoint.keep_last": (
        "keep_last_n_checkpoints max_actor_ckpt_to_keep max_ckpt_to_keep save_total_limit checkpoint.keep"
    ),
    "model.path: the tokenizer is read from there": "model.tokenizer",
    "no key: the run keeps the fingerprint of its models by itself": "model.fingerprint",
    "no key: a reward model computes in float32": "reward.dtype",
    "model.reward=classifier:DIR": "reward.name_or_path",
    "run_dir": "save_dir default_local_dir output_dir default_root_dir",
    "checkpoint.every_steps": (
        "save_every_n_steps save_interval save_freq save_steps every_n_train_steps save_every"
    ),
    "tiers, places to which verified checkpoints are copied": "storage_backend",
    "train.steps": "total_steps total_training_steps max_steps",
    "model.attn_implementation=flash_attention_2": "use_flash_attn",
    "distributed.dp_size, times distributed.tp_size and distributed.pp_size": "world_size",
    "train.algorithm": "adv_estimator",
    "train.kl_coef, with train.kl_in=loss": "kl_loss_coef",
    "data.max_prompt_tokens": "max_prompt_length prompt_length",
    "rollout.max_new_tokens": "max_response_length response_length max_completion_length max_tokens",
    "slurm.gpus_per_node, and distributed.dp_size for the ranks of all nodes": "n_gpus_per_node",
    "distributed.nodes": "nnodes num_nodes nodes",
    "train.micro_batch_size_per_device": "ppo_micro_batch_size_per_gpu per_device_train_batch_size",
    "checkpoint.resume_from": "resume_from_path resume_mode resume_from_checkpoint resume",
    "rollout.samples_per_prompt": "rollout.n num_generations",
    "rollout.engine": "rollout.name",
    "rollout.tensor_parallel_size, or distributed.tp_size for training": "tensor_model_parallel_size",
    "train.eval_every_steps": "test_freq eval_steps val_check_interval",
    "data.root": "train_files data.path data_path dataset dataset.path",
    "data.eval_root": "val_files",
    "train.kl_coef": "beta",
    "distributed.mixed_precision=bfloat16": "bf16",
    "train.clip_ratio": "epsilon",
    "train.clip_ratio_high": "epsilon_high",
    "distributed.mixed_precision=bfloat16, since float16 is not offered": "fp16",
    "train.mini_batch_size_per_device, of which train.micro_batch_size_per_device is computed at once": (
        "gradient_accumulation_steps accumulate_grad_batches"
    ),
    "train.actor_lr or train.critic_lr": "learning_rate lr",
    "no key: every step is recorded": "logging_steps",
    "train.lr_schedule": "lr_scheduler_type scheduler",
    "train.ppo_epochs": "num_iterations",
    "model.reward": "reward_funcs reward_model",
    "checkpoint.cadence": "save_strategy",
    "model.dtype": "torch_dtype",
    "rollout.engine=vllm": "use_vllm",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "rollout.tensor_parallel_size": "vllm_tensor_parallel_size",
    "train.warmup_steps, a number of steps": "warmup_ratio",
    "distributed.dp_size, the ranks of all nodes": "devices ntasks_per_node tasks_per_node",
    "train.max_grad_norm": "gradient_clip_val grad_clip",
    "distributed.mixed_precision": "precision",
    "checkpoint.keep_best": "save_top_k",
    "slurm.python": "conda_env venv",
    "slurm.extra, which holds further options of sbatch": (
        "constraint dependency slurm.exclude exclusive licenses mail_type mail_user nodelist reservation"
    ),
    "slurm.cpus_per_node": "cpus",
    "slurm.cpus_per_node, of all ranks of a node": "cpus_per_task",
    "slurm.gpus_per_node": "gpus gres",
    "name": "job_name",
    "slurm.mem_mb_per_node": "mem memory",
    "slurm.mem_mb_per_node, in MB": "mem_gb",
    "no key: the job is always one that Slurm may requeue": "requeue",
    "no key: the logs lie in RUN/logs": "slurm.output",
    "slurm.signal_lead_s": "slurm.signal",
    "slurm.partition": "slurm_partition",
    "slurm.time_limit_min": "time time_limit timeout_min walltime",
    "train.batch_size_per_device": "batch_size",
    "env": "env_vars",
    "train.steps: a number of steps, not of passes": (
        "epochs max_epochs num_epochs num_train_epochs total_epochs"
    ),
    "train.warmup_steps": "warmup",
}
WORDS = {word: ours for ours, words in _WORDS.items() for word in words.split()}
"""Other programs' words, and what takes their place here."""
# Names that mean something else in each section.
_COMMON = frozenset(
    (
        *(
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
        ),
        *("name", "nodes", "path", "port", "root", "type"),
    )
)


def nearest_keys(wanted: str, keys: Iterable[str], sections: Iterable[str]) -> list[str]:
    """Returns at most two keys, sections or sentences, the likeliest first; empty if nothing is near."""
    known = list(keys)
    # Only the last parts are compared: a section that two keys share says nothing about what was meant.
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
