"""Checks a run of verl before anything is queued, for errors that would otherwise show after its wait in the queue.

The rules for its data are those of verl 0.9: `RLHFDataset`, `MultiTurnSFTDataset` and the reward managers.
"""

import ast
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from verl_slurm.base.bounded import CONFIG, SOURCE, read_model_config, read_regular
from verl_slurm.base.errors import (
    UNREADABLE,
    CheckpointCorrupt,
    ConfigError,
    DataError,
    SchemaMismatch,
    VerlSlurmError,
    together,
)
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.packages import pip_install
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.format.specification import MANIFEST
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.checks import Finding, good, skipped, warn
from verl_slurm.config.elastic import allowed_nodes
from verl_slurm.config.schema import RunConfig
from verl_slurm.containers.runtimes import contained_argv
from verl_slurm.dataset.prompts.look import MOST_TEXTS, Rows, WantedRows
from verl_slurm.loops.verl.verl_settings import start_settings
from verl_slurm.slurm.rank_setup import python_of
from verl_slurm.submit.checks import user_programs
from verl_slurm.submit.checks.model_files import require_model, require_whole_weights, weight_files
from verl_slurm.submit.checks.prompt_data import look_at_files, refuse_partial
from verl_slurm.submit.checks.user_programs import (
    answer_of_ranks_python,
    check_modules,
    check_source,
    is_copied_alone,
    ranks_search,
)
from verl_slurm.verl import verl_inputs
from verl_slurm.verl.composing import Composed, unread_additions
from verl_slurm.verl.overrides import (
    BEFORE_TRAINING,
    Setting,
    judged,
    require_possible,
    switches_as_text,
    value_at,
)
from verl_slurm.verl.releases import Entry, installed_verl, require_usable
from verl_slurm.verl.reshard.checkpoint import division_of, require_fsdp, require_room, source_of
from verl_slurm.verl.reshard.dividing import ranks_python
from verl_slurm.verl.step_layout import is_distributed, step_of, way_out

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Keys of YAML files that name classes, under `class_name` or `_target_`.
_OF_CLASSES = ("tool_config_path", "agent_loop_config_path", "interaction_config_path")
# What decides on a training: words → key.
_TRAINED: dict[Entry, dict[str, str]] = {
    "ppo": {
        "{}": "algorithm.adv_estimator",
        "{} steps": "trainer.total_training_steps",
        "{} epochs": "trainer.total_epochs",
        "{} prompts a step": "data.train_batch_size",
        "{} to a prompt": "actor_rollout_ref.rollout.n",
        "up to {} tokens": "data.max_response_length",
        "lr {}": "actor_rollout_ref.actor.optim.lr",
    },
    "sft": {
        "{} steps": "trainer.total_training_steps",
        "{} epochs": "trainer.total_epochs",
        "{} rows a step": "data.train_batch_size",
        "up to {} tokens": "data.max_length",
        "lr {}": "optim.lr",
    },
}
# As verl's main does, before it starts anything (verl.trainer.main_ppo).
_JUDGED_BY_VERL = """
import json, sys
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
config = OmegaConf.create(sys.stdin.read())
found = key = ""
try:
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
except Exception as error:
    cause = error.__cause__ or error
    if isinstance(cause, OmegaConfBaseException) or not isinstance(cause, (AssertionError, TypeError, ValueError)):
        raise
    found, key = str(cause), str(error).partition("full_key: ")[2]
print(json.dumps([found, key]))
"""
# Those of verl's own that give `data_source` and the ground truth to a function.
_MANAGERS = ("naive", "dapo", "gdpo", "remote", "rate_limited")
# Estimators of verl's that compare the responses to one prompt.
_OF_GROUPS = re.compile("(grpo|rloo|opo|gpg|gdpo|(tir_)?optimal_token|reinforce_plus_plus_baseline).*")
_SUFFIXES = (".parquet", ".json", ".jsonl")
_ROLLOUT = "actor_rollout_ref.rollout"
_SOURCE, _TRUTH = "data_source", "reward_model.ground_truth"
PLAN_S = 600.0
"""A plan reads the heads of all shards: seconds, on storage that answers."""
_NAMED = "what verl's settings name: model, data, files, modules"
# Modules that verl 0.9.1 imports and `pip install verl` does not install: module → the name for pip.
_BESIDES = {
    "sft": {"uvicorn": "uvicorn", "fastapi": "fastapi"},
    "ppo": {
        "ray": "ray",
        "transfer_queue": "TransferQueue",
        "zmq": "pyzmq",
        "cachetools": "cachetools",
        "uvicorn": "uvicorn",
        "fastapi": "fastapi",
    },
}


