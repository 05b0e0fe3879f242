"""Checks before queueing that the trainer supports this model's family, that the configuration fits it, and that it
divides into the parts that `distributed` asks for. Reads its config.json, without torch.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_slurm.base.bounded import read_model_config
from verl_slurm.base.errors import ConfigError, DataError, VerlSlurmError
from verl_slurm.config.checks import Complaint
from verl_slurm.config.families import FAMILIES, family_complaints, family_notes
from verl_slurm.config.schema import BUILTIN, DistributedConfig, RunConfig
from verl_slurm.submit.checks.model_and_reward import BUILTIN_MODELS


def said_of(path: str) -> dict[str, Any]:
    """Returns the content of the config.json of `model.path`, now or once a `builtin:` is built."""
    if path.startswith(BUILTIN):
        return BUILTIN_MODELS[path.removeprefix(BUILTIN)]
    return read_model_config(Path(path))


def check_family(config: RunConfig) -> list[str]:
    """Refuses a model that cannot be trained as configured; otherwise returns notes for the user.

    Args:
        config: paths absolute; the model directory has been checked.

    Raises:
        DataError: the first complaint, about the model itself.
        ConfigError: the first complaint, about another key that does not go with it.
    """
    said = said_of(config.model.path)
    for found in family_complaints(config, said):
        # Whose fault it is decides the exit code: the model's (DATA), or a key that does not go with it (CONFIG).
        by_itself = found.key == "model.path"
        refusal: type[VerlSlurmError] = DataError if by_itself else ConfigError
        raise refusal(
            "this model cannot be trained here" if by_itself else "the model cannot be trained as configured",
            where=config.model.path if by_itself else f"{found.key}, {config.model.path}",
            found=found.found,
            expected=found.expected,
            remedy=found.remedy,
        )
    return family_notes(config, said)


_NORMS_OF_ALL_HEADS = ("use_qk_norm", "qk_layernorm")
"""Keys of config.json that put a norm beside the cut projections, with a weight for each head (Cohere, Phi)."""


def check_model_shape(distributed: DistributedConfig, model_path: str, said: Mapping[str, Any]) -> None:
    """Refuses a shape that this model cannot be cut into.

    Args:
        model_path: for the message.
        said: the content of its config.json.

    Raises:
        ConfigError: the first complaint.
    """
    # Each rank has the whole model then, whatever its sizes.
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
    """Yields the parts of `distributed` that do not go with a model whose config.json holds `said`. Pure."""
    tp, pp = distributed.tp_size, distributed.pp_size
    kind = str(said.get("model_type"))
    whole = _kept_whole(kind, said)
    # A family that stays whole ends the questions: its sizes need not mean what they mean elsewhere.
    for key, parts in (("tp_size", tp), ("pp_size", pp)):
        if parts > 1 and whole[key]:
            yield Complaint(
                f"distributed.{key}",
                f"a model of type {kind}: {whole[key]}",
                f"a family with {key[:2]} in docs/models.md",
                f"set {key}=1, and raise dp_size",
            )
            return
    heads = said.get("num_attention_heads")
    sizes = {
        "num_attention_heads": heads,
        # Models without grouped heads have no such key.
        "num_key_value_heads": said.get("num_key_value_heads") or heads,
        "intermediate_size": said.get("intermediate_size"),
    }
    for name, size in sizes.items():
        # Heads and the MLP's columns are what a tensor-parallel plan deals out; a rank takes whole ones.
        if isinstance(size, int) and size % tp:
            yield Complaint(
                "distributed.tp_size", str(tp), f"a divisor of the model's {name}={size}", "lower it"
            )
    layers = said.get("num_hidden_layers")
    # Each stage has at least one layer.
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


def _kept_whole(kind: str, said: Mapping[str, Any]) -> dict[str, str]:
    """Returns why a model cannot be cut by tensors, and why not into stages; empty: it can."""
    family = FAMILIES.get(kind)
    if family is None:
        return dict.fromkeys(("tp_size", "pp_size"), "it has not been tried")
    # By the model's own config.json, since the same family has models with and without it.
    norm = next((key for key in _NORMS_OF_ALL_HEADS if said.get(key)), "")
    softcap = "final_logit_softcapping" if said.get("final_logit_softcapping") else ""
    tp = f"{family.tp} in transformers' tensor-parallel plan" if family.tp else norm
    pp = softcap if family.pp else "something besides embedding, layers, norm and head"
    return {"tp_size": tp, "pp_size": pp}
