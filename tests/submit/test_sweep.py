"""The combinations of a sweep: their names, their words, and what is refused."""

import pytest

from verl_slurm.base.errors import ConfigError
from verl_slurm.submit.submission_plan import swept_runs


def test_each_combination_is_a_run_with_a_name() -> None:
    runs = swept_runs(["train.actor_lr=1e-6,3e-6", "train.steps=50", "seed=0,1"])
    assert [run.label for run in runs] == [
        "actor_lr1e-6-seed0",
        "actor_lr1e-6-seed1",
        "actor_lr3e-6-seed0",
        "actor_lr3e-6-seed1",
    ]
    assert runs[1].words == ("train.actor_lr=1e-6", "train.steps=50", "seed=1")
    # Keys with the same last part keep their sections.
    (first, *_) = swept_runs(["train.x=1,2", "rollout.x=3,4"])
    assert first.label == "train.x1-rollout.x3"


def test_commas_in_brackets_and_quotes_separate_nothing() -> None:
    runs = swept_runs(["slurm.extra={a: 1, b: 2},{a: 2}", 'x="1,2",3', "y=[1,2]"])
    assert [run.words for run in runs][:2] == [
        ("slurm.extra={a: 1, b: 2}", 'x="1,2"', "y=[1,2]"),
        ("slurm.extra={a: 1, b: 2}", "x=3", "y=[1,2]"),
    ]
    assert [run.label for run in runs] == [
        "extraa_1_b_2-x1_2",
        "extraa_1_b_2-x3",
        "extraa_2-x1_2",
        "extraa_2-x3",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["seed=1"], "nothing to sweep"),
        ([], "nothing to sweep"),
        (["seed=0,,1"], "a value of the sweep is empty"),
        (["seed=0,1,0"], "the same name"),
        (["seed"], "not an override"),
        (["a=" + ",".join(map(str, range(40))), "b=" + ",".join(map(str, range(40)))], "too many runs"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        swept_runs(words)