def check_verl(
    config: RunConfig, paths: RunPaths, committed: Sequence[CheckpointInfo]
) -> tuple[list[Finding], str]:
    """Runs all checks; returns their findings, and what will be trained.

    Args:
        config: `trainer.backend: verl`, paths absolute.
        committed: checkpoints of the run, newest first.

    Raises:
        ConfigError: another number of ranks than the checkpoint's, no verl, or settings that verl cannot read.
        DataError: data files or a model are not there.
    """
    entry, (said, refused) = config.trainer.entry, judged(config.verl)
    if not paths.run_yaml.exists():  # a run that has begun with one continues with it
        refused += switches_as_text(said)
    # Before anything is composed: no other setting helps a run whose shards these ranks cannot read.
    with _passing_over("verl's own settings", _NAMED):
        divided = check_ranks(config, paths, committed)
    found, unjudged = [*map(warn, filter(None, [divided]))], list[str]()
    if committed and not divided:
        found.append(good(f"{counted(config.distributed.world_size, 'rank')}, as saved"))
    looks = list[Callable[[], list[Finding]]]()
    if config.slurm.container is None:
        with _passing_over(_NAMED):
            found += _installed(entry)
            composed, doubtful, refused = _composed(config, paths, said, refused)
        settings, found = composed.settings, [*found, *map(warn, doubtful)]
        # A run that has trained with its settings has passed them already: verl's import takes seconds.
        judged_by_verl = entry == "ppo" and not config.trainer.command and not committed
        if refused:
            unjudged = ["verl's own judgement of its settings"] if judged_by_verl else []
        else:
            looks = [partial(_require_fewer, config, settings)]
            looks += [partial(_judged_by_verl, config, composed)] if judged_by_verl else []
    else:
        found.append(skipped("verl, its engine and its defaults, which are the container's"))
        with _passing_over(_NAMED):
            if refused:
                raise together(refused)
            settings = verl_inputs.said_settings(said)
            require_possible(settings, said)
            _require_named(entry, said)
    found.append(good("verl's own settings"))
    # All that is wrong is said at once: each look of the user's is a minute.
    wrong: list[VerlSlurmError] = [*refused]
    for look in (*looks, *_looks(config, settings, said, begun=bool(committed))):
        try:
            found += look()
        except VerlSlurmError as error:
            wrong.append(error)
    if wrong:
        raise together(wrong, unjudged)
    return found, _trained(entry, settings, said)


def _installed(entry: Entry) -> list[Finding]:
    version = installed_verl()
    unknown = require_usable(version)
    if not unknown:
        _require_beside(entry)
    return [*map(warn, filter(None, [unknown])), good(f"verl {version} is installed")]


@contextmanager
def _passing_over(*names: str) -> Iterator[None]:
    try:
        yield
    except VerlSlurmError as error:
        # It names what is not looked at because of it.
        raise together([error], names) from error.__cause__


def _trained(entry: Entry, settings: Mapping[str, Any], said: Mapping[str, Setting]) -> str:
    """Returns what decides on a training, in one line; `(default)` follows each value that is verl's own."""
    given = {setting.key for setting in said.values()}
    words = []
    for text, key in _TRAINED[entry].items():
        value = value_at(settings, key)
        if value not in (None, "???") and "${" not in str(value):
            words.append(text.format(value) + (" (default)" if key not in given else ""))
    return ", ".join([f"verl, {entry}", *words])


def _looks(
    config: RunConfig, settings: Mapping[str, Any], said: Mapping[str, Setting], *, begun: bool
) -> Iterator[Callable[[], list[Finding]]]:
    """Yields a check for each thing that verl will read or import. Each may raise."""
    entry = config.trainer.entry
    if entry == "ppo":
        yield partial(_unknown_engines, settings)
        yield lambda: [*map(warn, _repeated_validation(settings, said))]
    yield partial(_check_loggers, config, settings)
    if config.slurm.container is None and not config.trainer.command:
        yield partial(_check_attention, config, settings)
    yield lambda: [*map(warn, _check_sizes(entry, settings))]
    inputs = [
        one for one in verl_inputs.inputs_of(entry, settings, said) if one.place != "???"
    ]  # said already
    for one in inputs:
        if one.kind != "data":
            yield partial(_check_named_model, one)
    for key, kind in verl_inputs.input_keys(entry).items():
        named = [one for one in inputs if one.key == key]
        if kind == "data":
            yield partial(_check_data, config, settings, key, named, begun=begun)
        if "${" in str(value_at(settings, key)):
            yield partial(list, [skipped(f"verl.{key}, which the job's environment decides")])
    for code in verl_inputs.files_of(settings):
        yield partial(_check_file, config, code)
    for setting, module in verl_inputs.packages_of(entry, settings):
        yield partial(check_modules, config, [module], f"verl.{setting}")


def _check_named_model(one: verl_inputs.Input) -> list[Finding]:
    if note := check_input(one):
        return [warn(note)]
    if any(Path(os.path.expanduser(one.place)).glob("*.safetensors")):
        return [good(f"verl.{one.key}: config.json and headers of the weights")]
    return [good(f"verl.{one.key}: config.json"), skipped(f"the weights of verl.{one.key}: pickles")]


def _check_data(
    config: RunConfig,
    settings: Mapping[str, Any],
    key: str,
    inputs: Sequence[verl_inputs.Input],
    *,
    begun: bool,
) -> list[Finding]:
    notes, wrong = list[str](), list[VerlSlurmError]()
    for one in inputs:
        try:
            notes += filter(None, [check_input(one)])
        except DataError as error:
            wrong.append(error)
    if wrong:
        raise together(wrong)
    return [*map(warn, notes), *_check_rows(config, settings, key, inputs, begun=begun)]


