"""The proof that an interruption changes nothing: real ranks, really ended, compared bit for bit.

Every start is torchrun with two ranks on gloo. The safe points of a process of this configuration, by number:

    0 step 0    1-3 generate    4-7 score    8 advantage    9-12 update
    13 step 1   14-16 generate  17-20 score  21 advantage   22-25 update   26 the end
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.builders import new_training, run_config, train_config, write_config
from tests.fakes.daemon import Daemon
from tests.ledger_stats import ledger_stats
from tests.processes import python_path, tell
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir
from verl_slurm.base.keys import Keyring, load_keys, new_key_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config import load
from verl_slurm.config.elastic import keep_step
from verl_slurm.config.schema import (
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    EncryptionConfig,
)
from verl_slurm.loops.session import Session
from verl_slurm.quickstart import tiny_model as quickstart_model
from verl_slurm.quickstart.arithmetic_data import build_data
from verl_slurm.save.ranks.collective import Collective, RanksFailed
from verl_slurm.save.ranks.compare import compare
from verl_slurm.save.ranks.saver import SavedCheckpoint
from verl_slurm.trainer import loop as loop_module
from verl_slurm.trainer.loop import Ending, FinalSaveFailed, Loop, SaverLost
from verl_slurm.trainer.reporter import Reporter
from verl_slurm.trainer.save_pace import SavePace
from verl_slurm.trainer.state.position import Position, StepShape
from verl_slurm.trainer.state.train_state import TrainState, fresh_state
from verl_slurm.wire.client import MAX_MESSAGE, SOCKET_NAME
from verl_slurm.wire.control_page import PAGE_NAME, ControlPage
from verl_slurm.wire.messages import (
    Finished,
    FromRank,
    PartSaved,
    Progress,
    RankNotice,
    RankSaved,
    RankSaveFailed,
    RankStarted,
    SavedOnNodes,
    SaveRequest,
    SaveStarted,
    Stopped,
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
REPOSITORY = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 240.0


@dataclass
class Ended:
    """How one start went."""

    code: int
    out: str
    err: str


class Runs:
    """Makes runs of one configuration and starts their ranks."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._model = quickstart_model.build_model(root / "model")
        self._data = build_data(root / "data")

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

    def start(
        self,
        paths: RunPaths,
        *,
        script: dict[str, Any] | None = None,
        control: Path | None = None,
        resume: str | None = None,
    ) -> Ended:
        """One attempt: take the attempt, choose what to resume from, run all ranks to their end."""
        attempt = take_attempt(paths, job_id="test", restart=0).attempt
        if resume is None:
            resume = choose_resume(paths, "auto").name or ""
        world = load.load_resolved(paths.run_yaml).distributed.world_size
        module = "tests.fakes.scripted_rank" if script else "verl_slurm.trainer"
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        argv += ["-m", "--", module, "--run", str(paths.root), "--attempt", str(attempt), "--resume", resume]
        environ = os.environ | python_path() | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environ.pop("VERL_SLURM_CONTROL", None)
        if script:
            environ["VS_TEST_SCRIPT"] = json.dumps(script)
        if control:
            environ["VERL_SLURM_CONTROL"] = str(control)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(argv, cwd=REPOSITORY, env=environ, text=True, **pipes) as process:  # type: ignore[call-overload]
            try:
                out, err = process.communicate(timeout=_START_TIMEOUT_S)
            finally:
                _end_tree(process.pid)
        return Ended(process.returncode, out, err)


