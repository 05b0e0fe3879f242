"""Checkpoints that are divided among another number of ranks: what is kept, what is refused, and what is left."""

import errno
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests.builders import begun_run
from tests.verl.fake_shards import fsdp2_step, gathered
from verl_slurm.base.errors import CheckpointCorrupt, ConfigError, Fenced, NoRoom
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import take_epoch
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.storage import FreeSpace, judge_room
from verl_slurm.checkpoint.store.loop_checkpoint import LoopSave, commit_tree, for_ranks
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.cli.__main__ import main
from verl_slurm.verl.positions import Positions, positions_file
from verl_slurm.verl.reshard import apply as applying, checkpoint as resharding
from verl_slurm.verl.reshard.at_start import prepare_ranks
from verl_slurm.verl.reshard.checkpoint import Source, open_source, plan_source, write_step
from verl_slurm.verl.reshard.plan import ReshardPlan
from verl_slurm.verl.reshard.torch_file import Part
from verl_slurm.verl.tracker import tracker_file

pytestmark = pytest.mark.torch


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return begun_run(tmp_path / "run")


def saved(paths: RunPaths, step: int = 4, ranks: int = 2, **how: Any) -> Path:
    """A checkpoint of a run of verl's PPO, with an actor and a critic."""
    work = paths.work(1)
    work.mkdir(parents=True, exist_ok=True)
    own = fsdp2_step(work, step, ranks, **{"roles": ("actor", "critic"), **how})
    texts = {**tracker_file(step), **positions_file(Positions(32, {"a": 31}))}
    save = LoopSave(guest="verl", step=step, epoch=1, world_size=ranks)
    return paths.checkpoints / commit_tree(paths, save, {own.name: own}, texts=texts).name


def divided(step: Path, ranks: int, place: Path) -> Path:
    source = open_source(step)
    place.mkdir()
    return write_step(source, plan_source(source, ranks), place).path


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    assert len(ours) == len(theirs) > 15
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


# ---- what is kept


@pytest.mark.scenario("L21")
def test_two_ranks_three_one_and_two_hold_the_same_tensors(
    tmp_path: Path,
) -> None:
    first = step = fsdp2_step(tmp_path, 4, 2)
    for ranks in (3, 1, 2):
        step = divided(step, ranks, tmp_path / f"of_{ranks}_{step.parent.name[-1]}")
        assert same(gathered(step / "actor"), gathered(first / "actor"))
    # Rank 0 was there all the time.
    name = "actor/extra_state_world_size_2_rank_0.pt"
    assert (step / name).read_bytes() == (first / name).read_bytes()
    assert (step / "data.pt").read_bytes() == (first / "data.pt").read_bytes()


@pytest.mark.parametrize("ranks", [1, 2, 4, 5, 9])
def test_more_ranks_than_rows_get_parts_without_rows(tmp_path: Path, ranks: int) -> None:
    first = fsdp2_step(tmp_path, 4, 3)
    step = divided(first, ranks, tmp_path / "other")
    assert same(gathered(step / "actor"), gathered(first / "actor"))


def test_other_dimensions_and_replicas_stay_what_they_are(tmp_path: Path) -> None:
    placements = {"embed": Shard(1), "layer.w": Shard(1), "layer.b": Replicate()}
    first = fsdp2_step(tmp_path, 4, 2, placements=placements)
    step = divided(first, 3, tmp_path / "other")
    assert same(gathered(step / "actor"), gathered(first / "actor"))
    shard = torch.load(step / "actor/model_world_size_3_rank_2.pt", weights_only=False)
    assert [shard[name].placements[0] for name in placements] == list(placements.values())
    assert shard["embed"].to_local().shape == (7, 1)


def test_a_tensor_of_two_names_lies_once_in_each_file(tmp_path: Path) -> None:
    step = divided(fsdp2_step(tmp_path, 4, 2), 3, tmp_path / "other")
    shard = torch.load(step / "actor/model_world_size_3_rank_0.pt", weights_only=False)
    assert shard["head"].to_local().data_ptr() == shard["embed"].to_local().data_ptr()


def test_ranks_that_stay_keep_their_generators_and_new_ones_get_their_own(tmp_path: Path) -> None:
    first = fsdp2_step(tmp_path, 4, 2)
    found = []
    for place in ("one", "two"):
        actor = divided(first, 4, tmp_path / place) / "actor"
        names = [f"extra_state_world_size_4_rank_{rank}.pt" for rank in range(4)]
        found.append([torch.load(actor / name, weights_only=False) for name in names])
    before = [
        torch.load(first / f"actor/extra_state_world_size_2_rank_{rank}.pt", weights_only=False)
        for rank in range(2)
    ]
    for kind in ("cpu", "cuda"):
        states = [one["rng"][kind] for one in found[0]]
        assert [torch.equal(a, b["rng"][kind]) for a, b in zip(states, before, strict=False)] == [True, True]
        assert len({tuple(state.tolist()) for state in states}) == 4
        assert all(torch.equal(a, b["rng"][kind]) for a, b in zip(states, found[1], strict=True))
    assert len({one["rng"]["numpy"][1].tobytes() for one in found[0]}) == 4
    assert len({one["rng"]["random"] for one in found[0]}) == 4
    assert [one["lr_scheduler"] for one in found[0]] == [before[0]["lr_scheduler"]] * 4
    # Usable, and not only different.
    torch.set_rng_state(found[0][3]["rng"]["cpu"])
    assert torch.randn(8).unique().numel() == 8


