"""What an export refuses, how it ends early, and that it leaves nothing then."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.export.conftest import fill_here, wish
from verl_slurm.base.errors import CheckpointCorrupt, DataError, NotFound, PermissionRefused, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.cli.__main__ import main
from verl_slurm.export import exporting
from verl_slurm.export.exporting import export as export_checkpoint

pytestmark = pytest.mark.torch


def test_a_damaged_checkpoint_is_refused_before_anything_is_made(
    trained: Any, checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "checkpoints" / checkpoint.name
    shutil.copytree(checkpoint, copy)
    shard = copy / "actor" / "rank_0000.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointCorrupt, match="does not verify"):
        export_checkpoint(copy, wish(tmp_path / "out", trained.base))
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_other_parts_is_refused_by_name(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_slurm.checkpoint.format.tensor_index import TensorEntry
    from verl_slurm.export.skeleton import build_skeleton, check_fit

    skeleton = build_skeleton(trained.base, "actor", 64, where=trained.base)
    good = {n: TensorEntry(dtype="float32", shape=s, pieces=()) for n, s in skeleton.shapes.items()}
    check_fit(skeleton, good, where=tmp_path)
    first = next(iter(good))
    for change, word in (
        ({n: i for n, i in good.items() if n != first}, f"no {first}"),
        (good | {"more": good[first]}, "more is left over"),
        (
            good | {first: TensorEntry(dtype="float32", shape=(1,), pieces=())},
            f"{first} is .1., the config says",
        ),
    ):
        with pytest.raises(DataError, match=word):
            check_fit(skeleton, change, where=tmp_path)


def refused(capfd: Any, *words: object) -> tuple[int, str]:
    """Exit code and the line of an export that must be refused, behind that which says what is done."""
    code = main(["export", *map(str, words)])
    said = capfd.readouterr()
    assert said.out == ""
    *before, line = said.err.splitlines()
    assert all(text.startswith("verl-slurm: exporting ") for text in before)
    return code, line


def test_bad_places_are_refused_with_one_line_and_left_alone(
    trained: Any, checkpoint: Path, tmp_path: Path, capfd: Any
) -> None:
    full, link = tmp_path / "full", tmp_path / "link"
    full.mkdir()
    (full / "mine").write_text("keep")
    link.symlink_to(full)
    before = sorted(tmp_path.rglob("*"))
    for out, code, word in (
        (full, ExitCode.PERMISSION, "in the way"),
        (link, ExitCode.PERMISSION, "in the way"),
        (full / "mine", ExitCode.PERMISSION, "in the way"),
        (tmp_path / "no" / "out", ExitCode.NOT_FOUND, "mkdir -p"),
        (checkpoint / "out", ExitCode.PERMISSION, "among checkpoints"),
        (checkpoint.parent / "out", ExitCode.PERMISSION, "among checkpoints"),
    ):
        found, line = refused(capfd, checkpoint, "--to", "hf", "--out", out)
        assert (found, word in line) == (code, True), line
    out = tmp_path / "out"
    for words, code in (
        ((tmp_path / "nowhere",), ExitCode.NOT_FOUND),
        ((full,), ExitCode.NOT_FOUND),
        (("step_000099", "--run", trained.paths.root), ExitCode.NOT_FOUND),
        (("../run", "--run", trained.paths.root), ExitCode.NOT_FOUND),
    ):
        assert refused(capfd, *words, "--to", "hf", "--out", out)[0] == code
    assert sorted(tmp_path.rglob("*")) == before


def test_another_base_model_is_refused_and_nothing_half_made_is_left(
    trained: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_here(monkeypatch)
    other = tmp_path / "other"
    shutil.copytree(trained.base, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copyfile(trained.base / "config.json", bare / "config.json")
    before = sorted(tmp_path.iterdir())
    for model, word in (
        (other, "is not of this model"),
        (bare, "no tokenizer"),
        (tmp_path / "nothing", "no model config"),
    ):
        with pytest.raises(DataError, match=word):
            export_checkpoint(checkpoint, wish(tmp_path / "out", model))
    assert sorted(tmp_path.iterdir()) == before


def test_a_base_model_that_changed_since_the_start_is_refused_unless_named(
    trained: Any, make_trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_slurm.dataset.fingerprint.data_record import fingerprint

    fill_here(monkeypatch)
    mine = make_trained(tied=False)
    path = mine.save(frozen={"reference": fingerprint(mine.base).digest})
    export_checkpoint(path, wish(tmp_path / "first", mine.base))
    (mine.base / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="has changed since"):
        export_checkpoint(path, wish(tmp_path / "second", mine.base))
    export_checkpoint(path, wish(tmp_path / "third", trained.base, is_first_model=False))
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("end", ["error", "interrupt", "terminate", "storage"])
def test_whatever_ends_it_early_leaves_nothing(
    end: str, trained: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    def fill(order: exporting.ExportOrder, _: object) -> int:
        half = order.staging / "half"
        half.write_text("half")
        if end == "error":
            raise VerlSlurmError("the export broke")
        if end == "interrupt":
            raise KeyboardInterrupt
        if end == "terminate":
            signal.raise_signal(signal.SIGTERM)
        raise OSError(28, os.strerror(28), str(half))

    monkeypatch.setattr(exporting, "fill", fill)
    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises((VerlSlurmError, KeyboardInterrupt)) as caught:
        export_checkpoint(checkpoint, wish(tmp_path / "out", trained.base))
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is former
    if end == "storage":
        assert isinstance(caught.value, VerlSlurmError)
        assert "No space left" in caught.value.one_line()


@pytest.mark.parametrize("layout", ["hf", "split"])
def test_storage_that_is_full_is_said_in_one_line(
    layout: str, trained: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    fill_here(monkeypatch)
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, former[1]))
    try:
        with pytest.raises(PermissionRefused, match="could not be written.*File too large"):
            export_checkpoint(checkpoint, wish(tmp_path / "out", trained.base, to=layout))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_is_killed_or_refuses_says_so_in_one_line(
    trained: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "fake_python"
    code.write_text("#!/bin/sh\necho '{\"total\": 5}'\nkill -KILL $$\n")
    code.chmod(0o700)
    monkeypatch.setattr(exporting.sys, "executable", str(code))
    with pytest.raises(VerlSlurmError, match="killed by SIGKILL.*more memory"):
        export_checkpoint(checkpoint, wish(tmp_path / "out", trained.base))
    code.write_text('#!/bin/sh\necho \'{"error": {"what": "no room"}, "exit_code": 12}\'\nexit 12\n')
    with pytest.raises(VerlSlurmError, match="no room") as caught:
        export_checkpoint(checkpoint, wish(tmp_path / "out", trained.base))
    assert caught.value.exit_code == ExitCode.PERMISSION
    assert [path.name for path in tmp_path.iterdir()] == ["fake_python"]


def test_the_child_opens_no_checkpoint_but_the_verified_one(
    trained: Any, checkpoint: Path, tmp_path: Path
) -> None:
    from verl_slurm.export import __main__ as child

    asked = wish(tmp_path / "out", trained.base)
    order = exporting.ExportOrder(
        checkpoint=checkpoint, digest="0" * 64, staging=tmp_path, key_file=None, wish=asked
    )
    said: list[Any] = []
    code = child.answer(order, said.append)
    assert code == said[-1]["exit_code"] == ExitCode.CORRUPT
    assert "has changed since it was verified" in said[-1]["error"]["what"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["verified", "filled", "read"])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_named_and_not_the_output(
    moment: str, make_trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_slurm.checkpoint.store import reader

    fill_here(monkeypatch)
    mine = make_trained(tied=False)
    path = mine.save()
    module = {
        "verified": (exporting, "verify"),
        "filled": (exporting, "fill"),
        "read": (reader, "read_checked"),
    }
    owner, name = module[moment]
    real = getattr(owner, name)

    def pruned(*args: Any, **options: Any) -> Any:
        shutil.rmtree(path, ignore_errors=True)
        return real(*args, **options)

    monkeypatch.setattr(owner, name, pruned)
    with pytest.raises(NotFound, match="removed while it was read") as caught:
        export_checkpoint(path, wish(tmp_path / "out", mine.base))
    said = caught.value.one_line()
    assert str(path) in said
    assert "cp -a" in said
    assert "--out" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", [errno.EIO, errno.ESTALE])
def test_storage_that_does_not_give_the_checkpoint_is_not_called_that_of_the_output(
    fault: int, trained: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_slurm.checkpoint.store import reader
    from verl_slurm.export import __main__ as child

    def fails(root: int, readings: Any, *, on_problem: Any, **_: Any) -> None:
        on_problem(readings[0].entry.path, OSError(fault, os.strerror(fault)))

    manifest = read_manifest(checkpoint)
    order = exporting.ExportOrder(
        checkpoint=checkpoint,
        digest=manifest.digest,
        staging=tmp_path,
        key_file=None,
        wish=wish(tmp_path / "out", trained.base),
    )
    monkeypatch.setattr(reader, "read_checked", fails)
    said: list[Any] = []
    assert child.answer(order, said.append) == ExitCode.PERMISSION
    error = said[-1]["error"]
    assert (error["what"], error["found"]) == ("the checkpoint cannot be read", os.strerror(fault))
    assert error["where"].startswith(str(checkpoint))
    assert "--out" not in error["remedy"]
