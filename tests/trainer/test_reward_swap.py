"""One reward takes over from another while a real trainer runs, undisturbed and interrupted around that very step.

The safe points of a process of this configuration, by number; a start that resumes counts from where it stands:

    0 step 0   1 generate   2-3 score   4 advantage   5-6 update   7 step 1   14 step 2   21 step 3   28 the end
"""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import safetensors.torch
import torch

from tests.builders import new_training, reward_switch
from tests.fakes.attempts_in_process import Killed, live, one_rank
from tests.trainer.test_rewards import make_classifier
from verl_slurm.base.errors import DataError, VerlSlurmError
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.inspect.contents import known_manifest
from verl_slurm.dataset.fingerprint.data_record import fingerprint
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.compare import compare
from verl_slurm.trainer.loop import Loop
from verl_slurm.trainer.reporter import Reporter
from verl_slurm.trainer.reward import swap
from verl_slurm.trainer.reward.reward_files import start_reward
from verl_slurm.trainer.reward.swap import LiveReward, RewardSwap
from verl_slurm.trainer.state.position import Position
from verl_slurm.trainer.state.reward_state import RewardState
from verl_slurm.trainer.state.train_state import TrainState
from verl_slurm.wire.client import NoDaemon
from verl_slurm.wire.messages import SaveRequest
from verl_slurm.wire.reward_plan import (
    RewardPlan,
    RewardRequest,
    ask_for_reward,
    read_reward_plan,
    write_reward_plan,
)

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")]

STEPS, SWITCH, WARM_STEPS = 4, 2, 2
# In another language than a rule's 0 to 1, and of another opinion.
SOURCE = "def score(prompts, responses, answers):\n    return [40.0 + 25.0 * len(r) for r in responses]\n"


class Script(NoDaemon):
    """At a safe point of its own choice: an operator asks for another reward, a daemon for a stop, or all ends."""

    def __init__(self, wish: int = -1, kill: int = -1, stop: int = -1) -> None:
        self._wish, self._kill, self._stop, self._polls = wish, kill, stop, 0
        self.ask = lambda: None

    def request(self) -> SaveRequest | None:
        number, self._polls = self._polls, self._polls + 1
        if number == self._kill:
            raise Killed
        if number == self._wish:
            self.ask()
        if 0 <= self._stop <= number:
            return SaveRequest(request_id=2, stop=True)
        return SaveRequest(request_id=1, stop=False) if 0 <= self._wish <= number else None


@dataclass
class Place1:
    """Where runs are made, and the one rank that trains them."""

    root: Path
    model: Path
    data: Path
    device: torch.device
    ranks: Collective

    @property
    def source(self) -> Path:
        return self.root / "another.py"

    def make(self, name: str, *, store_frozen: bool = False, **model: str) -> RunPaths:
        values = {"steps": STEPS, "sizes": (16, 8, 8), "ppo_epochs": 1, "store_frozen": store_frozen}
        return new_training(self.root / name, self.model, self.data, **values, **model)

    def start(self, paths: RunPaths, script: Script, warm_steps: int = WARM_STEPS, new: str = "") -> Loop:
        """One attempt, until it ends or is killed."""
        wish = new or f"python:{self.source}:score"
        script.ask = lambda: ask_for_reward(paths, wish, warm_steps)  # type: ignore[assignment, return-value]
        loop = live(paths, script, self.device, self.ranks)
        return loop


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny: Path, sums_root: Path) -> Iterator[Place1]:
    with one_rank() as (device, ranks):
        made = Place1(tmp_path_factory.mktemp("swap"), tiny, sums_root, device, ranks)
        made.source.write_text(SOURCE)
        yield made


@pytest.fixture(scope="module")
def undisturbed(place: Place1) -> tuple[RunPaths, Loop]:
    """The wish comes inside step 1, and counts from step 2 on."""
    paths = place.make("undisturbed")
    return paths, place.start(paths, Script(wish=10))


def _rewards(loop: Loop) -> list[float]:
    return [row["reward"] for row in loop._state.history]


def test_the_new_reward_counts_from_the_next_step_on_and_is_written_down(
    place: Place1, undisturbed: tuple[RunPaths, Loop]
) -> None:
    paths, loop = undisturbed
    plan = read_reward_plan(paths)
    assert [(switch.step, switch.replaced) for switch in plan.switches] == [(SWITCH, "rule:arithmetic")]
    final = known_manifest(paths.checkpoint(STEPS))
    assert final.frozen["reward"] == plan.switches[0].digest
    assert "reward" not in known_manifest(paths.checkpoint(SWITCH)).frozen  # saved just before
    assert loop._state.reward.spec == f"python:{place.source}:score"
    assert (paths.reward_snapshot(1) / "last_scores.json").is_file()


def test_with_a_warm_start_the_reward_does_not_jump_and_without_one_it_does(
    place: Place1, undisturbed: tuple[RunPaths, Loop]
) -> None:
    cold = place.make("cold")
    jump = _rewards(place.start(cold, Script(wish=10), warm_steps=0))
    warm = _rewards(undisturbed[1])
    assert jump[:SWITCH] == warm[:SWITCH]
    print(f"mean reward a step: without warm start {jump}, over {WARM_STEPS} steps {warm}")
    assert abs(warm[SWITCH] - warm[SWITCH - 1]) < 0.2
    assert jump[SWITCH] - jump[SWITCH - 1] > 50
    assert warm[SWITCH] < warm[SWITCH + 1] < jump[SWITCH + 1]  # on the way


