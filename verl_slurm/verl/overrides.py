"""verl's own settings in a run's section `verl`: the keys that a user may set, and those that a start sets itself.
Pure.

A key may carry Hydra's prefixes: `+new.key` for one that verl's files do not have, `++key`, and `~key` to remove one.
It may also name a group (`model_engine`, `ref@actor_rollout_ref.ref`). Each key counts once, at its last position.

verl's settings do not decide where a run saves, resumes and runs. Such keys are refused with the name of the right key,
and so is every indirect way to set them (a whole section, a group placed there). The meaning of a value is known once
Hydra has composed it (`composing.py`). Then `require_possible` refuses settings that verl cannot combine with surviving
interruptions.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import msgspec

from verl_slurm.base.errors import ConfigError, together
from verl_slurm.verl.releases import Entry

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_\-/]*(?:[.@][A-Za-z0-9_\-/]+)*")
_MOST_CHARACTERS = 30_000
"""Limit for a text: Linux takes 128 KiB in one word of a command line, and a character may have four bytes."""
_MOST_BYTES = 120_000
"""Limit for a list or mapping: it is one word, too."""
_BACKSLASHES = "\\" * 100
"""Hydra's quoting tries a run of them from each of its characters: 16,000 take 8 s."""
_SWITCH = re.compile(r"true|false|null|none", re.IGNORECASE)

_OURS = {
    "trainer.default_local_dir": "run_dir: saves go through RUN/work, and once verified lie in RUN/checkpoints",
    "trainer.default_hdfs_dir": "tiers: they move verified checkpoints",
    "trainer.resume_mode": "checkpoint.resume_from",
    "trainer.resume_from_path": "checkpoint.resume_from",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep_last",
    "trainer.max_critic_ckpt_to_keep": "checkpoint.keep_last",
    "trainer.max_ckpt_to_keep": "checkpoint.keep_last",
    "trainer.nnodes": "distributed.nodes",
    "trainer.n_gpus_per_node": "distributed.dp_size (ranks of all nodes) and distributed.nodes",
    "trainer.checkpoint_callback_class": "nothing: verl-slurm commits what verl has saved, and moves it away",
    "ray_kwargs.ray_init": "slurm.cpus_per_node, slurm.gpus_per_node and distributed: Ray is started on the job's nodes"
    " before verl, which joins it",
    "hydra.run": "run_dir: Hydra's own log lies in RUN/work",
    "hydra.output_subdir": "nothing: verl's whole configuration is in RUN/run.yaml and in verl's log",
    "hydra.sweep": "one run for each setting: verl-slurm submit",
    "hydra.mode": "one run for each setting: verl-slurm submit",
    "hydra": "nothing: where and how often verl is started is the run's; of hydra only verbose, job_logging and"
    " hydra_logging may be set",
}
"""Keys, including all below them, that are set elsewhere, and where. The first match is named."""
_ALLOWED = (
    "ray_kwargs.ray_init.runtime_env.env_vars",  # verl's own place for the environment of its workers
    "hydra.verbose",
    "hydra.job_logging",
    "hydra.hydra_logging",
)
"""Keys below ours that users may still set."""
_LOOKED_AT = ("trainer.v1.trainer_mode", "trainer.use_v1", "trainer.del_local_ckpt_after_load")
_MODES = ("sync", "colocate_async")
_MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
BEFORE_TRAINING = "trainer.val_before_train"
"""verl's own default is true."""
_WHOLE = frozenset({"model", "optimizer", "extra"})


class Setting(msgspec.Struct, frozen=True):
    """One key and its value; with the prefix `~` the value means nothing."""

    prefix: str
    key: str
    value: Any

    @property
    def name(self) -> str:
        return f"{self.prefix}{self.key}"


class OwnSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A start's settings for verl."""

    nodes: int
    ranks_per_node: int
    save_dir: PurePath
    """This attempt's work directory."""
    resume: PurePath | None
    """The verified checkpoint's `global_step_N`; None: from the start."""
    every_steps: int
    name: str


def user_settings(section: Mapping[str, Any]) -> dict[str, Setting]:
    """Returns the user's settings by key without prefix, in the order in which they count.

    Raises:
        ConfigError: no key of Hydra's, a value that Hydra cannot be told, or a key that users may not set.
    """
    found, refused = judged(section)
    if refused:
        raise together(refused)
    return found


