"""From a verified checkpoint, or from nothing, to the state a rank trains on from.

Order: the manifest is held against this run, then the checkpoint state is loaded into the live tensors, then
the runtime state, which puts the generators back, then the ledger's later rollouts, which draw nothing.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from verl_slurm.base.errors import UNREADABLE, CheckpointCorrupt, ConfigError, DataError
from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.base.run_id import is_adopted
from verl_slurm.checkpoint.format.components import require_full, require_same_models
from verl_slurm.checkpoint.format.specification import Manifest
from verl_slurm.checkpoint.format.state_schema import check_schema, current_schema, read_schema
from verl_slurm.checkpoint.store.frozen import lacking_file
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config.elastic import require_same_step
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint.data_record import data_place, is_recorded
from verl_slurm.runtime_state import ledger
from verl_slurm.runtime_state.format import Arrays, RuntimeState
from verl_slurm.save.ranks import rng
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.loader import read_runtime_state, read_tensors
from verl_slurm.save.ranks.tensors import Tensors
from verl_slurm.trainer.measures import console
from verl_slurm.trainer.objective.optimizers import schedule_record
from verl_slurm.trainer.parallel.grid import Grid
from verl_slurm.trainer.parallel.places import leaders
from verl_slurm.trainer.state.orchestration import topology_of
from verl_slurm.trainer.state.position import Position, StepShape, first_generation, rollout_offset
from verl_slurm.trainer.state.resharding import reshard
from verl_slurm.trainer.state.train_state import Buffers, TrainState, restore_state

_NOTHING_LEARNED = frozenset({"generate", "score", "advantage"})
"""Phases of a step in which its rollouts have changed no weight yet."""


def checkpoint_directory(paths: RunPaths, resume: str, *, by_hand: bool) -> Path | None:
    """What `--resume` means: a name in this run's checkpoints, nothing, or by hand also a path.

    Args:
        by_hand: there is no daemon.

    Raises:
        ConfigError: it is no checkpoint's name, and no path where one is allowed.
    """
    if not resume:
        return None
    # The pattern has no slash: a name cannot lead out of the run.
    if CHECKPOINT_NAME.fullmatch(resume):
        return paths.checkpoints / resume
    # A daemon copies a foreign checkpoint into the run first, and verifies it there: a path from one is a
    # mistake.
    if by_hand and "/" in resume:
        return Path(resume)
    raise ConfigError(
        "--resume names no checkpoint of this run",
        where=paths.checkpoints,
        found=resume,
        expected="a name such as step_000012" + (" or a path" if by_hand else ""),
        remedy="verl-slurm list RUN shows what there is",
    )


def require_verified(directory: Path, keys: Keyring | None = None) -> None:
    """Check every byte of a checkpoint before it is opened, its layout, and with keys who made it. On rank 0.

    Raises:
        KeyRefused: it needs a key that is not there.
        CheckpointCorrupt: it does not verify.
        SchemaMismatch: it is of another version's layout.
    """
    verdict = verify(directory, keys=keys)
    if verdict.needs_key:
        CheckpointReader(directory, keys)  # raises, and says which
    remedy = "resume from another one (verl-slurm list RUN)"
    verdict.require("the checkpoint does not verify", directory, remedy)
    # After the verification: a damaged file must be called damaged, and not of another version.
    saved = read_schema(directory)
    check_schema(saved, current_schema(), where=directory)


def check_manifest(
    directory: Path, config: RunConfig, frozen: dict[str, str], paths: RunPaths, keys: Keyring | None = None
) -> Manifest:
    """Refuse what cannot be resumed here, before any tensor is read.

    Args:
        frozen: digest of each model that does not train, as it is now; of the reward nothing is asked here.

    An adopted checkpoint gives weights, moments, generators and the position; all else is this run's from there on.

    Raises:
        ConfigError: the checkpoint is of another algorithm, or of another shape and another step.
        DataError: a frozen model, or what is held out, has changed.
        KeyRefused: it needs a key that is not there.
    """
    reader = CheckpointReader(directory, keys)
    manifest = reader.manifest
    # Each of these reads the manifest or one small file, and no tensor.
    require_full(manifest, directory)
    require_same_models(manifest, config, directory)
    # In the midst of a step its rollouts and scores are the former run's, and all stays as it was.
    adopted = is_adopted(paths, manifest.digest) and not manifest.safe_point
    # Another number of ranks may take over in the midst of a step, as long as a step is the same prompts and updates.
    if adopted or manifest.topology != topology_of(config):
        require_same_step(_saved_config(reader), config, where=directory)
    if adopted:
        return manifest
    # The reward may be replaced while a run goes on: `reward.reward_files` knows which one it must be.
    roles = sorted((manifest.frozen.keys() | frozen.keys()) - {"reward"})
    places = {
        "reference": data_place(config.model.path, None),
        "eval_data": data_place(config.data.eval_root or "", config.data.eval_files),
    }
    digests = {role: (manifest.frozen.get(role, ""), frozen.get(role, "")) for role in roles}
    changed = [
        role
        for role, (was, now) in digests.items()
        if was != now and not (role in places and is_recorded(paths.frozen, was, now, places[role]))
    ]
    if changed:
        # A purge, or a refresh in mid-way: with these words the daemon waits for the file (`names_missing_file`).
        trees = [(digests[role][0], places[role]) for role in changed if role in places]
        gone = next(filter(None, (lacking_file(paths, *tree) for tree in trees)), "")
        raise DataError(
            f"what does not train is not what the run started with: {', '.join(changed)}",
            where=gone or directory,
            found=os.strerror(errno.ENOENT)
            if gone
            else ", ".join(frozen.get(role, "none") for role in changed),
            expected=", ".join(manifest.frozen.get(role, "none") for role in changed),
            remedy="put it back as it was (RUN/frozen has the models by digest), or start a new run",
        )
    return manifest


def load_state(
    directory: Path,
    config: RunConfig,
    shape: StepShape,
    tensors: dict[str, Tensors],
    grid: Grid,
    ranks: Collective,
    keys: Keyring | None = None,
    *,
    near: Path | None = None,
    adopted: bool = False,
) -> TrainState:
    """Fill `tensors` and return the rest of the state; the generators are put back. Collective.

    Args:
        near: this node's own part of it, if there is one (`read_tensors`).
        adopted: it is another run's, and the learning rates are this run's from here on.

    Raises:
        CheckpointCorrupt: something in it does not fit this model or contradicts itself.
        ConfigError: the learning rates, or the responses to a prompt, are not those of the configuration.
    """
    reader = CheckpointReader(directory, keys)
    read_tensors(reader, tensors, ranks, near=near)
    saved = _my_runtime_state(reader, shape, grid, ranks)
    try:
        recorded = msgspec.json.decode(reader.read("scheduler.json"))
    except UNREADABLE as error:
        raise CheckpointCorrupt(
            "the learning rates cannot be read",
            where=directory / "scheduler.json",
            found=error,
            remedy="resume from an older checkpoint (verl-slurm list RUN)",
        ) from error
    # The checkpoint's own configuration: run.yaml may have been replaced since.
    former = _saved_config(reader)
    # A run may be made longer; what falls until its end was then another rate here, and only from here on is ours.
    as_long = msgspec.structs.replace(config.train, steps=former.train.steps)
    expected = schedule_record(as_long, saved.step)
    # Another schedule would train on silently with other rates.
    if recorded != expected and not adopted:
        raise ConfigError(
            "the learning rates are not those the checkpoint was trained with",
            where=directory,
            found=expected,
            expected=recorded,
            remedy="resume with the configuration the run was started with (run.yaml)",
        )
    if former.rollout.samples_per_prompt != shape.samples_per_prompt:
        raise ConfigError(
            "the checkpoint has another number of responses to a prompt",
            where=directory,
            found=f"rollout.samples_per_prompt={shape.samples_per_prompt}",
            expected=former.rollout.samples_per_prompt,
            remedy="resume with the configuration the run was started with (run.yaml)",
        )
    # Last: it puts the generators back, and nothing above may draw behind it.
    return restore_state(saved, config, shape, where=directory)


def _my_runtime_state(
    reader: CheckpointReader, shape: StepShape, grid: Grid, ranks: Collective
) -> RuntimeState:
    """What this rank saved, or in another shape its share of what all former ranks did."""
    former, world_size = reader.manifest.topology, reader.manifest.world_size
    if former == grid.shape:
        # The same shape: every rank reads its own file, and the run goes on bit for bit.
        return read_runtime_state(reader, ranks.rank, world_size)
    # All ranks of a former replica held the same; its leader speaks for it.
    states = [read_runtime_state(reader, rank, world_size) for rank in leaders(former)]
    # With the former's shape of a step: its micro-batches are dealt out anew by their global numbers.
    mine = reshard(states, StepShape.of(_saved_config(reader)), shape, grid.place.dp)
    # A rank that did not exist before has no generators to take over, and keeps those it was seeded with.
    return msgspec.structs.replace(
        mine, rank=ranks.rank, world_size=ranks.world_size, rng=mine.rng or rng.capture()
    )


def _saved_config(reader: CheckpointReader) -> RunConfig:
    return parse_config(reader.read("config.yaml"), str(reader.directory / "config.yaml"))


def load_replay(
    paths: RunPaths,
    state: TrainState,
    shape: StepShape,
    dp_rank: int | None,
    ranks: Collective,
    keys: Keyring | None = None,
    *,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[tuple[int, int], Arrays]:
    """A data-parallel rank's rollouts in the ledger that lie before it, by (step, global micro-batch). Collective.

    Where rollouts of the running step were once refused (`trainer.rollout.engines`), those that `state` holds
    may be the same: it is put back to the beginning of the step.

    Args:
        dp_rank: None: another rank of the replica looks for this one.
        tell: called with what cannot be used, for the journal.
    """
    position = state.position
    refused: list[int] = []

    def report(text: str) -> None:
        console.complain(f"dp rank {dp_rank}: {text}")
        tell(text)

    # From the beginning of the step where it may have to begin anew, else from the first piece that is missing.
    early = position.phase in _NOTHING_LEARNED
    ahead = (position.step, 0 if early else first_generation(position, shape) * shape.dp_size)

    def mine(step: int, micro_batch: int) -> bool:
        # By global number: the ranks that wrote the records may have been more or fewer.
        return (step, micro_batch) >= ahead and micro_batch % shape.dp_size == dp_rank

    found: dict[tuple[int, int], Arrays] = {}
    if dp_rank is not None:
        # Records of other ranks are not decoded: a rank holds its own rollouts in memory.
        found = ledger.load(
            paths,
            from_step=position.step,
            wanted=mine,
            taken_back=lambda step, _: refused.append(step),
            # With a report damage is said and passed over: what it held is sampled again, the same.
            report=report,
            keys=keys,
        )
    # All ranks together: those of a replica that are not its leader have not looked.
    # Nothing was learned from them yet, and what has been sampled since is in the ledger.
    if ranks.max([int(early and position.step in refused)])[0]:
        state.position, state.buffers = Position(position.step), Buffers()
    ahead = (position.step, first_generation(state.position, shape) * shape.dp_size)
    # A rollout that `state` holds already needs no replay.
    return {name: arrays for name, arrays in found.items() if name >= ahead}


def where_it_starts(
    state: TrainState,
    shape: StepShape,
    manifest: Manifest | None,
    dataset: str,
    num_replay: int,
    *,
    foreign: Path | None = None,
) -> str:
    """Returns what was restored, in a line for people; `foreign`: the checkpoint's place outside this run."""
    replay = f"{num_replay} micro-batches of rank 0 in the ledger to replay"
    if manifest is None:
        return f"starting from the beginning; {replay}"
    consumed = rollout_offset(state.position, shape) // shape.samples_per_prompt
    data = "unchanged" if dataset == manifest.dataset_fingerprint else "CHANGED since"
    name = f"{manifest.name} from {foreign}" if foreign else manifest.name
    reward = (
        f", reward {state.reward.spec} (replacement {state.reward.number})" if state.reward.number else ""
    )
    return (
        f"resumed {name}: {state.position}, {consumed} prompts consumed, "
        f"KL window of {len(state.kl.window)}, data set fingerprint {data}, {replay}{reward}"
    )