def _judged_by_verl(config: RunConfig, composed: Composed) -> list[Finding]:
    answer, unseen = answer_of_ranks_python(config, _JUDGED_BY_VERL, composed.as_yaml())
    found = key = ""
    try:
        found, key = msgspec.json.decode(answer or '["", ""]', type=tuple[str, str])
    except msgspec.DecodeError:  # something of the site's prints behind it
        unseen = f"its answer is not understood: {answer[:100]}"
    if unseen:
        return [skipped(f"verl's own judgement of its settings: {unseen}")]
    if not found:
        return []
    raise ConfigError(
        "verl refuses its settings",
        where=f"verl.{key}" if key else "verl",
        found=found,
        remedy="set what it names, below `verl` in the file or as KEY=VALUE after `--`",
    )


def _composed(
    config: RunConfig, paths: RunPaths, said: Mapping[str, Setting], refused: list[ConfigError]
) -> tuple[Composed, list[str], list[ConfigError]]:
    """Composes verl's settings, its defaults included; returns them, notes, and what is wrong, `refused` included."""
    entry, notes = config.trainer.entry, list[str]()
    if not config.trainer.command:  # a recipe has files of its own, and may read more keys
        former, notes = unread_additions(entry, said.values())
        refused = [*refused, *former]
    try:
        # Any attempt's number: composing needs one.
        composed = start_settings(config, paths, 1, None)
    except ConfigError as error:
        raise together([*refused, error]) from None
    settings = composed.settings
    refused += [
        ConfigError(
            "a setting that verl leaves to its user has no value",
            where=f"verl.{key}",
            found="???",
            expected=f"one of {', '.join(verl_inputs.ENGINES)}" if key.endswith("rollout.name") else None,
            remedy=f"set verl.{key}, or write {key}=VALUE after `--`",
        )
        for key in composed.unset
        if _counts(entry, settings, key)
    ]
    return composed, notes, refused


def _counts(entry: Entry, settings: Mapping[str, Any], key: str) -> bool:
    """Returns whether verl will read a key: not in a section that is off, nor of a critic that is not there."""
    if key.startswith("critic.") and not verl_inputs.with_critic(entry, settings):
        return False
    # verl moves a former name to its new place before it reads that.
    if key == "reward.reward_model.rollout.name" and value_at(settings, "reward_model.rollout.name"):
        return False
    parts = key.split(".")
    above = [".".join(parts[:number]) for number in range(1, len(parts))]
    if any(value_at(settings, f"{section}.enable") is False for section in above):
        return bool(value_at(settings, "reward_model.enable")) and key.startswith("reward.reward_model.")
    return True


def _unknown_engines(settings: Mapping[str, Any]) -> list[Finding]:
    return [
        skipped(f"verl.{key}={name}, which is none of verl's engines ({', '.join(verl_inputs.ENGINES)})")
        for key, name in verl_inputs.engines_of(settings).items()
        if name not in verl_inputs.ENGINES
    ]


def _check_loggers(config: RunConfig, settings: Mapping[str, Any]) -> list[Finding]:
    known = ("console", "file", *verl_inputs.LOGGERS)
    for name in verl_inputs.texts_at(settings, "trainer.logger"):
        source = None if name in known else _source_of_verl(config, "utils/tracking.py")
        if source is not None and f'"{name}"' not in source:
            raise ConfigError(
                "verl has no such logger",
                where="verl.trainer.logger",
                found=name,
                expected=", ".join(known),
                remedy="set verl.trainer.logger",
            )
    return []


def _check_attention(config: RunConfig, settings: Mapping[str, Any]) -> list[Finding]:
    """Refuses FlashAttention where neither its package is nor the one that downloads it: transformers would."""
    key = verl_inputs.flash_key(config.trainer.entry, settings)
    try:
        return check_modules(config, ["flash_attn"] if key else [], f"verl.{key}=flash_attention_2")
    except ConfigError as error:
        with suppress(ConfigError):
            return check_modules(config, ["kernels"], f"verl.{key}=flash_attention_2")
        install = pip_install("flash-attn", python=python_of(config.slurm) or sys.executable)
        error.remedy = f"{install}, or add ++{key}=sdpa after `--`"
        raise


