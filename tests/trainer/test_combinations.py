"""What is tested one by one elsewhere, together: GRPO, evaluation, the best checkpoints, another reward, and vLLM.

Each case is a run in this process, with everything but the daemon, and its twin that nobody disturbs. The run is
stopped and killed in the middle of steps, around the step at which its reward is replaced, and must end with the same
bits, the same best checkpoint, and no rollout sampled twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import new_training
from tests.fakes.attempts_in_process import Killed, live, one_rank
from tests.ledger_stats import ledger_stats
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.best import Best, Rank, rank_best
from verl_slurm.checkpoint.inspect.compare import compare
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.config import load
from verl_slurm.config.roles import eval_metrics, step_metrics
from verl_slurm.config.schema import RunConfig
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer import setup
from verl_slurm.trainer.loop import Loop
from verl_slurm.trainer.quickstart import tiny_model as quickstart_model
from verl_slurm.wire.client import NoDaemon
from verl_slurm.wire.messages import FromRank, Progress, SaveRequest
from verl_slurm.wire.reward_plan import ask_for_reward, read_reward_plan

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

STEPS = 4
SOURCE = "def score(prompts, responses, answers):\n    return [40.0 + 25.0 * len(r) for r in responses]\n"
At = tuple[int, str]
"""A step (from 0) and a phase; the first safe point there."""
Life = tuple[At | None, str]
"""Where a life ends, and how: `stop` saves and leaves, `kill` has the ledger alone; None: at the end."""

AROUND: tuple[Life, ...] = (
    ((1, "update"), "stop"),  # another reward is asked for, and not yet taken
    ((2, "score"), "kill"),  # behind the replacement, thrown back to before
    ((2, "update"), "stop"),
    ((3, "generate"), "kill"),
)
EARLY: tuple[Life, ...] = (((0, "score"), "kill"), ((0, "update"), "stop"), ((3, "advantage"), "kill"))
IN_EVALUATIONS: tuple[Life, ...] = (
    ((1, "evaluate"), "stop"),
    ((2, "evaluate"), "kill"),
    ((2, "evaluate"), "stop"),
    ((3, "evaluate"), "stop"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Attributes:
    wish: where another reward is asked for; (0, ""): before the first start.
    often: what it combines, another case here combines, too: `make soak`.
    """

    grpo: bool = False
    evaluated: bool = False
    keep_best: bool = False
    wish: At | None = None
    vllm: bool = False
    often: bool = False
    lives: tuple[Life, ...] = AROUND

    @property
    def switches(self) -> list[int]:
        """The steps at which the reward is replaced."""
        return [] if self.wish is None else [self.wish[0] + 1 if self.wish[1] else 0]


MIDDLE = (1, "score")
_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="no vLLM here: make vllm, then .venv-vllm/bin/python"
    ),
]
CASES = {
    "grpo-best": Case(grpo=True, keep_best=True),
    "grpo-swap": Case(grpo=True, wish=MIDDLE, often=True),
    "grpo-swap-first": Case(grpo=True, wish=(0, ""), lives=EARLY),
    "grpo-eval-best": Case(grpo=True, evaluated=True, keep_best=True, lives=IN_EVALUATIONS),
    "best-swap": Case(keep_best=True, wish=MIDDLE, often=True),
    "eval-best-swap": Case(evaluated=True, keep_best=True, wish=MIDDLE, lives=IN_EVALUATIONS),
    "all": Case(grpo=True, evaluated=True, keep_best=True, wish=MIDDLE),
    "vllm-eval-best-swap": Case(
        evaluated=True, keep_best=True, wish=MIDDLE, vllm=True, often=True, lives=IN_EVALUATIONS
    ),
    "vllm-all": Case(grpo=True, evaluated=True, keep_best=True, wish=MIDDLE, vllm=True),
}


class Script(NoDaemon):
    """An operator's wish at one place, and the end of a life at another."""

    def __init__(self, paths: RunPaths, wish: At | None, reward: str, end: At | None, how: str) -> None:
        self._paths, self._wish, self._reward = paths, wish, reward
        self._end, self._how, self._asked = end, how, False
        self._here: At = (-1, "")
        self.reached = end is None

    def send(self, message: FromRank) -> None:
        if isinstance(message, Progress):
            self._here = (message.step, message.phase)

    def request(self) -> SaveRequest | None:
        if self._here == self._wish and not self._asked:
            ask_for_reward(self._paths, self._reward, 2)
            self._asked = True
        self.reached = self.reached or self._here == self._end
        if self._end is not None and self.reached:
            if self._how == "kill":
                raise Killed
            return SaveRequest(request_id=2, stop=True)
        return SaveRequest(request_id=1, stop=False) if self._asked else None


