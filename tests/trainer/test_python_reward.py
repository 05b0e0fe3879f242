"""A function of the user's as the reward: what it gives is believed only where it is a reward."""

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.config.reward_spec import RewardSpec, parse_reward
from verl_slurm.trainer.reward.python import PythonReward, RewardRaised, load_python_reward
from verl_slurm.trainer.reward.scoring import build_reward

pytestmark = pytest.mark.torch

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


def test_an_exception_ends_with_one_line_that_names_its_place(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def score(p, r, a):\n    return [1 / 0 for _ in r]\n")
    reward = build_reward(f"python:{tmp_path / 'r.py'}:score")
    with pytest.raises(RewardRaised, match=r"ZeroDivisionError: division by zero at .*r\.py:2") as caught:
        reward(PROMPTS, RESPONSES, ANSWERS)
    assert caught.value.exit_code is ExitCode.DATA


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
