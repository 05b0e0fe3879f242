"""A disk that refuses, at every call that changes it, once and for ever: a save fails loudly or is whole.

After each fault: what was there before verifies, nothing half-made has a checkpoint's name, and when the disk is
well again the next save of the same saver goes through. With two media, the other one takes the save. The quick
run fails each call for ever with EIO and once with ENOSPC; the exhaustive one (`make faults`) tries all four.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.scenarios import EXHAUSTIVE, memory_directory
from tests.faults.tracing import Call, Fault, Tracer
from tests.faults.world import LOCAL, SHARED, World, plant, problems, tree_of
from tests.lanes import with_variants
from verl_slurm.base.errors import TierError
from verl_slurm.checkpoint.decide.retention import plan_prune
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.local_copy import assemble, list_parts, part_problems, send_home
from verl_slurm.checkpoint.store.pruning import apply_prune
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.save.ranks.collective import RanksFailed
from verl_slurm.save.ranks.saver import SavedCheckpoint

pytestmark = [pytest.mark.torch, pytest.mark.long]

KINDS = [
    (number, for_ever)
    for number in (errno.EIO, errno.ENOSPC)
    for for_ever in (False, True)
    if EXHAUSTIVE or for_ever == (number == errno.EIO)
]
"""Error number, whether for ever."""


@pytest.fixture
def memory() -> Iterator[Path]:
    with memory_directory() as directory:
        yield directory


def _faults(calls: list[Call], kinds: list[tuple[int, bool]]) -> Iterator[Fault]:
    """One of each kind at each call that can fail so: removing takes no room."""
    for call in calls:
        for number, for_ever in kinds:
            if number != errno.ENOSPC or call.name not in ("unlink", "remove", "rmdir"):
                yield Fault(call, number, for_ever)


def _whole(world: World) -> set[str]:
    """Names under which a whole checkpoint lies on shared storage. Anything else under such a name is a failure."""
    names = {path.name for path in world.paths.checkpoints.glob("step_*")}
    for name in names:
        verdict = verify(world.paths.checkpoints / name, threads=1)
        assert verdict.ok, verdict.one_line()
    return names


def _try(world: World, step: int, fault: Fault | None) -> tuple[SavedCheckpoint | None, Tracer]:
    done: list[SavedCheckpoint] = []
    with Tracer(world.root, fault) as tracer:
        try:
            done.append(world.save(step))
        except RanksFailed as error:
            assert os.strerror(fault.number if fault else 0) in str(error)  # noqa: PT017 - whichever it is, it is said
    return (done[0] if done else None), tracer


def _calls_of_a_save(world: World, step: int) -> list[Call]:
    done, tracer = _try(world, step, None)
    assert done is not None
    assert done.problem == ""
    return tracer.calls


def _forget_but(world: World, *steps: int) -> None:
    """Keep the directories small."""
    names = {f"step_{step:06d}" for step in steps}
    for directory in (world.paths.checkpoints, world.local):
        for path in directory.glob("step_*") if directory.is_dir() else ():
            if path.name not in names:
                shutil.rmtree(path)


def test_a_save_to_a_disk_that_refuses_is_whole_or_loudly_not_there(memory: Path) -> None:
    with World.at(memory / "w", two_media=False) as world:
        world.save(1)
        calls = _calls_of_a_save(world, 2)
        num_faults = num_failed = 0
        for fault in _faults(calls, KINDS):
            num_faults += 1
            before, step = _whole(world), 10 + num_faults * 2
            done, tracer = _try(world, step, fault)
            assert tracer.hits, f"{fault} did not come"
            now = _whole(world)
            assert before <= now, fault
            if done is None:
                num_failed += 1
            else:
                assert done.name in now, fault
            after, _ = _try(world, step + 1, None)
            assert after is not None, fault
            assert after.problem == "", fault
            assert world.paths.latest.read_text() == after.name + "\n", fault
            _forget_but(world, step + 1)
    print(f"one medium: {num_faults} faults, {num_failed} saves lost, all said")
    assert num_failed > 0.7 * num_faults  # but for the hint and the tidying up


def test_a_write_that_takes_only_half_is_gone_on_with(memory: Path) -> None:
    with World.at(memory / "w", two_media=True) as world:
        world.save(1)
        writes = [call for call in _calls_of_a_save(world, 2) if call.name == "write"]
        assert len(writes) > 20
        for step, call in enumerate(writes, start=3):
            done, tracer = _try(world, step, Fault(call, 0, for_ever=False))
            assert tracer.hits, f"a short {call} did not come"
            assert done is not None, call
            assert done.problem == "", call
            assert done.name in _whole(world), call
            assert part_problems(list_parts(world.local)[0]) == [], call
            _forget_but(world, step)


@pytest.mark.parametrize("broken", with_variants(LOCAL, SHARED))
def test_when_one_of_two_media_refuses_the_other_takes_the_save(memory: Path, broken: str) -> None:
    with World.at(memory / "w", two_media=True) as world:
        world.save(1)
        calls = [call for call in _calls_of_a_save(world, 2) if call.path.split("/")[0] == broken]
        num_faults = num_degraded = 0
        for fault in _faults(calls, KINDS):
            num_faults += 1
            before, step = _whole(world), 10 + num_faults * 2
            done, tracer = _try(world, step, fault)
            assert tracer.hits, f"{fault} did not come"
            assert done is not None, fault
            assert before <= _whole(world), fault
            assert done.on_shared == (done.name in _whole(world)) or broken == SHARED, fault
            if broken == LOCAL:
                assert done.on_shared, fault
            parts = {part.name: part for part in list_parts(world.local)}
            if not done.on_shared or not done.problem:
                assert part_problems(parts[done.name]) == [], fault
            num_degraded += done.problem != ""
            reasons = [
                os.strerror(fault.number),
                *([os.strerror(errno.ENOENT)] if fault.call.name == "mkdir" else []),
            ]
            assert done.problem == "" or any(reason in done.problem for reason in reasons), fault
            after, _ = _try(world, step + 1, None)
            assert after is not None, fault
            assert (after.on_shared, after.problem) == (True, ""), fault
            assert {path.name for path in world.local.glob(".*.tmp")} <= {
                part.path.name for part in list_parts(world.local)
            }, fault
            _forget_but(world, step + 1)
    print(f"{broken} broken: {num_faults} faults, {num_degraded} degraded saves")
    assert num_degraded > 0.7 * num_faults


def _prune(world: World) -> None:
    apply_prune(world.paths, plan_prune(list_checkpoints(world.paths), 1))


def _bring_home(world: World) -> None:
    for part in list_parts(world.local):
        if not (world.paths.checkpoints / part.name).exists():
            send_home(part, world.paths)
    assemble(world.paths)


@pytest.mark.parametrize("act", [_prune, _bring_home])
def test_what_is_tidied_or_brought_home_on_a_disk_that_refuses_is_done_the_next_time(
    memory: Path, act: object
) -> None:
    assert callable(act)
    home = act is _bring_home
    with World.at(memory / "w", two_media=True) as world:
        for step in (1, 2):
            world.save(step)
        world.save(3, seconds_left=0.0 if home else None)
        removable = set() if home else {"step_000001", "step_000002"}
        start = tree_of(world.root)
        with Tracer(world.root) as tracer:
            act(world)
        for number, fault in enumerate(_faults(tracer.calls, KINDS)):
            copy = memory / f"{number}"
            plant(dict(sorted(start.items())), copy)
            other = World(copy, world.saver, world.parts, world.place)
            with Tracer(copy, fault) as broken:
                try:
                    act(other)
                except (OSError, TierError) as error:
                    cause = error.__cause__ if isinstance(error, TierError) else error
                    # Both ends are right, but no third.
                    assert isinstance(cause, OSError) and cause.errno == fault.number  # noqa: PT018
            assert broken.hits, f"{fault} did not come"
            found = problems(copy, world.truth, {"step_000001", "step_000002", "step_000003"}, removable)
            assert found == [], fault
            act(other)
            assert "step_000003" in _whole(other)
            shutil.rmtree(copy)
