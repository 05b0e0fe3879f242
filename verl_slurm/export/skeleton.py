"""The model without its weights: from a Hugging Face config, on torch's meta device, to hold names and order to.

A checkpoint knows tensors by name. What a reader needs besides (the class, which weights are tied, the order of
the parameters, which AdamW's own state dict counts by) is the model's to say. No memory is spent on it, no
weight is read, and no code of the model directory is run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from verl_slurm.checkpoint.tensor_index import TensorEntry
from verl_slurm.dcp.tensors import model_tensors
from verl_slurm.errors import DataError

__all__ = ["AUTO_CLASSES", "Role", "Skeleton", "build_skeleton", "check_fit"]

Role = Literal["actor", "critic"]

AUTO_CLASSES: dict[str, Any] = {"actor": AutoModelForCausalLM, "critic": AutoModelForTokenClassification}
"""As `trainer.models` builds them: the critic is the policy's backbone with one label a token."""


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """Called by: export.hf, export.layouts.

    Attributes:
        config: of Hugging Face, `architectures` and (for the critic) the number of labels set.
        shapes: tensor → shape, in the model's own order; a tied weight once, under its first name.
        aliases: further name of a tied weight → its first name.
        parameters: those of them that are parameters, in the order of `model.parameters()`.
    """

    config: Any
    shapes: dict[str, tuple[int, ...]]
    aliases: dict[str, str]
    parameters: tuple[str, ...]


def build_skeleton(model_dir: Path, role: Role) -> Skeleton:
    """What the model of `role` must hold, by the config in `model_dir`.

    Raises:
        DataError: no config there, or of no model that Hugging Face knows.
    """
    expected = "a Hugging Face model directory with config.json"
    remedy = "name the directory of the base model with --model DIR"
    if not (model_dir / "config.json").is_file():
        raise DataError("there is no model config", where=model_dir, expected=expected, remedy=remedy)
    try:
        config = AutoConfig.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
        if role == "critic":
            config.num_labels = 1
        with torch.device("meta"):
            model: nn.Module = AUTO_CLASSES[role].from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(
            "the model config cannot be used", where=model_dir, found=error, expected=expected, remedy=remedy
        ) from error
    config.architectures = [type(model).__name__]
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return Skeleton(
        config=config,
        shapes={name: tuple(tensor.shape) for name, tensor in model_tensors(model).items()},
        aliases={name: first[parameter] for name, parameter in every if name != first[parameter]},
        parameters=tuple(name for name, _ in model.named_parameters()),
    )


def check_fit(skeleton: Skeleton, found: dict[str, TensorEntry], *, where: object) -> None:
    """Hold the tensors of a checkpoint to the model: each there, none over, all of their shape.

    Raises:
        DataError: they are another model's.
    """
    problems = [f"no {name}" for name in skeleton.shapes if name not in found]
    problems += [f"{name} is left over" for name in found if name not in skeleton.shapes]
    problems += [
        f"{name} is {list(found[name].shape)}, the config says {list(shape)}"
        for name, shape in skeleton.shapes.items()
        if name in found and found[name].shape != shape
    ]
    if problems:
        raise DataError(
            "the checkpoint is not of this model",
            where=where,
            found="; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else ""),
            expected=skeleton.config.architectures[0],
            remedy="name the base model that the run was started from with --model DIR",
        )
