"""Does the model divide into the parts that `distributed` asks for? Asked of its config.json, without torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.checks.complaint import Complaint
from verl_slurm.config.families import CUT
from verl_slurm.config.schema import DistributedConfig

__all__ = ["check_model_shape", "shape_complaints"]


def check_model_shape(distributed: DistributedConfig, model_path: str, said: Mapping[str, Any]) -> None:
    """Refuse a shape that this model cannot be cut into.

    Args:
        model_path: for the message.
        said: what its config.json holds.

    Raises:
        ConfigError: the first complaint.
    """
    if distributed.tp_size == distributed.pp_size == 1:
        return
    for found in shape_complaints(distributed, said):
        raise ConfigError(
            "the model cannot be divided like that",
            where=f"{found.key}, {model_path}",
            found=found.found,
            expected=found.expected,
            remedy=found.remedy,
        )


def shape_complaints(distributed: DistributedConfig, said: Mapping[str, Any]) -> Iterator[Complaint]:
    """What of `distributed` does not go with a model whose config.json holds `said`. Pure."""
    tp, pp = distributed.tp_size, distributed.pp_size
    kind = said.get("model_type")
    if (tp > 1 or pp > 1) and kind not in CUT:
        yield Complaint(
            "distributed.tp_size" if tp > 1 else "distributed.pp_size",
            f"a model of type {kind}",
            f"one of {', '.join(CUT)}",
            "set tp_size=1 and pp_size=1, and raise dp_size",
        )
        return
    heads = said.get("num_attention_heads")
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": said.get("num_key_value_heads") or heads,
        "intermediate_size": said.get("intermediate_size"),
    }
    for name, size in sizes.items():
        if isinstance(size, int) and size % tp:
            yield Complaint(
                "distributed.tp_size", str(tp), f"a divisor of the model's {name}={size}", "lower it"
            )
    layers = said.get("num_hidden_layers")
    if isinstance(layers, int) and layers < pp:
        yield Complaint(
            "distributed.pp_size", str(pp), f"at most the model's num_hidden_layers={layers}", "lower it"
        )
    if pp > 1 and said.get("tie_word_embeddings"):
        yield Complaint(
            "distributed.pp_size",
            f"{pp}, with tie_word_embeddings",
            "1: the first and the last stage cannot share a weight",
            "set distributed.pp_size=1 and raise tp_size or dp_size",
        )