def _end_tree(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        tell([*psutil.Process(pid).children(recursive=True), psutil.Process(pid)], signal.SIGKILL)


def _final(paths: RunPaths) -> Path:
    return paths.checkpoint(STEPS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart_model, "_WARM_STEPS", 20)
        return Runs(tmp_path_factory.mktemp("loop"))


@pytest.fixture(scope="module")
def undisturbed(runs: Runs) -> RunPaths:
    """A run from start to end in one go."""
    paths = runs.make("undisturbed")
    ended = runs.start(paths)
    assert ended.code == 0, ended.err
    assert [line.split()[1] for line in ended.out.splitlines() if line.startswith("step ")] == ["1/2", "2/2"]
    return paths


def _assert_nothing_changed(paths: RunPaths, undisturbed: RunPaths) -> None:
    """Weights, optimizers, generators, history: every bit. And no rollout was sampled twice or lost."""
    result = compare(_final(undisturbed), _final(paths))
    assert result.same, result.differing
    assert result.num_tensors > 100
    journal = ledger_stats(paths)
    assert journal.duplicates == ()
    assert journal.problems == ()


def _replayed(ended: Ended) -> int:
    """Micro-batches of rank 0 that the start found in the ledger."""
    return int(ended.out.partition(" micro-batches of rank 0 in the ledger")[0].rsplit(maxsplit=1)[1])


@pytest.mark.long
@pytest.mark.parametrize(
    ("phase", "number", "name"),
    [
        # Before the first optimizer update there ever was.
        pytest.param("generate", 2, "step_000000_sp0002", marks=pytest.mark.soak),
        pytest.param("score", 18, "step_000001_sp0005", marks=pytest.mark.soak),
        # Such a stop of GRPO, with a twin, too: test_grpo.py.
        pytest.param("update", 24, "step_000001_sp0011", marks=pytest.mark.variant),
    ],
)
def test_a_run_stopped_inside_a_step_ends_with_the_same_bits(
    runs: Runs, undisturbed: RunPaths, phase: str, number: int, name: str
) -> None:
    paths = runs.make(phase)
    first = runs.start(paths, script={"rank": 1, "safe_point": number, "action": "stop"})
    assert first.code == 0, first.err
    verdict = verify(paths.checkpoints / name)
    assert verdict.ok, verdict.problems
    assert verdict.manifest is not None
    assert verdict.manifest.phase == phase
    # The second life is also asked for a save in passing, which must not disturb it either.
    second = runs.start(paths, script={"rank": 0, "safe_point": 1, "action": "save"})
    assert second.code == 0, second.err
    assert f"resumed {name}" in second.out
    assert _replayed(second) == 0
    _assert_nothing_changed(paths, undisturbed)
    assert _final(paths).is_dir()


@pytest.mark.long
@pytest.mark.variant
def test_rollouts_that_were_refused_are_replayed_from_no_checkpoint_and_no_ledger(
    runs: Runs, undisturbed: RunPaths
) -> None:
    paths = runs.make("refused")
    # The engine misses the weights of step 2, and while that is being scored the run is stopped and saved.
    script = {"rank": None, "safe_point": 12, "action": "lose_sync", "stop_at": 18}
    stopped = runs.start(paths, script=script)
    assert stopped.code == 0, stopped.err
    refused = runs.start(paths)
    assert "resumed step_000001_sp" in refused.out
    assert "are not the policy's: step 2 (found a mean" in refused.err
    assert f"exitcode  : {ExitCode.ROLLOUT:d} " in refused.err
    mended = runs.start(paths)
    assert mended.code == 0, mended.err
    assert "rollouts of step 2 were refused: it begins anew, not at step 1 score 1" in mended.out
    assert compare(_final(undisturbed), _final(paths)).same
    # What was refused was sampled twice, and nothing else was.
    assert {step for step, _ in ledger_stats(paths).duplicates} == {1}


@pytest.mark.long
@pytest.mark.variant
def test_an_encrypted_run_goes_on_with_more_ranks_and_generates_nothing_twice(
    runs: Runs, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    encryption = EncryptionConfig(key_file=str(tmp_path / "run.key"))
    keys = Keyring(new_key_file(tmp_path / "run.key"))
    paths = runs.make("resharded", CheckpointConfig(every_steps=1, keep_last=2, encryption=encryption))
    first = runs.start(
        paths, script={"rank": 1, "safe_point": 17, "action": "stop"}
    )  # all of step 1 generated
    assert first.code == 0, first.err
    old = load.load_resolved(paths.run_yaml)
    wider = msgspec.structs.replace(old, distributed=DistributedConfig(dp_size=4, nodes=1, device="cpu"))
    write_config(paths, keep_step(old, wider))
    second = runs.start(paths)
    assert second.code == 0, second.err
    assert "resumed step_000001_sp0004: step 1 score 0" in second.out
    verdict = verify(_final(paths), keys=keys)
    assert verdict.ok
    assert verdict.manifest is not None
    assert verdict.manifest.world_size == 4
    journal = ledger_stats(paths, keys=keys)
    assert (journal.duplicates, journal.problems) == ((), ())


@pytest.mark.long
@pytest.mark.variant
def test_when_and_what_a_run_saves_changes_no_bit_of_it(runs: Runs, undisturbed: RunPaths) -> None:
    checkpoint = CheckpointConfig(
        cadence="young_daly", components=("actor",), include_optimizer=True, partial_every_steps=1
    )
    paths = runs.make("paced", checkpoint)
    ended = runs.start(paths)
    assert ended.code == 0, ended.err
    assert "saves once in 1000 steps: it is not known yet how long a step takes" in ended.out
    assert "saved partial/checkpoints/step_000001 (" in ended.out
    assert re.search(r"^saved step_000002 \(.*\): the last step$", ended.out, re.MULTILINE)
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
    assert first.code != 0
    # The periodic save is written beside the training, and may not have been done by then.
    saved = choose_resume(paths, "auto").name == "step_000001"
    second = runs.start(paths)
    assert second.code == 0, second.err
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
    assert first.code != 0
    keys = load_keys(encryption)
    # The periodic save is written beside the training, and may not have been done by then.
    saved = any(
        verify(info.path, keys=keys).ok for info in list_checkpoints(paths) if info.kind == "committed"
    )
    second = runs.start(paths)
    assert second.code == 0, second.err
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
def test_a_run_killed_before_any_checkpoint_starts_over_from_its_ledger(
    runs: Runs, undisturbed: RunPaths
) -> None:
    paths = runs.make("killed_early")
    first = runs.start(paths, script={"rank": 0, "safe_point": 11, "action": "kill"})
    assert first.code != 0
    assert choose_resume(paths, "auto").name is None
    second = runs.start(paths)
    assert second.code == 0, second.err
    assert _replayed(second) == 4
    _assert_nothing_changed(paths, undisturbed)


@pytest.mark.long
@pytest.mark.scenario("P08")
@pytest.mark.variant
def test_a_save_that_fails_on_one_rank_is_said_and_training_goes_on(
    runs: Runs, undisturbed: RunPaths
) -> None:
    paths = runs.make("broken_save")
    ended = runs.start(paths, script={"rank": 1, "safe_point": 5, "action": "break_save"})
    assert ended.code == 0, ended.err
    assert "save failed: writing the checkpoint failed (found rank 1: OSError: [Errno 28]" in ended.err
    names = sorted(path.name for path in paths.checkpoints.iterdir())
    assert names == ["latest", "step_000002"]
    _assert_nothing_changed(paths, undisturbed)


@pytest.mark.long
@pytest.mark.variant
def test_a_run_whose_last_save_fails_once_saves_again_and_ends_with_the_same_bits(
    runs: Runs, undisturbed: RunPaths
) -> None:
    paths = runs.make("broken_end")
    ended = runs.start(paths, script={"rank": 1, "safe_point": 26, "action": "break_save"})
    assert ended.code == 0, ended.err
    assert "save failed" in ended.err
    _assert_nothing_changed(paths, undisturbed)


@pytest.mark.long
@pytest.mark.variant
def test_by_hand_a_foreign_checkpoint_is_verified_before_it_is_opened(
    runs: Runs, undisturbed: RunPaths, tmp_path: Path
) -> None:
    foreign = tmp_path / _final(undisturbed).name
    shutil.copytree(_final(undisturbed), foreign)
    paths = runs.make("foreign")
    ended = runs.start(paths, resume=str(foreign))
    assert ended.code == 0, ended.err
    assert f"resumed step_000002 from {foreign}: " in ended.out
    assert verify(_final(paths)).ok

    index = foreign / "actor" / "index.json"
    index.write_bytes(b"?" * index.stat().st_size)
    ended = runs.start(runs.make("foreign_damaged"), resume=str(foreign))
    assert ended.code != 0
    assert "the checkpoint does not verify" in ended.err
    assert "Traceback" not in ended.err.partition("exitcode")[0]


class _Saves:
    """A checkpointer with one result for every save."""

    def __init__(self, *results: str) -> None:
        self._results = list(results)

    def begin(self, state: TrainState, *, tidy: bool, **_: object) -> Future[SavedCheckpoint]:
        name, done = self._results.pop(0), Future[SavedCheckpoint]()
        if name:
            done.set_result(SavedCheckpoint(name=name, seconds=0.1, num_bytes=1))
        else:
            done.set_exception(
                RanksFailed("writing the checkpoint failed", found="rank 1: OSError: disk full")
            )
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


def test_a_run_is_not_finished_before_its_end_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "LAST_TRIES_S", ())
    loop, line = _at_the_end(tmp_path, _Saves(""))
    with pytest.raises(FinalSaveFailed, match="disk full") as caught:
        loop.run()
    assert caught.value.exit_code is ExitCode.INTERNAL
    assert [type(m) for m in line.told] == [SaveStarted, RankSaveFailed, RankNotice]


def test_a_last_save_that_fails_is_tried_again_before_the_run_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "LAST_TRIES_S", (0.0, 0.0))
    loop, line = _at_the_end(tmp_path, _Saves("", "", "step_000002"))
    assert loop.run() is Ending.FINISHED
    assert [len(line.heard(kind)) for kind in (RankSaveFailed, RankSaved, Finished)] == [2, 1, 1]


