"""A run that hangs for real on a real Slurm: noticed, its stacks written down, restarted, and the same to the bit."""

import json
from pathlib import Path

import pytest

from tests.harness import SMALL, LiveRun, same_weights
from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

# Waits for ever in the second step, once: the file says that it has.
REWARD = """
import os, threading

calls = 0

def score(prompts, responses, answers):
    global calls
    calls += 1
    flag = {flag!r}
    if os.environ["RANK"] == "1" and calls == 20 and os.path.exists(flag):
        os.unlink(flag)
        waits_for_a_judge_that_never_answers()
    return [float(response.strip() == answer) for response, answer in zip(responses, answers)]

def waits_for_a_judge_that_never_answers():
    threading.Event().wait()
"""


@pytest.mark.long
@pytest.mark.variant  # without Slurm: tests/daemon/test_hang.py and test_stacks.py
def test_a_hang_is_noticed_the_stacks_tell_who_and_the_run_goes_on(
    cluster: DevCluster, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD.format(flag=str(flag)))
    overrides = (*SMALL, "train.steps=3", f"model.reward=python:{reward}:score")
    twin = LiveRun(cluster, tmp_path / "twin", *overrides).submit()
    twin.wait_end()
    flag.touch()
    run = LiveRun(cluster, tmp_path / "run", *overrides, "daemon.hang_floor_s=15").submit()
    try:
        hang = run.wait_event("hang")
        run.wait_end()
    finally:
        run.cancel()
    assert "passed no safe point for" in hang["detail"]
    stacks = run.events("stacks")
    assert len(stacks) == 2  # each node's agent had its ranks write
    logs = [Path(event["log"]).read_text() for event in stacks]
    assert sum("waits_for_a_judge_that_never_answers" in log for log in logs) == 1
    assert sum("all_reduce" in log for log in logs) >= 1  # the other one waits for it
    # Both ranks told of their collectives; the one that waits has begun one more.
    flights = sorted(run.paths.logs.glob("*.restart_01.flight.rank_*.gloo.json"))
    ends = [json.loads(path.read_bytes())["entries"][-1]["record_id"] for path in flights]
    assert [path.name.split("rank_")[1][0] for path in flights] == ["0", "1"]
    assert ends[0] > ends[1]
    (crash,) = run.events("crash")
    assert (crash["kind"], crash["crashes"], crash["budget"]) == ("hang", 1, 2)
    assert len(run.events("restart")) == 2
    same, said = same_weights(run.paths.root, twin.paths.root)
    assert same, said
