"""Builds one rank: models, data, and the state to start from.

Rank 0 computes and sends what every rank must agree on: all refuse together or none.
"""

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedTokenizerBase

from verl_slurm.base.bounded import vocabulary_of
from verl_slurm.base.fence import require_attempt
from verl_slurm.base.files import private_dir
from verl_slurm.base.keys import Keyring, load_keys
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import is_adopted, run_id
from verl_slurm.checkpoint.format.specification import Manifest
from verl_slurm.checkpoint.format.state_schema import SchemaVersion, current_schema
from verl_slurm.checkpoint.store.frozen import FrozenCopies
from verl_slurm.config.roles import trained_roles
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint.data_record import (
    Fingerprint,
    check_dataset,
    data_place,
    fingerprint,
    read as read_fingerprint,
)
from verl_slurm.dataset.fingerprint.stored_tree import record_tree
from verl_slurm.dataset.prompts.chat_template import read_template
from verl_slurm.dataset.prompts.choice import SUFFIXES
from verl_slurm.dataset.prompts.directory import Content
from verl_slurm.export.causal_lm import end_tokens
from verl_slurm.journal.files import read_history
from verl_slurm.loops.session import Session
from verl_slurm.program.programs import Moves
from verl_slurm.runtime_state.format import Arrays
from verl_slurm.runtime_state.ledger import Ledger
from verl_slurm.save.ranks import rng
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.saver import CheckpointSaver, LocalPlace, Provenance
from verl_slurm.trainer.data import PromptData, load_tokenizer
from verl_slurm.trainer.evaluation import Evaluator
from verl_slurm.trainer.learner import Learner, Optimizers
from verl_slurm.trainer.loop import Loop
from verl_slurm.trainer.measures import console
from verl_slurm.trainer.measures.stopwatch import GpuMemory
from verl_slurm.trainer.models import Models, build_models
from verl_slurm.trainer.objective.optimizers import build_optimizers
from verl_slurm.trainer.parallel.grid import Grid, make_grid
from verl_slurm.trainer.reporter import Reporter
from verl_slurm.trainer.resuming import (
    check_manifest,
    checkpoint_directory,
    load_replay,
    load_state,
    require_verified,
    where_it_starts,
)
from verl_slurm.trainer.reward.reward_files import Keep, start_reward
from verl_slurm.trainer.reward.scoring import build_reward
from verl_slurm.trainer.reward.swap import LiveReward, RewardSwap
from verl_slurm.trainer.rollout.engines import RolloutEngine, build_engine
from verl_slurm.trainer.rollout.records import RolloutRecorder, SampleLog
from verl_slurm.trainer.save_pace import SavePace
from verl_slurm.trainer.saving import Checkpointer, live_tensors
from verl_slurm.trainer.state.orchestration import check_or_write, describe, moved, topology_of
from verl_slurm.trainer.state.pinned_model import pinned_model
from verl_slurm.trainer.state.position import Position, StepShape
from verl_slurm.trainer.state.train_state import TrainState, fresh_state
from verl_slurm.wire.client import RankLine
from verl_slurm.wire.reward_plan import RewardPlan
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


@dataclass(frozen=True)
class _Start:
    """What a rank begins from, known before any model is read.

    Attributes:
        local: this node's place for a second copy of the checkpoints; None: there is none.
        directory, manifest: of the checkpoint to resume from; None: from the start.
    """

    config: RunConfig
    paths: RunPaths
    device: torch.device
    ranks: Collective
    session: Session
    keys: Keyring | None
    copies: FrozenCopies
    digests: _Digests
    local: LocalPlace | None
    directory: Path | None
    manifest: Manifest | None

    @property
    def adopted(self) -> bool:
        """Returns whether that checkpoint is another run's, of a step's end: this run branches off."""
        manifest = self.manifest
        return manifest is not None and not manifest.safe_point and is_adopted(self.paths, manifest.digest)

    @property
    def resumed_from(self) -> str:
        """Returns the name of that checkpoint if it is this run's: a request is never answered with one outside."""
        manifest = self.manifest
        is_ours = manifest is not None and self.directory == self.paths.checkpoints / manifest.name
        return manifest.name if manifest and is_ours else ""

    @property
    def shape(self) -> StepShape:
        return StepShape.of(self.config)

    @property
    def keep(self) -> Keep | None:
        """Returns how a model that a reward scores with is copied into the run; None: it is not."""
        if not self.config.checkpoint.store_frozen:
            return None
        return lambda model, tree: self.copies.store({model: tree})


