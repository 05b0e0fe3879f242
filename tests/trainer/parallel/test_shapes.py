"""Real ranks in every shape: to the bit where only an interruption lies between, to tolerance where a shape does."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl_slurm.checkpoint.verify import verify
from verl_slurm.dcp.compare import compare
from verl_slurm.dcp.loader import read_whole
from verl_slurm.paths import RunPaths
from verl_slurm.runtime_state.ledger import stats

pytestmark = pytest.mark.torch

WORKER = Path(__file__).with_name("shapes_worker.py")
REPOSITORY = Path(__file__).resolve().parents[3]
DP, TP, PP, TWO, TWICE, BOTH = [1, 1, 1], [1, 2, 1], [1, 1, 2], [2, 1, 1], [2, 2, 1], [1, 2, 2]
MIXED = {"distributed.mixed_precision": "bfloat16", "distributed.recompute": True}
GRPO = {
    "train.algorithm": "grpo",
    "train.loss_aggregation": "sequence_mean",
    "train.kl_in": "loss",
    "rollout.samples_per_prompt": 4,
}
GRPO = {"train.algorithm": "grpo", "rollout.samples_per_prompt": 4, "train.kl_in": "loss"}
NONE = 0
"""Stop before anything is done: the start has loaded what there was, and that is all."""

# A start from nothing has these safe points where dp is 1, half as many of the first two kinds where it is 2:
# 0-3 generate, 4-7 score, 8 advantage, 9-10 update, 11 the end.
PLAN: list[dict[str, Any]] = [
    {"run": "dp", "shape": DP},
    {"run": "tp", "shape": TP},
    {"run": "tp-stopped", "shape": TP, "stop": 2},
    {"run": "tp-stopped", "shape": TP, "kill": 5},
    {"run": "tp-stopped", "shape": TP},
    {"run": "pp", "shape": PP},
    {"run": "pp-stopped", "shape": PP, "stop": 10},
    {"run": "pp-stopped", "shape": PP},
    {"run": "twice", "shape": TWICE},
    {"run": "twice-stopped", "shape": TWICE, "stop": 5},
    {"run": "twice-stopped", "shape": TWICE},
    # One run through many shapes, at every kind of place.
    {"run": "moved", "shape": TWICE, "kill": 1},
    {"run": "moved", "shape": PP, "stop": 7},
    {"run": "moved", "shape": TWO, "stop": 3},
    {"run": "moved", "shape": TP, "stop": 1},
    {"run": "moved", "shape": PP, "stop": NONE},
    {"run": "moved", "shape": BOTH},
    {"run": "pp-recomputed", "shape": PP, "config": {"distributed.recompute": True}},
    {"run": "grpo-dp", "shape": DP, "config": GRPO},
    {"run": "grpo-moved", "shape": TP, "kill": 6, "config": GRPO},
    {"run": "grpo-moved", "shape": PP, "config": GRPO},
    {"run": "tied-dp", "shape": DP, "config": {"model.path": "tied"}},
    {"run": "tied-twice", "shape": TWICE, "config": {"model.path": "tied"}},
    {"run": "mixed", "shape": PP, "config": MIXED},
    {"run": "mixed-stopped", "shape": PP, "config": MIXED, "stop": 10},
    {"run": "mixed-stopped", "shape": PP, "config": MIXED},
    {"run": "grpo", "shape": DP, "config": GRPO},
    {"run": "grpo-moved", "shape": TWICE, "stop": 5, "config": GRPO},
    {"run": "grpo-moved", "shape": PP, "config": GRPO},
]


@pytest.fixture(scope="module")
def root(tiny: Path, sums_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, made."""
    root = tmp_path_factory.mktemp("shapes")
    _tie(tiny, root / "tied")
    argv = [sys.executable, str(WORKER), str(tiny), str(sums_root), str(root), json.dumps(PLAN)]
    environ = os.environ | {
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'daemon'}",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return root


