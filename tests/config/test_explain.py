"""`config explain`: what the code itself tells of a key."""

from collections.abc import Callable
from typing import Any

import pytest

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.cli.__main__ import main
from verl_slurm.config.explain import Explained, all_keys, explain_fully
from verl_slurm.config.load import parse_config

Told = Callable[..., str]


@pytest.fixture(scope="module")
def every() -> dict[str, Explained]:
    sections = dict.fromkeys(key.key.partition(".")[0].removesuffix("[]") for key in all_keys())
    return {key.key: key for section in sections for key in explain_fully(section)}


def test_every_key_is_explained_and_none_is_called_explain(every: dict[str, Explained]) -> None:
    assert list(every) == [key.key for key in all_keys()]
    assert [name for name, key in every.items() if not key.meaning] == []
    assert not any(name.partition(".")[0] == "explain" for name in every)
    assert "distributed.nodes" in every["distributed.dp_size"].related
    assert "distributed.dp_size" in every["distributed.nodes"].related


def test_the_unit_is_that_of_the_name_and_what_may_change_is_told(every: dict[str, Explained]) -> None:
    units = {"slurm.time_limit_min": "minutes", "slurm.signal_lead_s": "seconds", "health.min_free_mb": "MiB"}
    for key, unit in (units | {"train.lr_min_ratio": "", "observability.metrics_port": ""}).items():
        assert every[key].unit == unit
    for key in ("slurm.partition", "env", "services.NAME.port"):
        assert every[key].may_change == "yes"
    assert every["train.kl_coef"].may_change == "no"
    assert every["train.steps"].may_change == "to the steps that are done, or more"
    layout = "together with the number of ranks, if a step stays the same"
    assert every["distributed.dp_size"].may_change == layout


def test_every_example_is_a_value_of_its_key(every: dict[str, Explained]) -> None:
    words = [key.example for name, key in every.items() if key.example.startswith(f"{name}=")]
    assert len(words) > 120
    refused = [(word, error.what) for word in words if (error := refusal(word)) is not None]
    # Of the right type; alone it may need another key beside it.
    assert [word for word, what in refused if not what.startswith("the values do not go together")] == []


def refusal(word: str) -> ConfigError | None:
    try:
        # A container has to have an image, whatever else is said of it.
        image = b"slurm: {container: {image: /a.sif}}\n" if word.startswith("slurm.container.") else b""
        parse_config(image, "an example", [word])
    except ConfigError as error:
        return error
    return None


def test_an_example_is_not_the_default_where_there_is_a_choice(every: dict[str, Explained]) -> None:
    assert every["train.kl_in"].example == "train.kl_in=loss"
    assert every["env"].example == "env={NCCL_DEBUG: WARN}", "as the meaning has it"


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    def tell(*words: str, code: int = 0) -> str:
        assert main(["config", *words]) == code
        shown: Any = capsys.readouterr()
        return str(shown.out or shown.err)

    return tell


def test_a_key_is_explained_with_all_that_the_code_says_of_it(told: Told) -> None:
    text = told("explain", "train.kl_in")
    assert "train.kl_in: reward | loss, default reward" in text
    assert "the penalty is part of what is maximised" in text
    assert "may change  no" in text
    assert "example     verl-slurm submit FILE train.kl_in=loss" in text
    assert "checkpoint.min_every_steps" in told("explain", "checkpoint.intervals"), "whose meaning names it"
    assert "may change" not in told("train.kl_in"), "a key that is only named stays short"
    assert "may change" not in told("explain", "slurm")


def test_a_near_miss_names_the_key_that_was_meant(told: Told) -> None:
    assert "expected train.steps" in told("explain", "train.step", code=ExitCode.CONFIG)
    assert "explain needs a KEY" in told("explain", code=ExitCode.USAGE)
