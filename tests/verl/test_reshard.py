"""Checkpoints that are divided among another number of ranks: what is kept, what is refused, and what is left."""

import errno
import itertools
import json
import os
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests.builders import begun_run
from tests.fakes.torch_divider import fake_divider, shard_step
from tests.journals import append_event
from tests.verl.fake_shards import fsdp1_step, fsdp2_step, gathered
from verl_slurm.base.errors import CheckpointCorrupt, ConfigError, Fenced, NoRoom, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import open_directory
from verl_slurm.checkpoint.decide.storage import FreeSpace, judge_room
from verl_slurm.checkpoint.store.loop_checkpoint import LoopSave, commit_tree, for_ranks
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.cli.__main__ import main
from verl_slurm.verl.positions import Positions, positions_file
from verl_slurm.verl.reshard import checkpoint as resharding, torch_shards
from verl_slurm.verl.reshard.checkpoint import DivisionSource, division_of, open_source, prepare_ranks
from verl_slurm.verl.reshard.dividing import Command, RanksPython, start_division, this_python
from verl_slurm.verl.tracker import tracker_file

pytestmark = pytest.mark.torch


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return begun_run(tmp_path / "run")


def committed(paths: RunPaths, own: Path, ranks: int, guest: str = "verl") -> Path:
    """A checkpoint of a run of verl's PPO."""
    step = int(own.name.rpartition("_")[2])
    texts = {**tracker_file(step), **positions_file(Positions(32, {"a": 31}))}
    save = LoopSave(guest=guest, step=step, attempt=1, world_size=ranks)
    return paths.checkpoints / commit_tree(paths, save, {own.name: own}, texts=texts).name


def saved(paths: RunPaths) -> Path:
    """One with an actor and a critic."""
    work = paths.work(1)
    work.mkdir(parents=True, exist_ok=True)
    return committed(paths, fsdp2_step(work, 4, 2, roles=("actor", "critic")), 2)


def divided(step: Path, ranks: int, place: Path) -> Path:
    """The step for other ranks, in this process: torch's import takes seconds."""
    place.mkdir(exist_ok=True)
    with open_directory(step) as root, torch.no_grad():
        torch_shards.divide(torch_shards.read_step(root, step, ranks), place / step.name, lambda _: None)
    return place / step.name


def refused(step: Path, ranks: int, found: str) -> None:
    with open_directory(step) as root, torch.no_grad(), pytest.raises(torch_shards.Unclear, match=found):
        torch_shards.read_step(root, step, ranks)


