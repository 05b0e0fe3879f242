"""Loads actor, critic and reference by Hugging Face names and shards them over the grid of ranks.

Parameter names are those of Hugging Face's `AutoModelForCausalLM`, and for the critic those of `causal_lm.ValueModel`:
a checkpoint's tensors can be exported as they are.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from verl_slurm.base.bounded import ADAPTER_FILES
from verl_slurm.base.errors import ConfigError, DataError, VerlSlurmError
from verl_slurm.base.packages import pip_install
from verl_slurm.config.families import right_attentions
from verl_slurm.config.roles import ROLES, Role
from verl_slurm.config.schema import Attention, DistributedConfig
from verl_slurm.export.causal_lm import ValueModel, accepted
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.parallel.fsdp import policy_of, recompute_layers, shard_over_data, whole_parameters
from verl_slurm.trainer.parallel.gradients import clip_over_grid
from verl_slurm.trainer.parallel.grid import Grid
from verl_slurm.trainer.parallel.pipeline import LossOf, Passage, Stage, cut_stage
from verl_slurm.trainer.parallel.tensor import cut_tensors, sum_head_gradients


@dataclass(frozen=True)
class Models:
    """The networks of a run."""

    actor: nn.Module
    critic: nn.Module | None
    """None with GRPO, which has no critic."""
    reference: nn.Module
    """Never changes."""

    @property
    def trained(self) -> dict[Role, nn.Module]:
        """Returns the models that train, by role, in the order in which they are saved and updated."""
        both: dict[Role, nn.Module | None] = {"actor": self.actor, "critic": self.critic}
        return {role: model for role, model in both.items() if model is not None}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences messages about fresh heads and progress bars, and keeps the global generator unchanged."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        # A fresh head is drawn from the global generator, which is part of the saved state: loading must not move it.
        # `devices=[]`: models load on the CPU, and the default would touch the generators of all GPUs.
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def load_pretrained(
    auto_class: Any, path: Path, key: str, *, attention: Attention = "auto", **options: object
) -> nn.Module:
    """Loads a whole model in eval mode on the CPU from a local directory of safetensors, or refuses with a clear error.

    Nothing is downloaded, no code of the directory is run, and no pickle is read.

    Args:
        key: the config key that named it, for the error.

    Raises:
        DataError: no model there, not one that Hugging Face knows, or parameters are missing.
        ConfigError: this environment or this model does not have that attention.
    """
    expected = "a Hugging Face model directory with safetensors"
    # Once more on the ranks: with PEFT installed, transformers would load it.
    if adapter := next((name for name in ADAPTER_FILES if (path / name).is_file()), None):
        raise DataError(
            "an adapter, not a model",
            where=path,
            found=adapter,
            expected=expected,
            remedy=f"merge it, and set {key}",
        )
    if not (path / "config.json").is_file():
        raise DataError("there is no model", where=path, expected=expected, remedy=f"set {key}")
    try:
        # The configuration first: what cannot be trained is refused before a weight is read.
        config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        model_class = _class_of(auto_class, config, path, key)
        # Both kernels are named here: transformers would take a name in config.json and ask the hub for it.
        config._experts_implementation = None  # transformers' own choice
        with _quiet():
            model, report = auto_class.from_pretrained(
                str(path),
                config=config,
                attn_implementation=_attention(attention, model_class, config, path),
                local_files_only=True,
                trust_remote_code=False,
                # The other format is a pickle.
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
    # What libraries raise for a broken directory has no common class.
    except Exception as error:
        if isinstance(error, VerlSlurmError | MemoryError):
            raise
        raise DataError(
            "the model cannot be loaded", where=path, found=error, expected=expected, remedy=f"set {key}"
        ) from error
    # Hugging Face fills a missing parameter with random numbers and only logs it.
    missing = sorted(report["missing_keys"])
    if missing:
        raise DataError(
            "the model lacks parameters",
            where=path,
            found=f"no {', '.join(missing[:3])} ({len(missing)} missing)",
            expected=auto_class.__name__,
            remedy=f"set {key} to a complete model of that kind",
        )
    whole: nn.Module = model
    return whole.eval()


def _class_of(auto_class: Any, config: Any, path: Path, key: str) -> Any:
    # Asked before the load: transformers' own refusal lists every class that it knows.
    if type(config) not in auto_class._model_mapping:
        causal = auto_class is AutoModelForCausalLM
        raise DataError(
            f"not a {'causal language model' if causal else 'sequence classifier'}",
            where=path,
            found=f"model_type {config.model_type}",
            expected="a decoder that predicts the next token" if causal else "a model with a classifier head",
            remedy=f"set {key} to another model",
        )
    if getattr(config, "quantization_config", None) is not None:
        raise DataError(
            "the model's weights are quantized",
            where=path,
            found="quantization_config in config.json",
            expected="plain float32 or bfloat16 weights",
            remedy=f"dequantize the model and save it again, then set {key} to that directory",
        )
    found = auto_class._model_mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _attention(wanted: Attention, model_class: Any, config: Any, path: Path) -> str:
    has = {
        "sdpa": model_class._supports_sdpa,
        "flash_attention_2": model_class._supports_flash_attn,
        "eager": True,
    }
    offered = [name for name in right_attentions(config.to_dict()) if has[name]]
    if wanted == "auto":
        # Always a name: without one transformers takes that of the directory.
        return offered[0]
    if wanted not in offered:
        raise ConfigError(
            "this model does not have that attention",
            where=f"model.attn_implementation, {path}",
            found=f"{wanted}, with {model_class.__name__}",
            expected=f"one of {', '.join(['auto', *offered])}",
            remedy="set model.attn_implementation=auto",
        )
    # Without the package transformers would download a kernel instead.
    if wanted == "flash_attention_2" and find_spec("flash_attn") is None:
        raise ConfigError(
            "FlashAttention is not installed here",
            where="model.attn_implementation",
            found=wanted,
            expected="the package flash_attn",
            remedy=f"{pip_install('flash-attn')}, or set model.attn_implementation=auto",
        )
    return wanted


def load_causal_lm(path: Path, *, dtype: str = "float32", attention: Attention = "auto") -> nn.Module:
    """Loads the whole, unsharded policy network in eval mode on the CPU; raises as `load_pretrained`."""
    return load_pretrained(
        AutoModelForCausalLM, path, "model.path", dtype=getattr(torch, dtype), attention=attention
    )


def load_critic(path: Path, *, dtype: str = "float32", attention: Attention = "auto") -> nn.Module:
    """Loads the policy's transformer with a scalar head, as `load_causal_lm`; also raises as `ValueModel`."""
    return ValueModel(load_causal_lm(path, dtype=dtype, attention=attention)).eval()


