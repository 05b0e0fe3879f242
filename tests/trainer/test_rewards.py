"""Rewards: the rule by hand, a real tiny sequence classifier, and a function of the user's."""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing  # type: ignore[import-untyped]
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from tests.builders import run_config
from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.config.reward_spec import RewardSpec, parse_reward
from verl_slurm.submit.checks.model_and_reward import check_reward
from verl_slurm.trainer.data import load_tokenizer
from verl_slurm.trainer.reward.python import PythonReward, RewardRaised, load_python_reward
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
    directory = make_classifier(tmp_path / "rm", tiny)
    reward = build_reward(f"classifier:{directory}")
    prompts, responses = ["1+1=", "10+20="] * 3, ["2", "30", "3", "31", "12 4", "x"]
    scores = reward(prompts, responses, [""] * 6)
    assert scores.shape == (6,)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()
    assert len(set(scores.tolist())) == 6
    assert torch.equal(scores, reward(prompts, responses, ["ignored"] * 6))
    alone = torch.cat([reward([p], [r], [""]) for p, r in zip(prompts, responses, strict=True)])
    torch.testing.assert_close(scores, alone, rtol=0, atol=1e-5)
    pieces = ClassifierReward(directory, batch_size=4)
    torch.testing.assert_close(pieces(prompts, responses, [""] * 6), scores)
    assert pieces([], [], []).shape == (0,)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_classifier_sees_one_begin_token_where_the_chat_template_wrote_one(
    tmp_path: Path, tiny: Path, side: str
) -> None:
    directory = make_classifier(tmp_path / "rm", tiny)
    tokenizer = load_tokenizer(tiny)
    # Token 258 of the tiny model's, as a BOS that the tokenizer puts before each text by itself.
    begin = str(tokenizer.convert_ids_to_tokens(258))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, 258)]
    )
    tokenizer.bos_token, tokenizer.padding_side = begin, side
    tokenizer.save_pretrained(str(directory))
    assert load_tokenizer(directory)("1")["input_ids"][0] == 258
    reward = build_reward(f"classifier:{directory}")
    plain, responses, answers = ["1+1=", "10+20="], ["2", "30"], ["", ""]
    expected = reward(plain, responses, answers)
    for prompts in ([begin + plain[0], begin + plain[1]], [begin + plain[0], plain[1]]):
        assert torch.equal(reward(prompts, responses, answers), expected)


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


def test_a_classifier_whose_padding_is_token_0_is_not_asked_beyond_its_position_embeddings(
    tmp_path: Path, tiny: Path
) -> None:
    tokenizer = load_tokenizer(tiny)
    config = RobertaConfig(
        vocab_size=264,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        num_labels=1,
        pad_token_id=0,
    )
    RobertaForSequenceClassification(config).save_pretrained(str(tmp_path / "rm"))
    tokenizer.save_pretrained(str(tmp_path / "rm"))
    reward = build_reward(f"classifier:{tmp_path / 'rm'}")
    # RoBERTa's positions begin behind that of the padding: of 8 rows 7 are left.
    with pytest.raises(DataError, match="8 tokens, expected at most 7"):
        reward(["1+1=1+"], ["22"], ["2"])


PROMPTS, RESPONSES, ANSWERS = ["1+1=", "1+2=", "2+2="], ["2", "3", "x"], ["2", "3", "4"]


def _score(returned: object) -> torch.Tensor:
    return PythonReward(lambda *_: returned, "python:m:f")(PROMPTS, RESPONSES, ANSWERS)


@pytest.mark.parametrize(
    "returned",
    [[1, 0.5, True], (1.0, 0.5, 1.0), np.array([1, 0.5, 1], np.float32), torch.tensor([1, 0.5, 1])],
)
def test_any_list_of_numbers_is_float32(returned: object) -> None:
    scores = _score(returned)
    assert scores.dtype == torch.float32
    assert scores.tolist() == [1.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (None, "found NoneType"),
        (1.0, "found float"),
        ("abc", "found str"),
        ([1.0, 2.0], "2 scores; the first without a score of its own is sample 2 of 3 .*'2\\+2='.*'x'"),
        ([1.0] * 4, "4 scores"),
        ([1.0, math.nan, 1.0], "nan for sample 1 of 3 .*'1\\+2='.*'3'"),
        ([1.0, 1.0, math.inf], "inf for sample 2"),
        ([1e39, 1.0, 1.0], "1e\\+39 for sample 0"),  # a float, and no float32
        ([10**400, 1.0, 1.0], "for sample 0"),
        ([1.0, None, 1.0], "NoneType for sample 1"),
        ([1.0, "1", 1.0], "str for sample 1"),
        ([[1.0], [1.0], [1.0]], "list for sample 0"),
    ],
)
def test_what_is_no_reward_is_refused_and_the_sample_named(returned: object, found: str) -> None:
    with pytest.raises(DataError, match=found) as caught:
        _score(returned)
    assert caught.value.exit_code is ExitCode.DATA


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1 / 0 for _ in r]", r"ZeroDivisionError: division by zero at .*r\.py:2.; correct it"),
        ("open('gone')", r"No such file or directory: 'gone' at .*set code\.tree to the folder"),
    ],
)
def test_an_exception_ends_with_one_line_that_names_its_place(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "r.py").write_text(f"def score(p, r, a):\n    return {line}\n")
    reward = build_reward(f"python:{tmp_path / 'r.py'}:score")
    with pytest.raises(RewardRaised, match=said) as caught:
        reward(PROMPTS, RESPONSES, ANSWERS)
    assert caught.value.exit_code is ExitCode.DATA


