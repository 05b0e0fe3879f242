"""Exports for real: what is written is loaded by those it is for, and is what was trained."""

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from verl_slurm.checkpoint import export as exporting
from verl_slurm.checkpoint.export import RECORD, Wish
from verl_slurm.checkpoint.export import export as export_checkpoint
from verl_slurm.cli.__main__ import main
from verl_slurm.errors import CheckpointCorrupt, DataError, NotFound, PermissionRefused, VerlSlurmError
from verl_slurm.exit_codes import ExitCode
from verl_slurm.paths import RunPaths

pytestmark = pytest.mark.torch


def wish(out: Path, model: Path, **changes: Any) -> Wish:
    fields: dict[str, Any] = {
        "to": "hf",
        "roles": ("actor",),
        "dtype": "keep",
        "is_first_model": True,
        "weight_decay": 0.1,
    }
    return Wish(out=out, model=model, **(fields | changes))


def fill_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the part that needs torch run in this process: the same code without two seconds of imports."""
    from verl_slurm.dcp.tensors import Tensors  # noqa: F401 - torch is there
    from verl_slurm.export import __main__ as child

    def fill(directory: Path, digest: str, staging: Path, asked: Wish, progress: Any) -> int:
        import argparse

        peaks = [0]
        options = argparse.Namespace(
            checkpoint=directory,
            digest=digest,
            to=asked.to,
            model=asked.model,
            staging=staging,
            dtype=asked.dtype,
            weight_decay=asked.weight_decay,
            roles=list(asked.roles),
        )
        child._run(options, lambda said: peaks.append(said.get("peak", 0)))
        return max(peaks)

    monkeypatch.setattr(exporting, "_fill", fill)


def logits(model: Any, ids: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=ids).logits


def test_the_command_exports_a_model_that_gives_the_same_logits(
    trained: Any, checkpoint: Path, tmp_path: Path, capfd: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    out = tmp_path / "model"
    words = ["export", "step_000002", "--run", str(trained.paths.root), "--to", "hf", "--out", str(out)]
    trained.paths.run_yaml.write_bytes((checkpoint / "config.yaml").read_bytes())
    assert main([*words, "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert (said["checkpoint"], said["roles"]) == ("step_000002", ["actor"])
    assert said["peak_bytes"] == sum(p.numel() * 4 for p in trained.actor.parameters())

    model = AutoModelForCausalLM.from_pretrained(str(out), local_files_only=True)
    assert model.dtype == torch.float32
    assert torch.equal(logits(model, trained.ids), logits(trained.actor, trained.ids))
    base = AutoModelForCausalLM.from_pretrained(str(trained.base), local_files_only=True)
    assert not torch.equal(logits(model, trained.ids), logits(base, trained.ids))
    tokenizer = AutoTokenizer.from_pretrained(str(out), local_files_only=True)
    assert tokenizer.decode(tokenizer("27+15=")["input_ids"]) == "27+15="
    assert (out / "tokenizer.json").read_bytes() == (trained.base / "tokenizer.json").read_bytes()
    assert GenerationConfig.from_pretrained(str(out)).eos_token_id == tokenizer.eos_token_id
    assert json.loads((out / RECORD).read_text())["checkpoint"]["name"] == "step_000002"
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o600}
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tied_weights_are_written_once_and_tied_again(
    make_trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    trained = make_trained(tied=True)
    fill_here(monkeypatch)
    export_checkpoint(trained.save(), wish(tmp_path / "out", trained.base))
    with safe_open(str(tmp_path / "out" / "model.safetensors"), framework="pt") as file:
        assert "lm_head.weight" not in set(file.keys())
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"), local_files_only=True)
    export_checkpoint(trained.save(3), wish(tmp_path / "plain", trained.base, to="single-file"))
    plain = torch.load(tmp_path / "plain" / "actor_model.pt", weights_only=True)
    assert plain["lm_head.weight"].data_ptr() == plain["model.embed_tokens.weight"].data_ptr()
    model.load_state_dict(plain)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model, trained.ids), logits(trained.actor, trained.ids))


def test_a_large_model_is_cut_into_shards_that_load(
    trained: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from verl_slurm.export import hf
    from verl_slurm.export.skeleton import build_skeleton
    from verl_slurm.export.source import Source

    done: list[int] = []
    source = Source(checkpoint, report=done.append)
    monkeypatch.setattr("verl_slurm.export.source._GROUP_BYTES", 100_000)
    skeleton = build_skeleton(trained.base, "actor")
    hf.write_hf(source, "actor", skeleton, trained.base, tmp_path, dtype=None, shard_bytes=400_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(skeleton.shapes)
    assert len(set(index["weight_map"].values())) > 1
    assert (
        index["metadata"]["total_size"]
        == done[-1]
        == sum(i.num_bytes for i in source.entries("actor").values())
    )
    assert done == sorted(done)
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path), local_files_only=True)
    assert torch.equal(logits(model, trained.ids), logits(trained.actor, trained.ids))


def cut_in_two(whole: Path, paths: RunPaths) -> Path:
    """The checkpoint as two ranks would have written it: every matrix halved by rows, the rest by rank 0."""
    import torch

    from verl_slurm.checkpoint import commit as door
    from verl_slurm.checkpoint.tensor_index import Piece, TensorEntry, TensorIndex, render_index, tensor_file
    from verl_slurm.checkpoint.verify import read_manifest
    from verl_slurm.dcp.loader import read_index, read_whole

    staging = door.begin(paths, 2, 0)
    shutil.copytree(
        whole, staging.directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json")
    )
    for domain in ("actor", "critic", "optimizer"):
        files, entries = [bytearray(), bytearray()], {}
        index = read_index(whole, domain)
        for name, tensor in read_whole(whole, domain).items():
            pieces, row = [], 0
            for rank, part in enumerate(tensor.chunk(2) if tensor.dim() > 1 else [tensor]):
                offset = (row, *(0 for _ in part.shape[1:])) if part.dim() else ()
                piece = Piece(
                    file=tensor_file(rank), at=len(files[rank]), offset=offset, shape=tuple(part.shape)
                )
                data = part.reshape(-1).view(torch.uint8).numpy().tobytes()
                files[rank] += data.ljust(-(-len(data) // 64) * 64, b"\0")
                pieces.append(piece)
                row += part.shape[0] if part.dim() else 0
            old = index.tensors[name]
            entries[name] = TensorEntry(dtype=old.dtype, shape=old.shape, pieces=tuple(pieces))
        for rank, data in enumerate(files):
            (staging.directory / domain / tensor_file(rank)).write_bytes(data)
        (staging.directory / domain / "index.json").write_bytes(render_index(TensorIndex(tensors=entries)))
    names = [p.relative_to(staging.directory).as_posix() for p in staging.directory.rglob("*") if p.is_file()]
    entries = tuple(door.seal(staging.directory, sorted(names)))
    manifest = msgspec.structs.replace(read_manifest(whole), files=entries, digest="")
    return door.commit(staging, manifest, epoch_check=lambda: None)


def test_what_several_ranks_wrote_gives_the_same_files(
    trained: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_here(monkeypatch)
    cut = cut_in_two(checkpoint, RunPaths(tmp_path / "run"))
    assert (cut / "actor" / "rank_0001.bin").stat().st_size > 100_000
    for layout in ("hf", "split"):
        files = []
        for number, path in enumerate((checkpoint, cut)):
            out = tmp_path / f"{layout}{number}"
            export_checkpoint(path, wish(out, trained.base, to=layout))
            (out / RECORD).unlink()
            files.append({p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()})
        assert files[0] == files[1]


def test_the_critic_is_exported_in_bfloat16_as_a_token_classifier(
    trained: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForTokenClassification

    fill_here(monkeypatch)
    asked = wish(tmp_path / "out", trained.base, roles=("critic",), dtype="bfloat16")
    export_checkpoint(checkpoint, asked)
    model = AutoModelForTokenClassification.from_pretrained(str(tmp_path / "out"), local_files_only=True)
    assert model.dtype == torch.bfloat16
    assert model.num_labels == 1
    saved = dict(trained.critic.named_parameters())
    assert all(torch.equal(p, saved[name].to(torch.bfloat16)) for name, p in model.named_parameters())


@pytest.mark.parametrize("layout", ["single-file", "split"])
def test_the_plain_files_load_with_weights_only_and_go_on_as_the_saved_run(
    layout: str, trained: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from verl_slurm.export.layouts import FILES
    from verl_slurm.trainer.models import load_causal_lm, load_critic

    fill_here(monkeypatch)
    out = tmp_path / "out"
    done = export_checkpoint(checkpoint, wish(out, trained.base, to=layout, roles=("actor", "critic")))
    files = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert files == {*FILES[layout].values(), RECORD}
    assert done.num_files == len(files)

    def load(what: str) -> Any:
        return torch.load(out / FILES[layout][what], weights_only=True)

    optimizers, schedulers = load("optimizer"), load("scheduler")
    for role, live, fresh in (
        ("actor", trained.actor, load_causal_lm(trained.base)),
        ("critic", trained.critic, load_critic(trained.base)),
    ):
        fresh.load_state_dict(load(role))
        saved = dict(live.named_parameters())
        assert all(torch.equal(p, saved[name]) for name, p in fresh.named_parameters())
        optimizer = torch.optim.AdamW(fresh.parameters())
        optimizer.load_state_dict(optimizers[role])
        (group,) = optimizer.param_groups
        assert group["param_names"] == [name for name, _ in fresh.named_parameters()]
        assert group["lr"] == {"actor": 0.01, "critic": 0.02}[role]
        assert group["weight_decay"] == 0.1
        for mine, theirs in zip(fresh.parameters(), live.parameters(), strict=True):
            old = trained.optimizers[role].state[theirs]
            new = optimizer.state[mine]
            assert new.keys() == old.keys()
            assert all(torch.equal(new[key], old[key]) for key in old)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        scheduler.load_state_dict(schedulers[role])
        assert (scheduler.last_epoch, scheduler.get_last_lr()) == (2, [group["lr"]])


def test_a_checkpoint_saved_in_part_gives_what_it_holds_and_refuses_the_rest(
    trained: Any, checkpoint: Path, tmp_path: Path
) -> None:
    from verl_slurm.cli.export import _roles
    from verl_slurm.export.layouts import largest_file, write_layout
    from verl_slurm.export.skeleton import build_skeleton
    from verl_slurm.export.source import Source

    part, out = tmp_path / checkpoint.name, tmp_path / "out"
    shutil.copytree(checkpoint, part)
    shutil.rmtree(part / "optimizer")
    out.mkdir()
    source = Source(part)
    skeletons: Any = {"actor": build_skeleton(trained.base, "actor")}
    write_layout(source, "split", skeletons, out, dtype=None, weight_decay=0.0)
    assert sorted(path.name for path in out.iterdir()) == ["policy_model", "scheduler"]
    assert largest_file(source, ["actor"], None) == sum(e.num_bytes for e in source.entries("actor").values())

    assert _roles("single-file", None, {"actor", "optimizer"}, part) == ("actor",)
    assert _roles("split", None, {"actor", "critic"}, part) == ("actor", "critic")
    assert _roles("hf", None, {"actor", "critic"}, part) == ("actor",)
    assert _roles("hf", "critic", {"critic"}, part) == ("critic",)
    for asked, there in ((None, {"critic"}), ("critic", {"actor"})):
        with pytest.raises(NotFound, match="does not hold the model"):
            _roles("hf", asked, there, part)  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="no tensors"):
        _roles("split", None, set(), part)


def test_groups_hold_every_name_once_in_order_and_no_more_than_the_limit() -> None:
    from verl_slurm.checkpoint.tensor_index import TensorEntry
    from verl_slurm.export.source import groups_of

    sizes = (4, 4, 30, 4, 8, 1)
    entries = {f"t{i}": TensorEntry(dtype="uint8", shape=(n,), pieces=()) for i, n in enumerate(sizes)}
    assert list(groups_of(entries, 12)) == [["t0", "t1"], ["t2"], ["t3", "t4"], ["t5"]]
    assert list(groups_of({}, 12)) == []


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
    from verl_slurm.checkpoint.tensor_index import TensorEntry
    from verl_slurm.export.skeleton import build_skeleton, check_fit

    skeleton = build_skeleton(trained.base, "actor")
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
    """Exit code and the one line of an export that must be refused."""
    code = main(["export", *map(str, words)])
    said = capfd.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
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
    from verl_slurm.checkpoint.fingerprint import fingerprint

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

    def fill(_d: Path, _g: str, staging: Path, *_: object) -> int:
        (staging / "half").write_text("half")
        if end == "error":
            raise VerlSlurmError("the export broke")
        if end == "interrupt":
            raise KeyboardInterrupt
        if end == "terminate":
            signal.raise_signal(signal.SIGTERM)
        raise OSError(28, os.strerror(28), str(staging / "half"))

    monkeypatch.setattr(exporting, "_fill", fill)
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

    words = ["--checkpoint", checkpoint, "--digest", "0" * 64, "--to", "hf", "--model", trained.base]
    words += ["--staging", tmp_path, "--dtype", "keep", "--roles", "actor"]
    said: list[Any] = []
    code = child.answer(child.parser().parse_args([str(word) for word in words]), said.append)
    assert code == said[-1]["exit_code"] == ExitCode.CORRUPT
    assert "has changed since it was verified" in said[-1]["error"]["what"]
    assert list(tmp_path.iterdir()) == []