def _shard(
    model: nn.Module, mesh: DeviceMesh | None, shape: DistributedConfig, *, trains: bool = True
) -> nn.Module:
    """Cuts a model into a stage of `pp`, tensor parallel over `tp`, FSDP2 over `dp`. A mesh of None leaves it whole."""
    if mesh is None:
        return model
    # Stages, then tensors, then FSDP2: each later cut works on the parameters that the former left on this rank.
    model, policy = cut_stage(model, mesh["pp"]), policy_of(shape.mixed_precision)
    if isinstance(model, Stage):
        model.compute_dtype = policy.param_dtype
    cut_tensors(model, mesh["tp"])
    # Inside FSDP2's hooks: a layer's parameters are gathered when it runs again. The reference has no backward pass.
    if trains and shape.recompute:
        recompute_layers(model)
    shard_over_data(model, mesh["dp"], policy)
    return model


def build_models(
    path: Path,
    *,
    dtype: str,
    mesh: DeviceMesh | None,
    device: torch.device,
    attention: Attention = "auto",
    shape: DistributedConfig | None = None,
    roles: Sequence[Role] = ROLES,
) -> Models:
    """Loads and shards the reference and all models that train, in eval mode. Collective with `mesh`.

    Args:
        mesh: with axes `pp`, `dp` and `tp` (gloo on CPU, NCCL on CUDA), or None for one unsharded process.
        shape: precision and recomputing; None: neither.
        roles: the models that train; a critic that is not among them is not built.

    Raises:
        DataError: no model there, or not one that Hugging Face knows.
        ConfigError: it cannot be cut like that.
    """
    shape = shape or DistributedConfig()
    # Whole on each rank first: the cuts work on Hugging Face's own modules.
    # Each from the file: what is loaded are views of it, which a copy in memory would only make several times slower.
    # In eval mode: dropout must be off, or the ratio of new to old policy would not start at 1.
    actor = load_causal_lm(path, dtype=dtype, attention=attention).to(device)
    critic = load_critic(path, dtype=dtype, attention=attention).to(device) if "critic" in roles else None
    reference = load_causal_lm(path, dtype=dtype, attention=attention).to(device).requires_grad_(False)
    return Models(
        _shard(actor, mesh, shape),
        None if critic is None else _shard(critic, mesh, shape),
        _shard(reference, mesh, shape, trains=False),
    )


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copies a sharded model's parameters into a whole one, tensor by tensor. Collective (`whole_parameters`)."""
    parameters = dict(target.named_parameters())
    with torch.no_grad():
        for name, whole in whole_parameters(source):
            parameters.pop(name).copy_(whole)
    # A parameter that was left out would sample with the numbers of the directory, or of an earlier step.
    if parameters:
        raise ValueError(f"parameters without a source: {sorted(parameters)}")


def clip_gradients(model: nn.Module, max_norm: float, grid: Grid | None = None) -> float:
    """Scales all gradients so that their joint norm is at most `max_norm`; returns the norm before. Collective.

    Args:
        grid: None: a single process, or data parallel alone.
    """
    if grid is not None:
        # Once, before the norm: a hook at each backward pass counts a micro-batch again for each one after it.
        sum_head_gradients(model, grid.mesh["tp"])
        return clip_over_grid(model, max_norm, grid)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=False)
    # Of shards the norm is a DTensor, a partial sum on each rank.
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def passage(batch: Batch, device: torch.device) -> Passage:
    """Joins prompt and response; positions count from the first real token."""
    ids = torch.cat([batch["prompt_ids"], batch["response_ids"]], dim=1).to(device)
    mask = torch.cat([batch["prompt_mask"], batch["response_mask"]], dim=1).to(device)
    # Prompts are padded on the left, so the count starts at the first real token; padding would be at -1.
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    # The logits before a token choose it, so T + 1 positions are asked for; the last of them chooses nothing.
    return Passage(ids=ids, mask=mask.long(), positions=positions, keep=batch["response_ids"].shape[1] + 1)