def planned(step: Path, ranks: int) -> None:
    with division_of(DivisionSource(directory=step, step=step, manifest=None), ranks, this_python):
        pass


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    assert len(ours) == len(theirs) > 8
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def with_pickle(shard: Path, change: Callable[[bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Puts other bytes in the place of a file's pickle."""
    with zipfile.ZipFile(shard) as old:
        members = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(shard, "w", compression) as new:
        for name, text in members.items():
            new.writestr(name, change(text) if name.endswith("data.pkl") else text)


# ---- what is kept


@pytest.mark.scenario("L21")
def test_two_ranks_three_one_and_two_hold_the_same_tensors(tmp_path: Path) -> None:
    first = step = fsdp2_step(tmp_path, 4, 2)
    for ranks in (3, 1, 2):
        step = divided(step, ranks, tmp_path / f"of_{ranks}_{step.parent.name[-1]}")
        assert same(gathered(step / "actor"), gathered(first / "actor"))
    # Rank 0 was there all the time.
    name = "actor/extra_state_world_size_2_rank_0.pt"
    assert (step / name).read_bytes() == (first / name).read_bytes()
    assert (step / "data.pt").read_bytes() == (first / "data.pt").read_bytes()
    # More ranks than rows get parts without rows.
    for ranks in (5, 9):
        step = divided(first, ranks, tmp_path / f"more_{ranks}")
        assert same(gathered(step / "actor"), gathered(first / "actor"))


def test_other_dimensions_and_replicas_stay_what_they_are(tmp_path: Path) -> None:
    placements = {"embed": Shard(1), "layer.w": Shard(1), "layer.b": Replicate()}
    first = fsdp2_step(tmp_path, 4, 2, placements=placements)
    step = divided(first, 3, tmp_path / "other")
    assert same(gathered(step / "actor"), gathered(first / "actor"))
    shard = torch.load(step / "actor/model_world_size_3_rank_2.pt", weights_only=False)
    assert [shard[name].placements[0] for name in placements] == list(placements.values())
    assert shard["embed"].to_local().shape == (7, 1)
    # A tensor of two names lies once in each file.
    assert shard["head"].to_local().data_ptr() == shard["embed"].to_local().data_ptr()


def test_shards_that_gpus_have_saved_are_divided_where_there_is_none(tmp_path: Path) -> None:
    step = fsdp2_step(tmp_path, 4, 2)
    wanted = gathered(step / "actor")

    def on_gpu(data: bytes) -> bytes:
        assert b"X\x03\x00\x00\x00cpu" in data
        return data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")

    for shard in step.glob("actor/[mo]*.pt"):
        with_pickle(shard, on_gpu)
    place = divided(step, 3, tmp_path / "other") / "actor"
    assert same(gathered(place), wanted)
    model = torch.load(place / "model_world_size_3_rank_0.pt", weights_only=True)
    assert model["embed"].device == torch.device("cpu")
    assert model["embed"].device_mesh.device_type == "cuda:0"  # as if the mesh's type was that


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


@pytest.mark.parametrize(
    ("ranks", "loaders", "after", "samples"), [(2, 2, 1, 24), (4, 2, 6, 8), (4, 2, 2, 24)]
)
def test_each_loader_of_sft_has_given_out_its_share_of_the_same_rows(
    tmp_path: Path, ranks: int, loaders: int, after: int, samples: int
) -> None:
    """With four ranks and two loaders, two ranks share a sequence."""
    step = fsdp2_step(tmp_path, 4, ranks, roles=("",), samples=12)
    for rank in range(loaders, ranks):
        (step / f"data_{rank}.pt").unlink()
    with open_directory(step) as root, torch.no_grad():
        assert torch_shards.read_step(root, step, after).data == (after * loaders // ranks, samples)


def test_parts_are_those_that_torch_would_cut_the_whole_tensor_into() -> None:
    for shape in [(1,), (5,), (7, 3), (2, 3), (4, 0), (0, 2), (3, 5, 2), (11, 1, 1)]:
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        for dim, before, after in itertools.product(range(len(shape)), range(1, 6), range(1, 6)):

            def parts(ranks: int, whole: torch.Tensor = whole, dim: int = dim) -> list[torch.Tensor]:
                chunks = list(whole.chunk(ranks, dim))
                return [*chunks, *[whole.narrow(dim, 0, 0)] * (ranks - len(chunks))]

            slot = torch_shards.ValueSlot("x", {}, "x")
            spread = torch_shards.DividedTensor(slot, parts(before), shape, dim, None, new_dim=dim)
            for rank, wanted in enumerate(parts(after)):
                assert torch.equal(spread.new_part(after, rank), wanted), (shape, dim, before, after, rank)
                assert spread.new_shape(after, rank) == wanted.shape


def flat_parts(step: Path, ranks: int) -> list[torch.Tensor]:
    """FSDP1's flat moments put together."""
    states = [
        torch.load(step / f"actor/optim_world_size_{ranks}_rank_{rank}.pt", weights_only=True)["state"]
        for rank in range(ranks)
    ]
    return [torch.cat([state[at]["exp_avg"] for state in states]) for at in range(3)]


def test_flat_parameters_are_as_long_as_their_units_and_filled_up_with_zeros(tmp_path: Path) -> None:
    """FSDP1 on two ranks, three, one and two: its parameters are DTensors except on one rank."""
    first = step = fsdp1_step(tmp_path, 2)
    for ranks in (3, 1, 2):
        step = divided(step, ranks, tmp_path / f"of_{ranks}_{step.parent.name[-1]}")
        for length, ours, theirs in zip(
            (21, 20, 9), flat_parts(step, ranks), flat_parts(first, 2), strict=True
        ):
            assert len(ours) == -(-length // ranks) * ranks
            assert torch.equal(ours[:length], theirs[:length])
            assert not ours[length:].any()
    model = [
        torch.load(path / "actor/model_world_size_2_rank_1.pt", weights_only=True) for path in (first, step)
    ]
    for name, value in model[0].items():
        again = model[1][name]
        assert torch.equal(again.to_local(), value.to_local())
        assert (again.placements, again.device_mesh.size()) == (value.placements, 2)
        # Of one rank's file: the devices are those that its generators name.
        assert again.device_mesh.device_type == "cuda"


# ---- commands


def test_a_checkpoint_of_a_run_becomes_one_that_verifies_with_the_same_files(
    paths: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(paths)
    append_event(paths, "verified", name="step_000005")
    before = files(source)
    out = tmp_path / "out"
    assert main(["reshard", str(paths.root), "--ranks", "3", "--out", str(out), "--json"]) == ExitCode.OK
    said = json.loads(capsys.readouterr().out)
    made = out / source.name
    assert said["checkpoint"] == str(made)
    assert "step_000005 was verified and is gone" in said["lost"][0]
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


def test_a_step_of_plain_verl_becomes_a_directory_that_verl_resumes_from(tmp_path: Path) -> None:
    first = fsdp2_step(tmp_path / "plain", 4, 2)
    out = tmp_path / "out"
    assert main(["reshard", str(first), "--ranks", "3", "--out", str(out)]) == ExitCode.OK
    assert (out / "latest_checkpointed_iteration.txt").read_bytes() == b"4"
    assert same(gathered(out / "global_step_4" / "actor"), gathered(first / "actor"))


def test_a_dry_run_prints_the_plan_that_is_carried_out_and_writes_nothing(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resharding, "this_python", fake_divider)
    place = committed(paths, shard_step(paths.work(1), 4, 2), 2).rename(tmp_path / "step_000004")
    words = ["reshard", str(place), "--ranks", "3", "--out", str(tmp_path / "out")]
    assert main([*words, "--dry-run"]) == ExitCode.OK
    planned = capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["run", "step_000004"]
    assert main(words) == ExitCode.OK
    done = capsys.readouterr().out
    assert "2 -> 3" in planned
    assert done.startswith(planned)
    assert "every tensor has the same bits" in done.removeprefix(planned)


# ---- what is refused


def test_megatrons_checkpoints_are_refused_with_verls_merger_and_the_same_ranks_need_no_work(
    tmp_path: Path,
) -> None:
    step = tmp_path / "global_step_4"
    (step / "actor" / "dist_ckpt").mkdir(parents=True)
    (step / "actor" / "dist_ckpt" / "__0_0.distcp").write_bytes(b"x")
    (step / "data.pt").touch()
    with pytest.raises(ConfigError) as caught:
        planned(step, 3)
    line = caught.value.one_line()
    with pytest.raises(ConfigError, match="already.*nothing has to be done"):
        planned(shard_step(tmp_path / "same", 4, 2), 2)
    assert "Megatron" in line
    assert f"python -m verl.model_merger merge --backend megatron --local_dir {step}/actor" in line


@pytest.mark.scenario("L21")
def test_replicas_of_shards_are_refused(tmp_path: Path) -> None:
    refused(fsdp2_step(tmp_path, 4, 4, mesh=(2, 2)), 2, r"mesh of ddp x fsdp.*fsdp_size")


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
    plain = fsdp2_step(tmp_path / "plain", 4, 2)
    struck(plain / "actor/optim_world_size_2_rank_1.pt")
    with pytest.raises(CheckpointCorrupt, match="not whole"):
        open_source(plain)


def test_ranks_that_disagree_about_what_all_of_them_hold_are_refused(tmp_path: Path) -> None:
    step = fsdp2_step(tmp_path, 4, 2)
    shard = step / "actor/model_world_size_2_rank_1.pt"
    torch.save({**torch.load(shard, weights_only=True), "buffer": torch.arange(3) + 1}, shard)
    with pytest.raises(CheckpointCorrupt, match="buffer differs between rank 0 and rank 1"):
        divided(step, 3, tmp_path / "other")


class _Program:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"more": torch.ones(2)}, "holds other things"),
        ({"odd": torch.ones(4, 4).t()}, "odd is not contiguous"),
        ({"odd": (torch.ones(1),)}, "odd.0 is a tensor in a tuple"),
        ({"odd": torch.nn.Parameter(torch.ones(1))}, "odd is a torch.nn.parameter.Parameter"),
        ({"odd": torch.ones(3).to_sparse()}, "odd is a tensor of torch.sparse_coo"),
        ({"odd": {1, 2}}, "odd is a builtins.set"),
        ({("a",): 1}, "a tuple for a key"),
    ],
    ids=["more", "transposed", "tuple", "parameter", "sparse", "set", "key"],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, more: dict[Any, Any], found: str) -> None:
    step = fsdp2_step(tmp_path, 4, 2)
    shard = step / "actor/model_world_size_2_rank_1.pt"
    torch.save({**torch.load(shard, weights_only=True), **more}, shard)
    refused(step, 3, found)


@pytest.mark.parametrize("name", ["model", "optim", "extra_state"])
def test_a_program_in_a_shard_is_refused_by_name_and_never_run(tmp_path: Path, name: str) -> None:
    step, mark = fsdp2_step(tmp_path, 4, 2), tmp_path / "mark"
    shard = step / f"actor/{name}_world_size_2_rank_0.pt"
    torch.save({"odd": _Program(mark)}, shard)
    refused(step, 3, f"{name}_world_size_2_rank_0.pt is not read: it names posix.mkdir")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ({"last": 11}, "an optimizer of 3 flat parameters in 1 groups"),
        ({"groups": 2}, "an optimizer of 3 flat parameters in 2 groups"),
    ],
    ids=["length", "groups"],
)
def test_flat_parameters_that_do_not_fit_the_models_units_are_refused(
    tmp_path: Path, how: dict[str, Any], found: str
) -> None:
    """The length of a flat parameter follows from the model; one that does not fit must not be cut anywhere."""
    refused(fsdp1_step(tmp_path, 2, **how), 3, found)