@dataclass(frozen=True)
class _Parts:
    """What is made of the model's files, and the saver of its tensors.

    Attributes:
        vocabulary: number of tokens that the model knows; None: its configuration does not say.
    """

    grid: Grid
    models: Models
    optimizers: Optimizers
    saver: CheckpointSaver
    schema: SchemaVersion
    tokenizer: PreTrainedTokenizerBase
    sampler: RolloutEngine
    eos_ids: tuple[int, ...]
    vocabulary: int | None


@dataclass(frozen=True)
class _Restored:
    """Where the rank goes on.

    Attributes:
        loaded: the position as the checkpoint has it. `state.position` is earlier in the step where rollouts of the
            ledger were refused.
    """

    state: TrainState
    loaded: Position
    replay: dict[tuple[int, int], Arrays]
    ledger: Ledger
    live: LiveReward
    plan: RewardPlan


def build_loop(
    config: RunConfig,
    paths: RunPaths,
    *,
    attempt: int,
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
    session = Session(line, rank=ranks.rank, world_size=ranks.world_size, paths=paths, attempt=attempt)
    start = _begin(config, paths, session, device, ranks, resume, local_rank)
    # A part that is refused leaves no saver process behind; a loop that was built closes it itself.
    with ExitStack() as owned:
        parts = _load(start, owned)
        # Digests and template as rank 0 read them, never the files as they are now: swapped ones must not train.
        prompts = partial(
            PromptData,
            Path(config.data.root),
            parts.tokenizer,
            config.data,
            config.seed,
            recorded=start.digests.data,
            template=start.digests.template,
            vocabulary=parts.vocabulary,
            clock=datetime.fromisoformat(start.digests.began),
        )
        per_prompt = config.rollout.samples_per_prompt
        data = ranks.together("reading the data", lambda: prompts(samples_per_prompt=per_prompt))
        restored = _restore(start, parts)
        evaluator = None
        if config.train.eval_every_steps:
            evaluator = Evaluator(
                data=ranks.together(
                    "reading what is held out", lambda: prompts(held_out=config.train.eval_prompts)
                ),
                sampler=parts.sampler,
                tokenizer=parts.tokenizer,
                reward=restored.live,
                size=config.rollout.micro_batch_size_per_device,
                temperature=config.train.eval_temperature,
                ranks=ranks,
                eos_ids=parts.eos_ids,
            )
        loop = _assemble(start, parts, restored, data, evaluator)
        owned.pop_all()  # from here on the loop owns and ends them
        return loop


def _begin(
    config: RunConfig,
    paths: RunPaths,
    session: Session,
    device: torch.device,
    ranks: Collective,
    resume: str,
    local_rank: int,
) -> _Start:
    """Checks inputs and checkpoint, and reads no tensor."""

    def tell(text: str) -> None:
        session.notice(text, topic="frozen", loud=True)
        console.complain(text)

    copies = FrozenCopies(paths, tell)
    # Before anything is loaded: a missing key is told at once.
    keys = load_keys(config.checkpoint.encryption)
    # For a run that begins, and for a rank that its checkpoint does not have. Others get their generators back.
    rng.seed_all(config.seed, ranks.rank)
    # On rank 0 alone, and before any model is read: all ranks refuse together or none does.
    digests = ranks.on_first(
        "checking data and models", lambda: _first_look(config, paths, session, device, copies), _Digests
    )
    # A daemon starts ranks from a checkpoint that it has just read back; without one nobody has.
    by_hand = not session.has_daemon
    directory = checkpoint_directory(paths, resume, by_hand=by_hand)
    if directory and by_hand:
        ranks.first_does("verifying the checkpoint", lambda: require_verified(directory, keys))
    # Before the models: what cannot be resumed here is refused without reading a tensor.
    manifest = check_manifest(directory, config, digests.frozen, paths, keys) if directory else None
    local = LocalPlace.of(config.checkpoint, paths, local_rank)
    return _Start(config, paths, device, ranks, session, keys, copies, digests, local, directory, manifest)


def _load(start: _Start, owned: ExitStack) -> _Parts:
    """Reads the model's files; `owned` gets what has to be closed if a later part does not fit."""
    config, device, ranks = start.config, start.device, start.ranks
    grid = make_grid(topology_of(config), device, ranks)
    roles, schema = trained_roles(config.train), current_schema()
    # Whatever reads the model's files stands in this block: models, tokenizer and engine get the fingerprinted bytes.
    # `submit` has built what `builtin:` names; RUN/run.yaml holds paths.
    with pinned_model(Path(config.model.path), start.digests.model) as pinned:
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
        optimizers = build_optimizers(models.trained, config.train, to_be_loaded=bool(start.directory))
        # Started as soon as the sizes are known: its arena is allocated, and pinned, while the rest below is loaded.
        saver = CheckpointSaver(
            start.paths,
            live_tensors(models, optimizers),
            Provenance(
                run_id=run_id(start.paths),
                attempt=start.session.attempt,
                parent=start.manifest.name if start.manifest else None,
                schema_id=schema.schema_id,
                dataset_fingerprint=start.digests.dataset,
                frozen=start.digests.frozen,
                topology=grid.shape,
                trained=roles,
                algorithm=config.train.algorithm,
            ),
            ranks,
            attempt_check=lambda: require_attempt(start.paths, start.session.attempt),
            local=start.local,
            # Rank 0 alone judges, for all ranks, whether shared storage makes a save in time.
            usual_seconds=_usual_seconds(start.paths, start.manifest) if ranks.rank == 0 else None,
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
    return _Parts(grid, models, optimizers, saver, schema, tokenizer, sampler, eos_ids, vocabulary)


def _restore(start: _Start, parts: _Parts) -> _Restored:
    """Loads the checkpoint, or makes the state of a first step; with the reward and the step's rollouts."""
    config, paths, ranks, keys = start.config, start.paths, start.ranks, start.keys
    # A segment for each rank and attempt: a restart within the attempt appends behind its last whole record.
    ledger = Ledger(paths, start.session.attempt, ranks.rank, keys=keys)
    # With a checkpoint, models and engine come first: its state also puts the generators back.
    state, directory = fresh_state(config), start.directory
    if directory:
        near = None if start.local is None else start.local.directory / directory.name
        tensors = live_tensors(parts.models, parts.optimizers)
        given = config, start.shape, tensors, parts.grid, ranks, keys
        state = load_state(directory, *given, near=near, adopted=start.adopted)
    # After the state: the number of replacements in the checkpoint says which reward is in force.
    plan, state.reward = start_reward(
        paths,
        ranks,
        state.reward,
        state.position,
        # The copy of the submission: the file outside may have been edited since.
        first=Moves.of(paths).config(config).model.reward,
        recorded=start.manifest.frozen if start.manifest and not start.adopted else None,
        keep=start.keep,
    )
    # Only now is it known which rewards this start uses. The other copies may be all that is left of a model.
    if config.checkpoint.store_frozen and ranks.rank == 0:
        used = {state.reward.digest, *(switch.digest for switch in plan.switches)}
        start.copies.read_back(used | set(start.digests.frozen.values()))
    # One handle for learner, evaluator and swap: a replacement reaches all of them at the same point.
    live = LiveReward(build_reward(state.reward.spec, device=start.device, digest=state.reward.digest))
    loaded = state.position
    # A replica's leader reads for its ranks: two nodes may see different ends of one file for a moment (decision 0006).
    leader = parts.grid.place.dp if parts.grid.is_leader else None
    replay = load_replay(paths, state, start.shape, leader, ranks, keys, tell=_tell_of_ledger(start))
    return _Restored(state, loaded, replay, ledger, live, plan)


def _tell_of_ledger(start: _Start) -> Callable[[str], None]:
    return partial(start.session.notice, topic="ledger", loud=True, own=True)


def _reporter(start: _Start, parts: _Parts, restored: _Restored) -> Reporter:
    """Returns what speaks for this rank, and says what was restored, before the first step can fail."""
    state, loaded, config = restored.state, restored.loaded, start.config
    reporter = Reporter(
        start.session,
        total_steps=config.train.steps,
        tensorboard=start.paths.tensorboard,
        first_step=state.position.step,
        gpu_memory=GpuMemory(start.device).percent,
    )
    if state.position != loaded:
        reporter.say(f"rollouts of step {loaded.step + 1} were refused: it begins anew, not at {loaded}")
    foreign, digest = None if start.resumed_from else start.directory, start.digests.dataset
    num_replayed = len(restored.replay)
    reporter.say(where_it_starts(state, start.shape, start.manifest, digest, num_replayed, foreign=foreign))
    memory = f"{parts.saver.arena_bytes} bytes of memory for each rank"
    reporter.say(f"a second copy of the state, for saving: {memory}")
    return reporter


def _assemble(
    start: _Start, parts: _Parts, restored: _Restored, data: PromptData, evaluator: Evaluator | None
) -> Loop:
    config, paths, ranks, keys = start.config, start.paths, start.ranks, start.keys
    state, saver, shape, attempt = restored.state, parts.saver, start.shape, start.session.attempt
    reporter = _reporter(start, parts, restored)
    # The tensors that a save copies must not change before it has.
    for optimizer in parts.optimizers.values():
        optimizer.register_step_pre_hook(lambda *_: reporter.stalled(saver.fence()))
    learner = Learner(
        config=config,
        shape=shape,
        models=parts.models,
        optimizers=parts.optimizers,
        sampler=parts.sampler,
        data=data,
        tokenizer=parts.tokenizer,
        reward=restored.live,
        grid=parts.grid,
        recorder=RolloutRecorder(restored.ledger, parts.grid.data.rank, _tell_of_ledger(start)),
        replay=restored.replay,
        evaluator=evaluator,
        samples=SampleLog(paths, attempt, config.rollout.keep_samples, keys) if ranks.rank == 0 else None,
    )
    start.copies.begin()
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
            ledger=restored.ledger,
            schema=parts.schema,
            attempt=attempt,
            resumed_from=start.resumed_from,
            keys=keys,
            template=data.template,
        ),
        pace=SavePace(
            config,
            paths,
            ranks,
            reporter,
            step=state.position.step,
            # Each stage counts its own layers; stages have about as many each.
            state_bytes=_state_bytes(parts.models) * parts.grid.shape.pp,
        ),
        stopper=Stopper(start.session.line, ranks.max),
        reporter=reporter,
        # A position that was put back is not the one that this checkpoint holds, so it must not answer a request.
        saved_as=start.resumed_from if state.position == restored.loaded else "",
        rewards=RewardSwap(
            paths=paths,
            attempt=attempt,
            ranks=ranks,
            reporter=reporter,
            plan=restored.plan,
            live=restored.live,
            texts=learner.texts,
            keep=start.keep,
            device=start.device,
            counts=parts.grid.speaks,
        ),
    )


