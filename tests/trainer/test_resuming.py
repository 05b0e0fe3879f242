"""What cannot be resumed is refused before any tensor is read; the first start's layout stays."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.builders import run_config, write_manifest
from verl_slurm.base.errors import (
    CheckpointCorrupt,
    ConfigError,
    DataError,
    KeyRefused,
    SchemaMismatch,
    names_missing_file,
)
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import note_adopted
from verl_slurm.checkpoint.format.specification import SCHEMA_VERSION, Topology
from verl_slurm.checkpoint.format.state_schema import current_schema, render_schema, schema_of
from verl_slurm.checkpoint.store.chunks import entry_of
from verl_slurm.checkpoint.store.frozen import store_frozen
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.config.load import dump
from verl_slurm.config.schema import DistributedConfig, EncryptionConfig, TrainConfig
from verl_slurm.dataset.fingerprint.data_record import data_place, fingerprint
from verl_slurm.dataset.fingerprint.stored_tree import record_tree
from verl_slurm.runtime_state import ledger
from verl_slurm.runtime_state.ledger import Ledger
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer import __main__ as entry, resuming
from verl_slurm.trainer.objective.optimizers import schedule_record
from verl_slurm.trainer.place import Place, process_group
from verl_slurm.trainer.resuming import (
    check_manifest,
    checkpoint_directory,
    load_replay,
    require_verified,
    where_it_starts,
)
from verl_slurm.trainer.setup import build_loop
from verl_slurm.trainer.state.orchestration import check_or_write, describe
from verl_slurm.trainer.state.position import Position, StepShape
from verl_slurm.trainer.state.train_state import fresh_state
from verl_slurm.wire.client import NoDaemon

pytestmark = pytest.mark.torch

CONFIG = run_config(ranks=2)


def _manifest(directory: Path, *, world_size: int = 2, config: bytes = b"") -> None:
    private_dir(directory)
    files = (entry_of("config.yaml", config),) if config else ()
    write_manifest(directory, world_size=world_size, files=files, frozen={"reference": "a" * 64})
    if config:
        (directory / "config.yaml").write_bytes(config)


@pytest.mark.scenario("L09")
def test_a_checkpoint_of_another_world_size_is_refused_where_a_step_would_be_another(tmp_path: Path) -> None:
    wider = msgspec.structs.replace(CONFIG, distributed=DistributedConfig(dp_size=4))
    _manifest(tmp_path / "step_000001", world_size=4, config=dump(wider))
    with pytest.raises(
        ConfigError, match="4 ranks so far, and with 2.*expected train.batch_size_per_device="
    ):
        check_manifest(tmp_path / "step_000001", CONFIG, {"reference": "a" * 64}, RunPaths(tmp_path))


def test_a_changed_reference_model_is_refused(tmp_path: Path) -> None:
    _manifest(tmp_path / "step_000001")
    assert (
        check_manifest(tmp_path / "step_000001", CONFIG, {"reference": "a" * 64}, RunPaths(tmp_path)).step
        == 1
    )
    with pytest.raises(DataError, match="reference"):
        check_manifest(tmp_path / "step_000001", CONFIG, {"reference": "b" * 64}, RunPaths(tmp_path))
    with pytest.raises(DataError, match="teacher"):
        check_manifest(
            tmp_path / "step_000001", CONFIG, {"reference": "a" * 64, "teacher": "c" * 64}, RunPaths(tmp_path)
        )


def test_a_branch_has_models_of_its_own_and_the_steps_of_the_checkpoint(tmp_path: Path) -> None:
    paths = RunPaths(private_dir(tmp_path / "run"))
    _manifest(private_dir(paths.checkpoints) / "step_000001", config=dump(CONFIG))
    private_dir(paths.control)
    note_adopted(paths, read_manifest(paths.checkpoints / "step_000001").digest)
    check_manifest(paths.checkpoints / "step_000001", CONFIG, {"reference": "b" * 64}, paths)
    other = run_config(ranks=2, samples_per_prompt=2)
    with pytest.raises(
        ConfigError,
        match="a step would be another one than the checkpoint's.*from the weights alone: `verl-slurm export",
    ):
        check_manifest(paths.checkpoints / "step_000001", other, {"reference": "b" * 64}, paths)


def test_a_file_of_the_model_that_is_away_is_named_and_waited_for(tmp_path: Path) -> None:
    """As a purge of scratch leaves it, or a refresh in mid-way."""
    paths, model = RunPaths(private_dir(tmp_path / "run")), private_dir(tmp_path / "model")
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    was = fingerprint(model)
    store_frozen(paths, model, was)
    saved = private_dir(tmp_path / "step_000001")
    write_manifest(saved, world_size=2, files=(), frozen={"reference": was.digest})
    (model / "tokenizer.json").unlink()
    now = {"reference": fingerprint(model).digest}
    with pytest.raises(DataError) as caught:
        check_manifest(saved, run_config(ranks=2, path=str(model)), now, paths)
    assert caught.value.where == str(model / "tokenizer.json")
    assert names_missing_file(caught.value.one_line())


def test_a_file_of_what_is_held_out_that_is_away_is_named_and_waited_for(tmp_path: Path) -> None:
    paths, held_out = RunPaths(private_dir(tmp_path / "run")), private_dir(tmp_path / "eval")
    for name in ("a.jsonl", "b.jsonl"):
        (held_out / name).write_text("{}\n")
    was = fingerprint(held_out)
    record_tree(private_dir(paths.frozen), was)
    saved = private_dir(tmp_path / "step_000001")
    write_manifest(saved, world_size=2, files=(), frozen={"eval_data": was.digest})
    (held_out / "b.jsonl").unlink()
    config = run_config(ranks=2, eval_root=str(held_out))
    with pytest.raises(DataError) as caught:
        check_manifest(saved, config, {"eval_data": fingerprint(held_out).digest}, paths)
    assert caught.value.where == str(held_out / "b.jsonl")
    assert names_missing_file(caught.value.one_line())


def test_held_out_files_beside_those_of_the_glob_end_no_run_that_recorded_them(tmp_path: Path) -> None:
    paths, held_out = RunPaths(private_dir(tmp_path / "run")), private_dir(tmp_path / "eval")
    for name in ("test.jsonl", "train.jsonl"):
        (held_out / name).write_text("{}\n")
    was = fingerprint(held_out)
    record_tree(private_dir(paths.frozen), was)
    saved = private_dir(tmp_path / "step_000001")
    write_manifest(saved, world_size=2, files=(), frozen={"eval_data": was.digest})
    config = run_config(ranks=2, eval_root=str(held_out), eval_files="test.jsonl")
    place = data_place(held_out, "test.jsonl")
    (held_out / "train.jsonl").unlink()
    check_manifest(saved, config, {"eval_data": fingerprint(place).digest}, paths)
    (held_out / "test.jsonl").write_text("[]\n")
    with pytest.raises(DataError, match="not what the run started with: eval_data"):
        check_manifest(saved, config, {"eval_data": fingerprint(place).digest}, paths)


def test_resume_names_a_checkpoint_of_the_run_or_a_path() -> None:
    paths = RunPaths("/run")
    for by_hand in (True, False):
        assert checkpoint_directory(paths, "", by_hand=by_hand) is None
        named = checkpoint_directory(paths, "step_000001", by_hand=by_hand)
        assert named == paths.checkpoints / "step_000001"
        for odd in ("..", ".", "latest", "quarantine", "step_000001\n"):
            with pytest.raises(ConfigError, match="no checkpoint of this run"):
                checkpoint_directory(paths, odd, by_hand=by_hand)
    given = checkpoint_directory(paths, "/other/step_000001", by_hand=True)
    assert given == Path("/other/step_000001")
    for path in ("/other/step_000001", "../step_000001", "quarantine/step_000001"):
        with pytest.raises(ConfigError, match="no checkpoint of this run"):
            checkpoint_directory(paths, path, by_hand=False)


def test_a_checkpoint_of_elsewhere_is_named_with_its_place(tmp_path: Path) -> None:
    _manifest(tmp_path / "step_000001")
    manifest = check_manifest(tmp_path / "step_000001", CONFIG, {"reference": "a" * 64}, RunPaths(tmp_path))
    state, shape = fresh_state(CONFIG), StepShape.of(CONFIG)
    line = where_it_starts(state, shape, manifest, "f", 0, foreign=tmp_path / "step_000001")
    assert line.startswith(f"resumed step_000001 from {tmp_path / 'step_000001'}: ")
    assert where_it_starts(state, shape, manifest, "f", 0).startswith("resumed step_000001: ")


def test_by_hand_a_checkpoint_of_another_layout_is_refused_as_under_a_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _manifest(tmp_path / "step_000001")
    with pytest.raises(CheckpointCorrupt, match="does not verify"):
        require_verified(tmp_path / "step_000001")
    whole = SimpleNamespace(needs_key=False, require=lambda *_: None)
    monkeypatch.setattr(resuming, "verify", lambda *_, **__: whole)
    ours = current_schema()
    former = schema_of(ours.classes | {"trainer.step": {"phases": "generate update"}})
    for schema, fits in ((ours, True), (former, False)):
        (tmp_path / SCHEMA_VERSION).write_bytes(render_schema(schema))
        with nullcontext() if fits else pytest.raises(SchemaMismatch, match="another state layout"):
            require_verified(tmp_path)


def test_a_rank_decodes_only_its_own_rollouts_that_lie_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(private_dir(tmp_path / "run"))
    for rank in (0, 1):
        with Ledger(paths, 1, rank) as journal:
            for step, i in ((0, 0), (1, 0), (1, 1), (2, 0)):
                journal.append(step, i * 2 + rank, {"sample_id": np.array([step, i, rank])})
    decoded: list[object] = []
    unpack = ledger.unpack

    def count(*args: Any, **kwargs: Any) -> Any:
        decoded.append(kwargs["where"])
        return unpack(*args, **kwargs)

    monkeypatch.setattr(ledger, "unpack", count)
    state = fresh_state(CONFIG)
    state.position = Position(1, "generate", 1)
    alone = Collective(None)
    replay = load_replay(paths, state, StepShape.of(CONFIG), 1, alone)
    assert load_replay(paths, state, StepShape.of(CONFIG), None, alone) == {}
    assert {key: arrays["sample_id"].tolist() for key, arrays in replay.items()} == {
        (1, 3): [1, 1, 1],
        (2, 1): [2, 0, 1],
    }
    assert len(decoded) == 3  # of the running step all: one may say that the others were refused


def test_a_state_that_may_hold_refused_rollouts_goes_back_before_them_and_no_other_does(
    tmp_path: Path,
) -> None:
    paths = RunPaths(private_dir(tmp_path / "run"))
    with Ledger(paths, 1, 1) as journal:
        for micro_batch in (1, 3):
            journal.append(1, micro_batch, {"sample_id": np.array([0])})
            journal.append(1, micro_batch, {})
        journal.append(1, 1, {"sample_id": np.array([1])})  # sampled anew, before the next end
    shape = StepShape.of(CONFIG)
    for phase, back in (("generate", True), ("score", True), ("advantage", True), ("update", False)):
        state = fresh_state(CONFIG)
        state.position = Position(1, phase, 1 if phase == "generate" else 0)  # type: ignore[arg-type]
        state.buffers.rollouts.append({})
        replay = load_replay(paths, state, shape, 1, Collective(None))
        assert (state.position == Position(1)) is back
        assert (not state.buffers.rollouts) is back
        assert list(replay) == ([(1, 1)] if back else [])
    state = fresh_state(CONFIG)
    state.position = Position(2, "score")
    load_replay(paths, state, shape, 1, Collective(None))
    assert state.position == Position(2, "score")


def test_ranks_that_torchrun_did_not_start_or_too_many_of_them_are_refused_before_they_meet() -> None:
    place = Place(rank=0, local_rank=0, world_size=3)
    with pytest.raises(ConfigError, match="found 3, expected 2"), process_group(CONFIG, place):
        pass
    with pytest.raises(ConfigError, match="torchrun"):
        Place.from_environ({"RANK": "0"})


def test_the_layout_of_the_first_start_is_kept_whatever_shape_comes_later(tmp_path: Path) -> None:
    paths = RunPaths(private_dir(tmp_path / "run"))
    (private_dir(tmp_path / "data") / "a.jsonl").write_text("{}\n")
    data = fingerprint(tmp_path / "data")
    first = check_or_write(paths, describe(CONFIG, tmp_path / "data", data, "gloo"))
    assert check_or_write(paths, msgspec.structs.replace(first, data_root="/moved")) == first
    wider = run_config(ranks=4)
    assert check_or_write(paths, describe(wider, tmp_path / "data", data, "gloo")) == first
    split = msgspec.structs.replace(first, topology=Topology(dp=1, tp=2))
    assert check_or_write(paths, split) == first
    paths.orchestration.chmod(0o600)
    paths.orchestration.write_bytes(b"{}")
    with pytest.raises(CheckpointCorrupt):
        check_or_write(paths, first)


def test_a_layout_that_cannot_be_read_just_now_is_neither_refused_nor_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(private_dir(tmp_path / "run"))
    (private_dir(tmp_path / "data") / "a.jsonl").write_text("{}\n")
    layout = describe(CONFIG, tmp_path / "data", fingerprint(tmp_path / "data"), "gloo")
    check_or_write(paths, layout)
    before = paths.orchestration.read_bytes()

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("verl_slurm.trainer.state.orchestration.read_regular", fail)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            check_or_write(paths, layout)
    assert paths.orchestration.read_bytes() == before


def test_a_directory_that_is_no_run_ends_with_one_line_and_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(entry.CONTROL_VARIABLE, raising=False)
    assert entry.main(["--run", str(tmp_path), "--attempt", "1"]) == ExitCode.NOT_FOUND
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "not a run directory" in error


def test_a_rank_without_its_key_is_refused_before_it_reads_or_makes_anything(tmp_path: Path) -> None:
    encryption = EncryptionConfig(key_file=str(tmp_path / "gone.key"))
    tmp_path.chmod(0o700)
    with pytest.raises(KeyRefused, match="gone.key"):
        build_loop(
            run_config(encryption=encryption),
            RunPaths(tmp_path),
            attempt=1,
            resume="",
            device=torch.device("cpu"),
            ranks=Collective(None),
            line=NoDaemon(),
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "inverse_sqrt", "constant"])
def test_a_run_that_was_made_longer_goes_on_whatever_its_rates_would_have_been(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    decay = 10 if schedule == "wsd" else 0
    train = TrainConfig(steps=20, warmup_steps=2, lr_schedule=schedule, lr_decay_steps=decay)  # type: ignore[arg-type]
    before = msgspec.structs.replace(CONFIG, train=train)
    files = {
        "config.yaml": dump(before),
        "scheduler.json": msgspec.json.encode(schedule_record(before.train, 15)),
    }

    class Reader:
        def __init__(self, directory: Path, keys: object) -> None:
            self.directory = directory

        def read(self, name: str) -> bytes:
            return files[name]

    monkeypatch.setattr(resuming, "CheckpointReader", Reader)
    monkeypatch.setattr(resuming, "read_tensors", lambda *_, **__: None)
    monkeypatch.setattr(resuming, "_my_runtime_state", lambda *_: SimpleNamespace(step=15))
    monkeypatch.setattr(resuming, "restore_state", lambda *_, where: where)

    def load(*, adopted: bool = False, **changes: object) -> object:
        now = msgspec.structs.replace(before, train=msgspec.structs.replace(before.train, **changes))
        none: Any = None
        return resuming.load_state(Path("ckpt"), now, StepShape.of(now), {}, none, none, adopted=adopted)

    assert load() == load(steps=30) == Path("ckpt")
    with pytest.raises(ConfigError, match="learning rates are not those"):
        load(steps=30, actor_lr=0.25)
    # Another run's: a branch with a rate of its own.
    assert load(steps=30, actor_lr=0.25, adopted=True) == Path("ckpt")