def _tie(model: Path, directory: Path) -> None:
    """The same model, but that the embedding is the head, too."""
    tied: Any = AutoModelForCausalLM.from_pretrained(str(model))
    tied.config.tie_word_embeddings = True
    # So that its distributions are not all on one token.
    torch.nn.init.normal_(
        tied.model.embed_tokens.weight, std=0.02, generator=torch.Generator().manual_seed(0)
    )
    tied.tie_weights()
    shutil.copytree(model, directory)
    tied.save_pretrained(str(directory))


def _final(root: Path, run: str) -> Path:
    return RunPaths(root / run).checkpoint(1)


@pytest.mark.parametrize("run", ["tp", "pp", "twice", "mixed"])
def test_a_run_stopped_anywhere_ends_with_the_same_bits_in_the_same_shape(root: Path, run: str) -> None:
    result = compare(_final(root, run), _final(root, f"{run}-stopped"))
    assert result.same, result.differing
    assert result.num_tensors > 100


@pytest.mark.parametrize("run", ["tp-stopped", "pp-stopped", "moved", "twice-stopped"])
def test_every_rollout_is_journaled_once_by_one_rank_of_its_replica(root: Path, run: str) -> None:
    journal = stats(RunPaths(root / run))
    assert journal.duplicates == ()
    assert journal.problems == ()
    (row,) = json.loads((_final(root, "dp") / "metadata.json").read_bytes())["history"]
    assert (journal.rollouts, journal.tokens) == (16, 16 * row["response_tokens"])


@pytest.mark.parametrize(
    ("run", "like"),
    [
        ("tp", "dp"),
        ("pp", "dp"),
        ("twice", "dp"),
        ("moved", "dp"),
        ("tied-twice", "tied-dp"),
        ("grpo-moved", "grpo-dp"),
    ],
)
def test_every_shape_trains_what_one_rank_alone_trains(root: Path, run: str, like: str) -> None:
    """Same prompts, samples and mini-batches; sums are made in another order, and AdamW magnifies that a little."""
    for domain, limit in (("actor", 1e-4), ("critic", 1e-5), ("optimizer", 1e-6)):
        if not (_final(root, like) / domain).exists():
            assert domain == "critic", "GRPO has none"
            continue
        mine, other = (read_whole(_final(root, name), domain) for name in (run, like))
        assert mine.keys() == other.keys()
        worst = {name: float((mine[name] - other[name]).abs().max()) for name in mine}
        assert max(worst.values()) < limit, max(worst.items(), key=lambda item: item[1])


def test_so_does_grpo_without_a_critic_in_any(root: Path) -> None:
    for domain, limit in (("actor", 1e-4), ("optimizer", 1e-6)):
        mine, other = (read_whole(_final(root, name), domain) for name in ("grpo-moved", "grpo"))
        assert mine.keys() == other.keys()
        assert not [name for name in mine if name.startswith("critic.")]
        assert max(float((mine[name] - other[name]).abs().max()) for name in mine) < limit
    assert not (_final(root, "grpo-moved") / "critic").exists()


def test_a_manifest_says_the_shape_it_was_written_in(root: Path) -> None:
    manifest = verify(_final(root, "moved")).manifest
    assert manifest is not None
    assert (manifest.topology.dp, manifest.topology.tp, manifest.topology.pp) == (1, 2, 2)
    assert manifest.world_size == 4


def test_what_is_computed_again_is_the_same_to_the_bit(root: Path) -> None:
    result = compare(_final(root, "pp"), _final(root, "pp-recomputed"))
    assert result.same, result.differing


def test_mixed_precision_trains_float32_weights_near_those_of_float32(root: Path) -> None:
    for domain, limit in (("actor", 2e-2), ("critic", 2e-2), ("optimizer", 2e-2)):
        mixed, whole = (read_whole(_final(root, name), domain) for name in ("mixed", "dp"))
        assert {tensor.dtype for tensor in mixed.values()} == {torch.float32}
        assert max(float((mixed[name] - whole[name]).abs().max()) for name in mixed) < limit
        assert any(not torch.equal(mixed[name], whole[name]) for name in mixed)
