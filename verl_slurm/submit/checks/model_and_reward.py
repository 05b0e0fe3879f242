"""Prepares a run's model, data and reward: makes paths absolute, builds built-ins, checks that the rest exists.

Torch-free: a child process builds built-ins, once, in the user's cache.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

import verl_slurm
from verl_slurm.base.bounded import read_model_config
from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.base.files import private_dir
from verl_slurm.base.packages import require_packages
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.config.checks.rollout import max_model_len
from verl_slurm.config.families import max_positions
from verl_slurm.config.load import load_resolved
from verl_slurm.config.reward_spec import FORMS, check_function, nearest_form, parse_reward, source_file
from verl_slurm.config.roles import data_root
from verl_slurm.config.schema import BUILTIN, HOOKS, HooksConfig, RunConfig
from verl_slurm.program.programs import file_of_verl
from verl_slurm.submit.checks.model_files import check_model
from verl_slurm.submit.checks.ranks_environment import find_python
from verl_slurm.submit.checks.service_programs import absolute_service
from verl_slurm.submit.checks.user_programs import (
    Found,
    check_program,
    check_source,
    ranks_search,
    why_unseen,
)
from verl_slurm.submit.relative_paths import Places
from verl_slurm.verl.verl_inputs import input_keys

# The names that quickstart and the trainer offer. These import torch, so the names are repeated here; a test compares
# them.
BUILTIN_MODELS: dict[str, dict[str, Any]] = {
    name: {
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 192,
        "tie_word_embeddings": False,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
    }
    for name, head_dim in (("tiny", 16), ("tiny32", 32))
}
"""Maps a name to the content of its config.json once it is built (a test compares it)."""
BUILTIN_DATA = ("arithmetic",)
_BUILD_TIMEOUT_S = 900.0


def cache_dir() -> Path:
    """Returns the directory of this version's built-in models and data.

    `$XDG_CACHE_HOME/verl-slurm/builtin/VERSION`, mostly below ~/.cache. VERSION: the hash of the code that builds them.
    """
    builder = hashlib.sha256()
    # By the builder's code and not by the version: a changed builder never sees the output of an older one.
    for source in sorted((Path(verl_slurm.__file__).parent / "quickstart").glob("*.py")):
        builder.update(source.name.encode() + b"\0" + source.read_bytes())
    return _cache_base() / builder.hexdigest()[:12]


def _cache_base() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "verl-slurm" / "builtin"


def absolute(config: RunConfig, places: Places | Path) -> RunConfig:
    """Returns the config with every path made absolute, and the run's name put into `run_dir`.

    `resume_from` may be a path; `auto`, the name of a checkpoint, `builtin:` and `rule:` stay. In a guest's command
    the first word is a path if it ends like one. In verl's words, data files and models that exist are paths.

    Args:
        places: what relative paths are relative to; a directory: all to this one.

    Raises:
        ConfigError: a path that means two files (`relative_paths`); or no Python environment of this name.
    """
    places = places if isinstance(places, Places) else Places(places)
    path, replace = places.path, msgspec.structs.replace
    model, data, checkpoint = config.model, config.data, config.checkpoint
    if not model.path.startswith(BUILTIN):
        model = replace(model, path=path("model.path", model.path))
    # A reward holds its path behind a prefix, so it has a rule of its own.
    base = places.base_of_reward(model.reward)
    model = replace(model, reward=absolute_reward(model.reward, base))
    if not data.root.startswith(BUILTIN):
        data = replace(data, root=path("data.root", data.root))
    if data.eval_root is not None and not data.eval_root.startswith(BUILTIN):
        data = replace(data, eval_root=path("data.eval_root", data.eval_root))
    if data.chat_template not in ("auto", "none"):
        data = replace(data, chat_template=path("data.chat_template", data.chat_template))
    wanted = checkpoint.resume_from
    if wanted is not None and wanted != "auto" and not CHECKPOINT_NAME.fullmatch(wanted):
        checkpoint = replace(checkpoint, resume_from=path("checkpoint.resume_from", wanted))
    # An output: relative to the working directory, so that a shipped example does not write into the package.
    run_dir = places.output(config.run_dir.replace("{name}", config.name))
    trainer = config.trainer
    if trainer.command and trainer.command[0].endswith(".py"):
        program = path("trainer.command", trainer.command[0])
        trainer = replace(trainer, command=(program, *trainer.command[1:]))
    verl = _absolute_of_verl(config, places)
    secrets = {name: path(f"env_from_files.{name}", text) for name, text in config.env_from_files.items()}
    hooks = _absolute_of_hooks(config.hooks, places)
    services = {name: absolute_service(name, one, places) for name, one in config.services.items()}
    slurm, code = config.slurm, config.code
    if code.tree not in (None, "auto"):
        code = replace(code, tree=path("code.tree", code.tree))
    if slurm.python is not None:
        slurm = replace(slurm, python=find_python(slurm.python, places))
    if slurm.container is not None and slurm.container.is_file:
        image = path("slurm.container.image", slurm.container.image)
        slurm = replace(slurm, container=replace(slurm.container, image=image))
    return replace(
        config,
        code=code,
        env_from_files=secrets,
        hooks=hooks,
        services=services,
        trainer=trainer,
        verl=verl,
        model=model,
        data=data,
        checkpoint=checkpoint,
        slurm=slurm,
        run_dir=run_dir,
    )


def _absolute_of_hooks(hooks: HooksConfig, places: Places) -> HooksConfig:
    changed: dict[str, object] = {}
    for hook in HOOKS:
        argv = getattr(hooks, hook)
        # A word without a slash is looked for in PATH, as a shell does.
        if argv and "/" in argv[0]:
            changed[hook] = (places.path(f"hooks.{hook}", argv[0]), *argv[1:])
    if hooks.webhook_token_file is not None:
        changed["webhook_token_file"] = places.path("hooks.webhook_token_file", hooks.webhook_token_file)
    return msgspec.structs.replace(hooks, **changed)


def _absolute_of_verl(config: RunConfig, places: Places) -> dict[str, Any]:
    """Returns verl's words with existing relative paths of data, models and code made absolute: its workers run in
    another directory.
    """
    if config.trainer.backend != "verl":
        return config.verl
    # A copy: the configuration that the user wrote is shown and kept as it is.
    words, keys = dict(config.verl), input_keys(config.trainer.entry)
    # Hydra's `+key` adds what verl's own configuration does not have; it names the same place.
    for name, value in config.verl.items():
        key = f"verl.{name.lstrip('+')}"
        if name.lstrip("+") not in keys:
            # A file of code or settings, such as `custom_reward_function.path`.
            if place := file_of_verl(value):
                words[name] = value.removesuffix(place) + _if_there(key, place, places)
        elif isinstance(value, list):
            words[name] = [_if_there(key, one, places) for one in value]
        else:
            words[name] = _if_there(key, value, places)
    return words


def _if_there(key: str, value: Any, places: Places) -> Any:
    # A `$` is a reference of Hydra's, and `[` begins a list in its grammar: neither is a path.
    relative = isinstance(value, str) and value and not value.startswith(("/", "~", "[")) and "$" not in value
    if not relative:
        return value
    found = places.path(key, value)
    # What does not exist may be a name of the Hugging Face hub.
    return found if os.path.exists(found) else value


def check_names(config: RunConfig) -> None:
    """Refuses a `builtin:` that does not exist.

    Raises:
        ConfigError: lists the names that exist.
    """
    for key, value, prefix, names in (
        ("model.path", config.model.path, BUILTIN, BUILTIN_MODELS),
        ("data.root", config.data.root, BUILTIN, BUILTIN_DATA),
        ("data.eval_root", config.data.eval_root or "", BUILTIN, BUILTIN_DATA),
    ):
        # A typing error: found here, before anything is built.
        if value.startswith(prefix) and value.removeprefix(prefix) not in names:
            raise ConfigError(
                "no such built-in",
                where=key,
                found=value,
                expected=" or ".join(prefix + name for name in names),
                remedy=f"set {key}",
            )


def build_builtins(config: RunConfig) -> RunConfig:
    """Builds each `builtin:` (the first time takes a minute) and puts its path into the config.

    Raises:
        DataError: it could not be built.
    """
    if config.trainer.is_guest:
        return config
    replace = msgspec.structs.replace
    named = (config.data.root, config.data.eval_root or "", config.model.path)
    if any(text.startswith(BUILTIN) for text in named):
        # Each on its own, before anything in it is used: under an open umask others could have put theirs there.
        for folder in (_cache_base().parent, _cache_base(), cache_dir()):
            private_dir(folder.resolve())  # a user's own link may lead to a larger disk
    if config.data.root.startswith(BUILTIN):
        # Asked of the child each time: it compares the files with the sums that they should hold.
        config = replace(config, data=replace(config.data, root=_build("data", config.data.root)))
    held_out = config.data.eval_root
    if held_out is not None and held_out.startswith(BUILTIN):
        beside = (
            Path(_build("data", held_out)).parent / "heldout"
        )  # as `quickstart.arithmetic_data` lays it out
        config = replace(config, data=replace(config.data, eval_root=str(beside)))
    if config.model.path.startswith(BUILTIN):
        # A model is there as a whole or not at all. The look is cheap; the child imports torch.
        there = _built_model(config)
        path = str(there) if there.is_dir() else _build("model", config.model.path)
        config = replace(config, model=replace(config.model, path=path))
    return config


def _built_model(config: RunConfig) -> Path:
    return cache_dir() / config.model.path.removeprefix(BUILTIN)


def built_before(config: RunConfig, old: RunConfig) -> RunConfig:
    """Takes over the built path of an existing run's `builtin:`, even if an older version built it."""
    replace = msgspec.structs.replace
    # Without the builder's hash: after an upgrade the run still trains the model and data that it began with.
    base = str(_cache_base()) + os.sep
    if config.data.root.startswith(BUILTIN) and old.data.root.startswith(base):
        config = replace(config, data=replace(config.data, root=old.data.root))
    held_out, before = config.data.eval_root or "", old.data.eval_root or ""
    if held_out.startswith(BUILTIN) and before.startswith(base):
        config = replace(config, data=replace(config.data, eval_root=before))
    if config.model.path.startswith(BUILTIN) and old.model.path.startswith(base):
        config = replace(config, model=replace(config.model, path=old.model.path))
    return config


