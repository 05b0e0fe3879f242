"""Whatever instant the power goes: what was promised is there, and nothing half-made is taken for whole.

Every state that a crash may leave (`disk.py`) of every scenario (`scenarios.py`) is made real and handed to the
real recovery. A cut after the promise is one of them: the last operation is behind it. In the quick run, of states
that differ only in what staging directories hold a few are tried; the exhaustive one (`make faults`,
VERL_SLURM_FAULTS=1) tries all, and random halves of what was not yet durable.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.disk import Tree, crash_states
from tests.faults.scenarios import EXHAUSTIVE, SCENARIOS, memory_directory
from tests.faults.world import World, plant, problems
from verl_slurm.checkpoint.format.specification import MANIFEST, STAGING_NAME

pytestmark = pytest.mark.torch


@pytest.fixture
def memory() -> Iterator[Path]:
    with memory_directory() as directory:
        yield directory


_SAMPLE = 40
"""In the quick run, one in so many of the other states is tried, too."""
_OFTEN = {
    *("a save", "save and prune", "a dual write", "bring home"),
    *("the nodes first, shared storage late", "a start sets a rotten one aside"),
}
"""CI runs these; `make test-all` and `make faults` run all."""


def _key(tree: Tree) -> frozenset[tuple[str, bytes | None]]:
    """`tree` without what staging directories hold beside a manifest."""
    kept = []
    for path, content in tree.items():
        parts = path.split("/")
        if len(parts) <= 3 or not STAGING_NAME.fullmatch(parts[2]) or parts[-1] == MANIFEST:
            kept.append((path, content))
    return frozenset(kept)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in _OFTEN else pytest.mark.variant) for name in SCENARIOS]
)
def test_a_crash_at_any_instant_loses_nothing_that_was_promised(name: str, memory: Path) -> None:
    scenario = SCENARIOS[name]
    with World.at(memory / "real", two_media=scenario.two_media) as world:
        scenario.prepare(world)
        tracer = world.trace(scenario.act)
    ops = tracer.recorded()
    seen, roughly = set(), set()
    num_tried = 0
    bad = []
    for state in crash_states(tracer.start, ops, num_random=20 if EXHAUSTIVE else 0):
        acked = scenario.promised | set(state.acked)
        key = (frozenset(state.tree.items()), acked)
        if key in seen:
            continue
        seen.add(key)
        rough = (_key(state.tree), acked)
        if rough in roughly and not EXHAUSTIVE and len(seen) % _SAMPLE:
            continue
        roughly.add(rough)
        num_tried += 1
        place = memory / "crashed"
        plant(state.tree, place)
        found = problems(place, world.truth, set(acked), set(scenario.removable))
        if found:
            bad.append(f"after {state.after} of {len(ops)}, {state.how}: {found[0]}")
        shutil.rmtree(place)
    print(f"{name}: {len(ops)} operations, {len(seen)} crash states, {num_tried} tried")
    assert num_tried > 1
    assert not bad, "\n".join([f"{len(bad)} of {num_tried}", *bad[:10]])
