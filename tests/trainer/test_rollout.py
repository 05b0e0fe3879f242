"""Sampling: the right distribution, noise that depends on nothing but its name, and when an engine is too far off."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from verl_slurm.base.errors import ConfigError, DataError, RolloutMismatch
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.config.schema import DataConfig, RolloutConfig
from verl_slurm.dataset.prompts.chat_template import has_template
from verl_slurm.export.causal_lm import end_tokens
from verl_slurm.trainer.data import Batch, PromptData, load_tokenizer
from verl_slurm.trainer.models import load_causal_lm, logprobs_and_entropy
from verl_slurm.trainer.objective.counter_rng import uniforms
from verl_slurm.trainer.rollout.engines import gap_and_tokens, gap_limit, require_small_gap
from verl_slurm.trainer.rollout.sampling import HFRollout, _doubling_scan, pick_tokens

pytestmark = pytest.mark.torch


TOKENS = 7


@pytest.fixture(scope="module")
def data(tiny: Path, sums_root: Path) -> PromptData:
    return PromptData(sums_root, load_tokenizer(tiny), DataConfig(max_prompt_tokens=9), 0)


def make_rollout(
    tiny: Path, *, temperature: float = 1.0, seed: int = 5, eos: int | None = None, more: Sequence[int] = ()
) -> HFRollout:
    tokenizer = load_tokenizer(tiny)
    config = RolloutConfig(max_new_tokens=TOKENS, temperature=temperature)
    eos_id = int(tokenizer.eos_token_id) if eos is None else eos
    return HFRollout(tiny, config, seed=seed, eos_ids=[eos_id, *more], pad_id=int(tokenizer.pad_token_id))


def rows(batch: Batch, which: slice | list[int]) -> Batch:
    return {name: column[which] for name, column in batch.items()}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_picked_tokens_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, float("-inf"), 0.5])
    num = 20_000
    uniform = torch.from_numpy(uniforms(0, 0, range(num // 10), 10).ravel())
    tokens, logprobs = pick_tokens(logits.expand(num, -1), uniform, temperature)
    expected = torch.softmax(logits / temperature, dim=-1)
    counts = torch.bincount(tokens, minlength=6)
    assert counts[4] == 0
    possible = expected > 0
    chi_square = ((counts - num * expected)[possible] ** 2 / (num * expected[possible])).sum()
    # 4 degrees of freedom: 18.5 is passed by chance once in a thousand; the seed is fixed
    assert chi_square < 18.5
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_without_temperature_the_likeliest_token_is_picked_whatever_the_noise() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 0.0]])
    tokens, logprobs = pick_tokens(logits, torch.tensor([0.0, 0.999], dtype=torch.float64), 0.0)
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, dim=-1).max(dim=-1).values)


def test_the_ends_of_the_unit_interval_pick_possible_tokens() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]]).expand(2, -1)
    tokens, _ = pick_tokens(logits, torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64), 1.0)
    assert tokens.tolist() == [1, 2]


@pytest.mark.parametrize("size", [1, 2, 7, 264])
def test_the_scan_for_cuda_is_a_running_sum(size: int) -> None:
    x = torch.rand(3, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(_doubling_scan(x), x.cumsum(dim=-1))


def test_a_prompt_gives_the_same_tokens_alone_and_in_any_batch(tiny: Path, data: PromptData) -> None:
    rollout = make_rollout(tiny)
    prompts = data.batch(100, 12)
    together = rollout.generate(prompts, step=3)
    alone = [rollout.generate(rows(prompts, [n]), step=3) for n in range(12)]
    backwards = rollout.generate(rows(prompts, list(reversed(range(12)))), step=3)
    for name in ("response_ids", "response_mask"):
        assert torch.equal(together[name], torch.cat([sample[name] for sample in alone]))
        assert torch.equal(together[name], backwards[name].flip(0))
    torch.testing.assert_close(together["logprobs"], backwards["logprobs"].flip(0), rtol=0, atol=1e-5)


def test_the_same_call_gives_the_same_bits_and_another_step_or_seed_other_tokens(
    tiny: Path, data: PromptData
) -> None:
    prompts = data.batch(0, 8)
    first = make_rollout(tiny).generate(prompts, step=1)
    second = make_rollout(tiny).generate(prompts, step=1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for other in (make_rollout(tiny).generate(prompts, 2), make_rollout(tiny, seed=6).generate(prompts, 1)):
        assert not torch.equal(first["response_ids"], other["response_ids"])


def test_sampling_leaves_the_global_generators_alone(tiny: Path, data: PromptData) -> None:
    rollout = make_rollout(tiny)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    rollout.generate(data.batch(0, 4), step=0)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_the_recorded_logprobs_are_those_of_the_policy_recomputed(
    tiny: Path, data: PromptData, temperature: float
) -> None:
    batch = make_rollout(tiny, temperature=temperature).generate(data.batch(0, 16), step=0)
    with torch.no_grad():
        logprobs, _ = logprobs_and_entropy(load_causal_lm(tiny), batch, temperature=temperature)
    mask = batch["response_mask"]
    torch.testing.assert_close(logprobs[mask], batch["logprobs"][mask], rtol=0, atol=1e-5)


def test_each_of_several_end_tokens_ends_a_response_as_in_hugging_faces_generate(
    tiny: Path, data: PromptData, tmp_path: Path
) -> None:
    model_dir = Path(shutil.copytree(tiny, tmp_path / "model"))
    tokenizer, prompts = load_tokenizer(tiny), data.batch(0, 16)
    own, *more = [
        int(tokenizer.eos_token_id),
        *tokenizer("01")["input_ids"],
    ]  # frequent ones, so that there are ends
    said = {"eos_token_id": [own, *more], "do_sample": True, "temperature": 0.1, "top_k": 1, "top_p": 0.1}
    (model_dir / "generation_config.json").write_text(json.dumps(said))
    assert end_tokens(model_dir, tokenizer) == (own, *more)
    batch = make_rollout(model_dir, more=more, temperature=0.0).generate(prompts, step=0)
    expected = cast(Any, load_causal_lm(model_dir)).generate(
        input_ids=prompts["prompt_ids"],
        attention_mask=prompts["prompt_mask"].long(),
        max_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )[:, prompts["prompt_ids"].shape[1] :]
    assert torch.equal(batch["response_ids"][:, : expected.shape[1]], expected)
    ends = torch.isin(batch["response_ids"], torch.tensor(more)) & batch["response_mask"]
    assert ends.any(dim=0).any()
    assert (ends.sum(dim=1) <= 1).all()


@pytest.mark.parametrize(
    ("generation", "config", "found"),
    [
        (7, 9, (7,)),
        ([7, 8, 7], 9, (7, 8)),
        (None, 9, ()),
        ("no file", [9, 10], (9, 10)),
        ("no file", None, ()),
        ("no file", {"text_config": 11}, (11,)),
    ],
)
def test_end_tokens_come_from_the_file_that_hugging_face_reads(
    tiny: Path, tmp_path: Path, generation: Any, config: Any, found: tuple[int, ...]
) -> None:
    tokenizer = load_tokenizer(tiny)
    inner = {"text_config": {"eos_token_id": config["text_config"]}} if isinstance(config, dict) else None
    (tmp_path / "config.json").write_text(json.dumps(inner or {"eos_token_id": config}))
    if generation != "no file":
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert end_tokens(tmp_path, tokenizer) == (tokenizer.eos_token_id, *found)


@pytest.mark.parametrize("said", ["7", [7, None], -1, True, [[7]]])
def test_what_is_no_end_token_is_refused(tiny: Path, tmp_path: Path, said: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    with pytest.raises(DataError, match=r"eos_token_id .* in generation_config.json"):
        end_tokens(tmp_path, load_tokenizer(tiny))


def test_a_chat_template_that_a_processor_saved_is_used(tiny: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    assert not load_tokenizer(model).chat_template
    assert not has_template(model)
    (model / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    assert load_tokenizer(model).chat_template == "{{ messages[0].content }}"
    assert has_template(model)
    (model / "chat_template.json").write_text("{}")
    assert not has_template(model)
    # Several by name: transformers takes the default, and refuses where there is none.
    for name in ("tool_use", "default"):
        (model / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": [{"name": name, "template": "{{ 1 }}"}]})
        )
        assert has_template(model) is (name == "default")


def test_the_end_token_ends_a_response_and_the_rest_is_padding(tiny: Path, data: PromptData) -> None:
    tokenizer = load_tokenizer(tiny)
    one = data.batch(0, 1)
    first = int(make_rollout(tiny).generate(one, step=0)["response_ids"][0, 0])
    # One that ends at once has the full width all the same.
    ended = make_rollout(tiny, eos=first).generate(one, step=0)
    assert ended["response_mask"].tolist() == [[True] + [False] * (TOKENS - 1)]
    eos = int(tokenizer("0")["input_ids"][0])  # a frequent token plays the end, so that there are ends
    batch = make_rollout(tiny, eos=eos).generate(data.batch(0, 64), step=0)
    assert (
        batch["response_ids"].shape == batch["response_mask"].shape == batch["logprobs"].shape == (64, TOKENS)
    )
    lengths = batch["response_mask"].sum(dim=1).tolist()
    assert min(lengths) < TOKENS
    for ids, mask, logprobs, length in zip(
        batch["response_ids"].tolist(), batch["response_mask"], batch["logprobs"], lengths, strict=True
    ):
        assert mask.tolist() == [t < length for t in range(TOKENS)]
        assert eos not in ids[: length - 1]
        assert length == TOKENS or ids[length - 1] == eos
        assert set(ids[length:]) <= {tokenizer.pad_token_id}
        assert (logprobs[:length] < 0).all()
        assert (logprobs[length:] == 0).all()


def test_sync_takes_over_the_actors_weights(tiny: Path, data: PromptData) -> None:
    actor = load_causal_lm(tiny)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.mul_(1.1)
    rollout = make_rollout(tiny)
    rollout.sync(actor)
    batch = rollout.generate(data.batch(0, 8), step=0)
    with torch.no_grad():
        logprobs, _ = logprobs_and_entropy(actor, batch, temperature=1.0)
    mask = batch["response_mask"]
    torch.testing.assert_close(logprobs[mask], batch["logprobs"][mask], rtol=0, atol=1e-5)


def test_the_responses_to_one_prompt_differ(tiny: Path, sums_root: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    config = DataConfig(max_prompt_tokens=9)
    group = PromptData(sums_root, tokenizer, config, 0, samples_per_prompt=8).batch(0, 8)
    assert len(group["prompt_ids"].unique(dim=0)) == 1
    batch = make_rollout(tiny).generate(group, step=0)
    assert len(batch["response_ids"].unique(dim=0)) > 1
    # The first of them is the one that a run with a single response to each prompt samples.
    alone = make_rollout(tiny).generate(PromptData(sums_root, tokenizer, config, 0).batch(0, 1), step=0)
    assert torch.equal(batch["response_ids"][:1], alone["response_ids"])


def test_a_model_with_a_cache_of_its_own_is_refused_before_it_samples(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_slurm.trainer.rollout.sampling.load_causal_lm", lambda path, **_: OwnCache())
    with pytest.raises(ConfigError, match=r"rollout.engine.*OwnCache.*vllm"):
        make_rollout(tiny)


class OwnCache(torch.nn.Module):
    def _supports_default_dynamic_cache(self) -> bool:
        return False


def test_the_gap_is_summed_over_valid_tokens_alone() -> None:
    engine = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, 0.0, 0.0]])
    actor = torch.tensor([[-1.5, -1.75, -9.0], [-1.0, float("nan"), -9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert gap_and_tokens(engine, actor, mask) == (0.75, 3.0)


def test_a_mean_gap_up_to_the_limit_passes() -> None:
    require_small_gap(0.75, 3.0, limit=0.25, step=0)
    require_small_gap(0.0, 0.0, limit=0.25, step=0)


@pytest.mark.parametrize("total", [0.76, float("nan"), float("inf")])
def test_a_larger_gap_or_none_at_all_is_refused_with_a_code_of_its_own(total: float) -> None:
    with pytest.raises(RolloutMismatch) as caught:
        require_small_gap(total, 3.0, limit=0.25, step=4)
    assert caught.value.exit_code is ExitCode.ROLLOUT
    line = caught.value.one_line()
    assert "step 5" in line
    assert "at most rollout.max_logprob_gap=0.25" in line


def test_the_limit_follows_the_precision_unless_it_is_set() -> None:
    assert gap_limit(None, "float32") < gap_limit(None, "bfloat16")
    assert gap_limit(0.5, "float32") == gap_limit(0.5, "bfloat16") == 0.5
