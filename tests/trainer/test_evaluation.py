"""One evaluation: what it measures, how it is shared out, and that it leaves no trace."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from verl_slurm.config.schema import DataConfig
from verl_slurm.save.ranks import rng
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.data import Batch, PromptData, load_tokenizer
from verl_slurm.trainer.evaluation import Evaluator, num_pieces
from verl_slurm.trainer.objective.counter_rng import Purpose

pytestmark = pytest.mark.torch

EOS = 1


class Sampler:
    """Answers prompt n with n % 3 + 1 tokens; every third answer comes to no end."""

    collective = False

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int, float | None, Purpose]] = []

    def sync(self, actor: nn.Module) -> None:
        raise AssertionError("not the evaluator's business")

    def generate(
        self,
        prompts: Batch,
        step: int,
        *,
        temperature: float | None = None,
        purpose: Purpose = Purpose.SAMPLE_TOKEN,
    ) -> Batch:
        ids = prompts["sample_id"]
        self.asked.append((ids.tolist(), step, temperature, purpose))
        torch.rand(3)  # an engine that draws
        lengths = ids % 3 + 1
        mask = torch.arange(3) < lengths[:, None]
        response = torch.full((len(ids), 3), 7)
        response[torch.arange(len(ids)), lengths - 1] = EOS
        response[ids % 3 == 2] = 7
        return {**prompts, "response_ids": response, "response_mask": mask}


def _reward(prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> torch.Tensor:
    random.random(), np.random.rand(), torch.rand(1)
    del responses
    assert [prompt.rstrip("=") for prompt in prompts] == list(answers)
    return torch.tensor([float(answer) for answer in answers])


class One(Collective):
    """One of several ranks; the others' sums are put in."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(None)
        self.rank, self.world_size = rank, world_size
        self.others = [0.0] * 5

    def sum(self, values: Sequence[float]) -> list[float]:
        return [a + b for a, b in zip(values, self.others, strict=True)]


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny)


@pytest.fixture
def data(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> PromptData:
    for name, numbers in (("train", range(100, 103)), ("apart", range(10))):
        (tmp_path / name).mkdir()
        rows = [f'{{"prompt": "{n}=", "answer": "{n}"}}\n' for n in numbers]
        (tmp_path / name / "x.jsonl").write_text("".join(rows))
    config = DataConfig(max_prompt_tokens=8, eval_root=str(tmp_path / "apart"))
    return PromptData(tmp_path / "train", tokenizer, config, 0, held_out=10)


def _evaluator(
    data: PromptData, tokenizer: PreTrainedTokenizerBase, ranks: Collective | None = None
) -> tuple[Evaluator, Sampler]:
    sampler = Sampler()
    made = Evaluator(
        data=data,
        sampler=sampler,
        tokenizer=tokenizer,
        reward=_reward,
        size=3,
        temperature=0.5,
        ranks=ranks or One(),
        eos_ids=[EOS],
    )
    return made, sampler


def _all(evaluator: Evaluator, step: int = 4) -> int:
    evaluator.begin(step)
    pieces = 0
    while not evaluator.finished:
        evaluator.piece()
        pieces += 1
    return pieces


def test_the_numbers_are_means_over_all_held_out_prompts(
    data: PromptData, tokenizer: PreTrainedTokenizerBase
) -> None:
    evaluator, sampler = _evaluator(data, tokenizer)
    assert evaluator.finished, "none was begun"
    assert evaluator.take() == {}
    assert _all(evaluator) == 4
    assert [asked[0] for asked in sampler.asked] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert {asked[1:] for asked in sampler.asked} == {(4, 0.5, Purpose.EVALUATION)}
    # Rewards 0 ... 9; lengths 1 2 3 1 2 3 1 2 3 1; three of ten have no end.
    assert evaluator.take() == pytest.approx(
        {
            "eval/reward": 4.5,
            "eval/reward_std": 8.25**0.5,
            "eval/response_tokens": 1.9,
            "eval/finished": 0.7,
            "eval/prompts": 10.0,
        }
    )
    assert evaluator.take() == {}, "once"


def test_ranks_share_the_prompts_come_by_equally_often_and_find_the_same(
    data: PromptData, tokenizer: PreTrainedTokenizerBase
) -> None:
    whole, _ = _evaluator(data, tokenizer)
    _all(whole)
    expected = whole.take()
    ranks = [One(rank, 3) for rank in range(3)]
    parts = [_evaluator(data, tokenizer, one) for one in ranks]
    assert [_all(evaluator) for evaluator, _ in parts] == [2, 2, 2]
    asked = [[ids for ids, *_ in sampler.asked] for _, sampler in parts]
    assert asked == [[[0, 1, 2], [9]], [[3, 4, 5]], [[6, 7, 8]]]
    sums = [evaluator._sums for evaluator, _ in parts]
    ranks[0].others = [sum(column) for column in zip(*sums[1:], strict=True)]
    assert parts[0][0].take() == pytest.approx(expected)


def test_a_sampler_that_works_in_groups_is_asked_by_all_ranks_equally_often(
    data: PromptData, tokenizer: PreTrainedTokenizerBase
) -> None:
    evaluator, sampler = _evaluator(data, tokenizer, One(2, 3))
    sampler.collective = True
    assert _all(evaluator) == 2
    assert [ids for ids, *_ in sampler.asked] == [[6, 7, 8], []]
    assert evaluator.take()["eval/prompts"] == 3.0


def test_no_generator_of_the_training_moves(data: PromptData, tokenizer: PreTrainedTokenizerBase) -> None:
    evaluator, _ = _evaluator(data, tokenizer)
    before = rng.capture()
    _all(evaluator)
    after = rng.capture()
    assert before["python"] == after["python"]
    assert before["numpy"] == after["numpy"]
    assert np.array_equal(before["torch"], after["torch"])


def test_one_that_was_abandoned_begins_from_nothing(
    data: PromptData, tokenizer: PreTrainedTokenizerBase
) -> None:
    evaluator, _ = _evaluator(data, tokenizer)
    _all(evaluator)
    whole = evaluator.take()
    evaluator.begin(4)
    evaluator.piece()
    assert not evaluator.finished
    assert evaluator.begun(4)
    assert not evaluator.begun(5)
    assert evaluator.take() == {}, "half a number is none"
    assert _all(evaluator) == 4
    assert evaluator.take() == whole


def test_every_rank_has_a_piece_or_comes_by_all_the_same() -> None:
    assert [num_pieces(n, 4, 2) for n in (1, 4, 8, 9, 16)] == [1, 1, 1, 2, 2]