def judged(section: Mapping[str, Any]) -> tuple[dict[str, Setting], list[ConfigError]]:
    """Returns the settings that a user may set, as `user_settings`, and why the others are refused."""
    found: dict[str, Setting] = {}
    refused: list[ConfigError] = []
    for name, value in section.items():
        key = name.lstrip("+~")
        prefix = name[: len(name) - len(key)]
        if name.endswith(" "):  # a word of the command line that is no setting (`config/load.py`)
            refused.append(
                ConfigError(
                    "not a word for verl",
                    where=name.strip(),
                    expected="KEY=VALUE or +KEY=VALUE, e.g. trainer.save_freq=5",
                    remedy=_of_config_name(name) if name.startswith(("--config", "-c")) else "fix this word",
                )
            )
            continue
        try:
            if prefix not in ("", "+", "++", "~") or not _KEY.fullmatch(key):
                raise _wrong(name, name, "a key of verl's, e.g. trainer.total_epochs or +new.key")
            _require_plain(key, value)
        except ConfigError as error:
            refused.append(error)
            continue
        # Taken out before it is put in, so that a key that is said twice has the position of the last.
        found.pop(key, None)
        found[key] = Setting(prefix, key, value)
    # After all are read: a key that a later word replaces is not judged.
    for key, setting in list(found.items()):
        try:
            _refuse_whole(setting)
            _refuse_ours(setting)
        except ConfigError as error:
            refused.append(error)
            del found[key]
    return found, refused


def _of_config_name(word: str) -> str:
    """Returns what takes the place of Hydra's option for the file that a program reads."""
    name = word.partition("=")[2].strip("'\" ").removesuffix(".yaml")
    if engine := re.fullmatch(r"(?:_generated_)?ppo_(\w+)_trainer", name):
        return f"write model_engine={engine[1]} in its place"
    if name.startswith("sft"):
        return "set trainer.entry=sft, and leave this word out"
    if name in ("ppo_trainer", "_generated_ppo_trainer"):
        return "leave it out: it is what verl reads anyway"
    return (
        "for another engine write model_engine=megatron; the file of a recipe belongs to its program: "
        "trainer.command: [-m, MODULE, --config-name, NAME]"
    )


def own_settings(entry: Entry, own: OwnSettings, said: Mapping[str, Setting]) -> list[Setting]:
    """Returns a start's settings for verl, to follow `said`; some only where `said` lacks their key."""
    ours: dict[str, Any] = {
        # An attempt's own directory: what a fenced one still writes harms no later one.
        "trainer.default_local_dir": str(own.save_dir),
        # Never `auto`: verl would take whatever its tracker names, whole or not.
        "trainer.resume_mode": "disable" if own.resume is None else "resume_path",
        "trainer.resume_from_path": None if own.resume is None else str(own.resume),
        "trainer.nnodes": own.nodes,
        "trainer.n_gpus_per_node": own.ranks_per_node,
    }
    # verl would remove checkpoints by its own memory, which a restart forgets; with this it removes nothing.
    if entry == "ppo":
        ours |= {
            "trainer.max_actor_ckpt_to_keep": None,
            "trainer.max_critic_ckpt_to_keep": None,
            # Not a key of verl's before 0.9.1.
            "hydra.run.dir": str(own.save_dir.parent / "hydra"),
            "hydra.output_subdir": None,
        }
        # The first start has done it. `++`: a recipe's file may lack the key, and only a resume would meet that.
        if own.resume is not None and BEFORE_TRAINING not in said:
            ours[f"++{BEFORE_TRAINING}"] = False
        # `++`: no file of verl's has the key, though its program reads it. A manager of the user's own stays.
        if _MANAGER not in said:
            ours[f"++{_MANAGER}"] = "verl_slurm.loops.verl.verl_rollouts.LedgerManager"
    else:
        ours |= {"trainer.default_hdfs_dir": None, "trainer.max_ckpt_to_keep": None}
    # A cadence of the user's own is theirs: each save of verl's becomes a checkpoint, whatever its step.
    unless_said = {"trainer.save_freq": own.every_steps, "trainer.experiment_name": own.name}
    ours |= {key: value for key, value in unless_said.items() if key not in said}
    return [
        Setting("++" if name.startswith("++") else "", name.lstrip("+"), value)
        for name, value in ours.items()
    ]


