"""An evaluation: what it measures, how it is shared out, that it leaves no trace, and whole runs that are evaluated."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from tests.builders import new_training, write_config
from tests.fakes.attempts_in_process import begin, one_rank
from tests.fakes.daemon import AtSafePoint
from tests.ledger_stats import ledger_stats
from verl_slurm.base.errors import DataError
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.inspect.compare import compare
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.config import load
from verl_slurm.config.roles import eval_metrics, step_metrics
from verl_slurm.config.schema import DataConfig
from verl_slurm.journal.steps import last_steps
from verl_slurm.save.ranks import rng
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.data import Batch, PromptData, load_tokenizer
from verl_slurm.trainer.evaluation import Evaluator, num_pieces
from verl_slurm.trainer.loop import Ending
from verl_slurm.trainer.objective.counter_rng import Purpose
from verl_slurm.wire.messages import Progress, RankSaved

pytestmark = pytest.mark.torch


EOS = 1


class Sampler:
    """Answers prompt n with n % 3 + 1 tokens; every third answer comes to no end."""

    collective = False

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int, float | None, Purpose]] = []

    def sync(self, actor: nn.Module) -> None:
        raise AssertionError("not the evaluator's business")

    def generate(
        self,
        prompts: Batch,
        step: int,
        *,
        temperature: float | None = None,
        purpose: Purpose = Purpose.SAMPLE_TOKEN,
    ) -> Batch:
        ids = prompts["sample_id"]
        self.asked.append((ids.tolist(), step, temperature, purpose))
        torch.rand(3)  # an engine that draws
        lengths = ids % 3 + 1
        mask = torch.arange(3) < lengths[:, None]
        response = torch.full((len(ids), 3), 7)
        response[torch.arange(len(ids)), lengths - 1] = EOS
        response[ids % 3 == 2] = 7
        return {**prompts, "response_ids": response, "response_mask": mask}


def _reward(prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> torch.Tensor:
    random.random(), np.random.rand(), torch.rand(1)
    del responses
    assert [prompt.rstrip("=") for prompt in prompts] == list(answers)
    return torch.tensor([float(answer) for answer in answers])


class One(Collective):
    """One of several ranks; the others' sums are put in."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(None)
        self.rank, self.world_size = rank, world_size
        self.others = [0.0] * 5

    def sum(self, values: Sequence[float]) -> list[float]:
        return [a + b for a, b in zip(values, self.others, strict=True)]


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny)


