import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.verl.verl_steps import make_directory, make_step, save_role
from verl_slurm.verl import shards
from verl_slurm.verl.shards import Judged, judge_all, judge_step, list_steps

pytestmark = pytest.mark.torch


def problems(one: Judged) -> dict[str, str]:
    return {problem.path: problem.what for problem in one.problems}


def newest(directory: Path) -> Judged:
    return judge_all(directory)[0]


def test_steps_are_listed_newest_first_by_number_and_nothing_else_is(tmp_path: Path) -> None:
    for name in (
        "global_step_9",
        "global_step_10",
        "global_step_010",
        "global_step_7.tmp",
        "global_step_",
        "x\nglobal_step_3",
    ):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_steps(tmp_path)] == ["global_step_10", "global_step_9"]


@pytest.mark.parametrize("entry", ["sft", "ppo"])
@pytest.mark.parametrize("world", [1, 3])
def test_a_whole_step_is_whole_and_says_who_wrote_it(tmp_path: Path, entry: str, world: int) -> None:
    one = judge_step(make_step(tmp_path, 6, world=world, entry=entry, critic=entry == "ppo"))
    assert one.ok, one.one_line()
    assert (one.step, one.world_size, one.layout.entry) == (6, world, entry)
    assert one.layout.roles == (("",) if entry == "sft" else ("actor", "critic"))
    assert all(path.endswith("merges.txt") for path in one.unchecked)
    assert one.num_bytes == sum(p.stat().st_size for p in one.path.rglob("*") if p.is_file())


SHARDS = [
    "model_world_size_2_rank_1.pt",
    "optim_world_size_2_rank_0.pt",
    "extra_state_world_size_2_rank_1.pt",
    "data_0.pt",
    "data_1.pt",
]


def _tensors(step: Path, num_bytes: int) -> None:
    """Safetensors of four bytes, as far as they got."""
    header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    path = step / "huggingface" / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
    path.chmod(0o644)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _without(step: Path, glob: str) -> None:
    for path in step.glob(glob):
        path.unlink()


def _resaved(step: Path) -> None:
    make_step(step.parent, 6, world=1)


