"""When the engine's log probabilities are too far from the actor's: a pure decision."""

import pytest
import torch

from verl_slurm.base.errors import RolloutMismatch
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.trainer.rollout.engines import gap_and_tokens, gap_limit, require_small_gap

pytestmark = pytest.mark.torch


def test_the_gap_is_summed_over_valid_tokens_alone() -> None:
    engine = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, 0.0, 0.0]])
    actor = torch.tensor([[-1.5, -1.75, -9.0], [-1.0, float("nan"), -9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert gap_and_tokens(engine, actor, mask) == (0.75, 3.0)


def test_a_mean_gap_up_to_the_limit_passes() -> None:
    require_small_gap(0.75, 3.0, limit=0.25, step=0)
    require_small_gap(0.0, 0.0, limit=0.25, step=0)


@pytest.mark.parametrize("total", [0.76, float("nan"), float("inf")])
def test_a_larger_gap_or_none_at_all_is_refused_with_a_code_of_its_own(total: float) -> None:
    with pytest.raises(RolloutMismatch) as caught:
        require_small_gap(total, 3.0, limit=0.25, step=4)
    assert caught.value.exit_code is ExitCode.ROLLOUT
    line = caught.value.one_line()
    assert "step 5" in line
    assert "at most rollout.max_logprob_gap=0.25" in line


def test_the_limit_follows_the_precision_unless_it_is_set() -> None:
    assert gap_limit(None, "float32") < gap_limit(None, "bfloat16")
    assert gap_limit(0.5, "float32") == gap_limit(0.5, "bfloat16") == 0.5
