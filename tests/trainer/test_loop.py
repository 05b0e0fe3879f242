"""The proof that an interruption changes nothing: real ranks, really ended, compared bit for bit.

Every start is torchrun with two ranks on gloo. The safe points of a process of this configuration, by number:

    0 step 0    1-3 generate    4-7 score    8 advantage    9-12 update
    13 step 1   14-16 generate  17-20 score  21 advantage   22-25 update   26 the end
"""

import json
import os
import random
import re
from concurrent.futures import Future
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import msgspec
import pytest

from tests.builders import new_training, run_config, train_config, write_config
from tests.fakes.daemon import Daemon
from tests.ledger_stats import ledger_stats
from tests.made_once import made_once
from tests.processes import torchrun
from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.keys import load_keys, new_key_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.inspect.compare import compare
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config import load
from verl_slurm.config.schema import CheckpointConfig, DataConfig, EncryptionConfig
from verl_slurm.loops.session import Session
from verl_slurm.save.ranks.collective import Collective, RanksFailed
from verl_slurm.save.ranks.saver import SavedCheckpoint
from verl_slurm.trainer import loop as loop_module
from verl_slurm.trainer.loop import Ending, FinalSaveFailed, Loop, SaverLost
from verl_slurm.trainer.quickstart.arithmetic_data import build_data
from verl_slurm.trainer.reporter import Reporter
from verl_slurm.trainer.save_pace import SavePace
from verl_slurm.trainer.state.position import Position, StepShape
from verl_slurm.trainer.state.train_state import TrainState, fresh_state
from verl_slurm.wire.messages import (
    Finished,
    PartSaved,
    RankSaved,
    RankSaveFailed,
    SavedOnNodes,
    SaveRequest,
    SaveStarted,
)
from verl_slurm.wire.stopping import Stopper

pytestmark = pytest.mark.torch

STEPS, WORLD = 2, 2
TRAIN = train_config(
    steps=STEPS,
    sizes=(16, 8, 4),
    ppo_epochs=2,
    lr_schedule="cosine",
    warmup_steps=1,
    weight_decay=0.01,
    entropy_coef=0.01,
)


class Runs:
    """Makes runs of one configuration and starts their ranks."""

    def __init__(self, root: Path, model: Path, data: Path) -> None:
        self._root, self._model, self._data = root, model, data

    def make(self, name: str, checkpoint: CheckpointConfig | None = None) -> RunPaths:
        return new_training(
            self._root / name,
            self._model,
            self._data,
            sampled_at_once=4,
            max_new_tokens=5,
            train=TRAIN,
            ranks=WORLD,
            checkpoint=checkpoint or CheckpointConfig(every_steps=1, keep_last=2),
        )

    def start(self, paths: RunPaths, *, script: dict[str, Any] | None = None) -> "CompletedProcess[str]":
        """One attempt: take its number, choose what to resume from, run all ranks to their end."""
        attempt = take_attempt(paths, job_id="test", restart=0).attempt
        resume = choose_resume(paths, "auto").name or ""
        world = load.load_resolved(paths.run_yaml).distributed.world_size
        module = "tests.fakes.scripted_rank" if script else "verl_slurm.trainer"
        words = ["-m", "--", module, "--run", str(paths.root), "--attempt", str(attempt), "--resume", resume]
        environ = {"VS_TEST_SCRIPT": json.dumps(script)} if script else {}
        return torchrun(*words, ranks=world, **environ)


def _final(paths: RunPaths) -> Path:
    return paths.checkpoint(STEPS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny: Path, sums_root: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("loop"), tiny, sums_root)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny: Path, sums_root: Path) -> RunPaths:
    """A run from start to end in one go."""

    def make(place: Path) -> None:
        runs = Runs(place, tiny, sums_root)
        ended = runs.start(runs.make("undisturbed"))
        assert ended.returncode == 0, ended.stderr
        steps = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("step ")]
        assert steps == ["1/2", "2/2"]

    return RunPaths(made_once(tmp_path_factory, "loop", make) / "undisturbed")


def _assert_nothing_changed(paths: RunPaths, undisturbed: RunPaths) -> None:
    """Weights, optimizers, generators, history: every bit. And no rollout was sampled twice or lost."""
    result = compare(_final(undisturbed), _final(paths))
    assert result.same, result.differing
    assert result.num_tensors > 100
    journal = ledger_stats(paths)
    assert journal.duplicates == ()
    assert journal.problems == ()