def _check_file(config: RunConfig, file: verl_inputs.CodeFile) -> list[Finding]:
    where = f"verl.{file.key}"
    # verl gives its default to the new key alone: with the former one the name is empty, and each start fails.
    inside = config.slurm.container is not None
    if file.takes and file.name is None and not inside:
        raise ConfigError(
            "verl is not told what to take from a file",
            where=f"verl.{file.takes}",
            found=f"nothing, and {file.key}={file.place}",
            remedy=f"set verl.{file.takes} to the name of the function or class",
        )
    if file.place.startswith("pkg://"):
        module = file.place.removeprefix("pkg://").replace("/", ".").partition(".")[0]
        return check_modules(config, [module], f"{where}={file.place}")
    place = Path(os.path.expanduser(file.place.removeprefix("file://")))
    takes_hub_names = file.key.endswith(
        ("model_path", "model.path", "tokenizer_path", "config_path", "adapter_path")
    )
    if takes_hub_names and not place.is_absolute() and _HUB_NAME.fullmatch(file.place) and not place.suffix:
        return [skipped(f"{where}, taken for a name of the Hugging Face hub: {file.place}")]
    if not place.exists() and inside:
        return [skipped(f"{where}={file.place}, which this machine does not have: it may be the container's")]
    if not place.exists():
        raise DataError(
            "a file that verl reads is not there",
            where=f"{where}: {file.place}",
            expected="a path that exists on this machine and on the nodes; a relative one from where submit is run",
            remedy=f"set {where}",
        )
    if place.suffix == ".py":
        alone = is_copied_alone(config, place)
        found = check_source(config, where, place, file.name or "", alone=alone)
        return [good(f"{where}: {place.name}"), *found]
    if place.suffix in (".yaml", ".yml") and file.key.endswith(_OF_CLASSES):
        return _check_classes(config, where, place)
    return [skipped(f"the content of {where}: {file.place}")]


def _check_classes(config: RunConfig, where: str, place: Path) -> list[Finding]:
    try:
        text = read_regular(place, CONFIG, follow=True).decode()
        yaml: Any = YAML(typ="safe", pure=True)
        # Its form alone: nothing is made of it.
        yaml.compose(text)
    except (OSError, ValueError, YAMLError, RecursionError) as error:
        raise DataError(
            "a file that verl reads cannot be read",
            where=f"{where}: {place}",
            found=str(error).partition("\n")[0],
        ) from None
    # Of the classes that it names, the modules are looked for.
    names = re.findall(r"""["']?(?:class_name|_target_)["']?\s*:\s*["']?([A-Za-z_]\w*)\.[\w.]+""", text)
    unseen = skipped(f"whether the classes that {place} names are there")
    return [good(f"{where}: {place.name}"), *check_modules(config, names, str(place)), unseen]


def check_ranks(config: RunConfig, paths: RunPaths, committed: Sequence[CheckpointInfo]) -> str:
    """Refuses a number of ranks among which the start could not divide the checkpoint; returns a note if it will.

    The ranks' Python makes the start's plan (`verl.reshard`), if nothing on the nodes changes it, of bytes that are
    not verified yet.

    Raises:
        ConfigError: the reason, and the way out.
        NoRoom: there is none for the divided copy.
    """
    wanted = config.checkpoint.resume_from
    chosen: tuple[Path, int, int | None] | None = None
    if wanted is not None and wanted != "auto" and not CHECKPOINT_NAME.fullmatch(wanted):
        chosen = _elsewhere(Path(wanted))
    else:
        # Newest first: `auto` takes the first of them, as a start would.
        named = (info for info in committed if wanted in ("auto", info.name))
        if (info := next(named, None)) is not None:
            chosen = paths.checkpoints / info.name, info.step, info.world_size
    if chosen is None:
        return ""
    path, step, ranks = chosen
    now = config.distributed.world_size
    # verl reads a checkpoint back with exactly as many ranks as wrote it.
    if ranks in (None, now):
        return ""
    own = path / f"global_step_{step}"
    try:
        manifest = read_manifest(path)
        require_fsdp(source := source_of(path, manifest), now)
        if unseen := user_programs.why_unseen(config):
            return f"not looked at: whether {path.name} of {ranks} ranks can be divided among {now}: {unseen}"
        end = partial(_end_late, time.monotonic() + PLAN_S)
        python = partial(ranks_python, config, contained_argv)
        with division_of(source, now, python, on_bytes=end) as division:
            plan = division.plan
        require_room(source, plan, paths.resharded.checkpoints)
    except ConfigError as error:
        # Megatron's has a merger of its own, which the error names.
        megatron = is_distributed([entry.path for entry in manifest.files])
        remedy = f"keep {ranks} ranks (distributed.dp_size={ranks}), or {error.remedy}"
        raise ConfigError(
            "verl cannot go on with this number of ranks",
            where="distributed",
            found=f"world size {now}, and {path.name} was saved with {ranks}: {error.found}",
            expected=f"{ranks}",
            remedy=remedy if megatron else way_out(own, config.trainer.entry, ranks),
        ) from error
    except _TooLate:
        raise ConfigError(
            "whether verl's checkpoint can be divided is not known in time",
            where=own,
            found=f"no plan for {now} ranks after {PLAN_S:.0f} s",
            remedy=f"see whether its storage and the ranks' Python answer, or keep {ranks} ranks "
            f"(distributed.dp_size={ranks})",
        ) from None
    # The lead verifies every byte, sets a damaged one aside and says so.
    except (CheckpointCorrupt, SchemaMismatch, OSError):
        return ""
    return (
        f"{path.name} was saved by {counted(plan.before, 'rank')}: the start divides it among {now} "
        f"({plan.num_bytes / 1e6:.1f} MB of tensors), and each of them stays the same (docs/verl.md)"
    )


class _TooLate(Exception):
    pass


def _end_late(deadline_s: float, _num_bytes: int) -> None:
    if time.monotonic() > deadline_s:
        raise _TooLate


