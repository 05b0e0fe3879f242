"""`list`, `verify`, `inspect` and `fingerprint` on checkpoints made through the real commit."""

import errno
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.builders import make_manifest, own_run, runtime_state, write_config
from tests.checkpoint.sealed import save_sealed
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
from verl_slurm.base.keys import new_key_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.info import Verdict
from verl_slurm.checkpoint.format.specification import SCHEMA_VERSION
from verl_slurm.checkpoint.format.state_schema import current_schema, render_schema
from verl_slurm.checkpoint.format.tensor_index import (
    Piece,
    TensorEntry,
    TensorIndex,
    render_index,
    tensor_file,
)
from verl_slurm.checkpoint.store.commit import begin, commit, seal
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.config.load import load
from verl_slurm.config.schema import CheckpointConfig, DataConfig, TrainConfig
from verl_slurm.dataset.fingerprint.cache import default_path, save as save_cache
from verl_slurm.dataset.fingerprint.data_record import fingerprint
from verl_slurm.dataset.fingerprint.entries import sealed
from verl_slurm.dataset.fingerprint.file_hashing import Hashed, stamp_of
from verl_slurm.runtime_state.codec import encode

Cli = Callable[..., Any]
Save = Callable[..., Path]
DOMAINS = ("actor", "critic", "optimizer")


def fill(directory: Path, value: float) -> None:
    for name in ("config.yaml", "metadata.json", "orchestration.json", "scheduler.json"):
        (directory / name).write_bytes(b"{}")
    (directory / SCHEMA_VERSION).write_bytes(render_schema(current_schema()))
    for name in DOMAINS:
        (directory / name).mkdir()
        (directory / name / "__0_0.distcp").write_text(f"{name} {value}")
    state = runtime_state(rollout_offset=0, episode_id=0)
    (directory / "runtime_state.rank_0000.msgpack.zst").write_bytes(encode(state))


def fill_with_tensors(directory: Path, value: float) -> None:
    fill(directory, value)
    whole = {"weight": (0, (4, 4)), "bias": (64, (4,))}
    index = TensorIndex(
        tensors={
            name: TensorEntry(
                dtype="float32",
                shape=shape,
                pieces=(Piece(file=tensor_file(0), at=at, offset=(0,) * len(shape), shape=shape),),
            )
            for name, (at, shape) in whole.items()
        }
    )
    for name in DOMAINS:
        (directory / name / "__0_0.distcp").unlink()
        (directory / name / "index.json").write_bytes(render_index(index))
        (directory / name / tensor_file(0)).write_bytes(struct.pack("<16f", *[value] * 16).ljust(4096, b"\0"))


def make_run(root: Path) -> RunPaths:
    paths = RunPaths(root)
    private_dir(root)
    (root / "data").mkdir()
    (root / "data" / "a.jsonl").write_text("{}\n")
    write_config(paths, root=root / "data")
    return paths


def save(
    paths: RunPaths,
    step: int,
    value: float = 0.0,
    fill: Callable[[Path, float], None] = fill,
    metrics: dict[str, float] | None = None,
) -> Path:
    staging = begin(paths, step, 0)
    fill(staging.directory, value)
    files = sorted(str(p.relative_to(staging.directory)) for p in staging.directory.rglob("*") if p.is_file())
    manifest = make_manifest(
        step,
        **own_run(staging.final),
        files=tuple(seal(staging.directory, files)),
        metrics=metrics or msgspec.UNSET,
    )
    return commit(staging, manifest, attempt_check=lambda: None)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return make_run(tmp_path / "run")


def test_the_checkpoints_are_listed_newest_first(run: RunPaths, cli: Cli) -> None:
    save(run, 1)
    save(run, 2)
    begin(run, 3, 0)
    listed = cli("list", run.root, "--json").json
    assert [(info["name"], info["kind"]) for info in listed[:2]] == [
        ("step_000002", "committed"),
        ("step_000001", "committed"),
    ]
    assert listed[2]["kind"] == "torn"
    assert cli("list", run.root, "--json").json == listed
    table = cli("list", run.root).out
    assert table.index("step_000002") < table.index("step_000001")


