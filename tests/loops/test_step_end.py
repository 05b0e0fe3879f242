"""What is saved at a step's end becomes a checkpoint of the run, or is said to have failed: one rank, no framework."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import write_config
from tests.fakes.daemon import Daemon
from verl_slurm.base.errors import ConfigError, Fenced
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.storage import FreeSpace
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.commit import SavedCheckpoint
from verl_slurm.checkpoint.store.loop_checkpoint import require_guest
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.loops import step_end
from verl_slurm.loops.session import Session
from verl_slurm.loops.verl.verl_ppo_saves import Saves
from verl_slurm.wire.messages import (
    PartSaved,
    RankNotice,
    RankSaved,
    RankSaveFailed,
    SaveRequest,
    SaveStarted,
)

pytestmark = pytest.mark.torch

STOP, SAVE = SaveRequest(request_id=5, stop=True), SaveRequest(request_id=5, stop=False)
WHY = "every step"


class Bench:
    """One rank of a run that is about to train; its framework writes a file of its own and one that is rank 0's."""

    def __init__(self, root: Path, *, resume: str = "", **options: Any) -> None:
        from verl_slurm.save.ranks.collective import Collective

        self.paths, self.line = RunPaths(private_dir(root)), Daemon()
        self.now_s = self.save_s = 0.0
        if not self.paths.run_yaml.exists():
            write_config(self.paths, keep_last=3)
        self.attempt = take_attempt(self.paths, cluster="local", job_id="1", restart=0).attempt
        directory = self.paths.checkpoints / resume if resume else None
        self.session = Session(
            self.line,
            rank=0,
            world_size=1,
            paths=self.paths,
            attempt=self.attempt,
            resume=directory,
            clock=lambda: self.now_s,
        )
        step = read_manifest(directory).step if directory else 0
        self.saver = step_end.StepEndSaver(
            self.session, Collective(None), guest="verl", step=step, world_size=2, **options
        )
        self.saver.begin(step, 8)
        self.wrote: list[int] = []

    def save(self, step: int, *, last: bool = False, why: str = WHY) -> object:
        name = f"global_step_{step}"
        store = self.saver.files(name, self._writes(step, name))
        return self.saver.save(step, store, metrics={"loss": 1.5}, why=why, last=last)

    def _writes(self, step: int, name: str) -> Callable[[], None]:
        def write() -> None:
            self.wrote.append(step)
            self.now_s += self.save_s
            (self.saver.work / name / "huggingface").mkdir(parents=True)
            (self.saver.work / name / "huggingface" / "config.json").write_text("{}")
            (self.saver.work / name / "model_rank_0.pt").write_bytes(b"weights")

        return write

    def step(self, step: int, request: SaveRequest | None = None) -> SaveRequest | None:
        """One step is done; what the daemon wants at its end."""
        self.line.asked = request or self.line.asked
        self.saver.step_done(step, {})
        return self.saver.asked()

    def names(self) -> list[str]:
        return [info.name for info in list_checkpoints(self.paths) if info.kind == "committed"]


@pytest.fixture(params=[False, True], ids=["at-once", "beside"])
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(tmp_path / "run", beside=request.param)
    yield made
    made.saver.end()


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "run", beside=True, texts=lambda step: {"tracker.txt": str(step).encode()})
    yield made
    made.saver.end()


def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "verl_slurm.checkpoint.store.medium.free_space", lambda _: FreeSpace(bytes=10, inodes=9)
    )


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_periodic_save_is_a_checkpoint_and_every_part_of_it_is_told(bench: Bench) -> None:
    bench.save(2)
    bench.saver.settle()
    [info] = list_checkpoints(bench.paths)
    assert (info.kind, info.name) == ("committed", "step_000002")
    assert verify(info.path).ok
    manifest = require_guest(info.path, "verl", world_size=2)
    assert "global_step_2/huggingface/config.json" in {entry.path for entry in manifest.files}
    assert (manifest.step, manifest.metrics) == (2, {"loss": 1.5})
    assert bench.line.kinds() == ["SaveStarted", "PartSaved", "RankSaved"]
    [started], [part], [saved] = (bench.line.heard(kind) for kind in (SaveStarted, PartSaved, RankSaved))
    assert (started.request_id, part.request_id, saved.request_id) == (0, 0, 0)
    assert (saved.name, saved.reason) == ("step_000002", WHY)
    assert bench.saver.saved_step == 2


def test_a_save_that_was_asked_for_answers_that_request_once(bench: Bench) -> None:
    assert bench.step(3, STOP) == STOP
    assert bench.step(3) == STOP, "it is open"
    bench.save(3)
    [saved] = bench.line.heard(RankSaved)
    assert (saved.request_id, saved.reason) == (5, "the job ends")
    assert bench.saver.stopping == STOP
    bench.saver.leave()
    assert bench.line.kinds() == ["SaveStarted", "PartSaved", "RankSaved", "Stopped"]
    assert bench.step(4) is None, "answered"


