"""Builds one rank: models, data, and the state to start from.

Rank 0 computes all that every rank must agree on (digests, the first start's layout) and sends it to all. So all refuse
together or none.
"""

import hashlib
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec
import torch

from verl_slurm.base.bounded import vocabulary_of
from verl_slurm.base.fence import require_epoch
from verl_slurm.base.files import require_safe_way
from verl_slurm.base.keys import load_keys
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.schema import current_schema
from verl_slurm.checkpoint.format.specification import Manifest
from verl_slurm.checkpoint.store.local_copy import local_directory, this_node
from verl_slurm.config.roles import trained_roles
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint.record import (
    Fingerprint,
    check_dataset,
    fingerprint,
    read as read_fingerprint,
)
from verl_slurm.dataset.prompts.chat_template import read_template
from verl_slurm.dataset.prompts.choice import SUFFIXES
from verl_slurm.dataset.prompts.directory import Content
from verl_slurm.journal.files import read_history
from verl_slurm.loops.session import Session
from verl_slurm.program.programs import Moves
from verl_slurm.runtime_state.ledger import Ledger
from verl_slurm.save.ranks import rng
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.saver import CheckpointSaver, LocalPlace, Provenance
from verl_slurm.trainer.data import PromptData, end_tokens, load_tokenizer
from verl_slurm.trainer.evaluation import Evaluator
from verl_slurm.trainer.loop import Loop
from verl_slurm.trainer.measures import console
from verl_slurm.trainer.measures.stopwatch import GpuMemory
from verl_slurm.trainer.models import Models, build_models
from verl_slurm.trainer.objective.optimizers import build_optimizers
from verl_slurm.trainer.pace import Pace
from verl_slurm.trainer.parallel.grid import make_grid
from verl_slurm.trainer.report import Reporter
from verl_slurm.trainer.resuming import (
    check_manifest,
    checkpoint_directory,
    load_replay,
    load_state,
    require_verified,
    where_it_starts,
)
from verl_slurm.trainer.reward.files import start_reward
from verl_slurm.trainer.reward.scoring import build_reward
from verl_slurm.trainer.reward.swap import LiveReward, RewardSwap
from verl_slurm.trainer.rollout.engines import build_engine
from verl_slurm.trainer.rollout.records import RolloutRecorder, SampleLog
from verl_slurm.trainer.saving import Checkpointer, live_tensors
from verl_slurm.trainer.state.frozen_copies import FrozenCopies
from verl_slurm.trainer.state.orchestration import check_or_write, describe, moved, topology_of
from verl_slurm.trainer.state.pinned_model import pinned_model
from verl_slurm.trainer.state.position import StepShape
from verl_slurm.trainer.state.train_state import fresh_state
from verl_slurm.trainer.step import Learner
from verl_slurm.wire.client import RankLine
from verl_slurm.wire.stopping import Stopper


class _Digests(msgspec.Struct, frozen=True):
    """Rank 0's findings for all ranks."""

    dataset: str
    frozen: dict[str, str]
    data: dict[str, dict[str, Content]]
    """Maps `data.root` and `data.eval_root` to size and SHA-256 of each file that may hold prompts."""
    model: dict[str, str]
    """SHA-256 of each file of `model.path`."""
    template: str | None
    """Content of the file that `data.chat_template` names."""
    began: str
    """Of the run (`Orchestration`)."""


def build_loop(
    config: RunConfig,
    paths: RunPaths,
    *,
    epoch: int,
    resume: str,
    device: torch.device,
    ranks: Collective,
    line: RankLine,
    local_rank: int = 0,
) -> Loop:
    """Builds all parts of one rank, ready to run. Collective.

    Args:
        local_rank: among the ranks of this node.
        resume: name of a verified checkpoint of this run, or a path to one; empty: from the start.

    Raises:
        VerlSlurmError: something does not fit, see the class.
        KeyRefused, PermissionRefused: `keys.load_keys`.
        RanksFailed: rank 0 could not read an input that all depend on.
    """
    with ExitStack() as owned:
        loop = _build_loop(
            config,
            paths,
            owned,
            epoch=epoch,
            resume=resume,
            device=device,
            ranks=ranks,
            line=line,
            local_rank=local_rank,
        )
        # A part that is refused leaves no saver process behind; a loop that was built closes it itself.
        owned.pop_all()  # from here on the loop owns and ends them
        return loop


