"""Where a run is: the state machine of a step, as a table that can be read top to bottom.

```
step_end(k)       k whole steps are done                                          safe point 0
  └▶ generate(i)  sample micro-batch i of this dp rank       G of them              0 .. G-1
  └▶ score(i)     reward, reference, old policy, values    S micro-batches        G .. G+S-1
  └▶ advantage    PPO: KL penalty, GAE, whitening over all ranks; GRPO: groups    G+S
  └▶ update(u)    one optimizer update of all that trains  U of them              G+S+1 .. G+S+U
  └▶ evaluate     on the held-out prompts, where it is due                        G+S+U+1
  └▶ step_end(k+1)
```

A position names what comes NEXT. Between two positions lies a safe point: everything that was done is in
the state, and a run that starts from a position does exactly what one that arrives there would do.
`step_end(k)` and `generate(0)` of the same k are the same place; the first is the name that is saved.

An evaluation is one place: a run that is stopped in the middle of one is saved before it.
"""

from dataclasses import dataclass, replace

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.config.schema import RunConfig
from verl_slurm.runtime_state.format import Phase


@dataclass(frozen=True)
class Position:
    """The next piece of work, the same on every rank."""

    step: int = 0
    """Whole steps done; also the number of the running step, counted from 0."""
    phase: Phase = "step_end"
    index: int = 0

    def __str__(self) -> str:
        return f"step {self.step} {self.phase} {self.index}"


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The number of pieces in each phase of a step on one data-parallel rank, and the prompts in a piece.

    A prompt counts here once for each of its responses.
    """

    generations: int
    scores: int
    updates: int
    dp_size: int
    """Data-parallel ranks, each with its own prompts."""
    prompts_per_generation: int
    """Prompts of one generation micro-batch on one of them."""
    eval_every: int = 0
    """Steps from one evaluation to the next; 0: no evaluations."""
    total_steps: int = 0
    """Steps of the run; the last one is evaluated, too."""
    samples_per_prompt: int = 1

    @classmethod
    def of(cls, config: RunConfig) -> "StepShape":
        """Returns the shape that `config` asks for; `config.load` has checked that everything divides."""
        train, rollout = config.train, config.rollout
        return cls(
            # Divides: a generation micro-batch is the unit of the ledger, and a part of one has no record.
            generations=train.batch_size_per_device // rollout.micro_batch_size_per_device,
            scores=-(-train.batch_size_per_device // train.micro_batch_size_per_device),
            updates=train.ppo_epochs * (train.batch_size_per_device // train.mini_batch_size_per_device),
            dp_size=config.distributed.dp_size,
            prompts_per_generation=rollout.micro_batch_size_per_device,
            eval_every=train.eval_every_steps,
            total_steps=train.steps,
            samples_per_prompt=rollout.samples_per_prompt,
        )

    @property
    def prompts(self) -> int:
        """Returns the prompts of one step over all ranks."""
        return self.generations * self.prompts_per_generation * self.dp_size

    def pieces(self, phase: Phase) -> int:
        """Returns the number of positions in `phase`."""
        match phase:
            case "generate":
                return self.generations
            case "score":
                return self.scores
            case "update":
                return self.updates
            case "advantage" | "evaluate" | "step_end":
                return 1

    def evaluates(self, step: int) -> bool:
        """Returns whether the running step, the `step`-th from 0, ends with an evaluation."""
        if not self.eval_every:
            return False
        return (step + 1) % self.eval_every == 0 or step + 1 == self.total_steps


def after(position: Position, shape: StepShape) -> Position:
    """Returns the position that follows once the work of `position` is done."""
    # Within a phase the index alone moves.
    if position.index + 1 < shape.pieces(position.phase):
        return replace(position, index=position.index + 1)
    match position.phase:
        case "step_end":
            # Entering a step is no work: a rank at step_end does the first generation.
            return after(Position(position.step, "generate"), shape)
        case "generate":
            return Position(position.step, "score")
        case "score":
            return Position(position.step, "advantage")
        case "advantage":
            return Position(position.step, "update")
        # Before the step's end, so that its numbers are in the step's row, and a best checkpoint can be chosen by them.
        case "update" if shape.evaluates(position.step):
            return Position(position.step, "evaluate")
        case "update" | "evaluate":
            return Position(position.step + 1, "step_end")


def safe_point(position: Position, shape: StepShape) -> int:
    """Returns the safe points passed since the last whole step; the number in a checkpoint's name."""
    # Counted from the last whole step, so that names of checkpoints within a step rise.
    before = {
        "step_end": 0,
        "generate": 0,
        "score": shape.generations,
        "advantage": shape.generations + shape.scores,
        "update": shape.generations + shape.scores + 1,
        "evaluate": shape.generations + shape.scores + 1 + shape.updates,
    }
    # Rises by one from place to place: a checkpoint's name has it, and names must sort as the run goes.
    return before[position.phase] + position.index


def rollout_offset(position: Position, shape: StepShape) -> int:
    """Returns the prompts consumed over all ranks at `position`, each once for every response to it."""
    # Over all ranks: the number means the same when the run goes on with more or fewer of them.
    # A group lies in one micro-batch, so the prompts of the data are always this divided by
    # `samples_per_prompt`.
    per_generation = shape.prompts_per_generation * shape.dp_size
    return position.step * shape.prompts + first_generation(position, shape) * per_generation


def first_generation(position: Position, shape: StepShape) -> int:
    """Returns a rank's first unfinished generation micro-batch of the running step (G: all are finished)."""
    match position.phase:
        case "step_end" | "generate":
            # The next one is not done yet, so as many are finished.
            return position.index
        case _:
            return shape.generations


def check_position(position: Position, shape: StepShape, *, where: object) -> None:
    """Raises `CheckpointCorrupt` for a position that this run's configuration does not have."""
    # The index becomes a slice of buffers and data: beyond its phase it would be an empty one, without an error.
    if not 0 <= position.index < shape.pieces(position.phase):
        raise CheckpointCorrupt(
            "the checkpoint stands at a place that this configuration does not have",
            where=where,
            found=position,
            expected=f"{position.phase} below {shape.pieces(position.phase)}",
            remedy="resume with the batch sizes the run was started with (run.yaml)",
        )