def test_a_run_whose_end_is_saved_is_finished(tmp_path: Path) -> None:
    loop, line = _at_the_end(tmp_path, _Saves("step_000002"))
    assert loop.run() is Ending.FINISHED
    assert [type(m) for m in line.told] == [SaveStarted, RankSaved, Finished]
    loop, line = _at_the_end(tmp_path, _Saves(), saved_as="step_000002")
    assert loop.run() is Ending.FINISHED
    assert [type(m) for m in line.told] == [Finished]


class Agent:
    """The other end of the ranks' line; stops them at the first word from inside an update."""

    def __init__(self, directory: Path) -> None:
        self.page = ControlPage.create(directory / PAGE_NAME)
        self.messages: list[FromRank] = []
        self._asked = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(directory / SOCKET_NAME))
        self._listener.listen(WORLD)
        self._threads = [threading.Thread(target=self._listen) for _ in range(WORLD)]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            while packet := connection.recv(MAX_MESSAGE):
                message = msgspec.msgpack.decode(packet, type=FromRank)
                self.messages.append(message)
                if isinstance(message, Progress) and message.phase == "update" and not self._asked:
                    self._asked = True
                    self.page.post(SaveRequest(request_id=1, stop=True))

    def close(self) -> None:
        for thread in self._threads:
            thread.join(timeout=10)
        self._listener.close()
        self.page.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(private_dir(tmp_path / "c"))
    yield made
    made.close()


