"""Whole runs with vLLM as the rollout engine: real ranks, really ended. Each start of the ranks starts vLLM.

The safe points of a process of this configuration, by number: tests/trainer/test_loop.py. Both ranks sample together
(tensor parallel), from an actor that is sharded over them.
"""

from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from tests.ledger_stats import ledger_stats
from tests.trainer.test_loop import Runs, _assert_nothing_changed, _replayed
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config import load
from verl_slurm.config.schema import DistributedConfig
from verl_slurm.trainer.quickstart import tiny_model as quickstart_model
from verl_slurm.trainer.quickstart.arithmetic_data import build_data

pytestmark = [
    pytest.mark.torch,
    pytest.mark.vllm,
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="no vLLM here: make vllm, then .venv-vllm/bin/python"
    ),
]


class VLLMRuns(Runs):
    def __init__(self, root: Path) -> None:
        model = quickstart_model.build_model(root / "wide", head_dim=32)
        super().__init__(root, model, build_data(root / "data"))

    def make_with(self, name: str, *, tensor_parallel: int, trainer_tensor_parallel: int = 1) -> RunPaths:
        paths = self.make(name)
        config = load.load_resolved(paths.run_yaml)
        size = trainer_tensor_parallel
        shape = DistributedConfig(dp_size=2 // size, tp_size=size, nodes=1, device="cpu")
        config = msgspec.structs.replace(config, distributed=shape)
        rollout = msgspec.structs.replace(config.rollout, engine="vllm", tensor_parallel_size=tensor_parallel)
        write_file(paths.run_yaml, load.dump(msgspec.structs.replace(config, rollout=rollout)))
        return paths


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> VLLMRuns:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart_model, "_WARM_STEPS", 20)
        return VLLMRuns(tmp_path_factory.mktemp("vllm"))


def test_a_killed_run_goes_on_and_ends_with_the_same_bits_and_no_token_sampled_twice(runs: VLLMRuns) -> None:
    undisturbed = runs.make_with("undisturbed", tensor_parallel=2)
    ended = runs.start(undisturbed)
    assert ended.returncode == 0, ended.stderr
    paths = runs.make_with("killed", tensor_parallel=2)
    first = runs.start(paths, script={"rank": 0, "safe_point": 16, "action": "kill"})
    assert first.returncode != 0
    # Rank 1's journal is lost: what it sampled must be sampled again, together with a rank that needs nothing.
    paths.ledger_segment(1, 1).unlink()
    second = runs.start(paths)
    assert second.returncode == 0, second.stderr
    assert _replayed(second) >= 2
    _assert_nothing_changed(paths, undisturbed)


def test_a_sync_that_is_lost_ends_the_run_before_it_learns_from_it(runs: VLLMRuns) -> None:
    """Each rank samples alone here, on the group of both."""
    paths = runs.make_with("lost", tensor_parallel=1)
    ended = runs.start(paths, script={"rank": None, "safe_point": 12, "action": "lose_sync"})
    assert ended.returncode != 0
    assert "the rollout engine's log probabilities are not the policy's: step 2 (found a mean" in ended.stderr
    assert f"exitcode  : {ExitCode.ROLLOUT:d} " in ended.stderr
    # Whether the save of step 1, which goes on beside the training, was ready by then is chance.
    assert "step 1/2" in ended.stdout
    assert "step 2/2" not in ended.stdout
    assert not paths.checkpoint(2).exists()


@pytest.mark.variant
def test_ranks_that_train_one_model_together_sample_it_together(runs: VLLMRuns) -> None:
    """One replica of two ranks, which deals a micro-batch out, and one vLLM of the same two."""
    paths = runs.make_with("replica", tensor_parallel=2, trainer_tensor_parallel=2)
    ended = runs.start(paths)
    assert ended.returncode == 0, ended.stderr
    verdict = verify(paths.checkpoint(2))
    assert verdict.ok, verdict.problems
    journal = ledger_stats(paths)
    assert (journal.duplicates, journal.problems) == ((), ())
