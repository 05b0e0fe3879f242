"""Feeds mutated specimens to a parser and watches what it does: error class, CPU time, memory.

Input number `n` of a target depends on the seed, the target's name and `n` only, so any one can be made again.
"""

import random
import resource
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

from tests.fuzz.mutation import mutate_bytes, mutate_tree
from tests.fuzz.target import Target

MAX_MEMORY = 150_000_000
"""Bytes of memory that a parser may need, beside three times the input's own: a mutation may repeat megabytes."""
MAX_SECONDS = 5.0
"""CPU seconds for one input. The slowest honest one needs a fiftieth of a second."""
# Address space that the whole process may grow by: what asks for more would be killed on a small machine.
_MAX_SPACE = 6 << 30
# Memory is looked at once for so many inputs; where it was too much, they are fed again one by one.
_BATCH = 64


class _Hang(BaseException):
    """Not an Exception, so that no parser catches it."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An input that a parser did not stand."""

    target: str
    seed: int
    number: int
    what: str
    place: str
    """Where it was raised; one finding a place is reported."""
    trace: str = ""

    def command(self) -> str:
        """What feeds this input again."""
        return f"python -m tests.fuzz --target {self.target!r} --seed {self.seed} --only {self.number}"


@dataclass(kw_only=True)
class Outcome:
    """What came of a range of inputs. `taken` were accepted as valid."""

    inputs: int = 0
    taken: int = 0
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        self.inputs += other.inputs
        self.taken += other.taken
        places = {finding.place: finding for finding in reversed([*self.findings, *other.findings])}
        self.findings = list(reversed(places.values()))


@cache
def _specimens(target: Target) -> Sequence[bytes]:
    return target.specimens()


def input_of(target: Target, seed: int, number: int) -> bytes:
    """The input of that number."""
    draw = random.Random(f"{seed}/{target.name}/{number}")
    specimens = _specimens(target)
    data = draw.choice(specimens)
    if target.form and draw.random() < 0.6:
        data = mutate_tree(draw, data, target.form)
        if draw.random() < 0.1:
            data = mutate_bytes(draw, data, specimens)
    else:
        data = mutate_bytes(draw, data, specimens)
    return data if target.seal is None else target.seal(data)


def run(target: Target, seed: int, numbers: range) -> Outcome:
    """Feed the inputs of these numbers to `target`."""
    outcome = Outcome()
    with _limits():
        for start in range(numbers.start, numbers.stop, _BATCH):
            batch = range(start, min(start + _BATCH, numbers.stop))
            inputs = [input_of(target, seed, number) for number in batch]
            found: list[Finding | None] = []
            used = _memory_of(
                lambda fed=inputs, n=batch, to=found: to.extend(map(_feeder(target, seed), fed, n))
            )  # type: ignore[misc]
            outcome.add(
                Outcome(
                    inputs=len(batch),
                    taken=sum(one is _TAKEN for one in found),
                    findings=[one for one in found if one is not None and one is not _TAKEN],
                )
            )
            if used > MAX_MEMORY + 3 * max(map(len, inputs)):
                outcome.add(Outcome(findings=list(_hoarders(target, seed, batch, inputs))))
    return outcome


_TAKEN = Finding(target="", seed=0, number=0, what="", place="")


def _feeder(target: Target, seed: int) -> Any:
    def feed(data: bytes, number: int) -> Finding | None:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
            try:
                target.parse(data)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        except target.raises:
            return None
        except (Exception, _Hang) as error:  # noqa: BLE001 — that is what we are looking for
            last = traceback.extract_tb(error.__traceback__)[-1]
            return Finding(
                target=target.name,
                seed=seed,
                number=number,
                what=f"{type(error).__name__}: {error}"[:300],
                place=f"{target.name}: {type(error).__name__} at {_own_frame(error)} ({last.name})",
                trace="".join(traceback.format_exception(error, limit=-12)),
            )
        return _TAKEN

    return feed


def _own_frame(error: BaseException) -> str:
    """The innermost line of this project that the error passed."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "verl_slurm" in f.filename]
    return f"{frames[-1].filename.rpartition('verl_slurm')[2]}:{frames[-1].lineno}" if frames else "?"


def _hoarders(target: Target, seed: int, batch: range, inputs: Sequence[bytes]) -> Iterator[Finding]:
    feed = _feeder(target, seed)
    for number, data in zip(batch, inputs, strict=True):
        used = _memory_of(lambda data=data, number=number: feed(data, number))  # type: ignore[misc]
        if used > MAX_MEMORY + 3 * len(data):
            what = f"{used / 1e6:.0f} MB of memory for {len(data)} bytes"
            yield Finding(
                target=target.name, seed=seed, number=number, what=what, place=f"{target.name}: memory"
            )


def _memory_of(call: Any) -> int:
    """Bytes by which resident memory grew at its peak in `call`.

    Where the kernel does not let the mark be lowered, only what is above all that was before is seen.
    """
    try:
        with open("/proc/self/clear_refs", "w") as mark:
            mark.write("5")
    except OSError:
        pass
    before = _status("VmRSS:")
    call()
    return max(_status("VmHWM:") - before, 0)


def _status(key: str) -> int:
    with open("/proc/self/status") as lines:
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


@contextmanager
def _limits() -> Iterator[None]:
    def hang(number: int, frame: FrameType | None) -> None:
        raise _Hang(f"more than {MAX_SECONDS} s of CPU time")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    space = _status("VmSize:") + _MAX_SPACE
    former = signal.signal(signal.SIGVTALRM, hang)
    resource.setrlimit(
        resource.RLIMIT_AS, (space if hard == resource.RLIM_INFINITY else min(space, hard), hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, former)