def _build_loop(
    config: RunConfig,
    paths: RunPaths,
    owned: ExitStack,
    *,
    epoch: int,
    resume: str,
    device: torch.device,
    ranks: Collective,
    line: RankLine,
    local_rank: int,
) -> Loop:
    """Does the work of `build_loop`; `owned` closes finished parts when a later one does not fit."""
    shape = StepShape.of(config)
    session = Session(line, rank=ranks.rank, world_size=ranks.world_size, paths=paths, epoch=epoch)
    copies = FrozenCopies(paths, session)
    # Before anything is loaded: a missing key is told at once.
    keys = load_keys(config.checkpoint.encryption)
    # For a run that begins, and for a rank that its checkpoint does not have. Others get their generators back.
    rng.seed_all(config.seed, ranks.rank)
    # `submit` has built what `builtin:` names; RUN/run.yaml holds paths.
    model_path, data_root = Path(config.model.path), Path(config.data.root)
    # On rank 0 alone, and before any model is read: all ranks refuse together or none does.
    digests = ranks.on_first(
        "checking data and models",
        lambda: _first_look(config, paths, data_root, model_path, session, device, copies),
        _Digests,
    )
    # A daemon starts ranks from a checkpoint that it has just read back; without one nobody has.
    by_hand = not session.has_daemon
    directory = checkpoint_directory(paths, resume, by_hand=by_hand)
    if directory and by_hand:
        ranks.first_does("verifying the checkpoint", lambda: require_verified(directory, keys))
    # Before the models: what cannot be resumed here is refused without reading a tensor.
    manifest = check_manifest(directory, config, digests.frozen, paths, keys) if directory else None

    grid = make_grid(topology_of(config), device, ranks)
    roles = trained_roles(config.train)
    # Whatever reads the model's files stands in this block: models, tokenizer and engine get the fingerprinted bytes.
    with pinned_model(model_path, digests.model) as pinned:
        # A file may be unreadable on one node alone; the other ranks hear of it here and not in a collective.
        ranks.together("opening the model", pinned.fill)
        models = build_models(
            pinned.path,
            dtype=config.model.dtype,
            mesh=grid.mesh,
            device=device,
            attention=config.model.attn_implementation,
            shape=config.distributed,
            roles=roles,
        )
        # A resume writes no zeros into moments that its load will overwrite.
        optimizers = build_optimizers(models.trained, config.train, to_be_loaded=bool(directory))
        # Started as soon as the sizes are known: its arena is allocated, and pinned, while the rest below is loaded.
        schema = current_schema()
        provenance = Provenance(
            epoch=epoch,
            parent=manifest.name if manifest else None,
            schema_id=schema.schema_id,
            dataset_fingerprint=digests.dataset,
            frozen=digests.frozen,
            topology=grid.shape,
            trained=roles,
            algorithm=config.train.algorithm,
        )
        local = _local_place(config, paths, local_rank)
        saver = CheckpointSaver(
            paths,
            live_tensors(models, optimizers),
            provenance,
            ranks,
            epoch_check=lambda: require_epoch(paths, epoch),
            local=local,
            # Rank 0 alone judges, for all ranks, whether shared storage makes a save in time.
            usual_seconds=_usual_seconds(paths, manifest) if ranks.rank == 0 else None,
            encryption=config.checkpoint.encryption,
        )
        # At once: each part below may still be refused.
        owned.callback(saver.close)
        tokenizer = load_tokenizer(pinned.path)
        eos_ids, vocabulary = end_tokens(pinned.path, tokenizer), vocabulary_of(pinned.path)
        sampler = build_engine(
            config,
            pinned.path,
            eos_ids=eos_ids,
            pad_id=int(tokenizer.pad_token_id),
            device=device,
            ranks=ranks,
        )
        # Last in the block: the files are hashed in threads beside the loading.
        ranks.together("holding the model to its fingerprint", pinned.verify)
    # Digests and template as rank 0 read them, never the files as they are now: swapped ones must not train.
    prompts = partial(
        PromptData,
        data_root,
        tokenizer,
        config.data,
        config.seed,
        recorded=digests.data,
        template=digests.template,
        vocabulary=vocabulary,
        clock=datetime.fromisoformat(digests.began),
    )
    per_prompt = config.rollout.samples_per_prompt
    data = ranks.together("reading the data", lambda: prompts(samples_per_prompt=per_prompt))
    # A segment for each rank and attempt: a restart within the attempt appends behind its last whole record.
    ledger = Ledger(paths, epoch, ranks.rank, keys=keys)

    # With a checkpoint, models and engine come first: its state also puts the generators back.
    state = fresh_state(config)
    if directory:
        near = None if local is None else local.directory / directory.name
        tensors = live_tensors(models, optimizers)
        state = load_state(directory, config, shape, tensors, grid, ranks, keys, near=near)
    keep = None
    if config.checkpoint.store_frozen:

        def keep(model: Path, seen: Fingerprint) -> None:
            copies.store({model: seen})

    # After the state: the number of replacements in the checkpoint says which reward is in force.
    plan, state.reward = start_reward(
        paths,
        ranks,
        state.reward,
        state.position,
        # The copy of the submission: the file outside may have been edited since.
        first=Moves.of(paths).config(config).model.reward,
        recorded=manifest.frozen if manifest else None,
        keep=keep,
    )
    # Only now is it known which rewards this start uses. The other copies may be all that is left of a model.
    if config.checkpoint.store_frozen and ranks.rank == 0:
        used = {state.reward.digest, *(switch.digest for switch in plan.switches)}
        copies.read_back(used | set(digests.frozen.values()))
    # One handle for learner, evaluator and swap: a replacement reaches all of them at the same point.
    live = LiveReward(build_reward(state.reward.spec, device=device, digest=state.reward.digest))
    evaluator = None
    if config.train.eval_every_steps:
        evaluator = Evaluator(
            data=ranks.together(
                "reading what is held out", lambda: prompts(held_out=config.train.eval_prompts)
            ),
            sampler=sampler,
            tokenizer=tokenizer,
            reward=live,
            size=config.rollout.micro_batch_size_per_device,
            temperature=config.train.eval_temperature,
            ranks=ranks,
            eos_ids=eos_ids,
        )
    # `load_replay` may put the position back to the beginning of the step, where its rollouts were refused.
    loaded = state.position
    tell = partial(session.notice, topic="ledger", loud=True)
    # A replica's leader reads for its ranks: two nodes may see different ends of one file for a moment (decision 0006).
    replay = load_replay(
        paths,
        state,
        shape,
        grid.place.dp if grid.is_leader else None,
        ranks,
        keys,
        tell=tell,
    )
    # A request is answered with a checkpoint of this run only; one outside the run must not be named.
    ours = manifest is not None and directory == paths.checkpoints / manifest.name
    saved_as = manifest.name if manifest and ours else ""
    reporter = Reporter(
        session,
        total_steps=config.train.steps,
        tensorboard=paths.tensorboard,
        first_step=state.position.step,
        gpu_memory=GpuMemory(device).percent,
    )
    if state.position != loaded:
        reporter.say(f"rollouts of step {loaded.step + 1} were refused: it begins anew, not at {loaded}")
    foreign = None if ours else directory
    # One line that says what was restored, before the first step can fail.
    reporter.say(where_it_starts(state, shape, manifest, digests.dataset, len(replay), foreign=foreign))
    reporter.say(f"a second copy of the state, for saving: {saver.arena_bytes} bytes of memory for each rank")
    # The tensors that a save copies must not change before it has.
    for optimizer in optimizers.values():
        optimizer.register_step_pre_hook(lambda *_: reporter.stalled(saver.fence()))
    learner = Learner(
        config=config,
        shape=shape,
        models=models,
        optimizers=optimizers,
        sampler=sampler,
        data=data,
        tokenizer=tokenizer,
        reward=live,
        grid=grid,
        recorder=RolloutRecorder(ledger, grid.data.rank, tell),
        replay=replay,
        evaluator=evaluator,
        samples=SampleLog(paths, epoch, config.rollout.keep_samples, keys) if ranks.rank == 0 else None,
    )
    copies.begin()
    return Loop(
        config=config,
        shape=shape,
        state=state,
        learner=learner,
        checkpointer=Checkpointer(
            config=config,
            paths=paths,
            shape=shape,
            rank=ranks.rank,
            saver=saver,
            ledger=ledger,
            schema=schema,
            epoch=epoch,
            resumed_from=saved_as,
            keys=keys,
        ),
        pace=Pace(
            config,
            paths,
            ranks,
            reporter,
            step=state.position.step,
            # Each stage counts its own layers; stages have about as many each.
            state_bytes=_state_bytes(models) * grid.shape.pp,
        ),
        stopper=Stopper(line, ranks.max),
        reporter=reporter,
        # A position that was put back is not the one that this checkpoint holds, so it must not answer a request.
        saved_as=saved_as if state.position == loaded else "",
        rewards=RewardSwap(
            paths=paths,
            epoch=epoch,
            ranks=ranks,
            reporter=reporter,
            plan=plan,
            live=live,
            texts=learner.texts,
            keep=keep,
            device=device,
            counts=grid.speaks,
        ),
    )


