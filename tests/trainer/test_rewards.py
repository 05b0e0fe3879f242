"""Rewards: the rule by hand, and a real tiny sequence classifier."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from tests.builders import run_config
from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.submit.checks.model_and_reward import check_reward
from verl_slurm.trainer.data import load_tokenizer
from verl_slurm.trainer.reward.scoring import ClassifierReward, arithmetic, build_reward, decode_responses

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("123", 1.0),
        ("12 04 123", 1.0),  # the working is not judged
        ("124", 0.1 + 0.2 * 2 / 3),
        ("923", 0.1 + 0.2 * 2 / 3),
        ("999", 0.1),
        ("12", 0.1),
        ("-123", 0.1),
        ("", 0.0),
        ("12a", 0.0),
        ("١٢٣", 0.0),  # digits to Python's isdigit, not to us
        ("123 ?", 0.0),
    ],
)
def test_the_arithmetic_rule_by_hand(response: str, score: float) -> None:
    assert arithmetic(response, "123") == pytest.approx(score)


def test_a_rule_reward_is_one_float32_a_sample() -> None:
    scores = build_reward("rule:arithmetic")(["1+1=", "1+2="], ["2", "4"], ["2", "3"])
    torch.testing.assert_close(scores, torch.tensor([1.0, 0.1]))
    assert scores.dtype == torch.float32


@pytest.mark.parametrize("spec", ["rule:none", "arithmetic", "classifier:", "", "model:x"])
def test_an_unknown_reward_is_refused_with_the_known_ones(spec: str) -> None:
    with pytest.raises(ConfigError, match="rule:arithmetic"):
        build_reward(spec)


def test_decoding_skips_padding_special_tokens_and_ids_beyond_the_tokenizer(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    ids = [*tokenizer("4 2")["input_ids"], 263, tokenizer.eos_token_id, tokenizer.pad_token_id]
    batch = {
        "response_ids": torch.tensor([ids]),
        "response_mask": torch.tensor([[True] * (len(ids) - 1) + [False]]),
    }
    assert decode_responses(tokenizer, batch) == ["4 2"]


def make_classifier(directory: Path, tiny: Path, *, num_labels: int = 1) -> Path:
    tokenizer = load_tokenizer(tiny)
    config = Qwen2Config(
        vocab_size=264,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_labels=num_labels,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForSequenceClassification(config).save_pretrained(str(directory))
    tokenizer.save_pretrained(str(directory))
    return directory


def test_a_classifier_is_read_at_its_last_token_whatever_padding_its_config_names(
    tmp_path: Path, tiny: Path
) -> None:
    directory = make_classifier(tmp_path / "rm", tiny)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"pad_token_id": 5}))
    reward = build_reward(f"classifier:{directory}")
    together = reward(["1+1=", "100+200="], ["2", "300"], ["", ""])
    torch.testing.assert_close(together[:1], reward(["1+1="], ["2"], [""]))


def test_a_classifier_scores_prompt_and_response_together(tmp_path: Path, tiny: Path) -> None:
    reward = build_reward(f"classifier:{make_classifier(tmp_path / 'rm', tiny)}")
    prompts, responses = ["1+1=", "10+20="] * 3, ["2", "30", "3", "31", "12 4", "x"]
    scores = reward(prompts, responses, [""] * 6)
    assert scores.shape == (6,)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()
    assert len(set(scores.tolist())) == 6
    assert torch.equal(scores, reward(prompts, responses, ["ignored"] * 6))
    alone = torch.cat([reward([p], [r], [""]) for p, r in zip(prompts, responses, strict=True)])
    torch.testing.assert_close(scores, alone, rtol=0, atol=1e-5)


def test_a_classifier_scores_in_pieces_what_it_scores_at_once(tmp_path: Path, tiny: Path) -> None:
    directory = make_classifier(tmp_path / "rm", tiny)
    texts = [str(n) for n in range(7)]
    whole = ClassifierReward(directory)(texts, texts, texts)
    torch.testing.assert_close(ClassifierReward(directory, batch_size=3)(texts, texts, texts), whole)
    assert ClassifierReward(directory)([], [], []).shape == (0,)


def test_a_model_without_a_reward_head_is_refused_instead_of_filled_with_noise(tiny: Path) -> None:
    with pytest.raises(DataError, match=r"lacks parameters.*score"):
        build_reward(f"classifier:{tiny}")


def test_two_labels_or_no_model_are_refused(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(DataError, match="2 labels"):
        build_reward(f"classifier:{make_classifier(tmp_path / 'two', tiny, num_labels=2)}")
    with pytest.raises(DataError, match="there is no model"):
        build_reward(f"classifier:{tmp_path / 'none'}")


def test_a_text_beyond_a_classifiers_positions_is_refused_before_the_forward_pass(
    tmp_path: Path, tiny: Path
) -> None:
    directory = tmp_path / "rm"
    load_tokenizer(tiny).save_pretrained(str(directory))
    config = GPT2Config(vocab_size=264, n_embd=16, n_layer=1, n_head=2, n_positions=8, num_labels=1)
    GPT2ForSequenceClassification(config).save_pretrained(str(directory))
    reward = build_reward(f"classifier:{directory}")
    assert len(reward(["1+1="], ["2"], [""])) == 1
    with pytest.raises(DataError, match="found 9 tokens, expected at most 8"):
        reward(["1+1="], ["22222"], [""])
    [note] = check_reward(f"classifier:{directory}", run_config())
    assert "was made for 8 tokens" in note


def test_a_classifier_that_gives_no_number_is_refused_with_the_response(tmp_path: Path, tiny: Path) -> None:
    reward = ClassifierReward(make_classifier(tmp_path / "rm", tiny))
    reward._model.score.weight.fill_(float("nan"))
    with pytest.raises(DataError, match=r"no reward.*nan for prompt '1\+1=', response '2'"):
        reward(["1+1="], ["2"], ["2"])