def test_each_loader_of_sft_goes_on_at_the_same_row(tmp_path: Path) -> None:
    first = fsdp2_step(tmp_path, 4, 2, roles=("",), samples=12)
    step = divided(first, 3, tmp_path / "other")
    assert same(gathered(step), gathered(first))
    states = [torch.load(step / f"data_{rank}.pt", weights_only=False)["_snapshot"] for rank in range(3)]
    given_out = [one["_main_snapshot"]["_sampler_iter_state"]["samples_yielded"] for one in states]
    assert given_out == [8, 8, 8]
    # Of two ranks' batches each; the seed of a loader's workers is that of its rank, or of rank 0.
    assert [one["_main_snapshot"]["_base_seed"] for one in states] == [77, 78, 77]
    assert {one["_snapshot_step"] for one in states} == {2}


def test_a_checkpoint_of_a_run_becomes_one_that_verifies_with_the_same_files(
    paths: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(paths)
    before = files(source)
    out = tmp_path / "out"
    assert main(["reshard", str(paths.root), "--ranks", "3", "--out", str(out), "--json"]) == ExitCode.OK
    said = json.loads(capsys.readouterr().out)
    made = out / source.name
    assert said["checkpoint"] == str(made)
    assert said["ranks"] == {"before": 2, "after": 3}
    assert [one["role"] for one in said["models"]] == ["actor", "critic"]
    assert verify(made).ok
    ours, theirs = read_manifest(made), read_manifest(source)
    assert (ours.world_size, ours.topology.dp, ours.step, ours.name) == (3, 3, 4, theirs.name)
    for role in ("actor", "critic"):
        assert same(gathered(made / "global_step_4" / role), gathered(source / "global_step_4" / role))
    for name in (
        "positions.json",
        "latest_checkpointed_iteration.txt",
        "config.yaml",
        "global_step_4/data.pt",
    ):
        assert (made / name).read_bytes() == before[name]
    record = json.loads((made / "metadata.json").read_text())["resharded"]
    assert record == {"ranks": 2, "digest": theirs.digest, "tensors": said["tensors_sha256"]}
    assert os.listdir(out) == [made.name]
    assert files(source) == before


def test_a_dry_run_prints_the_plan_that_is_carried_out_and_writes_nothing(
    paths: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(paths)
    words = ["reshard", str(paths.root), "--ranks", "3", "--out", str(tmp_path / "out")]
    assert main([*words, "--dry-run"]) == ExitCode.OK
    planned = capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["run"]
    assert main(words) == ExitCode.OK
    done = capsys.readouterr().out
    assert "2 -> 3" in planned
    assert done.startswith(planned)
    assert "every tensor has the same bits" in done.removeprefix(planned)


def test_a_step_of_plain_verl_becomes_a_directory_that_verl_resumes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = fsdp2_step(tmp_path / "plain", 4, 2)
    out = tmp_path / "out"
    assert main(["reshard", str(first), "--ranks", "3", "--out", str(out)]) == ExitCode.OK
    assert (out / "latest_checkpointed_iteration.txt").read_bytes() == b"4"
    assert same(gathered(out / "global_step_4" / "actor"), gathered(first / "actor"))


# ---- what is refused


def test_megatrons_checkpoints_are_refused_with_verls_merger(tmp_path: Path) -> None:
    step = tmp_path / "global_step_4"
    (step / "actor" / "dist_ckpt").mkdir(parents=True)
    (step / "actor" / "dist_ckpt" / "__0_0.distcp").write_bytes(b"x")
    torch.save({}, step / "data.pt")
    step.chmod(0o700)
    with pytest.raises(ConfigError) as caught:
        plan_source(resharding.Source(directory=step, step=step, manifest=None), 3)
    line = caught.value.one_line()
    assert "Megatron" in line
    assert f"python -m verl.model_merger merge --backend megatron --local_dir {step}/actor" in line


@pytest.mark.scenario("L21")
def test_replicas_of_shards_are_refused(tmp_path: Path) -> None:
    step = fsdp2_step(tmp_path, 4, 4, mesh=(2, 2))
    with pytest.raises(ConfigError, match=r"mesh of ddp x fsdp.*fsdp_size"):
        plan_source(open_source(step), 2)


def struck(shard: Path) -> None:
    """Flips a bit of a number."""
    with zipfile.ZipFile(shard) as archive:
        content = archive.read(next(name for name in archive.namelist() if name.endswith("/data/0")))
    data = bytearray(shard.read_bytes())
    data[data.index(content)] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize("what", ["bit", "shard", "step"])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_made(
    paths: RunPaths, tmp_path: Path, what: str
) -> None:
    source = saved(paths)
    shard = source / "global_step_4/actor/model_world_size_2_rank_1.pt"
    if what == "bit":
        struck(shard)
    elif what == "shard":
        shard.unlink()
    # A file that torch's checksums say nothing of; the manifest does, also where its step is named.
    else:
        (source / "global_step_4/actor/huggingface/config.json").write_text("{}")
    place = source / "global_step_4" if what == "step" else source
    words = ["reshard", str(place), "--ranks", "3", "--out", str(tmp_path / "out")]
    assert main(words) == ExitCode.CORRUPT
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_flipped_bit_in_a_step_of_plain_verl_is_refused(tmp_path: Path) -> None:
    step = fsdp2_step(tmp_path / "plain", 4, 2)
    struck(step / "actor/optim_world_size_2_rank_1.pt")
    assert main(["reshard", str(step), "--ranks", "3", "--out", str(tmp_path / "out")]) == ExitCode.CORRUPT
    assert sorted(os.listdir(tmp_path)) == ["plain"]


def test_ranks_that_disagree_about_what_all_of_them_hold_are_refused(tmp_path: Path) -> None:
    step = fsdp2_step(tmp_path, 4, 2)
    shard = step / "actor/model_world_size_2_rank_1.pt"
    torch.save({**torch.load(shard, weights_only=False), "buffer": torch.arange(3) + 1}, shard)
    with pytest.raises(CheckpointCorrupt, match="buffer differs between rank 0 and rank 1"):
        divided(step, 3, tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda value: {**value, "more": torch.ones(2)}, "holds other things"),
        (lambda value: {**value, "odd": torch.ones(4, 4).t()}, "not contiguous"),
        (lambda value: {**value, "odd": torch.ones(2, dtype=torch.complex64)}, "ComplexFloatStorage"),
    ],
    ids=["more", "transposed", "complex"],
)
def test_what_is_not_understood_is_refused_by_name(
    tmp_path: Path, change: Callable[[Any], Any], found: str
) -> None:
    step = fsdp2_step(tmp_path, 4, 2)
    shard = step / "actor/model_world_size_2_rank_1.pt"
    torch.save(change(torch.load(shard, weights_only=False)), shard)
    with pytest.raises(ConfigError, match=found):
        plan_source(open_source(step), 3)