def _call(model: nn.Module, given: Passage) -> Tensor:
    """Returns logits [N, T + 1, V] of a passage."""
    words = accepted(
        model,
        input_ids=given.ids,
        attention_mask=given.mask,
        position_ids=given.positions,
        # The tokens are known, so no later pass reads these keys and values.
        use_cache=False,
        logits_to_keep=given.keep,
    )
    logits: Tensor = model(**words).logits
    # A critic returns all positions: its head is one column wide, so asking for fewer saves nothing.
    return logits[:, -given.keep :] if logits.shape[1] > given.keep else logits


def _distribution(logits: Tensor, temperature: float) -> Tensor:
    """Returns log probabilities [N, T, V] before each response token, from the logits [N, T + 1, V] of a passage."""
    # float32 before the division, as `sampling.pick_tokens`: the two log probabilities are held against each other.
    return torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)


def _chosen(distribution: Tensor, batch: Batch) -> Tensor:
    tokens = batch["response_ids"].to(distribution.device).unsqueeze(-1)
    return distribution.gather(-1, tokens).squeeze(-1)


def read_logprobs(
    logits: Tensor, batch: Batch, *, temperature: float, learns_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """`logprobs_and_entropy` from a passage's logits [N, T + 1, V]. `learns_entropy`: with its gradient."""
    distribution = _distribution(logits, temperature)
    # Detached, no [N, T, V] product is kept for the backward pass.
    spread = distribution if learns_entropy else distribution.detach()
    return _chosen(distribution, batch), -(spread.exp() * spread).sum(dim=-1)


def read_values(logits: Tensor, batch: Batch) -> Tensor:
    """Reads values from the critic's logits [N, T + 1, 1] of a passage: see `values`."""
    return logits[:, :-1, 0].float()


def logprobs_and_entropy(model: nn.Module, batch: Batch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns the log probability of each response token, and the entropy of its distribution, at `temperature`.

    Args:
        model: a causal LM. Sharded: a collective forward, so all ranks call it equally often with
            whatever batch their replica has.
        batch: prompt_ids, prompt_mask, response_ids, response_mask.
        temperature: the one the response was sampled with; the distribution is softmax(logits / it).

    Returns:
        logprobs float32 [N, T], entropy float32 [N, T] (nats), on the model's device. The numbers are meaningless
        outside the response mask, and on all stages of a pipeline except the last.
    """
    logits = _response_logits(model, batch)
    # A stage that is not the last: the speaker of the replica tells its ranks the numbers.
    if logits is None:
        return _nothing(batch), _nothing(batch)
    return read_logprobs(logits, batch, temperature=temperature)


def logprobs(model: nn.Module, batch: Batch, *, temperature: float) -> Tensor:
    """Returns log probabilities as `logprobs_and_entropy` does, without the entropy."""
    logits = _response_logits(model, batch)
    return _nothing(batch) if logits is None else _chosen(_distribution(logits, temperature), batch)


def _response_logits(model: nn.Module, batch: Batch) -> Tensor | None:
    """Returns logits [N, T + 1, V]; None on a pipeline's stages except the last."""
    given = passage(batch, _device(model))
    if isinstance(model, Stage):
        return model.score_pass(given)
    return _call(model, given)


def values(critic: nn.Module, batch: Batch) -> Tensor:
    """Returns the critic's value before each response token, float32 [N, T]; see `logprobs_and_entropy`."""
    given = passage(batch, _device(critic))
    if isinstance(critic, Stage):
        scored = critic.score_pass(given)
        return _nothing(batch) if scored is None else read_values(scored, batch)
    return read_values(_call(critic, given), batch)


def run_passes(model: nn.Module, given: Passage, micro_batch: int, loss_of: LossOf) -> None:
    """Runs forward and backward of a mini-batch, micro-batch by micro-batch; adds to the gradients. Collective.

    Args:
        loss_of: maps a micro-batch's logits [N, T + 1, V] and its rows in the mini-batch to its loss. Losses are
            summed. A pipeline calls it on the last stage only.
    """
    if isinstance(model, Stage):
        # 1F1B needs the whole mini-batch: it cuts it, and runs micro-batches of several stages at once.
        model.train_pass(given, micro_batch, loss_of)
        return
    # Backward after each micro-batch: activations of one exist at a time, and the gradients add up.
    for rows in torch.split(torch.arange(len(given.ids)), micro_batch):
        loss = loss_of(_call(model, given.rows(rows)), rows)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here


def _nothing(batch: Batch) -> Tensor:
    return torch.zeros(batch["response_ids"].shape)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
