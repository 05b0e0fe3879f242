"""Many inputs over several processes, and how many each parser gets.

Not in `__main__`: processes that are started afresh cannot import from there.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from tests.fuzz.engine import Outcome, run
from tests.fuzz.table import TARGETS
from tests.fuzz.target import Target

_CHUNK = 2000


def shares(total: int) -> dict[Target, int]:
    """How many of `total` inputs each target gets: the dearer, the fewer; each at least one."""
    weight = {target: target.cost**-0.75 for target in TARGETS}
    return {target: max(1, round(total * part / sum(weight.values()))) for target, part in weight.items()}


def _work(name: str, seed: int, start: int, stop: int) -> tuple[str, Outcome]:
    target = next(target for target in TARGETS if target.name == name)
    return name, run(target, seed, range(start, stop))


def _chunks(counts: dict[Target, int]) -> Iterator[tuple[str, int, int]]:
    for target, count in counts.items():
        for start in range(0, count, _CHUNK):
            yield target.name, start, min(start + _CHUNK, count)


def run_all(counts: dict[Target, int], seed: int, jobs: int) -> dict[str, Outcome] | None:
    """The outcome of each target by name, or None where a process died."""
    outcomes = {target.name: Outcome() for target in counts}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {
            pool.submit(_work, name, seed, start, stop): (name, start)
            for name, start, stop in _chunks(counts)
        }
        try:
            for done in as_completed(waiting):
                name, outcome = done.result()
                outcomes[name].add(outcome)
        except BrokenProcessPool:
            print("a parser killed its process; one of these inputs did it:")
            for future, (name, start) in waiting.items():
                if not future.done() or future.exception() is not None:
                    last = start + _CHUNK - 1
                    print(f"  python -m tests.fuzz --target {name!r} --seed {seed} --only {start} ... {last}")
                    break
            return None
    return outcomes
