"""Real ranks in every shape: to the bit where nothing but an interruption lies between, to tolerance where a shape does.

All starts of one number of ranks happen in one set of processes, one after the other; the sets run side by side.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_slurm.checkpoint.verify import verify
from verl_slurm.dcp.compare import compare
from verl_slurm.dcp.loader import read_whole
from verl_slurm.paths import RunPaths
from verl_slurm.quickstart import model as quickstart_model
from verl_slurm.quickstart.data import build_data
from verl_slurm.runtime_state.ledger import stats

pytestmark = pytest.mark.torch

WORKER = Path(__file__).with_name("shapes_worker.py")
REPOSITORY = Path(__file__).resolve().parents[3]
STEPS = 2
TP, PP, TWICE, BOTH = [1, 2, 1], [1, 1, 2], [2, 2, 1], [1, 2, 2]

# A dp 1 process has these safe points: 0 step 0, 1-3 generate, 4-11 score, 12 advantage, 13-14 update, 15 step 1 ...
PLANS: dict[int, list[dict[str, Any]]] = {
    1: [{"run": "dp", "shape": [1, 1, 1]}],
    2: [
        {"run": "tp", "shape": TP},
        {"run": "tp stopped", "shape": TP, "stop": 2},
        {"run": "tp stopped", "shape": TP, "stop": 12},
        {"run": "tp stopped", "shape": TP},
        {"run": "pp", "shape": PP},
        {"run": "pp stopped", "shape": PP, "stop": 14},
        {"run": "pp stopped", "shape": PP},
        {"run": "moved", "shape": TP, "stop": 13},
        {"run": "moved", "shape": PP, "stop": 0},
        {"run": "moved", "shape": TP, "stop": 0},
        {"run": "moved", "shape": PP},
        {"run": "two", "shape": [2, 1, 1]},
    ],
    4: [
        {"run": "twice", "shape": TWICE},
        {"run": "twice stopped", "shape": TWICE, "stop": 5},
        {"run": "twice stopped", "shape": TWICE},
        {"run": "both", "shape": BOTH},
    ],
}


def _start(root: Path, ranks: int) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    plan = [{**start, "run": start["run"].replace(" ", "_")} for start in PLANS[ranks]]
    environ = os.environ | {
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'daemon'}",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return subprocess.Popen(
        [*argv, str(WORKER), str(root), json.dumps(plan)],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All runs, made."""
    root = tmp_path_factory.mktemp("shapes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart_model, "_WARM_STEPS", 20)
        quickstart_model.build_model(root / "model")
    build_data(root / "sums")
    running = [_start(root, ranks) for ranks in PLANS]
    try:
        for process in running:
            _, err = process.communicate(timeout=240)
            assert process.returncode == 0, err[-4000:]
    finally:
        for process in running:
            process.kill()
            process.wait()
    yield root


def _final(root: Path, run: str) -> Path:
    return RunPaths(root / run.replace(" ", "_")).checkpoint(STEPS)


@pytest.mark.parametrize("run", ["tp", "pp", "twice"])
def test_a_run_stopped_anywhere_ends_with_the_same_bits_in_the_same_shape(root: Path, run: str) -> None:
    result = compare(_final(root, run), _final(root, f"{run} stopped"))
    assert result.same, result.differing
    assert result.num_tensors > 100


@pytest.mark.parametrize("run", ["dp", "tp", "pp", "moved", "both", "twice"])
def test_every_rollout_is_journaled_once_by_one_rank_of_its_replica(root: Path, run: str) -> None:
    journal = stats(RunPaths(root / run))
    assert journal.duplicates == ()
    assert journal.problems == ()


@pytest.mark.parametrize(
    ("run", "like"), [("tp", "dp"), ("pp", "dp"), ("both", "dp"), ("moved", "dp"), ("twice", "two")]
)
def test_every_shape_trains_what_data_parallel_ranks_alone_train(root: Path, run: str, like: str) -> None:
    """Same prompts, samples and mini-batches; sums are made in another order, and AdamW magnifies that a little."""
    for domain, limit in (("actor", 1e-4), ("critic", 1e-5), ("optimizer", 1e-6)):
        mine, other = (read_whole(_final(root, name), domain) for name in (run, like))
        assert mine.keys() == other.keys()
        worst = {name: float((mine[name] - other[name]).abs().max()) for name in mine}
        assert max(worst.values()) < limit, max(worst.items(), key=lambda item: item[1])


def test_a_manifest_says_the_shape_and_a_stage_saves_what_it_has(root: Path) -> None:
    manifest = verify(_final(root, "both")).manifest
    assert manifest is not None
    assert (manifest.topology.dp, manifest.topology.tp, manifest.topology.pp) == (1, 2, 2)
    assert manifest.world_size == 4


def test_in_another_shape_every_bit_of_weights_and_optimizers_is_as_it_was_saved(root: Path) -> None:
    """`moved` was loaded and saved at once in two more shapes, at the position where it had been stopped."""
    saved = sorted((root / "moved" / "checkpoints").glob("step_000000_sp*"))
    assert len(saved) == 1, "the third start of it stood where the second did"
    for domain in ("actor", "critic", "optimizer"):
        assert read_whole(saved[0], domain)
