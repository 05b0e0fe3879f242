"""A reward function that raises: what it says, and how often the ranks are started for it. Real ranks, no Slurm."""

from pathlib import Path

import pytest

from tests.journals import read_events
from tests.lanes import with_variants
from tests.local_runs import lead, prepared
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.submit.submission import carry_out, plan_submission

pytestmark = pytest.mark.torch


@pytest.mark.long
@pytest.mark.scenario("USE11")
@pytest.mark.parametrize(
    ("body", "starts"),
    [
        *with_variants(
            ("raise KeyError('boom')", 1),
            ("if calls.append(1) or len(calls) > 2: raise KeyError('boom')\n    return [0.0] * len(r)", 2),
        ),
    ],
    ids=["on its first call", "after it had worked"],
)
def test_a_reward_that_raises_ends_the_run_in_its_own_words(tmp_path: Path, body: str, starts: int) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(f"calls = []\ndef score(p, r, a):\n    {body}\n")
    paths = prepared(
        tmp_path / "run", f"model.reward=python:{reward}:score", "train.micro_batch_size_per_device=8"
    )
    process = lead(paths)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == ExitCode.DATA, out
    events = read_events(paths)
    assert len([event for event in events if event["event"] == "restart"]) == starts
    reason = events[-1]["reason"]
    assert "KeyError: 'boom' at " in reason
    assert f"{reward}:" in reason
    assert "\n" not in reason
    assert "torch" not in reason
    # The remedy that the message names: correct the file, which lies where the user has it, and submit with --code new.
    reward.write_text("def score(p, r, a):\n    return [0.0] * len(r)\n")
    plan = plan_submission(paths.root, [], cluster="local", code="new")
    carry_out(plan, prepare_only=True)
    process = lead(paths)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == ExitCode.OK, out


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "found"),
    [
        *with_variants(
            ("def score(p, r, a):\n    return [float('nan')] * len(r)\n", "found nan for sample 0"),
            ("raise KeyError('boom')\n\ndef score(p, r, a): ...\n", "KeyError: 'boom'"),
        ),
    ],
    ids=["no number", "it does not run"],
)
def test_a_reward_that_is_wrong_is_told_by_the_user_s_own_file(
    tmp_path: Path, source: str, found: str
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(source)
    process = lead(
        paths := prepared(
            tmp_path / "run", f"model.reward=python:{reward}:score", "train.micro_batch_size_per_device=8"
        )
    )
    out, _ = process.communicate(timeout=600)
    assert process.returncode == ExitCode.DATA, out
    reason = read_events(paths)[-1]["reason"]
    assert found in reason
    assert str(reward) in reason
    assert str(paths.code) not in reason
    assert "--code new" in reason
