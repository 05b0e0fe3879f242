"""A loop that says `any_ranks` goes on with more or fewer ranks, with the same state and the same prompts in a step."""

from collections import defaultdict
from pathlib import Path

import pytest
from torch import nn

import verl_slurm
from tests.builders import write_config
from tests.loops.test_loop import Alone, train as train_worker
from verl_slurm.base.errors import ConfigError
from verl_slurm.checkpoint.store.catalog import newest_checkpoint
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.wire.messages import RankRefused

pytestmark = pytest.mark.torch

WORKER = Path(__file__).with_name("any_ranks_worker.py")


def train(run_dir: Path, steps: int, num_ranks: int, **environ: str) -> None:
    train_worker(run_dir, steps, num_ranks=num_ranks, worker=WORKER, **environ)


def losses(run_dir: Path) -> list[float]:
    """The mean over the ranks, for each step."""
    found = defaultdict(list)
    for line in Path(f"{run_dir}.said").read_text().splitlines():
        _, step, loss, _ = line.split()
        found[int(step)].append(float(loss))
    return [sum(found[step]) / len(found[step]) for step in sorted(found)]


@pytest.mark.long
def test_two_ranks_go_on_as_three_as_one_and_as_two_with_the_prompts_of_a_run_that_nobody_disturbed(
    tmp_path: Path,
) -> None:
    straight, changed = tmp_path / "straight", tmp_path / "changed"
    train(straight, 8, 2)
    for steps, num_ranks in ((2, 2), (4, 3), (6, 1), (8, 2)):
        train(changed, steps, num_ranks)
        manifest = read_manifest(newest_checkpoint(changed))
        assert (manifest.step, manifest.world_size) == (steps, num_ranks)
    assert losses(changed) == pytest.approx(losses(straight), rel=1e-4)
    assert losses(changed)[:2] == losses(straight)[:2]
    drawn = [line.split()[3] for line in Path(f"{changed}.said").read_text().splitlines()]
    assert len(set(drawn)) == len(drawn) == 2 * 2 + 2 * 3 + 2 + 2 * 2, "a rank drew another one's numbers"


@pytest.mark.long
def test_state_that_each_rank_has_for_itself_is_refused_by_name(tmp_path: Path) -> None:
    train(tmp_path / "run", 2, 2, OWN_STATE="1")
    with pytest.raises(AssertionError, match=r"(?s)differs from rank to rank.*noise/state"):
        train(tmp_path / "run", 4, 3, OWN_STATE="1")


@pytest.mark.parametrize("any_ranks", [False, True])
def test_a_run_that_may_lose_nodes_takes_such_a_loop_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, any_ranks: bool
) -> None:
    alone = Alone(tmp_path / "run")
    write_config(alone.paths, backend="command", command=("train.py",), nodes=2, min_nodes=1)
    with alone.served(monkeypatch) as agent:
        if any_ranks:
            with verl_slurm.run(model=nn.Linear(2, 2), any_ranks=True) as run:
                assert list(run.steps(1)) == [0]
        else:
            with pytest.raises(ConfigError, match="any_ranks=True"), verl_slurm.run(model=nn.Linear(2, 2)):
                raise AssertionError
        said = agent.heard()
    assert any(isinstance(message, RankRefused) for message in said) is not any_ranks
