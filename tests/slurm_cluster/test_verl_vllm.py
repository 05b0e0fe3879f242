"""GRPO by verl with vLLM itself on a real Slurm: preempted in mid-rollout, or its engine killed."""

from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("verl") is None or find_spec("vllm") is None:
    pytest.skip("needs verl and vLLM together: make test-verl-vllm", allow_module_level=True)

from tests.harness import LiveRun
from tests.slurm_cluster.verl_runs import end, one
from tests.slurm_cluster.vllm_runs import (
    PATIENCE_S,
    SESSIONS,
    environment,
    logged,
    make_run,
    wait_for_tokens,
)
from verl_slurm.runtime_state.token_log import token_paths
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.torch,
    pytest.mark.verl,
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
]

LENGTH = 300


@pytest.fixture
def grpo(cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveRun]:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    live = make_run(cluster, tmp_path, length=LENGTH)
    yield live
    end(live)


def lengths(run: LiveRun) -> Counter[tuple[int, int, int]]:
    """The logged tokens of each call, each of which follows the one before it."""
    length: Counter[tuple[int, int, int]] = Counter()
    for call, start, count in logged(run):
        assert start == length[call], "it goes on behind its last logged token"
        length[call] += count
    return length


def test_a_preemption_in_mid_rollout_costs_no_token(
    grpo: LiveRun, cluster: DevCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The step takes more than the grace time of 30 s by its pauses.
    monkeypatch.setenv("VERL_TEST_LINEAR_S", "0.02")
    grpo.submit()
    wait_for_tokens(grpo, 20)
    seen = len(grpo.events())
    preempt(cluster, int(grpo.job_id), hold_s=1)
    grpo.wait_event("ended", after=seen, exit_code=25)
    before = lengths(grpo)
    assert len(before) == SESSIONS
    assert max(before.values()) < LENGTH, "it was preempted while it sampled"
    segment = token_paths(grpo.paths).ledger_segment(1, 0)
    first_attempt = segment.read_bytes()
    grpo.wait_event("restart", after=seen, timeout_s=PATIENCE_S)
    grpo.wait_end(timeout_s=PATIENCE_S)
    segment.write_bytes(first_attempt)  # dropped with the last checkpoint, which does not need it
    assert lengths(grpo) == dict.fromkeys(before, LENGTH)
    told = [event["text"] for event in grpo.events("notice") if event["topic"] == "ledger"]
    assert f"{SESSIONS} unfinished responses went on from their logged tokens" in told


@pytest.mark.variant
def test_an_engine_that_dies_in_mid_rollout_is_replaced_within_the_attempt(
    grpo: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_TEST_LINEAR_S", "0.005")
    grpo.submit()
    # vLLM's own process of the engine, then verl's around it.
    for word, tokens in [("EngineCore", 20), ("LoggedServer", 100)]:
        wait_for_tokens(grpo, tokens)
        seen = len(grpo.events())
        one(grpo, word).kill()
        grpo.wait_event("notice", after=seen, text="rollout engine 0 is back", timeout_s=PATIENCE_S)
    grpo.wait_end(timeout_s=PATIENCE_S)
    assert len(grpo.events("restart")) == 1, "all of it is one start of the run"
    assert set(lengths(grpo).values()) == {LENGTH}
    assert len(lengths(grpo)) == SESSIONS
    told = [event["text"] for event in grpo.events("notice")]
    assert f"{SESSIONS} unfinished responses went on from their logged tokens" in told
