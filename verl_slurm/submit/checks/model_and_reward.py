"""Prepares a run's model, data and reward: builds built-ins, checks that the rest exists. Torch-free."""

import hashlib
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import verl_slurm
from verl_slurm.base.bounded import read_model_config
from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.base.files import private_dir
from verl_slurm.base.packages import require_packages
from verl_slurm.base.paths import RunPaths
from verl_slurm.checks import Finding, good, skipped, told
from verl_slurm.checks.probe_command import run_to_end
from verl_slurm.config.checks.rollout import max_model_len
from verl_slurm.config.families import FAMILIES, max_positions
from verl_slurm.config.load import load_resolved
from verl_slurm.config.reward_spec import FORMS, check_function, nearest_form, parse_reward, source_file
from verl_slurm.config.roles import data_root
from verl_slurm.config.schema import BUILTIN, RunConfig
from verl_slurm.submit.checks.model_files import (
    BUILTIN_MODELS,
    check_model,
    layers_left_out,
    refuse_pointers,
    weights_of,
)
from verl_slurm.submit.checks.user_programs import (
    answer_of_ranks_python,
    check_program,
    check_source,
    is_copied_alone,
    ranks_search,
    why_unseen,
)
from verl_slurm.submit.relative_paths import with_values

# As `BUILTIN_MODELS`, without torch; a test compares them.
BUILTIN_DATA = ("arithmetic",)
_BUILD_TIMEOUT_S = 900.0
_HEADS = ("score.", "classifier.", "classification_head.", "logits_proj.")
"""Beginnings of the names that transformers' sequence classifiers have beside those of their base models."""
_BUILT_BYTES = 4_000_000


def cache_dir() -> Path:
    """Returns `$XDG_CACHE_HOME/verl-slurm/builtin/VERSION`, mostly below ~/.cache. VERSION: the builder's hash."""
    builder = hashlib.sha256()
    # By the builder's code and not by the version: a changed builder never sees the output of an older one.
    for source in sorted((Path(verl_slurm.__file__).parent / "trainer/quickstart").glob("*.py")):
        builder.update(source.name.encode() + b"\0" + source.read_bytes())
    return _cache_base() / builder.hexdigest()[:12]


def _cache_base() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "verl-slurm" / "builtin"


def _builtins_of(config: RunConfig) -> dict[str, str]:
    named = {
        "data.root": config.data.root,
        "data.eval_root": config.data.eval_root or "",
        "model.path": config.model.path,
    }
    return {key: text for key, text in named.items() if text.startswith(BUILTIN)}


def check_names(config: RunConfig) -> None:
    """Raises ConfigError for a `builtin:` that does not exist, with the names that do."""
    for key, value in _builtins_of(config).items():
        names = BUILTIN_MODELS if key == "model.path" else BUILTIN_DATA
        # A typing error: found here, before anything is built.
        if value.removeprefix(BUILTIN) not in names:
            raise ConfigError(
                "no such built-in",
                where=key,
                found=value,
                expected=" or ".join(BUILTIN + name for name in names),
                remedy=f"set {key}",
            )
        if not (place := cache_dir() / value.removeprefix(BUILTIN)).is_dir():
            _require_room(place)


def _require_room(place: Path) -> None:
    there = next(folder for folder in place.parents if folder.exists())
    about = os.statvfs(there)
    closed = not os.access(there, os.W_OK)  # also for root, where the file system is read-only
    free = about.f_bavail * about.f_frsize
    if closed or free < _BUILT_BYTES:
        raise DataError(
            "what is built in cannot be built",
            where=there,
            found="it takes no file" if closed else f"{free / 1e6:.1f} MB free",
            expected=f"room for {_BUILT_BYTES / 1e6:.0f} MB, below {_cache_base()}",
            remedy="make room, or set XDG_CACHE_HOME to a directory that the nodes see, too",
        )