def _first_look(
    config: RunConfig,
    paths: RunPaths,
    data_root: Path,
    model_path: Path,
    session: Session,
    device: torch.device,
    copies: FrozenCopies,
) -> "_Digests":
    """Checks on rank 0 that the run belongs to us, and that data and layout are those of the first start.

    Raises:
        Fenced, DatasetDrift, DataError, ConfigError: they are not.
    """
    # First: what follows writes into RUN, and an attempt that has lost the run must touch nothing of it.
    require_epoch(paths, session.epoch)
    # A daemon has just compared the data set with its fingerprint, and may have accepted a change.
    recorded = read_fingerprint(paths) if session.has_daemon else None
    data = recorded or check_dataset(paths, data_root)
    models = {"reference": model_path}
    # Read in full at each start: `pinned_model` holds the files that are loaded against these digests.
    seen = {role: fingerprint(path) for role, path in models.items()}
    if config.checkpoint.store_frozen:
        copies.store({path: seen[role] for role, path in models.items()})
    # What does not train decides the numbers as much as the weights do: the manifest has its digests, a resume asks.
    frozen = {role: found.digest for role, found in seen.items()}
    files = {"data.root": _may_hold_prompts(data)}
    if config.data.eval_root is not None:  # it decides which prompts do not train
        held_out = fingerprint(config.data.eval_root)
        frozen["eval_data"], files["data.eval_root"] = held_out.digest, _may_hold_prompts(held_out)
    template = None
    if config.data.chat_template not in ("auto", "none"):  # it decides the text of the prompts
        template = read_template(Path(config.data.chat_template))
        frozen["chat_template"] = hashlib.sha256(template.encode()).hexdigest()
    backend = "gloo" if device.type == "cpu" else "gloo, nccl"
    first = check_or_write(paths, describe(config, data_root, data, backend))
    if said := moved(first, backend):
        session.notice(said, topic="device", loud=True)
        console.complain(said)
    return _Digests(
        dataset=data.digest,
        frozen=frozen,
        data=files,
        model=seen["reference"].digests(),
        template=template,
        began=first.began.isoformat(),  # with its offset, which msgpack has no place for
    )


