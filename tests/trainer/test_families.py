"""Each family of docs/models.md by itself: masks, positions, caches, heads, and what the table says of it."""

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from tests.families import TINY, build_family, tiny_config
from tests.made_once import made_once
from tests.trainer.test_rewards import make_classifier
from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.config.families import FAMILIES, right_attentions
from verl_slurm.config.schema import RolloutConfig
from verl_slurm.trainer import models
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.models import load_causal_lm, load_critic, logprobs, passage, run_passes, values
from verl_slurm.trainer.parallel.pipeline import Line, Stage
from verl_slurm.trainer.parallel.tensor import planned
from verl_slurm.trainer.reward.scoring import build_reward
from verl_slurm.trainer.rollout.sampling import HFRollout

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

LENGTHS, NEW = (3, 17, 9, 12), 6
KIND = {name: name.partition("-")[0] for name in TINY}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Any:
    def make(name: str) -> Path:
        return made_once(tmp_path_factory, name, lambda place: build_family(name, place / name, tiny)) / name

    return make


def _prompts(width: int = 20) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.full((len(LENGTHS), width), 256), torch.zeros(len(LENGTHS), width, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        ids[row, width - length :] = torch.randint(0, 250, (length,), generator=generator)
        mask[row, width - length :] = True
    return {"sample_id": torch.arange(len(LENGTHS)), "prompt_ids": ids, "prompt_mask": mask}


def _alone(batch: Batch, row: int) -> Batch:
    kept = batch["prompt_mask"][row]
    prompt = {"prompt_ids": batch["prompt_ids"][row][kept][None], "prompt_mask": kept[kept][None]}
    return {name: column[row : row + 1] for name, column in batch.items()} | prompt


@pytest.mark.parametrize("name", list(TINY))
def test_the_table_says_what_of_transformers_plan_is_not_followed(name: str) -> None:
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(tiny_config(name))
    try:
        planned(whole.base_model)
        found = ""
    except ConfigError as error:
        found = str(error.found).partition(": ")[2]
    wanted = FAMILIES[KIND[name]].tp
    assert found == wanted or (wanted and name in NEWER_PLANS), (
        "what the table promises holds in each release"
    )


@pytest.mark.parametrize("name", [name for name in TINY if FAMILIES[KIND[name]].pp])
def test_two_stages_one_after_the_other_say_what_the_whole_model_says(made: Any, name: str) -> None:
    given = passage(_with_responses(), torch.device("cpu"))
    group: Any = None
    for load in (load_causal_lm, load_critic):
        whole, *parts = (_untied(load(made(name))) for _ in range(3))
        for model in (whole, *parts):  # a critic's head begins at zero
            torch.nn.init.constant_(list(model.parameters())[-1], 0.5)
        first, last = (Stage(part, Line(index, 2, group)) for index, part in enumerate(parts))
        last._keep = given.keep
        with torch.no_grad():
            found = last(first(given.ids, given.mask, given.positions), given.mask, given.positions)
            assert torch.equal(found, models._call(whole, given))


def _untied(model: Any) -> Any:
    """Stages cannot share a weight."""
    head = getattr(model, "lm_head", None)
    if head is not None:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    return model


def _with_responses() -> Batch:
    return _prompts() | {
        "response_ids": torch.arange(NEW).expand(len(LENGTHS), NEW) + 40,
        "response_mask": torch.ones(len(LENGTHS), NEW, dtype=torch.bool),
    }


@pytest.mark.scenario("USE04")
def test_every_family_of_the_table_has_a_specimen() -> None:
    assert set(KIND.values()) == set(FAMILIES)


@pytest.mark.scenario("USE05")
@pytest.mark.parametrize("name", TINY)
def test_scores_are_those_of_sampling_and_of_each_row_alone(made: Any, name: str) -> None:
    """To rounding: a wrong mask, position or cache is 0.1 and more with these weights."""
    config = RolloutConfig(max_new_tokens=NEW, micro_batch_size_per_device=4)
    sampler = HFRollout(made(name), config, seed=3, eos_ids=[258], pad_id=256)
    batch = sampler.generate(_prompts(), step=0)
    model, critic = load_causal_lm(made(name)), load_critic(made(name))
    with torch.no_grad():
        torch.nn.init.normal_(critic.get_parameter("score.weight"))
        scored, valued = logprobs(model, batch, temperature=1.0), values(critic, batch)
        mask = batch["response_mask"]
        assert torch.std(scored[mask]) > 0.05
        torch.testing.assert_close(scored[mask], batch["logprobs"][mask], rtol=0, atol=1e-4)
        for row in range(len(LENGTHS)):
            alone, valid = _alone(batch, row), mask[row]
            there = logprobs(model, alone, temperature=1.0)[0]
            torch.testing.assert_close(scored[row][valid], there[valid], rtol=0, atol=1e-4)
            there = values(critic, alone)[0]
            torch.testing.assert_close(valued[row][valid], there[valid], rtol=1e-4, atol=1e-4)


@pytest.mark.scenario("USE05")
@pytest.mark.parametrize("name", TINY)
def test_a_training_pass_sees_what_scoring_sees(made: Any, name: str) -> None:
    model = load_causal_lm(made(name))
    batch = _with_responses()
    seen: list[Tensor] = []

    def loss_of(logits: Tensor, rows: Tensor) -> Tensor:
        assert logits.shape[:2] == (len(rows), NEW + 1)
        tokens = batch["response_ids"][rows].unsqueeze(-1)
        seen.append(torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, tokens)[..., 0])
        return seen[-1].sum()

    run_passes(model, passage(batch, torch.device("cpu")), 2, loss_of)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.cat(seen), logprobs(model, batch, temperature=1.0), rtol=0, atol=1e-4
        )
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    assert any(parameter.grad is not None for parameter in model.parameters())