PPO = {"entry": "ppo"}
FOUND: dict[str, tuple[dict[str, object], Callable[[Path], object], str, str]] = {
    "begun": (
        {},
        lambda step: (shutil.rmtree(step), step.mkdir(mode=0o755)),
        ".",
        "a save that had only begun",
    ),
    "no data": (PPO, lambda step: (step / "data.pt").unlink(), "data.pt", "start the data over"),
    "retention": (PPO, lambda step: shutil.rmtree(step / "actor"), "actor", "max_actor_ckpt_to_keep"),
    "twice": ({}, _resaved, ".", "saved twice"),
    "two numbers": (PPO, lambda step: save_role(step / "critic", 1, 7), ".", "saved by 1 and 2 ranks"),
    "no optimizer": ({}, lambda step: _without(step, "optim_*"), ".", "save_contents"),
    "json": (
        {},
        lambda step: (step / "huggingface/config.json").write_text("{"),
        "huggingface/config.json",
        "not J",
    ),
    "ranks": (
        {},
        lambda step: (step / "fsdp_config.json").write_text('{"world_size": 8}'),
        "fsdp_config.json",
        "says world_size 8, the shards are of 2",
    ),
    "cut tensors": ({}, lambda step: _tensors(step, 2), "huggingface/model.safetensors", "its header says"),
    "fifo": ({}, lambda step: _pipe(step / "data_0.pt"), "data_0.pt", "is a special file"),
    "writable": ({}, lambda step: (step / "data_0.pt").chmod(0o664), "data_0.pt", "may be written by others"),
    "a file": ({}, lambda step: (shutil.rmtree(step), step.write_text("")), ".", "cannot be read"),
} | {
    f"{kind} {name}": ({}, strike, name, words)
    for name in SHARDS
    for kind, words, strike in (
        ("cut", "", lambda step, name=name: os.truncate(step / name, (step / name).stat().st_size // 2)),
        ("empty", "empty: 0 bytes", lambda step, name=name: os.truncate(step / name, 0)),
        ("missing", "", lambda step, name=name: (step / name).unlink()),
    )
}


@pytest.mark.parametrize("case", FOUND)
def test_what_a_step_lacks_or_contradicts_is_named_and_its_neighbour_is_whole(
    tmp_path: Path, case: str
) -> None:
    how, strike, path, words = FOUND[case]
    directory = make_directory(tmp_path / "d", 4, 6, 8, **how)
    strike(directory / "global_step_6")
    newer, found, older = judge_all(directory)
    assert (newer.ok, found.ok, older.ok) == (True, False, True)
    assert any(words in problem.what for problem in found.problems if problem.path == path), found.problems


@pytest.mark.parametrize("name", SHARDS[:3])
def test_one_flipped_bit_of_a_tensor_that_torch_loads_without_a_word_is_found(
    verl_dir: Path, name: str
) -> None:
    path = verl_dir / "global_step_6" / name
    tensor = next(r for r in zipfile.ZipFile(path).infolist() if r.filename.endswith("/data/0"))
    data = bytearray(path.read_bytes())
    lengths = data[tensor.header_offset + 26 : tensor.header_offset + 30]
    data[tensor.header_offset + 30 + sum(struct.unpack("<2H", lengths))] ^= 1
    path.write_bytes(data)
    torch.load(path, weights_only=True)
    assert "CRC-32" in problems(newest(verl_dir))[name]


def test_a_critic_that_only_the_neighbours_have_is_missed(tmp_path: Path) -> None:
    make_step(tmp_path, 4, entry="ppo", critic=True)
    shutil.rmtree(make_step(tmp_path, 6, entry="ppo", critic=True) / "critic")
    found = judge_all(tmp_path)
    assert problems(found[0]) == {"critic": "no shard of this model, global_step_4 has it"}
    assert found[1].ok


def test_fewer_data_states_than_ranks_are_fine_where_sequences_are_divided(tmp_path: Path) -> None:
    path = make_step(tmp_path, 6, world=4)
    for rank in (2, 3):
        (path / f"data_{rank}.pt").unlink()
    assert newest(tmp_path).ok
    (path / "data_1.pt").rename(path / "data_2.pt")
    assert "data_1.pt" in problems(newest(tmp_path))


def test_a_megatron_checkpoint_is_said_to_be_beyond_us_and_not_to_be_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_6" / "actor" / "model" / "dist_ckpt"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"x")
    (problem,) = [p for p in newest(tmp_path).problems if p.kind == "version"]
    assert "Megatron" in problem.what


def test_links_are_not_followed_and_others_files_not_called_good(verl_dir: Path, tmp_path: Path) -> None:
    step = verl_dir / "global_step_6"
    shard = step / "model_world_size_2_rank_0.pt"
    shard.rename(tmp_path / "elsewhere.pt")
    shard.symlink_to(tmp_path / "elsewhere.pt")
    assert "is a link" in "; ".join(p.what for p in newest(verl_dir).problems)
    (verl_dir / "global_step_8").symlink_to(verl_dir / "global_step_4")
    assert problems(newest(verl_dir)) == {".": "is a link, and those are not followed"}
    assert not judge_step(verl_dir / "global_step_9").ok, "one that is gone is a finding, and no crash"
    if os.geteuid() == 0:
        os.chown(verl_dir / "global_step_4" / "data_0.pt", 12345, -1)
        (problem,) = judge_all(verl_dir)[2].problems
        assert problem.kind == "untrusted"
        assert "uid 12345" in problem.what


def test_a_step_of_more_files_than_any_has_is_refused_unread(
    verl_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "MAX_FILES", 3)
    found = newest(verl_dir)
    assert [problem.what for problem in found.problems] == [
        "more than 3 files and directories, which no checkpoint of ours can hold"
    ]
    assert shards.step_bytes(verl_dir / "global_step_6") == 0


def test_a_name_with_a_newline_and_a_colour_is_shown_escaped_and_refused(verl_dir: Path) -> None:
    name = "evil\n\x1b[31mglobal_step_7: whole.pt"
    (verl_dir / "global_step_6" / name).write_bytes(b"")
    one = newest(verl_dir)
    assert not one.ok
    assert "\n" not in one.one_line()
    assert "\x1b" not in one.one_line()
