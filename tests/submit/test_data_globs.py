"""Which files of a directory are read: one split alone, and what a glob of `data.files` means."""

import random
import re
import time
from pathlib import Path

import pytest

from tests.builders import run_config
from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.base.files import private_dir
from verl_slurm.dataset.prompts.choice import choose, missing_shards, takes, unfinished_downloads
from verl_slurm.submit.checks.prompt_data import check_data
from verl_slurm.submit.checks.run_directory import refuse_below_inputs
from verl_slurm.submit.submission import plan_submission


def chosen(pattern: str, *names: str) -> list[str]:
    try:
        return choose(names, pattern, lambda _: b"", root="data", key="data.root")
    except DataError:
        return []


NAMES = ("a.json", "ab.json", "x/a.json", "x/y/a.json", "x/y/.json", "a*.json", "train-00000-of-00002.json")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.json", ["a.json"]),
        ("x/**/*.json", ["x/a.json", "x/y/.json", "x/y/a.json"]),
        ("**/**/?.json", ["a.json", "x/a.json", "x/y/a.json"]),
        ("**.json", ["a*.json", "a.json", "ab.json", "train-00000-of-00002.json"]),
        ("train-*-of-*.json", ["train-00000-of-00002.json"]),
        ("a.jso", []),
        (".json", []),
        ("[a].json", []),
        ("/a.json", []),
    ],
)
def test_a_glob_takes_the_files_it_names(pattern: str, expected: list[str]) -> None:
    assert chosen(pattern, *NAMES) == expected


def test_a_glob_is_taken_as_its_regular_expression_would_be() -> None:
    words = {"**/": "(?:[^/]+/)*", "*": "[^/]*", "?": "[^/]"}
    luck = random.Random(1)
    for _ in range(5000):
        pattern = "".join(luck.choices(["a", "b", "/", "*", "**/", "?"], k=luck.randrange(1, 8))) + "a.csv"
        # As in a shell, two stars are folders where nothing else stands between the slashes.
        if re.search(r"[^/]\*\*/", pattern):
            continue
        parts = re.split(r"(\*\*/|\*|\?)", pattern)
        naive = re.compile("".join(words.get(part) or re.escape(part) for part in parts))
        names = {"".join(luck.choices("ab/", k=luck.randrange(0, 9))) + "a.csv" for _ in range(20)}
        names = {name for name in names if "//" not in name and name[0] != "/"}
        assert chosen(pattern, *names) == sorted(filter(naive.fullmatch, names)), pattern


@pytest.mark.scenario("SEC05")
@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("*a" * 4 + "*ab.jsonl", "a" * 200),
        ("*a" * 25 + "*ab.jsonl", "a" * 200),
        ("*?" * 25 + "b.jsonl", "a" * 200),
        ("**/" * 25 + "b.jsonl", "a/" * 100),
        ("**/*" * 25 + "b.jsonl", "a/" * 100),
        ("**/*a" * 25 + "b.jsonl", "aaaa/" * 40),
    ],
)
def test_many_stars_against_a_long_name_take_no_time(pattern: str, name: str) -> None:
    began = time.process_time()
    assert chosen(pattern, name) == []
    assert time.process_time() - began < 0.5


