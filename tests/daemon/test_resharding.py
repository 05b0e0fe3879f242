"""The start of a run of verl with another number of ranks: the lead divides the checkpoint before they start."""

import asyncio
from pathlib import Path

import pytest
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.lead.attempt_start import ENVIRONMENT
from verl_slurm_daemon.lead.resume import ResumePoint, fit_ranks

from tests.builders import begun_run
from tests.fakes.torch_divider import fake_divider, shard_step
from tests.journals import read_events
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.storage import FreeSpace, judge_room
from verl_slurm.checkpoint.store.loop_checkpoint import LoopSave, commit_tree, for_ranks
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import RunConfig
from verl_slurm.verl.reshard import checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checkpoint,
        "ranks_python",
        lambda config, contained, module, places, **how: fake_divider(module, places),
    )


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return begun_run(tmp_path / "run")


def config(ranks: int) -> RunConfig:
    text = f"trainer: {{backend: verl, entry: ppo}}\ndistributed: {{dp_size: {ranks}, nodes: 1}}\n"
    return parse_config(text.encode(), "x.yaml", [])


def point(paths: RunPaths, ranks: int = 2, *more: str) -> ResumePoint:
    step = shard_step(paths.work(1), 4, ranks)
    for name in more:
        (step / name).touch()
    save = LoopSave(guest="verl", step=4, attempt=1, world_size=ranks)
    name = commit_tree(paths, save, {step.name: step}).name
    return ResumePoint(name, (), "", read_manifest(paths.checkpoints / name))


def started(paths: RunPaths, ranks: int, at: ResumePoint, *, leaving: bool = False) -> bool:
    async def start() -> bool:
        event = asyncio.Event()
        if leaving:
            event.set()
        journal = Journal(paths, attempt=1, job_id="1")
        return await fit_ranks(config(ranks), at, event, journal)

    return asyncio.run(start())


def told(paths: RunPaths, kind: str) -> list[dict[str, object]]:
    return [event for event in read_events(paths) if event["event"] == kind]


def test_the_ranks_find_a_copy_for_their_number_and_the_journal_says_so(paths: RunPaths) -> None:
    at = point(paths)
    assert started(paths, 3, at)
    assert read_manifest(for_ranks(paths, at.name, 3)).world_size == 3
    [event] = told(paths, "resharded")
    assert (event["name"], event["before"], event["after"]) == (at.name, 2, 3)
    # The next start uses it, and has nothing to tell.
    assert started(paths, 3, at)
    assert len(told(paths, "resharded")) == 1


def test_no_room_for_the_copy_is_waited_for_as_storage_is(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "room_for", lambda _, need: judge_room(FreeSpace(bytes=10), need))
    with pytest.raises(ENVIRONMENT, match="no room for the divided checkpoint"):
        started(paths, 3, point(paths))


def test_the_same_number_of_ranks_and_a_first_start_make_nothing(paths: RunPaths) -> None:
    assert started(paths, 2, point(paths))
    assert started(paths, 2, ResumePoint("", (), ""))
    assert list(paths.resharded.root.glob("checkpoints/*")) == []
    assert told(paths, "resharded") == []


def test_an_attempt_that_has_to_end_starts_no_ranks_and_keeps_nothing(paths: RunPaths) -> None:
    at = point(paths)
    assert not started(paths, 3, at, leaving=True)
    assert list(paths.resharded.root.glob("checkpoints/*")) == []
    assert told(paths, "resharded") == []


def test_what_cannot_be_divided_ends_the_start_with_the_reason(paths: RunPaths) -> None:
    at = point(paths, 2, "actor/__0_0.distcp")
    with pytest.raises(ConfigError, match="Megatron"):
        started(paths, 3, at)
