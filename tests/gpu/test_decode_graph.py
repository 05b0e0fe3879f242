"""Sampling by a recorded graph: on a GPU as such, on a CPU the same work token by token."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen3Config

from verl_slurm.config.schema import DataConfig, RolloutConfig
from verl_slurm.trainer.data import Batch, PromptData, load_tokenizer
from verl_slurm.trainer.models import load_causal_lm
from verl_slurm.trainer.rollout.sampling import HFRollout, can_record

pytestmark = pytest.mark.torch

TOKENS = 40


@pytest.fixture(scope="module")
def prompts(tiny: Path, sums_root: Path) -> Batch:
    return PromptData(sums_root, load_tokenizer(tiny), DataConfig(max_prompt_tokens=9), 0).batch(0, 8)


def _engine(tiny: Path, device: str, *, recorded: bool, eos: int | None = None, **said: Any) -> HFRollout:
    tokenizer = load_tokenizer(tiny)
    engine = HFRollout(
        tiny,
        RolloutConfig(max_new_tokens=TOKENS, enforce_eager=not recorded, **said),
        seed=5,
        eos_ids=[int(tokenizer.eos_token_id) if eos is None else eos],
        pad_id=int(tokenizer.pad_token_id),
        device=torch.device(device),
    )
    engine._records = recorded  # on a CPU, too: what a graph would repeat
    return engine


def _same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_it_samples_what_is_sampled_kernel_by_kernel(tiny: Path, prompts: Batch, device: str) -> None:
    """A graph's tokens are those of single launches, and the log probabilities are near."""
    plain, graph = (
        _engine(tiny, device, recorded=recorded).generate(prompts, 1) for recorded in (False, True)
    )
    for name in ("response_ids", "response_mask"):
        assert torch.equal(plain[name], graph[name])
    torch.testing.assert_close(plain["logprobs"], graph["logprobs"], rtol=0, atol=1e-4)


@pytest.mark.long
def test_the_same_call_gives_the_same_bits_whatever_was_sampled_in_between(
    tiny: Path, prompts: Batch, device: str
) -> None:
    """A graph gives the same bits again, in this process and in another engine."""
    engine = _engine(tiny, device, recorded=True)
    first = engine.generate(prompts, step=1)
    assert not torch.equal(first["response_ids"], engine.generate(prompts, step=2)["response_ids"])
    engine.generate({name: column[:3] for name, column in prompts.items()}, step=1)
    assert _same(first, engine.generate(prompts, step=1))
    assert _same(first, _engine(tiny, device, recorded=True).generate(prompts, step=1))


def test_responses_end_where_they_end_without_it(tiny: Path, prompts: Batch, device: str) -> None:
    """A graph goes on with padding behind the end of a row, and stops soon after the last one."""
    eos = int(load_tokenizer(tiny)("0")["input_ids"][0])  # a frequent token plays the end
    plain, graph = (
        _engine(tiny, device, recorded=recorded, eos=eos).generate(prompts, 1) for recorded in (False, True)
    )
    assert torch.equal(plain["response_ids"], graph["response_ids"])
    assert torch.equal(plain["response_mask"], graph["response_mask"])


@pytest.mark.long
def test_new_weights_are_sampled_with_at_once(tiny: Path, prompts: Batch, device: str) -> None:
    """A recorded graph reads the weights that `sync` brings."""
    actor = load_causal_lm(tiny).to(device)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.mul_(1.1)
    engines = [_engine(tiny, device, recorded=recorded) for recorded in (False, True)]
    old = [engine.generate(prompts, 1) for engine in engines]
    for engine in engines:
        engine.sync(actor)
    new = [engine.generate(prompts, 1) for engine in engines]
    torch.testing.assert_close(new[0]["logprobs"], new[1]["logprobs"], rtol=0, atol=1e-4)
    assert not torch.equal(old[1]["logprobs"], new[1]["logprobs"])


@pytest.mark.long
def test_greedy_and_sampled_batches_take_turns(tiny: Path, prompts: Batch, device: str) -> None:
    """An evaluation's graph beside the training's."""
    engine = _engine(tiny, device, recorded=True)
    sample = partial(engine.generate, prompts, 1)
    first, greedy = sample(), sample(temperature=0.0)
    assert _same(first, sample())
    assert _same(greedy, sample(temperature=0.0))
    plain = _engine(tiny, device, recorded=False).generate(prompts, 1, temperature=0.0)
    assert torch.equal(greedy["response_ids"], plain["response_ids"])


def test_a_model_with_a_sliding_window_is_not_recorded() -> None:
    """Its cache counts in Python."""
    assert can_record(Qwen2Config())
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert not can_record(Qwen3Config(**windows, num_hidden_layers=2))
