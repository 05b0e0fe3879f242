"""What verl will read, by its own words in a run's configuration: data files, models; and how large its saves will be.

The words are those of the section `verl` (`RunConfig.verl`, dotted; `config/guest.py`). verl has defaults for all of
them, which are places in the home of whoever wrote verl's examples: a run that says nothing gets those. Pure.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Input", "bytes_per_parameter", "inputs_of", "is_remote", "said", "with_critic"]

Kind = Literal["data", "model"]

_FP32 = 4
_MOMENTS = 2
"""Of AdamW, verl's default (`optim/fsdp.yaml`), both in the dtype of the weights, float32 (`engine/fsdp.yaml`)."""
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")

_POLICY = {"sft": "model.path", "ppo": "actor_rollout_ref.model.path"}
_DEFAULTS: dict[str, dict[str, str | None]] = {
    "sft": {"data.train_files": "~/data/gsm8k/train.parquet", "data.val_files": None},
    "ppo": {
        "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
        "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    },
}
_MODEL = "~/models/deepseek-llm-7b-chat"
"""verl 0.9.1: `trainer/config/{sft_trainer_engine,data/legacy_data,model/hf_model}.yaml`."""


@dataclass(frozen=True)
class Input:
    """One place that verl will read.

    Attributes:
        key: verl's.
        place: as it is said: a path, a URL, or a name of the Hugging Face hub.
        is_default: nobody said it.
    """

    kind: Kind
    key: str
    place: str
    is_default: bool


def said(words: Mapping[str, Any], key: str) -> Any:
    """The value of a key, under any of Hydra's prefixes; None: nothing was said."""
    return next((words[prefix + key] for prefix in ("", "+", "++") if prefix + key in words), None)


def is_remote(place: str) -> bool:
    """Not on a file system: hdfs://..., s3://..."""
    return _REMOTE.match(place) is not None


def inputs_of(entry: str, words: Mapping[str, Any]) -> list[Input]:
    """All that can be named before verl has composed its configuration; what refers to something else is left out.

    Args:
        entry: `sft` or `ppo`.
        words: `RunConfig.verl`.
    """
    wanted: list[tuple[Kind, str, str | None]] = [
        ("data", key, default) for key, default in _DEFAULTS[entry].items()
    ]
    wanted.append(("model", _POLICY[entry], _MODEL))
    found = []
    for kind, key, default in wanted:
        places = _places(said(words, key))
        unsaid = not any(prefix + key in words for prefix in ("", "+", "++"))
        if unsaid and default is not None:
            places = [default]
        found += [Input(kind, key, place, unsaid) for place in places]
    if with_critic(entry, words):
        found += [
            Input("model", "critic.model.path", place, False)
            for place in _places(said(words, "critic.model.path"))
        ]
    return [one for one in found if "${" not in one.place]


def with_critic(entry: str, words: Mapping[str, Any]) -> bool:
    """Whether verl trains a critic, as its `need_critic` decides."""
    if entry != "ppo":
        return False
    enabled = said(words, "critic.enable")
    if enabled is not None:
        return str(enabled).lower() == "true"
    return said(words, "algorithm.adv_estimator") in (None, "gae")


def bytes_per_parameter(entry: str, words: Mapping[str, Any]) -> int:
    """Bytes of one save for each parameter of the policy; a critic is taken to be as large.

    float32 weights and AdamW's two moments; the weights alone where only an adapter trains (LoRA); and the bfloat16
    model that `save_contents: hf_model` adds.
    """
    policy = _POLICY[entry].removesuffix(".path")
    rank = said(words, f"{policy}.lora_rank")
    lora = isinstance(rank, int) and rank > 0
    one = _FP32 if lora else _FP32 * (1 + _MOMENTS)
    total = one * (2 if with_critic(entry, words) else 1)
    key = "checkpoint.save_contents" if entry == "sft" else "actor_rollout_ref.actor.checkpoint.save_contents"
    return total + (2 if "hf_model" in str(said(words, key)) else 0)


def _places(value: Any) -> list[str]:
    """One, a list, or a list as Hydra writes it: [a,b]."""
    if isinstance(value, list | tuple):
        return [str(one) for one in value]
    if value is None or str(value).lower() in ("null", "none"):
        return []
    text = str(value).strip()
    if text.startswith("[") and text.endswith("]"):
        return [part.strip(" '\"") for part in text[1:-1].split(",") if part.strip(" '\"")]
    return [text]