def test_a_flat_parameter_that_is_filled_up_with_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(torch_shards.Unclear, match=r"exp_avg is filled up with other numbers than 0"):
        divided(fsdp1_step(tmp_path, 2, fill=1.0), 3, tmp_path / "other")


def test_data_that_cannot_be_divided_among_the_ranks_is_refused(tmp_path: Path) -> None:
    step = fsdp2_step(tmp_path, 4, 2, roles=("",), samples=12)
    refused(step, 5, "24 samples given out.*5 data loaders")
    torch.save(torch.load(step / "data_0.pt", weights_only=True) | {"_snapshot": {}}, step / "data_1.pt")
    refused(step, 3, "data loaders of the ranks are at different places")
    whole = fsdp2_step(tmp_path / "shared", 4, 4, roles=("",), samples=12)
    for rank in (2, 3):
        (whole / f"data_{rank}.pt").unlink()
    refused(whole, 3, "ulysses")


def test_the_native_trainers_checkpoints_need_no_dividing(paths: RunPaths) -> None:
    save = LoopSave(guest="loop", step=4, attempt=1, world_size=2)
    part = paths.work(1) / "guest"
    part.mkdir(parents=True)
    (part / "x").write_bytes(b"x")
    name = commit_tree(paths, save, {"guest": part}).name
    with pytest.raises(ConfigError, match=r"only checkpoints of verl.*dp_size=2"):
        open_source(paths.checkpoints / name)