def test_a_function_finds_the_modules_beside_its_file_behind_all_others(tmp_path: Path) -> None:
    (tmp_path / "vs_units.py").write_text("scale = 2.0\n")
    (tmp_path / "json.py").write_text("raise SystemExit('the neighbour of that name')\n")
    source = "import json\nfrom vs_units import scale\ndef score(p, r, a):\n    return [scale for _ in r]\n"
    (tmp_path / "r.py").write_text(source)
    reward = build_reward(f"python:{tmp_path / 'r.py'}:score")
    assert reward(PROMPTS, RESPONSES, ANSWERS).tolist() == [2.0] * len(RESPONSES)


def test_a_function_cannot_change_the_lists_of_the_training() -> None:
    def greedy(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
        prompts.clear()
        answers.clear()
        return [float(len(responses.pop())) for _ in range(3)]

    mine = list(RESPONSES)
    assert PythonReward(greedy, "f")(PROMPTS, mine, ANSWERS).tolist() == [1.0, 1.0, 1.0]
    assert mine == RESPONSES


def test_two_versions_of_one_file_live_side_by_side_and_are_what_was_hashed(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    spec = RewardSpec("python", str(file), "score")
    text = "def score(p, r, a):\n    return [{}] * len(r)\n"
    file.write_text(text.format(1.5))
    first, digest = load_python_reward(spec), hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_text(text.format(2.5))
    with pytest.raises(DataError, match="not what the first rank has"):
        load_python_reward(spec, digest)
    second = load_python_reward(spec, hashlib.sha256(file.read_bytes()).hexdigest())
    assert first(["p"], ["r"], ["a"]).tolist() == [1.5]
    assert second(["p"], ["r"], ["a"]).tolist() == [2.5]


def test_a_source_that_does_not_run_or_binds_no_function_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nosuch_module_at_all\ndef score(p, r, a): ...\n")
    with pytest.raises(DataError, match="ModuleNotFoundError"):
        build_reward(f"python:{tmp_path / 'broken.py'}:score")
    (tmp_path / "exits.py").write_text("def score(p, r, a): ...\nraise SystemExit(3)\n")
    with pytest.raises(DataError, match="SystemExit: 3"):
        build_reward(f"python:{tmp_path / 'exits.py'}:score")
    (tmp_path / "number.py").write_text("score = 3\n")
    with pytest.raises(ConfigError, match="found int"):
        build_reward(f"python:{tmp_path / 'number.py'}:score")


def test_a_module_s_function_is_a_reward_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vs_my_reward.py").write_text(
        "def score(p, r, a):\n    return [float(x == y) for x, y in zip(r, a)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert build_reward("python:vs_my_reward:score")(PROMPTS, RESPONSES, ANSWERS).tolist() == [1.0, 1.0, 0.0]


def test_a_module_that_was_changed_since_it_was_imported_is_what_was_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "judges_of_today"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "scale.py").write_text("ONE = 1.0\n")
    file = package / "judge.py"
    file.write_text("from .scale import ONE\ndef score(p, r, a):\n    return [ONE] * len(r)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = parse_reward("python:judges_of_today.judge:score")
    assert spec is not None
    before = load_python_reward(spec)
    file.write_text("from .scale import ONE\ndef score(p, r, a):\n    return [ONE + 6] * len(r)\n")
    after = load_python_reward(spec, hashlib.sha256(file.read_bytes()).hexdigest())
    assert [reward(["p"], ["r"], ["a"]).tolist() for reward in (before, after)] == [[1.0], [7.0]]