@pytest.mark.long
def test_ranks_obey_the_control_page_and_say_so(
    runs: Runs, undisturbed: RunPaths, agent: Agent, tmp_path: Path
) -> None:
    paths = runs.make("asked")
    ended = runs.start(paths, control=tmp_path / "c")
    assert ended.code == 0, ended.err
    agent.close()
    kinds = [type(message) for message in agent.messages]
    assert kinds.count(Stopped) == kinds.count(RankStarted) == 2
    assert sum(isinstance(m, SaveStarted) and m.request_id == 1 for m in agent.messages) == WORLD
    saved = [m for m in agent.messages if isinstance(m, RankSaved) and m.request_id == 1]
    assert len(saved) == 1
    assert verify(paths.checkpoints / saved[0].name).ok
    assert all(m.new_rollouts > 0 for m in agent.messages if isinstance(m, Progress))
    assert runs.start(paths).code == 0
    _assert_nothing_changed(paths, undisturbed)


def test_a_finished_run_that_is_started_again_does_nothing(runs: Runs, undisturbed: RunPaths) -> None:
    before = ledger_stats(undisturbed)
    ended = runs.start(undisturbed)
    assert ended.code == 0, ended.err
    assert "resumed step_000002" in ended.out
    assert "saved" not in ended.out
    assert ledger_stats(undisturbed) == before


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
    assert ended.code != 0
    assert "rank 0: the data set is not the one the run started with" in ended.err
    assert f"exitcode  : {ExitCode.DATASET_DRIFT.value}" in ended.err
    assert not paths.orchestration.exists()


