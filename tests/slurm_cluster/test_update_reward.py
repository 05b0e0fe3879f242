"""Another reward for a run on a real Slurm: while it trains, across a preemption, and asked for while it is queued.

The twin is not asked at all: it is given the run's own record (`RUN/rewards.json`) before its first start, and so
replaces its rewards at the very steps at which the run did.
"""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.harness import SMALL, LiveRun, same_weights
from tests.ledger_stats import ledger_stats
from tests.processes import held
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.journal.steps import last_steps
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt
from verl_slurm.wire.reward_plan import read_reward_plan

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long]

STEPS, WARM_STEPS = 8, 5
# In another language than a rule's 0 to 1, and of another opinion.
SOURCE = "def score(prompts, responses, answers):\n    return [40.0 + 25.0 * len(r) for r in responses]\n"
OVERRIDES = (*SMALL, f"train.steps={STEPS}", "train.batch_size_per_device=128")
"""Steps of a second. Slurm and a command need longer than that, so the ranks are held meanwhile."""


@pytest.fixture
def run(cluster: DevCluster, tmp_path: Path) -> Iterator[LiveRun]:
    live = LiveRun(cluster, tmp_path / "run", *OVERRIDES)
    yield live
    live.cancel()


def ask(run: LiveRun, reward: str) -> str:
    """When the command says that it counts."""
    argv = (
        "update-reward",
        "--checkpoint",
        str(run.paths.root),
        "--new-model",
        reward,
        "--warm-start-steps",
        str(WARM_STEPS),
        "--json",
    )
    return str(msgspec.json.decode(run.cli(*argv).stdout)["when"])


def in_force(run: LiveRun) -> dict[str, object]:
    found: dict[str, object] = msgspec.json.decode(run.cli("status", str(run.paths.root), "--json").stdout)
    return found["reward"]  # type: ignore[return-value]


@pytest.mark.variant
def test_a_reward_replaced_in_flight_and_another_while_queued_end_bit_for_bit_like_their_twin(
    run: LiveRun, cluster: DevCluster, tmp_path: Path
) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text(SOURCE)
    new = f"python:{judge}:score"

    # While two nodes train.
    run.submit()
    run.wait_phase("generate", step=0)
    with held(run.ranks()):
        assert "takes it at the end of a step" in ask(run, new)
    asked = run.wait_event("reward_asked", reward=new)
    assert asked["warm_start_steps"] == WARM_STEPS
    told = run.wait_event("notice", topic="reward")["text"]
    (switch,) = read_reward_plan(run.paths).switches
    assert told.startswith(f"rule:arithmetic -> {new} from step {switch.step + 1} on, warm start over"), told
    assert [event["cause"] for event in run.events("cause")] == ["operator"]

    # The next checkpoint knows it: it is that of a preemption in mid-step, under the warm start.
    run.wait_phase("generate", step=switch.step)
    seen = len(run.events())
    with held(run.ranks()):
        preempt(cluster, int(run.job_id), hold_s=1)
    saved = run.wait_event("saved", after=seen, emergency=True)
    run.wait_event("ended", after=seen, exit_code=25)
    before = read_manifest(run.paths.checkpoint(switch.step))
    assert "reward" not in before.frozen, "saved as it was before"
    manifest = read_manifest(run.paths.checkpoints / saved["name"])
    assert manifest.frozen["reward"] == hashlib.sha256(SOURCE.encode()).hexdigest()
    run.wait_event("restart", after=seen, resume=saved["name"])
    assert in_force(run) == {
        "reward": new,
        "since_step": switch.step + 1,
        "warm_start_steps_left": switch.step + WARM_STEPS - manifest.step,
        "replacements": 1,
        "asked_for": None,
        "refused": None,
    }

    # And back, asked for while the job waits to run again.
    run.wait_phase("update", step=switch.step + 1)
    seen = len(run.events())
    run.slurm("scontrol", "requeuehold", run.job_id)
    run.wait_event("ended", after=seen, exit_code=25)
    assert ask(run, "rule:arithmetic") == "it counts from the next start on"
    assert in_force(run)["asked_for"] == "rule:arithmetic"
    run.slurm("scontrol", "release", run.job_id)
    back = run.wait_event("notice", after=seen, topic="reward")["text"]
    assert back.startswith(f"{new} -> rule:arithmetic from step"), back
    run.wait_end()
    first, second = read_reward_plan(run.paths).switches
    assert (first, second.replaced, second.reward) == (switch, new, "rule:arithmetic")
    assert second.step > first.step
    assert "reward" not in read_manifest(run.paths.checkpoint(STEPS)).frozen

    # No jump: what the steps were trained on, by whichever reward, stays near what it was before.
    rows = {int(row["step"]): float(row["reward"]) for row in last_steps(run.paths, STEPS)}
    print("mean reward a step:", rows, "replaced at", (first.step, second.step), "preempted:", manifest.phase)
    scores = msgspec.json.decode((run.paths.reward_snapshot(2) / "last_scores.json").read_bytes())["scores"]
    assert max(scores) > 1.0, "in the new reward's own numbers, or on the way there"
    for step in (first.step + 1, second.step + 1):
        assert abs(rows[step] - rows[step - 1]) < 0.5 * max(1.0, abs(rows[step - 1])), rows

    twin = LiveRun(cluster, tmp_path / "twin", *OVERRIDES)
    twin.cli("submit", *twin.argv, "--prepare-only")
    shutil.copy2(run.paths.reward_plan, twin.paths.reward_plan)
    twin.submit()
    twin.wait_end()
    assert len(twin.events("restart")) == 1, twin.story()
    assert [event["text"] for event in twin.events("notice") if event.get("topic") == "reward"] == [
        told,
        back,
    ]
    same, said = same_weights(run.paths.root, twin.paths.root)
    assert same, said
    assert ledger_stats(run.paths).duplicates == ()
