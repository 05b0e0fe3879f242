"""`inspect` on one checkpoint and on two, made through the real commit; no torch is needed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders import runtime_state
from tests.checkpoint.conftest import FILES, manifest_of, owns_it, stage
from tests.journals import append_event
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.tensor_index import Piece, TensorEntry, TensorIndex, render_index
from verl_slurm.checkpoint.inspect.describe import _curves
from verl_slurm.checkpoint.store.commit import commit
from verl_slurm.cli.checkpoint.verify_command import _consumed
from verl_slurm.runtime_state.codec import encode

Cli = Callable[..., Any]
TENSORS = {"w": ("float32", (4, 2), 2), "b": ("bfloat16", (3,), 1), "scale": ("float32", (), 1)}


def index() -> bytes:
    """TENSORS, each cut into its number of equal boxes along the first dimension."""
    entries = {}
    for name, (dtype, shape, count) in TENSORS.items():
        rows = shape[0] // count if shape else 0
        pieces = tuple(
            Piece(
                file=f"rank_{rank:04d}.bin",
                at=0,
                offset=(rank * rows, *(0 for _ in shape[1:])) if shape else (),
                shape=(rows, *shape[1:]) if shape else (),
            )
            for rank in range(count)
        )
        entries[name] = TensorEntry(dtype=dtype, shape=shape, pieces=pieces)
    return render_index(TensorIndex(tensors=entries))


def state(rank: int) -> bytes:
    return encode(
        runtime_state(
            rank=rank,
            world_size=2,
            kl_coef=0.125,
            kl_window=[0.5, 0.25],
            rollouts={"response_ids": np.zeros((3 + rank, 4), dtype=np.int64)},
            rewards={"scores": np.zeros(3, dtype=np.float32)},
        )
    )


WHOLE = FILES | {
    "config.yaml": b"name: tiny\nmodel:\n  path: /models/base\n",
    "metadata.json": json.dumps(
        {
            "index": 0,
            "rollout_offset": 8,
            "history": [{"step": n, "reward": n / 4, "kl": 1.5} for n in range(5)],
        }
    ).encode(),
    "orchestration.json": json.dumps({"data_root": "/data", "data_files": {"a": "1", "b": "2"}}).encode(),
    "scheduler.json": json.dumps({"actor": {"schedule": "cosine", "lr": 0.001}}).encode(),
    "actor/index.json": index(),
    "optimizer/index.json": index(),
    "runtime_state.rank_0000.msgpack.zst": state(0),
    "runtime_state.rank_0001.msgpack.zst": state(1),
}


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    private_dir(paths.root)
    paths.run_yaml.write_bytes(WHOLE["config.yaml"])
    return paths


def save(paths: RunPaths, step: int, files: dict[str, bytes] = WHOLE, **changes: object) -> Path:
    staging = stage(paths, step, files=files)
    return commit(staging, manifest_of(staging, **changes), attempt_check=owns_it)


def test_inspect_says_what_is_in_a_checkpoint_as_json(cli: Cli, run: RunPaths) -> None:
    path = save(run, 1, parent="step_000000", frozen={"reference": "7" * 64})
    result = cli("inspect", path, "--json")
    assert result.code == ExitCode.OK
    facts = result.json
    assert (facts["name"], facts["step"], facts["parent"], facts["attempt"]) == (
        "step_000001",
        1,
        "step_000000",
        1,
    )
    assert facts["topology"] == {"dp": 2, "tp": 1, "pp": 1}
    assert (facts["run"], facts["model"]) == ("tiny", "/models/base")
    assert (facts["data_root"], facts["num_data_files"], facts["rollout_offset"]) == ("/data", 2, 8)
    assert facts["schema_is_ours"] is True
    assert facts["frozen"] == {"reference": "7" * 64}
    assert facts["num_bytes"] == sum(map(len, WHOLE.values()))
    assert [domain["domain"] for domain in facts["domains"]] == ["actor", "optimizer"]
    assert facts["domains"][0] == {
        "domain": "actor",
        "tensors": 3,
        "elements": 12,
        "bytes": 42,
        "types": [
            {"dtype": "bfloat16", "tensors": 1, "elements": 3, "bytes": 6},
            {"dtype": "float32", "tensors": 2, "elements": 9, "bytes": 36},
        ],
    }
    assert facts["tensors"][2] == {
        "domain": "actor",
        "name": "w",
        "dtype": "float32",
        "shape": [4, 2],
        "bytes": 32,
        "pieces": 2,
    }
    assert [row["rollouts"] for row in facts["ranks"]] == [3, 4]
    assert facts["kl_window"] == [0.5, 0.25]
    (reward,) = [curve for curve in facts["history"] if curve["metric"] == "reward"]
    assert reward["values"] == [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("words", [("inspect",), ("inspect", "{0}"), ("verify",)])
@pytest.mark.parametrize("way", ["gone", "cut"])
def test_a_newest_checkpoint_that_is_not_the_last_one_saved_is_said(
    cli: Cli, run: RunPaths, words: tuple[str, ...], way: str
) -> None:
    for step in (1, 2):
        path = save(run, step)
        append_event(run, "verified", name=path.name)
    argv = [words[0], *(word.format(run.root) for word in words[1:]), run.root]
    assert (cli(*argv, "--json").json["lost"], "goes back" in cli(*argv).err) == ([], False)
    if way == "gone":
        shutil.rmtree(path)
    else:
        (path / "manifest.json").write_bytes(b"{")
    said = "the run goes back to step_000001, and does step 2 again"
    assert {said in line for line in cli(*argv, "--json").json["lost"]} == {True}
    assert said in cli(*argv).err
    assert said not in cli("inspect", "step_000001", "--run", run.root).err, "named, not the newest"
    refused = cli("export", run.root, "--to", "hf", "--out", run.root.with_name("out"))
    assert (refused.code, said in refused.err) == (ExitCode.DATA, True), "before the base model is missed"


def test_inspect_shows_it_to_people_and_lists_tensors_when_asked(cli: Cli, run: RunPaths) -> None:
    save(run, 1)
    short = cli("inspect", run.root)
    assert short.code == ExitCode.OK
    lines = {line.split()[0]: line for line in short.out.splitlines() if line.split()}
    assert lines["checkpoint"].endswith("step_000001")
    assert "attempt 1" in lines["saved"]
    assert "2 (dp 2, tp 1, pp 1)" in lines["ranks"]
    assert "coefficient 0.125, window of 2, mean 0.375" in lines["KL"]
    assert lines["actor"].split() == ["actor", "float32", "2", "9", "0.0"]
    assert "▁▃▄▆█" in lines["reward"].replace("▅", "▄")
    assert "actor/w" not in short.out
    rows = [
        line.split()
        for line in cli("inspect", "step_000001", "--run", run.root, "--tensors").out.splitlines()
    ]
    assert ["actor/w", "float32", "[4,", "2]", "32", "2"] in rows
    assert ["optimizer/scale", "float32", "[]", "4", "1"] in rows


@pytest.mark.parametrize("name", ["actor/index.json", "metadata.json", "runtime_state.rank_0001.msgpack.zst"])
def test_inspect_believes_no_file_that_changed_and_reads_no_tensor(
    name: str, cli: Cli, run: RunPaths
) -> None:
    path = save(run, 1)
    shard = path / "actor" / "__0_0.distcp"
    shard.write_bytes(b"!" * shard.stat().st_size)
    assert cli("inspect", path).code == ExitCode.OK
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    result = cli("inspect", path)
    assert result.code == ExitCode.CORRUPT
    assert name in result.error


def test_inspect_follows_no_link_in_a_files_place(cli: Cli, run: RunPaths, tmp_path: Path) -> None:
    path = save(run, 1)
    (tmp_path / "elsewhere").write_bytes((path / "metadata.json").read_bytes())
    (path / "metadata.json").unlink()
    (path / "metadata.json").symlink_to(tmp_path / "elsewhere")
    assert cli("inspect", path).code == ExitCode.CORRUPT


def test_a_runtime_state_of_another_version_does_not_hide_the_rest(cli: Cli, run: RunPaths) -> None:
    path = save(run, 1, files=WHOLE | {"runtime_state.rank_0001.msgpack.zst": b"of the future"})
    ranks = cli("inspect", path, "--json").json["ranks"]
    assert "problem" not in ranks[0]
    assert ranks[1]["problem"]
    assert "of another version" in cli("inspect", path).out


def test_diff_says_what_differs_on_both_sides_and_by_its_exit_code(cli: Cli, run: RunPaths) -> None:
    save(run, 1)
    save(run, 2, files=WHOLE | {"config.yaml": b"name: tiny\nmodel:\n  path: /models/other\n"})
    result = cli("inspect", "step_000001", "step_000002", "--run", run.root, "--json")
    assert result.code == ExitCode.DIFFERENT
    assert not result.json["same"]
    assert result.json["differences"] == [
        {"subject": "position", "key": "step", "a": 1, "b": 2},
        {"subject": "config", "key": "model.path", "a": "/models/base", "b": "/models/other"},
    ]
    shown = cli("inspect", "step_000001", "step_000002", "--run", run.root)
    assert shown.code == ExitCode.DIFFERENT
    rows = [line.split() for line in shown.out.splitlines()]
    assert ["model.path", "/models/base", "/models/other"] in rows
    assert "the same: schema, topology, data, frozen, tensors" in shown.out
    for words in (("--bits",), ("step_000002", "--tensors")):
        assert cli("inspect", "step_000001", *words, "--run", run.root).code == ExitCode.USAGE
    same = cli("inspect", "step_000001", "step_000001", "--run", run.root, "--json")
    assert (same.code, same.json["same"], same.json["differences"]) == (ExitCode.OK, True, [])


@pytest.mark.parametrize("of_two", [False, True])
def test_what_is_no_checkpoint_is_refused_in_one_line(
    of_two: bool, cli: Cli, run: RunPaths, tmp_path: Path
) -> None:
    for words in (
        (tmp_path,),
        (tmp_path / "nowhere",),
        (run.root,),
        ("step_000009", "--run", run.root),
        ("../run", "--run", run.root),
    ):
        places = (words[0], *words) if of_two else words
        result = cli("inspect", *places)
        assert result.code == ExitCode.NOT_FOUND
        assert result.error


def test_numbers_that_no_double_holds_are_left_out_of_the_curves() -> None:
    """metadata.json may be handed over; JSON has whole numbers of any size."""
    rows = [{"reward": 1.0}, {"reward": 10**400}, {"reward": float("nan")}, {"reward": 2}]
    assert _curves(rows) == [{"metric": "reward", "last": 2.0, "values": [1.0, 2.0]}]


def test_an_offset_in_responses_is_shown_in_prompts() -> None:
    assert _consumed(24, 1) == "24 consumed"
    assert _consumed(24, 8) == "3 consumed, 8 responses to each"
    assert _consumed(None, 8) == "None consumed"
