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

from tests.families import build_family
from tests.lanes import has_variants
from tests.ledger_stats import ledger_stats
from tests.processes import python_path
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.inspect.compare import compare
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.runtime_state.ledger import load
from verl_slurm.save.ranks.loader import read_whole

# The first test waits for all runs: two minutes alone, six beside the other lanes; with variants twice as long.
pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(1200)]

WORKER = Path(__file__).with_name("shapes_worker.py")
REPOSITORY = Path(__file__).resolve().parents[3]
DP, TP, PP, TWO, TWICE, BOTH = [1, 1, 1], [1, 2, 1], [1, 1, 2], [2, 1, 1], [2, 2, 1], [1, 2, 2]
FOUR, LONG = [4, 1, 1], [2, 1, 2]
MIXED = {"distributed.mixed_precision": "bfloat16", "distributed.recompute": True}
GRPO = {"train.algorithm": "grpo", "rollout.samples_per_prompt": 4, "train.kl_in": "loss"}
TIED = {"model.path": "tied"}
QWEN3, LLAMA = {"model.path": "qwen3"}, {"model.path": "llama"}
LIMITS = {"actor": 1e-4, "critic": 1e-5, "optimizer": 1e-6}
"""How far two shapes may be apart after eight updates (docs/decisions/0006-shapes.md)."""
# The rule, and what it is asked written down.
COUNTING = """
import os
from verl_slurm.trainer.reward.scoring import arithmetic

def score(prompts, responses, answers):
    with open(__file__ + "." + os.environ["RANK"], "a") as asked:
        asked.writelines(f"{response!r}\\n" for response in responses)
    return [arithmetic(response, answer) for response, answer in zip(responses, answers)]
"""
NONE = 0
"""Stop before anything is done: the start has loaded what there was, and that is all."""

RARE = {
    *("long", "narrowed", "pp-recomputed", "tied", "tied-twice", "qwen3-moved", "llama", "llama-both"),
    *("mixed", "mixed-stopped", "asked"),
}
"""Runs that `make soak` makes."""
VARIANTS = {
    *("four", "tp-stopped", "pp", "twice", "twice-stopped", "grpo", "grpo-moved", "counted-pp"),
    *("qwen3", "qwen3-tp", "qwen3-tp-stopped"),
}
"""Runs that `make test-all` makes, too."""
_SOAKING = bool(os.environ.get("VERL_SLURM_SOAK"))
LEFT_OUT = set() if _SOAKING else RARE if has_variants() else RARE | VARIANTS


def marked(*rows: Any) -> list[Any]:
    """The rows of a test, with the marks of the runs that they are about."""

    def marks(row: tuple[Any, ...]) -> list[Any]:
        names = set(map(str, row))
        return [*[pytest.mark.soak] * bool(RARE & names), *[pytest.mark.variant] * bool(VARIANTS & names)]

    return [
        pytest.param(*row, marks=marks(row))
        for row in (row if isinstance(row, tuple) else (row,) for row in rows)
    ]