def test_the_metric_by_which_the_best_are_kept_is_shown_and_the_best_marked(run: RunPaths, cli: Cli) -> None:
    for step, value in ((1, 0.25), (2, 0.75), (3, 0.5), (4, None)):
        save(run, step, metrics={"reward": 0.1} | ({} if value is None else {"eval/reward": value}))
    assert "eval/reward" not in cli("list", run.root).out
    config = msgspec.structs.replace(
        load(run.run_yaml),
        checkpoint=CheckpointConfig(keep_best=2),
        train=TrainConfig(eval_every_steps=1),
        data=DataConfig(eval_fraction=0.1),
    )
    write_config(run, config)
    lines = [line.split() for line in cli("list", run.root).out.splitlines() if "step_" in line]
    assert [(line[0], line[3:6]) for line in lines] == [
        ("step_000004", ["-", "1", "1"]),
        ("step_000003", ["0.5", "best", "2"]),
        ("step_000002", ["0.75", "best", "1"]),
        ("step_000001", ["0.25", "1", "1"]),
    ]
    listed = cli("list", run.root, "--json").json
    assert [info["best"] for info in listed] == [None, 2, 1, None]
    assert listed[1]["metrics"] == {"reward": 0.1, "eval/reward": 0.5}


def test_verify_says_that_all_is_well(run: RunPaths, cli: Cli) -> None:
    path = save(run, 1)
    save(run, 2)
    result = cli("verify", run.root, "--json")
    assert (result.code, result.json["ok"]) == (0, True)
    assert [verdict["name"] for verdict in result.json["checkpoints"]] == ["step_000002", "step_000001"]
    assert "step_000001  verified" in cli("verify", path).out


def test_verify_names_the_damaged_file(run: RunPaths, cli: Cli) -> None:
    file = save(run, 1) / "actor" / "__0_0.distcp"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    result = cli("verify", run.root)
    assert result.code == ExitCode.CORRUPT
    assert "step_000001  BAD actor/__0_0.distcp: sha256" in result.out
    assert (
        cli("verify", run.root, "--json").json["checkpoints"][0]["problems"][0]["path"]
        == "actor/__0_0.distcp"
    )


def test_verify_asks_for_the_signature_where_the_run_has_a_key(
    run: RunPaths, cli: Cli, tmp_path: Path
) -> None:
    mine, other = tmp_path / "mine.key", tmp_path / "other.key"
    key = new_key_file(mine)
    new_key_file(other)
    write_config(run, key_file=mine)
    path = save_sealed(run, 1, key)
    assert cli("verify", run.root).code == 0
    assert cli("verify", path).code == 0
    wrong = cli("verify", path, "--key-file", other)
    assert wrong.code == ExitCode.KEY
    assert key.id in wrong.out
    save_sealed(run, 2, None)
    unsigned = cli("verify", run.root)
    assert unsigned.code == ExitCode.KEY
    assert "step_000002  BAD manifest.json: the checkpoint is not signed" in unsigned.out
    assert cli("verify", run.root, "--without-key").code == 0
    mine.unlink()
    lost = cli("verify", run.root)
    assert lost.code == ExitCode.KEY
    assert "mine.key" in lost.error


def test_what_is_not_there_is_not_found(run: RunPaths, cli: Cli) -> None:
    for words in (("verify", "/nowhere"), ("verify", run.root), ("inspect", run.root, run.root)):
        result = cli(*words)
        assert result.code == ExitCode.NOT_FOUND
        assert result.error


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_compare_finds_the_same_the_same_and_names_what_differs(tmp_path: Path, cli: Cli) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    save(first, 1, 0.5, fill_with_tensors)
    save(second, 1, 0.5, fill_with_tensors)
    same = cli("inspect", "--bits", first.root, second.root)
    assert (same.code, "the same: 6 tensors" in same.out) == (0, True)
    save(second, 2, 0.25, fill_with_tensors)
    other = cli("inspect", "--bits", first.root, second.root, "--json")
    assert other.code == ExitCode.DIFFERENT
    assert other.json["same"] is False
    assert "actor/weight" in other.json["differing"]
    assert "actor/bias" not in other.json["differing"]
    assert "DIFFERENT in 3 places" in cli("inspect", "--bits", first.root, second.root).out


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_compare_refuses_a_checkpoint_that_does_not_verify(tmp_path: Path, cli: Cli) -> None:
    paths = make_run(tmp_path / "a")
    path = save(paths, 1, 0.5, fill_with_tensors)
    (path / "metadata.json").write_bytes(b"{ }")
    result = cli("inspect", "--bits", path, path)
    assert result.code == ExitCode.CORRUPT
    assert "metadata.json" in result.error


