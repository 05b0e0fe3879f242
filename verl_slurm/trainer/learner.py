"""Does the work of one step of PPO or GRPO, phase by phase, in pieces with a possible stop between them.

Each method does the work of one position and puts the result into the buffers. The result depends on the weights, the
buffers, the configuration and the position alone. All ranks call the same method with the same index: the forward
passes of sharded models are collective.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from verl_slurm.base.errors import RolloutMismatch
from verl_slurm.config.checks.rollout import sampling_dtype
from verl_slurm.config.roles import Role
from verl_slurm.config.schema import RunConfig
from verl_slurm.runtime_state.format import Arrays
from verl_slurm.trainer.data import Batch, PromptData
from verl_slurm.trainer.evaluation import Evaluator
from verl_slurm.trainer.measures import console
from verl_slurm.trainer.measures.metrics import step_measures
from verl_slurm.trainer.measures.stopwatch import COMMUNICATION, Stopwatch, memory_bytes, watch_collectives
from verl_slurm.trainer.models import (
    Models,
    clip_gradients,
    logprobs,
    passage,
    read_logprobs,
    read_values,
    run_passes,
    values,
)
from verl_slurm.trainer.objective.advantages import estimate, token_kl
from verl_slurm.trainer.objective.losses import kl_loss, masked_mean, mean_of, policy_loss, value_loss
from verl_slurm.trainer.objective.optimizers import base_rates, learning_rate
from verl_slurm.trainer.parallel.gradients import require_finite
from verl_slurm.trainer.parallel.grid import Grid, Replica
from verl_slurm.trainer.parallel.mini_batches import MiniBatches
from verl_slurm.trainer.reward.scoring import Reward, decode_responses
from verl_slurm.trainer.rollout.engines import RolloutEngine, gap_and_tokens, gap_limit, require_small_gap
from verl_slurm.trainer.rollout.records import RolloutRecorder, SampleLog
from verl_slurm.trainer.state.position import StepShape, rollout_offset
from verl_slurm.trainer.state.train_state import TrainState, stacked, to_batch, update_metrics

_Terms = tuple[Tensor, Mapping[str, Tensor]]
"""A loss that carries a gradient, and metrics."""

Optimizers = dict[Role, Optimizer]
"""The AdamW of each model that trains."""


class Learner:
    """One rank's share of the work.

    Args:
        replay: journaled rollouts by (step, global micro-batch), of the steps that are done again.
        recorder: takes each fresh micro-batch.
        evaluator: None: this run is never evaluated.
        samples: None: another rank keeps them.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        shape: StepShape,
        models: Models,
        optimizers: Optimizers,
        sampler: RolloutEngine,
        data: PromptData,
        tokenizer: PreTrainedTokenizerBase,
        reward: Reward,
        grid: Grid,
        recorder: RolloutRecorder,
        replay: dict[tuple[int, int], Arrays],
        evaluator: Evaluator | None = None,
        samples: SampleLog | None = None,
    ) -> None:
        self._config, self._shape, self._grid = config, shape, grid
        # The ranks that differ in their rows only: every sum runs over these.
        self._ranks, self._replica = grid.data, Replica(grid)
        self._models, self._optimizers, self._sampler = models, optimizers, sampler
        self._data, self._tokenizer, self._reward = data, tokenizer, reward
        self._recorder, self._replay = recorder, replay
        self._evaluator, self._samples = evaluator, samples
        # Never a step's number, so a new process copies the weights before it samples: its engine starts without them.
        self._synced_step = -1
        # Not saved: the buffers stay as they were sampled, so a start makes the exchange again.
        self._mini_batches: MiniBatches | None = None
        self.watch = Stopwatch(_device(models.actor))
        """Seconds of the running step's updates and of its communication."""
        watch_collectives((models.actor, models.critic, models.reference), self.watch)
        self.new_rollouts = 0
        """Responses sampled, not replayed, by this process's replica; 0 where another rank counts for it."""
        self._my_tokens = 0
        self.new_tokens = 0
        """Response tokens sampled, not replayed, in the last finished step, over all ranks."""
        self._waited_s = grid.waited_s
        self.trained_tokens = 0
        """Response tokens that the actor was updated on in that step, over all ranks and epochs."""

    def take_waited_s(self) -> float:
        """Returns the seconds in small collectives since the last call."""
        before, self._waited_s = self._waited_s, self._grid.waited_s
        return self._waited_s - before

    def memory_bytes(self) -> int:
        """Returns the peak memory of the device, or of the process, so far."""
        return memory_bytes(_device(self._models.actor))

    def work(self, state: TrainState) -> None:
        """Does the work that `state.position` names. The loop advances the position."""
        match state.position.phase:
            # The same place: entering a step is no work (`trainer.state.position`).
            case "step_end" | "generate":
                self._generate(state)
            case "score":
                self._score(state)
            case "advantage":
                self._estimate(state)
            case "update":
                self._update(state)
            case "evaluate":
                self._evaluate(state)

    # ---- generate

    def _generate(self, state: TrainState) -> None:
        position, size = state.position, self._shape.prompts_per_generation
        # Global, so that a record keeps its meaning when the run continues with another number of ranks.
        micro_batch = position.index * self._shape.dp_size + self._ranks.rank
        # rollout_offset counts what all ranks had consumed; this rank's share begins `rank` pieces later.
        prompts = self._data.batch(rollout_offset(position, self._shape) + self._ranks.rank * size, size)
        # The leader looks for all: two nodes may see different ends of one ledger file for a moment.
        batch = self._replica.found(lambda: self._replayed(position.step, micro_batch, prompts))
        # The sampler gets its weights once a step, or never if every rank finds all in the ledger.
        if self._synced_step != position.step and self._ranks.max([int(batch is None)])[0]:
            with self.watch.span(COMMUNICATION):
                self._sampler.sync(self._models.actor)
            self._synced_step = position.step
        # A rank without need still takes part in the group's collectives, with no rows of its own.
        if batch is not None and self._sampler.collective:
            self._sampler.generate(_rows(prompts, slice(0)), position.step)  # others of our group may sample
        if batch is None:
            batch = self._replica.sample(self._sampler, prompts, position.step)
            # One rank journals and counts for its replica: all of them hold the same rows.
            if self._replica.is_leader:
                self.new_rollouts += size
                self._recorder.record(position.step, micro_batch, batch)
            self._my_tokens += int(batch["response_mask"].sum())
        # After the ledger: whatever a checkpoint holds has been recorded, or its failure reported.
        state.buffers.rollouts.append(batch)
        # `append` waits for the record before it. Nothing is appended while the step trains, so the last record is
        # waited for.
        if self._replica.is_leader and position.index + 1 == self._shape.generations:
            self._recorder.settle()

    def _replayed(self, step: int, micro_batch: int, prompts: Batch) -> Batch | None:
        # Popped: each record is used once, and its memory is free as soon as it stands in the buffers.
        arrays = self._replay.pop((step, micro_batch), None)
        if arrays is None:
            return None
        batch = to_batch(arrays)
        # A record for other prompts belongs to another data set (--force-resume): generating again is right.
        if not all(name in batch and torch.equal(batch[name], prompts[name]) for name in prompts):
            return None
        # As `RolloutEngine.generate` makes them: any process that can write the file could have made the record.
        like = len(prompts["prompt_ids"]), self._config.rollout.max_new_tokens
        columns = {"response_ids": torch.int64, "response_mask": torch.bool, "logprobs": torch.float32}
        kinds = {name: column.dtype for name, column in batch.items() if name not in prompts}
        if kinds != columns or any(batch[name].shape != like for name in columns):
            console.complain(
                f"step {step + 1}: the ledger's record of micro-batch {micro_batch} holds {kinds}, expected {columns} "
                f"of shape {like}; it is sampled again"
            )
            return None
        return batch

    def _take_back(self, step: int) -> None:
        """Retracts the step, so that no start replays refused rollouts. Collective."""
        if self._replica.is_leader:
            self._recorder.take_back(step, self._shape)
        # A barrier: the end of one process ends those of the other ranks, and they might not have taken theirs back
        # yet.
        self._grid.world.max([0])

    # ---- score

    @torch.no_grad()
    def _score(self, state: TrainState) -> None:
        size, temperature = self._config.train.micro_batch_size_per_device, self._config.rollout.temperature
        start = state.position.index * size
        # The last slice may be shorter: the pieces of this phase are rounded up.
        batch = _rows(stacked(state.buffers.rollouts), slice(start, start + size))
        # By the training's own kernels, not the sampler's: the ratio of the first update must start at 1.
        old = logprobs(self._models.actor, batch, temperature=temperature)
        reference = logprobs(self._models.reference, batch, temperature=temperature)
        said: Batch = {}
        if self._replica.speaks:  # the other ranks are told: a judge is asked once for each response
            # The map of a warm start applies here, so that buffers, cached scores and metrics all have the scale that
            # trains.
            scores = state.reward.map_at(state.position.step)(self._reward(*self.texts(batch)))
            said["scores"] = scores.float().cpu()
        # Placeholders on the stages of a pipeline that do not see the logits; `told` replaces them by the speaker's.
        said |= {"old_logprobs": old.float().cpu(), "ref_logprobs": reference.float().cpu()}
        if self._models.critic is not None:
            said["old_values"] = values(self._models.critic, batch).cpu()
        state.buffers.scored.append(self._replica.told(said))

    def texts(self, batch: Batch) -> tuple[list[str], list[str], list[str]]:
        """Returns (prompts, responses, answers) of a batch that has sample_id, response_ids and response_mask."""
        samples = batch["sample_id"]
        responses = decode_responses(self._tokenizer, batch)
        return self._data.prompts(samples), responses, self._data.answers(samples)

    @property
    def replays_until(self) -> int:
        """Returns the last step of which this rank still has journaled rollouts; -1: none."""
        # They were sampled by weights that the reward of that time has trained.
        return max((step for step, _ in self._replay), default=-1)

    # ---- advantage

    def _estimate(self, state: TrainState) -> None:
        rollouts, scored = stacked(state.buffers.rollouts), stacked(state.buffers.scored)
        mask = rollouts["response_mask"]
        # Summed over the ranks before it is judged, so that all refuse or none.
        gap = self._ranks.sum(gap_and_tokens(rollouts["logprobs"], scored["old_logprobs"], mask))
        limit = gap_limit(self._config.rollout.max_logprob_gap, sampling_dtype(self._config))
        try:
            require_small_gap(*gap, limit=limit, step=state.position.step)
        except RolloutMismatch:
            # First: a refusal that left the rollouts in the ledger would meet them again at every start.
            self._take_back(state.position.step)
            raise
        state.buffers.estimates = estimate(
            scored, mask, kl_coef=state.kl.coef, config=self._config, total=self._ranks.sum
        )

    # ---- update

    def _update(self, state: TrainState) -> None:
        train, step, buffers = self._config.train, state.position.step, state.buffers
        # Also after a start between two updates: the permutation follows from (seed, step, epoch) alone.
        if self._mini_batches is None or self._mini_batches.step != step:
            # Stays stacked, as after a start: the mini-batches then keep no second copy.
            buffers.rollouts, buffers.scored = [stacked(buffers.rollouts)], [stacked(buffers.scored)]
            # All of the step, because a rank trains mostly on rows that others sampled.
            batch = buffers.rollouts[0] | buffers.scored[0] | buffers.estimates
            self._mini_batches = MiniBatches(self._config, step, batch, self._ranks)
        # The rows of this update do not depend on the number of ranks.
        batch = self._mini_batches.piece(state.position.index)
        # Mean over the mini-batch's tokens on all ranks; FSDP averages over ranks (losses.py says why).
        tokens = self._ranks.sum([float(batch["response_mask"].sum())])[0] / self._ranks.world_size
        names = update_metrics(train)
        sums = dict.fromkeys(names, 0.0)
        self._passes(batch, tokens, state.kl.coef, sums)
        self.watch.start()
        rates = base_rates(train)
        for role, model in self._models.trained.items():
            optimizer, base = self._optimizers[role], rates[role]
            norm = clip_gradients(model, train.max_grad_norm, self._grid)
            # Between clipping and the step: one NaN in a gradient would spoil all weights, and a save would keep them.
            sums[f"{role}_grad_norm"] = require_finite(norm, role, step)
            for group in optimizer.param_groups:
                # Computed for each update, so the optimizer holds no schedule to save or to lose.
                group["lr"] = learning_rate(base, train, step)
            # A hook waits here until the copy of a save in progress is taken (`CheckpointSaver.fence`).
            optimizer.step()
            # No gradient survives an update, so none has to be saved.
            optimizer.zero_grad(set_to_none=True)
            self.watch.lap(f"{role}_update_s")
        # The speaker's numbers on all ranks of the replica: its last stage alone has the losses.
        buffers.updates.append(self._replica.told_numbers([sums[name] for name in names]))

    def _passes(self, batch: Batch, tokens: float, kl_coef: float, sums: dict[str, float]) -> None:
        """Adds a mini-batch's gradients to all models that train, and its share of the metrics to `sums`."""
        actor, critic = self._models.actor, self._models.critic
        size = self._config.train.micro_batch_size_per_device
        batch = {name: column.to(_device(actor)) for name, column in batch.items()}

        def policy(logits: Tensor, rows: Tensor) -> Tensor:
            piece = _rows(batch, rows)
            # Without a term in the loss the entropy is for display, and its backward pass would cost for nothing.
            learns = self._config.train.entropy_coef != 0.0
            heat = self._config.rollout.temperature
            read = read_logprobs(logits, piece, temperature=heat, learns_entropy=learns)
            return _counted(self._policy_terms(*read, piece, tokens, kl_coef), sums)

        def value(logits: Tensor, rows: Tensor) -> Tensor:
            piece = _rows(batch, rows)
            return _counted(self._value_terms(read_values(logits, piece), piece, tokens), sums)

        self.watch.start()
        run_passes(actor, passage(batch, _device(actor)), size, policy)
        self.watch.lap("actor_update_s")
        if critic is not None:
            run_passes(critic, passage(batch, _device(critic)), size, value)
            self.watch.lap("critic_update_s")

    def _policy_terms(
        self, logprobs_NT: Tensor, entropy_NT: Tensor, batch: Batch, tokens: float, kl_coef: float
    ) -> _Terms:
        train, mask = self._config.train, batch["response_mask"]
        mean = mean_of(
            train.loss_aggregation,
            tokens=tokens,
            samples=train.mini_batch_size_per_device,
            length=self._config.rollout.max_new_tokens,
        )
        policy = policy_loss(
            logprobs_NT,
            batch["old_logprobs"],
            batch["advantages"],
            mask,
            clip_ratio=train.clip_ratio,
            clip_ratio_high=train.clip_ratio_high,
            denominator=tokens,
            mean=mean,
        )
        entropy = masked_mean(entropy_NT, mask, tokens)
        loss = policy.loss - train.entropy_coef * entropy if train.entropy_coef else policy.loss
        found = {
            "policy_loss": policy.loss,
            "entropy": entropy,
            "policy_kl": policy.approx_kl,
            "policy_clip": policy.clip_fraction,
        }
        # The same reduction as the policy loss: both stand in one sum.
        if train.kl_in == "loss":
            found["kl_loss"] = kl_loss(logprobs_NT, batch["ref_logprobs"], mask, mean)
            loss = loss + kl_coef * found["kl_loss"]
        return loss, found

    def _value_terms(self, values_NT: Tensor, batch: Batch, tokens: float) -> _Terms:
        value = value_loss(
            values_NT,
            batch["old_values"],
            batch["returns"],
            batch["response_mask"],
            value_clip=self._config.train.value_clip,
            denominator=tokens,
        )
        return value.loss, {"value_loss": value.loss, "value_clip": value.clip_fraction}

    # ---- evaluate

    @property
    def must_stay(self) -> bool:
        """Returns whether an evaluation is unfinished, so that the position must stay. The same on every rank."""
        return self._evaluator is not None and not self._evaluator.finished

    def _evaluate(self, state: TrainState) -> None:
        # Pieces without positions: the state has nothing of them, so a run that is stopped here repeats the evaluation.
        step, evaluator = state.position.step, self._evaluator
        if evaluator is None:
            return  # switched off since this position was saved
        if not evaluator.begun(step):
            with self.watch.span(COMMUNICATION):
                self._sampler.sync(self._models.actor)
            self._synced_step = step + 1  # the next step samples with the same weights
            evaluator.begin(step)
        evaluator.piece()

    # ---- the end of a step

    def finish_step(self, state: TrainState) -> dict[str, float]:
        """Returns the step's row, the same bits on each rank; moves the KL, empties buffers. Collective."""
        buffers = state.buffers
        rollouts, scored = stacked(buffers.rollouts), stacked(buffers.scored)
        mask = rollouts["response_mask"]
        kl = token_kl(scored["old_logprobs"], scored["ref_logprobs"], mask)
        # Computed once more from the buffers: after a start in mid-step no earlier result of this process exists.
        gap, _ = gap_and_tokens(rollouts["logprobs"], scored["old_logprobs"], mask)
        # Linear in the rows, so a step that changed its number of ranks in between still gives the mean.
        updates = torch.tensor(buffers.updates, dtype=torch.float64).mean(dim=0)
        mine: list[Tensor] = [
            torch.tensor(float(len(mask)), dtype=torch.float64),
            scored["scores"].double().sum(),
            kl.double().sum(),
            mask.double().sum(),
            torch.tensor(gap, dtype=torch.float64),
            torch.tensor(float(self._my_tokens), dtype=torch.float64),
            *updates,
        ]
        # In float64 and in rank order (`Collective.sum`): the row is compared bit for bit, and steers the KL
        # coefficient.
        samples, score, kl_sum, tokens, gap_sum, fresh, *means = self._ranks.sum([float(x) for x in mine])
        self.new_tokens, self._my_tokens = int(fresh), 0
        self.trained_tokens = int(tokens) * self._config.train.ppo_epochs
        rate = learning_rate(self._config.train.actor_lr, self._config.train, state.position.step)
        row = {
            "step": float(state.position.step + 1),
            "reward": score / samples,
            "kl": kl_sum / samples,
            "kl_coef": state.kl.coef,
            "response_tokens": tokens / samples,
            "sampler_gap": gap_sum / tokens,
            "learning_rate": rate,
        }
        grpo = self._config.train.algorithm == "grpo"
        group = self._config.rollout.samples_per_prompt if grpo else None
        row |= step_measures(scored, buffers.estimates, mask, self._ranks, group=group)
        for name, total in zip(update_metrics(self._config.train), means, strict=True):
            row[name] = total / self._ranks.world_size
        if "explained_variance" in row:  # there is a critic
            train = self._config.train
            row["critic_learning_rate"] = learning_rate(train.critic_lr, train, state.position.step)
        row |= state.reward.numbers
        if self._evaluator is not None:
            row |= self._evaluator.take()
        # Before the KL moves and the buffers are emptied; a failing disk costs the samples alone.
        if self._samples is not None:
            self._samples.keep(state.position.step + 1, rollouts, scored, self.texts)
        # With the mean over all ranks, so that the coefficient is the same on each.
        state.kl = state.kl.update(row["kl"])
        # Kept for a later change of the reward, and part of the checkpoint: a repeated change finds the same scores.
        state.reward = state.reward.remember(rollouts, scored)
        # Last of all that reads them. A checkpoint between two steps holds no rollouts.
        state.buffers, self._mini_batches = type(buffers)(), None
        state.remember(row)
        return row


def _rows(batch: Batch, rows: slice | Tensor) -> Batch:
    return {name: column[rows] for name, column in batch.items()}


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _counted(terms: _Terms, sums: dict[str, float]) -> Tensor:
    loss, metrics = terms
    for name, value in metrics.items():
        sums[name] += float(value.detach())
    return loss