def _require_fewer(config: RunConfig, settings: Mapping[str, Any]) -> list[Finding]:
    """Refuses `distributed.min_nodes` where verl could not go on with each number of nodes that it allows."""
    entry, policy = config.trainer.entry, "actor_rollout_ref"
    if config.distributed.min_nodes is None:
        return []

    def at(key: str) -> int:
        value = value_at(settings, key)
        return value if type(value) is int else 1

    samples = at(f"{policy}.rollout.n") if entry == "ppo" else 1
    products = {"data.train_batch_size": samples}
    parts: list[str] = []
    strategies = ["engine.strategy"]
    if entry == "ppo":
        roles = [f"{policy}.actor", *(["critic"] if verl_inputs.with_critic(entry, settings) else [])]
        strategies = [f"{role}.strategy" for role in roles]
        products |= {f"{role}.ppo_mini_batch_size": samples for role in roles}
        parts = [
            f"{policy}.rollout.tensor_model_parallel_size",
            f"{policy}.actor.ulysses_sequence_parallel_size",
        ]
    # verl finds out at a start: the run would end at its first lost node.
    for nodes in allowed_nodes(config):
        ranks = nodes * config.distributed.ranks_per_node
        wrong = [f"{key}={at(key)}" for key, times in products.items() if at(key) * times % ranks]
        wrong += [f"{key}={at(key)}" for key in parts if ranks % at(key)]
        wrong += [
            f"{key}={value}"
            for key in strategies
            if not str(value := value_at(settings, key)).startswith("fsdp")
        ]
        if wrong:
            raise ConfigError(
                f"verl could not go on with {counted(ranks, 'rank')} on {counted(nodes, 'node')}",
                where="distributed.min_nodes",
                found=", ".join(wrong),
                expected="FSDP, and sizes that can be divided among each number of ranks",
                remedy="set distributed.min_nodes=null, or sizes that fit",
            )
    return []


def _elsewhere(path: Path) -> tuple[Path, int, int] | None:
    """Returns path, step and ranks of a checkpoint of another run; None: unreadable."""
    if step_of(path.name) is not None and not (path / MANIFEST).exists():
        raise ConfigError(
            "a checkpoint of plain verl has to be taken over first",
            where="checkpoint.resume_from",
            found=path,
            expected="a checkpoint of a run",
            remedy=f"verl-slurm adopt {shell_word(path.parent)} RUN, and checkpoint.resume_from=auto",
        )
    try:
        # Its numbers alone: the lead verifies every byte before it resumes from there.
        manifest = read_manifest(path)
    # Left to the lead, which reports what is wrong.
    except (OSError, VerlSlurmError):
        return None
    return path, manifest.step, manifest.world_size


def _require_named(entry: Entry, said: Mapping[str, Setting]) -> None:
    """Requires the inputs in the user's words if no verl can be asked for its defaults."""
    for key, kind in verl_inputs.input_keys(entry).items():
        # verl's defaults for the others are paths in the home directories of its examples' authors.
        optional = key == "critic.model.path" or (entry == "sft" and key == "data.val_files")
        if key not in said and not optional:
            raise DataError(
                f"no {'model' if kind == 'model' else 'data file'} is named",
                where=f"verl.{key}",
                found="verl's own default, in the container",
                remedy=f"set verl.{key}",
            )


def _require_beside(entry: Entry) -> None:
    """Requires what verl's trainer imports."""
    # find_spec imports none of them.
    # Of a release whose imports are known; another one may need others.
    missing = [pip for module, pip in _BESIDES[entry].items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            "verl is installed without what its trainer imports",
            where=sys.executable,
            found=f"no {', no '.join(missing)}",
            remedy=pip_install(*missing),
        )


def check_input(one: verl_inputs.Input) -> str:
    """Raises DataError if the input does not exist; else returns a note about it. A path is absolute."""
    place = Path(os.path.expanduser(one.place))
    # From what cannot be looked at here to what must exist: a URL and a name of the hub look like relative paths.
    if verl_inputs.is_remote(one.place):
        return f"verl.{one.key}: {one.place} is not on a file system; nobody looked whether it is there"
    if one.kind == "model" and not place.exists() and _HUB_NAME.fullmatch(one.place):
        return f"verl.{one.key}: {one.place} is taken for a name of the Hugging Face hub, which every node must reach"
    # One that exists was made absolute before (`relative_paths.absolute`), since verl's workers run elsewhere.
    if not place.is_absolute():
        raise DataError(
            "a relative path of verl's leads nowhere",
            where=f"verl.{one.key}",
            found=one.place,
            expected="a path that exists, relative to where submit is run",
            remedy=f"set verl.{one.key}",
        )
    if not place.exists():
        default = ", verl's own default" if one.is_default else ""
        raise DataError(
            f"{'no such model' if one.kind == 'model' else 'no such data file'}{default}",
            where=place,
            remedy=f"set verl.{one.key}",
        )
    if one.kind == "model":
        _check_model(one, place)
    return ""


