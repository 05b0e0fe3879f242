"""GRPO by verl with vLLM itself, both on the CPU, on a real Slurm: preempted in mid-rollout, continued, finished."""

import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgpack
import pytest
import yaml

from tests.processes import python_path

if find_spec("verl") is None or find_spec("vllm") is None:
    pytest.skip("needs verl and vLLM together: make test-verl-vllm", allow_module_level=True)

from tests.harness import LiveRun
from tests.verl.grpo import MODULES, grpo_words, make_prompts, write_config
from tests.verl.tiny import make_model
from verl_slurm.devcluster.cluster import DevCluster
from verl_slurm.devcluster.faults import preempt
from verl_slurm.loops.token_log import token_paths
from verl_slurm.runtime_state.ledger import records

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.torch,
    pytest.mark.verl,
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
]

PATIENCE_S = 600.0
SESSIONS, LENGTH, PAUSE_S = 32, 300, 0.02
"""Of one step. The tiny model has 9 linear layers, so the step takes more than the grace time of 30 s by its pauses."""


@pytest.fixture
def grpo(cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveRun]:
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", f"{MODULES},tests.verl.cpu_vllm")
    monkeypatch.setenv("PYTHONPATH", python_path()["PYTHONPATH"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VERL_TEST_LINEAR_S", str(PAUSE_S))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # vLLM's kernels for the CPU want heads of 32 at least.
    model = make_model(tmp_path / "model", head_dim=32, most_positions=1024)
    section = grpo_words(model, make_prompts(tmp_path / "sums.parquet"), 1)
    section["data"] |= {"max_prompt_length": 64, "max_response_length": LENGTH}
    section["actor_rollout_ref"]["rollout"] |= {
        "name": "vllm",
        "dtype": "float32",
        "enforce_eager": True,
        # Without a GPU vLLM cannot give its memory back.
        "free_cache_engine": False,
        "+enable_sleep_mode": False,
        "max_model_len": 64 + LENGTH,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": SESSIONS,
        "gpu_memory_utilization": 0.1,
        # All responses are as long as they may be: none ends while it is looked at.
        "ignore_eos": True,
    }
    config = write_config(tmp_path / "grpo.yaml", tmp_path / "run", section)
    settings = yaml.safe_load(config.read_text())
    settings["distributed"] |= {"dp_size": 1, "nodes": 1}
    config.write_text(yaml.safe_dump(settings))
    live = LiveRun(cluster, tmp_path / "run", config=str(config))
    yield live
    live.cancel()
    live.wait_slurm(lambda facts: facts.state not in ("RUNNING", "PENDING", "COMPLETING"))


def logged(run: LiveRun) -> list[tuple[tuple[int, int, int], int, int]]:
    """Call, tokens before, and new tokens, in the order in which they were sampled."""
    found = []
    for _, arrays in records(token_paths(run.paths), from_step=0):
        for *call, _, start, count, _, _ in msgpack.unpackb(arrays["calls"].tobytes()):
            found.append(((call[0], call[1], call[2]), start, count))
    return found


def test_a_preemption_in_mid_rollout_costs_no_token(grpo: LiveRun, cluster: DevCluster) -> None:
    grpo.submit()
    deadline = time.monotonic() + PATIENCE_S
    # Polls: no event tells of a line in an engine's log.
    while sum(count for _, _, count in logged(grpo)) < SESSIONS * 20:
        assert time.monotonic() < deadline, grpo.story()
        time.sleep(0.05)
    seen = len(grpo.events())
    preempt(cluster, int(grpo.job_id), hold_s=1)
    grpo.wait_event("ended", after=seen, exit_code=25)
    before = Counter({call: start + count for call, start, count in logged(grpo)})
    assert len(before) == SESSIONS
    assert max(before.values()) < LENGTH, "it was preempted while it sampled"
    segment = token_paths(grpo.paths).ledger_segment(1, 0)
    first_attempt = segment.read_bytes()
    grpo.wait_event("restart", after=seen, timeout_s=PATIENCE_S)
    grpo.wait_end(timeout_s=PATIENCE_S)
    segment.write_bytes(first_attempt)  # dropped with the last checkpoint, which does not need it
    length: Counter[tuple[int, int, int]] = Counter()
    for call, start, count in logged(grpo):
        assert start == length[call], "it goes on behind its last logged token"
        length[call] += count
    assert length == dict.fromkeys(before, LENGTH)
    told = [event["text"] for event in grpo.events("notice") if event["topic"] == "ledger"]
    assert f"{SESSIONS} unfinished responses went on from their logged tokens" in told