def build_builtins(config: RunConfig) -> RunConfig:
    """Builds each `builtin:` (the first time takes a minute) and puts its path into the config. May raise DataError."""
    if config.trainer.is_guest or not (named := _builtins_of(config)):
        return config
    # Each on its own, before anything in it is used: under an open umask others could have put theirs there.
    for folder in (_cache_base().parent, _cache_base(), cache_dir()):
        private_dir(folder.resolve())  # a user's own link may lead to a larger disk
    built: dict[str, object] = {}
    for key, spec in named.items():
        if key == "model.path":
            # A model is there as a whole or not at all. The look is cheap; the child imports torch.
            there = _built_model(config)
            built[key] = str(there) if there.is_dir() else _build("model", spec)
        else:
            # Asked of the child each time: it compares the files with the sums that they should hold.
            place = _build("data", spec)
            # As `quickstart.arithmetic_data` lays it out.
            built[key] = place if key == "data.root" else str(Path(place).parent / "heldout")
    return with_values(config, built)


def _built_model(config: RunConfig) -> Path:
    return cache_dir() / config.model.path.removeprefix(BUILTIN)


def built_before(config: RunConfig, old: RunConfig) -> RunConfig:
    """Takes over the built path of an existing run's `builtin:`, even if an older version built it."""
    # Without the builder's hash: after an upgrade the run still trains the model and data that it began with.
    base = str(_cache_base()) + os.sep
    before = {
        "data.root": old.data.root,
        "data.eval_root": old.data.eval_root or "",
        "model.path": old.model.path,
    }
    return with_values(
        config, {key: before[key] for key in _builtins_of(config) if before[key].startswith(base)}
    )


def _build(kind: str, spec: str) -> str:
    # Here and not in the child, whose traceback would be the answer.
    require_packages("torch", "transformers", wanted_by=f"building {spec}")
    # A child, since building imports torch; -P, since `-m` would look in the working directory first.
    command = [sys.executable, "-P", "-m", "verl_slurm.trainer.quickstart", kind, spec, str(cache_dir())]
    done = run_to_end(command, _BUILD_TIMEOUT_S)
    # The last line is the path; libraries may print before it.
    if done.exit_code != 0 or not Path(done.last_line or "/dev/null").is_dir():
        raise DataError(
            "the built-in could not be built",
            where=spec,
            found=done.last_words,
            remedy=f"see what `{shlex.join(command)}` says",
        )
    return done.last_line


def needs_building(config: RunConfig) -> bool:
    """Returns whether a model must be built first, which takes a while."""
    ours = not config.trainer.is_guest and config.model.path.startswith(BUILTIN)
    return ours and not _built_model(config).is_dir()


# The rules that the trainer offers; it imports torch, so the names are repeated here, and a test compares them.
RULES = ("arithmetic",)


def check_reward(text: str, config: RunConfig | None = None) -> list[str]:
    """Refuses a reward that does not exist, as far as can be seen without running it; returns notes.

    Paths are absolute. Without a `config`, imports are not looked for in the ranks' Python.

    Raises:
        ConfigError: none of the forms, no such rule, module or function.
        DataError: not a model directory, or a source that cannot be parsed.
    """
    spec = parse_reward(text)
    if spec is None:
        raise ConfigError(
            "no such reward",
            where="model.reward",
            found=text,
            expected=FORMS,
            remedy=nearest_form(text) or "set model.reward",
        )
    if spec.kind == "rule" and spec.name not in RULES:
        raise ConfigError(
            "no such built-in",
            where="model.reward",
            found=text,
            expected=" or ".join(f"rule:{name}" for name in RULES),
            remedy="set model.reward",
        )
    if spec.kind == "classifier":
        check_model("model.reward", Path(spec.name))
        _check_classifier(Path(spec.name))
        notes = layers_left_out(Path(spec.name))
        limit = max_positions(read_model_config(Path(spec.name)))
        if config is not None and limit is not None and limit < max_model_len(config):
            longest = f"a prompt with its response has up to {max_model_len(config)} of the policy's"
            notes.append(
                f"{text} was made for {limit} tokens, and {longest}: one that does not fit ends the run, 11"
            )
        return notes
    if spec.kind != "python":
        unanswered = spec.kind == "rule" and config is not None and config.data.answer_key is None
        return [_no_answers(text)] if unanswered else []
    # By its syntax tree: the user's module is not run here.
    if config is None or spec.is_file:
        file = source_file(spec)
    else:
        unseen = why_unseen(config)
        try:
            file = source_file(spec, ranks_search(config))
        except ConfigError:
            if not unseen:
                raise
            return [f"not looked at: model.reward {spec}: {unseen}"]
    refuse_pointers([file])
    reads_answers = check_function(spec, file)
    if config is None:
        return []
    # A note, not a refusal: the function may read them and do without them.
    notes = [_no_answers(text)] if reads_answers and config.data.answer_key is None else []
    # As `trainer.reward.python` loads it.
    whole = file.name == "__init__.py"
    package = "" if spec.is_file else spec.name if whole else spec.name.rpartition(".")[0]
    # A file's neighbours are found beside its copy; without a tree it is copied alone.
    alone = spec.is_file and is_copied_alone(config, file)
    beside = [str(file.parent)] if spec.is_file and not alone else []
    return notes + told(check_source(config, "model.reward", file, spec.function, package, beside, alone))[1]


