"""The built-in model: built once, the same bits, and able to be taught."""

from pathlib import Path

import pytest
import torch

from verl_slurm.config.load import load
from verl_slurm.config.schema import DataConfig
from verl_slurm.trainer.data import PromptData, load_tokenizer
from verl_slurm.trainer.quickstart import tiny_model
from verl_slurm.trainer.quickstart.__main__ import resolve_data, resolve_model
from verl_slurm.trainer.reward.scoring import build_reward, decode_responses
from verl_slurm.trainer.rollout.sampling import HFRollout

pytestmark = pytest.mark.torch

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_the_working_of_a_sum() -> None:
    assert tiny_model.worked("27+15=", "42") == "12 04 42"
    assert tiny_model.worked("59+69=", "128") == "18 12 128"


def test_building_is_the_same_bits_and_leaves_torch_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_model, "_WARM_STEPS", 20)
    before = torch.get_rng_state(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    first, second = (tiny_model.build_model(tmp_path / name) for name in ("first", "second"))
    files = sorted(path.name for path in first.iterdir())
    assert files == sorted(path.name for path in second.iterdir())
    for name in files:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
        assert (first / name).stat().st_mode & 0o077 == 0
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    tokenizer = load_tokenizer(first)
    for text in ("27+15=", "a b\n1", "Zürich 𝔸"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("27+15=")["input_ids"]) == 6
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    monkeypatch.setattr(tiny_model, "_warm_start", None)
    assert tiny_model.build_model(first) == first, "not built again"


@pytest.mark.long
@pytest.mark.variant
def test_the_warm_started_model_has_a_reward_to_climb(tmp_path: Path) -> None:
    """Sampled as the quick start samples: right in form, seldom right in value; greedy, mostly right."""
    config = load(QUICKSTART, [])
    path, root = resolve_model(config.model.path, tmp_path), resolve_data(config.data.root, tmp_path)
    tokenizer = load_tokenizer(path)
    data = PromptData(root, tokenizer, DataConfig(max_prompt_tokens=config.data.max_prompt_tokens), 0)
    rollout = HFRollout(
        path,
        config.rollout,
        seed=0,
        eos_ids=[int(tokenizer.eos_token_id)],
        pad_id=int(tokenizer.pad_token_id),
    )
    batch = rollout.generate(data.batch(0, 256), step=0)
    ids = batch["sample_id"]
    scores = build_reward(config.model.reward)(
        data.prompts(ids), decode_responses(tokenizer, batch), data.answers(ids)
    )
    assert 0.15 < scores.mean() < 0.45
    assert (scores > 0).float().mean() > 0.9
    assert 0.02 < (scores == 1.0).float().mean() < 0.4