def _replayed(ended: "CompletedProcess[str]") -> int:
    """Micro-batches of rank 0 that the start found in the ledger."""
    return int(ended.stdout.partition(" micro-batches of rank 0 in the ledger")[0].rsplit(maxsplit=1)[1])


@pytest.mark.long
@pytest.mark.variant
def test_rollouts_that_were_refused_are_replayed_from_no_checkpoint_and_no_ledger(
    runs: Runs, undisturbed: RunPaths
) -> None:
    paths = runs.make("refused")
    # The engine misses the weights of step 2, and while that is being scored the run is stopped and saved.
    script = {"rank": None, "safe_point": 12, "action": "lose_sync", "stop_at": 18}
    stopped = runs.start(paths, script=script)
    assert stopped.returncode == 0, stopped.stderr
    refused = runs.start(paths)
    assert "resumed step_000001_sp" in refused.stdout
    assert "are not the policy's: step 2 (found a mean" in refused.stderr
    assert f"exitcode  : {ExitCode.ROLLOUT:d} " in refused.stderr
    mended = runs.start(paths)
    assert mended.returncode == 0, mended.stderr
    assert "rollouts of step 2 were refused: it begins anew, not at step 1 score 1" in mended.stdout
    assert compare(_final(undisturbed), _final(paths)).same
    # What was refused was sampled twice, and nothing else was.
    assert {step for step, _ in ledger_stats(paths).duplicates} == {1}


@pytest.mark.long
@pytest.mark.variant
def test_when_and_what_a_run_saves_changes_no_bit_of_it(runs: Runs, undisturbed: RunPaths) -> None:
    checkpoint = CheckpointConfig(
        cadence="young_daly", components=("actor",), include_optimizer=True, partial_every_steps=1
    )
    paths = runs.make("paced", checkpoint)
    ended = runs.start(paths)
    assert ended.returncode == 0, ended.stderr
    assert "saves once in 1000 steps: it is not known yet how long a step takes" in ended.stdout
    assert "saved partial/checkpoints/step_000001 (" in ended.stdout
    assert re.search(r"^saved step_000002 \(.*\): the last step$", ended.stdout, re.MULTILINE)
    assert not paths.checkpoint(1).exists()
    assert not paths.partial.checkpoint(2).exists()
    verdict = verify(paths.partial.checkpoint(1))
    assert verdict.ok, verdict.problems
    _assert_nothing_changed(paths, undisturbed)


