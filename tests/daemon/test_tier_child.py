"""The mover as a child of the lead: woken, interrupted, and of no harm when it fails."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from verl_slurm_daemon.lead import tier_child
from verl_slurm_daemon.lead.tier_child import TierMover

from tests.fakes.allocation import first_attempt
from tests.journals import read_events
from verl_slurm.base.errors import TierAway, TierError
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig, TierConfig

COLD = TierConfig(name="cold", kind="archive", path="/nonexistent")


class Started:
    """Commands in place of the mover's, and word of each start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
        self.count, self.again = 0, asyncio.Event()

        def command(what: str, paths: RunPaths) -> list[str]:
            assert what == "sync"
            self.count += 1
            self.again.set()
            return words

        monkeypatch.setattr(tier_child, "_command", command)

    async def once_more(self) -> None:
        async with asyncio.timeout(60):
            await self.again.wait()
        self.again.clear()


def mover_of(tmp_path: Path, config: RunConfig) -> tuple[TierMover, RunPaths]:
    paths = RunPaths(tmp_path)
    paths.run_yaml.touch()
    private_dir(paths.root)
    return TierMover(first_attempt(paths, config)), paths


@contextlib.asynccontextmanager
async def running(mover: TierMover):  # type: ignore[no-untyped-def]
    task = asyncio.create_task(mover.run())
    yield task
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_a_pass_follows_the_start_and_every_verified_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        started = Started(monkeypatch, ["sh", "-c", "echo away >&2; exit 27"])
        mover, _ = mover_of(tmp_path, RunConfig(tiers=(COLD,)))
        async with running(mover):
            await started.once_more()
            mover.wake()
            await started.once_more()
        assert started.count == 2

    asyncio.run(main())
    assert read_events(RunPaths(tmp_path))[0]["detail"] == "away"


def test_a_save_that_is_urgent_ends_an_upload_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        started = Started(monkeypatch, ["sleep", "600"])
        mover, _ = mover_of(tmp_path, RunConfig(tiers=(COLD,)))
        async with running(mover):
            await started.once_more()
            mover.wake()
            while mover._child is None:  # noqa: ASYNC110  (a fork is no event)
                await asyncio.sleep(0)
            mover.interrupt()
            await started.once_more()

    asyncio.run(main())


def test_a_child_that_cannot_be_started_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        started = Started(monkeypatch, ["/nonexistent/program"])
        mover, _ = mover_of(tmp_path, RunConfig(tiers=(COLD,)))
        async with running(mover) as task:
            await started.once_more()
            mover.wake()
            await started.once_more()
            assert not task.done()

    asyncio.run(main())


@pytest.mark.parametrize("end", ["kill -ALRM $$", f"exit {TierAway.child_code}"])
def test_a_tier_that_gives_no_bytes_is_waited_for_as_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(tier_child, "_command", lambda *_: ["sh", "-c", end])
    with pytest.raises(OSError, match="nothing could be brought back from the run's tiers"):
        tier_child.restore_newest(RunPaths(tmp_path))


@pytest.mark.parametrize("fetching", [False, True])
def test_a_tier_that_says_nothing_in_time_holds_up_no_start_that_has_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetching: bool
) -> None:
    """Unless it has said that there is a newer one."""
    said = "echo '{}';" * fetching
    monkeypatch.setattr(tier_child, "_command", lambda *_: ["sh", "-c", f"{said} kill -ALRM $$"])
    with pytest.raises(OSError if fetching else TierError, match="in time"):
        tier_child.restore_newest(RunPaths(tmp_path), above="step_000002")


def test_a_run_without_tiers_has_no_mover(tmp_path: Path) -> None:
    mover, paths = mover_of(tmp_path, RunConfig())
    asyncio.run(mover.run())
    assert read_events(paths) == []