@pytest.mark.parametrize(
    "first",
    [
        Script(wish=10, kill=13),  # in the last update before: nothing is recorded yet
        Script(wish=10),  # between the record and its effect
        Script(wish=10, kill=17),  # scored with the new reward, and thrown back to before
        Script(wish=10, stop=24),  # in the warm start, whose numbers come from the checkpoint
    ],
    ids=["before", "recorded", "after", "warm"],
)
def test_a_run_interrupted_around_the_replacement_ends_with_the_same_bits(
    place: Place1,
    undisturbed: tuple[RunPaths, Loop],
    first: Script,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = request.node.callspec.id
    paths = place.make(name)
    if name == "recorded":
        with monkeypatch.context() as patch:

            def die(*_: object) -> None:
                raise Killed

            patch.setattr(RewardSwap, "_take", die)
            place.start(paths, first)
    else:
        place.start(paths, first)
    assert bool(read_reward_plan(paths).switches) == (name != "before")
    place.start(paths, Script())
    assert [switch.step for switch in read_reward_plan(paths).switches] == [SWITCH]
    result = compare(undisturbed[0].checkpoint(STEPS), paths.checkpoint(STEPS))
    assert result.same, result.differing


def test_what_cannot_be_loaded_or_is_no_reward_leaves_the_old_one_in_force(
    place: Place1, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = place.make("refused")
    nan = place.root / "nan.py"
    nan.write_text("def score(prompts, responses, answers):\n    return [float('nan')] * len(responses)\n")
    loop = place.start(paths, Script(wish=3), new=f"python:{nan}:score")
    plan = read_reward_plan(paths)
    assert plan.switches == ()
    assert plan.handled == 1
    assert "nan for sample 0 of 16" in plan.refused
    assert "the reward stays rule:arithmetic" in capsys.readouterr().err
    assert loop._state.reward.spec == "rule:arithmetic"
    assert len(_rewards(loop)) == STEPS


def test_of_a_classifier_that_is_let_go_its_head_and_last_scores_stay(place: Place1) -> None:
    directory = make_classifier(place.root / "rm", place.model)
    paths = place.make("classifier", store_frozen=True, reward=f"classifier:{directory}")
    loop = place.start(paths, Script(wish=10))
    digest = fingerprint(directory).digest
    before, after = (known_manifest(paths.checkpoint(step)).frozen["reward"] for step in (SWITCH, STEPS))
    assert before == digest
    assert (paths.frozen / digest / "config.json").is_file()
    assert paths.reward_source(after).read_text() == SOURCE
    light = paths.reward_snapshot(1)
    head = safetensors.torch.load((light / "head.safetensors").read_bytes())
    assert {name: tuple(tensor.shape) for name, tensor in head.items()} == {"score.weight": (1, 16)}
    assert (light / "tokenizer_config.json").is_file()
    last = json.loads((light / "last_scores.json").read_bytes())
    assert last["digest"] == digest
    assert sum(last["scores"]) / 16 == pytest.approx(_rewards(loop)[SWITCH - 1], abs=1e-6)


def test_a_source_that_changed_between_two_starts_is_refused(place: Place1) -> None:
    source = place.root / "mine.py"
    source.write_text(SOURCE)
    paths = place.make("drift", reward=f"python:{source}:score")
    place.start(paths, Script(stop=10))
    source.write_text(SOURCE.replace("25.0", "26.0"))
    with pytest.raises(VerlSlurmError, match="the reward is not what the run was trained with") as caught:
        place.start(paths, Script())
    assert isinstance(caught.value.__cause__, DataError)


def test_a_record_that_does_not_fit_the_checkpoint_is_refused(place: Place1) -> None:
    paths = RunPaths(place.root / "misfit")
    private_dir(paths.root)
    switch = reward_switch("rule:arithmetic", 2)
    write_reward_plan(paths, RewardPlan(handled=1, switches=(switch,)))

    def begin(number: int, position: Position) -> int:
        state = RewardState(number=number)
        return start_reward(
            paths, place.ranks, state, position, first="rule:arithmetic", recorded={}, keep=None
        )[1].number

    assert begin(0, Position(2)) == 0
    assert begin(1, Position(2)) == 1
    for number, position in ((0, Position(3)), (0, Position(2, "score")), (1, Position(1))):
        with pytest.raises(VerlSlurmError, match="contradict each other"):
            begin(number, position)


def test_a_request_that_comes_while_storage_is_slow_is_read_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look has begun before the request was written, and ends after the daemon has handed it on."""
    storage = threading.Event()
    wish = RewardRequest(number=1, reward="rule:arithmetic", warm_start_steps=0, asked_utc="")
    answers = [None, wish]

    def read(_: RunPaths) -> RewardRequest | None:
        answer = answers.pop(0)
        storage.wait()
        return answer

    monkeypatch.setattr(swap, "read_reward_request", read)
    monkeypatch.setattr(swap, "_PATIENCE_S", 0.01)
    swapping = RewardSwap(
        paths=RunPaths(tmp_path),
        attempt=1,
        ranks=Collective(None),
        reporter=cast("Reporter", SimpleNamespace(complain=print)),
        plan=RewardPlan(),
        live=LiveReward(lambda *_: torch.zeros(0)),
        texts=lambda _: ([], [], []),
        keep=None,
    )

    def due(step: int) -> object:
        state = SimpleNamespace(position=Position(step), reward=RewardState())
        return swapping.due(cast("TrainState", state), -1)

    assert due(1) is None
    swapping.look()
    assert due(2) is None
    storage.set()
    found = [due(step) for step in range(3, 6)]
    assert wish in found
    assert answers == []
