"""`verl-slurm plan`: of a configuration about which nothing is known, and of a run that was interrupted."""

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.plan.plan_inputs import LABELS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A real run of 50 steps, preempted once and with a rank killed twice, by its journals."""
    made = tmp_path / "run"
    shutil.copytree(ROOT / "tests/plan/recorded/calibration", made)
    text = (ROOT / "configs/quickstart.yaml").read_text().replace("steps: 24", "steps: 50")
    (made / "run.yaml").write_text(text.replace("runtime_every_steps: 5", "runtime_every_steps: 10"))
    return made


def test_a_plan_without_any_measurement_says_so(cli: Cli) -> None:
    result = cli("plan", "quickstart", "--no-ask", "--simulations", 20)
    assert result.code == ExitCode.OK, result.err
    assert "Nothing of this run was measured" in result.out
    told = cli("plan", "quickstart", "--no-ask", "--simulations", 20, "--json").json
    inputs = told["plan"]["inputs"]
    assert inputs.keys() == LABELS.keys()
    assert inputs["step_s"]["source"] == "assumed"
    assert told["back"] is None


def test_a_run_is_planned_by_its_own_times_and_its_interruptions_are_repeated(cli: Cli, run: Path) -> None:
    result = cli("plan", run, "--no-ask", "--simulations", 20)
    assert result.code == ExitCode.OK, result.err
    assert "Looking back: 3 interruptions" in result.out
    told = cli("plan", run, "--no-ask", "--simulations", 20, "--json").json
    assert told["plan"]["inputs"]["step_s"]["source"] == "measured"
    was, again = told["back"]["measured"], told["back"]["plan"]["options"][0]
    assert again["goodput"]["median"] == pytest.approx(was["goodput"], rel=0.05)
    # What the run would have been with a save as soon as the one before is durable.
    options = {option["change"]: option for option in told["back"]["plan"]["options"]}
    assert options["checkpoint.cadence=continuous"]["spent"]["again"] < again["spent"]["again"] / 2


def test_another_configuration_is_planned_by_the_times_of_a_trial(cli: Cli, run: Path) -> None:
    words = (
        "plan",
        "quickstart",
        "train.steps=5000",
        "--like",
        run,
        "--no-ask",
        "--simulations",
        20,
        "--json",
    )
    told = cli(*words, "--preemptions-per-day", 12, "--grace-seconds", 20, "--nodes", 16).json
    inputs = told["plan"]["inputs"]
    assert {name: inputs[name]["value"] for name in ("steps", "nodes", "warning_s")} == {
        "steps": 5000.0,
        "nodes": 16.0,
        "warning_s": 20.0,
    }
    assert inputs["warning_s"]["source"] == "given"
    assert told["plan"]["options"][0]["strikes"]["notice"] > 0
    assert told["back"] is None


def test_the_same_plan_twice_is_the_same(cli: Cli) -> None:
    words = ("plan", "quickstart", "--no-ask", "--simulations", 20, "--crashes-per-day", 50, "--json")
    assert cli(*words).json == cli(*words).json


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nowhere"], ExitCode.CONFIG, "no such configuration"),
        (["."], ExitCode.NOT_FOUND, "not a run directory"),
        (["quickstart", "train.stepz=3"], ExitCode.CONFIG, "train.stepz"),
    ],
)
def test_a_bad_word_gets_one_line_and_a_code(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: ExitCode, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli("plan", *words)
    assert result.code == code
    assert said in result.error


def test_a_run_takes_no_words_of_configuration(cli: Cli, run: Path) -> None:
    result = cli("plan", run, "train.steps=3")
    assert result.code == ExitCode.CONFIG
    assert "--like" in result.error
