"""Checks a run of verl before anything is queued, for errors that would otherwise show after its wait in the queue.

On each of these, verl itself would crash on every node and at every start, or, worse, train on.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from verl_slurm.base.bounded import CONFIG, read_model_config, read_regular
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
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.format.specification import MANIFEST
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.config.elastic import allowed_nodes
from verl_slurm.config.schema import RunConfig
from verl_slurm.containers.runtimes import contained_argv
from verl_slurm.loops.verl_settings import start_settings
from verl_slurm.submit.checks import user_programs
from verl_slurm.submit.checks.model_files import refuse_adapter, refuse_pointers, weights_problem
from verl_slurm.submit.checks.user_programs import Found, answer_of_ranks_python, check_modules, check_source
from verl_slurm.submit.checks.verl_data import check_sizes, check_verl_data
from verl_slurm.verl.composing import Composed, unread_additions
from verl_slurm.verl.overrides import Setting, judged, require_possible, switches_as_text, value_at
from verl_slurm.verl.releases import Entry, installed_verl, require_usable
from verl_slurm.verl.reshard.checkpoint import division_of, require_fsdp, require_room, source_of
from verl_slurm.verl.reshard.dividing import ranks_python
from verl_slurm.verl.step_layout import is_distributed, step_of, way_out
from verl_slurm.verl.verl_inputs import (
    ENGINES,
    CodeFile,
    Input,
    engines_of,
    files_of,
    input_keys,
    inputs_of,
    is_remote,
    modules_of,
    said_settings,
    with_critic,
)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OF_CLASSES = ("tool_config_path", "agent_loop_config_path", "interaction_config_path")
"""Keys of YAML files that name classes, under `class_name` or `_target_`."""
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
) -> tuple[list[str], list[str], str]:
    """Runs all checks; returns the items found good, notes for the user, and what will be trained.

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
    divided = check_ranks(config, paths, committed)
    checked, notes = list[str](), [divided] if divided else []
    if committed and not divided:
        checked.append(f"{counted(config.distributed.world_size, 'rank')}, as saved")
    if config.slurm.container is None:
        version = installed_verl()
        if note := require_usable(version):
            notes.append(note)
        else:
            _require_beside(entry)
        checked.append(f"verl {version} is installed")
        composed, doubtful, refused = _composed(config, paths, said, refused)
        settings, notes = composed.settings, [*notes, *doubtful]
        if not refused:
            _require_fewer(config, settings)
            # A run that has trained with its settings has passed them already: verl's import takes seconds.
            if entry == "ppo" and not config.trainer.command and not committed:
                notes += _judged_by_verl(config, composed)
    else:
        if refused:
            raise together(refused)
        notes.append("not looked at: verl, its engine and its defaults, which are the container's")
        settings = said_settings(said)
        require_possible(settings, said)
        _require_named(entry, said)
    checked.append("verl's own settings")
    # All that is wrong is said at once: each look of the user's is a minute.
    wrong: list[VerlSlurmError] = [*refused]
    read = list[str]()
    for look in _looks(config, settings, said, begun=bool(committed)):
        try:
            good, unseen = look()
        except VerlSlurmError as error:
            wrong.append(error)
        else:
            read, notes = [*read, *good], [*notes, *unseen]
    if wrong:
        raise together(wrong)
    return [*checked, *read], notes, _trained(entry, settings, said)


def _trained(entry: Entry, settings: Mapping[str, Any], said: Mapping[str, Setting]) -> str:
    """Returns what decides on a training, in one line. `(default)` follows each value that is verl's own."""
    given = {setting.key for setting in said.values()}
    words = []
    for text, key in _TRAINED[entry].items():
        value = value_at(settings, key)
        if value not in (None, "???") and "${" not in str(value):
            words.append(text.format(value) + (" (default)" if key not in given else ""))
    return ", ".join([f"verl, {entry}", *words])


