"""Real ranks in every shape: to the bit where only an interruption lies between, to tolerance where a shape does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_slurm.checkpoint.verify import verify
from verl_slurm.dcp.compare import compare
from verl_slurm.dcp.loader import read_whole
from verl_slurm.paths import RunPaths
from verl_slurm.runtime_state.ledger import stats

pytestmark = pytest.mark.torch

WORKER = Path(__file__).with_name("shapes_worker.py")
REPOSITORY = Path(__file__).resolve().parents[3]
DP, TP, PP, TWO, TWICE, BOTH = [1, 1, 1], [1, 2, 1], [1, 1, 2], [2, 1, 1], [2, 2, 1], [1, 2, 2]
ONE_UPDATE = {"train.mini_batch_size_per_device": 16}
ONE_UPDATE_OF_TWO = {"train.mini_batch_size_per_device": 8}
NONE = 0
"""Stop before anything is done: the start has loaded what there was, and that is all."""

# A start from nothing has these safe points where dp is 1:
# 0 step 0, 1-3 generate, 4-11 score, 12 advantage, 13-14 update, 15 the end.
PLAN: list[dict[str, Any]] = [
    {"run": "dp", "shape": DP},
    {"run": "tp", "shape": TP},
    {"run": "tp-stopped", "shape": TP, "stop": 2},
    {"run": "tp-stopped", "shape": TP, "stop": 12},
    {"run": "tp-stopped", "shape": TP},
    {"run": "pp", "shape": PP},
    {"run": "pp-stopped", "shape": PP, "stop": 14},
    {"run": "pp-stopped", "shape": PP},
    {"run": "two", "shape": TWO},
    {"run": "twice", "shape": TWICE},
    {"run": "twice-stopped", "shape": TWICE, "stop": 8},
    {"run": "twice-stopped", "shape": TWICE},
    # One run through many shapes, stopped between its two updates until all of them have loaded it.
    {"run": "moved", "shape": TP, "stop": 14},
    {"run": "moved", "shape": PP, "stop": NONE},
    {"run": "moved", "shape": BOTH},
    # Two data-parallel ranks draw other mini-batches than one: not where a step is one.
    {"run": "one-update", "shape": DP, "config": ONE_UPDATE},
    {"run": "spread", "shape": TWICE, "config": ONE_UPDATE_OF_TWO, "stop": 1},
    {"run": "spread", "shape": PP, "config": ONE_UPDATE, "stop": 12},
    {"run": "spread", "shape": TWO, "config": ONE_UPDATE_OF_TWO},
]


@pytest.fixture(scope="module")
def root(tiny: Path, sums_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, made."""
    root = tmp_path_factory.mktemp("shapes")
    argv = [sys.executable, str(WORKER), str(tiny), str(sums_root), str(root), json.dumps(PLAN)]
    environ = os.environ | {
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'daemon'}",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return root


def _final(root: Path, run: str) -> Path:
    return RunPaths(root / run).checkpoint(1)


@pytest.mark.parametrize("run", ["tp", "pp", "twice"])
def test_a_run_stopped_anywhere_ends_with_the_same_bits_in_the_same_shape(root: Path, run: str) -> None:
    result = compare(_final(root, run), _final(root, f"{run}-stopped"))
    assert result.same, result.differing
    assert result.num_tensors > 100


@pytest.mark.parametrize("run", ["dp", "tp-stopped", "pp-stopped", "moved", "spread", "twice-stopped"])
def test_every_rollout_is_journaled_once_by_one_rank_of_its_replica(root: Path, run: str) -> None:
    journal = stats(RunPaths(root / run))
    assert journal.duplicates == ()
    assert journal.problems == ()


@pytest.mark.parametrize(
    ("run", "like"), [("tp", "dp"), ("pp", "dp"), ("moved", "dp"), ("twice", "two"), ("spread", "one-update")]
)
def test_every_shape_trains_what_data_parallel_ranks_alone_train(root: Path, run: str, like: str) -> None:
    """Same prompts, samples and mini-batches; sums are made in another order, and AdamW magnifies that a little."""
    for domain, limit in (("actor", 1e-4), ("critic", 1e-5), ("optimizer", 1e-6)):
        mine, other = (read_whole(_final(root, name), domain) for name in (run, like))
        assert mine.keys() == other.keys()
        worst = {name: float((mine[name] - other[name]).abs().max()) for name in mine}
        assert max(worst.values()) < limit, max(worst.items(), key=lambda item: item[1])


def test_a_manifest_says_the_shape_it_was_written_in(root: Path) -> None:
    manifest = verify(_final(root, "moved")).manifest
    assert manifest is not None
    assert (manifest.topology.dp, manifest.topology.tp, manifest.topology.pp) == (1, 2, 2)
    assert manifest.world_size == 4
