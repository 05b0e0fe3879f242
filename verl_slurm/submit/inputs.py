"""The model and the data of a run: absolute paths, built-in ones made, and a look at what is there.

Torch-free: what must be built is built by a child process, once, in the user's cache.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

import verl_slurm
from verl_slurm.config.schema import RunConfig
from verl_slurm.errors import UNREADABLE, ConfigError, DataError
from verl_slurm.paths import CHECKPOINT_NAME
from verl_slurm.submit.rewards import absolute_reward

__all__ = [
    "BUILTIN_DATA",
    "BUILTIN_MODELS",
    "absolute",
    "build_builtins",
    "built_before",
    "cache_dir",
    "check_data",
    "check_names",
    "check_row",
    "needs_building",
]

_BUILTIN = "builtin:"
# What quickstart and the trainer offer; they import torch, so their names are repeated here and held by a test.
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
"""Name → what its config.json will say once it is built (a test holds it to that)."""
BUILTIN_DATA = ("arithmetic",)
_BUILD_TIMEOUT_S = 900.0


def cache_dir() -> Path:
    """Where this version's built-in models and data are kept.

    `$XDG_CACHE_HOME/verl-slurm/builtin/VERSION`, mostly below ~/.cache; VERSION is the hash of the code
    that builds them, so that a changed builder never gets to see what an older one made.
    """
    builder = hashlib.sha256()
    for source in sorted((Path(verl_slurm.__file__).parent / "quickstart").glob("*.py")):
        builder.update(source.name.encode() + b"\0" + source.read_bytes())
    return _cache_base() / builder.hexdigest()[:12]


def _cache_base() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "verl-slurm" / "builtin"


def absolute(config: RunConfig, base: Path) -> RunConfig:
    """The config with every path made absolute against `base`, and the run's name put into `run_dir`.

    `resume_from` may be a path; `auto`, the name of a checkpoint, `builtin:` and `rule:` stay. Of a guest's command its
    first word is a path, if it ends like one.
    """

    def path(text: str) -> str:
        return os.path.abspath(base / Path(text).expanduser())

    replace = msgspec.structs.replace
    model, data, checkpoint = config.model, config.data, config.checkpoint
    if not model.path.startswith(_BUILTIN):
        model = replace(model, path=path(model.path))
    model = replace(model, reward=absolute_reward(model.reward, base))
    if not data.root.startswith(_BUILTIN):
        data = replace(data, root=path(data.root))
    if data.eval_root is not None and not data.eval_root.startswith(_BUILTIN):
        data = replace(data, eval_root=path(data.eval_root))
    wanted = checkpoint.resume_from
    if wanted is not None and wanted != "auto" and not CHECKPOINT_NAME.fullmatch(wanted):
        checkpoint = replace(checkpoint, resume_from=path(wanted))
    run_dir = path(config.run_dir.replace("{name}", config.name))
    trainer = config.trainer
    if trainer.command and trainer.command[0].endswith(".py"):
        trainer = replace(trainer, command=(path(trainer.command[0]), *trainer.command[1:]))
    return replace(config, trainer=trainer, model=model, data=data, checkpoint=checkpoint, run_dir=run_dir)


def check_names(config: RunConfig) -> None:
    """Refuse a `builtin:` that does not exist.

    Raises:
        ConfigError: with the names there are.
    """
    for key, value, prefix, names in (
        ("model.path", config.model.path, _BUILTIN, BUILTIN_MODELS),
        ("data.root", config.data.root, _BUILTIN, BUILTIN_DATA),
        ("data.eval_root", config.data.eval_root or "", _BUILTIN, BUILTIN_DATA),
    ):
        if value.startswith(prefix) and value.removeprefix(prefix) not in names:
            raise ConfigError(
                "no such built-in",
                where=key,
                found=value,
                expected=" or ".join(prefix + name for name in names),
                remedy=f"set {key}",
            )


def build_builtins(config: RunConfig) -> RunConfig:
    """Build what is `builtin:` (the first time takes a minute) and put its path into the config.

    Raises:
        DataError: it could not be built.
    """
    if config.trainer.is_guest:
        return config
    replace = msgspec.structs.replace
    if config.data.root.startswith(_BUILTIN):
        config = replace(config, data=replace(config.data, root=_build("data", config.data.root)))
    held_out = config.data.eval_root
    if held_out is not None and held_out.startswith(_BUILTIN):
        beside = Path(_build("data", held_out)).parent / "heldout"  # as `quickstart.data` lays it out
        config = replace(config, data=replace(config.data, eval_root=str(beside)))
    if config.model.path.startswith(_BUILTIN):
        # A model is there as a whole or not at all; looking costs nothing, the child imports torch.
        there = _built_model(config)
        path = str(there) if there.is_dir() else _build("model", config.model.path)
        config = replace(config, model=replace(config.model, path=path))
    return config


def _built_model(config: RunConfig) -> Path:
    return cache_dir() / config.model.path.removeprefix(_BUILTIN)


def built_before(config: RunConfig, old: RunConfig) -> RunConfig:
    """Take over what an existing run's `builtin:` was built to, even by an older version."""
    replace = msgspec.structs.replace
    base = str(_cache_base()) + os.sep
    if config.data.root.startswith(_BUILTIN) and old.data.root.startswith(base):
        config = replace(config, data=replace(config.data, root=old.data.root))
    held_out, before = config.data.eval_root or "", old.data.eval_root or ""
    if held_out.startswith(_BUILTIN) and before.startswith(base):
        config = replace(config, data=replace(config.data, eval_root=before))
    if config.model.path.startswith(_BUILTIN) and old.model.path.startswith(base):
        config = replace(config, model=replace(config.model, path=old.model.path))
    return config


