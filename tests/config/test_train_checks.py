"""Values of learning rates, evaluation and best checkpoints that must go together."""

import pytest

from verl_slurm.config.checks.shared import complaints
from verl_slurm.config.load import parse_config


def _wrong(text: str) -> list[str]:
    from verl_slurm.base.errors import ConfigError

    try:
        config = parse_config(text.encode(), "here")
    except ConfigError as error:
        return [error.one_line()]
    return [complaint.key for complaint in complaints(config)]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("train: {lr_schedule: wsd}", "train.lr_decay_steps (found 0, expected 1 to 30"),
        ("train: {lr_schedule: wsd, warmup_steps: 5, lr_decay_steps: 26}", "expected 1 to 25"),
        ("train: {lr_decay_steps: 3}", "only wsd has it"),
        ("train: {lr_min_ratio: 0.1}", "a rate that never falls"),
        ("train: {lr_schedule: exponential}", "constant or linear or cosine or inverse_sqrt or wsd"),
        ("train: {eval_every_steps: 5}", "data.eval_root or data.eval_fraction"),
        ("data: {eval_root: a, eval_fraction: 0.1}", "one of the two"),
        ("data: {eval_root: ' '}", "data.eval_root"),
        ("data: {eval_fraction: 1.0}", "data.eval_fraction"),
        ("checkpoint: {keep_best: 1}", "of evaluations that are never made"),
        ("checkpoint: {keep_best: 1, best_metric: 'a b'}", "'a b', which no step of this run has"),
        ("checkpoint: {best_mode: most}", "max or min"),
    ],
)
def test_what_does_not_go_together_is_named(text: str, part: str) -> None:
    found = _wrong(text + "\n")
    assert len(found) == 1
    assert part in found[0]


_EVALUATED = "\ntrain: {eval_every_steps: 5}\ndata: {eval_fraction: 0.1}"
_GRPO = "\nrollout: {samples_per_prompt: 4}\ntrain: {algorithm: grpo}"


@pytest.mark.parametrize(
    ("metric", "rest", "known", "unknown", "near"),
    [
        ("rewrad", "", "reward", "eval/reward", "reward"),
        ("critic_grad_nrom", "", "critic_grad_norm", "kl_loss", "critic_grad_norm"),
        ("step_s", "", "kl", "step_s", "reward"),  # a time: no checkpoint has it
        ("eval/rewrad", _EVALUATED, "eval/reward", "kl_loss", "eval/reward"),
        ("value_loss", _GRPO, "kl", "value_loss", "reward"),
        ("kl_los", "\ntrain: {kl_in: loss}", "kl_loss", "eval/reward", "kl_loss"),
    ],
)
def test_a_metric_that_no_step_of_the_run_will_have_is_refused_with_those_it_will_have(
    metric: str, rest: str, known: str, unknown: str, near: str
) -> None:
    (found,) = _wrong(f"checkpoint: {{keep_best: 1, best_metric: {metric}}}{rest}\n")
    listed = found.partition("expected one of ")[2].partition(")")[0].split(", ")
    assert known in listed
    assert unknown not in listed
    assert found.endswith(f"e.g. checkpoint.best_metric={near}")


@pytest.mark.parametrize(
    "text",
    [
        "train: {lr_schedule: wsd, lr_decay_steps: 30}",
        "train: {lr_schedule: cosine, lr_min_ratio: 0.1}",
        "train: {eval_every_steps: 5}\ndata: {eval_fraction: 0.1}\ncheckpoint: {keep_best: 2}",
        "train: {eval_every_steps: 5}\ndata: {eval_root: 'builtin:arithmetic'}",
        "checkpoint: {keep_best: 2, best_metric: kl, best_mode: min}",
        "data: {eval_fraction: 0.1}",  # held out all the same
    ],
)
def test_what_goes_together_is_taken(text: str) -> None:
    assert _wrong(text + "\n") == []
