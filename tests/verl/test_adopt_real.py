"""Plain verl's own directory, damaged, taken over, and gone on from: by plain verl, and as a run of ours."""

import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="the package verl: make verl")

from tests.processes import captured
from tests.verl.damage import CASES
from tests.verl.plain import VERLS, cpu_environ, run_sft
from tests.verl.runs import write_config
from tests.verl.same import differences
from tests.verl.tiny import make_model, make_sums, sft_words
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.cli.__main__ import main
from verl_slurm.verl.shards import judge_all
from verl_slurm.verl.tracker import TRACKER, judge_tracker, read_tracker

pytestmark = [pytest.mark.verl, pytest.mark.torch]
_LAST = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model, data, and plain/ with the steps 2 to 8 of an undisturbed run of plain verl."""
    place = tmp_path_factory.mktemp("verl")
    section = sft_words(make_model(place / "model"), make_sums(place / "sums.parquet"))
    words = [f"trainer.default_local_dir={place}/plain", f"trainer.total_training_steps={_LAST}"]
    ended = run_sft(VERLS, section, words, cwd=place)
    assert ended.exit_code == 0, ended.output[-3000:]
    return place


def interrupted(place: Path, name: str) -> Path:
    """A copy of what plain verl had behind step 6."""
    copy = place / name
    shutil.copytree(place / "plain", copy)
    shutil.rmtree(copy / "global_step_8")
    (copy / TRACKER).write_text("6")
    return copy


def numbers(ours: Path, theirs: Path) -> list[str]:
    """Differences but for the generators: verl's SFT trainer never seeds them."""
    return [one for one in differences(ours, theirs) if ".rng." not in one]


def test_what_verl_has_saved_is_whole(place: Path) -> None:
    found = judge_all(place / "plain")
    assert [(one.step, one.ok, one.world_size) for one in found] == [(n, True, 2) for n in (8, 6, 4, 2)]
    assert judge_tracker(read_tracker(place / "plain"), found).state == "good"


@pytest.mark.parametrize("case", [case for case in CASES if case.ranks == 2], ids=lambda case: case.name)
def test_each_damage_is_found_and_the_tracker_points_to_the_newest_whole_step(place: Path, case) -> None:  # type: ignore[no-untyped-def]
    directory = interrupted(place, f"damaged_{case.name}")
    case.strike(directory / "global_step_6", directory / TRACKER)
    assert main(["adopt", str(directory), "--json"]) == ExitCode.OK
    wanted = "6" if case.name.startswith("tracker") else "4"
    assert (directory / TRACKER).read_text() == wanted
    shutil.rmtree(directory)


@pytest.mark.soak  # what verl does alone
def test_plain_verl_goes_on_from_a_repaired_directory_to_the_undisturbed_weights(place: Path) -> None:
    directory = interrupted(place, "repaired")
    {case.name: case for case in CASES}["bit"].strike(directory / "global_step_6", directory / TRACKER)
    assert main(["adopt", str(directory)]) == ExitCode.OK
    section = sft_words(place / "model", place / "sums.parquet")
    words = [f"trainer.default_local_dir={directory}", f"trainer.total_training_steps={_LAST}"]
    ended = run_sft(VERLS, section, words, cwd=place)
    assert ended.exit_code == 0, ended.output[-3000:]
    assert min(ended.steps) > 4
    assert numbers(directory / "global_step_8", place / "plain" / "global_step_8") == []


def test_a_run_that_took_it_over_goes_on_to_the_undisturbed_weights(place: Path) -> None:
    directory, run = interrupted(place, "taken"), place / "run"
    {case.name: case for case in CASES}["bit"].strike(directory / "global_step_6", directory / TRACKER)
    section = sft_words(place / "model", place / "sums.parquet")
    config = write_config(place / "run.yaml", run, section, _LAST)

    def cli(*words: object) -> str:
        done = captured(
            [sys.executable, "-m", "verl_slurm.cli", *map(str, words)],
            cwd=place,
            env=cpu_environ({"PATH": "/usr/bin:/bin", "HOME": str(place)}),
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "step_000004" in cli("adopt", directory, config)
    said = cli("submit", run, "--cluster", "local", "--wait")
    assert "step_000004 is the newest checkpoint that verifies" in said
    final = run / "checkpoints" / "step_000008" / "global_step_8"
    assert numbers(final, place / "plain" / "global_step_8") == []
