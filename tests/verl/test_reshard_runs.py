"""Runs of verl's SFT that come back with another number of ranks: the start divides the checkpoint, verl trains on."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.journals import Line, read_events
from tests.local_runs import finish, lead
from tests.verl.plain import cpu_environ
from tests.verl.runs import write_config
from tests.verl.tiny import make_model, make_sums, sft_words
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.submit.submission import carry_out, plan_submission

pytestmark = [pytest.mark.verl, pytest.mark.torch]

BATCH = 12
"""Of any of the numbers of ranks a multiple."""


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    place: Path = tmp_path_factory.mktemp("sums")
    # Of rows that do not fill a last batch, as in a real data set.
    model, data = make_model(place / "model"), make_sums(place / "sums.parquet", 100)
    return sft_words(model, data, save_freq=100, batch=BATCH, micro_batch=2)


def trained(
    root: Path, section: dict[str, object], ranks: int, last: int
) -> tuple[RunPaths, tuple[str, ...]]:
    """The run at `root`, gone on with on `ranks` ranks up to step `last`; and what its submission noted."""
    config = write_config(root.with_suffix(".yaml"), root, section, last)
    plan = plan_submission(config, [f"distributed.dp_size={ranks}"], cluster="local")
    carry_out(plan, prepare_only=True)
    paths = RunPaths(root)
    code = finish(lead(paths, environ=cpu_environ(os.environ)))
    logs = [path.read_text()[-3000:] for path in sorted(paths.logs.glob("*.log"))]
    assert code == 0, "\n".join([*map(str, read_events(paths)), *logs])
    return paths, tuple(plan.notes)


def events(paths: RunPaths, name: str) -> list[Line]:
    return [event for event in read_events(paths) if event["event"] == name]


def weights(paths: RunPaths, step: int, ranks: int) -> dict[str, Any]:
    import torch

    place = paths.checkpoints / f"step_{step:06d}" / f"global_step_{step}"
    shards = [
        torch.load(place / f"model_world_size_{ranks}_rank_{rank}.pt", weights_only=False)
        for rank in range(ranks)
    ]
    return {name: torch.cat([one[name].to_local() for one in shards]) for name in shards[0]}


@pytest.mark.long
@pytest.mark.scenario("L21")
@pytest.mark.variant
def test_a_run_on_two_ranks_goes_on_with_three_and_one_on_the_same_rows(
    tmp_path: Path, section: dict[str, object]
) -> None:
    """Rows of another place in the data, or moments of another parameter, would give other weights."""
    import torch

    straight, _ = trained(tmp_path / "straight", section, 2, 6)
    root = tmp_path / "run"
    paths, notes = trained(root, section, 2, 2)
    assert not any("divides it" in note for note in notes), notes
    for ranks, last in ((3, 4), (1, 6)):
        before = read_manifest(paths.checkpoints / f"step_{last - 2:06d}")
        paths, notes = trained(root, section, ranks, last)
        assert any(f"divides it among {ranks}" in note for note in notes), notes
        told = events(paths, "resharded")[-1]
        assert (told["name"], told["before"], told["after"]) == (before.name, before.world_size, ranks)
        # What was saved stays what it was, beside the copy that verl has read.
        assert verify(paths.checkpoints / before.name).manifest == before
        assert verify(paths.resharded.checkpoints / before.name).ok
        assert os.listdir(paths.resharded.checkpoints).count("latest") == 1
        assert read_manifest(paths.checkpoints / f"step_{last:06d}").world_size == ranks
    ours, theirs = weights(paths, 6, 1), weights(straight, 6, 2)
    assert ours.keys() == theirs.keys()
    # Sums of another order round otherwise (4e-6 on average, seen); rows of another place would move each weight by
    # a part of its step, which is 1e-3.
    apart = torch.cat([(value - theirs[name]).flatten() for name, value in ours.items()])
    assert apart.abs().mean() < 2e-5