def _first_look(
    config: RunConfig, paths: RunPaths, session: Session, device: torch.device, copies: FrozenCopies
) -> _Digests:
    """Checks on rank 0 that the run belongs to us, and that data and layout are those of the first start.

    Raises:
        Fenced, DatasetDrift, DataError, ConfigError: they are not.
    """
    # First: what follows writes into RUN, and an attempt that has lost the run must touch nothing of it.
    require_attempt(paths, session.attempt)
    # A daemon has just compared the data set with its fingerprint, and may have accepted a change.
    recorded = read_fingerprint(paths) if session.has_daemon else None
    data_root, model_path = Path(config.data.root), Path(config.model.path)
    data = recorded or check_dataset(paths, data_place(data_root, config.data.files))
    # Read in full at each start: `pinned_model` holds the files that are loaded against these digests.
    model = fingerprint(model_path)
    if config.checkpoint.store_frozen:
        copies.store({model_path: model})
    # What does not train decides the numbers as much as the weights do: the manifest has its digests, a resume asks.
    frozen = {"reference": model.digest}
    files = {"data.root": _may_hold_prompts(data)}
    if config.data.eval_root is not None:  # it decides which prompts do not train
        held_out = fingerprint(data_place(config.data.eval_root, config.data.eval_files))
        record_tree(private_dir(paths.frozen, inside=paths.run), held_out)  # names a file that is away later
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
        model=model.digests(),
        template=template,
        began=first.began.isoformat(),  # with its offset, which msgpack has no place for
    )


def _may_hold_prompts(tree: Fingerprint) -> dict[str, Content]:
    # A data set may also have a million images, which the other ranks need not know.
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


def _state_bytes(models: Models) -> int:
    """Estimates the bytes of models and AdamW's two moments over all ranks: shards count as wholes."""
    parameters = [p for model in models.trained.values() for p in model.parameters()]
    return 3 * sum(p.numel() * p.element_size() for p in parameters)