NOT_EVERY_RELEASE = {
    "gptj": "transformers 5.10 has eager alone, 5.24 has sdpa as well",
    "gemma2": "transformers 5.10 has an sdpa that leaves out the cap of the scores, 5.24 has none",
}
"""Of these families the allowed releases of transformers say different things. The table has what they share."""
NEWER_PLANS = frozenset({"gpt_oss", "gptj", "granitemoe", "lfm2", "nemotron", "phimoe", "qwen2_moe"})
"""The same of their tensor-parallel plans: 5.10 has none, or a part, and 5.24 has one, or a whole."""


@pytest.mark.scenario("USE06")
@pytest.mark.parametrize("name", TINY)
def test_the_table_says_of_attention_what_transformers_does(made: Any, name: str) -> None:
    model_class: Any = AutoModelForCausalLM._model_mapping[type(tiny_config(name))]
    family = FAMILIES[KIND[name]]
    assert model_class._supports_flash_attn == family.flash
    assert model_class._supports_sdpa == family.sdpa or (not family.sdpa and name in NOT_EVERY_RELEASE)
    model: Any = load_causal_lm(made(name))
    assert model.config._attn_implementation == ("sdpa" if family.sdpa else "eager")


@pytest.mark.scenario("USE06")
@pytest.mark.parametrize("name", TINY)
def test_every_attention_that_is_offered_computes_the_same(made: Any, name: str) -> None:
    """A kernel drops silently what it does not know, such as a cap of the scores."""
    batch = _with_responses()
    offered = [word for word in right_attentions(tiny_config(name).to_dict()) if word != "flash_attention_2"]
    found: list[Tensor] = []
    for word in offered:
        model: Any = load_causal_lm(made(name), attention=word)
        assert model.config._attn_implementation == word
        with torch.no_grad():
            found.append(logprobs(model, batch, temperature=1.0))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-4)


@pytest.mark.scenario("USE06")
@pytest.mark.parametrize("name", ["gemma2", "vaultgemma"])  # in the table, and not in it
def test_scores_that_are_capped_are_not_left_to_sdpa(name: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(name, **TINY["gemma2"])
    AutoModelForCausalLM.from_config(config).save_pretrained(str(tmp_path))
    model: Any = load_causal_lm(tmp_path)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ConfigError, match="found sdpa, .*expected one of auto, eager"):
        load_causal_lm(tmp_path, attention="sdpa")


@pytest.mark.scenario("USE06")
def test_alibi_is_not_left_to_falcons_eager_attention_which_adds_it_twice(made: Any) -> None:
    with pytest.raises(ConfigError, match="found eager, with FalconForCausalLM, expected one of auto, sdpa"):
        load_causal_lm(made("falcon-alibi"), attention="eager")


