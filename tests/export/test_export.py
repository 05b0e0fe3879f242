"""Exports for real: what is written is loaded by those it is for, and is what was trained."""

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.export.conftest import fill_here, wish
from verl_slurm.base.errors import NotFound
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.cli.__main__ import main
from verl_slurm.export.exporting import RECORD, export as export_checkpoint

pytestmark = pytest.mark.torch


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


@pytest.mark.long
@pytest.mark.scenario("USE19")
def test_export_says_at_once_what_it_does_before_the_writer_has_started(
    trained: Any, checkpoint: Path, tmp_path: Path, capfd: Any
) -> None:
    trained.paths.run_yaml.write_bytes((checkpoint / "config.yaml").read_bytes())
    words = [
        "export",
        "step_000002",
        "--run",
        str(trained.paths.root),
        "--to",
        "hf",
        "--out",
        str(tmp_path / "m"),
    ]
    assert main(words) == 0
    said = capfd.readouterr()
    assert said.err.splitlines()[0].startswith("verl-slurm: exporting step_000002, ")
    assert said.out.startswith("exported")


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
    from verl_slurm.export.source import ExportSource

    done: list[int] = []
    source = ExportSource(CheckpointReader(checkpoint), report=done.append)
    monkeypatch.setattr("verl_slurm.export.source._GROUP_BYTES", 100_000)
    skeleton = build_skeleton(trained.base, "actor", 64, where=trained.base)
    monkeypatch.setattr(hf, "SHARD_BYTES", 400_000)
    hf.write_hf(source, "actor", skeleton, trained.base, tmp_path, dtype=None)
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

    from verl_slurm.checkpoint.format.tensor_index import (
        Piece,
        TensorEntry,
        TensorIndex,
        render_index,
        tensor_file,
    )
    from verl_slurm.checkpoint.store import commit as door
    from verl_slurm.checkpoint.store.reader import CheckpointReader
    from verl_slurm.checkpoint.store.verify import read_manifest
    from verl_slurm.save.ranks.loader import read_whole

    paths.root.mkdir()
    staging = door.begin(paths, 2, 0)
    shutil.copytree(
        whole, staging.directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json")
    )
    for domain in ("actor", "critic", "optimizer"):
        files, entries = [bytearray(), bytearray()], {}
        index = CheckpointReader(whole).index(domain)
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
    return door.commit(staging, manifest, attempt_check=lambda: None)


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
    from verl_slurm.cli.checkpoint.export_command import _roles
    from verl_slurm.export.layouts import largest_file, write_layout
    from verl_slurm.export.skeleton import build_skeleton
    from verl_slurm.export.source import ExportSource

    part, out = checkpoint, tmp_path / "out"
    out.mkdir()
    source = ExportSource(CheckpointReader(part))
    for path in [path for path in source.reader.entries if path.startswith("optimizer/")]:
        del source.reader.entries[path]
    skeletons: Any = {"actor": build_skeleton(trained.base, "actor", 64, where=trained.base)}
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
    from verl_slurm.checkpoint.format.tensor_index import TensorEntry
    from verl_slurm.export.source import groups_of

    sizes = (4, 4, 30, 4, 8, 1)
    entries = {f"t{i}": TensorEntry(dtype="uint8", shape=(n,), pieces=()) for i, n in enumerate(sizes)}
    assert list(groups_of(entries, 12)) == [["t0", "t1"], ["t2"], ["t3", "t4"], ["t5"]]
    assert list(groups_of({}, 12)) == []