def value_at(settings: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a dotted key; None: there is none."""
    place: Any = settings
    for part in key.split("."):
        if not isinstance(place, Mapping) or part not in place:
            return None
        place = place[part]
    return place


def trainer_mode(settings: Mapping[str, Any]) -> str:
    """Returns which of verl's v1 trainers runs."""
    return value_at(settings, "trainer.v1.trainer_mode") or "sync"


def require_possible(settings: Mapping[str, Any], said: Mapping[str, Setting]) -> None:
    """Raises ConfigError for settings that would run but lose or break a promise of the run.

    Args:
        settings: verl's whole input, composed; or, without an installed verl, the user's settings alone.
    """
    if impossible := list(_impossible(settings, said)):
        raise together(impossible)


def _impossible(settings: Mapping[str, Any], said: Mapping[str, Setting]) -> Iterator[ConfigError]:
    # separate_async runs rollouts ahead of the weights, and those that have begun are in no checkpoint.
    if (mode := trainer_mode(settings)) not in _MODES:
        yield _cannot(
            "trainer.v1.trainer_mode",
            mode,
            f"one of {', '.join(_MODES)}",
            "the others keep no state that a resume is exact from",
        )
    must = {
        "trainer.use_v1": (True, "verl's older trainer cannot be asked to save and leave"),
        "trainer.val_only": (
            False,
            "it trains no step, and a run is done behind its last one: use verl itself",
        ),
        "trainer.del_local_ckpt_after_load": (
            False,
            "it would remove the verified checkpoint that a start resumed from",
        ),
    }
    for key, (wanted, why) in must.items():
        value = value_at(settings, key)
        # By truth, as verl asks it: any text is true there.
        if value is not None and bool(value) is not wanted:
            yield _cannot(key, value, str(wanted).lower(), why)
    save_freq = value_at(settings, "trainer.save_freq")
    # verl's default is replaced by the run's own number, so what the user says is judged alone.
    if "trainer.save_freq" in said and not (type(save_freq) is int and save_freq > 0):
        yield _cannot(
            "trainer.save_freq", save_freq, "at least 1", "verl saves its last step only when it saves at all"
        )
    # Wherever in the tree they lie: actor, critic and SFT have such a section each, and a group may bring more.
    for path, checkpoint in _checkpoints(settings, ""):
        if checkpoint.get("async_save"):
            yield _cannot(
                f"{path}.async_save",
                checkpoint["async_save"],
                "false",
                "nobody could say when such a save is whole",
            )
        for name in ("save_contents", "load_contents"):
            parts = checkpoint.get(name)
            if parts is not None and not _WHOLE.issubset(parts if isinstance(parts, list) else [parts]):
                yield _cannot(f"{path}.{name}", parts, "[model,optimizer,extra]", "a resume needs all three")


def _checkpoints(settings: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, value in settings.items():
        below = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            if name == "checkpoint":
                yield below, value
            yield from _checkpoints(value, below)


def _require_plain(key: str, value: Any) -> None:
    """Requires values that Hydra's grammar and a command line can hold."""
    match value:
        case str() if any(ord(letter) < 32 and letter != "\t" for letter in value):
            raise _wrong(key, repr(value), "text on one line")
        case str() if len(value) > _MOST_CHARACTERS or _BACKSLASHES in value:
            raise _wrong(
                key, f"{len(value)} characters", f"at most {_MOST_CHARACTERS}, few of them backslashes"
            )
        case None | bool() | int() | float() | str():
            pass
        case list() | tuple() | Mapping() if (size := len(str(value).encode(errors="replace"))) > _MOST_BYTES:
            raise _wrong(key, f"{size} bytes", f"at most {_MOST_BYTES}: Linux takes no longer word")
        case list() | tuple():
            for item in value:
                _require_plain(key, item)
        case Mapping():
            for item in value.values():
                _require_plain(key, item)
        case _:
            raise _wrong(key, type(value).__name__, "text, a number, a list or a mapping")


def switches_as_text(said: Mapping[str, Setting]) -> list[ConfigError]:
    """Refuses `False` as verl's own examples write it: in YAML 1.2 it is text, and to verl any text is true."""
    expected = "true, false or null, in small letters and without quotes"
    return [
        _wrong(key, f"{item!r}, text", expected)
        for key, setting in said.items()
        for item in (setting.value if isinstance(setting.value, list | tuple) else [setting.value])
        # Whole texts alone: `none` within a longer one is a word.
        if isinstance(item, str) and _SWITCH.fullmatch(item)
    ]


FORMER: dict[Entry, dict[str, str]] = {
    "sft": {
        "data.micro_batch_size": "data.micro_batch_size_per_gpu",
        "data.multiturn.enable_thinking_key": "data.enable_thinking_key",
        "data.multiturn.messages_key": "data.messages_key",
        "data.multiturn.tools_key": "data.tools_key",
        "data.prompt_dict_keys": "data.messages_key: rows hold conversations",
        "data.prompt_key": "data.messages_key: rows hold conversations, a list of {role, content}",
        "data.response_dict_keys": "data.messages_key: rows hold conversations",
        "data.response_key": "data.messages_key: rows hold conversations, a list of {role, content}",
        "model.fsdp_config.cpu_offload": "engine.offload_policy",
        "model.fsdp_config.model_dtype": "engine.model_dtype",
        "model.fsdp_config.offload_params": "engine.param_offload",
        "model.fsdp_config.wrap_policy.min_num_params": "engine.wrap_policy.min_num_params",
        "model.partial_pretrain": "model.path",
        "model.strategy": "engine.strategy",
        "optim.lr_scheduler": "optim.lr_scheduler_type",
        "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
        "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
        "use_remove_padding": "model.use_remove_padding",
    },
    "ppo": {
        "actor_rollout_ref.rollout.multi_turn.max_turns": "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
        "critic.model.fsdp_config.optimizer_offload": "critic.fsdp.optimizer_offload",
        "critic.model.fsdp_config.param_offload": "critic.fsdp.param_offload",
        "critic.model.fsdp_config.fsdp_size": "critic.fsdp.fsdp_size",
        "critic.model.fsdp_config.wrap_policy.min_num_params": "critic.fsdp.wrap_policy.min_num_params",
        "data.dataloader_workers": "data.dataloader_num_workers",
        "ray_init.num_cpus": "ray_kwargs.ray_init",
        "trainer.remove_previous_ckpt_in_save": "checkpoint.keep_last, a key of the run's",
    },
}
"""Names of settings in other releases or trainers of verl, and what takes their place in those that are served."""


def former_name(entry: Entry, key: str) -> str:
    """Returns what takes the place of a setting's former name; empty: nothing is known."""
    return FORMER[entry].get(key, "")


def _places(setting: Setting) -> Iterator[str]:
    """Lists dotted keys that a setting may change: its own, and the place of a group (`group@place`)."""
    return (part.replace("/", ".") for part in setting.key.split("@"))


def _refuse_whole(setting: Setting) -> None:
    """Refuses a whole section that contains keys of ours: set, removed, or filled from a group."""
    for place in _places(setting):
        if setting.value == {} and setting.prefix != "~":
            continue  # adds nothing
        # Keys inside a map are no words of their own, so neither the list nor the looks would see them.
        above = any(known.startswith(f"{place}.") for known in (*_OURS, *_LOOKED_AT))
        # To remove a section `checkpoint` would hide it from the look for async_save and save_contents.
        if above or (setting.prefix == "~" and f".{place}".endswith(".checkpoint")):
            raise _cannot(
                setting.name,
                setting.value,
                f"{place}.NAME=VALUE, each by itself",
                "what is in it has to be looked at",
            )


def _refuse_ours(setting: Setting) -> None:
    for place in _places(setting):
        # With the dot, so that a key that merely begins alike does not count.
        if any(f"{place}.".startswith(f"{allowed}.") for allowed in _ALLOWED):
            continue
        for ours, instead in _OURS.items():
            if f"{place}.".startswith(f"{ours}."):
                raise ConfigError(
                    "this setting of verl's is not said under verl:",
                    where=setting.name,
                    remedy=f"instead: {instead}",
                )


def _cannot(key: str, found: object, expected: str, why: str) -> ConfigError:
    return ConfigError(
        "verl cannot be run so here", where=f"verl.{key}", found=found, expected=expected, remedy=why
    )


def _wrong(key: str, found: object, expected: str) -> ConfigError:
    return ConfigError("no setting that verl can read", where=f"verl.{key}", found=found, expected=expected)
