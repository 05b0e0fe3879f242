"""The built-in data: the same bytes everywhere, whole or not at all."""

import json
import os
from pathlib import Path

import pytest

from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.trainer.quickstart import __main__, build_once
from verl_slurm.trainer.quickstart.__main__ import resolve_data, resolve_model
from verl_slurm.trainer.quickstart.arithmetic_data import build_data, sums

pytestmark = pytest.mark.torch


def test_no_held_out_prompt_is_in_the_train_root_and_every_answer_is_right(tmp_path: Path) -> None:
    root = build_data(tmp_path / "sums")
    assert [path.name for path in root.iterdir()] == ["sums.jsonl"]
    sides = []
    for file in (root / "sums.jsonl", tmp_path / "sums" / "heldout" / "sums.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            a, b = row["prompt"].rstrip("=").split("+")
            assert int(a) + int(b) == int(row["answer"])
        sides.append({row["prompt"] for row in rows})
    assert sides[0].isdisjoint(sides[1])
    assert len(sides[0]) + len(sides[1]) == 3600
    assert len(sides[0]) == len(sums(held_out=False)) > 3000


def test_building_twice_changes_nothing_and_modes_are_private(tmp_path: Path) -> None:
    root = build_data(tmp_path / "sums")
    before = {path: path.stat() for path in (tmp_path / "sums").rglob("*")}
    assert build_data(tmp_path / "sums") == root
    assert {path: path.stat().st_mtime_ns for path in before} == {p: s.st_mtime_ns for p, s in before.items()}
    assert all(status.st_mode & 0o077 == 0 for status in before.values())
    assert [path.name for path in tmp_path.iterdir()] == ["sums"]
    with (root / "sums.jsonl").open("a") as file:
        file.write('{"prompt": "1+1=", "answer": "3"}\n')
    with pytest.raises(DataError, match="was changed"):
        build_data(tmp_path / "sums")


def test_a_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match="in the way"):
        build_data(tmp_path / "sums")
    assert (tmp_path / "sums" / "thesis.txt").read_text() == "mine"


def test_of_two_builders_at_once_one_wins_and_the_other_cleans_up(tmp_path: Path) -> None:
    target = tmp_path / "x"

    def slow(temp: Path) -> None:
        build_once(target, lambda other: (other / "f").write_text("first") and None, required=("f",))
        (temp / "f").write_text("second")

    build_once(target, slow, required=("f",))
    assert (target / "f").read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(temp: Path) -> None:
        (temp / "half").write_text("x")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        build_once(tmp_path / "x", fail, required=())
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_built_with_a_compile_cache_that_nobody_else_can_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # restored afterwards
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "")
    caches = []

    def build(spec: str, cache: Path) -> Path:
        caches.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        assert caches[0].stat().st_mode & 0o777 == 0o700
        return tmp_path

    monkeypatch.setattr(__main__, "resolve_model", build)
    assert __main__.main(["model", "builtin:tiny", str(tmp_path)]) == 0
    [cache] = caches
    assert not cache.exists()


def test_only_known_names_are_built_in_and_paths_pass_through(tmp_path: Path) -> None:
    assert resolve_data("some/where", tmp_path) == Path("some/where")
    assert resolve_model("some/where", tmp_path) == Path("some/where")
    assert resolve_data("builtin:arithmetic", tmp_path) == tmp_path / "arithmetic" / "train"
    for resolve in (resolve_data, resolve_model):
        with pytest.raises(ConfigError, match="no such built-in"):
            resolve("builtin:none", tmp_path)
