"""A PyTorch loop of the user's own on a real Slurm: preempted in its middle, and bit for bit what nobody disturbed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import LiveRun, same_weights
from tests.loops.served import CONFIG, STEPS, by_hand, overrides
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.devcluster.cluster import DevCluster
from verl_slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


@pytest.fixture
def loop(cluster: DevCluster, tmp_path: Path) -> Iterator[LiveRun]:
    live = LiveRun(cluster, tmp_path / "run", *overrides(0.5), config=str(CONFIG))
    yield live
    live.cancel()


def test_a_preempted_loop_is_saved_at_its_steps_end_requeued_and_resumed(
    loop: LiveRun, cluster: DevCluster, tmp_path: Path
) -> None:
    loop.submit()
    loop.wait(lambda: loop.status().get("state") == "running" and loop.status()["step"] >= 5)
    preempt(cluster, int(loop.job_id), hold_s=1)
    cause = loop.wait_event("cause")
    assert cause["cause"] == "preemption", loop.story()
    saved = loop.wait_event("saved", emergency=True)
    loop.wait_event("verified", name=saved["name"])
    loop.wait_event("ended", exit_code=25)
    loop.wait_event("restart", resume=saved["name"])
    assert loop.facts().restarts == 1
    manifest = read_manifest(loop.paths.checkpoints / saved["name"])
    assert (manifest.guest, manifest.phase, manifest.world_size) == ("loop", "step_end", 2)
    assert 5 <= manifest.step < STEPS
    loop.wait_end()
    assert loop.status()["step"] == STEPS
    same, said = same_weights(by_hand(tmp_path / "straight"), loop.paths.root)
    assert same, said