def _looks(
    config: RunConfig, settings: Mapping[str, Any], said: Mapping[str, Setting], *, begun: bool
) -> Iterator[Callable[[], Found]]:
    """Yields a check for each thing that verl will read or import. Each may raise."""
    entry = config.trainer.entry
    if entry == "ppo":
        yield partial(_check_engines, config, settings)
    yield lambda: Found([], check_sizes(entry, settings))
    inputs = [one for one in inputs_of(entry, settings, said) if one.place != "???"]  # said already
    for one in inputs:
        if one.kind != "data":
            yield partial(_check_named_model, one)
    for key, kind in input_keys(entry).items():
        named = [one for one in inputs if one.key == key]
        if kind == "data":
            yield partial(_check_data, config, settings, key, named, begun=begun)
        if "${" in str(value_at(settings, key)):
            yield partial(Found, [], [f"not looked at: verl.{key}, which the job's environment decides"])
    for code in files_of(settings):
        yield partial(_check_file, config, code)
    for key, name in modules_of(settings):
        yield partial(_check_module, config, key, name)


def _check_named_model(one: Input) -> Found:
    if (place := Path(one.place).expanduser()).is_dir():
        refuse_pointers(path for path in place.iterdir() if path.is_file())
    if note := check_input(one):
        return Found([], [note])
    if any(place.glob("*.safetensors")):
        return Found([f"verl.{one.key}: config.json and headers of the weights"], [])
    return Found([f"verl.{one.key}: config.json"], [f"not looked at: the weights of verl.{one.key}: pickles"])


def _check_data(
    config: RunConfig, settings: Mapping[str, Any], key: str, inputs: Sequence[Input], *, begun: bool
) -> Found:
    notes, wrong = list[str](), list[VerlSlurmError]()
    for one in inputs:
        try:
            notes += filter(None, [check_input(one)])
        except DataError as error:
            wrong.append(error)
    if wrong:
        raise together(wrong)
    good, unseen = check_verl_data(config, settings, key, inputs, begun=begun)
    return Found(good, [*notes, *unseen])


def _check_module(config: RunConfig, key: str, name: str) -> Found:
    return check_modules(config, [name], f"verl.{key}")


def _judged_by_verl(config: RunConfig, composed: Composed) -> list[str]:
    """Has verl itself judge its settings, in the ranks' Python; returns notes.

    Raises:
        ConfigError: verl refuses them; at the start each of its processes would.
    """
    answer, unseen = answer_of_ranks_python(config, _JUDGED_BY_VERL, composed.as_yaml())
    found = key = ""
    try:
        found, key = msgspec.json.decode(answer or '["", ""]', type=tuple[str, str])
    except msgspec.DecodeError:  # something of the site's prints behind it
        unseen = f"its answer is not understood: {answer[:100]}"
    if unseen:
        return [f"not looked at: verl's own judgement of its settings: {unseen}"]
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
    """Composes verl's settings, its own defaults included; returns them, notes, and what is wrong.

    Args:
        refused: what is known to be wrong already; all of it is said at once.

    Raises:
        ConfigError: verl does not take a setting, or a run cannot: nothing was composed.
    """
    entry, notes = config.trainer.entry, list[str]()
    if not config.trainer.command:  # a recipe has files of its own, and may read more keys
        former, notes = unread_additions(entry, said.values())
        refused = [*refused, *former]
    try:
        # Any attempt's number: composing needs one.
        composed = start_settings(config, paths, 1, None)
    except ConfigError as error:
        known = {one.one_line() for one in refused}
        raise together([*refused, *(one for one in _each(error) if one.one_line() not in known)]) from error
    settings = composed.settings
    refused += [
        ConfigError(
            "a setting that verl leaves to its user has no value",
            where=f"verl.{key}",
            found="???",
            expected=f"one of {', '.join(ENGINES)}" if key.endswith("rollout.name") else None,
            remedy=f"set verl.{key}, or write {key}=VALUE after `--`",
        )
        for key in composed.unset
        if _counts(entry, settings, key)
    ]
    return composed, notes, refused


def _each(error: ConfigError) -> list[ConfigError]:
    first = ConfigError(
        error.what, where=error.where, found=error.found, expected=error.expected, remedy=error.remedy
    )
    return [first, *(one for one in error.others if isinstance(one, ConfigError))]