@pytest.mark.scenario("P01")
def test_a_killed_run_replays_its_ledger_and_ends_with_the_same_bits(
    runs: Runs, undisturbed: RunPaths
) -> None:
    """One rank dies inside step 1, at a random place; the last checkpoint is the periodic one before it."""
    seed = int(os.environ.get("VERL_SLURM_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"VERL_SLURM_TEST_SEED={seed}")
    dice = random.Random(seed)
    paths = runs.make("killed")
    number = dice.randrange(15, 25)
    script = {"rank": dice.randrange(WORLD), "safe_point": number, "action": "alarm"}
    first = runs.start(paths, script=script | {"seconds": dice.uniform(1e-4, 0.1)})
    assert first.returncode != 0
    # The periodic save is written beside the training, and may not have been done by then.
    saved = choose_resume(paths, "auto").name == "step_000001"
    second = runs.start(paths)
    assert second.returncode == 0, second.stderr
    # A rank that is at safe point 15 knows that every rank has passed 14: one micro-batch of step 1 is done.
    assert _replayed(second) >= min(number - 14, 4) + (0 if saved else 4)
    _assert_nothing_changed(paths, undisturbed)


@pytest.mark.long
@pytest.mark.variant
def test_an_encrypted_run_that_is_killed_ends_with_the_same_bits_and_none_of_them_in_the_open(
    runs: Runs, undisturbed: RunPaths, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    encryption = EncryptionConfig(key_file=str(tmp_path / "run.key"))
    new_key_file(tmp_path / "run.key")
    paths = runs.make("encrypted", CheckpointConfig(every_steps=1, keep_last=2, encryption=encryption))
    first = runs.start(paths, script={"rank": 1, "safe_point": 18, "action": "kill"})
    assert first.returncode != 0
    keys = load_keys(encryption)
    # The periodic save is written beside the training, and may not have been done by then.
    saved = any(
        verify(info.path, keys=keys).ok for info in list_checkpoints(paths) if info.kind == "committed"
    )
    second = runs.start(paths)
    assert second.returncode == 0, second.stderr
    assert _replayed(second) == (4 if saved else 8)
    result = compare(_final(undisturbed), _final(paths), None, keys)
    assert result.same, result.differing
    assert verify(_final(paths), keys=keys).ok
    assert ledger_stats(paths, keys=keys).problems == ()
    # Names of arrays, of tensors and of settings: the ends of all threads that lead to the content.
    telling = (b"response_mask", b"exp_avg_sq", b"embed_tokens", b"actor_lr", b"kl_window")
    in_the_open = {
        word: [path.name for path in _written(paths) if word in path.read_bytes()] for word in telling
    }
    assert not any(in_the_open.values()), in_the_open
    plain = [path for path in _written(undisturbed) if b"embed_tokens" in path.read_bytes()]
    assert plain, "the search finds what is there"


def _written(paths: RunPaths) -> list[Path]:
    """Every file with content: checkpoints and journal. The schema has names of fields only, and says so."""
    roots = (paths.checkpoints, paths.ledger)
    files = [path for root in roots for path in root.rglob("*") if path.is_file()]
    return [path for path in files if path.name != "schema_version.json"]


@pytest.mark.long
@pytest.mark.scenario("P08")
@pytest.mark.variant
def test_a_save_that_fails_on_one_rank_is_said_and_training_goes_on(
    runs: Runs, undisturbed: RunPaths
) -> None:
    paths = runs.make("broken_save")
    ended = runs.start(paths, script={"rank": 1, "safe_point": 5, "action": "break_save"})
    assert ended.returncode == 0, ended.stderr
    assert "save failed: writing the checkpoint failed (found rank 1: OSError: [Errno 28]" in ended.stderr
    names = sorted(path.name for path in paths.checkpoints.iterdir())
    assert names == ["latest", "step_000002"]
    _assert_nothing_changed(paths, undisturbed)


def _done(name: str, **values: Any) -> SavedCheckpoint:
    return SavedCheckpoint(name=name, seconds=0.1, num_bytes=1, **values)


def _failed(found: str, *kinds: str) -> RanksFailed:
    error = RanksFailed("writing the checkpoint failed", found=f"rank 1: {found}")
    error.kinds = frozenset(kinds)
    return error


FULL = _failed("OSError: disk full")


class _Saves:
    """A checkpointer with one result for every save."""

    def __init__(self, *results: SavedCheckpoint | RanksFailed) -> None:
        self._results = list(results)

    def begin(self, state: TrainState, *, tidy: bool, **_: object) -> Future[SavedCheckpoint]:
        result, done = self._results.pop(0), Future[SavedCheckpoint]()
        if isinstance(result, RanksFailed):
            done.set_exception(result)
        else:
            done.set_result(result)
        return done

    def close(self, *, hurry: bool = False) -> None:
        """Nothing to do."""


def _at_the_end(
    tmp_path: Path, saves: _Saves, saved_as: str = "", line: Daemon | None = None
) -> tuple[Loop, Daemon]:
    config = run_config(steps=STEPS)
    state, line = fresh_state(config), line or Daemon()
    state.position = Position(STEPS)
    session = Session(line, rank=0, world_size=1)
    reporter = Reporter(session, total_steps=STEPS, tensorboard=tmp_path / "tb", first_step=STEPS)
    loop = Loop(
        config=config,
        shape=StepShape.of(config),
        state=state,
        learner=None,  # type: ignore[arg-type]  # there is no work left
        checkpointer=saves,  # type: ignore[arg-type]
        pace=SavePace(config, RunPaths(tmp_path), Collective(None), reporter, step=STEPS, state_bytes=1),
        stopper=Stopper(line, list),
        reporter=reporter,
        saved_as=saved_as,
    )
    return loop, line


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (FULL, FinalSaveFailed),
        (_done("step_000002", on_shared=False, problem="not on shared storage: disk full"), FinalSaveFailed),
        (_failed("SaverDied: gone", "SaverDied"), SaverLost),
    ],
    ids=["failed", "on the nodes alone", "no saver"],
)
def test_a_run_whose_end_is_not_on_shared_storage_is_a_crash_that_another_start_mends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    result: SavedCheckpoint | RanksFailed,
    error: type[VerlSlurmError],
) -> None:
    monkeypatch.setattr(loop_module, "LAST_TRIES_S", ())
    loop, line = _at_the_end(tmp_path, _Saves(result))
    with pytest.raises(error, match="disk full|gone") as caught:
        loop.run()
    assert caught.value.exit_code is ExitCode.INTERNAL
    assert line.heard(Finished) == []
    assert [m.on_shared for m in line.heard(RankSaved)] == (
        [] if isinstance(result, RanksFailed) else [False]
    )
    assert len(line.heard(RankSaveFailed)) == isinstance(result, RanksFailed)