def _build(kind: str, spec: str) -> str:
    # Here and not in the child, whose traceback would be the answer.
    require_packages("torch", "transformers", wanted_by=f"building {spec}")
    # A child, since building imports torch; -P, since `-m` would look in the working directory first.
    command = [sys.executable, "-P", "-m", "verl_slurm.quickstart", kind, spec, str(cache_dir())]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_BUILD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise DataError(
            "the built-in could not be built in time",
            where=spec,
            found=f"nothing after {_BUILD_TIMEOUT_S:.0f} s",
            remedy="try again on an idle machine",
        ) from None
    # The last line is the path; libraries may print before it.
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    if done.returncode or not lines or not Path(lines[-1]).is_dir():
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise DataError(
            "the built-in could not be built",
            where=spec,
            found=words[-1] if words else f"exit code {done.returncode}",
            remedy=f"see what `{' '.join(command[1:4])} {spec}` says; the cache is {cache_dir()}",
        )
    return lines[-1]


def needs_building(config: RunConfig) -> bool:
    """Returns whether a model must be built first, which takes a while."""
    ours = not config.trainer.is_guest and config.model.path.startswith(BUILTIN)
    return ours and not _built_model(config).is_dir()


# The rules that the trainer offers; it imports torch, so the names are repeated here, and a test compares them.
RULES = ("arithmetic",)