# A start from nothing has these safe points in its first step where dp is 1:
# 0-3 generate, 4-7 score, 8 advantage, 9-12 update, 13 the end;
# where it is 2: 0-1, 2-3, 4, 5-8, 9 (in LONG 0-1, 2-5, 6, 7-10, 11); where it is 4: 0, 1-2, 3, 4-7, 8.
PLAN: list[dict[str, Any]] = [
    {"run": "dp", "shape": DP},
    {"run": "two", "shape": TWO},
    {"run": "two-stopped", "shape": TWO, "kill": 3},
    {"run": "two-stopped", "shape": TWO, "stop": 7},
    {"run": "two-stopped", "shape": TWO},
    {"run": "four", "shape": FOUR},
    {"run": "tp", "shape": TP},
    {"run": "tp-stopped", "shape": TP, "stop": 2},
    {"run": "tp-stopped", "shape": TP},
    {"run": "pp", "shape": PP},
    {"run": "twice", "shape": TWICE},
    {"run": "twice-stopped", "shape": TWICE, "stop": 6},
    {"run": "twice-stopped", "shape": TWICE},
    {"run": "long", "shape": LONG},
    # One run through many shapes, at every kind of place. Inside a step the newest checkpoint is the one with the most
    # safe points before it, so each of these starts must get further than the one before.
    {"run": "moved", "shape": TWICE, "kill": 1},
    {"run": "moved", "shape": PP, "stop": 7},
    {"run": "moved", "shape": LONG, "stop": 6},
    {"run": "moved", "shape": TP, "stop": 1},
    {"run": "moved", "shape": BOTH, "stop": NONE},
    {"run": "moved", "shape": TWICE},
    # Three shapes for the four updates of a step.
    {"run": "narrowed", "shape": FOUR, "stop": 5},
    {"run": "narrowed", "shape": TWO, "stop": 1},
    {"run": "narrowed", "shape": DP},
    {"run": "pp-recomputed", "shape": PP, "config": {"distributed.recompute": True}},
    {"run": "grpo", "shape": DP, "config": GRPO},
    {"run": "grpo-moved", "shape": TP, "kill": 6, "config": GRPO},
    {"run": "grpo-moved", "shape": TWICE, "stop": 6, "config": GRPO},
    {"run": "grpo-moved", "shape": PP, "config": GRPO},
    {"run": "tied", "shape": DP, "config": TIED},
    {"run": "tied-twice", "shape": TWICE, "config": TIED},
    {"run": "qwen3", "shape": DP, "config": QWEN3},
    {"run": "qwen3-tp", "shape": TP, "config": QWEN3},
    {"run": "qwen3-tp-stopped", "shape": TP, "stop": 10, "config": QWEN3},
    {"run": "qwen3-tp-stopped", "shape": TP, "config": QWEN3},
    {"run": "qwen3-moved", "shape": TWICE, "stop": 6, "config": QWEN3},
    {"run": "qwen3-moved", "shape": PP, "config": QWEN3},
    {"run": "llama", "shape": DP, "config": LLAMA},
    {"run": "llama-both", "shape": BOTH, "config": LLAMA},
    {"run": "mixed", "shape": PP, "config": MIXED},
    {"run": "mixed-stopped", "shape": PP, "config": MIXED, "stop": 10},
    {"run": "mixed-stopped", "shape": PP, "config": MIXED},
    {"run": "counted", "shape": TP, "config": {"model.reward": "python:{root}/counted.py:score"}},
    {"run": "counted-pp", "shape": PP, "config": {"model.reward": "python:{root}/counted-pp.py:score"}},
    {"run": "asked", "shape": BOTH, "stop": 13},
    {"run": "asked", "shape": BOTH, "ask": "python:{root}/asked.py:score"},
]