def test_an_operators_request_is_a_save_and_training_goes_on(bench: Bench) -> None:
    bench.step(3, SAVE)
    bench.save(3)
    assert [saved.reason for saved in bench.line.heard(RankSaved)] == ["asked for"]
    assert bench.saver.stopping is None


def test_a_step_that_is_saved_already_is_not_written_again(bench: Bench) -> None:
    bench.save(3)
    bench.step(3, STOP)
    bench.save(3)
    assert bench.wrote == [3]
    assert [(saved.name, saved.request_id) for saved in bench.line.heard(RankSaved)] == [
        ("step_000003", 0),
        ("step_000003", 5),
    ]
    assert bench.line.heard(RankSaved)[1].reason == "the job ends; nothing new since"


def test_a_save_that_the_storage_refuses_is_said_and_the_one_before_counts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.save(2)
    bench.saver.settle()
    monkeypatch.setattr(step_end, "commit_tree", full)
    bench.step(4, STOP)
    assert bench.save(4) is not None
    [failed] = bench.line.heard(RankSaveFailed)
    assert failed.request_id == 5
    assert "No space left" in failed.reason
    assert bench.saver.saved_step == 2
    assert not list(bench.saver.work.iterdir()), "what cannot be committed is in the way of the next one"
    bench.save(6)
    bench.saver.settle()
    assert bench.saver.saved_step == 2
    monkeypatch.undo()
    bench.save(8, last=True)
    assert bench.names() == ["step_000008", "step_000002"]
    assert bench.line.heard(RankSaved)[-1].reason == "all steps are done"


def test_a_step_that_the_nodes_disks_alone_have_is_not_a_saved_one(bench: Bench) -> None:
    """The run would be done with it, and the nodes may never come back."""
    kept = SavedCheckpoint(name="step_000008", seconds=0.1, num_bytes=9, on_shared=False, problem="full")
    bench.saver.save(8, lambda save, request: lambda: kept, metrics={}, why=WHY, last=False)
    bench.saver.settle()
    assert [saved.on_shared for saved in bench.line.heard(RankSaved)] == [False]
    assert bench.saver.saved_step == -1


def test_the_last_save_is_tried_again_when_storage_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_end, "LAST_TRIES_S", (0.0, 0.0))
    tries = iter([full, full, step_end.commit_tree])
    monkeypatch.setattr(step_end, "commit_tree", lambda *given, **more: next(tries)(*given, **more))
    assert bench.save(8, last=True) is None
    assert bench.names() == ["step_000008"]
    assert len(bench.line.heard(RankSaveFailed)) == 2
    assert any("tried again" in notice.text for notice in bench.line.heard(RankNotice))


def test_an_attempt_that_no_longer_owns_the_run_commits_nothing(beside: Bench) -> None:
    take_attempt(beside.paths, cluster="local", job_id="2", restart=1)
    beside.save(2)
    with pytest.raises(Fenced):
        beside.saver.settle()
    assert beside.names() == []


def test_as_many_stay_as_the_configuration_says_also_those_of_former_lives(tmp_path: Path) -> None:
    first = Bench(tmp_path / "run")
    for step in range(1, 4):
        first.save(step)
    first.saver.end()
    second = Bench(tmp_path / "run", resume="step_000003")
    second.save(4)
    second.save(5)
    assert second.names() == ["step_000005", "step_000004", "step_000003"]
    second.step(6, STOP)
    second.save(6)
    assert len(second.names()) == 4, "the job ends: the next start tidies up"
    second.saver.end()


def test_the_time_of_a_save_is_no_steps(bench: Bench) -> None:
    bench.save_s = 300.0
    for step in (1, 2, 3):
        bench.now_s += 1.0
        bench.step(step)
        bench.save(step)
    found = bench.session.reach(SaveRequest(request_id=1, stop=True, seconds_left=30.0))
    assert "steps take up to 1.0 s, this one runs for 0.0 s" in found.reason


def test_a_framework_that_writes_by_itself_says_so_before(bench: Bench) -> None:
    bench.step(3, STOP)
    bench.saver.begins(3)
    assert bench.saver.saving
    bench.save(3)
    assert bench.line.kinds() == ["SaveStarted", "PartSaved", "RankSaved"]
    assert not bench.saver.saving


