"""Serves any PyTorch loop, in three lines: `verl_slurm.run`. Needs torch.

```python
with verl_slurm.run(model=model, optimizer=optimizer, scheduler=scheduler) as run:
    for step in run.steps(1000):
        ...                         # train step number `step`, from 0
        run.log(loss=loss)
```

After every step the ranks agree whether a save was requested: one all-reduce of four numbers on the CPU. If the job
ends, SystemExit(0) leaves the loop: code after it runs for a finished run only. docs/guests.md states the requirements.

Without a daemon, under torchrun or alone, rank 0 does what a lead does at a start: it takes the run's attempt, sweeps
the remains of dead processes, and finds the newest checkpoint that verifies. Saves are not verified then.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec
from torch.optim import Optimizer

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.fence import require_attempt, take_attempt
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.checkpoint.decide.best import metrics_of
from verl_slurm.checkpoint.format.specification import Topology
from verl_slurm.checkpoint.format.state_schema import current_schema
from verl_slurm.checkpoint.store import loop_checkpoint
from verl_slurm.checkpoint.store.commit import SavedCheckpoint, sweep
from verl_slurm.checkpoint.store.lost import (
    former_checkpoint,
    gone_back,
    lost_error,
    newest_attempt,
    require_run_id,
)
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.checkpoint.store.run_config import keys_for
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config.load import dump, load_own
from verl_slurm.config.schema import RunConfig
from verl_slurm.loops.hyperparameters import counted_in, hyperparameters, rates, tell_replaced
from verl_slurm.loops.loop_state import Objects, encode_state, load_state, take_state
from verl_slurm.loops.session import Session
from verl_slurm.loops.step_end import StepEndSaver, own_ranks
from verl_slurm.save.ranks import rng
from verl_slurm.save.ranks.collective import RanksFailed
from verl_slurm.save.ranks.rng import Generators
from verl_slurm.save.ranks.saver import CheckpointSaver, LocalPlace, Provenance, SaveContents
from verl_slurm.save.ranks.tensors import Tensors
from verl_slurm.wire.environment import SERVICE_TOKEN_VARIABLE, SERVICE_VARIABLE
from verl_slurm.wire.messages import SaveRequest

T = TypeVar("T")


def run(
    *,
    run_dir: Path | str | None = None,
    save_every: int | None = None,
    any_ranks: bool = False,
    **objects: object,
) -> "LoopRun":
    """Returns the training loop of this process. Enter it by `with` on every rank, after its objects are made and
    wrapped.

    Args:
        run_dir: without a daemon (`python train.py`, torchrun): the directory to save into and to resume from. Ignored
            under a daemon, where the run has one. None, and no daemon: nothing is saved.
        save_every: steps from one save to the next; default: `checkpoint.every_steps` of the run's configuration.
        any_ranks: the loop divides each step among however many ranks there are, and goes on with another number of
            them. Then all of its state is the same on every rank, or consists of DTensors.
        objects: all state, by names that stay the same: objects with `state_dict` and `load_state_dict`, and
            `torch.Generator`. None is left out.
    """
    return LoopRun(Session.open(), objects, run_dir=run_dir, save_every=save_every, any_ranks=any_ranks)


def _has_shuffle_buffer(one: object) -> bool:
    """Returns whether it is a loader of, or itself, a stream of Hugging Face's `datasets` (5.2: `iterable_dataset.py`)
    that shuffles in a buffer."""
    place: object = getattr(getattr(one, "dataset", one), "_ex_iterable", None)
    while place is not None:
        if type(place).__name__.startswith("BufferShuffled"):
            return True
        place = getattr(place, "ex_iterable", None)
    return False


def _is_accumulating() -> bool:
    """Returns whether the step that is done left gradients in a window of accelerate's (`Accelerator.accumulate`)."""
    state = sys.modules.get("accelerate.state")
    return state is not None and not state.GradientState().sync_gradients