@pytest.fixture
def data(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> PromptData:
    for name, numbers in (("train", range(100, 103)), ("apart", range(10))):
        (tmp_path / name).mkdir()
        rows = [f'{{"prompt": "{n}=", "answer": "{n}"}}\n' for n in numbers]
        (tmp_path / name / "x.jsonl").write_text("".join(rows))
    config = DataConfig(max_prompt_tokens=8, eval_root=str(tmp_path / "apart"))
    return PromptData(tmp_path / "train", tokenizer, config, 0, held_out=10)


def _evaluator(
    data: PromptData, tokenizer: PreTrainedTokenizerBase, ranks: Collective | None = None
) -> tuple[Evaluator, Sampler]:
    sampler = Sampler()
    made = Evaluator(
        data=data,
        sampler=sampler,
        tokenizer=tokenizer,
        reward=_reward,
        size=3,
        temperature=0.5,
        ranks=ranks or One(),
        eos_ids=[EOS],
    )
    return made, sampler


def _all(evaluator: Evaluator, step: int = 4) -> int:
    evaluator.begin(step)
    pieces = 0
    while not evaluator.finished:
        evaluator.piece()
        pieces += 1
    return pieces


def test_the_numbers_are_means_over_all_held_out_prompts(
    data: PromptData, tokenizer: PreTrainedTokenizerBase
) -> None:
    evaluator, sampler = _evaluator(data, tokenizer)
    assert evaluator.finished, "none was begun"
    assert evaluator.take() == {}
    assert _all(evaluator) == 4
    assert [asked[0] for asked in sampler.asked] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert {asked[1:] for asked in sampler.asked} == {(4, 0.5, Purpose.EVALUATION)}
    # Rewards 0 ... 9; lengths 1 2 3 1 2 3 1 2 3 1; three of ten have no end.
    assert evaluator.take() == pytest.approx(
        {
            "eval/reward": 4.5,
            "eval/reward_std": 8.25**0.5,
            "eval/response_tokens": 1.9,
            "eval/finished": 0.7,
            "eval/prompts": 10.0,
        }
    )
    assert evaluator.take() == {}, "once"


def test_ranks_share_the_prompts_come_by_equally_often_and_find_the_same(
    data: PromptData, tokenizer: PreTrainedTokenizerBase
) -> None:
    whole, _ = _evaluator(data, tokenizer)
    _all(whole)
    expected = whole.take()
    ranks = [One(rank, 3) for rank in range(3)]
    parts = [_evaluator(data, tokenizer, one) for one in ranks]
    assert [_all(evaluator) for evaluator, _ in parts] == [2, 2, 2]
    asked = [[ids for ids, *_ in sampler.asked] for _, sampler in parts]
    assert asked == [[[0, 1, 2], [9]], [[3, 4, 5]], [[6, 7, 8]]]
    sums = [evaluator._sums for evaluator, _ in parts]
    ranks[0].others = [sum(column) for column in zip(*sums[1:], strict=True)]
    assert parts[0][0].take() == pytest.approx(expected)


def test_a_sampler_that_works_in_groups_is_asked_by_all_ranks_equally_often(
    data: PromptData, tokenizer: PreTrainedTokenizerBase
) -> None:
    evaluator, sampler = _evaluator(data, tokenizer, One(2, 3))
    sampler.collective = True
    assert _all(evaluator) == 2
    assert [ids for ids, *_ in sampler.asked] == [[6, 7, 8], []]
    assert evaluator.take()["eval/prompts"] == 3.0


def test_no_generator_of_the_training_moves(data: PromptData, tokenizer: PreTrainedTokenizerBase) -> None:
    evaluator, _ = _evaluator(data, tokenizer)
    before = rng.capture()
    _all(evaluator)
    after = rng.capture()
    assert before["python"] == after["python"]
    assert before["numpy"] == after["numpy"]
    assert np.array_equal(before["torch"], after["torch"])


def test_one_that_was_abandoned_begins_from_nothing(
    data: PromptData, tokenizer: PreTrainedTokenizerBase
) -> None:
    evaluator, _ = _evaluator(data, tokenizer)
    _all(evaluator)
    whole = evaluator.take()
    evaluator.begin(4)
    evaluator.piece()
    assert not evaluator.finished
    assert evaluator.begun(4)
    assert not evaluator.begun(5)
    assert evaluator.take() == {}, "half a number is none"
    assert _all(evaluator) == 4
    assert evaluator.take() == whole


def test_every_rank_has_a_piece_or_comes_by_all_the_same() -> None:
    assert [num_pieces(n, 4, 2) for n in (1, 4, 8, 9, 16)] == [1, 1, 1, 2, 2]


STEPS = 3


class Runs:
    """Makes runs of one configuration and does them in this process."""

    def __init__(self, root: Path, model: Path, data: Path) -> None:
        self._root, self._model, self._data = root, model, data

    def make(
        self, name: str, *, eval_every: int = 2, keep_best: int = 0, eval_root: Path | None = None
    ) -> RunPaths:
        return new_training(
            self._root / name,
            self._model,
            self._data,
            **({"eval_root": eval_root} if eval_root else {"eval_fraction": 0.1}),
            sampled_at_once=4,
            max_new_tokens=5,
            steps=STEPS,
            sizes=(8, 8, 4),
            ppo_epochs=1,
            eval_every_steps=eval_every,
            eval_prompts=10,
            eval_temperature=0.7,
            **({"keep_best": keep_best} if keep_best else {"every_steps": 1}),
        )

    def start(self, paths: RunPaths, line: AtSafePoint | None = None) -> Ending:
        with one_rank() as (device, ranks):
            return begin(paths, line or AtSafePoint(), device, ranks).run()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny: Path, sums_root: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("evaluating"), tiny, sums_root)


@pytest.fixture(scope="module")
def undisturbed(runs: Runs) -> RunPaths:
    paths = runs.make("undisturbed")
    assert runs.start(paths) is Ending.FINISHED
    return paths


def _history(paths: RunPaths) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = json.loads((paths.checkpoint(STEPS) / "metadata.json").read_bytes())[
        "history"
    ]
    return rows


def test_every_step_is_logged_with_times_that_the_history_does_not_have(undisturbed: RunPaths) -> None:
    rows = last_steps(undisturbed, 10)
    times = {
        *(
            "generate_s",
            "score_s",
            "update_s",
            "actor_update_s",
            "critic_update_s",
            "communication_s",
            "step_s",
            "stall_s",
        ),
        *("communication_share", "tokens_per_second", "actor_tokens_per_second", "memory_bytes"),
    }
    for row, metrics in zip(rows, _history(undisturbed), strict=True):
        assert set(row) - set(metrics) - {"time", "run", "attempt", "eval_s"} == times
        assert not times & set(metrics)
        assert {name: row[name] for name in metrics} == metrics
        assert 0.0 < row["actor_update_s"] + row["critic_update_s"] <= row["update_s"] < row["step_s"]
        assert 0.0 < row["communication_share"] < 1.0
    assert ["eval_s" in row for row in rows] == [False, True, True]
    c7 = {
        "reward",
        "kl",
        "policy_loss",
        "value_loss",
        "response_tokens",
        "policy_clip",
        "value_clip",
        "entropy",
    }
    c7 |= {
        "actor_grad_norm",
        "critic_grad_norm",
        "learning_rate",
        "critic_learning_rate",
        "explained_variance",
    }
    assert c7 <= set(rows[0])


