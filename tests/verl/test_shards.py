import json
import os
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from tests.verl.verl_steps import make_directory, make_step
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
]


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_cut_to_half_is_found(verl_dir: Path, name: str) -> None:
    path = verl_dir / "global_step_6" / name
    os.truncate(path, path.stat().st_size // 2)
    assert set(problems(newest(verl_dir))) == {name}
    assert judge_all(verl_dir)[1].ok


@pytest.mark.parametrize("name", SHARDS)
def test_an_empty_shard_is_found(verl_dir: Path, name: str) -> None:
    os.truncate(verl_dir / "global_step_6" / name, 0)
    assert problems(newest(verl_dir)) == {name: "empty: 0 bytes"}


@pytest.mark.parametrize("name", [*SHARDS, "data_1.pt"])
def test_a_missing_shard_is_found(verl_dir: Path, name: str) -> None:
    (verl_dir / "global_step_6" / name).unlink()
    assert name in problems(newest(verl_dir))


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


def test_an_empty_step_is_a_save_that_had_only_begun(verl_dir: Path) -> None:
    (verl_dir / "global_step_8").mkdir(mode=0o755)
    assert problems(newest(verl_dir)) == {".": "empty: a save that had only begun"}


def test_ppo_without_the_data_loaders_state_would_start_the_data_over(tmp_path: Path) -> None:
    (make_step(tmp_path, 6, entry="ppo") / "data.pt").unlink()
    assert "start the data over" in problems(newest(tmp_path))["data.pt"]


def test_what_verls_own_retention_left_is_named_for_what_it_is(tmp_path: Path) -> None:
    import shutil

    shutil.rmtree(make_step(tmp_path, 6, entry="ppo") / "actor")
    assert "max_actor_ckpt_to_keep" in problems(newest(tmp_path))["actor"]


def test_a_critic_that_only_the_neighbours_have_is_missed(tmp_path: Path) -> None:
    import shutil

    make_step(tmp_path, 4, entry="ppo", critic=True)
    shutil.rmtree(make_step(tmp_path, 6, entry="ppo", critic=True) / "critic")
    found = judge_all(tmp_path)
    assert problems(found[0]) == {"critic": "no shard of this model, global_step_4 has it"}
    assert found[1].ok


def test_shards_of_two_numbers_of_ranks_in_one_directory_are_refused(verl_dir: Path) -> None:
    make_step(verl_dir, 6, world=1)
    assert "saved twice" in problems(newest(verl_dir))["."]


def test_an_actor_and_a_critic_of_different_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    from tests.verl.verl_steps import save_role

    save_role(make_step(tmp_path, 6, entry="ppo") / "critic", 1, 7)
    assert problems(newest(tmp_path)) == {".": "its models were saved by 1 and 2 ranks"}


def test_fewer_data_states_than_ranks_are_fine_where_sequences_are_divided(tmp_path: Path) -> None:
    path = make_step(tmp_path, 6, world=4)
    for rank in (2, 3):
        (path / f"data_{rank}.pt").unlink()
    assert newest(tmp_path).ok
    (path / "data_1.pt").rename(path / "data_2.pt")
    assert "data_1.pt" in problems(newest(tmp_path))


def test_one_that_was_saved_without_its_optimizer_is_no_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    path = make_step(tmp_path, 6)
    for shard in path.glob("optim_*"):
        shard.unlink()
    assert "save_contents" in problems(judge_step(path))["."]


def test_json_that_does_not_parse_and_a_number_of_ranks_that_contradicts_the_shards(verl_dir: Path) -> None:
    step = verl_dir / "global_step_6"
    (step / "huggingface" / "config.json").write_text("{")
    (step / "fsdp_config.json").write_text(json.dumps({"world_size": 8}))
    found = problems(newest(verl_dir))
    assert found["huggingface/config.json"].startswith("not JSON")
    assert found["fsdp_config.json"] == "says world_size 8, the shards are of 2"


def test_safetensors_that_were_cut_off(verl_dir: Path) -> None:
    header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    path = verl_dir / "global_step_6" / "huggingface" / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"12")
    path.chmod(0o644)
    assert "its header says" in problems(newest(verl_dir))["huggingface/model.safetensors"]


def test_a_megatron_checkpoint_is_said_to_be_beyond_us_and_not_to_be_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_6" / "actor" / "model" / "dist_ckpt"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"x")
    (problem,) = [p for p in newest(tmp_path).problems if p.kind == "version"]
    assert "Megatron" in problem.what


def test_links_are_not_followed(verl_dir: Path, tmp_path: Path) -> None:
    step = verl_dir / "global_step_6"
    shard = step / "model_world_size_2_rank_0.pt"
    shard.rename(tmp_path / "elsewhere.pt")
    shard.symlink_to(tmp_path / "elsewhere.pt")
    assert "is a link" in "; ".join(p.what for p in newest(verl_dir).problems)
    (verl_dir / "global_step_8").symlink_to(verl_dir / "global_step_4")
    assert problems(newest(verl_dir)) == {".": "is a link, and those are not followed"}


def test_a_fifo_in_the_place_of_a_shard_holds_nobody_up(verl_dir: Path) -> None:
    shard = verl_dir / "global_step_6" / "data_0.pt"
    shard.unlink()
    os.mkfifo(shard)
    assert "special file" in "; ".join(p.what for p in newest(verl_dir).problems)


def test_a_step_of_more_files_than_any_has_is_refused_unread(
    verl_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "MAX_FILES", 3)
    found = newest(verl_dir)
    assert [problem.what for problem in found.problems] == [
        "more than 3 files and directories, which no checkpoint of ours can hold"
    ]
    assert shards.step_bytes(verl_dir / "global_step_6") == 0


def test_what_others_may_write_is_not_called_good(verl_dir: Path) -> None:
    (verl_dir / "global_step_6" / "data_0.pt").chmod(0o664)
    (problem,) = newest(verl_dir).problems
    assert (problem.kind, problem.path) == ("untrusted", "data_0.pt")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_another_user_is_not_called_good(verl_dir: Path) -> None:
    os.chown(verl_dir / "global_step_6" / "data_0.pt", 12345, -1)
    (problem,) = newest(verl_dir).problems
    assert problem.kind == "untrusted"
    assert "uid 12345" in problem.what


def test_a_name_with_a_newline_and_a_colour_is_shown_escaped_and_refused(verl_dir: Path) -> None:
    name = "evil\n\x1b[31mglobal_step_7: whole.pt"
    (verl_dir / "global_step_6" / name).write_bytes(b"")
    one = newest(verl_dir)
    assert not one.ok
    assert "\n" not in one.one_line()
    assert "\x1b" not in one.one_line()


def test_a_step_that_is_a_file_or_is_gone_is_a_finding_and_no_crash(verl_dir: Path) -> None:
    (verl_dir / "global_step_8").write_text("")
    assert "cannot be read" in newest(verl_dir).one_line()
    assert not judge_step(verl_dir / "global_step_9").ok


def test_many_steps_of_one_directory_are_judged_each_on_its_own(tmp_path: Path) -> None:
    make_directory(tmp_path / "d", 2, 4, 6)
    os.truncate(tmp_path / "d" / "global_step_4" / SHARDS[0], 10)
    assert [one.ok for one in judge_all(tmp_path / "d")] == [True, False, True]
