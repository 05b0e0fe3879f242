"""The real vLLM as a rollout engine. Runs in an environment that has it: `make vllm`, or inside `make test-all`.

One vLLM for this whole module, because there can be one in a process.
"""

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.builders import run_config
from verl_slurm.base.errors import ConfigError, RolloutMismatch
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.data import Batch, PromptData, load_tokenizer
from verl_slurm.trainer.models import load_causal_lm, logprobs_and_entropy
from verl_slurm.trainer.objective.counter_rng import Purpose
from verl_slurm.trainer.rollout.engines import (
    RolloutEngine,
    build_engine,
    gap_and_tokens,
    gap_limit,
    require_small_gap,
)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.vllm,
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="no vLLM here: make vllm, then .venv-vllm/bin/python"
    ),
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports
]

TOKENS, SIZE, SEED = 7, 12, 5


class Bench:
    """One vLLM, the Hugging Face engine beside it, and an actor whose weights both get."""

    def __init__(self, model: Path, data_root: Path) -> None:
        self.config = run_config(
            seed=SEED,
            path=model,
            max_prompt_tokens=9,
            engine="vllm",
            max_new_tokens=TOKENS,
            sampled_at_once=SIZE,
            device="cpu",
        )
        tokenizer = load_tokenizer(model)
        self.pad = int(tokenizer.pad_token_id)
        # A frequent token plays the end, so that there are ends.
        self.eos = int(tokenizer("0")["input_ids"][0])
        self.actor = load_causal_lm(model)
        self.data = PromptData(data_root, tokenizer, self.config.data, SEED)
        # A frequent token, as the second end token of a chat model.
        self.more_ends = [int(tokenizer("0")["input_ids"][0])]
        self.generators = [self._generators()]
        self.threads = torch.get_num_threads()
        self.vllm: Any = self._engine("vllm")
        self.generators.append(self._generators())
        self.hf = self._engine("hf")
        self.sync()

    def _engine(self, name: str) -> RolloutEngine:
        rollout = msgspec.structs.replace(self.config.rollout, engine=name)
        config = msgspec.structs.replace(self.config, rollout=rollout)
        return build_engine(
            config,
            Path(config.model.path),
            eos_ids=[self.eos, *self.more_ends],
            pad_id=self.pad,
            device=torch.device("cpu"),
            ranks=Collective(None),
        )

    @staticmethod
    def _generators() -> object:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    def sync(self) -> None:
        self.vllm.sync(self.actor)
        self.hf.sync(self.actor)

    def train(self, scale: float) -> None:
        """Something happens to the actor's weights, and nobody is told."""
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.actor.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)

    def gap(self, batch: Batch, temperature: float = 1.0) -> tuple[float, float]:
        with torch.no_grad():
            logprobs, _ = logprobs_and_entropy(self.actor, batch, temperature=temperature)
        return gap_and_tokens(batch["logprobs"], logprobs, batch["response_mask"])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, sums_root: Path) -> Bench:
    from verl_slurm.trainer.quickstart import tiny_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model, "_WARM_STEPS", 20)
        return Bench(tiny_model.build_model(tmp_path_factory.mktemp("wide") / "wide", head_dim=32), sums_root)


def rows(batch: Batch, which: slice | list[int]) -> Batch:
    return {name: column[which] for name, column in batch.items()}


def assert_same(one: Batch, other: Batch) -> None:
    for name in ("sample_id", "prompt_ids", "prompt_mask", "response_ids", "response_mask"):
        assert one[name].dtype == other[name].dtype
        assert torch.equal(one[name], other[name]), name
    assert one["logprobs"].dtype == other["logprobs"].dtype
    torch.testing.assert_close(one["logprobs"], other["logprobs"], rtol=0, atol=1e-5)


def test_it_samples_what_the_hugging_face_engine_samples(bench: Bench) -> None:
    prompts = bench.data.batch(100, SIZE)
    found = bench.vllm.generate(prompts, 3)
    assert_same(found, bench.hf.generate(prompts, 3))
    lengths = found["response_mask"].sum(dim=1).tolist()
    assert min(lengths) < max(lengths) == TOKENS
    assert not torch.equal(found["response_ids"], bench.vllm.generate(prompts, 4)["response_ids"])
    # Each end token ends a response, and is its last one.
    second = (found["response_ids"] == bench.more_ends[0]) & found["response_mask"]
    ended = [row.nonzero().flatten().tolist() for row in second]
    assert any(ended)
    assert all(places == [length - 1] for places, length in zip(ended, lengths, strict=True) if places)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_an_evaluation_s_samples_are_those_of_the_hugging_face_engine_too(
    bench: Bench, temperature: float
) -> None:
    prompts = bench.data.batch(100, SIZE)
    found, other, training = (
        engine.generate(prompts, 3, temperature=temperature, purpose=purpose)
        for engine, purpose in (
            (bench.vllm, Purpose.EVALUATION),
            (bench.hf, Purpose.EVALUATION),
            (bench.vllm, Purpose.SAMPLE_TOKEN),
        )
    )
    assert_same(found, other)
    # Greedy needs no noise, and otherwise it is noise of its own.
    assert torch.equal(found["response_ids"], training["response_ids"]) == (temperature == 0.0)