SPLITS = {
    ("train.@", "test.@"): "data.files='train*.@'",
    ("math_train.@", "math_test.@"): "data.files='*train*.@'",
    ("gsm8kTrain.@", "gsm8kTest.@"): "data.files='*Train*.@'",
    ("math.@", "math-dev.@"): "data.files='math.@'",
    ("train-00000-of-00002.@", "train-00001-of-00002.@", "test-00000-of-00001.@"): "data.files='train*.@'",
    ("data/train-00000-of-00001.@", "data/validation-00000-of-00001.@"): "data.files='data/train*.@'",
    ("train/a.@", "test/a.@"): "data.root=D/train",
    ("data/train/a.@", "data/test/a.@"): "data.root=D/data/train",
    ("test.@", "train/a.@"): "data.files='train/*.@'",
    ("test.@", "train.@.gz"): "unpack train.@.gz, then set data.files",
    ("train.@.gz", "test.@.gz"): "unpack train.@.gz first",
}


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet", "arrow"])
def test_training_never_takes_a_test_split_with_it(kind: str) -> None:
    for names, remedy in SPLITS.items():
        here = [name.replace("@", kind) for name in names]
        with pytest.raises(DataError) as caught:
            choose(here, None, lambda _: b"", root="D", key="data.root")
        assert (caught.value.remedy or "").removeprefix("set ") == remedy.replace("@", kind), names
    for alone in (["test"], ["train", "more"], ["train-1", "training-2"], ["testament", "latest"], ["train"]):
        here = sorted(f"{name}.{kind}" for name in alone)
        assert choose(here, None, lambda _: b"", root="D", key="data.root") == here


def test_a_test_split_of_another_kind_is_not_taken_for_the_training_data() -> None:
    with pytest.raises(DataError, match="several splits.*test.jsonl to be read, and train.csv"):
        choose(["test.jsonl", "train.csv"], None, lambda _: b"", root="D", key="data.root")
    with pytest.raises(DataError, match=r"set data.eval_files='test\*.jsonl'"):
        choose(["test.jsonl", "train.jsonl"], None, lambda _: b"", root="D", key="data.eval_root")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (
            "t-00000-of-00003.jsonl t-00002-of-00003.jsonl",
            "no t-00001-of-00003.jsonl (1 of 3 shards missing)",
        ),
        ("d/t-1-of-3.json d/t-3-of-3.json", "no d/t-2-of-3.json (1 of 3 shards missing)"),
        ("t-00000-of-00003-0123456789abcdef.parquet", "no t-00001-of-00003.parquet, t-00002"),
        ("t-1-of-9999999999999.json", "no t-0-of-9999999999999.json, t-2-of"),
        ("t_0_of_2.csv", "no t_1_of_2.csv"),
        ("t-00000-of-00002.json t-00001-of-00002.json.gz", "no t-00001-of-00002.json ("),
        ("t-00000-of-00001.csv e-00001-of-00002.csv e-00000-of-00002.csv", ""),
        ("a-00000-of-00002-0123456789abcdef.csv a-00001-of-00002-1123456789abcdef.csv", ""),
        ("best-of-3.csv x-1-of-2/a.csv 2024.csv", ""),
    ],
)
def test_a_name_of_a_shard_tells_which_others_are_missing(names: str, found: str) -> None:
    said = missing_shards(names.split(), names.split())
    assert found in said if found else said == ""


@pytest.mark.parametrize(
    ("name", "unfinished"),
    [
        *[(f"b.jsonl{end}", True) for end in (".part", ".tmp", ".crdownload", ".aria2", ".0a1b2c3d.partial")],
        (".b.jsonl.Ab12Cd", True),
        ("Unconfirmed 1234.crdownload", True),
        (".cache/huggingface/download/x1.0a1b.incomplete", True),
        ("test.jsonl.part", False),
        ("b.parquet.part", False),
        ("notes.tmp", False),
        ("other/b.jsonl.part", False),
        ("b.jsonl.gz", False),
    ],
)
def test_a_download_beside_the_data_that_is_not_finished_is_seen(name: str, unfinished: bool) -> None:
    chosen = ["train.jsonl"]
    assert bool(unfinished_downloads(chosen, [*chosen, name], takes(None, chosen))) is unfinished


