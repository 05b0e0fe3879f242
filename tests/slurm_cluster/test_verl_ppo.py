"""GRPO by verl itself, on Ray over nodes of a real Slurm: preempted, saved, requeued, resumed, finished."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("verl", reason="needs verl: make verl")

from tests.harness import LiveRun
from tests.lanes import with_variants
from tests.ledger_stats import ledger_stats
from tests.slurm_cluster.verl_runs import PATIENCE_S, end, make_run, one, steps, wait_for_lines
from tests.verl.grpo import make_prompts
from tests.verl.tiny import make_model
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.runtime_state.rollout_records import session_seed
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import fail_node, preempt, restore_node

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.verl, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("inputs")
    return make_model(directory / "model"), make_prompts(directory / "sums.parquet")


@pytest.fixture
def grpo(
    cluster: DevCluster, inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LiveRun]:
    live = make_run(cluster, inputs, tmp_path, monkeypatch, 4)
    yield live
    end(live)


@pytest.mark.parametrize(
    "mode",
    [pytest.param("sync", marks=pytest.mark.variant), pytest.param("colocate_async", marks=pytest.mark.soak)],
)
def test_a_preemption_in_mid_step_is_saved_at_its_end_requeued_resumed_and_finished(
    grpo: LiveRun, cluster: DevCluster, mode: str
) -> None:
    grpo.argv.append(f"verl.trainer.v1.trainer_mode={mode}")
    grpo.submit()
    grpo.wait(lambda: grpo.status().get("step", 0) >= 1, PATIENCE_S)
    seen = len(grpo.events())
    preempt(cluster, int(grpo.job_id), hold_s=1)
    cause = grpo.wait_event("cause", after=seen)
    assert cause["cause"] == "preemption", grpo.story()
    saved = grpo.wait_event("saved", after=seen, emergency=True)
    grpo.wait_event("verified", after=seen, name=saved["name"])
    grpo.wait_event("ended", after=seen, exit_code=25)
    manifest = read_manifest(grpo.paths.checkpoints / saved["name"])
    assert manifest.guest == "verl"
    assert (grpo.paths.checkpoints / saved["name"] / f"global_step_{manifest.step}" / "actor").is_dir()
    grpo.wait_event("restart", after=seen, timeout_s=PATIENCE_S, resume=saved["name"])
    grpo.wait_end(timeout_s=PATIENCE_S)
    assert grpo.status()["step"] == 4
    assert steps(grpo) == [1, 2, 3, 4], "each step once: none was trained twice, and none left out"


@pytest.mark.soak  # how a checkpoint is divided: tests/verl/test_reshard_runs.py
def test_a_run_that_loses_a_node_goes_on_smaller_in_the_same_job(grpo: LiveRun, cluster: DevCluster) -> None:
    grpo.argv += ["distributed.min_nodes=1", "checkpoint.every_steps=1"]
    grpo.submit()
    grpo.wait_event("verified", timeout_s=PATIENCE_S)
    first, second = grpo.events("nodes_chosen")[-1]["train"]
    fail_node(cluster, second)
    try:
        grpo.wait_event("resharded", timeout_s=PATIENCE_S)
        grpo.wait_end(timeout_s=PATIENCE_S)
    finally:
        restore_node(cluster, second, timeout_s=120)
    assert grpo.events("nodes_chosen")[-1]["train"] == [first]
    assert grpo.facts().restarts == 0, "no requeue"
    assert [step for step in steps(grpo) if step > 1] == [2, 3, 4]
    assert read_manifest(grpo.paths.checkpoints / "step_000004").world_size == 1


@pytest.mark.soak  # that its classes are ours: tests/verl/test_recipes.py
def test_a_recipe_with_a_main_and_a_trainer_of_its_own_is_saved_and_resumed(
    grpo: LiveRun, cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tmp_path / "steps"
    monkeypatch.setenv("VERL_TEST_RECIPE", str(done))
    recipe = Path(__file__).parents[1] / "verl/recipe.py"
    grpo.argv += [
        f"trainer.command={msgspec.json.encode([str(recipe)]).decode()}",
        "checkpoint.every_steps=50",
    ]
    grpo.submit()
    grpo.wait(lambda: grpo.status().get("step", 0) >= 1, PATIENCE_S)
    seen = len(grpo.events())
    preempt(cluster, int(grpo.job_id), hold_s=1)
    saved = grpo.wait_event("saved", after=seen, emergency=True)
    grpo.wait_event("ended", after=seen, exit_code=25)
    grpo.wait_event("restart", after=seen, timeout_s=PATIENCE_S, resume=saved["name"])
    grpo.wait_end(timeout_s=PATIENCE_S)
    assert steps(grpo) == [1, 2, 3, 4]
    assert done.read_text().split() == ["1", "2", "3", "4"], "the recipe's own trainer did each step, once"
    told = [event["text"] for event in grpo.events("warning") if event["topic"] == "ledger"]
    assert any(text.startswith("AgentLoopManagerTQ is in the place of") for text in told), told


# With a worker killed in the first step, too: a third start of verl, minutes.
@pytest.mark.parametrize(
    ("nodes", "killed"),
    [*with_variants((1, False), (2, False)), pytest.param(2, True, marks=pytest.mark.soak)],
)
def test_a_step_left_in_mid_sampling_samples_nothing_twice(
    grpo: LiveRun,
    cluster: DevCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    killed: bool,
) -> None:
    sampled = tmp_path / "sampled"
    monkeypatch.setenv("VERL_TEST_SAMPLED", str(sampled))
    # Responses end one after the other: a step takes 48 s, where the grace time is 30 s. A node has an engine.
    monkeypatch.setenv("VERL_TEST_STAGGER_S", str(1.5 * nodes))
    grpo.argv += [f"distributed.nodes={nodes}", f"distributed.dp_size={nodes}"]
    rollout = "verl.actor_rollout_ref.rollout"
    grpo.argv += [f"{rollout}.seed=7", f"{rollout}.full_determinism=true"]
    grpo.argv += ["checkpoint.every_steps=50", "verl.trainer.total_training_steps=3"]
    grpo.submit()
    kept: set[int] = set()
    if killed:
        worker = one(grpo, "LedgerWorker")
        wait_for_lines(sampled, 8)
        seen = len(grpo.events())
        worker.kill()
        grpo.wait_event("restart", after=seen, timeout_s=PATIENCE_S, number=2)
        kept = {session_seed(7, *key) for key in ledger_stats(grpo.paths).keys}
        assert len(kept) >= 4, "it was killed while it sampled"
    # Of two steps, one was measured: the first one of a start is not.
    grpo.wait(lambda: grpo.status().get("step", 0) >= 2, PATIENCE_S)
    wait_for_lines(sampled, 64 + 8)
    seen = len(grpo.events())
    preempt(cluster, int(grpo.job_id), hold_s=1)
    assert grpo.wait_event("cause", after=seen)["cause"] == "preemption", grpo.story()
    saved = grpo.wait_event("saved", after=seen, emergency=True)
    assert saved["name"] == "step_000002", "the weights are those of its end"
    grpo.wait_event("verified", after=seen, name="step_000002")
    ended = grpo.wait_event("ended", after=seen, exit_code=25)
    assert ended["time"] < _plus(grpo.events("cause")[-1]["time"], 20), "the end of step 3 was not waited for"
    told = [event["text"] for event in grpo.events("notice") if event["topic"] == "ledger"]
    assert any(text.startswith("step 3 is left while it is sampled: ") for text in told), told
    # Of step 3 alone: what an engine had finished at the kill, and no worker had recorded, was sampled again since.
    kept |= {session_seed(7, *key) for key in ledger_stats(grpo.paths).keys if key[0] >= 16}
    assert kept, "some of the step had been recorded"
    grpo.wait_event("restart", after=seen, timeout_s=PATIENCE_S, resume="step_000002")
    grpo.wait_end(timeout_s=PATIENCE_S)
    assert steps(grpo) == [1, 2, 3], "no step was done twice"
    seeds = [msgspec.json.decode(line)[1] for line in sampled.read_bytes().splitlines()]
    assert {seeds.count(seed) for seed in kept} == {1}, "what was in the ledger was sampled once"
    assert len(set(seeds)) == 3 * 32
    assert ledger_stats(grpo.paths).duplicates == ()


@pytest.mark.soak  # one by one and seen at once: tests/verl/test_ray.py; on Slurm: the campaign
def test_a_dead_worker_and_a_dead_node_are_each_seen_and_restarted_in_place(grpo: LiveRun) -> None:
    grpo.argv += ["checkpoint.every_steps=1", "verl.trainer.total_training_steps=100"]
    grpo.submit()
    verified = grpo.wait_event("verified", timeout_s=PATIENCE_S)
    seen = len(grpo.events())
    one(grpo, "WorkerDict").kill()  # a training rank
    crash = grpo.wait_event("crash", after=seen, timeout_s=PATIENCE_S, kind="crash")
    assert "ActorDiedError" in crash["detail"]
    resumed = grpo.wait_event("restart", after=seen, number=2)
    assert resumed["resume"] >= verified["name"]
    (other,) = {"node1", "node2"} - {grpo.facts().batch_host}
    seen = len(grpo.events())
    one(grpo, "raylet", other).kill()
    crash = grpo.wait_event("crash", after=seen, timeout_s=PATIENCE_S, kind="crash")
    assert "Ray has ended on this node" in crash["detail"]
    grpo.wait_event("restart", after=seen, number=3)
    assert grpo.facts().restarts == 0


@pytest.mark.soak
def test_a_driver_that_hangs_is_seen_by_its_pace(grpo: LiveRun) -> None:
    grpo.argv += [
        "daemon.hang_floor_s=15",
        "checkpoint.every_steps=50",
        "verl.trainer.total_training_steps=100",
    ]
    grpo.submit()
    grpo.wait(lambda: grpo.status().get("step", 0) >= 2, PATIENCE_S)
    one(grpo, "TaskRunner").suspend()
    hung = grpo.wait_event("hang", timeout_s=PATIENCE_S)
    assert "rank 0 has passed no safe point" in hung["detail"]
    grpo.wait_event("restart", timeout_s=PATIENCE_S, number=2)
    # Each node writes its own.
    stacks = [Path(event["log"]).read_text() for event in grpo.events("stacks")]
    for part in ("WorkerDict", "LedgerWorker", "Sampler"):
        assert any(f"---- stacks of ray::{part}" in text for text in stacks), "workers and engines, too"


def _plus(time: str, seconds: float) -> str:
    return (datetime.fromisoformat(time) + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")
