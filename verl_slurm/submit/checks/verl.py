"""Checks a run of verl before anything is queued, for errors that would otherwise show after its wait in the queue.

On each of these, verl itself would crash on every node and at every start, or, worse, train on.
"""

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_slurm.base.errors import (
    CheckpointCorrupt,
    ConfigError,
    DataError,
    SchemaMismatch,
    VerlSlurmError,
)
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.format.specification import MANIFEST
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.config.elastic import allowed_nodes
from verl_slurm.config.schema import RunConfig
from verl_slurm.loops.verl_settings import start_settings
from verl_slurm.submit.checks.model_files import refuse_adapter, weights_problem
from verl_slurm.verl.inputs import Input, input_keys, inputs_of, is_remote, said_settings, with_critic
from verl_slurm.verl.layout import is_distributed, step_of, way_out
from verl_slurm.verl.overrides import (
    Setting,
    refuse_switches_as_text,
    require_possible,
    user_settings,
    value_at,
)
from verl_slurm.verl.releases import Entry, installed_verl, require_usable
from verl_slurm.verl.reshard.checkpoint import plan_source, require_room, source_of

__all__ = ["check_input", "check_ranks", "check_verl"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
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
) -> tuple[list[str], list[str]]:
    """Runs all checks; returns the items found good, and notes for the user.

    Args:
        config: `trainer.backend: verl`, paths absolute.
        committed: checkpoints of the run, newest first.

    Raises:
        ConfigError: another number of ranks than the checkpoint's, no verl, or settings that verl cannot read.
        DataError: data files or a model are not there.
    """
    entry, said = config.trainer.entry, user_settings(config.verl)
    if not paths.run_yaml.exists():  # a run that has begun with one continues with it
        refuse_switches_as_text(said)
    # Before anything is composed: no other setting helps a run whose shards these ranks cannot read.
    divided = check_ranks(config, paths, committed)
    checked, notes = ["verl's own settings"], [divided] if divided else []
    if committed and not divided:
        checked.append(f"{counted(config.distributed.world_size, 'rank')}, as saved")
    if config.slurm.container is None:
        version = installed_verl()
        if note := require_usable(version):
            notes.append(note)
        else:
            _require_beside(entry)
        checked.append(f"verl {version} is installed")
        # verl's own defaults count as well, so an input that the user leaves to them is looked at, too. Any attempt's
        # number: composing needs one.
        settings = start_settings(config, paths, 1, None).settings
        _require_fewer(config, settings)
    else:
        notes.append("verl is looked for in the container when the job starts, not before")
        settings = said_settings(said)
        require_possible(settings, said)
        _require_named(entry, said)
    for one in inputs_of(entry, settings, said):
        note = check_input(one)
        notes += [note] if note else []
    checked.append("verl's data files and models")
    return checked, notes


def check_ranks(config: RunConfig, paths: RunPaths, committed: Sequence[CheckpointInfo]) -> str:
    """Refuses a number of ranks among which the start could not divide the checkpoint; returns a note if it will.

    verl reads a checkpoint back with exactly as many ranks as wrote it, so the start divides it (`verl.reshard`). Here
    the same plan is made, of bytes that are not verified yet.

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
        plan = plan_source(source_of(path, manifest), now)
        require_room(plan, paths.resharded.checkpoints)
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
            remedy=f"verl-slurm adopt {path.parent} RUN, and checkpoint.resume_from=auto",
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
    # Headers and lengths alone; a file that was cut off ends each start of verl.
    for path in sorted(place.glob("*.safetensors")):
        if complaint := weights_problem(path):
            raise DataError(
                "the weights are damaged", where=path, found=complaint, remedy="copy that file again"
            )