@pytest.mark.parametrize("key", ["data.root", "data.eval_root"])
def test_data_of_which_a_part_is_missing_is_refused_unless_it_is_known(tmp_path: Path, key: str) -> None:
    (tmp_path / "train-00000-of-00002.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    config = run_config(root=str(tmp_path), eval_root=str(tmp_path))
    with pytest.raises(DataError, match=r"shards of the data are missing.*found no train-00001-of-00002"):
        check_data(config, key)
    # A run that has trained on it could not go on with more.
    assert "shards of the data are missing: no train-00001" in check_data(config, key, begun=True).notes[0]
    files = key.replace("root", "files").removeprefix("data.")
    config = run_config(root=str(tmp_path), eval_root=str(tmp_path), **{files: "train-0000?-of-00002.jsonl"})
    assert "shards of the data are missing" in check_data(config, key)[1][0]
    (tmp_path / "train-00001-of-00002.jsonl.part").touch()
    config = run_config(root=str(tmp_path), eval_root=str(tmp_path), **{files: "*.jsonl"})
    with pytest.raises(DataError, match=r"a download of the data is not finished.*found train-00001"):
        check_data(config, key)


@pytest.mark.parametrize(
    ("written", "data", "refused"),
    [
        ("run_dir=runs/my", {}, True),
        ("local_dir=copies", {}, True),
        ("targets_dir=targets", {}, True),
        ("run_dir=runs/my", {"files": "*.jsonl"}, False),
        ("run_dir=runs/my", {"files": "data/*.jsonl"}, False),
        ("run_dir=data/my", {"files": "data/**/*.jsonl"}, True),
        ("run_dir=data/my", {"files": "data/*/*.jsonl"}, True),
        ("run_dir=runs/my", {"files": "**/*.jsonl"}, True),
        ("run_dir=../runs/my", {}, False),
    ],
)
@pytest.mark.parametrize("key", ["root", "eval_root"])
def test_a_run_below_the_data_that_it_is_held_to_is_refused(
    tmp_path: Path, key: str, written: str, data: dict[str, str], refused: bool
) -> None:
    root = private_dir(tmp_path / "proj")
    name, place = written.split("=")
    files = {key.replace("root", name): pattern for name, pattern in data.items()}
    config = run_config(**{"run_dir": "/runs/my", name: str(root / place), key: str(root), **files})
    if not refused:
        refuse_below_inputs(config)
        return
    with pytest.raises(
        ConfigError, match=rf"{name}=.*within data\.{key}=.*set another .*{name} or data\.{key}"
    ):
        refuse_below_inputs(config)


@pytest.mark.parametrize("key", ["model.path", "model.reward", "data.root", "verl.data"])
def test_a_run_below_the_data_of_a_program_or_below_a_model_is_refused(tmp_path: Path, key: str) -> None:
    config = {
        "model.path": run_config(path=str(tmp_path), run_dir=tmp_path / "run"),
        "model.reward": run_config(reward=f"classifier:{tmp_path}", run_dir=tmp_path / "run"),
        "data.root": run_config(backend="command", root=str(tmp_path), run_dir=tmp_path / "run"),
        "verl.data": run_config(
            backend="verl",
            entry="sft",
            verl={"data": {"train_files": str(tmp_path)}},
            run_dir=tmp_path / "run",
        ),
    }[key]
    with pytest.raises(ConfigError, match=rf"within {key}="):
        refuse_below_inputs(config)


def test_a_run_below_the_data_is_refused_before_it_is_made(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "my.yaml").write_text(f"name: my\nrun_dir: {tmp_path}/runs/my\ndata: {{root: {tmp_path}}}\n")
    words = ["model.path=builtin:tiny", "model.reward=rule:arithmetic"]
    with pytest.raises(ConfigError, match=r"data\.files='\*\.jsonl'"):
        plan_submission(tmp_path / "my.yaml", words, cluster="local")


def test_names_that_are_never_data_are_not_chosen() -> None:
    names = ["a.jsonl", "._a.jsonl", ".#a.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl"]
    assert (
        chosen("**/*.jsonl", *names)
        == choose(names, None, lambda _: b"", root="D", key="data.root")
        == ["a.jsonl"]
    )
    saved = ["data/state.json", "data/data-00000-of-00001.arrow", "data/cache-1a.arrow"]
    assert chosen("data/*.arrow", *saved) == ["data/data-00000-of-00001.arrow"]
