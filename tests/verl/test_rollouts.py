"""The driver's part in keeping verl's responses: places in the data, over steps, saves and restarts."""

from pathlib import Path

import numpy as np
import pytest

from tests.fakes.daemon import Daemon
from verl_slurm.base.errors import CheckpointCorrupt, DataError
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.loop_checkpoint import LoopSave, commit_tree
from verl_slurm.loops.session import Session
from verl_slurm.loops.verl_ppo_rollouts import Account, Recording, Rollouts
from verl_slurm.runtime_state.ledger import Index, Ledger
from verl_slurm.verl.positions import POSITIONS_FILE, Positions, positions_file, read_positions


def rollouts(resume: Path | None = None, line: Daemon | None = None) -> Rollouts:
    return Rollouts(Session(line or Daemon(), rank=0, world_size=1, resume=resume), batch_size=8)


def test_prompts_are_numbered_as_they_are_given_out_over_epochs_and_refills() -> None:
    found = rollouts()
    found.resume(0)
    assert found.positions(["a", "b"]) == [0, 1]
    assert found.positions(["c"]) == [2]


def test_responses_are_put_into_the_order_of_the_data() -> None:
    found = rollouts()
    found.resume(0)
    found.positions(["z", "a"])
    keys = ["a_1_0", "z_0_1", "z_0_0", "a_0_0", "z_10_0", "z_2_0"]
    ordered = [keys[index] for index in found.order(keys)]
    assert ordered == ["z_0_0", "z_0_1", "z_2_0", "z_10_0", "a_0_0", "a_1_0"]


def test_a_checkpoint_has_the_places_of_its_own_step_and_not_of_the_next(tmp_path: Path) -> None:
    found = rollouts()
    found.resume(0)
    found.positions(["a", "b"])
    found.note(1, set())
    found.positions(["c", "d"])  # the next step begins while the files are committed
    (tmp_path / POSITIONS_FILE).write_bytes(found.texts(1)[POSITIONS_FILE])
    assert read_positions(tmp_path) == Positions(2)
    later = rollouts(tmp_path)
    later.resume(1)
    assert later.positions(["e", "f"]) == [2, 3], "they are given out again, at the same places"


def test_prompts_that_verls_queue_keeps_have_their_places_after_a_restart(tmp_path: Path) -> None:
    found = rollouts()
    found.resume(0)
    found.positions(["a", "b", "c"])
    found.note(1, {"b"})
    (tmp_path / POSITIONS_FILE).write_bytes(found.texts(1)[POSITIONS_FILE])
    later = rollouts(tmp_path)
    later.resume(1)
    later.positions(["d"])
    assert [["d_0_0", "b_0_0"][index] for index in later.order(["d_0_0", "b_0_0"])] == ["b_0_0", "d_0_0"]


def test_a_checkpoint_of_an_older_version_goes_on_behind_its_steps(tmp_path: Path) -> None:
    found = rollouts(tmp_path)
    found.resume(3)
    assert found.positions(["a"]) == [24]
    assert found.order(["a_0_0", "restored_0_0"]) == [1, 0]


@pytest.mark.parametrize(
    ("there", "step", "told"),
    [
        ("data.pt", 0, "did not resume from where it was told to"),
        ("other", 7, "where in the data.*no data.pt"),
    ],
)
def test_a_resume_at_which_verl_would_begin_anew_in_silence_is_refused(
    tmp_path: Path, there: str, step: int, told: str
) -> None:
    checkpoint = tmp_path / "step_000007"
    (checkpoint / "global_step_7").mkdir(parents=True)
    (checkpoint / "global_step_7" / there).touch()
    with pytest.raises(CheckpointCorrupt, match=told):
        rollouts(checkpoint).resume(step)
    (checkpoint / "global_step_7" / "data.pt").touch()
    rollouts(checkpoint).resume(7)


def test_storage_that_fails_is_no_damaged_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("verl_slurm.verl.positions.read_regular", fails)
    with pytest.raises(OSError, match="Input/output error"):
        read_positions(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"next": -1.5}', '{"next": 1, "more": 2}'])
def test_a_file_that_says_nothing_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / POSITIONS_FILE).write_text(text)
    with pytest.raises(DataError, match=r"positions\.json"):
        read_positions(tmp_path)


class Manager(Recording):
    def __init__(self) -> None:
        self.forgot: list[int] = []
        self.told = Account()

    def account(self) -> Account:
        return self.told

    def forget(self, before: int) -> None:
        self.forgot.append(before)


def test_what_the_ledger_answered_is_told_once_and_problems_loudly(tmp_path: Path) -> None:
    paths, line, manager = RunPaths(tmp_path), Daemon(), Manager()
    paths.run_yaml.write_bytes(b"name: run\n")
    session = Session(line, rank=0, world_size=1, paths=paths, attempt=1)
    found = Rollouts(session, batch_size=8)
    for told in (Account(0, 0, 8), Account(5, 2, 8, ["a problem"], {"how"}), Account(5, 2, 16, [], {"how"})):
        manager.told = told
        found.step_end(manager)
    assert line.notices("ledger") == [
        "a problem",
        "how",
        "5 responses came from the ledger, and were not sampled again",
        "2 unfinished responses went on from their logged tokens",
    ]


def commit_step(paths: RunPaths, step: int, positions: Positions) -> None:
    written = paths.work(2) / f"global_step_{step}"
    written.mkdir(parents=True)
    (written / "data.pt").write_bytes(b"state")
    save = LoopSave(guest="verl", step=step, attempt=2, world_size=1)
    commit_tree(paths, save, {written.name: written}, texts=positions_file(positions))


def test_records_go_when_no_kept_checkpoint_needs_them(tmp_path: Path) -> None:
    paths, manager = RunPaths(private_dir(tmp_path / "run")), Manager()
    for directory in (paths.checkpoints, paths.control):
        private_dir(directory)
    write_file(paths.run_yaml, b"name: run\ncheckpoint: {keep_last: 2}\n")
    take_attempt(paths, job_id="1", restart=0)
    with Ledger(paths, 1, 0) as ledger:
        ledger.append(3, 0, {"meta": np.zeros(1)})
    assert take_attempt(paths, job_id="1", restart=1).attempt == 2
    found = Rollouts(Session(Daemon(), rank=0, world_size=1, paths=paths, attempt=2), batch_size=8)
    given = (Positions(8, {"late": 5}), Positions(16, {"late": 5}), Positions(24), Positions(32))
    for step, positions in enumerate(given, 1):
        commit_step(paths, step, positions)
        found.step_end(manager)
    assert manager.forgot == [5, 24], "what the older of two kept checkpoints needs, with what it left open"
    assert len(Index(paths, object)) == 0, "the segment of a former attempt is removed"
