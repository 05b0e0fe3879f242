"""Builds the model without its weights, from a Hugging Face config on torch's meta device, to check names and order.

A checkpoint knows tensors by name. The model defines the rest that a reader needs: the class, the tied weights, and the
order of the parameters, by which AdamW's own state dict counts. This takes no memory for weights, reads none, and runs
no code of the model directory.
"""

import math
import re
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from verl_slurm.base.bounded import read_model_config
from verl_slurm.base.errors import DataError
from verl_slurm.checkpoint.format.tensor_index import TensorEntry
from verl_slurm.config.roles import Role
from verl_slurm.export.causal_lm import ValueModel
from verl_slurm.save.ranks.tensors import model_tensors

_LAYERS = re.compile(r"^(num|n)_\w*layer|layers$|layer_types$|^depth")
# Numbers of a config that become modules, or lists of its own; a list counts by its length.
_PARTS = re.compile(r"^(num|n)_\w*(expert|block|head|stage)")
# A dimension of a tensor, or a number of positions. The largest vocabularies have 260,000 words, the longest contexts
# 10,485,760 tokens. Tables of positions are made on the CPU.
_SIZES, _MOST_SIZE = re.compile(r"(dim|size|position_embeddings|n_positions|n_ctx)$"), 1 << 24
# Of a head, and so at most 1: a table's length is multiplied by it.
_FRACTION = "partial_rotary_factor"
# Limit for a list: transformers checks the type of each item at every assignment, which took minutes for 400,000.
_MOST_ITEMS = 1 << 14
# Any config may have this many: a model with shared layers, or with its experts fused in one tensor.
_FEW_LAYERS, _FEW_PARTS = 64, 1024
# For the modules of a model, which take some 10 KB per tensor, and for the imports that they need.
_SKELETON_BYTES, _TENSOR_BYTES = 256 << 20, 64 << 10


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """The names, shapes and order of a model's tensors.

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


def build_skeleton(model_dir: Path, role: Role, num_tensors: int, *, where: Path) -> Skeleton:
    """Returns what tensors the model of `role` must hold, by the config in `model_dir`; errors name `where`.

    Raises:
        DataError: no config there, of no model that Hugging Face knows, or of more than `num_tensors` allow.
    """
    expected = "a Hugging Face model directory with config.json"
    remedy = "name the directory of the base model with --model DIR"
    try:
        # Before transformers sees the config: it would build the layers first.
        _require_size_of(model_dir, num_tensors)
        with bounded_work(_SKELETON_BYTES + _TENSOR_BYTES * num_tensors):
            # Neither a download nor code of the model directory: it may be another user's.
            config = AutoConfig.from_pretrained(
                str(model_dir), local_files_only=True, trust_remote_code=False
            )
            if role == "critic":
                # One value per token, as the critic's head has it.
                config.num_labels = 1
            model = _empty(AutoModelForCausalLM, config)
            if role == "critic":
                # The trainer's own class, so that the critic's names are those of the checkpoint.
                model = ValueModel(model)
            architecture = type(model).__name__ if role == "actor" else _critic_class(model, config)
    except Exception as error:  # of any class: transformers checks little of its input
        found = f"{type(error).__name__}: {error}"
        raise DataError(
            "the model config cannot be used", where=where, found=found, expected=expected, remedy=remedy
        ) from error
    # The class that was built: a critic's is not the base model's.
    config.architectures = [architecture]
    # By identity: a tied weight is one object under two names.
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return Skeleton(
        config=config,
        shapes={name: tuple(tensor.shape) for name, tensor in model_tensors(model).items()},
        aliases={name: first[parameter] for name, parameter in every if name != first[parameter]},
        parameters=tuple(name for name, _ in model.named_parameters()),
    )


def _empty(auto_class: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        # Eager is the one attention that needs neither a kernel nor a search for one.
        model: nn.Module = auto_class.from_config(
            config, trust_remote_code=False, attn_implementation="eager"
        )
    return model


def _critic_class(model: nn.Module, config: Any) -> str:
    """Returns Hugging Face's class with exactly the critic's tensors, or that of the transformer alone."""
    if type(config) in AutoModelForTokenClassification._model_mapping:
        theirs = _empty(AutoModelForTokenClassification, config)
        # Their head may have other names or a bias; a reader of that class would then find weights missing.
        if model_tensors(theirs).keys() == model_tensors(model).keys():
            return type(theirs).__name__
    return type(next(iter(model.children()))).__name__


def _require_size_of(model_dir: Path, num_tensors: int) -> None:
    """Refuses, with ValueError, a config of more layers or parts than the checkpoint has tensors."""
    # Nested maps too: configs of several models in one have one below each part.
    for key, value in _numbers(read_model_config(model_dir)):
        # A layer has at least two tensors.
        layers, parts = _LAYERS.search(key), _PARTS.search(key)
        most = max(num_tensors // 2, _FEW_LAYERS) if layers else max(num_tensors, _FEW_PARTS)
        too_large = (_SIZES.search(key) and value > _MOST_SIZE) or (key == _FRACTION and value > 1)
        if too_large or ((layers or parts) and value > most):
            raise ValueError(f"{key} is {value}, beyond any model of the checkpoint's {num_tensors} tensors")


def _numbers(said: dict[str, Any]) -> Iterator[tuple[str, int | float]]:
    for key, value in said.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int | float):
            yield key, value
        elif isinstance(value, list):
            if len(value) > _MOST_ITEMS:
                raise ValueError(f"{key} has {len(value)} items, at most {_MOST_ITEMS}")
            yield key, len(value)


def check_fit(skeleton: Skeleton, found: dict[str, TensorEntry], *, where: object) -> None:
    """Compares a checkpoint's tensors with the model: names and shapes. DataError: they are of another."""
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


_MOST_SECONDS = 300.0


class _Overtime(BaseException):
    """Not an Exception: libraries catch those and continue."""


@contextmanager
def bounded_work(num_bytes: int, seconds: float = _MOST_SECONDS) -> Iterator[None]:
    """Limits memory and time of a library that reads other users' files and has no limits of its own.

    Limits the whole process; for the main thread of a process that does this work alone.

    Memory beyond `num_bytes` raises a MemoryError, or the library's own error for it. Python code that runs beyond
    `seconds` gets a TimeoutError. A loop in C never reaches Python's signal handler: after twice that processor time
    the kernel ends the process by SIGXCPU.
    """

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise _Overtime

    # Not RLIMIT_AS: a thread reserves 64 MB of addresses that it never touches.
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + num_bytes
    # Counted from what the process has used up: the kernel's limit is on its whole life.
    cpu = math.ceil(time.process_time() + 2 * seconds)
    before = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_DATA, resource.RLIMIT_CPU)}
    former = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        for kind, wanted in ((resource.RLIMIT_DATA, data), (resource.RLIMIT_CPU, cpu)):
            # Never above a limit that is set already. The hard limit stays, so that the soft one can be raised again.
            limits = [one for one in (wanted, *before[kind]) if one != resource.RLIM_INFINITY]
            resource.setrlimit(kind, (min(limits), before[kind][1]))
        yield
    except _Overtime:
        raise TimeoutError(f"no end after {seconds:g} s") from None
    finally:
        # Before the handler goes: an alarm in between would end the process.
        signal.setitimer(signal.ITIMER_REAL, 0)
        for kind, limits_before in before.items():
            resource.setrlimit(kind, limits_before)
        signal.signal(signal.SIGALRM, former)
