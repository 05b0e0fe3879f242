"""Families trained for real: two ranks of FSDP2, sharded layer by layer; PPO, GRPO, and runs that are interrupted.

`make test-long-rest` trains two of the families below, `make test-all` all seven, and `make families`
(VERL_SLURM_FAMILIES=all) every one of docs/models.md.

The safe points of a run of one step here, by number:

    0 step 0    1 generate    2 score    3 advantage    4 update    5 update    6 the end
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.builders import new_training, train_config
from tests.families import TINY, build_family
from tests.lanes import has_variants
from tests.processes import torchrun
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.inspect.compare import compare
from verl_slurm.config.schema import TrainConfig

ALL = os.environ.get("VERL_SLURM_FAMILIES") == "all"
# The first test's time is that of all runs: the fixture makes them.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(7200 if ALL else 1800), pytest.mark.long]

# What differs in its layers, its positions or its weights from the others here.
USUAL = ("deepseek_v3", "gemma3_text", "gpt2", "gpt_oss", "llama-tied", "opt", "qwen3")
USUAL = USUAL if has_variants() else ("gpt2",)
TRAINED = tuple(TINY) if ALL else USUAL
TWINS = tuple(TINY) if ALL else tuple(name for name in ("gpt2", "gemma3_text", "gpt_oss") if name in USUAL)
VARIED = tuple(TINY) if ALL else ("gpt2",) if has_variants() else ()
PPO = train_config(steps=1, sizes=(4, 2, 2), ppo_epochs=1)
GRPO = msgspec.structs.replace(PPO, algorithm="grpo", kl_in="loss")
AT_ONCE = 25
"""Runs in one start of the ranks: each leaves process groups behind, and each of those has a thread of gloo's."""
# In mid-generation, after scoring, and between the two updates; the next life begins where the last ended.
STOPS = [(1, "stop"), (2, "die"), (4, "stop"), (None, "")]
TO_THE_END = [(None, "")]


# Random models answer nonsense. This rewards them all the same, so that there is something to learn.
REWARD = "def score(prompts, responses, answers):\n    return [sum(map(ord, r)) % 7 / 7 for r in responses]\n"


def _make(
    root: Path, name: str, model: Path, data: Path, train: TrainConfig = PPO, **shape: object
) -> RunPaths:
    return new_training(
        root / name,
        model,
        data,
        reward=f"python:{root / 'reward.py'}:score",
        sampled_at_once=4,
        samples_per_prompt=2 if train.algorithm == "grpo" else 1,
        # These weights are ten times as spread as usual, and so is the rounding of bfloat16.
        max_logprob_gap=0.5 if "mixed_precision" in shape else 1e-4,
        train=train,
        ranks=2,
        **shape,
        store_frozen=False,
    )


def _live(plan: list[tuple[RunPaths, list[tuple[int | None, str]]]]) -> None:
    words = json.dumps([(str(paths.root), lives) for paths, lives in plan])
    ranks = torchrun("-m", "tests.trainer.lives_worker", words, "families", timeout_s=600)
    assert ranks.returncode == 0, ranks.stderr[-4000:]
    sys.stdout.write(ranks.stdout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny: Path, sums_root: Path) -> dict[str, RunPaths]:
    """Every run of this page, in as few starts of the ranks as may be."""
    root = tmp_path_factory.mktemp("runs")
    (root / "reward.py").write_text(REWARD)
    models = {name: build_family(name, root / "models" / name, tiny) for name in TRAINED}
    plan = []
    for name in sorted(models):
        given = models[name], sums_root
        plan += [(_make(root, f"{name}.ppo", *given), TO_THE_END)]
        plan += [(_make(root, f"{name}.grpo", *given, GRPO), TO_THE_END)]
        if name in TWINS:
            plan += [(_make(root, f"{name}.stopped", *given), STOPS)]
        if name in VARIED:
            plan += [(_make(root, f"{name}.recomputed", *given, recompute=True), TO_THE_END)]
            plan += [(_make(root, f"{name}.mixed", *given, mixed_precision="bfloat16"), TO_THE_END)]
    for start in range(0, len(plan), AT_ONCE):
        print(f"runs {start + 1} to {min(start + AT_ONCE, len(plan))} of {len(plan)}", flush=True)
        _live(plan[start : start + AT_ONCE])
    return {paths.root.name: paths for paths, _ in plan}


def _final(paths: RunPaths) -> Path:
    failed = paths.root / "failed"
    assert not failed.exists(), failed.read_text()[-3000:]
    return paths.checkpoint(1)


def _row(paths: RunPaths) -> dict[str, float]:
    """The metrics of the step."""
    return json.loads((_final(paths) / "metadata.json").read_bytes())["history"][-1]


@pytest.mark.scenario("USE04", "USE05")
@pytest.mark.parametrize("name", TRAINED)
def test_a_family_trains_a_step_with_ppo_and_with_grpo(runs: dict[str, RunPaths], name: str) -> None:
    ppo, grpo = (_row(runs[f"{name}.{algorithm}"]) for algorithm in ("ppo", "grpo"))
    assert min(ppo["actor_grad_norm"], ppo["critic_grad_norm"], grpo["actor_grad_norm"]) > 0
    assert "critic_grad_norm" not in grpo


@pytest.mark.scenario("USE04", "USE05")
@pytest.mark.parametrize("name", TWINS)
def test_stopped_and_killed_in_mid_step_a_family_ends_with_the_same_bits(
    runs: dict[str, RunPaths], name: str
) -> None:
    result = compare(_final(runs[f"{name}.ppo"]), _final(runs[f"{name}.stopped"]))
    assert result.same, result.differing


@pytest.mark.scenario("USE04")
@pytest.mark.parametrize("name", VARIED)
@pytest.mark.variant
def test_recomputing_layers_changes_no_bit_and_mixed_precision_trains(
    runs: dict[str, RunPaths], name: str
) -> None:
    result = compare(_final(runs[f"{name}.ppo"]), _final(runs[f"{name}.recomputed"]))
    assert result.same, result.differing
    row = _row(runs[f"{name}.mixed"])
    assert min(row["actor_grad_norm"], row["critic_grad_norm"]) > 0


@pytest.mark.scenario("USE04")
@pytest.mark.variant
def test_a_critic_without_a_class_of_its_own_is_exported_as_its_transformer(
    runs: dict[str, RunPaths], tmp_path: Path
) -> None:
    """OPT: no token classification class, and a value head narrower than its hidden states."""
    from safetensors.torch import load_file
    from transformers import OPTModel

    run, out = runs["opt.ppo"], tmp_path / "value"
    words = ["export", run.root, "--to", "hf", "--role", "critic", "--out", out]
    argv = [sys.executable, "-m", "verl_slurm.cli", *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "config.json").read_bytes())["architectures"] == ["OPTModel"]
    model, report = OPTModel.from_pretrained(str(out), output_loading_info=True)
    assert not report["missing_keys"]
    assert set(report["unexpected_keys"]) == {"score.weight", "score.bias"}
    written = load_file(out / "model.safetensors")
    assert written["score.weight"].shape == (1, 16)
    assert all((written[f"model.{name}"] == value).all() for name, value in model.state_dict().items())