def test_orchestration_state_is_written_once_and_read_only(undisturbed: RunPaths) -> None:
    layout = msgspec.json.decode(undisturbed.orchestration.read_bytes())
    assert layout["world_size"] == WORLD
    assert list(layout["data_files"]) == ["sums.jsonl"]
    assert undisturbed.orchestration.stat().st_mode & 0o777 == 0o400
    assert (_final(undisturbed) / "orchestration.json").read_bytes() == undisturbed.orchestration.read_bytes()


def test_everything_a_run_writes_is_private(undisturbed: RunPaths) -> None:
    open_to_others = [
        path for path in undisturbed.root.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o077
    ]
    assert open_to_others == []


def test_an_end_that_only_the_nodes_disks_have_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "LAST_TRIES_S", ())

    class OnNodes(_Saves):
        def begin(self, *_: object, **__: object) -> Future[SavedCheckpoint]:
            done: Future[SavedCheckpoint] = Future()
            problem = "not on shared storage: full"
            done.set_result(
                SavedCheckpoint(
                    name="step_000002", seconds=0.1, num_bytes=1, on_shared=False, problem=problem
                )
            )
            return done

    loop, line = _at_the_end(tmp_path, OnNodes())
    with pytest.raises(FinalSaveFailed, match="not on shared storage: full"):
        loop.run()
    assert [m.on_shared for m in line.heard(RankSaved)] == [False]


@pytest.mark.parametrize("stop", [True, False])
def test_only_in_the_save_before_the_end_the_daemon_hears_at_once_of_the_nodes_copy(
    tmp_path: Path, stop: bool
) -> None:
    class FirstOnNodes(_Saves):
        def begin(self, state: TrainState, *, tidy: bool, **more: Any) -> Future[SavedCheckpoint]:
            if more["on_part"] is not None:
                more["on_part"]()
            if more["on_kept"] is not None:
                more["on_kept"](
                    SavedCheckpoint(name="step_000002", seconds=0.1, num_bytes=1, on_shared=False)
                )
            return super().begin(state, tidy=tidy)

    class Asking(Daemon):
        def request(self) -> SaveRequest:
            return SaveRequest(request_id=1, stop=stop)

    loop, line = _at_the_end(tmp_path, FirstOnNodes("step_000002"), line=Asking())
    loop.run()
    told = [type(m) for m in line.told]
    assert told == [SaveStarted, *([PartSaved, SavedOnNodes] if stop else []), RankSaved, Finished]


def test_without_its_saver_a_rank_is_a_crash_that_another_start_mends(tmp_path: Path) -> None:
    class NoSaver(_Saves):
        def begin(self, *_: object, **__: object) -> Future[SavedCheckpoint]:
            done: Future[SavedCheckpoint] = Future()
            error = RanksFailed("writing the checkpoint failed", found="rank 1: SaverDied: gone")
            error.kinds = frozenset({"SaverDied"})
            done.set_exception(error)
            return done

    loop, line = _at_the_end(tmp_path, NoSaver())
    with pytest.raises(SaverLost) as caught:
        loop.run()
    assert caught.value.exit_code is ExitCode.INTERNAL
    assert line.heard(RankSaveFailed)