def test_the_names_that_a_configuration_may_rank_by_are_those_of_the_rows(undisturbed: RunPaths) -> None:
    config = load.load_resolved(undisturbed.run_yaml)
    first, second = (set(row) - {"step"} for row in _history(undisturbed)[:2])
    assert first == set(step_metrics(config))
    assert second - first == set(eval_metrics())


def test_every_number_is_explained_in_the_document(undisturbed: RunPaths) -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    named = {name for row in last_steps(undisturbed, 10) for name in row} - {"time", "run", "attempt"}
    assert [name for name in sorted(named) if f"`{name}`" not in text] == []


def test_a_new_best_of_the_evaluation_is_saved_kept_and_told(runs: Runs) -> None:
    paths = runs.make("best", eval_every=1, keep_best=1)
    line = AtSafePoint()
    assert runs.start(paths, line) is Ending.FINISHED
    values = [row["eval/reward"] for row in _history(paths)]
    bests = [step for step in range(1, STEPS + 1) if values[step - 1] > max([-1.0, *values[: step - 1]])]
    saved = line.heard(RankSaved)
    assert [int(m.name[5:]) for m in saved] == sorted({*bests, STEPS})
    assert saved[0].reason == f"the best eval/reward so far: {values[0]:g}"
    told = line.notices("evaluation")
    assert [text.endswith("the best so far") for text in told] == [step in bests for step in (1, 2, 3)]
    manifest = read_manifest(paths.checkpoint(bests[-1]))
    assert isinstance(manifest.metrics, dict)
    assert manifest.metrics["eval/reward"] == max(values)


def test_every_second_step_and_the_last_have_the_numbers_of_an_evaluation_in_their_row(
    undisturbed: RunPaths,
) -> None:
    rows = _history(undisturbed)
    assert ["eval/reward" in row for row in rows] == [False, True, True]
    assert [row.get("eval/prompts") for row in rows] == [None, 10.0, 10.0]
    assert 0.0 < rows[1]["eval/response_tokens"] <= 5.0


def test_no_number_of_the_training_changes_whether_evaluation_is_on_or_off(
    runs: Runs, undisturbed: RunPaths
) -> None:
    paths = runs.make("off", eval_every=0)
    assert runs.start(paths) is Ending.FINISHED
    found = compare(undisturbed.checkpoint(STEPS), paths.checkpoint(STEPS))
    assert found.differing == ("runtime_state.rank_0000.msgpack.zst/history",)
    without = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in _history(undisturbed)]
    assert without == _history(paths)


def test_a_run_stopped_in_the_middle_of_evaluations_ends_with_the_same_bits(
    runs: Runs, undisturbed: RunPaths
) -> None:
    paths = runs.make("stopped")
    line = AtSafePoint(13)  # one piece of step 1's evaluation is done
    assert runs.start(paths, line) is Ending.STOPPED
    places = line.heard(Progress)
    assert [(m.phase, m.index) for m in places[-2:]] == [("evaluate", 0), ("evaluate", 0)]
    verdict = verify(paths.checkpoints / "step_000001_sp0006")
    assert verdict.ok
    assert verdict.manifest is not None
    assert verdict.manifest.phase == "evaluate"
    # The second life begins with that evaluation (0-2), and is asked for a save in the middle of it, too.
    assert runs.start(paths, AtSafePoint(11)) is Ending.STOPPED  # 3-8 step 2, 9-11 its evaluation
    assert (paths.checkpoints / "step_000002_sp0006").is_dir()
    assert runs.start(paths, AtSafePoint(1, stop=False)) is Ending.FINISHED
    result = compare(undisturbed.checkpoint(STEPS), paths.checkpoint(STEPS))
    assert result.same, result.differing
    assert ledger_stats(paths).duplicates == ()


def test_an_evaluation_that_was_switched_off_meanwhile_is_passed_over(
    runs: Runs, undisturbed: RunPaths
) -> None:
    paths = runs.make("switched")
    assert runs.start(paths, AtSafePoint(22)) is Ending.STOPPED
    config = load.load_resolved(paths.run_yaml)
    train = msgspec.structs.replace(config.train, eval_every_steps=0)
    write_config(paths, msgspec.structs.replace(config, train=train))
    assert runs.start(paths) is Ending.FINISHED
    assert "eval/reward" not in _history(paths)[-1]
    assert _history(paths)[1] == _history(undisturbed)[1]


def test_held_out_prompts_that_changed_are_refused_for_they_decide_what_trains(
    runs: Runs, tmp_path: Path, sums_root: Path
) -> None:
    held_out = tmp_path / "heldout"
    shutil.copytree(sums_root.parent / "heldout", held_out)
    paths = runs.make("drift", eval_root=held_out)
    assert runs.start(paths, AtSafePoint(7)) is Ending.STOPPED
    with (held_out / "sums.jsonl").open("a") as file:
        file.write('{"prompt": "10+11=", "answer": "21"}\n')
    with pytest.raises(DataError, match="not what the run started with: eval_data"):
        runs.start(paths)
