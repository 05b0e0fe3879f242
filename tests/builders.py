"""Builds the objects that tests need, with defaults, so that a call names what matters to its test. Without torch."""

from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.base.fence import RunOwner, take_attempt
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.format.manifest import render, sealed
from verl_slurm.checkpoint.format.specification import MANIFEST, Manifest, Topology
from verl_slurm.checkpoint.format.state_schema import current_schema
from verl_slurm.config.load import dump
from verl_slurm.config.schema import EncryptionConfig, RunConfig, TierConfig, TrainConfig
from verl_slurm.runtime_state.format import RuntimeState
from verl_slurm.wire.reward_plan import RewardSwitch

RUN_ID = "0123456789abcdef"
"""The id of a run whose directory has none."""

_DEFAULTS = RunConfig()
_KEYS = [
    (key, name)
    for name in _DEFAULTS.__struct_fields__
    for key in getattr(getattr(_DEFAULTS, name), "__struct_fields__", ())
]
_SECTION_OF = dict(_KEYS)
assert len(_KEYS) == len(_SECTION_OF) + 1, (
    "another key is in two sections: give one of them a name in run_config"
)


def begun_run(root: Path) -> RunPaths:
    """A run's directory, of which the first attempt has taken possession."""
    made = RunPaths(private_dir(root))
    for folder in (made.checkpoints, made.control):
        private_dir(folder)
    write_file(made.run_yaml, b"name: run\n")
    take_attempt(made, job_id="1", restart=0)
    return made


def run_config(**values: Any) -> RunConfig:
    """A configuration of a run, from keys of all its sections: `run_config(steps=3, keep_last=2, dp_size=4)`.

    `micro_batch_size_per_device` is the one of `train`. A whole section is taken, too (`train=TRAIN`), and a path for a
    text. Short forms:

        ranks            so many data-parallel ranks on one node, on its CPU
        sizes            (batch, mini-batch, micro-batch) of a rank
        sampled_at_once  rollout.micro_batch_size_per_device
        key_file         of checkpoint.encryption

    Raises:
        TypeError: no such key.
    """
    if "ranks" in values:
        values = {"dp_size": values.pop("ranks"), "nodes": 1, "device": "cpu"} | values
    if "key_file" in values:
        values["encryption"] = EncryptionConfig(key_file=str(values.pop("key_file")))
    if "sizes" in values:
        names = ("batch_size_per_device", "mini_batch_size_per_device", "micro_batch_size_per_device")
        values |= zip(names, values.pop("sizes"), strict=True)
    sections: dict[str, dict[str, Any]] = {name: {} for _, name in _KEYS}
    if "sampled_at_once" in values:
        sections["rollout"]["micro_batch_size_per_device"] = values.pop("sampled_at_once")
    whole: dict[str, Any] = {}
    for key, value in values.items():
        place = sections[_SECTION_OF[key]] if key in _SECTION_OF else whole
        place[key] = str(value) if isinstance(value, Path) else value
    config = msgspec.structs.replace(_DEFAULTS, **whole)
    changed = {name: msgspec.structs.replace(getattr(config, name), **own) for name, own in sections.items()}
    return msgspec.structs.replace(config, **changed)


def train_config(**values: Any) -> TrainConfig:
    """The section `train` of such a configuration."""
    return run_config(**values).train


def write_config(paths: RunPaths, config: RunConfig | None = None, /, **values: Any) -> RunConfig:
    """Writes the run.yaml of a run, whose directory exists, from a configuration or from keys of `run_config`."""
    config = config or run_config(**({"run_dir": paths.root} | values))
    write_file(paths.run_yaml, dump(config))
    return config


def new_run(root: Path, /, **values: Any) -> RunPaths:
    """Makes the directory of a run, named as its directory, with its run.yaml from keys of `run_config`."""
    paths = RunPaths(private_dir(root))
    write_config(paths, **({"name": root.name} | values))
    return paths


