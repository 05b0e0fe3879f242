"""A save of verl's ranks becomes a checkpoint of the run, or is said to have failed: one rank here, and no verl."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.verl.runs import write_config
from verl_slurm.checkpoint.catalog import list_checkpoints
from verl_slurm.checkpoint.verify import verify
from verl_slurm.config.load import dump, load, load_resolved
from verl_slurm.errors import Fenced
from verl_slurm.fence import take_epoch
from verl_slurm.files import private_dir, write_file
from verl_slurm.guest.session import Session
from verl_slurm.guest.tree import clear_work, require_guest
from verl_slurm.paths import RunPaths
from verl_slurm.wire.messages import Notice, PartSaved, Saved, SaveFailed, SaveRequest, SaveStarted

pytestmark = pytest.mark.torch


class _Line:
    def __init__(self) -> None:
        self.asked: SaveRequest | None = None
        self.heard: list[Any] = []

    def send(self, message: Any) -> None:
        self.heard.append(message)

    def request(self) -> SaveRequest | None:
        return self.asked

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]


class _Bench:
    """One rank of a run that is about to train."""

    def __init__(self, root: Path) -> None:
        from verl_slurm.dcp.collective import Collective
        from verl_slurm.verl.serving import Serving

        config = write_config(root.with_suffix(".yaml"), root, {"trainer.total_epochs": 2}, 8)
        self.paths, self.line = RunPaths(private_dir(root)), _Line()
        write_file(self.paths.run_yaml, dump(load(config)))
        self.epoch = take_epoch(self.paths, cluster="local", job_id="1", restart=0).epoch
        self.session = Session(self.line, rank=0, world_size=1, paths=self.paths, epoch=self.epoch)
        self.work = clear_work(self.paths, self.epoch)
        self.serving = Serving(
            self.session,
            Collective(None),
            self.work,
            config=load_resolved(self.paths.run_yaml),
            resume_step=0,
            metadata={"verl": "0.9.1"},
        )
        self.serving.begin(0, 8)

    def writes(self, step: int) -> Callable[[], None]:
        """What verl leaves: a rank's shards, and what belongs to nobody's."""

        def write() -> None:
            own = self.work / f"global_step_{step}"
            (own / "huggingface").mkdir(parents=True)
            (own / "huggingface" / "config.json").write_text("{}")
            (own / "data_0.pt").write_bytes(b"data")
            for part in ("model", "optim", "extra_state"):
                (own / f"{part}_world_size_1_rank_0.pt").write_bytes(part.encode())
            (self.work / "latest_checkpointed_iteration.txt").write_text(str(step))

        return write


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    made = _Bench(tmp_path / "run")
    yield made
    made.serving.end()


def test_a_periodic_save_is_a_checkpoint_with_verls_directory_and_tracker_in_it(bench: _Bench) -> None:
    bench.serving.save(2, None, {"loss": 1.5}, bench.writes(2))
    bench.serving.settle()
    [info] = list_checkpoints(bench.paths)
    assert (info.kind, info.name) == ("committed", "step_000002")
    assert verify(info.path).ok
    manifest = require_guest(info.path, "verl", world_size=1)
    assert "global_step_2/huggingface/config.json" in {entry.path for entry in manifest.files}
    assert (info.path / "latest_checkpointed_iteration.txt").read_text() == "2"
    [started], [part], [saved] = (bench.line.of(kind) for kind in (SaveStarted, PartSaved, Saved))
    assert (started.request_id, part.request_id, saved.request_id) == (0, 0, 0)
    assert (saved.name, saved.reason) == ("step_000002", "trainer.save_freq")
    assert bench.serving.saved_step == 2


def test_a_save_that_was_asked_for_answers_that_request(bench: _Bench) -> None:
    bench.line.asked = SaveRequest(request_id=5, stop=True)
    order = bench.serving.step_done(3, {})
    assert order == SaveRequest(request_id=5, stop=True)
    bench.serving.save(3, order, {}, bench.writes(3))
    [saved] = bench.line.of(Saved)
    assert (saved.request_id, saved.reason) == (5, "asked to stop")
    assert bench.serving.step_done(4, {}) is None, "answered"


def test_a_save_that_the_storage_refuses_is_said_and_the_one_before_counts(
    bench: _Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.serving.save(2, None, {}, bench.writes(2))
    bench.serving.settle()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("verl_slurm.verl.serving.commit_tree", full)
    bench.serving.save(4, SaveRequest(request_id=1, stop=True), {}, bench.writes(4))
    [failed] = bench.line.of(SaveFailed)
    assert failed.request_id == 1
    assert "No space left" in failed.reason
    assert bench.serving.saved_step == 2


def test_an_incarnation_that_no_longer_owns_the_run_commits_nothing(bench: _Bench) -> None:
    take_epoch(bench.paths, cluster="local", job_id="2", restart=1)
    bench.serving.save(2, None, {}, bench.writes(2))
    with pytest.raises(Fenced):
        bench.serving.settle()
    assert list_checkpoints(bench.paths) == []


def test_verl_is_not_let_into_a_save_that_cannot_fit_unless_it_is_the_last_chance(
    bench: _Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl dies of a full disk, and with it the steps since the last save."""
    from verl_slurm.checkpoint.storage import FreeSpace

    bench.serving.save(2, None, {}, bench.writes(2))
    monkeypatch.setattr(
        "verl_slurm.checkpoint.free_space.free_space", lambda _: FreeSpace(bytes=10, inodes=9)
    )
    bench.serving.save(4, None, {}, bench.writes(4))
    bench.serving.settle()
    assert bench.serving.saved_step == 2
    assert not (bench.work / "global_step_4").exists()
    assert any("step 4 is not saved" in notice.text and notice.loud for notice in bench.line.of(Notice))
    bench.serving.save(5, SaveRequest(request_id=1, stop=True), {}, bench.writes(5))
    assert bench.serving.saved_step == 5


def test_as_many_stay_as_the_configuration_says(bench: _Bench) -> None:
    for step in range(1, 15):
        bench.serving.save(step, None, {}, bench.writes(step))
    bench.serving.settle()
    names = [info.name for info in list_checkpoints(bench.paths)]
    assert names == [f"step_{step:06d}" for step in range(14, 4, -1)]


def test_a_request_that_the_loop_has_taken_is_nobody_elses(bench: _Bench) -> None:
    """The thread that looks in the middle of a step must not give up a save that is being written."""
    for step in range(1, 4):
        bench.serving.step_done(step, {})
    bench.line.asked = SaveRequest(
        request_id=1, stop=True, seconds_left=-1.0
    )  # long past: no step could be reached
    order = bench.serving.step_done(4, {})
    bench.serving._watch.look()
    assert order is not None
    assert bench.line.of(SaveFailed) == []


def test_training_goes_on_beside_a_periodic_commit_and_the_next_save_waits_for_it(
    bench: _Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_slurm.verl import serving

    begun, may = threading.Event(), threading.Event()
    real = serving.commit_tree

    def slowly(*args: Any, **words: Any) -> Any:
        begun.set()
        assert may.wait(60)
        return real(*args, **words)

    monkeypatch.setattr(serving, "commit_tree", slowly)
    bench.serving.save(2, None, {}, bench.writes(2))
    assert begun.wait(60)
    assert bench.serving.step_done(3, {}) is None
    assert bench.serving.saved_step == 0
    may.set()
    bench.serving.save(4, SaveRequest(request_id=1, stop=True), {}, bench.writes(4))
    assert [saved.name for saved in bench.line.of(Saved)] == ["step_000002", "step_000004"]