@pytest.mark.scenario("USE05")
@pytest.mark.parametrize("name", TINY)
def test_a_sequence_may_be_as_long_as_the_table_says_and_no_longer(made: Any, name: str) -> None:
    model, family = load_causal_lm(made(name)), FAMILIES[KIND[name]]

    def run(length: int) -> Tensor:
        ids = torch.full((1, length), 65)
        batch = {"prompt_ids": ids, "prompt_mask": ids > 0, "response_ids": ids[:, :1]}
        return logprobs(model, batch | {"response_mask": ids[:, :1] > 0}, temperature=1.0)

    with torch.no_grad():
        assert run(63).isfinite().all()
        if family.positions is None:
            assert run(99).isfinite().all()
            return
        key, usual = family.positions
        assert getattr(tiny_config(name), key) == 64
        assert getattr(type(tiny_config(name))(), key) == usual
        with pytest.raises((IndexError, RuntimeError)):
            run(64)


GENERIC = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "phi",
    "phi3",
    "gemma2",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
)
"""Their runs of older versions have a critic of Hugging Face's token classification class, and must resume."""


@pytest.mark.scenario("USE04")
@pytest.mark.parametrize("name", GENERIC)
def test_a_critic_has_the_names_and_the_bits_of_hugging_faces_token_classifier(made: Any, name: str) -> None:
    critic = load_critic(made(name))
    theirs = AutoModelForTokenClassification.from_pretrained(
        str(made(name)), num_labels=1, attn_implementation=critic.config._attn_implementation
    ).eval()
    shapes = [[(key, value.shape) for key, value in model.state_dict().items()] for model in (critic, theirs)]
    assert shapes[0] == shapes[1]
    assert [key for key, _ in critic.named_parameters()] == [key for key, _ in theirs.named_parameters()]
    assert not any(parameter.any() for parameter in critic.score.parameters())
    critic.load_state_dict(theirs.state_dict())
    prompts = _prompts()
    ids, mask = prompts["prompt_ids"], prompts["prompt_mask"].long()
    words = {
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "use_cache": False,
    }
    for model in (critic, theirs):
        model(input_ids=ids, **words).logits.square().mean().backward()
    assert torch.equal(critic(ids, **words).logits, theirs(ids, **words).logits)
    for (key, mine), other in zip(critic.named_parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), key
        assert mine.grad is None or torch.equal(mine.grad, other.grad), key


def _with_words(source: Path, target: Path, **words: object) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | words))
    return target


@pytest.mark.scenario("SEC10")
def test_kernels_that_a_config_json_names_are_never_asked_for(
    made: Any, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "transformers.integrations.hub_kernels.load_and_register_attn_kernel",
        lambda name, *_, **__: asked.append(name),
    )
    strange = {"attn_implementation": "eve/kernel", "experts_implementation": "sonicmoe"}
    model: Any = load_causal_lm(_with_words(made("qwen3_moe"), tmp_path / "actor", **strange))
    assert model.config._attn_implementation == "sdpa"
    assert model.config._experts_implementation in ("grouped_mm", "eager")
    critic: Any = load_critic(tmp_path / "actor")
    assert critic.config._attn_implementation == "sdpa"
    judge = make_classifier(tmp_path / "judge", tiny)
    reward = build_reward(f"classifier:{_with_words(judge, tmp_path / 'strange', **strange)}")
    texts = ["1+1=", "2+2="]
    assert torch.equal(reward(texts, texts, texts), build_reward(f"classifier:{judge}")(texts, texts, texts))
    assert asked == []


@pytest.mark.scenario("USE04")
def test_a_rank_refuses_an_encoder_with_a_decoder_in_one_line(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2).save_pretrained(str(tmp_path))
    with pytest.raises(DataError, match="not a causal language model.*found model_type t5") as caught:
        load_causal_lm(tmp_path)
    assert len(str(caught.value)) < 300


@pytest.mark.scenario("USE04")
def test_a_rank_refuses_a_state_space_model_before_it_samples(tmp_path: Path, tiny: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=264, hidden_size=16, num_hidden_layers=1)).save_pretrained(
        str(tmp_path)
    )
    with pytest.raises(ConfigError, match="keeps what it has read in a form of its own"):
        HFRollout(tmp_path, RolloutConfig(), seed=0, eos_ids=[258], pad_id=256)


@pytest.mark.scenario("USE06")
def test_flash_attention_without_its_package_is_refused_and_nothing_is_downloaded(made: Any) -> None:
    if find_spec("flash_attn") is not None:
        pytest.skip("flash_attn is here")
    with pytest.raises(ConfigError, match="FlashAttention is not installed here"):
        load_causal_lm(made("llama"), attention="flash_attention_2")
    with pytest.raises(ConfigError, match="found sdpa, with GptOssForCausalLM"):
        load_causal_lm(made("gpt_oss"), attention="sdpa")
