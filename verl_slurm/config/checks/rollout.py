"""Checks a rollout engine against the model's config.json and this Python environment.

vLLM's conditions: `vllm.config.model.verify_with_parallel_config` (heads) and
`vllm.v1.attention.backends.cpu_attn.get_supported_head_sizes` (0.30.0).
"""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.packages import install_command
from verl_slurm.config.checks import Complaint
from verl_slurm.config.schema import RunConfig

_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_TP = "rollout.tensor_parallel_size"


def max_model_len(config: RunConfig) -> int:
    """Returns the tokens of the longest sequence that sampling can make: prompt and response."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def model_complaints(config: RunConfig, model: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yields what the model's config.json says against `rollout.engine=vllm`. vLLM itself judges unknown fields."""
    # Models that also see images keep the sizes of their language part there.
    text = model.get("text_config")
    model = text if isinstance(text, dict) else model
    heads, limit = model.get("num_attention_heads"), model.get("max_position_embeddings")
    size, longest = config.rollout.tensor_parallel_size, max_model_len(config)
    # vLLM cuts attention by heads, and each rank gets whole ones.
    if isinstance(heads, int) and heads % size:
        yield Complaint(_TP, str(size), f"a divisor of the model's {heads} attention heads", f"change {_TP}")
    # Some families have heads that are not hidden_size / heads wide, and say so.
    width = model.get("head_dim")
    if not isinstance(width, int) and isinstance(heads, int) and isinstance(model.get("hidden_size"), int):
        width = model["hidden_size"] // max(heads, 1)
    # vLLM's attention on CPUs has kernels for these sizes of a head; GPUs take others.
    if config.distributed.device == "cpu" and isinstance(width, int) and width not in _CPU_HEAD_SIZES:
        yield Complaint(
            "rollout.engine",
            f"vllm, and a model with heads of {width} on a CPU",
            f"heads of {', '.join(map(str, _CPU_HEAD_SIZES))}",
            "set rollout.engine=hf, or another model.path, e.g. builtin:tiny32",
        )
    # Refused by vLLM's start otherwise, after the wait in the queue.
    if isinstance(limit, int) and longest > limit and not _stretched(model):
        yield Complaint(
            "rollout.max_new_tokens",
            f"{longest} tokens with data.max_prompt_tokens",
            f"at most the model's {limit}",
            "lower rollout.max_new_tokens or data.max_prompt_tokens",
        )


def _stretched(model: Mapping[str, Any]) -> bool:
    """Returns whether the positions are scaled (YaRN and others)."""
    # vLLM then takes more than the number in the file.
    ropes = (model.get("rope_scaling"), model.get("rope_parameters"))
    return any("factor" in rope for rope in ropes if isinstance(rope, dict))


def require_engine(config: RunConfig) -> None:
    """Refuses an engine that this Python environment does not have (ConfigError)."""
    # Looked for, not imported: an import takes seconds.
    if config.rollout.engine == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed here",
            where="rollout.engine",
            found="vllm",
            remedy=f"on GPUs `{install_command('vllm')}`, on CPUs docs/rollout-engines.md; or set "
            "rollout.engine=hf",
        )


def check_engine(config: RunConfig, where: str, model: Mapping[str, Any]) -> None:
    """Raises ConfigError if the engine cannot sample from a model with this config.json, which lies at `where`."""
    if config.rollout.engine != "vllm":
        return
    # The first one is enough: it is raised.
    for complaint in model_complaints(config, model):
        raise ConfigError(
            "vLLM cannot sample from this model",
            where=f"{where}: {complaint.key}",
            found=complaint.found,
            expected=complaint.expected,
            remedy=complaint.remedy,
        )


def sampling_dtype(config: RunConfig) -> str:
    """Returns the dtype that the actor computes in."""
    mixed = config.distributed.mixed_precision
    # A sampler of another precision would sample from another policy.
    return config.model.dtype if mixed == "none" else mixed