def new_training(root: Path, model: Path, data: Path, /, **values: Any) -> RunPaths:
    """As `new_run`, for a tiny model: on one rank, which samples 8 responses of 4 tokens at once."""
    tiny = {"ranks": 1, "sampled_at_once": 8, "max_new_tokens": 4}
    return new_run(root, path=model, **({"root": data} | tiny | values))


def cold_tier(path: Path) -> TierConfig:
    """An archive in a directory."""
    return TierConfig(name="cold", kind="archive", path=str(path))


def runtime_state(**values: Any) -> RuntimeState:
    """The runtime state of the one rank of a run after its first step."""
    fields: dict[str, Any] = {"rank": 0, "world_size": 1, "step": 1, "phase": "step_end", "index": 0}
    fields |= {"safe_point": 0, "rollout_offset": 8, "episode_id": 8, "kl_coef": 0.1}
    return RuntimeState(**(fields | values))


def make_manifest(step: int = 1, *, world_size: int = 1, **values: Any) -> Manifest:
    """The manifest, unsealed and without files, of a checkpoint at the end of `step`."""
    fields: dict[str, Any] = {"name": f"step_{step:06d}", "phase": "step_end", "safe_point": 0}
    fields |= {
        "run_id": RUN_ID,
        "attempt": 1,
        "parent": None,
        "schema_id": current_schema().schema_id,
        "files": (),
    }
    fields |= {"dataset_fingerprint": "0" * 64, "topology": Topology(dp=world_size)}
    fields |= {"created_utc": "2026-01-01T00:00:00Z", "save_seconds": 0.5}
    if "guest" not in values:
        fields["algorithm"] = "grpo" if values.get("trained") == ("actor",) else "ppo"
    return Manifest(step=step, world_size=world_size, **(fields | values))


def write_manifest(directory: Path, step: int = 1, **values: Any) -> None:
    """Seals a manifest and writes it into a checkpoint's directory, which exists."""
    values = own_run(directory) | values
    (directory / MANIFEST).write_bytes(render(sealed(make_manifest(step, **values))))


def own_run(checkpoint: Path) -> dict[str, Any]:
    """The field of a manifest that names the run in whose directory a checkpoint lies; makes the run's id."""
    if checkpoint.parent.name != "checkpoints":
        return {}
    paths = RunPaths(checkpoint.parent.parent)
    if not paths.run_id.exists():
        write_file(paths.run_id, f"{RUN_ID}\n".encode())
    return {"run_id": run_id(paths)}


def checkpoint_info(step: int, **values: Any) -> CheckpointInfo:
    """The entry of a committed checkpoint at the end of `step`."""
    name = f"step_{step:06d}"
    fields: dict[str, Any] = {"kind": "committed", "name": name, "path": Path(name), "safe_point": 0}
    return CheckpointInfo(step=step, **(fields | values))


def owner(**values: Any) -> RunOwner:
    """The first owner of a run: a lead without Slurm."""
    place: dict[str, Any] = {"attempt": 1, "cluster": "local", "job_id": "local-1", "restart": 0}
    return RunOwner(**(place | {"host": "a", "pid": 1, "taken": "2026-01-01T00:00:00+00:00"} | values))


def reward_switch(reward: str, step: int, **values: Any) -> RewardSwitch:
    """The first replacement of a run's reward, by a rule, without a warm start."""
    fields: dict[str, Any] = {"request": 1, "digest": "", "warm_start_steps": 0, "recorded_utc": ""}
    return RewardSwitch(reward=reward, step=step, **(fields | {"replaced": "rule:arithmetic"} | values))


def write_verl_rows(path: Path, num: int = 64, **columns: object) -> None:
    """Rows as verl's SFT and PPO read them, in a parquet file; a column that is None is left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    asked = [{"role": "user", "content": "1+1="}]
    row: dict[str, object] = {
        "messages": asked,
        "prompt": asked,
        "data_source": "sums",
        "reward_model": {"ground_truth": "2"},
    }
    row = {key: value for key, value in (row | columns).items() if value is not None}
    pq.write_table(pa.Table.from_pylist([row] * num), path)