def _counts(entry: Entry, settings: Mapping[str, Any], key: str) -> bool:
    """Returns whether verl will read a key: not in a section that is off, nor of a critic that is not there."""
    if key.startswith("critic.") and not with_critic(entry, settings):
        return False
    # verl moves a former name to its new place before it reads that.
    if key == "reward.reward_model.rollout.name" and value_at(settings, "reward_model.rollout.name"):
        return False
    parts = key.split(".")
    above = [".".join(parts[:number]) for number in range(1, len(parts))]
    if any(value_at(settings, f"{section}.enable") is False for section in above):
        return bool(value_at(settings, "reward_model.enable")) and key.startswith("reward.reward_model.")
    return True


def _check_engines(config: RunConfig, settings: Mapping[str, Any]) -> Found:
    """Refuses an engine whose package the ranks' Python does not have."""
    notes = []
    for key, name in engines_of(settings).items():
        if package := ENGINES.get(name):
            notes += check_modules(config, [package], f"verl.{key}={name}").notes
        else:
            notes.append(
                f"not looked at: verl.{key}={name}, which is none of verl's engines ({', '.join(ENGINES)})"
            )
    return Found([], notes)


def _check_file(config: RunConfig, file: CodeFile) -> Found:
    """Checks a file of code or settings that verl reads.

    Raises:
        ConfigError, DataError: it is not there, cannot be parsed, lacks what is taken from it, or a module.
    """
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
    place = Path(file.place.removeprefix("file://")).expanduser()
    takes_hub_names = file.key.endswith(
        ("model_path", "model.path", "tokenizer_path", "config_path", "adapter_path")
    )
    if takes_hub_names and not place.is_absolute() and _HUB_NAME.fullmatch(file.place) and not place.suffix:
        note = f"not looked at: {where}, taken for a name of the Hugging Face hub: {file.place}"
        return Found([], [note])
    if not place.exists() and inside:
        note = f"{where}={file.place}, which this machine does not have: it may be the container's"
        return Found([], [f"not looked at: {note}"])
    if not place.exists():
        raise DataError(
            "a file that verl reads is not there",
            where=f"{where}: {file.place}",
            expected="a path that exists on this machine and on the nodes; a relative one from where submit is run",
            remedy=f"set {where}",
        )
    if place.suffix == ".py":
        return Found([f"{where}: {place.name}"], check_source(config, where, place, file.name or "").notes)
    if place.suffix in (".yaml", ".yml") and file.key.endswith(_OF_CLASSES):
        return _check_classes(config, where, place)
    return Found([], [f"not looked at: the content of {where}: {file.place}"])


def _check_classes(config: RunConfig, where: str, place: Path) -> Found:
    """Looks for the modules of the classes that a file of settings names.

    Raises:
        DataError: it is not YAML.
        ConfigError: a module is missing.
    """
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
    names = re.findall(r"""["']?(?:class_name|_target_)["']?\s*:\s*["']?([A-Za-z_]\w*)\.[\w.]+""", text)
    notes = check_modules(config, names, str(place)).notes if names else []
    unseen = [f"not looked at: whether the classes that {place} names are there"]
    return Found([f"{where}: {place.name}"], [*notes, *unseen])


