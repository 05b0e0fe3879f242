"""Whole runs on the device, interrupted in the middle of a step, against their undisturbed twins."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu.runs import Runs, assert_same, final
from tests.save.parts import load_runtime_state
from tests.trainer.test_grpo import GRPO, PPO, TO_THE_END
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.inspect.compare import compare
from verl_slurm.checkpoint.store.recover import choose_resume

# On a CPU `tests/trainer/test_loop.py` shows the same in CI; `make gpu` runs all of it.
pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.variant]

BF16 = "bfloat16"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny: Path, sums_root: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("gpu"), tiny, sums_root)


@pytest.fixture(scope="module")
def lived(runs: Runs, device: str) -> dict[str, RunPaths]:
    """All runs but the killed one, in one start of the rank: several arenas are pinned one after the other, too."""
    plan = [
        (runs.make_on(device, "twin", PPO), TO_THE_END),
        (runs.make_on(device, "bf16-twin", GRPO, mixed_precision=BF16), TO_THE_END),
        # Saved between two updates of step 0; then dead between two of step 1, with the ledger alone.
        (
            runs.make_on(device, "bf16", GRPO, mixed_precision=BF16),
            [(6, "stop"), (9, "die"), *TO_THE_END],
        ),
    ]
    if device == "cuda":
        plan += [
            (runs.make_on(device, "graph-twin", GRPO, mixed_precision=BF16, enforce_eager=False), TO_THE_END),
            (
                runs.make_on(device, "graph", GRPO, mixed_precision=BF16, enforce_eager=False),
                [(6, "stop"), (9, "die"), *TO_THE_END],
            ),
        ]
    runs.live(plan)
    return {paths.root.name.partition("-")[2]: paths for paths, _ in plan}


def test_bfloat16_interrupted_in_mid_step_ends_with_the_same_bits(lived: dict[str, RunPaths]) -> None:
    """bf16 layers over float32 parameters, stopped and killed among updates, bit for bit."""
    assert_same(lived["bf16"], lived["bf16-twin"])


@pytest.mark.gpu
def test_sampled_by_a_graph_it_ends_with_the_same_bits(lived: dict[str, RunPaths], device: str) -> None:
    """A run that samples by CUDA graphs, stopped and killed among updates, bit for bit."""
    if device == "cpu":
        pytest.skip("a CPU has no graphs")
    assert_same(lived["graph"], lived["graph-twin"])


def test_the_comparison_can_fail(lived: dict[str, RunPaths]) -> None:
    """bf16 computes other numbers than float32."""
    assert not compare(final(lived["bf16-twin"]), final(lived["twin"])).same


def test_a_checkpoint_holds_the_generator_of_the_device(lived: dict[str, RunPaths], device: str) -> None:
    """The GPU's generator in the runtime state of a real run."""
    names = load_runtime_state(final(lived["twin"]), 0, 1).rng.keys()
    assert ("cuda" in names) == (device == "cuda")


def test_a_run_killed_in_mid_step_ends_with_the_bits_of_its_twin(
    runs: Runs, lived: dict[str, RunPaths], device: str
) -> None:
    """SIGKILL among updates under deterministic algorithms, resumed by a new process, bit for bit."""
    paths = runs.make_on(device, "killed", PPO, every_steps=1)
    first = runs.start(paths, script={"rank": 0, "safe_point": 15, "action": "kill"})
    assert first.returncode != 0
    assert choose_resume(paths, "auto").name == "step_000001"
    second = runs.start(paths)
    assert second.returncode == 0, second.stderr
    assert "resumed step_000001" in second.stdout
    assert_same(paths, lived["twin"])


@pytest.mark.vllm
@pytest.mark.skipif(
    find_spec("vllm") is None, reason="NOT RUN: no vLLM here; not covered: vLLM's rollouts on the device"
)
def test_rollouts_of_vllm_are_neither_lost_nor_made_twice(runs: Runs, device: str) -> None:
    """vLLM as the sampler, bf16: killed while it scores, bit for bit, no token sampled twice."""
    made = [
        runs.make_on(device, name, GRPO, mixed_precision=BF16, engine="vllm", every_steps=1)
        for name in ("vllm-twin", "vllm")
    ]
    ended = runs.start(made[0])
    assert ended.returncode == 0, ended.stderr
    assert runs.start(made[1], script={"rank": 0, "safe_point": 12, "action": "kill"}).returncode != 0
    second = runs.start(made[1])
    assert second.returncode == 0, second.stderr
    assert_same(made[1], made[0])