def test_a_last_save_that_fails_is_tried_again_before_the_run_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "LAST_TRIES_S", (0.0, 0.0))
    loop, line = _at_the_end(tmp_path, _Saves(FULL, FULL, _done("step_000002")))
    assert loop.run() is Ending.FINISHED
    assert [len(line.heard(kind)) for kind in (RankSaveFailed, RankSaved, Finished)] == [2, 1, 1]
    # One that is saved already needs no save.
    loop, line = _at_the_end(tmp_path, _Saves(), saved_as="step_000002")
    assert loop.run() is Ending.FINISHED
    assert [type(m) for m in line.told] == [Finished]


def test_a_run_leaves_its_layout_and_private_files_and_started_again_does_nothing(
    runs: Runs, undisturbed: RunPaths
) -> None:
    layout = msgspec.json.decode(undisturbed.orchestration.read_bytes())
    assert layout["world_size"] == WORLD
    assert list(layout["data_files"]) == ["sums.jsonl"]
    assert undisturbed.orchestration.stat().st_mode & 0o777 == 0o400
    assert (_final(undisturbed) / "orchestration.json").read_bytes() == undisturbed.orchestration.read_bytes()
    before = ledger_stats(undisturbed)
    ended = runs.start(undisturbed)
    assert ended.returncode == 0, ended.stderr
    assert "resumed step_000002" in ended.stdout
    assert "saved" not in ended.stdout
    assert ledger_stats(undisturbed) == before
    every = [path for path in undisturbed.root.rglob("*") if not path.is_symlink()]
    assert [path for path in every if path.stat().st_mode & 0o077] == []


def test_changed_data_is_refused_with_its_exit_code(runs: Runs, undisturbed: RunPaths) -> None:
    paths = runs.make("drift")
    (paths.root / ".dataset_fingerprint").write_bytes(
        (undisturbed.root / ".dataset_fingerprint").read_bytes()
    )
    data = build_data(paths.root / "own")
    with (data / "sums.jsonl").open("a") as file:
        file.write('{"prompt": "1+1=", "answer": "2"}\n')
    config = load.load_resolved(paths.run_yaml)
    config = msgspec.structs.replace(config, data=DataConfig(root=str(data)))
    write_config(paths, config)
    ended = runs.start(paths)
    assert ended.returncode != 0
    assert "rank 0: the data set is not the one the run started with" in ended.stderr
    assert f"exitcode  : {ExitCode.DATASET_DRIFT.value}" in ended.stderr
    assert not paths.orchestration.exists()


@pytest.mark.parametrize("stop", [True, False])
def test_only_in_the_save_before_the_end_the_daemon_hears_at_once_of_the_nodes_copy(
    tmp_path: Path, stop: bool
) -> None:
    class FirstOnNodes(_Saves):
        def begin(self, state: TrainState, *, tidy: bool, **more: Any) -> Future[SavedCheckpoint]:
            if more["on_part"] is not None:
                more["on_part"]()
            if more["on_kept"] is not None:
                more["on_kept"](_done("step_000002", on_shared=False))
            return super().begin(state, tidy=tidy)

    class Asking(Daemon):
        def request(self) -> SaveRequest:
            return SaveRequest(request_id=1, stop=stop)

    loop, line = _at_the_end(tmp_path, FirstOnNodes(_done("step_000002")), line=Asking())
    loop.run()
    told = [type(m) for m in line.told]
    assert told == [SaveStarted, *([PartSaved, SavedOnNodes] if stop else []), RankSaved, Finished]