def test_more_prompts_than_fit_at_once_come_back_in_their_order(bench: Bench) -> None:
    prompts = bench.data.batch(0, 3 * SIZE + 1)
    assert_same(bench.vllm.generate(prompts, 0), bench.hf.generate(prompts, 0))


def test_a_prompt_gives_the_same_tokens_alone_and_in_any_batch(bench: Bench) -> None:
    prompts = bench.data.batch(300, SIZE)
    together = bench.vllm.generate(prompts, 2)
    alone = [bench.vllm.generate(rows(prompts, [n]), 2) for n in range(SIZE)]
    assert_same(together, {name: torch.cat([one[name] for one in alone]) for name in together})
    backwards = bench.vllm.generate(rows(prompts, list(reversed(range(SIZE)))), 2)
    assert_same(together, {name: column.flip(0) for name, column in backwards.items()})


def test_the_same_call_gives_the_same_bits(bench: Bench) -> None:
    prompts = bench.data.batch(50, SIZE)
    first, second = (bench.vllm.generate(prompts, 1) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_no_prompts_give_no_responses(bench: Bench) -> None:
    nothing = bench.vllm.generate(rows(bench.data.batch(0, 2), slice(0)), 0)
    assert nothing["response_ids"].shape == nothing["logprobs"].shape == (0, TOKENS)


def test_the_recorded_logprobs_are_those_at_the_sampling_temperature(bench: Bench, monkeypatch: Any) -> None:
    rollout = msgspec.structs.replace(bench.config.rollout, temperature=0.7)
    monkeypatch.setattr(bench.vllm, "_config", msgspec.structs.replace(bench.config, rollout=rollout))
    batch = bench.vllm.generate(bench.data.batch(0, SIZE), 0)
    gap, tokens = bench.gap(batch, temperature=0.7)
    assert gap / tokens < 1e-5
    gap, tokens = bench.gap(batch, temperature=1.0)
    assert gap / tokens > 0.05


def test_after_an_update_a_sync_brings_the_new_weights_and_without_it_the_check_is_loud(bench: Bench) -> None:
    limit = gap_limit(None, "bfloat16")
    prompts = bench.data.batch(0, SIZE)
    before = bench.vllm.generate(prompts, 0)
    bench.train(0.02)
    with pytest.raises(RolloutMismatch, match="step 1"):
        require_small_gap(*bench.gap(bench.vllm.generate(prompts, 0)), limit=limit, step=0)
    bench.sync()
    after = bench.vllm.generate(prompts, 0)
    require_small_gap(*bench.gap(after), limit=1e-5, step=0)
    assert_same(after, bench.hf.generate(prompts, 0))
    assert not torch.equal(before["response_ids"], after["response_ids"])


def test_vllm_leaves_generators_and_threads_as_they_were(bench: Bench) -> None:
    assert bench.generators[0] == bench.generators[1]
    before = bench._generators()
    bench.vllm.generate(bench.data.batch(0, 4), 0)
    assert bench._generators() == before
    assert torch.get_num_threads() == bench.threads
    torch.set_num_threads(bench.threads)
    assert torch.set_num_threads.__module__ != "vllm.v1.worker.cpu_worker"


def test_what_vllm_cannot_sample_from_is_refused_at_the_start(bench: Bench, tiny: Path) -> None:
    """`auto` as device: only here it is known that it is a CPU."""
    distributed = msgspec.structs.replace(bench.config.distributed, device="auto")
    model = msgspec.structs.replace(bench.config.model, path=str(tiny))
    config = msgspec.structs.replace(bench.config, distributed=distributed, model=model)
    with pytest.raises(ConfigError, match="heads of 16 on a CPU"):
        build_engine(config, tiny, eos_ids=[1], pad_id=0, device=torch.device("cpu"), ranks=Collective(None))
