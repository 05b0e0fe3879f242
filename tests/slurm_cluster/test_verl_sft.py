"""verl's own SFT trainer on two nodes of a real Slurm: preempted within a step, and bit for bit the undisturbed run."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.harness import LiveRun
from tests.verl.plain import cpu_environ
from tests.verl.runs import write_config
from tests.verl.same import differences
from tests.verl.tiny import make_model, make_sums, sft_words
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytest.importorskip("verl", reason="NOT RUN: verl is not in this environment (make verl)")
pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.verl]

LAST = 10
"""Steps; an epoch has 8, so the second one is begun in either life."""


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    place = tmp_path_factory.mktemp("sums")
    return sft_words(
        make_model(place / "model"),
        make_sums(place / "sums.parquet", 512),
        batch=64,
        micro_batch=8,
        save_freq=LAST,  # so that what is saved before is the preemption's
    )


@pytest.fixture
def run(
    cluster: DevCluster, section: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LiveRun]:
    for name, value in cpu_environ({}).items():
        monkeypatch.setenv(name, value)
    config = write_config(tmp_path / "run.yaml", tmp_path / "run", section, LAST, nodes=2)
    live = LiveRun(cluster, tmp_path / "run", config=str(config))
    yield live
    live.cancel()


def _weights(run: LiveRun) -> Path:
    return run.paths.checkpoints / f"step_{LAST:06d}" / f"global_step_{LAST}"


def test_a_preemption_in_mid_step_is_saved_at_its_end_and_the_run_ends_bit_for_bit_alike(
    run: LiveRun, cluster: DevCluster, section: dict[str, object], tmp_path: Path
) -> None:
    config = write_config(tmp_path / "twin.yaml", tmp_path / "twin", section, LAST, nodes=2)
    twin = LiveRun(cluster, tmp_path / "twin", config=str(config)).submit()
    twin.wait_end()
    assert len(twin.events("restart")) == 1, twin.story()

    run.submit()
    run.wait(lambda: run.status().get("step", 0) >= 1)
    seen = len(run.events())
    preempt(cluster, int(run.job_id), hold_s=1)
    assert run.wait_event("cause", after=seen)["cause"] == "preemption", run.story()
    saved = run.wait_event("saved", after=seen, emergency=True)
    assert saved["name"] != f"step_{LAST:06d}", "verl alone would not have saved it"
    run.wait_event("verified", after=seen, name=saved["name"])
    run.wait_event("ended", after=seen, exit_code=25)
    run.wait_event("restart", after=seen, resume=saved["name"])
    run.wait_end()

    assert run.facts().restarts == 1
    assert differences(_weights(run), _weights(twin)) == []
    lines = run.paths.steps.read_bytes().splitlines()
    done = [msgspec.json.decode(line)["step"] for line in lines]
    assert done == list(range(1, LAST + 1)), "no step twice, and none left out"
    assert all(verify(info.path).ok for info in list_checkpoints(run.paths))
