"""Lists the places that verl will read, data files and models, by its settings, and the size of its saves. Pure.

The settings are verl's whole configuration as Hydra composes it (`composing.py`), or, without an installed verl, the
user's own settings alone (`said_settings`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl_slurm.verl.overrides import Setting, value_at
from verl_slurm.verl.releases import Entry

__all__ = [
    "Input",
    "bytes_per_parameter",
    "input_keys",
    "inputs_of",
    "is_remote",
    "said_settings",
    "with_critic",
]

Kind = Literal["data", "model"]

_FP32 = 4
_MOMENTS = 2
"""Of AdamW, verl's default (`optim/fsdp.yaml`), both in the dtype of the weights, float32 (`engine/fsdp.yaml`)."""
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")

_POLICY: dict[Entry, str] = {"sft": "model", "ppo": "actor_rollout_ref.model"}
_CHECKPOINT: dict[Entry, str] = {"sft": "checkpoint", "ppo": "actor_rollout_ref.actor.checkpoint"}


@dataclass(frozen=True)
class Input:
    """One place that verl will read.

    Attributes:
        key: verl's.
        place: as written: a path, a URL, or a name of the Hugging Face hub.
        is_default: the user did not set it.
    """

    kind: Kind
    key: str
    place: str
    is_default: bool


def said_settings(said: Mapping[str, Setting]) -> dict[str, Any]:
    """Returns the user's settings as a tree, without verl's own defaults."""
    tree: dict[str, Any] = {}
    for key, setting in said.items():
        place = tree
        *above, last = key.split(".")
        for part in above:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[last] = setting.value
    return tree


def is_remote(place: str) -> bool:
    """Returns whether a place is not on a file system: hdfs://..., s3://..."""
    return _REMOTE.match(place) is not None


def input_keys(entry: Entry) -> dict[str, Kind]:
    """Lists the keys that name places to read."""
    keys: dict[str, Kind] = {
        "data.train_files": "data",
        "data.val_files": "data",
        f"{_POLICY[entry]}.path": "model",
    }
    return keys | ({"critic.model.path": "model"} if entry == "ppo" else {})


def inputs_of(entry: Entry, settings: Mapping[str, Any], said: Mapping[str, Setting]) -> list[Input]:
    """Lists all places; one that depends on the environment is left out."""
    return [
        Input(kind, key, place, key not in said)
        for key, kind in input_keys(entry).items()
        if key != "critic.model.path" or with_critic(entry, settings)
        for place in _places(value_at(settings, key))
        # The environment of the job decides, and that is not the one of submit.
        if "${" not in place
    ]


def with_critic(entry: Entry, settings: Mapping[str, Any]) -> bool:
    """Returns whether verl trains a critic, as its `need_critic` decides."""
    if entry != "ppo":
        return False
    enabled = value_at(settings, "critic.enable")
    if enabled is not None:
        return bool(enabled)
    # As verl: without a word of the user's about the critic, GAE alone needs one.
    return value_at(settings, "algorithm.adv_estimator") in (None, "gae")


def bytes_per_parameter(entry: Entry, settings: Mapping[str, Any]) -> int:
    """Returns the bytes of one save for each parameter of the policy; a critic counts as equally large.

    They are float32 weights and AdamW's two moments, or the weights alone if only an adapter trains (LoRA). The
    bfloat16 model that `save_contents: hf_model` adds comes on top.
    """
    rank = value_at(settings, f"{_POLICY[entry]}.lora_rank")
    lora = isinstance(rank, int) and rank > 0
    one = _FP32 if lora else _FP32 * (1 + _MOMENTS)
    total = one * (2 if with_critic(entry, settings) else 1)
    contents = value_at(settings, f"{_CHECKPOINT[entry]}.save_contents") or ()
    return total + (2 if "hf_model" in contents else 0)


def _places(value: Any) -> Iterator[str]:
    if isinstance(value, list | tuple):
        yield from map(str, value)
    elif value is not None:
        yield str(value)