def test_a_request_that_the_loop_has_taken_is_nobody_elses(bench: Bench) -> None:
    """The thread that looks in the middle of a step must not give up a save that is being written."""
    watch = bench.saver._watch
    assert watch is not None
    watch.stop()  # it would look by itself
    over = SaveRequest(request_id=1, stop=True, seconds_left=-1.0)  # no step could be reached
    assert bench.step(4, over) is not None
    watch.look()
    assert bench.line.heard(RankSaveFailed) == []


def test_a_framework_that_writes_by_itself_is_refused_what_only_our_saver_can_do(tmp_path: Path) -> None:
    write_config(RunPaths(private_dir(tmp_path / "run")), local_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"framework writes.*checkpoint\.local_dir"):
        Bench(tmp_path / "run")


def test_without_a_run_the_framework_saves_as_it_does(tmp_path: Path) -> None:
    from verl_slurm.save.ranks.collective import Collective

    saver = step_end.StepEndSaver(Session.open({}), Collective(None), guest="verl", beside=True)
    wrote: list[int] = []
    saver.begin(0, 2)
    saver.step_done(1, {})
    assert saver.asked() is None
    Saves(saver).save(1, lambda: wrote.append(1))
    saver.end()
    assert wrote == [1]


# ---- beside the next steps


def test_training_goes_on_beside_a_periodic_commit_and_the_next_save_waits_for_it(
    beside: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may = threading.Event(), threading.Event()
    real = step_end.commit_tree

    def slowly(*args: Any, **words: Any) -> Any:
        begun.set()
        assert may.wait(60)
        return real(*args, **words)

    monkeypatch.setattr(step_end, "commit_tree", slowly)
    beside.save(2)
    assert begun.wait(60)
    assert beside.step(3) is None
    assert beside.saver.saved_step == -1
    may.set()
    beside.step(4, STOP)
    beside.save(4)
    assert [saved.name for saved in beside.line.heard(RankSaved)] == ["step_000002", "step_000004"]
    assert (beside.paths.checkpoint(4) / "tracker.txt").read_bytes() == b"4"


def test_a_save_that_is_under_way_is_not_thrown_away_with_the_step(
    beside: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gives up is ended at once; so the commit of the step before is waited for."""
    may = threading.Event()
    real = step_end.commit_tree
    monkeypatch.setattr(step_end, "commit_tree", lambda *args, **words: may.wait(60) and real(*args, **words))
    watch = beside.saver._watch
    assert watch is not None
    watch.stop()  # it would look by itself
    beside.save(3)
    beside.line.asked = SaveRequest(request_id=1, stop=True, seconds_left=-1.0)
    watch.look()
    assert not beside.line.heard(RankSaveFailed)
    may.set()
    beside.saver.settle()
    watch.look()
    assert [saved.name for saved in beside.line.heard(RankSaved)] == ["step_000003"]
    assert len(beside.line.heard(RankSaveFailed)) == 1


def test_a_save_that_the_loop_waits_for_is_not_thrown_away_either(
    beside: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, real = beside.saver._watch, step_end.commit_tree
    assert watch is not None
    watch.stop()

    def struck(*args: Any, **words: Any) -> Any:
        time.sleep(0.05)  # until the loop waits: nothing tells that it does
        beside.line.asked = SaveRequest(request_id=6, stop=True, seconds_left=-1.0)
        watch.look()
        return real(*args, **words)

    monkeypatch.setattr(step_end, "commit_tree", struck)
    beside.step(3, SAVE)
    beside.save(3)
    assert [saved.name for saved in beside.line.heard(RankSaved)] == ["step_000003"]
    assert not beside.line.heard(RankSaveFailed)


def test_a_periodic_save_that_cannot_fit_is_not_begun_unless_it_is_the_last_chance(
    beside: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The framework dies of a full disk, and with it the steps since the last save."""
    beside.save(2)
    beside.saver.settle()
    no_room(monkeypatch)
    beside.save(4)
    beside.saver.settle()
    assert (beside.saver.saved_step, beside.wrote) == (2, [2])
    assert any(
        "step 4 is not saved" in notice.text and notice.loud for notice in beside.line.heard(RankNotice)
    )
    beside.step(5, SAVE)
    beside.save(5)
    assert beside.saver.saved_step == 5
    beside.save(8, last=True)
    assert beside.saver.saved_step == 8


def test_what_was_resumed_from_tells_how_large_the_first_save_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Bench(tmp_path / "run")
    first.save(1)
    first.saver.end()
    second = Bench(tmp_path / "run", resume="step_000001", beside=True)
    monkeypatch.setattr(
        "verl_slurm.checkpoint.store.medium.free_space", lambda _: FreeSpace(bytes=5000, inodes=900)
    )
    second.save(2)
    second.saver.end()
    assert second.wrote == [], "five files take more than a block"
