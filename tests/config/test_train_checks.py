"""Values of learning rates, evaluation and best checkpoints that must go together."""

import pytest

from verl_slurm.config.checks import complaints
from verl_slurm.config.load import parse_config


def _wrong(text: str) -> list[str]:
    from verl_slurm.errors import ConfigError

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
        ("checkpoint: {keep_best: 1, best_metric: 'a b'}", "a metric's name"),
        ("checkpoint: {best_mode: most}", "max or min"),
    ],
)
def test_what_does_not_go_together_is_named(text: str, part: str) -> None:
    found = _wrong(text + "\n")
    assert len(found) == 1
    assert part in found[0]


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