def _build(kind: str, spec: str) -> str:
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


def check_data(config: RunConfig, key: str = "data.root") -> None:
    """At least one `*.jsonl` with something in it, and a first line of each with the two keys as text.

    The trainer reads every line; this looks at the first of each file, so that a wrong key costs no
    allocation.

    Args:
        key: `data.root` or `data.eval_root`.

    Raises:
        DataError: missing, empty, unreadable or of another form, with file and line.
    """
    data = config.data
    root = Path(data.root if key == "data.root" else data.eval_root or "")
    remedy = f"set {key} to a directory of *.jsonl files"
    if not root.is_dir():
        found = "a file" if root.exists() else "nothing"
        raise DataError("no such data directory", where=root, found=found, remedy=remedy)
    try:
        files = sorted(path for path in root.iterdir() if path.suffix == ".jsonl" and path.is_file())
    except PermissionError as error:
        raise DataError(
            "the data cannot be read", where=root, found=error.strerror, remedy="chmod u+rx"
        ) from None
    if not files:
        raise DataError("the data directory is empty", where=root, expected="*.jsonl files", remedy=remedy)
    filled = 0
    for path in files:
        try:
            with path.open("rb") as file:
                first = file.readline(1 << 20)
        except OSError as error:
            raise DataError(
                "a data file cannot be read", where=path, found=error.strerror, remedy=f"chmod u+r {path}"
            ) from None
        if first.strip():
            filled += 1
            check_row(f"{path}:1", first, (data.prompt_key, data.answer_key))
    if not filled:
        raise DataError(
            "the data is empty",
            where=root,
            found=f"{len(files)} files without a line",
            expected="one JSON object a line",
            remedy=remedy,
        )


def check_row(where: str, line: bytes, keys: tuple[str, str]) -> None:
    """Refuse a line of a data file that is no JSON object with a text under each of `keys`.

    Raises:
        DataError: it is not.
    """
    remedy = "mend that line, or set data.prompt_key and data.answer_key"
    try:
        row = msgspec.json.decode(line)
    except UNREADABLE as error:
        raise DataError("not JSON", where=where, found=error, remedy=remedy) from None
    for key in keys:
        value = row.get(key) if isinstance(row, dict) else None
        if not isinstance(value, str):
            raise DataError(
                "a prompt without its key",
                where=where,
                found="no text" if isinstance(row, dict) else type(row).__name__,
                expected=f"text under {key!r}",
                remedy=remedy,
            )


def needs_building(config: RunConfig) -> bool:
    """Whether a model must be built first, which takes its time."""
    ours = not config.trainer.is_guest and config.model.path.startswith(_BUILTIN)
    return ours and not _built_model(config).is_dir()
