"""Room is asked for before a job is queued: refused where not one checkpoint fits, warned of where not all do."""

import json
import struct
from pathlib import Path

import pytest

from tests.builders import checkpoint_info
from verl_slurm.base.errors import NoRoom
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.storage import Need, Room, judge_room
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.store.frozen import store_frozen
from verl_slurm.checkpoint.store.medium import FreeSpace
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint.data_record import fingerprint
from verl_slurm.submit.checks.model_files import num_parameters
from verl_slurm.submit.checks.run_directory import check_room, frozen_to_come, num_to_come

GB = 10**9
PLACE = Path("/run/checkpoints")


def config(*overrides: str) -> RunConfig:
    return parse_config(b"", "my.yaml", ("train.steps=100", *overrides))


def committed(*steps: int, num_bytes: int = GB) -> list[CheckpointInfo]:
    return [checkpoint_info(step, path=PLACE, num_bytes=num_bytes, num_files=20) for step in steps]


class Disk:
    """A file system with so much free; remembers what it was asked for."""

    def __init__(self, free_bytes: int) -> None:
        self.free, self.asked = FreeSpace(bytes=free_bytes, inodes=10**6), list[Need]()

    def __call__(self, path: Path, need: Need) -> Room:
        assert path == PLACE
        self.asked.append(need)
        return judge_room(self.free, need)


def test_where_not_one_more_fits_the_submission_is_refused_with_both_figures() -> None:
    with pytest.raises(NoRoom) as caught:
        check_room(config(), PLACE, committed(10), ask=Disk(GB // 2))
    line = caught.value.one_line()
    assert "no room for a single checkpoint" in line
    assert "500 MB free, 1.1 GB needed (step_000010)" in line
    assert "verl-slurm prune" in line
    assert caught.value.exit_code is ExitCode.NO_ROOM


def test_where_one_fits_but_not_all_that_is_to_be_kept_it_is_said_and_goes_on() -> None:
    note = check_room(config("checkpoint.keep_last=3"), PLACE, committed(10), ask=Disk(2 * GB))
    assert "2 GB free, 3.3 GB needed (3 checkpoints like step_000010)" in note
    assert "checkpoint.keep_last=3 keep so many" in note
    assert check_room(config(), PLACE, committed(10), ask=Disk(99 * GB)) == ""
    # Of a run that is done, and of a new one with a model that cannot be looked into, nothing is asked.
    disk = Disk(0)
    assert check_room(config(), PLACE, committed(100), ask=disk) == ""
    assert check_room(config("model.path=builtin:tiny"), PLACE, [], ask=disk) == ""
    assert disk.asked == []


def test_of_a_new_run_the_size_is_estimated_from_the_model_s_own_files(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert num_parameters(tmp_path) == 1_000_000
    disk = Disk(99 * GB)
    check_room(config(f"model.path={tmp_path}", "model.dtype=bfloat16"), PLACE, [], ask=disk)
    # Actor, critic and two moments of each, two bytes a number, a tenth more.
    assert 13_200_000 <= disk.asked[0].bytes <= 13_500_000
    assert disk.asked[0].basis == "an estimate, 1 million parameters"
    smaller, grpo = Disk(99 * GB), ("train.algorithm=grpo", "rollout.samples_per_prompt=2")
    check_room(config(f"model.path={tmp_path}", "model.dtype=bfloat16", *grpo), PLACE, [], ask=smaller)
    assert smaller.asked[0].bytes == pytest.approx(disk.asked[0].bytes / 2, rel=0.01), "no critic"


@pytest.mark.parametrize(
    ("overrides", "present", "count"),
    [
        (["checkpoint.keep_last=3"], 0, 4),
        (["checkpoint.keep_last=1"], 0, 3),
        (["checkpoint.keep_last=3", "checkpoint.keep_every=25"], 0, 8),
        (["checkpoint.keep_last=3", "checkpoint.keep_best=2", "checkpoint.best_metric=reward"], 0, 6),
        (["checkpoint.keep_last=3"], 2, 2),
        (["checkpoint.keep_last=3"], 9, 1),
    ],
)
def test_how_many_are_to_come(overrides: list[str], present: int, count: int) -> None:
    assert num_to_come(config(*overrides), present) == count


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """A reference model of 300 bytes and a reward model of 500, both with a link to what is elsewhere."""
    made = []
    for name, size in (("reference", 300), ("reward", 500)):
        (tmp_path / f"{name}.blob").write_bytes(b"x" * (size - 2))
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(b"{}")
        (tmp_path / name / "weights").symlink_to(tmp_path / f"{name}.blob")
        made.append(tmp_path / name)
    return made[0], made[1]


def test_the_copies_of_models_that_do_not_train_count_until_they_lie_there(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    paths, (reference, reward) = RunPaths(tmp_path / "run"), models
    one = config(f"model.path={reference}")
    both = config(f"model.path={reference}", f"model.reward=classifier:{reward}")
    assert frozen_to_come(one, paths) == (300, 2)
    assert frozen_to_come(both, paths) == (800, 4)
    assert frozen_to_come(config(f"model.path={reference}", "checkpoint.store_frozen=false"), paths) == (0, 0)
    assert frozen_to_come(config("model.path=builtin:tiny"), paths) == (0, 0)
    paths.root.mkdir()
    store_frozen(paths, reference, fingerprint(reference))
    assert frozen_to_come(one, paths) == (0, 0)
    assert frozen_to_come(both, paths) == (500, 2)


def test_a_checkpoint_that_would_fit_alone_but_not_beside_the_frozen_models_is_refused() -> None:
    disk = Disk(2 * GB)
    assert check_room(config("checkpoint.keep_last=1"), PLACE, committed(10, 20, 30), ask=disk) == ""
    with pytest.raises(NoRoom) as caught:
        check_room(config(), PLACE, committed(10), frozen=(GB, 4), ask=disk)
    assert "2.1 GB needed (step_000010 and 1 GB of models that do not train)" in caught.value.one_line()
    # Where the size of a checkpoint is not known, they are warned of.
    builtin = config("model.path=builtin:tiny")
    assert "1 GB of models that do not train" in check_room(
        builtin, PLACE, [], frozen=(GB, 4), ask=Disk(GB // 2)
    )
    assert check_room(builtin, PLACE, [], frozen=(GB, 4), ask=Disk(2 * GB)) == ""