def _check_model(one: verl_inputs.Input, place: Path) -> None:
    remedy = (
        f"set verl.{one.key} to a directory made by save_pretrained, or to a name of the Hugging Face hub"
    )
    require_model(f"verl.{one.key}", place, remedy)
    # Safetensors, or pickles, which verl itself reads.
    if not weight_files(place, remedy):
        raise DataError("the model directory has no weights", where=place, remedy=remedy)
    try:
        said = read_model_config(place)
    except UNREADABLE as error:
        raise DataError("the model's config.json is not JSON", where=place, found=error) from None
    if said.get("is_encoder_decoder"):
        found = f"model_type {said.get('model_type')}, an encoder with a decoder"
        expected = "a decoder that predicts the next token"
        raise DataError(
            "verl cannot train this model", where=place, found=found, expected=expected, remedy=remedy
        )
    # A file that was cut off ends each start of verl.
    require_whole_weights(place)


def _check_sizes(entry: Entry, settings: Mapping[str, Any]) -> list[str]:
    """Refuses a mini-batch that is larger than its batch; returns notes."""
    batch = value_at(settings, "data.train_batch_size")
    roles = ["actor_rollout_ref.actor", *(["critic"] if verl_inputs.with_critic(entry, settings) else [])]
    for role in roles if entry == "ppo" and isinstance(batch, int) else []:
        size = value_at(settings, f"{role}.ppo_mini_batch_size")
        # verl would end at its first update.
        if isinstance(size, int) and size > batch:
            raise ConfigError(
                "a mini-batch of verl's is larger than the batch",
                where=f"verl.{role}.ppo_mini_batch_size",
                found=f"{size}, and data.train_batch_size={batch}",
                expected=f"at most {batch}",
                remedy="lower it, or raise verl.data.train_batch_size",
            )
    estimator = value_at(settings, "algorithm.adv_estimator")
    if _OF_GROUPS.match(str(estimator)) and value_at(settings, "actor_rollout_ref.rollout.n") == 1:
        alone = "compares the responses to a prompt; of a single one the advantage is its raw reward"
        return [f"verl.actor_rollout_ref.rollout.n is 1: {estimator} {alone}"]
    return []


def _repeated_validation(settings: Mapping[str, Any], said: Mapping[str, Setting]) -> list[str]:
    # Unsaid, a resumed start does without it (`own_settings`).
    if BEFORE_TRAINING not in said or not value_at(settings, BEFORE_TRAINING):
        return []
    again = "each start validates again before its first step, also after a preemption"
    return [f"verl.{BEFORE_TRAINING} is true: {again}. Left out, the first start alone does"]


def _check_rows(
    config: RunConfig,
    settings: Mapping[str, Any],
    key: str,
    inputs: Sequence[verl_inputs.Input],
    *,
    begun: bool,
) -> list[Finding]:
    """Checks the files of a key that are on this machine; once the run has `begun`, missing shards are a note."""
    places = [Path(os.path.expanduser(one.place)) for one in inputs]
    where, there = f"verl.{key}", [place for place in places if place.exists()]
    if not there:
        return []
    files = [file for place in there for file in _files_below(place)]
    notes = _refuse_partial(where, files, begun=begun)
    entry: Entry = config.trainer.entry
    odd = [place for place in there if entry == "ppo" and place.is_dir()]
    odd += [file for file in files if file.suffix not in (_SUFFIXES if entry == "ppo" else _SUFFIXES[:1])]
    if unknown := _why_unknown(config, settings):
        return [*map(warn, notes), skipped(f"the rows of {where}: {unknown}")]
    if odd and entry == "ppo":
        raise DataError(
            "verl does not read such a file",
            where=f"{where}: {odd[0]}",
            found="a directory" if odd[0].is_dir() else None,
            expected=", ".join(f"*{suffix}" for suffix in _SUFFIXES),
            remedy=f"set {where} to such files",
        )
    if odd:
        return [*map(warn, notes), skipped(f"the rows of {where}: {odd[0]} is not called *.parquet")]
    messages = value_at(settings, f"data.{'prompt_key' if entry == 'ppo' else 'messages_key'}")
    messages = messages if isinstance(messages, str) else "prompt" if entry == "ppo" else "messages"
    reward, unseen = _reward(config, settings)
    found = [*map(warn, notes), *unseen]
    keys = [messages, *([_SOURCE, _TRUTH] if reward.reads_rows else [])]
    wanted = WantedRows(
        files=list(map(str, files)),
        keys=keys,
        messages=messages,
        texts=_SOURCE if reward.reads_rows else "",
        also=["extra_info"],
    )
    rows = look_at_files(wanted, where)
    if isinstance(rows, str):
        return [*found, skipped(f"the rows of {where}: {rows}")]
    _refuse_rows(entry, where, rows, messages, reward)
    if key == "data.train_files" and there == places:
        found += _refuse_too_few(config, settings, rows)
    if reward.reads_rows and reward.is_default:
        found += _refuse_unrewarded(config, where, rows)
    if not rows.whole:
        found.append(warn(f"{where}: only the first {rows.rows} rows were looked at"))
    found += _unmeasured(entry, where, settings)
    elsewhere = f" ({len(places) - len(there)} more elsewhere)" if there != places else ""
    number = counted(rows.rows, "row") if rows.whole else f"more than {counted(rows.rows, 'row')}"
    told = f"{where}: {counted(len(files), 'file')}{elsewhere}, {number} with {', '.join(keys)}"
    return [good(told), *found]