def test_fingerprint_of_a_directory_is_its_tree_hash(
    run: RunPaths, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    root = run.root / "data"
    first = cli("fingerprint", root, "--json").json
    assert (len(first["digest"]), first["num_files"]) == (64, 1)
    (root / "a.jsonl").write_text("[]\n")
    assert cli("fingerprint", root, "--json").json["digest"] != first["digest"]


def test_fingerprint_full_names_what_no_stamp_shows(
    run: RunPaths, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    root = run.root / "data"
    path = default_path(root)
    true = fingerprint(root)
    lie = sealed(
        {name: msgspec.structs.replace(entry, sha256="0" * 64) for name, entry in true.files.items()}
    )
    path.parent.mkdir(parents=True)
    stamps = {name: stamp_of((root / name).stat()) for name in lie.files}
    save_cache(path, {name: Hashed(stamps[name], "0" * 64, 0) for name in lie.files})
    cached = cli("fingerprint", root, "--json").json
    assert (cached["digest"], cached["num_read"]) == (lie.digest, 0)
    result = cli("fingerprint", root, "--full", "--json")
    assert (result.json["digest"], result.json["num_read"]) == (true.digest, 1)
    assert result.json["unnoticed"] == ["a.jsonl"]
    assert "found by --full" in result.err
    assert "1 file, 1 read" in cli("fingerprint", root, "--full").out
    path.write_bytes(b"damaged")
    assert "is not used and made anew" in cli("fingerprint", root).err


def test_fingerprint_of_a_run_without_one_and_of_nothing_is_refused(
    run: RunPaths, cli: Cli, tmp_path: Path
) -> None:
    assert cli("fingerprint", run.root).code == ExitCode.NOT_FOUND
    result = cli("fingerprint", tmp_path / "nowhere")
    assert result.code == ExitCode.DATA
    assert result.error


@pytest.mark.parametrize("words", [(), ("--json",), ("--rate", "1000")])
def test_a_checkpoint_that_goes_while_it_is_read_is_not_called_good(
    run: RunPaths, cli: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    named = save(run, 1)

    def prune_first(path: Path, **options: Any) -> Any:
        shutil.rmtree(path)
        return verify(path, **options)

    monkeypatch.setattr("verl_slurm.checkpoint.store.scrub.verify", prune_first)
    result = cli("verify", named, *words)
    assert result.code == ExitCode.NOT_FOUND
    assert f"the checkpoint was removed while it was read: {named}" in result.error


def test_storage_that_dies_while_checkpoints_are_read_is_not_taken_for_their_removal(
    run: RunPaths, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 1)

    def stale(path: Path, **_: Any) -> Verdict:
        def lstat(*_: Any, **__: Any) -> Any:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        with monkeypatch.context() as patched:
            patched.setattr(os, "open", lstat)
            found = verify(path)
        monkeypatch.setattr(os, "lstat", lstat)
        return found

    monkeypatch.setattr("verl_slurm.checkpoint.store.scrub.verify", stale)
    result = cli("verify", run.root, "--json")
    monkeypatch.undo()
    assert (result.code, result.json["ok"]) == (ExitCode.CORRUPT, False)
    assert "cannot be read: Stale file handle" in result.json["checkpoints"][0]["problems"][0]["what"]


@pytest.mark.parametrize(
    ("reads", "words"),
    [
        ("checkpoint.inspect.compare.verify", ("inspect", "OLD", "NEW", "--bits")),
        ("checkpoint.store.reader.read_manifest", ("inspect", "OLD", "NEW")),
        ("checkpoint.store.reader.read_manifest", ("inspect", "OLD")),
        ("verl.reshard.checkpoint.verify", ("reshard", "OLD", "--ranks", "3", "--out", "OUT")),
    ],
)
def test_a_command_says_which_checkpoint_was_removed_while_it_read_it(
    run: RunPaths, cli: Cli, monkeypatch: pytest.MonkeyPatch, reads: str, words: tuple[str, ...]
) -> None:
    old, new = save(run, 1), save(run, 2)
    places = {"OLD": old, "NEW": new, "OUT": run.root.parent / "out"}
    real = verify if reads.endswith(".verify") else read_manifest

    def pruned(directory: Path, **options: Any) -> Any:
        shutil.rmtree(old, ignore_errors=True)
        return real(directory, **options)

    monkeypatch.setattr(f"verl_slurm.{reads}", pruned)
    result = cli(*(places.get(word, word) for word in words))
    assert result.code == ExitCode.NOT_FOUND
    assert f"the checkpoint was removed while it was read: {old}" in result.error