@pytest.fixture(scope="module")
def root(tiny: Path, sums_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, made."""
    root = tmp_path_factory.mktemp("shapes")
    _tie(tiny, root / "tied")
    for family in ("qwen3", "llama"):
        build_family(family, root / family, tiny, std=0.02)
    for name in ("counted", "counted-pp", "asked"):
        (root / f"{name}.py").write_text(COUNTING)
    plan = [life for life in PLAN if life["run"] not in LEFT_OUT]
    argv = [sys.executable, str(WORKER), str(tiny), str(sums_root), str(root), json.dumps(plan)]
    environ = os.environ | python_path() | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=1160, check=False)
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
    return RunPaths(root / run).checkpoint(2)


def _responses(root: Path, run: str) -> dict[int, tuple[list[int], list[int]]]:
    """Sample id → the tokens of the prompt and of the response in the second step: weights trained in the run's own
    shape have sampled them. The journal of the first step is gone with the second checkpoint."""
    batches = load(RunPaths(root / run), from_step=1).values()
    return {
        sample: (prompt, response)
        for batch in batches
        for sample, prompt, response in zip(
            *(batch[name].tolist() for name in ("sample_id", "prompt_ids", "response_ids")), strict=True
        )
    }


def _rewards(root: Path, run: str) -> list[list[float]]:
    """Mean reward and length of both steps."""
    rows = json.loads((_final(root, run) / "metadata.json").read_bytes())["history"]
    return [[row["reward"], row["response_tokens"]] for row in rows]


def _distance(root: Path, run: str, like: str, domain: str) -> float:
    """The largest difference of any number of a domain."""
    mine, other = (read_whole(_final(root, name), domain) for name in (run, like))
    assert mine.keys() == other.keys()
    return max(float((mine[name] - other[name]).abs().max()) for name in mine)


@pytest.mark.parametrize(
    "run", [*marked("two", "twice", "mixed", "qwen3-tp"), pytest.param("tp", marks=pytest.mark.variant)]
)
def test_a_run_stopped_anywhere_ends_with_the_same_bits_in_the_same_shape(root: Path, run: str) -> None:
    result = compare(_final(root, run), _final(root, f"{run}-stopped"))
    assert result.same, result.differing
    assert result.num_tensors > 100


@pytest.mark.parametrize("run", marked("two-stopped", "tp-stopped", "narrowed", "moved", "twice-stopped"))
def test_every_rollout_is_journaled_once_by_one_rank_of_its_replica(root: Path, run: str) -> None:
    journal = ledger_stats(RunPaths(root / run))
    assert journal.duplicates == ()
    assert journal.problems == ()
    rows = json.loads((_final(root, "dp") / "metadata.json").read_bytes())["history"]
    assert journal.rollouts == 16 * len(rows) == 32
    assert journal.tokens == sum(16 * row["response_tokens"] for row in rows)


# Another number of data-parallel ranks in all but two; and with it other ranks have the rows of a mini-batch.
PAIRS = [
    ("two", "dp"),
    ("four", "dp"),
    ("four", "two"),
    ("tp", "dp"),
    ("pp", "dp"),
    ("twice", "dp"),
    ("long", "dp"),
    ("long", "four"),
    ("moved", "dp"),
    ("moved", "four"),
    ("narrowed", "dp"),
    ("narrowed", "four"),
    ("tied-twice", "tied"),
    ("grpo-moved", "grpo"),
    ("qwen3-tp", "qwen3"),
    ("qwen3-moved", "qwen3"),
    ("llama-both", "llama"),
]


@pytest.mark.parametrize(("run", "like"), marked(*PAIRS))
def test_every_shape_samples_the_same_and_trains_it_in_the_same_mini_batches(
    root: Path, run: str, like: str
) -> None:
    """Sums are made in another order, and AdamW magnifies that a little: LIMITS. Weights that were trained in other
    mini-batches are a hundred times as far apart, and have sampled other tokens."""
    responses = _responses(root, run)
    assert len(responses) == 16
    assert responses == _responses(root, like)
    assert _rewards(root, run) == _rewards(root, like)
    found = {
        domain: _distance(root, run, like, domain)
        for domain in LIMITS
        if (_final(root, run) / domain).exists()
    }
    assert found.keys() == LIMITS.keys() - ({"critic"} if "grpo" in run else set())
    assert {domain: distance for domain, distance in found.items() if distance >= LIMITS[domain]} == {}


@pytest.mark.parametrize(
    ("run", "places", "last"),
    marked(
        ("moved", [(1, "score"), (2, "update"), (1, "update")], 2),
        ("narrowed", [(4, "update"), (2, "update")], 1),
        ("grpo-moved", [(2, "update")], 1),
    ),
)
def test_runs_have_changed_their_data_parallel_ranks_among_the_updates_of_a_step(
    root: Path, run: str, places: list[tuple[int, str]], last: int
) -> None:
    """Else the pairs above would prove less than they seem to."""
    infos = reversed(list_checkpoints(RunPaths(root / run)))
    inside = [verify(info.path).manifest for info in infos if info.step == 0]
    assert [(manifest.topology.dp, manifest.phase) for manifest in inside if manifest] == places
    final = verify(_final(root, run)).manifest
    assert final is not None
    assert final.topology.dp == last
    if run == "moved":
        assert (final.topology.tp, final.topology.pp, final.world_size) == (2, 1, 4)


@pytest.mark.parametrize(
    ("run", "speaker", "times"),
    # Two steps; a new reward is tried twice on the responses of the first, and then scores the second.
    marked(("counted", 0, 2), ("counted-pp", 1, 2), ("asked", 2, 3)),
)
def test_a_reward_is_asked_by_one_rank_of_the_replica_and_once_for_each_response(
    root: Path, run: str, speaker: int, times: int
) -> None:
    (asked,) = root.glob(f"{run}.py.*")
    assert asked.name == f"{run}.py.{speaker}"
    assert len(asked.read_text().splitlines()) == times * 16


@pytest.mark.parametrize(("run", "like"), marked(("counted", "tp"), ("counted-pp", "pp")))
def test_and_the_others_train_with_what_it_said(root: Path, run: str, like: str) -> None:
    result = compare(_final(root, run), _final(root, like))
    assert result.same, result.differing


@pytest.mark.soak
def test_what_is_computed_again_is_the_same_to_the_bit(root: Path) -> None:
    result = compare(_final(root, "pp"), _final(root, "pp-recomputed"))
    assert result.same, result.differing


@pytest.mark.soak
def test_mixed_precision_trains_float32_weights_near_those_of_float32(root: Path) -> None:
    """How near depends on the CPU's bfloat16, and the second step samples other responses, so the moments of its
    gradients are only of the right type. Measured: 0.027 and 0.016 of the weights' norm."""
    for domain, limit in (("actor", 0.1), ("critic", 0.1), ("optimizer", None)):
        mixed, whole = (read_whole(_final(root, name), domain) for name in ("mixed", "dp"))
        assert {tensor.dtype for tensor in mixed.values()} == {torch.float32}
        if limit is not None:
            apart, size = (
                torch.cat([tensor.flatten() for tensor in tensors]).norm()
                for tensors in ([mixed[name] - whole[name] for name in whole], list(whole.values()))
            )
            assert apart < limit * size, domain
        assert any(not torch.equal(mixed[name], whole[name]) for name in mixed)
