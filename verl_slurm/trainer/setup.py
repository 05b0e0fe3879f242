"""Builds one rank: process group, device, models, data, and the state to start from. The only place that does.

What every rank must agree on (digests, the first start's layout) is worked out by rank 0 and given to all, so
that all refuse together or none.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from verl_slurm.checkpoint.fingerprint import check_dataset, fingerprint
from verl_slurm.checkpoint.fingerprint import read as read_fingerprint
from verl_slurm.checkpoint.format import Manifest, Topology
from verl_slurm.checkpoint.schema import current_schema
from verl_slurm.checkpoint.verify import read_manifest
from verl_slurm.config.schema import RunConfig
from verl_slurm.dcp.collective import Collective
from verl_slurm.dcp.loader import load_runtime_state, load_tensors
from verl_slurm.dcp.saver import Provenance
from verl_slurm.dcp.tensors import initialise_adamw
from verl_slurm.errors import ConfigError, DataError
from verl_slurm.fence import require_epoch
from verl_slurm.paths import RunPaths
from verl_slurm.quickstart.builtin import resolve_data, resolve_model
from verl_slurm.runtime_state import ledger as journal
from verl_slurm.runtime_state.format import Arrays
from verl_slurm.runtime_state.ledger import Ledger
from verl_slurm.trainer import rng
from verl_slurm.trainer.data import PromptData, load_tokenizer
from verl_slurm.trainer.loop import Loop
from verl_slurm.trainer.models import Models, build_models
from verl_slurm.trainer.orchestration import check_or_write, describe
from verl_slurm.trainer.position import StepShape, first_generation, rollout_offset
from verl_slurm.trainer.report import Reporter
from verl_slurm.trainer.rewards import build_reward
from verl_slurm.trainer.rollout import HFRollout
from verl_slurm.trainer.saving import Checkpointer, live_tensors
from verl_slurm.trainer.schedule import schedule_record
from verl_slurm.trainer.state import TrainState, fresh_state, restore_state
from verl_slurm.trainer.step import Learner, Optimizers
from verl_slurm.trainer.stopping import Stopper
from verl_slurm.wire.client import NoDaemon, RankLine

__all__ = ["Place", "build_loop", "process_group"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which process this is, from torchrun's environment."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environ(cls, environ: "os._Environ[str] | dict[str, str]") -> "Place":
        """Read RANK, LOCAL_RANK and WORLD_SIZE.

        Raises:
            ConfigError: they are not there: not started by torchrun.
        """
        try:
            rank, local, world = (int(environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                "the trainer is not told its rank",
                found=error,
                expected="RANK, LOCAL_RANK and WORLD_SIZE",
                remedy="start it with `verl-slurm submit`, or with torchrun",
            ) from error
        return cls(rank=rank, local_rank=local, world_size=world)


@contextmanager
def process_group(config: RunConfig, place: Place) -> Iterator[tuple[torch.device, Collective]]:
    """Settle device, threads and determinism, and join the other ranks.

    Raises:
        ConfigError: another world size than the configuration's, or no GPU where one is asked for.
    """
    expected = config.distributed.world_size
    if place.world_size != expected:
        raise ConfigError(
            "another number of ranks was started than the run is configured for",
            where="distributed",
            found=place.world_size,
            expected=expected,
            remedy="start as many ranks as dp_size says",
        )
    device = _device(config, place)
    # The critic's logits are a view of its head's output, and nobody changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if config.distributed.threads_per_rank:
        torch.set_num_threads(config.distributed.threads_per_rank)
    if config.deterministic:
        # On CUDA some operators (cumsum in sampling) have no deterministic kernel: they warn. Their results
        # are journaled as rollouts and not computed again.
        torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")
        torch.backends.cudnn.benchmark = False
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        group = dist.new_group(backend="gloo")
    else:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    try:
        yield device, Collective(group)
    finally:
        # Without a goodbye the others would take our end for a crash of the network.
        dist.destroy_process_group()


def _device(config: RunConfig, place: Place) -> torch.device:
    wanted = config.distributed.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("there is no GPU here", where="distributed.device", found="cuda", remedy="set it to cpu")
    return torch.device("cuda", place.local_rank)


class _Digests(msgspec.Struct, frozen=True):
    """What rank 0 found out for all."""

    dataset: str
    frozen: dict[str, str]


def build_loop(
    config: RunConfig,
    paths: RunPaths,
    *,
    epoch: int,
    resume: str,
    device: torch.device,
    ranks: Collective,
    line: RankLine,
) -> Loop:
    """Everything of one rank, ready to run. Collective.

    Args:
        resume: name of a verified checkpoint of this run, or a path to one; empty: from the start.

    Raises:
        VerlSlurmError: something does not fit, see the class.
        RanksFailed: rank 0 could not read what all depend on.
    """
    shape = StepShape.of(config)
    rng.seed_all(config.seed, ranks.rank)
    cache = paths.root / "builtin"
    model_path, data_root = resolve_model(config.model.path, cache), resolve_data(config.data.root, cache)
    topology = Topology(dp=config.distributed.dp_size)
    digests = msgspec.msgpack.decode(
        ranks.on_first(
            "checking data and models",
            lambda: _first_look(config, paths, data_root, model_path, checked=not isinstance(line, NoDaemon)),
        ),
        type=_Digests,
    )
    directory = _checkpoint_directory(paths, resume)
    manifest = _check_manifest(directory, config, digests) if directory else None

    mesh = init_device_mesh(device.type, (ranks.world_size,), mesh_dim_names=("dp",))
    models = build_models(model_path, dtype=config.model.dtype, mesh=mesh, device=device)
    optimizers = _optimizers(models, config)
    tokenizer = load_tokenizer(model_path)
    sampler = HFRollout(
        model_path,
        config.rollout,
        seed=config.seed,
        eos_id=int(tokenizer.eos_token_id),
        pad_id=int(tokenizer.pad_token_id),
        dtype=config.model.dtype,
        device=device,
    )
    data = PromptData(data_root, tokenizer, config.data, config.seed)
    reward = build_reward(config.model.reward, device=device)
    ledger = Ledger(paths, epoch, ranks.rank)

    state = _load(directory, config, shape, models, optimizers, ranks) if directory else fresh_state(config)
    replay = _replay(paths, state, shape, ranks)
    reporter = Reporter(
        rank=ranks.rank,
        line=line,
        total_steps=config.train.steps,
        tensorboard=paths.tensorboard,
        first_step=state.position.step,
    )
    reporter.say(_where_it_starts(state, shape, manifest, len(replay)))
    schema = current_schema()
    return Loop(
        config=config,
        shape=shape,
        state=state,
        learner=Learner(
            config=config,
            shape=shape,
            models=models,
            optimizers=optimizers,
            sampler=sampler,
            data=data,
            tokenizer=tokenizer,
            reward=reward,
            collective=ranks,
            ledger=ledger,
            replay=replay,
        ),
        checkpointer=Checkpointer(
            config=config,
            paths=paths,
            shape=shape,
            models=models,
            optimizers=optimizers,
            ranks=ranks,
            ledger=ledger,
            provenance=Provenance(
                epoch=epoch,
                parent=manifest.name if manifest else None,
                schema_id=schema.schema_id,
                dataset_fingerprint=digests.dataset,
                frozen=digests.frozen,
                topology=topology,
            ),
            schema=schema,
            epoch_check=lambda: require_epoch(paths, epoch),
        ),
        stopper=Stopper(line, ranks.max),
        reporter=reporter,
        # Only a checkpoint of this run answers for it; one that lies elsewhere is not ours to name.
        saved_as=manifest.name if manifest and directory == paths.checkpoints / manifest.name else "",
    )


def _first_look(
    config: RunConfig, paths: RunPaths, data_root: Path, model_path: Path, *, checked: bool
) -> bytes:
    """Rank 0: the fingerprints, and the layout of the first start.

    Args:
        checked: a daemon has compared the data set with its fingerprint just now.
    """
    recorded = read_fingerprint(paths) if checked else None
    data = recorded or check_dataset(paths, data_root)
    frozen = {"reference": fingerprint(model_path).digest}
    kind, _, name = config.model.reward.partition(":")
    if kind == "classifier":
        frozen["reward"] = fingerprint(Path(name)).digest
    backend = "gloo"
    check_or_write(paths, describe(config, data_root, data, backend))
    return msgspec.msgpack.encode(_Digests(dataset=data.digest, frozen=frozen))


def _checkpoint_directory(paths: RunPaths, resume: str) -> Path | None:
    if not resume:
        return None
    return Path(resume) if "/" in resume else paths.checkpoints / resume


def _check_manifest(directory: Path, config: RunConfig, digests: _Digests) -> Manifest:
    """Refuse what cannot be resumed here, before any tensor is read."""
    manifest = read_manifest(directory)
    if manifest.world_size != config.distributed.world_size:
        raise ConfigError(
            "the checkpoint is of another number of ranks, and this version cannot reshard a resume",
            where=directory,
            found=f"world size {config.distributed.world_size}",
            expected=f"world size {manifest.world_size}",
            remedy="resume with the world size of the checkpoint",
        )
    if manifest.frozen != digests.frozen:
        roles = [r for r in sorted(manifest.frozen | digests.frozen) if manifest.frozen.get(r) != digests.frozen.get(r)]
        raise DataError(
            f"a frozen model is not the one the run started with: {', '.join(roles)}",
            where=directory,
            found=", ".join(f"{digests.frozen.get(role, 'none')[:16]}" for role in roles),
            expected=", ".join(f"{manifest.frozen.get(role, 'none')[:16]}" for role in roles),
            remedy="put the old model back, or start a new run",
        )
    return manifest


def _optimizers(models: Models, config: RunConfig) -> Optimizers:
    made = []
    for model, rate in ((models.actor, config.train.actor_lr), (models.critic, config.train.critic_lr)):
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=rate,
            weight_decay=config.train.weight_decay,
            foreach=False,
        )
        initialise_adamw(optimizer)
        made.append(optimizer)
    return Optimizers(*made)


def _load(
    directory: Path,
    config: RunConfig,
    shape: StepShape,
    models: Models,
    optimizers: Optimizers,
    ranks: Collective,
) -> TrainState:
    """Checkpoint state, then runtime state, in that order."""
    load_tensors(directory, live_tensors(models, optimizers), ranks)
    saved = load_runtime_state(directory, ranks)
    recorded = msgspec.json.decode((directory / "scheduler.json").read_bytes())
    expected = schedule_record(config.train, saved.step)
    if recorded != expected:
        raise ConfigError(
            "the learning rates are not those the checkpoint was trained with",
            where=directory,
            found=expected,
            expected=recorded,
            remedy="resume with the configuration the run was started with (run.yaml)",
        )
    return restore_state(saved, config, shape, where=directory)


def _replay(
    paths: RunPaths, state: TrainState, shape: StepShape, ranks: Collective
) -> dict[tuple[int, int], Arrays]:
    """This rank's journaled rollouts that lie before it."""

    def report(text: str) -> None:
        sys.stderr.write(f"rank {ranks.rank}: {text}\n")

    found = journal.load(paths, from_step=state.position.step, report=report)
    ahead = (state.position.step, first_generation(state.position, shape) * ranks.world_size)
    return {
        key: arrays
        for key, arrays in found.items()
        if key >= ahead and key[1] % ranks.world_size == ranks.rank
    }


def _where_it_starts(state: TrainState, shape: StepShape, manifest: Manifest | None, num_replay: int) -> str:
    if manifest is None:
        return f"starting from the beginning; {num_replay} journaled micro-batches of rank 0 to replay"
    return (
        f"resumed {manifest.name}: {state.position}, {rollout_offset(state.position, shape)} prompts consumed, "
        f"KL window of {len(state.kl.window)}, data set fingerprint unchanged, "
        f"{num_replay} journaled micro-batches of rank 0 to replay"
    )
