"""Lists the places that verl will read, data files and models, by its settings, and the size of its saves. Pure.

The settings are verl's whole configuration as Hydra composes it (`composing.py`), or, without an installed verl, the
user's own settings alone (`said_settings`).
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl_slurm.config.roles import data_root
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint.data_record import DataPlace, data_place
from verl_slurm.verl.overrides import Setting, judged, value_at
from verl_slurm.verl.releases import Entry

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


def data_of(config: RunConfig) -> DataPlace | None:
    """Returns the data whose fingerprint tells whether it is still that of the first start: `data.root`, of which our
    own trainer reads what `data.files` takes, or the absolute paths that verl's settings name outside of an image;
    None: neither is there.
    """
    root = data_root(config)
    if root is not None and not config.trainer.is_guest:
        return data_place(root, config.data.files)
    # What an image brings is not seen from outside of it.
    if root is not None or config.trainer.backend != "verl" or config.slurm.container is not None:
        return root
    said, _ = judged(config.verl)
    named = inputs_of(config.trainer.entry, said_settings(said), said)
    places = {str(Path(os.path.expanduser(one.place))) for one in named if one.kind == "data"}
    return tuple(sorted(place for place in places if place.startswith("/"))) or None


_ROLLOUT = "actor_rollout_ref.rollout"
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
"""Values of `rollout.name` and the package that each needs. Others come from packages of the user's."""
_SAME = ("wandb", "swanlab", "mlflow", "tensorboard", "clearml", "trackio", "rl_insight")
LOGGERS = {name: name for name in _SAME} | {"vemlp_wandb": "volcengine_ml_platform", "tracking": "wandb"}
"""Values of `trainer.logger` and the package that each needs (verl/utils/tracking.py of 0.9)."""
_STRATEGIES = {name: name for name in ("megatron", "veomni", "torchtitan")} | {"automodel": "nemo_automodel"}
_REWARD_MODELS = ("reward.reward_model", "reward_model")
# Keys that may name a file, and the key beside it that names what is taken from it. Former names, too.
_CODE: dict[str, str] = {
    "custom_reward_function.path": "name",
    "reward.custom_reward_function.path": "name",
    "reward.reward_manager.module.path": "../name",
    "reward_model.reward_loop_module_path": "reward_loop_class_name",
    "data.custom_cls.path": "name",
    "data.sampler.class_path": "class_name",
    "data.datagen.path": "name",
    "trainer.v1.sampler.custom_sampler.path": "name",
    f"{_ROLLOUT}.agent.custom_async_server.path": "name",
    f"{_ROLLOUT}.multi_turn.function_tool_path": "",
}
_READ = (
    f"{_ROLLOUT}.agent.agent_loop_config_path",
    f"{_ROLLOUT}.multi_turn.tool_config_path",
    f"{_ROLLOUT}.multi_turn.interaction_config_path",
    f"{_ROLLOUT}.router_config_path",
    f"{_ROLLOUT}.quantization_config_file",
    "data.tool_config_path",
    "data.function_tool_path",
    "reward.reward_model.model_path",
    "reward_model.model.path",
    "distillation.teacher_models.teacher_model.model_path",
)
_CLASSES = (
    f"{_ROLLOUT}.agent.agent_loop_manager_class",
    f"{_ROLLOUT}.checkpoint_engine.custom_backend_module",
)
_TAILS = (
    "hf_config_path",
    "tokenizer_path",
    "lora_adapter_path",
    "lora.adapter_path",
    "dist_checkpointing_path",
    "quantization_config_path",
    "replay_file",
)


@dataclass(frozen=True)
class CodeFile:
    """A file that verl will read, with code or settings.

    Attributes:
        place: as written: a path, `file://` and a path, `pkg://` and a module.
        takes: the key that names what is taken from it; empty: nothing, or the file is no Python.
        name: that name; None: it has none.
    """

    key: str
    place: str
    takes: str
    name: str | None


def files_of(settings: Mapping[str, Any]) -> Iterator[CodeFile]:
    """Yields the files of code and settings, but for those that depend on the environment, and URLs."""
    seen = set[str]()  # data.tool_config_path refers to the rollout's, and names the same file
    for key, place in _texts(settings, ""):
        # verl reads these only if it is told to import the manager.
        source = {"reward.reward_manager.module.path": "reward.reward_manager.source"}.get(key)
        if source and value_at(settings, source) != "importlib":
            continue
        if key not in _CODE and key not in _READ and not key.endswith(_TAILS):
            continue
        if not place or "${" in place or (is_remote(place) and not place.startswith(("file://", "pkg://"))):
            continue
        if place in seen:
            continue
        seen.add(place)
        above, beside = key.rpartition(".")[0], _CODE.get(key, "")
        while beside.startswith("../"):
            above, beside = above.rpartition(".")[0], beside.removeprefix("../")
        takes = f"{above}.{beside}" if beside else ""
        name = value_at(settings, takes) if takes else None
        yield CodeFile(key, place, takes, name if isinstance(name, str) else None)


def _texts(settings: Mapping[str, Any], above: str) -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        dotted = f"{above}.{name}" if above else str(name)
        if isinstance(value, Mapping):
            yield from _texts(value, dotted)
        elif isinstance(value, str):
            yield dotted, value


def engines_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Maps each key that names an engine which will run to its value."""
    keys = [f"{_ROLLOUT}.name"]
    keys += [f"{role}.rollout.name" for role in _REWARD_MODELS if value_at(settings, f"{role}.enable")]
    return {key: value for key in keys if isinstance(value := value_at(settings, key), str)}


def strategy_of(entry: Entry, settings: Mapping[str, Any]) -> dict[str, str]:
    """Maps the key that chooses what trains the policy to its value; empty: unknown."""
    key = "engine.strategy" if entry == "sft" else "actor_rollout_ref.actor.strategy"
    return {key: value} if isinstance(value := value_at(settings, key), str) else {}


def packages_of(entry: Entry, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields settings that need a module of other packages, each with the top-level module."""
    for key in (*(f"{policy}.external_lib" for policy in (*_POLICY.values(), "critic.model")), *_CLASSES):
        for text in texts_at(settings, key):
            for name in text.split(",") if "${" not in text else []:
                yield key, name.strip().partition(".")[0]
    chosen = {**engines_of(settings), **strategy_of(entry, settings)}
    rows = [*chosen.items(), *(("trainer.logger", name) for name in texts_at(settings, "trainer.logger"))]
    for key, name in rows:
        if module := (ENGINES | LOGGERS | _STRATEGIES).get(name):
            yield f"{key}={name}", module
    if value_at(settings, liger := f"{_POLICY[entry]}.use_liger") is True:
        yield f"{liger}=true", "liger_kernel"


def texts_at(settings: Mapping[str, Any], key: str) -> list[str]:
    """Returns the texts of a key that has one of them, or a list."""
    value = value_at(settings, key)
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def flash_key(entry: Entry, settings: Mapping[str, Any]) -> str:
    """Returns the key that chooses FlashAttention for FSDP's models, as verl's code does by itself
    (verl/workers/config/model.py); empty: it is not chosen."""
    key = f"{_POLICY[entry]}.override_config.attn_implementation"
    [strategy] = strategy_of(entry, settings).values() or [""]
    fsdp = strategy.startswith("fsdp")
    return key if fsdp and value_at(settings, key) in (None, "flash_attention_2") else ""


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