class _Program:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_program_in_a_shard_is_carried_over_and_never_run(tmp_path: Path) -> None:
    step, mark = fsdp2_step(tmp_path, 4, 2), tmp_path / "mark"
    for rank in range(2):
        shard = step / f"actor/model_world_size_2_rank_{rank}.pt"
        torch.save({**torch.load(shard, weights_only=False), "odd": _Program(mark)}, shard)
    divided(step, 3, tmp_path / "other")
    assert not mark.exists()


def test_the_native_trainers_checkpoints_need_no_dividing(paths: RunPaths) -> None:
    save = LoopSave(guest="loop", step=4, epoch=1, world_size=2)
    part = paths.work(1) / "guest"
    part.mkdir(parents=True)
    (part / "x").write_bytes(b"x")
    name = commit_tree(paths, save, {"guest": part}).name
    with pytest.raises(ConfigError, match=r"only checkpoints of verl.*dp_size=2"):
        open_source(paths.checkpoints / name)


# ---- what goes wrong on the way


@pytest.mark.scenario("L21")
def test_numbers_at_another_place_are_found_before_anything_is_kept(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the comparison can find: a plan that is carried out wrongly."""
    saved(paths)
    right = applying.parts_of

    def wrong(move: Any, fds: Any, after: int, rank: int) -> list[Part]:
        parts = right(move, fds, after, rank)
        if move.tensor.path == "state.1.exp_avg_sq" and rank == 1:
            return [Part(part.num_bytes, part.fd, part.offset - 4) for part in parts]
        return parts

    monkeypatch.setattr(applying, "parts_of", wrong)
    words = ["reshard", str(paths.root), "--ranks", "3", "--out", str(tmp_path / "out")]
    assert main(words) == ExitCode.CORRUPT
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_disk_that_fills_up_leaves_nothing_behind(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(paths)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(applying, "write_torch_file", full)
    words = ["reshard", str(paths.root), "--ranks", "3", "--out", str(tmp_path / "out")]
    assert main(words) == ExitCode.PERMISSION
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_disk_without_room_is_refused_before_anything_is_written(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_source(open_source(saved(paths)), 3)
    monkeypatch.setattr(resharding, "room_for", lambda _, need: judge_room(FreeSpace(bytes=10_000), need))
    with pytest.raises(NoRoom, match="10 kB|0.0 GB|needed"):
        resharding.require_room(plan, paths.root)


def test_a_place_among_the_runs_checkpoints_is_refused(paths: RunPaths) -> None:
    source = saved(paths)
    words = ["reshard", str(source), "--ranks", "3", "--out", str(paths.checkpoints / "step_000005")]
    assert main(words) == ExitCode.PERMISSION


# ---- at a start


@pytest.mark.scenario("L21")
def test_a_start_divides_once_and_the_ranks_read_the_copy(paths: RunPaths) -> None:
    source = saved(paths)
    manifest = read_manifest(source)
    assert for_ranks(paths, source.name, 3) == source
    made = prepare_ranks(paths, 1, manifest, 3)
    assert made is not None
    assert for_ranks(paths, source.name, 3) == made.path == paths.resharded.checkpoints / source.name
    assert for_ranks(paths, source.name, 2) == source
    written = made.path.stat().st_ino
    assert prepare_ranks(paths, 1, manifest, 3) is None
    assert made.path.stat().st_ino == written


@pytest.mark.parametrize("why", ["damaged", "of another number", "of another save"])
def test_a_copy_that_does_not_fit_is_made_again(paths: RunPaths, why: str) -> None:
    source = saved(paths)
    manifest = read_manifest(source)
    ranks = 4 if why == "of another number" else 3
    made = prepare_ranks(paths, 1, manifest, 3)
    assert made is not None
    if why == "damaged":
        shard = made.path / "global_step_4/actor/model_world_size_3_rank_1.pt"
        shard.write_bytes(shard.read_bytes()[:-1])
    elif why == "of another save":
        copy = made.path / "metadata.json"
        text = copy.read_text()
        copy.write_text(text.replace(manifest.digest, "0" * 64))
    again = prepare_ranks(paths, 1, manifest, ranks)
    assert again is not None
    assert verify(again.path).ok
    assert read_manifest(again.path).world_size == ranks


def test_a_copy_goes_when_the_run_no_longer_resumes_from_it(paths: RunPaths) -> None:
    manifest = read_manifest(saved(paths))
    assert prepare_ranks(paths, 1, manifest, 3) is not None
    newer = read_manifest(saved(paths, 6, 3))
    assert prepare_ranks(paths, 1, newer, 3) is None
    assert [name for name in os.listdir(paths.resharded.checkpoints) if name.startswith("step")] == []


def test_an_attempt_that_is_to_end_or_was_replaced_leaves_no_copy(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_manifest(saved(paths))

    class Leaving(Exception):
        pass

    def leave(_: int) -> None:
        raise Leaving

    with pytest.raises(Leaving):
        prepare_ranks(paths, 1, manifest, 3, leave)
    assert os.listdir(paths.resharded.checkpoints) == []
    write = resharding.apply_plan

    def replaced(plan: ReshardPlan, *args: Any) -> str:
        take_epoch(paths, job_id="2", restart=0)
        return write(plan, *args)

    monkeypatch.setattr(resharding, "apply_plan", replaced)
    with pytest.raises(Fenced):
        prepare_ranks(paths, 1, manifest, 3)
    assert os.listdir(paths.resharded.checkpoints) == []


def _doubling(levels: int) -> bytes:
    """A pickle of a few bytes that is 2**levels lists for whoever walks through it."""
    each = (b"]h%ca" % (level - 1) + b"h%ca" % (level - 1) + b"q%c" % level for level in range(1, levels))
    return b"\x80\x02]q\x00" + b"".join(each) + b"}X\x01\x00\x00\x00ah%cs." % (levels - 1)


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("data_0.pt", _doubling(40)),
        ("model_world_size_2_rank_1.pt", b"\x80\x02}X\x01\x00\x00\x00a(" + b"]" * (12 << 20) + b"ls."),
    ],
    ids=["nested", "long"],
)
def test_a_small_file_that_describes_gigabytes_is_refused_in_one_line(
    tmp_path: Path, file: str, data: bytes
) -> None:
    step = fsdp2_step(tmp_path, 4, 2, roles=("",), samples=12)
    shard = step / file
    with zipfile.ZipFile(shard) as old:
        members = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(shard, "w", zipfile.ZIP_STORED) as new:
        for name, text in members.items():
            new.writestr(name, data if name.endswith("data.pkl") else text)
    with pytest.raises(ConfigError, match="more memory than their own size and 512 MiB"):
        plan_source(Source(directory=step, step=step, manifest=None), 3)
