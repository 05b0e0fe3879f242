"""The picture in the docs is that of the rows in the docs, and the rows are those of the configurations that ship."""

import json
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import load
from verl_slurm.journal.steps import append_step

DOCS = learning.ROOT / "docs"


def _docs() -> learning.Document:
    document: learning.Document = json.loads((DOCS / "learning.json").read_text())
    return document


def test_the_picture_in_the_docs_is_that_of_the_rows_in_the_docs() -> None:
    assert learning.draw(_docs()) == (DOCS / "learning.svg").read_text()
    assert learning.written(_docs()) == (DOCS / "learning.json").read_text()


def test_the_rows_in_the_docs_are_three_whole_runs_of_each_configuration_as_it_ships() -> None:
    document = _docs()
    assert (document["seeds"], document["overrides"]) == ([0, 1, 2], [])
    for algorithm, name in learning.CONFIGS.items():
        config = load(learning.ROOT / name)
        runs = learning.curves(document)[algorithm]
        assert [len(run) for run in runs] == [config.train.steps] * 3
        assert (
            document["responses_per_step"] == config.train.batch_size_per_device * config.distributed.dp_size
        )
        assert len({tuple(run) for run in runs}) == 3, "a seed that changes nothing"


def test_every_run_in_the_docs_learns() -> None:
    for runs in learning.curves(_docs()).values():
        assert all(run[-1] > run[0] + 0.3 for run in runs)


def test_the_page_of_the_demo_and_the_readme_say_what_the_rows_say() -> None:
    said = re.sub(r"\s+", " ", (DOCS / "demo.md").read_text())
    curves = learning.curves(_docs())
    ends = [run[-1] for runs in curves.values() for run in runs]
    ppo, grpo = (
        [statistics.mean(run[at] for run in curves[name]) for at in (0, -1)] for name in learning.CONFIGS
    )
    assert f"**{ppo[0]:.3f} to {ppo[1]:.3f}**" in said
    assert f"{grpo[0]:.3f} to {grpo[1]:.3f} with GRPO" in said
    assert f"end between {min(ends):.3f} and {max(ends):.3f}" in said
    assert re.search(r"!\[[^]]+\]\(learning\.svg\)", said)
    assert f"**{ppo[0]:.3f} to {ppo[1]:.3f}** in 24 steps" in (learning.ROOT / "README.md").read_text()


class _Person:
    """Stands in for `verl-slurm submit`: writes the run that it would have made."""

    def __init__(self, code: int = 0, missing: int = 0) -> None:
        self.code, self.missing = code, missing
        self.asked: list[list[str]] = []

    def __call__(self, argv: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        self.asked.append(argv)
        paths = RunPaths(next(Path(w.removeprefix("run_dir=")) for w in argv if w.startswith("run_dir=")))
        seed = int(next(w.removeprefix("seed=") for w in argv if w.startswith("seed=")))
        paths.root.mkdir(mode=0o700)
        paths.run_yaml.write_text("train: {steps: 2}\n")
        for step in range(1, 3 - self.missing):
            row = dict.fromkeys(("reward_std", "kl", "response_tokens", "step_s"), 0.5)
            append_step(paths, 1, {"step": float(step), "reward": 0.1 * seed + 0.01 * step, **row})
        return subprocess.CompletedProcess(argv, self.code)


def test_each_seed_of_each_configuration_is_submitted_once_and_what_it_wrote_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    person = _Person()
    monkeypatch.setattr(subprocess, "run", person)
    assert learning.main(["--to", str(tmp_path), "--seed", "3", "--seed", "4", "train.steps=2"]) == 0
    assert "PPO           2  0.360           0.370" in capsys.readouterr().out
    asked = [(Path(argv[4]).name, argv[6], argv[7:]) for argv in person.asked]
    rest = ["train.steps=2", "--cluster", "local", "--wait"]
    names = ("quickstart.yaml", "quickstart_grpo.yaml")
    assert asked == [(name, f"seed={seed}", rest) for name in names for seed in (3, 4)]
    document = json.loads((tmp_path / "learning.json").read_text())
    assert learning.curves(document)["GRPO"] == [[0.31, 0.32], [0.41, 0.42]]
    before = (tmp_path / "learning.svg").read_text()
    (tmp_path / "learning.svg").unlink()
    assert learning.main(["--to", str(tmp_path), "--plot-only"]) == 0
    assert (tmp_path / "learning.svg").read_text() == before
    assert len(person.asked) == 4


@pytest.mark.parametrize(
    "person", [_Person(code=20), _Person(missing=1)], ids=["refused", "a step is missing"]
)
def test_a_run_that_is_not_whole_is_no_curve(
    person: _Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", person)
    with pytest.raises(SystemExit, match="PPO, seed 0"):
        learning.main(["--to", str(tmp_path)])
    assert not list(tmp_path.iterdir())