def absolute_reward(text: str, base: Path) -> str:
    """Makes the path in `text`, if it has one, absolute against `base`. A text that is no reward stays as it is."""
    spec = parse_reward(text)
    if spec is None or not (spec.kind == "classifier" or spec.is_file):
        return text
    return str(spec._replace(name=os.path.abspath(base / Path(spec.name).expanduser())))


def check_reward(text: str, config: RunConfig | None = None) -> list[str]:
    """Refuses a reward that does not exist, as far as can be seen without running it; returns notes.

    Args:
        text: paths absolute.
        config: of the run, in whose ranks' Python imports are looked for; None: they are not.

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
        limit = max_positions(read_model_config(Path(spec.name)))
        if config is not None and limit is not None and limit < max_model_len(config):
            longest = f"a prompt with its response has up to {max_model_len(config)} of the policy's"
            return [
                f"{text} was made for {limit} tokens, and {longest}: one that does not fit ends the run, 11"
            ]
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
    reads_answers = check_function(spec, file)
    if config is None:
        return []
    # A note, not a refusal: the function may read them and do without them.
    notes = [_no_answers(text)] if reads_answers and config.data.answer_key is None else []
    # As `trainer.reward.python` loads it.
    whole = file.name == "__init__.py"
    package = "" if spec.is_file else spec.name if whole else spec.name.rpartition(".")[0]
    return notes + check_source(config, "model.reward", file, spec.function, package).notes


def _no_answers(reward: str) -> str:
    return (
        f"data.answer_key is null, so each answer that {reward} reads is empty text: set data.answer_key, "
        "unless the reward does without"
    )


def _check_classifier(directory: Path) -> None:
    """Refuses a classifier that the ranks would refuse: another head, or several labels.

    Raises:
        DataError: the reason.
    """
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
    if wrong:
        raise DataError(
            "the reward model does not give one score",
            where=directory,
            found=wrong,
            expected="a sequence classifier with one label",
            remedy="train it with AutoModelForSequenceClassification and num_labels=1, or set model.reward",
        )


def check_guest(config: RunConfig) -> Found:
    """Checks the program and its data.

    Args:
        config: paths absolute.

    Raises:
        NotFound, ConfigError: `check_program`.
        DataError: `data.root` is not there, or the program cannot be parsed.
    """
    checked, notes = check_program(config)
    # A guest may have its data elsewhere, or none; what it names is fingerprinted, and so has to exist.
    root = data_root(config)
    if root is not None:
        if not root.is_dir():
            found = "a file" if root.exists() else "nothing"
            raise DataError("no such data directory", where=root, found=found, remedy="set data.root")
        checked = [*checked, "data"]
    return Found(checked, notes)


def refuse_guests(run: RunPaths) -> None:
    """Refuses an operation that our own trainer alone supports while it runs.

    Raises:
        ConfigError: the run's loop is a guest's.
    """
    trainer = load_resolved(run.run_yaml).trainer
    if trainer.is_guest:
        raise ConfigError(
            "the reward is the program's own",
            where=run.run_yaml,
            found=f"trainer.backend: {trainer.backend}",
            expected="trainer.backend: native",
            remedy="change the program, and submit the run again",
        )