@dataclass
class Runs:
    """Makes runs, and gives them their lives."""

    root: Path
    model: Path
    data: Path
    device: torch.device
    ranks: Collective

    def make(self, name: str, case: Case) -> RunPaths:
        values: dict[str, Any] = {"steps": STEPS, "sizes": (16, 8, 8), "ppo_epochs": 1}
        values |= {"every_steps": 1, "keep_last": 1}
        if case.keep_best:
            values |= {"keep_best": 1, "best_metric": "eval/reward" if case.evaluated else "reward"}
        if case.grpo:
            values |= {"algorithm": "grpo", "kl_in": "loss", "samples_per_prompt": 4}
        if case.evaluated:
            values |= {
                "eval_fraction": 0.1,
                "eval_every_steps": 1,
                "eval_prompts": 10,
                "eval_temperature": 0.7,
            }
        if case.vllm:
            values["engine"] = "vllm"
        return new_training(self.root / name, self._wide() if case.vllm else self.model, self.data, **values)

    def _wide(self) -> Path:
        """With heads as wide as vLLM wants them."""
        directory = self.root / "wide"
        if not directory.exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(quickstart_model, "_WARM_STEPS", 20)
                quickstart_model.build_model(directory, head_dim=32)
        return directory

    def live(self, paths: RunPaths, case: Case, lives: tuple[Life, ...]) -> Loop:
        """Every life in turn, and then one to the end."""
        new = self.root / "another.py"
        new.write_text(SOURCE)
        reward = f"python:{new}:score"
        if case.wish == (0, ""):
            ask_for_reward(paths, reward, 2)
        for number, (end, how) in enumerate((*lives, (None, ""))):
            script = Script(paths, case.wish if number == 0 else None, reward, end, how)
            loop = live(paths, script, self.device, self.ranks, restart=number)
            assert script.reached, f"life {number} never came to {end}"
        return loop


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny: Path, sums_root: Path) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch:
        build, kept = setup.build_engine, list[Any]()

        def build_once(config: RunConfig, model: Path, **rest: Any) -> Any:
            """There can be one vLLM in a process, and it has no state but the weights that every step brings."""
            if config.rollout.engine == "hf":
                return build(config, model, **rest)
            if not kept:
                kept.append(build(config, model, **rest))
            return kept[0]

        patch.setattr(setup, "build_engine", build_once)
        with one_rank() as (device, ranks):
            yield Runs(tmp_path_factory.mktemp("combinations"), tiny, sums_root, device, ranks)
            if kept:
                _forget_groups()


def _forget_groups() -> None:
    """vLLM keeps the process groups that it was given for the life of its process; the next test file brings others."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None


def _best(paths: RunPaths) -> dict[str, Rank]:
    return rank_best(list_checkpoints(paths), Best.of(load.load_resolved(paths.run_yaml).checkpoint))


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                *(_VLLM if case.vllm else []),
                *([pytest.mark.soak] if case.often else []),
                *([] if name == "all" else [pytest.mark.variant]),
            ],
        )
        for name, case in CASES.items()
    ],
)
def test_what_is_combined_ends_with_the_same_bits_however_it_was_interrupted(runs: Runs, name: str) -> None:
    case = CASES[name]
    twin, paths = runs.make(f"{name}-twin", case), runs.make(name, case)
    undisturbed = runs.live(twin, case, ())
    runs.live(paths, case, case.lives)
    result = compare(twin.checkpoint(STEPS), paths.checkpoint(STEPS))
    assert result.same, result.differing
    for run in (twin, paths):
        assert [switch.step for switch in read_reward_plan(run).switches] == case.switches
    journal = ledger_stats(paths)
    assert (journal.duplicates, journal.problems) == ((), ())
    assert _best(paths) == _best(twin)
    assert len(_best(twin)) == int(case.keep_best)
    names = {*step_metrics(load.load_resolved(paths.run_yaml)), *(eval_metrics() if case.evaluated else ())}
    for row in undisturbed._state.history:
        assert set(row) - {"step", "reward_number"} == names