def check_ranks(config: RunConfig, paths: RunPaths, committed: Sequence[CheckpointInfo]) -> str:
    """Refuses a number of ranks among which the start could not divide the checkpoint; returns a note if it will.

    verl reads a checkpoint back with exactly as many ranks as wrote it, so the start divides it (`verl.reshard`). Here
    the same plan is made by the ranks' Python, if nothing on the nodes changes it, of bytes that are not verified yet.

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
    if ranks in (None, now):
        return ""
    own = path / f"global_step_{step}"
    try:
        manifest = read_manifest(path)
        require_fsdp(source := source_of(path, manifest), now)
        if unseen := user_programs.why_unseen(config):
            return f"not looked at: whether {path.name} of {ranks} ranks can be divided among {now}: {unseen}"
        with division_of(source, now, partial(ranks_python, config, contained_argv)) as division:
            require_room(source, plan := division.plan, paths.resharded.checkpoints)
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
    # The lead verifies every byte, sets a damaged one aside and says so.
    except (CheckpointCorrupt, SchemaMismatch, OSError):
        return ""
    return (
        f"{path.name} was saved by {counted(plan.before, 'rank')}: the start divides it among {now} "
        f"({plan.num_bytes / 1e6:.1f} MB of tensors), and each of them stays the same (docs/verl.md)"
    )


def _require_fewer(config: RunConfig, settings: Mapping[str, Any]) -> None:
    """Refuses `distributed.min_nodes` where verl could not go on with each number of nodes that it allows. verl finds
    out at a start, and the run would end at its first lost node.

    Raises:
        ConfigError: the setting, and the number of ranks.
    """
    entry, policy = config.trainer.entry, "actor_rollout_ref"
    if config.distributed.min_nodes is None:
        return

    def at(key: str) -> int:
        value = value_at(settings, key)
        return value if type(value) is int else 1

    samples = at(f"{policy}.rollout.n") if entry == "ppo" else 1
    products = {"data.train_batch_size": samples}
    parts: list[str] = []
    strategies = ["engine.strategy"]
    if entry == "ppo":
        roles = [f"{policy}.actor", *(["critic"] if with_critic(entry, settings) else [])]
        strategies = [f"{role}.strategy" for role in roles]
        products |= {f"{role}.ppo_mini_batch_size": samples for role in roles}
        parts = [
            f"{policy}.rollout.tensor_model_parallel_size",
            f"{policy}.actor.ulysses_sequence_parallel_size",
        ]
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


def _elsewhere(path: Path) -> tuple[Path, int, int] | None:
    """Returns a checkpoint of another run. An unreadable manifest is left to the lead, which reports what is wrong.

    Raises:
        ConfigError: it is a step of plain verl, which has no manifest.
    """
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
    except (OSError, VerlSlurmError):
        return None
    return path, manifest.step, manifest.world_size


def _require_named(entry: Entry, said: Mapping[str, Setting]) -> None:
    """Requires the inputs in the user's words if no verl can be asked for its defaults.

    Raises:
        DataError: the user leaves one of them to verl.
    """
    for key, kind in input_keys(entry).items():
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
    """Requires what verl's trainer imports, of a release whose imports are known; another one may need others.

    Raises:
        ConfigError: a package is missing.
    """
    # find_spec imports none of them.
    missing = [pip for module, pip in _BESIDES[entry].items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            "verl is installed without what its trainer imports",
            where=sys.executable,
            found=f"no {', no '.join(missing)}",
            remedy=f"{sys.executable} -m pip install {' '.join(missing)}",
        )


def check_input(one: Input) -> str:
    """Raises DataError if the input does not exist; else returns a note about it.

    Args:
        one: with an absolute path, if it is on a file system.
    """
    place = Path(one.place).expanduser()
    # From what cannot be looked at here to what must exist: a URL and a name of the hub look like relative paths.
    if is_remote(one.place):
        return f"verl.{one.key}: {one.place} is not on a file system; nobody looked whether it is there"
    if one.kind == "model" and not place.exists() and _HUB_NAME.fullmatch(one.place):
        return f"verl.{one.key}: {one.place} is taken for a name of the Hugging Face hub, which every node must reach"
    # A relative path that exists was made absolute before (`inputs.absolute`), since verl's workers run elsewhere.
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


def _check_model(one: Input, place: Path) -> None:
    remedy = (
        f"set verl.{one.key} to a directory made by save_pretrained, or to a name of the Hugging Face hub"
    )
    refuse_adapter(f"verl.{one.key}", place)
    if not (place / "config.json").is_file():
        raise DataError("not a model directory", where=place, expected="config.json in it", remedy=remedy)
    # What from_pretrained finds: safetensors, or pickles, which verl itself reads.
    if not any(place.glob("*.safetensors")) and not any(place.glob("*.bin")):
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
    # Headers and lengths alone; a file that was cut off ends each start of verl.
    for path in sorted(place.glob("*.safetensors")):
        if complaint := weights_problem(path):
            raise DataError(
                "the weights are damaged", where=path, found=complaint, remedy="copy that file again"
            )