# ---- the process


PLAN = '{"type": "plan", "before": 2, "after": 3, "roles": [], "num_data": null, '
PLAN += '"written_bytes": 0, "largest_bytes": 0}'
FULL = '{"type": "refused", "errno": 28, "what": "No space left", "where": "/x"}'


def python_that(program: str) -> RanksPython:
    """A Python of the ranks that runs this text."""
    return lambda *_: Command([sys.executable, "-c", program], dict(os.environ), "/their/python")


@pytest.mark.parametrize(
    ("program", "error", "found"),
    [
        ("import torch_of_nobody", ConfigError, r"no torch_of_nobody.*/their/python -m pip install"),
        ("print('good')", VerlSlurmError, "no answer that is understood"),
        ('print(\'{"type": "plan"}\')', VerlSlurmError, "no answer that is understood"),
        ('print(\'{"type": "divided", "tensors": "x"}\')', VerlSlurmError, "exit code 0"),
        ("", VerlSlurmError, "exit code 0"),
        ("import os; os.abort()", ConfigError, "killed by SIGABRT"),
    ],
    ids=["no module", "text", "half", "other", "nothing", "killed"],
)
def test_an_answer_that_is_not_a_plan_is_an_error(
    tmp_path: Path, program: str, error: type[VerlSlurmError], found: str
) -> None:
    with pytest.raises(error, match=found), start_division(tmp_path, 3, python_that(program)):
        pass