def _may_hold_prompts(tree: Fingerprint) -> dict[str, Content]:
    """Selects the files that may hold prompts: there may also be a million images, which the other ranks need not
    know.
    """
    return {
        name: (entry.size, entry.sha256)
        for name, entry in tree.files.items()
        if entry.kind != "directory" and name.endswith(SUFFIXES)
    }


def _usual_seconds(paths: RunPaths, manifest: Manifest | None) -> float | None:
    """Returns the seconds of the last save to shared storage; None: not known."""
    try:
        told = read_history(paths).measured_saves(1)
    except OSError:
        told = []
    # The journal first: a manifest may have been written before its save was over.
    if told:
        return told[-1][1]
    return manifest.save_seconds if manifest else None


def _local_place(config: RunConfig, paths: RunPaths, local_rank: int) -> LocalPlace | None:
    directory = local_directory(config.checkpoint.local_dir, paths, this_node())
    if directory is None:
        return None
    require_safe_way(directory, "checkpoint.local_dir")  # the node's directory is not the login node's
    return LocalPlace(directory=directory, is_first=local_rank == 0, keep=config.checkpoint.local_keep)


def _state_bytes(models: Models) -> int:
    """Estimates the bytes of models and AdamW's two moments over all ranks: shards count as wholes."""
    parameters = [p for model in models.trained.values() for p in model.parameters()]
    return 3 * sum(p.numel() * p.element_size() for p in parameters)
