"""Numbers of a step that are for people: spread, explained variance, costs and seconds."""

import pytest
import torch

from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.measures.metrics import (
    explained_variance,
    step_costs,
    step_measures,
)
from verl_slurm.trainer.measures.stopwatch import Stopwatch, memory_bytes

pytestmark = pytest.mark.torch

MASK = torch.tensor([[True, True, False], [True, True, False]])
# The last column is outside of the mask and must not count.
RETURNS = torch.tensor([[1.0, 2.0, 99.0], [3.0, 4.0, -99.0]])


def _measured(values: torch.Tensor) -> dict[str, float]:
    scored = {"scores": torch.tensor([0.0, 1.0]), "old_values": values}
    return step_measures(scored, {"returns": RETURNS}, MASK, Collective(None))


def test_a_critic_that_knows_all_explains_all_and_one_that_knows_the_mean_nothing() -> None:
    assert _measured(RETURNS.clone())["explained_variance"] == 1.0
    assert _measured(torch.full_like(RETURNS, 2.5))["explained_variance"] == pytest.approx(0.0)
    assert _measured(RETURNS + 7.0)["explained_variance"] == pytest.approx(1.0), "an offset is no variance"
    assert _measured(-RETURNS)["explained_variance"] == pytest.approx(-3.0), "errors of twice the size"
    # By hand: returns 1 2 3 4 of variance 1.25; errors 0 0 0 2 of variance 0.75; 1 - 0.75 / 1.25
    half = torch.tensor([[1.0, 2.0, 0.0], [3.0, 2.0, 0.0]])
    assert _measured(half)["explained_variance"] == pytest.approx(0.4)


def test_where_nothing_varies_nothing_is_explained() -> None:
    assert explained_variance(0.0, 0.0, 0.0, 0.0, 0.0) == 0.0
    third = 1.0 / 3.0
    assert explained_variance(3.0, 3 * third, 3 * third * third, 0.0, 0.3) == 0.0


def test_scores_spread_and_without_a_critic_there_is_nothing_about_one() -> None:
    assert _measured(RETURNS)["reward_std"] == 0.5
    row = step_measures({"scores": torch.tensor([0.0, 1.0])}, {}, MASK, Collective(None))
    assert row == {"reward_std": 0.5, "equal_rewards": 0.0}


@pytest.mark.parametrize(
    ("scores", "group", "share"),
    [
        ([1.0, 1.0, 0.0, 0.0], 2, 1.0),
        ([1.0, 1.0, 0.0, 1.0], 2, 0.5),
        ([1.0, 1.0, 0.0, 0.0], None, 0.0),
        ([0.1] * 4, None, 1.0),
        ([0.0] * 4, None, 1.0),
    ],
)
def test_groups_of_equal_rewards_are_counted(scores: list[float], group: int | None, share: float) -> None:
    row = step_measures({"scores": torch.tensor(scores)}, {}, MASK, Collective(None), group=group)
    assert row["equal_rewards"] == share


def test_sums_over_ranks_are_those_of_the_whole_batch() -> None:
    class Twice(Collective):
        def sum(self, values: object) -> list[float]:
            return [2 * value for value in super().sum(values)]  # type: ignore[arg-type]

    values = torch.tensor([[1.0, 2.0, 0.0], [3.0, 2.0, 0.0]])
    scored = {"scores": torch.tensor([0.0, 1.0]), "old_values": values}
    both = step_measures(scored, {"returns": RETURNS}, MASK, Twice(None))
    assert both == pytest.approx(_measured(values))


def test_laps_and_spans_add_up_by_name_and_start_anew() -> None:
    times = iter([0.0, 1.0, 3.0, 10.0, 20.0, 25.0, 30.0])
    watch = Stopwatch(torch.device("cpu"), lambda: next(times))
    watch.start()
    watch.lap("actor")
    watch.lap("critic")
    watch.start()
    with watch.span("sending"):  # 20 to 25, within the lap of 10 to 30
        pass
    watch.lap("actor")
    assert watch.take() == {"actor": 21.0, "critic": 2.0, "sending": 5.0}
    assert watch.take() == {}


def test_the_costs_of_a_step_are_shares_of_the_whole_step() -> None:
    costs = step_costs(
        {"generate": 1.0, "update": 2.0, "evaluate": 3.0},
        {"actor_update_s": 1.5, "communication_s": 0.5},
        step_s=4.0,
        waited_s=0.5,
        new_tokens=50,
        trained_tokens=300,
        memory=1 << 20,
    )
    assert costs["communication_share"] == 0.25
    assert costs["communication_s"] == 1.0
    assert costs["actor_tokens_per_second"] == 200.0
    assert costs["memory_bytes"] == 1048576.0
    assert (costs["generate_s"], costs["score_s"], costs["eval_s"]) == (1.0, 0.0, 3.0)
    assert costs["tokens_per_second"] == 50.0
    nothing = step_costs({}, {}, step_s=0.0, waited_s=0.0, new_tokens=0, trained_tokens=0, memory=0)
    assert nothing["communication_share"] == nothing["actor_tokens_per_second"] == 0.0
    assert nothing["tokens_per_second"] == 0.0
    assert "eval_s" not in nothing


def test_memory_is_that_of_this_process() -> None:
    assert memory_bytes(torch.device("cpu")) > 50 << 20