# With torch, which takes seconds: asked for a directory with code of its own alone.
_IS_KNOWN = """import sys, transformers.models.auto.modeling_auto as auto
print(sys.stdin.read() in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)"""


def check_remote_code(config: RunConfig, said: Mapping[str, Any]) -> list[Finding]:
    """Raises DataError for a model that only the code in its directory makes; `said` is its config.json."""
    kind = str(said.get("model_type"))
    if not said.get("auto_map") or kind in FAMILIES:
        return []
    answer, unseen = answer_of_ranks_python(config, _IS_KNOWN, kind)
    if answer == "False":
        raise DataError(
            "the model is made by code in its directory, and none of that is run",
            where=config.model.path,
            found=f"auto_map in config.json, and no causal language model of type {kind} in the ranks' transformers",
            remedy="set model.path to a model of a family in docs/models.md",
        )
    return [skipped(f"whether transformers has a model_type {kind}: {unseen}")] if unseen else []


def _no_answers(reward: str) -> str:
    return (
        f"data.answer_key is null, so each answer that {reward} reads is empty text: set data.answer_key, "
        "unless the reward does without"
    )


def _check_classifier(directory: Path) -> None:
    """Refuses a classifier with another head, or with several labels."""
    # Here, since the ranks refuse it after the wait in the queue.
    said = read_model_config(directory)
    names = [name for name in said.get("architectures") or () if isinstance(name, str)]
    # transformers writes `id2label` unless there are two labels.
    labels = said.get("id2label")
    found = len(labels) if isinstance(labels, dict) else said.get("num_labels", 2)
    wrong = ""
    if names and not any(name.endswith("ForSequenceClassification") for name in names):
        wrong = f"a {names[0]}, which has no head for one score"
    elif found != 1:
        wrong = f"{found} labels"
    elif (weights := weights_of(directory)) and not any(name.startswith(_HEADS) for name in weights):
        wrong = f"weights without a head, as those of an AutoModel: no {', '.join(_HEADS[:2])}"
    if wrong:
        raise DataError(
            "the reward model does not give one score",
            where=directory,
            found=wrong,
            expected="a sequence classifier with one label",
            remedy="train it with AutoModelForSequenceClassification and num_labels=1, or set model.reward",
        )


def check_guest(config: RunConfig) -> list[Finding]:
    """Checks the program (`check_program`) and its data; paths absolute. DataError: `data.root` is not there."""
    found = check_program(config)
    # A guest may have its data elsewhere, or none; what it names is fingerprinted, and so has to exist.
    root = data_root(config)
    if root is not None:
        if not root.is_dir():
            kind = "a file" if root.exists() else "nothing"
            raise DataError("no such data directory", where=root, found=kind, remedy="set data.root")
        found.append(good("data"))
    return found


def refuse_guests(run: RunPaths) -> None:
    """Raises ConfigError if the run's loop is a guest's."""
    trainer = load_resolved(run.run_yaml).trainer
    if trainer.is_guest:
        raise ConfigError(
            "the reward is the program's own",
            where=run.run_yaml,
            found=f"trainer.backend: {trainer.backend}",
            expected="trainer.backend: native",
            remedy="change the program, and submit the run again",
        )
