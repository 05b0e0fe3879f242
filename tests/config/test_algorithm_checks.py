"""What PPO and GRPO ask of the other values, and which models they train."""

from pathlib import Path

import pytest

from verl_slurm.config.checks.shared import complaints
from verl_slurm.config.load import load
from verl_slurm.config.roles import trained_roles
from verl_slurm.config.schema import RunConfig

GRPO = ("train.algorithm=grpo", "rollout.samples_per_prompt=8")


QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart_grpo.yaml"


def _load(tmp_path: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "c.yaml"
    path.write_text("name: x\n")
    return load(path, overrides)


def test_each_algorithm_trains_its_own_models(tmp_path: Path) -> None:
    assert trained_roles(_load(tmp_path).train) == ("actor", "critic")
    assert trained_roles(_load(tmp_path, *GRPO).train) == ("actor",)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.algorithm=grpo"], ["rollout.samples_per_prompt (found 1, expected 2 or more"]),
        (
            [*GRPO, "rollout.micro_batch_size_per_device=4"],
            [
                "rollout.micro_batch_size_per_device (found 4, expected a multiple of rollout.samples_per_prompt=8",
                "e.g. rollout.micro_batch_size_per_device=8",
            ],
        ),
        (
            ["rollout.samples_per_prompt=3"],
            ["rollout.micro_batch_size_per_device=18", "train.batch_size_per_device=66"],
        ),
        (
            [*GRPO, "train.kl_in=loss", "train.kl_estimator=k1"],
            ["train.kl_estimator", "set train.kl_estimator=auto"],
        ),
        (["train.advantage_scale=none"], ["train.advantage_scale", "or set train.algorithm=grpo"]),
        (
            [*GRPO, "checkpoint.components=[critic]", "checkpoint.partial_every_steps=1"],
            ["checkpoint.components", "what train.algorithm=grpo trains: actor"],
        ),
        (
            [
                *GRPO,
                "checkpoint.components=[actor]",
                "checkpoint.include_optimizer=true",
                "checkpoint.partial_every_steps=1",
            ],
            ["found all of them, and the optimizer"],
        ),
        (["train.loss_aggregation=token"], ["expected token_mean or sequence_mean or fixed_length"]),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_does(
    tmp_path: Path, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(Exception, match=".") as caught:
        _load(tmp_path, *overrides)
    for word in words:
        assert word in str(caught.value)


def test_several_responses_to_a_prompt_are_for_ppo_too(tmp_path: Path) -> None:
    config = _load(tmp_path, "rollout.samples_per_prompt=4", "train.kl_in=loss", "train.clip_ratio_high=0.28")
    assert complaints(config) == []


def test_the_quick_start_with_grpo_has_groups_and_no_critic() -> None:
    config = load(QUICKSTART)
    assert trained_roles(config.train) == ("actor",)
    assert config.train.batch_size_per_device // config.rollout.samples_per_prompt == 64
    assert config.train.kl_in == "loss"