def test_the_process_ends_before_its_directory_is_removed(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    program = f"import os, time; print({PLAN!r}, flush=True); "
    program += f"open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    def leave(_: int) -> None:
        if mark.exists() and mark.read_text():
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), start_division(tmp_path, 3, python_that(program)) as division:
        division.divide(tmp_path / "new", leave)
    assert time.monotonic() - began < 60
    assert not psutil.pid_exists(int(mark.read_text()))


def test_an_error_of_the_storage_keeps_its_number(tmp_path: Path) -> None:
    with start_division(tmp_path, 3, python_that(f"print({PLAN!r}); print({FULL!r})")) as division:
        with pytest.raises(OSError) as caught:
            division.divide(tmp_path / "new", lambda _: None)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/x")


# ---- what goes wrong on the way


@pytest.mark.scenario("L21")
def test_numbers_at_another_place_are_found_before_anything_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the comparison can find: a plan that is carried out wrongly."""
    step = fsdp2_step(tmp_path, 4, 2)
    right = torch_shards.DividedTensor.new_part

    def wrong(spread: torch_shards.DividedTensor, after: int, rank: int) -> torch.Tensor:
        part = right(spread, after, rank)
        return part.roll(1) if (spread.slot.path, rank) == ("state.1.exp_avg_sq", 1) else part

    monkeypatch.setattr(torch_shards.DividedTensor, "new_part", wrong)
    with pytest.raises(CheckpointCorrupt, match=r"not the same.*optim: state.1.exp_avg_sq"):
        divided(step, 3, tmp_path / "other")


def test_a_division_that_fails_leaves_nothing_behind(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = committed(paths, shard_step(paths.work(1), 4, 2), 2).rename(tmp_path / "step_000004")
    monkeypatch.setattr(resharding, "this_python", python_that(f"print({PLAN!r}); print({FULL!r})"))
    words = ["reshard", str(place), "--ranks", "3", "--out", str(tmp_path / "out")]
    assert main(words) == ExitCode.PERMISSION
    assert sorted(os.listdir(tmp_path)) == ["run", "step_000004"]


def test_a_disk_without_room_is_refused_before_anything_is_written(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(committed(paths, shard_step(paths.work(1), 4, 2), 2))
    monkeypatch.setattr(resharding, "room_for", lambda _, need: judge_room(FreeSpace(bytes=10), need))
    with pytest.raises(NoRoom, match="needed"):
        prepare_ranks(paths, 1, source.manifest, 3, fake_divider)
    assert os.listdir(paths.resharded.checkpoints) == []


# ---- at a start


@pytest.mark.scenario("L21")
def test_a_start_divides_once_and_the_ranks_read_the_copy(paths: RunPaths) -> None:
    source = committed(paths, shard_step(paths.work(1), 4, 2), 2)
    manifest = read_manifest(source)
    assert for_ranks(paths, source.name, 3) == source
    made = prepare_ranks(paths, 1, manifest, 3, fake_divider)
    assert made is not None
    assert for_ranks(paths, source.name, 3) == made.path == paths.resharded.checkpoints / source.name
    assert for_ranks(paths, source.name, 2) == source
    written = made.path.stat().st_ino
    assert prepare_ranks(paths, 1, manifest, 3, fake_divider) is None
    assert made.path.stat().st_ino == written


@pytest.mark.parametrize("why", ["damaged", "of another number", "of another save"])
def test_a_copy_that_does_not_fit_is_made_again(paths: RunPaths, why: str) -> None:
    manifest = read_manifest(committed(paths, shard_step(paths.work(1), 4, 2), 2))
    ranks = 4 if why == "of another number" else 3
    made = prepare_ranks(paths, 1, manifest, 3, fake_divider)
    assert made is not None
    if why == "damaged":
        shard = made.path / "global_step_4/actor/model_world_size_3_rank_1.pt"
        shard.write_bytes(shard.read_bytes()[:-1])
    elif why == "of another save":
        copy = made.path / "metadata.json"
        text = copy.read_text()
        copy.write_text(text.replace(manifest.digest, "0" * 64))
    again = prepare_ranks(paths, 1, manifest, ranks, fake_divider)
    assert again is not None
    assert verify(again.path).ok
    assert read_manifest(again.path).world_size == ranks


def test_a_copy_goes_when_the_run_no_longer_resumes_from_it(paths: RunPaths) -> None:
    manifest = read_manifest(committed(paths, shard_step(paths.work(1), 4, 2), 2))
    assert prepare_ranks(paths, 1, manifest, 3, fake_divider) is not None
    newer = read_manifest(committed(paths, shard_step(paths.work(1), 6, 3), 3))
    assert prepare_ranks(paths, 1, newer, 3, fake_divider) is None
    assert [name for name in os.listdir(paths.resharded.checkpoints) if name.startswith("step")] == []


def test_an_attempt_that_is_to_end_or_was_replaced_leaves_no_copy(paths: RunPaths) -> None:
    manifest = read_manifest(committed(paths, shard_step(paths.work(1), 4, 2), 2))

    class Leaving(Exception):
        pass

    for least in (0, 1):  # while it plans, and while it writes

        def leave(num_bytes: int, least: int = least) -> None:
            if num_bytes >= least:
                raise Leaving

        with pytest.raises(Leaving):
            prepare_ranks(paths, 1, manifest, 3, fake_divider, leave)
        assert list(paths.resharded.root.glob("checkpoints/*")) == []

    def replaced(module: Sequence[str], places: Sequence[Path]) -> Command:
        take_attempt(paths, job_id="2", restart=0)
        return fake_divider(module, places)

    with pytest.raises(Fenced):
        prepare_ranks(paths, 1, manifest, 3, replaced)
    assert os.listdir(paths.resharded.checkpoints) == []


# ---- how much memory


def test_a_few_bytes_that_say_a_list_of_lists_of_lists_are_looked_at_once(tmp_path: Path) -> None:
    """A pickle of a few bytes that is 2**40 lists for a reader that walks through it."""
    each = (b"]h%ca" % (level - 1) + b"h%ca" % (level - 1) + b"q%c" % level for level in range(1, 40))
    step = fsdp2_step(tmp_path, 4, 2, roles=("",), samples=12)
    some = b"\x80\x02]q\x00" + b"".join(each) + b"}X\x01\x00\x00\x00ah\x27s."
    with_pickle(step / "data_0.pt", lambda _: some)
    refused(step, 3, "different places")


def test_a_small_file_that_describes_gigabytes_is_refused_in_one_line(tmp_path: Path) -> None:
    step = fsdp2_step(tmp_path, 4, 2, roles=("",), samples=12)
    long = b"\x80\x02}X\x01\x00\x00\x00a(" + b"]" * (12 << 20) + b"ls."
    with_pickle(step / "model_world_size_2_rank_1.pt", lambda _: long, zipfile.ZIP_DEFLATED)
    with pytest.raises(ConfigError, match="more memory than their own size and 512 MiB"):
        planned(step, 3)