_SET_THEM = (
    "To change one of an optimizer, set it in the `with` block, as in `for group in optimizer.param_groups: "
    "group['lr'] = 1e-5`; for a schedule of another length see docs/guests.md (A longer schedule)"
)


class LoopRun:
    """See the module. Made by `run`.

    Attributes:
        step: whole steps done.
        resume: the checkpoint that it resumes from; None: from the start.
        stopping: the state is saved and this process must leave; the same on all ranks.
    """

    _saver: StepEndSaver

    def __init__(
        self,
        session: Session,
        objects: Mapping[str, object],
        *,
        run_dir: Path | str | None = None,
        save_every: int | None = None,
        any_ranks: bool = False,
    ) -> None:
        self._session, self._named = session, dict(objects)
        self._run_dir, self._save_every, self._any_ranks = run_dir, save_every, any_ranks
        self._total = self._asked_at = 0
        self._metrics: dict[str, object] = {}
        self._updates = self._updates_before = 0
        self._row: dict[str, object] = {}
        self._generators: Generators | None = None
        self._started, self._done = False, False
        self._native: CheckpointSaver | None = None
        self._optimizers: list[Optimizer] = []
        self._is_between = self._has_warned = False
        self.step, self.stopping = 0, False

    @property
    def resume(self) -> Path | None:
        return self._session.resume

    @property
    def services(self) -> dict[str, list[str]]:
        """`host:port` of each service beside the ranks, on each of its nodes, by its name (docs/services.md)."""
        return {
            name.removeprefix(SERVICE_VARIABLE).lower(): places.split(",")
            for name, places in os.environ.items()
            if name.startswith(SERVICE_VARIABLE) and name != SERVICE_TOKEN_VARIABLE
        }

    def __enter__(self) -> Self:
        try:
            # Inside of `try`: `__exit__` is not called for an error here, and the daemon would see a crash instead of
            # a refusal.
            self._begin()
        except BaseException as error:
            self._session.ended_by(error)
            self._session.close()
            raise
        return self

    def _begin(self) -> None:
        self._ranks = own_ranks(
            self._session, "call torch.distributed.init_process_group before `with verl_slurm.run(...)`"
        )
        self._objects = Objects(self._named)
        encode_state(self._objects)  # refuses now, not at the first save, what cannot be saved
        # Under a daemon `run_dir` is ignored: the run has a directory, which its lead verifies.
        if not self._session.has_daemon and self._run_dir is not None:
            self._session = self._by_hand(Path(self._run_dir))
        # Refused now, and by all ranks, not at the first save by those of one node.
        self._local = self._ranks.together("looking at checkpoint.local_dir", self._local_place)
        made_with = hyperparameters(self._named)
        # Before the saver: it starts at the resumed step.
        if self._session.resume is not None:
            self._go_on_from(self._session.resume)
        schedules, data = rates(self._named), dict[str, int]()
        for name, one in self._named.items():
            data |= counted_in(one, f"{name}.", batch_size=getattr(one, "batch_size", None))
        tell_replaced(self._session, made_with, _SET_THEM, rates=schedules, data=data)
        self._asked_at = self.step
        self._watch_updates()
        objects = list(self._objects.names)
        metadata = {"objects": objects, "made_with": made_with, "rates": schedules, "data": data}
        self._saver = StepEndSaver(
            self._session,
            self._ranks,
            guest="loop",
            step=self.step,
            metadata=metadata,
            # The state is copied before `save` returns; what follows runs beside the next steps.
            beside=True,
            any_ranks=self._any_ranks,
            by_our_saver=True,
        )
        for name, one in self._named.items():
            if _has_shuffle_buffer(one):
                self._session.notice(
                    f"{name} shuffles a stream in a buffer, whose rows `datasets` does not save: each interruption "
                    "leaves out those in it, and the rest of the pass comes in another order. Shuffle the shards "
                    "alone (buffer_size=1), or use a data set with a length",
                    loud=self.resume is not None,
                )

    def _by_hand(self, run_dir: Path) -> Session:
        session, ranks = self._session, self._ranks
        # One rank takes the attempt and chooses: ranks that looked by themselves could choose different checkpoints.
        start = ranks.on_first("taking the run", lambda: _take_the_run(run_dir), _Start)
        paths = RunPaths(start.root)
        return Session(
            session.line,
            rank=session.rank,
            world_size=session.world_size,
            paths=paths,
            attempt=start.attempt,
            resume=paths.checkpoints / start.resume if start.resume else None,
        )

    def _go_on_from(self, directory: Path) -> None:
        now = None if self._any_ranks else self._ranks.world_size
        manifest = loop_checkpoint.require_guest(
            directory, "loop", world_size=now, needed="index.json", whose="verl_slurm.run"
        )
        paths = self._session.paths
        near = None if self._local is None else self._local.directory / directory.name
        # Parsed on each rank: a missing key is told by all of them.
        reader = self._ranks.together(
            "opening the checkpoint", lambda: CheckpointReader(directory, keys_for(paths.root))
        )
        # Kept: loading itself and the code before the first step draw from the generators, which are put back once
        # more.
        self._generators = load_state(self._objects, reader, self._ranks, near=near)
        self.step = manifest.step
        rng.restore(self._generators)

    def steps(self, total: int) -> Iterator[int]:
        """Yields the numbers of the remaining steps of `total`, from 0; saves after each where that is due, and after
        the last. Leaves by SystemExit(0) where the job is to end. The run counts as done when the `with` block is left
        without an error.
        """
        self._start(total)
        if self._generators is not None and self.step < total:
            rng.restore(self._generators)  # undoes all draws since, to shuffle or to start workers
        while self.step < total:
            yield self.step
            self.step_done(self.step + 1)
            # After the last step a stop changes nothing: the run is done and the code after the block may run.
            if self.stopping and self.step < total:
                raise SystemExit(0)
        self.finish()

    def _start(self, total: int) -> None:
        self._started, self._total = True, total
        self._saver.begin(self.step, total)

    def log(self, **metrics: object) -> None:
        """Logs numbers of the running step, for `verl-slurm status`, steps.jsonl and the checkpoint's manifest."""
        self._metrics |= metrics

    def evaluation(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields the batches of an evaluation. It may take longer than any step: it is no hang, and its time is no
        step's. Each rank may have batches of its own, or none.
        """
        since = self._session.clock()
        for batch in batches:
            yield batch
            since = self._session.evaluated(since)

    def step_done(self, step: int, total: int = 0, **metrics: object) -> None:
        """Records that `step` whole steps are done; saves where that is due, and sets `stopping`. Collective.

        Args:
            total: number of steps in all; 0: as given before.
        """
        if not self._started:
            self._start(total)
        self.step, self._total = step, total or self._total
        # The row is kept for a later `save()` of the same step; `log` fills the next one.
        self._row, self._metrics = self._metrics | metrics, {}
        # Reported before the save, so that the daemon allows for the storage from here on.
        self._saver.step_done(step, self._row, self._total)
        self._is_between, self._updates_before = self._updates == self._updates_before, self._updates
        # Gradients are in no checkpoint: a step of accelerate's ends with its window.
        if _is_accumulating() and not self._is_last:
            return
        former, self._asked_at = self._asked_at, step
        # Collective, once per step on every rank, whether or not a save is due.
        request = self._saver.asked()
        every = self._save_every or self._saver.every_steps
        # A loop's own count may stride over the multiple.
        if request is not None or (every and step // every > former // every):
            self._save(f"every {every} steps")
        # Also where the save has failed: the job ends, and the checkpoint before it counts.
        if request is not None and request.stop:
            self.stopping = True
            self._saver.leave()

    @property
    def _is_last(self) -> bool:
        return 0 < self._total <= self.step  # 0: not known

    def _watch_updates(self) -> None:
        def count(*_: object) -> None:
            self._updates += 1

        # accelerate's have the one that steps inside, and no hooks of their own.
        inner = [getattr(one, "optimizer", one) for one in self._named.values()]
        self._optimizers = [one for one in inner if isinstance(one, Optimizer)]
        for optimizer in self._optimizers:
            optimizer.register_step_post_hook(count)

    def _warn_of_gradients(self) -> None:
        """Says it if a save comes between two updates of the optimizers, in a loop that accumulates by itself."""
        # One that never steps by `Optimizer.step`, as a captured graph does not, tells nothing.
        has_updated = not self._is_between or self._updates != self._updates_before
        if has_updated or not self._updates or self._has_warned:
            return
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if any(parameter.grad is not None for group in groups for parameter in group["params"]):
            self._has_warned = True
            self._session.notice(
                f"step {self.step} is saved before the optimizer has stepped: gradients that were accumulated "
                "since are in no checkpoint, and a resumed run lacks them. It goes on bit for bit where each step "
                "of the loop ends with optimizer.step()",
                loud=True,
            )

    def save(self, reason: str = "the loop asked for it") -> None:
        """Saves the state now, after `step` whole steps, and waits until it is saved or has failed. Collective."""
        self._save(reason)
        self._saver.settle()

    def finish(self) -> None:
        """Ends the run, for a loop that stops early. Saves, unless this step is saved. Collective.

        Raises:
            RanksFailed: the end cannot be saved: a run that lost its end is not done.
        """
        # A save of this step may be under way, and be over on some ranks only.
        self._saver.settle()
        if self._saver.saved_step != self.step and (failure := self._save(last=True)) is not None:
            raise failure
        self._done = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # First, whatever the error: its thread would go on answering requests for a loop that is over.
        self._saver.end()
        if error is not None:
            self._session.ended_by(error)
        # `finish` was reached and saved. Leaving the block early does not make a run done.
        elif self._done:
            self._session.finished(self.step)
        elif not self.stopping and self._session.rank == 0:
            _complain(
                f"the loop was left behind step {self.step} of {self._total}: call run.finish() if it is done"
            )
        if self._native is not None:
            self._native.close()
        # All ranks leave together without an error and by a stop; after an error the others may be in a collective.
        self._saver.close(broken=not isinstance(error, SystemExit | None))

    def _save(self, why: str = "", *, last: bool = False) -> RanksFailed | None:
        if not self._is_last:
            self._warn_of_gradients()
        return self._saver.save(self.step, self._store, metrics=self._row, why=why, last=last)

    def _store(
        self, save: loop_checkpoint.LoopSave, request: SaveRequest | None
    ) -> Callable[[], SavedCheckpoint]:
        """Copies the state; what it returns waits until that is written and committed. Collective."""
        began, ranks, session = time.monotonic(), self._ranks, self._session
        domains, runtime = take_state(self._objects, save.step, ranks)
        texts = ranks.together(
            "starting the save",
            lambda: loop_checkpoint.small_files(session.paths, save) if ranks.rank == 0 else {},
        )
        if self._native is None:
            self._native = self._new_saver(domains)
        else:
            # An optimizer has its tensors from its first step on only.
            self._native.lay_out(domains)
        request_id, stop = (request.request_id, request.stop) if request else (0, False)
        left = request.seconds_left if request else None
        saved = self._native.begin(
            SaveContents(runtime=runtime, texts=texts, metrics=metrics_of(save.metrics)),
            # The copy has used up a part of the time that Slurm leaves.
            seconds_left=None if left is None else max(0.0, left - (time.monotonic() - began)),
            # Nobody trains any more, so reading the nodes' parts back at once costs nothing.
            on_kept=partial(session.saved_on_nodes, request_id) if stop else None,
            on_part=partial(session.part_saved, request_id),
        )
        # The loop changes its tensors in place as soon as this returns.
        self._native.fence()
        return saved.result

    def _new_saver(self, domains: Mapping[str, Tensors]) -> CheckpointSaver:
        paths, session = self._session.paths, self._session
        config = self._saver.checkpoint
        assert config is not None

        data = self._ranks.on_first("starting the save", lambda: loop_checkpoint.data_digest(paths), str)
        run = self._ranks.on_first("reading the run's id", lambda: run_id(paths), str)
        return CheckpointSaver(
            paths,
            domains,
            Provenance(
                run_id=run,
                attempt=session.attempt,
                parent=session.resume.name if session.resume is not None else None,
                schema_id=current_schema().schema_id,
                dataset_fingerprint=data,
                topology=Topology(dp=self._ranks.world_size),
                guest="loop",
            ),
            self._ranks,
            attempt_check=lambda: require_attempt(paths, session.attempt),
            local=self._local,
            encryption=config.encryption,
        )

    def _local_place(self) -> LocalPlace | None:
        if not self._session.has_run:
            return None
        paths, local_rank = self._session.paths, int(os.environ.get("LOCAL_RANK", "0"))
        return LocalPlace.of(load_own(paths.run_yaml).checkpoint, paths, local_rank)


def _complain(text: str) -> None:
    sys.stderr.write(f"verl_slurm: {text}\n")


class _Start(msgspec.Struct, frozen=True):
    """Rank 0's message to all: the run's directory, the attempt, and the checkpoint's name; empty: from the start."""

    root: str
    attempt: int
    resume: str


def _take_the_run(run_dir: Path) -> _Start:
    """Takes the run at `run_dir`, which need not exist yet, and finds the checkpoint to resume from. Rank 0.

    Raises:
        ConfigError: a daemon's lead lives there.
        Fenced: another process took it at the same moment.
        CheckpointCorrupt, SchemaMismatch: `recover.choose_resume`.
        PermissionRefused: it is another user's.
    """
    paths = RunPaths(run_dir.absolute())
    # 0700, and refused if it is another user's: checkpoints of this directory are loaded.
    private_dir(paths.root)
    # Before the attempt is taken: taking it would fence that lead's run.
    if paths.lead_address.exists():
        raise ConfigError(
            "a daemon serves this run",
            where=paths.lead_address,
            expected="a directory of its own for a loop that is started by hand",
            remedy=f"verl-slurm status {shell_word(paths.root)}; if its job is dead, remove that file",
        )
    # The commands (`status`, `list`, `prune`) read a run's settings here, also of one without a daemon.
    if not paths.run_yaml.exists():
        write_file(paths.run_yaml, dump(RunConfig(name=paths.root.name, run_dir=str(paths.root))))
    # Before the sweep: once the attempt is ours, no other process can commit what is removed below.
    mine = take_attempt(paths, job_id=str(os.getpid()), restart=0, above=newest_attempt(paths))
    private_dir(paths.checkpoints)
    require_run_id(paths)
    run_id(paths)  # made here, before a checkpoint bears it
    sweep(paths)
    loop_checkpoint.sweep_work(paths)
    # Reads every byte of the newest checkpoint: without a daemon nothing has verified it.
    keys = keys_for(paths.root)
    choice = choose_resume(paths, "auto", verifier=lambda path: verify(path, keys=keys))
    for verdict in choice.verdicts:
        if not verdict.is_whole:
            _complain(verdict.one_line())
    if choice.strays:
        _complain(choice.strays)
    if choice.name is None and (trace := former_checkpoint(paths, RunConfig(), by_hand=True)):
        raise lost_error(paths, trace, by_hand=True)
    if lost := gone_back(paths, None, choice.name or ""):
        _complain(lost)
    return _Start(root=str(paths.root), attempt=mine.attempt, resume=choice.name or "")