def _files_below(place: Path) -> Iterator[Path]:
    # pandas reads a directory as one table.
    if place.is_dir():
        yield from sorted(path for path in place.rglob("*") if path.is_file() and path.name[0] not in "._")
    else:
        yield place


def _refuse_partial(where: str, files: Sequence[Path], *, begun: bool) -> list[str]:
    notes = []
    for folder in dict.fromkeys(file.parent for file in files):
        own = [file.name for file in files if file.parent == folder]
        names = os.listdir(folder)
        remedy = f"copy or download them, and name all in {where}; to use a part, give its files other names"
        # The user has listed the files: a download of one that is not listed is none of theirs.
        notes += refuse_partial(folder, own, names, own.__contains__, remedy=remedy, known=begun, key=where)
        # Those that are there and are not listed: the list is the user's word.
        notes += refuse_partial(folder, own, own, lambda _: False, remedy=remedy, known=True, key=where)
    return list(dict.fromkeys(notes))


def _why_unknown(config: RunConfig, settings: Mapping[str, Any]) -> str:
    """Returns why it is not known what verl reads of the rows; empty: it is known."""
    if config.slurm.container is not None:
        return "verl is the container's"
    if config.trainer.command:
        return "trainer.command reads them"
    if own := value_at(settings, "data.custom_cls.path"):
        return f"the class of {own} reads them"
    if importlib.util.find_spec("pyarrow") is None:
        return "pyarrow is not installed here"
    return ""


class _Reward(NamedTuple):
    reads_rows: bool
    """A function gets `data_source` and the ground truth of each row."""
    is_default: bool = False
    """It is verl's own."""


def _reward(config: RunConfig, settings: Mapping[str, Any]) -> tuple[_Reward, list[Finding]]:
    """Returns what gives the rewards, and what is not known of it."""
    if config.trainer.entry != "ppo":
        return _Reward(reads_rows=False), []
    manager = value_at(settings, "reward.reward_manager.name") or "naive"
    manager = value_at(settings, "reward_model.reward_manager") or manager
    imported = value_at(settings, "reward.reward_manager.source") == "importlib"
    unknown = f"the reward manager {manager}" if imported or manager not in _MANAGERS else ""
    if loops := value_at(settings, f"{_ROLLOUT}.agent.agent_loop_config_path"):
        unknown = f"the agent loops of {loops}"
    if unknown:
        unseen = skipped(f"which columns of verl's data the reward reads, which {unknown} may decide")
        return _Reward(reads_rows=False), [unseen]
    own = any(value_at(settings, f"{above}custom_reward_function.path") for above in ("", "reward."))
    model = any(value_at(settings, f"{above}reward_model.enable") for above in ("", "reward."))
    return _Reward(reads_rows=own or not model, is_default=not own), []


def _refuse_rows(entry: Entry, where: str, rows: Rows, messages: str, reward: _Reward) -> None:
    if not rows.rows:
        raise DataError("verl's data files hold no row", where=where, remedy=f"set {where}")
    for key, (place, found) in rows.lacking.items():
        # A function of the user's may know what a null means.
        if key != messages and not reward.is_default and not found.startswith("keys "):
            continue
        named = f"set verl.data.{'prompt_key' if entry == 'ppo' else 'messages_key'}"
        managed = "set a reward manager of your own (verl.reward.reward_manager)"
        raise DataError(
            "a row lacks what verl reads",
            where=f"{where}: {place}",
            found=found,
            expected=f"a value under {key!r}",
            remedy=f"write it into the rows, or {named if key == messages else managed}",
        )
    if rows.no_messages is not None:
        place, found = rows.no_messages
        raise DataError(
            "a row holds no conversation",
            where=f"{where}: {place}",
            found=found,
            expected=f"a list of {{role, content}} under {messages!r}",
            remedy="write it as one: verl gives it to the model's chat template",
        )


def _unmeasured(entry: Entry, where: str, settings: Mapping[str, Any]) -> list[Finding]:
    """Says what verl does with a row that is too long: its template, tools and processor decide on its length."""
    row, key, does = "prompt", "data.max_prompt_length", "cuts it from the left"
    if entry == "sft":
        row, key, does = "conversation", "data.max_length", "cuts it"
        if value_at(settings, "data.truncation") == "error":
            does = "ends there"
    elif value_at(settings, "data.filter_overlong_prompts"):
        does = "drops it, and the rows are counted with it here"
    # What cuts. By default it is that of the data, and the user knows it by that name.
    elif value_at(settings, f"{_ROLLOUT}.prompt_length") not in (None, value_at(settings, key)):
        key = f"{_ROLLOUT}.prompt_length"
    most = value_at(settings, key)
    if most is None:  # in settings without verl's defaults
        return []
    return [skipped(f"whether a {row} of {where} exceeds verl.{key}={most}: verl {does}")]


