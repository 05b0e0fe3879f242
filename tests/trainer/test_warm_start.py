"""The map from one reward's scale to another's, by hand and by what it must keep."""

from itertools import pairwise

import pytest
import torch

from verl_slurm.trainer.objective.warm_start import IDENTITY, Affine, blended, matching

pytestmark = pytest.mark.torch

OLD = torch.tensor([0.0, 0.5, 1.0])
NEW = torch.tensor([-12.0, 0.0, 12.0])


def test_the_new_scores_get_the_old_mean_and_deviation() -> None:
    full = matching(OLD, NEW)
    assert full is not None
    assert (full.scale, full.offset) == pytest.approx((1 / 24, 0.5))  # by hand: 0.5 / 12, and both centred
    torch.testing.assert_close(full(NEW), OLD)


def test_over_all_ranks_and_not_over_each() -> None:
    parts = [(OLD, NEW), (OLD[:0], NEW[:0]), (torch.tensor([2.0]), torch.tensor([3.0]))]
    old, new = (torch.cat(group).double() for group in zip(*parts, strict=True))
    for part in parts:
        answers = iter(_totals(old, new))  # what the ranks' sums come to
        full = matching(*part, lambda _, answers=answers: next(answers))
        assert full is not None
        assert float(full(new).double().mean()) == pytest.approx(float(old.mean()), abs=1e-6)
        assert float(full(new).double().std()) == pytest.approx(float(old.std()), abs=1e-6)


def _totals(old: torch.Tensor, new: torch.Tensor) -> list[list[float]]:
    first = [float(len(old)), float(old.sum()), float(new.sum())]
    return [first, [float(((x - x.mean()) ** 2).sum()) for x in (old, new)]]


@pytest.mark.parametrize(("old", "new"), [([1.0, 1.0], [3.0, 5.0]), ([1.0, 2.0], [7.0, 7.0]), ([1.0], [9.0])])
def test_where_one_does_not_vary_only_the_means_are_matched(old: list[float], new: list[float]) -> None:
    full = matching(torch.tensor(old), torch.tensor(new))
    assert full is not None
    assert full.scale == 1.0
    assert float(full(torch.tensor(new)).mean()) == pytest.approx(sum(old) / len(old))


def test_without_responses_there_is_no_map() -> None:
    assert matching(OLD[:0], NEW[:0]) is None


@pytest.mark.parametrize("full", [Affine(1 / 24, 0.5), Affine(500.0, -3.0), Affine(1.0, 4.0)])
def test_it_fades_from_all_to_nothing_and_never_turns_the_order(full: Affine) -> None:
    steps = [blended(full, done, 8) for done in range(10)]
    assert (steps[0].scale, steps[0].offset) == pytest.approx((full.scale, full.offset))
    assert steps[8:] == [IDENTITY, IDENTITY]
    ratios = [after.scale / before.scale for before, after in pairwise(steps[:9])]
    assert ratios == pytest.approx([full.scale ** (-1 / 8)] * 8)  # the same factor each step
    assert all(step.scale > 0 for step in steps)
    means = [float(step(NEW).mean()) for step in steps]
    assert means == sorted(means) or means == sorted(means, reverse=True)


def test_no_map_changes_no_bit() -> None:
    scores = torch.rand(100)
    assert blended(Affine(2.0, 1.0), 0, 0)(scores) is scores