def _refuse_too_few(config: RunConfig, settings: Mapping[str, Any], rows: Rows) -> list[Finding]:
    """Refuses fewer rows than one batch, and for SFT more steps than the epochs have."""
    sizes = {key: value_at(settings, f"data.{key}") for key in ("train_batch_size", "gen_batch_size")}
    most = value_at(settings, "data.train_max_samples")
    num = min(rows.rows, most) if isinstance(most, int) and most > 0 else rows.rows
    for key, size in sizes.items():
        if not isinstance(size, int):
            continue
        if config.trainer.entry == "sft":  # its ranks cut both down to what they can divide
            size -= size % config.distributed.world_size
        # verl drops what does not fill one, and would take no step.
        if (rows.whole or num < rows.rows) and num < size:
            raise ConfigError(
                "verl has fewer rows than one batch, so it would take no step",
                where=f"verl.data.{key}",
                found=f"{size}, and {counted(num, 'row')} in data.train_files",
                expected=f"at most {num}",
                remedy=f"lower verl.data.{key}, or give more rows",
            )
    wanted = [value_at(settings, f"trainer.total_{what}") for what in ("training_steps", "epochs")]
    known = [
        one for one in (sizes["gen_batch_size"] or sizes["train_batch_size"], *wanted) if isinstance(one, int)
    ]
    if len(known) < 3 or min(known) < 1 or not (rows.whole or num < rows.rows):
        return []
    batch, total, epochs = known
    if total <= (ends := num // batch * epochs):
        return []
    ended = f"{total}, and {counted(num, 'row')} have at most {counted(ends, 'step')} in trainer.total_epochs={epochs}"
    remedy = "raise verl.trainer.total_epochs, or lower verl.trainer.total_training_steps"
    if config.trainer.entry == "sft":
        where = "verl.trainer.total_training_steps"
        raise ConfigError("the data ends before the last step", where=where, found=ended, remedy=remedy)
    return [warn(f"verl.trainer.total_training_steps is {ended}: verl ends there; {remedy}")]


def _refuse_unrewarded(config: RunConfig, where: str, rows: Rows) -> list[Finding]:
    """Refuses a data source for which verl has no reward; returns what could not be told."""
    table = _rewards_of_verl(config)
    if table is None:
        return [skipped(f"whether verl has a reward for {_SOURCE} {', '.join(sorted(rows.texts)[:4])}")]
    sources, beginnings = table
    for text, place in rows.texts.items():
        if text not in sources and not text.startswith(beginnings):
            known = [*sorted(sources), *(f"{word}..." for word in beginnings)]
            raise DataError(
                "verl has no reward for this data",
                where=f"{where}: {place}",
                found=f"{_SOURCE} {text[:60]!r}",
                expected=f"a reward function of yours, or one of {', '.join(known)}",
                remedy="set verl.reward.custom_reward_function.path and verl.reward.custom_reward_function.name",
            )
    if len(rows.texts) >= MOST_TEXTS:
        return [skipped(f"more than {MOST_TEXTS} values of {_SOURCE} in {where}")]
    return []


def _source_of_verl(config: RunConfig, name: str) -> str | None:
    """Reads a source of the ranks' verl, without an import of it; None: it cannot be read."""
    search = ranks_search(config)
    spec = PathFinder.find_spec("verl", search) if search else None
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        with suppress(OSError, ValueError):
            return read_regular(Path(folder) / name, SOURCE, follow=True).decode()
    return None


def _rewards_of_verl(config: RunConfig) -> tuple[set[str], tuple[str, ...]] | None:
    """Returns the data sources that the installed verl has rewards for: whole, and how they begin; None: unknown."""
    source = _source_of_verl(config, "utils/reward_score/__init__.py")
    try:
        # It may not be written as in the releases that are known.
        tree = ast.parse(source or "")
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "default_compute_score":
            branch = next((part for part in node.body if isinstance(part, ast.If)), None)
            return None if branch is None else _table(branch)
    return None


def _table(branch: ast.If) -> tuple[set[str], tuple[str, ...]] | None:
    sources, beginnings = set[str](), list[str]()
    rest: list[ast.stmt] = [branch]
    while rest and isinstance(rest[0], ast.If):
        test = rest[0].test
        for part in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]:
            match part:
                case ast.Compare(
                    left=ast.Name(id="data_source"),
                    ops=[ast.Eq()],
                    comparators=[ast.Constant(value=str(text))],
                ):
                    sources.add(text)
                case ast.Compare(
                    left=ast.Name(id="data_source"),
                    ops=[ast.In()],
                    comparators=[ast.List(elts=some) | ast.Tuple(elts=some) | ast.Set(elts=some)],
                ) if all(isinstance(one, ast.Constant) for one in some):
                    sources |= {str(one.value) for one in some if isinstance(one, ast.Constant)}
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="data_source"), attr="startswith"),
                    args=[ast.Constant(value=str(text))],
                ):
                    beginnings.append(text)
                case _:
                    return None
        rest = rest[0].orelse
    # Without an error at the end, what is not named has a reward as well.
    return (sources, tuple(beginnings)) if rest and isinstance(rest[0], ast.Raise) else None
