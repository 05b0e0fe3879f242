"""The tokens of responses that are still being sampled: logged as an engine gives them out, and found after a kill. No
verl.

A response that is sampled again from its first token after a kill favours short responses: long ones are hit more
often (DeepSeek-V4, section 5.2.3). So a response goes on from the tokens that are logged, unless the engine is known to
give the same tokens again.

A call is one request to the engine: a turn of a session of a prompt. It is named by `Call`, which the process that asks
puts into the engine's request id. The process of the engine writes:

```
head     [attempt, calls], of each call that has new tokens: [position, session, turn, digest, start, number of new
         tokens, version of the weights or nil, whether the response ended here]
arrays   ids        int64: the new tokens of all these calls, one after the other
         log_probs  float32: theirs, with which they were sampled; absent if the engine gave none
```

`start` counts the tokens before the new ones, those of an earlier attempt included. The records are those of
`runtime_state.ledger`, under the highest position in them; segments lie in `RUN/ledger/tokens/`.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from verl_slurm.base.errors import UNREADABLE, CheckpointCorrupt
from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state.format import Arrays
from verl_slurm.runtime_state.ledger import Ledger, entry, records

_EVERY_S = 0.25
"""Between two writes: what SIGKILL may cost. Each is one write and one fdatasync, whatever the number of responses."""
_COMPACT_BYTES = 64 << 20
_KEPT_S = 60.0
"""How long an ended call's tokens outlive a compaction: the worker may not have made the response durable yet."""

_REQUEST = re.compile(r"vs-(\d{1,18})-(\d{1,18})-(\d{1,18})-(\d{1,18})-([0-9a-f]+)", re.ASCII)


class Call(NamedTuple):
    """One request to the engine.

    Attributes:
        position: of the prompt in the order of the data.
        prompt_tokens: of the turn, without tokens that were logged by an earlier attempt.
        digest: hexadecimal, of the turn's prompt and the sampling parameters.
    """

    position: int
    session: int
    turn: int
    prompt_tokens: int
    digest: str

    @property
    def request_id(self) -> str:
        return f"vs-{self.position}-{self.session}-{self.turn}-{self.prompt_tokens}-{self.digest}"


def call_of(request_id: str) -> Call | None:
    """Returns the call whose `request_id` this is; None: another's."""
    match = _REQUEST.fullmatch(request_id)
    return match and Call(int(match[1]), int(match[2]), int(match[3]), int(match[4]), match[5])


def token_paths(paths: RunPaths) -> RunPaths:
    """Returns the names of the token log's segments: below the ledger, to be set aside with it."""
    return RunPaths(paths.ledger / "tokens", run=paths.run)


@dataclass
class _Logged:
    """New tokens of one call, as a record has them; `key`: `Call[:3]`."""

    key: tuple[int, int, int]
    digest: str
    start: int
    ids: list[int]
    log_probs: list[float] | None
    version: int | None
    ended: bool = False


_Whole = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_NewTokens = tuple[_Whole, _Whole, _Whole, str, _Whole, _Whole, int | None, bool]


class Calls(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the head of a record says."""

    attempt: _Whole
    calls: list[_NewTokens]


class TokenLog:
    """Writes the tokens of one engine's process, each `every_s` seconds from a thread.

    A disk that refuses costs the log and no response: it is told once, in the process's own log.

    Args:
        rank: of this engine among those of the run, for the name of its segment.
    """

    def __init__(self, paths: RunPaths, attempt: int, rank: int, *, every_s: float = _EVERY_S) -> None:
        self._ledger = Ledger(token_paths(paths), attempt, rank)
        self._attempt, self._every_s, self._number, self._written = attempt, every_s, 0, 0
        self._lock = threading.Lock()
        self._new: list[tuple[Call, _Logged]] = []
        self._newest: dict[Call, _Logged] = {}
        # Of calls whose tokens may still be asked for: when each ended.
        self._needed: dict[Call, float | None] = {}
        self._closing = threading.Event()
        self._refused = False
        self._thread = threading.Thread(target=self._run, name="token-log", daemon=True)
        self._thread.start()

    def add(
        self,
        call: Call,
        start: int,
        ids: Sequence[int],
        log_probs: Sequence[float] | None,
        *,
        version: int | None = None,
        ended: bool = False,
    ) -> None:
        """Notes new tokens, in memory; they are in the kernel after the next write, and on the disk after the one that
        follows.

        Args:
            start: tokens of the response before these.
            version: of the weights that sampled them.
            ended: no more follow: the response is complete.
        """
        with self._lock:
            new = self._newest.get(call)
            # Tokens that do not follow: the response was on another engine meanwhile, or has begun anew here.
            if new is None or start != new.start + len(new.ids):
                kept: list[float] | None = None if log_probs is None else []
                new = self._newest[call] = _Logged(call[:3], call.digest, start, [], kept, version)
                self._new.append((call, new))
            new.ids += ids
            if new.log_probs is not None and log_probs is not None:
                new.log_probs += log_probs
            new.ended = ended

    def close(self) -> None:
        """Writes what is new, and gives the segment back."""
        self._closing.set()
        self._thread.join()
        self._ledger.close()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            self.write()
        self.write()

    def write(self) -> None:
        """Writes what is new; the thread calls it, and one caller at a time may."""
        with self._lock:
            new, self._new, self._newest = self._new, [], {}
        if not new:
            return
        now = time.monotonic()
        self._needed.update((call, now if one.ended else None) for call, one in new)
        self._number = (self._number + 1) & 0xFFFFFFFF  # distinguishes records of one position
        try:
            calls, arrays = _record(self._attempt, [one for _, one in new])
            position = max(call.position for call, _ in new)
            self._written += self._ledger.append_many([entry(position, self._number, arrays, calls)])
            if self._written > _COMPACT_BYTES:
                self._compact(now)
        except (OSError, ValueError) as error:
            if not self._refused:
                self._refused = True
                logging.getLogger(__name__).warning(
                    "tokens of unfinished responses are not logged: %s", error
                )

    def _compact(self, now: float) -> None:
        self._needed = {
            call: ended for call, ended in self._needed.items() if ended is None or now - ended < _KEPT_S
        }
        self._ledger.compact(min((call.position for call in self._needed), default=0))
        self._written = 0


@dataclass(frozen=True)
class Prefix:
    """The logged tokens of a response.

    Attributes:
        log_probs: those with which the tokens were sampled; None: the engine gave none.
        version: of the weights that sampled the first of them.
        ended: the response is complete.
    """

    ids: list[int]
    log_probs: list[float] | None
    version: int | None
    ended: bool


class Prefixes:
    """What was logged until now, read once. `report` gets a line for each part that cannot be read."""

    def __init__(self, paths: RunPaths, *, report: Callable[[str], None]) -> None:
        self._found: dict[tuple[int, int, int], tuple[str, Prefix]] = {}
        for _, logged in groupby(_read(paths, report), key=itemgetter(0)):
            # An attempt's are ordered by engine, and a response may have moved to one that comes earlier. In the order
            # of `start` those left over follow each other, if at all.
            later = [one for _, one in logged if not self._take(one)]
            for one in sorted(later, key=attrgetter("start")):
                self._take(one)

    def __len__(self) -> int:
        return len(self._found)

    def find(self, call: Call) -> Prefix | None:
        """Returns what is logged of a response; None: nothing, or of another prompt or other sampling parameters."""
        digest, prefix = self._found.get(call[:3], ("", None))
        return prefix if digest == call.digest else None

    def _take(self, one: _Logged) -> bool:
        """Returns whether these tokens follow those that are known. A gap is left by a write that failed."""
        known, before = self._found.get(one.key, ("", None))
        if before is None or known != one.digest:
            before = Prefix([], None if one.log_probs is None else [], one.version, False)
        if one.start > len(before.ids):
            return False
        # In place, as a response may have any number of calls. What was logged after `start` was not used.
        before.ids[one.start :] = one.ids
        kept = before.log_probs if one.log_probs is not None else None
        if kept is not None:
            kept[one.start :] = one.log_probs or ()
        version = before.version if one.start else one.version
        self._found[one.key] = one.digest, Prefix(before.ids, kept, version, one.ended)
        return True


def _read(paths: RunPaths, report: Callable[[str], None]) -> Iterator[tuple[int, _Logged]]:
    """Yields what is logged, with the attempt that has logged it."""
    for _, said, arrays in records(token_paths(paths), Calls, from_step=0, report=report):
        try:
            found = _unpack(said.calls, arrays)
        except (KeyError, *UNREADABLE) as error:
            report(
                CheckpointCorrupt(
                    "a record of the token log cannot be read",
                    where=token_paths(paths).ledger,
                    found=error,
                    expected="calls, ids and log_probs as runtime_state/token_log.py specifies",
                    remedy="its tokens are sampled again; check the storage",
                ).one_line()
            )
        else:
            yield from ((said.attempt, one) for one in found)


def _unpack(calls: list[_NewTokens], arrays: Arrays) -> list[_Logged]:
    at, found = 0, []
    ids, log_probs = _column(arrays["ids"], np.int64), None
    if "log_probs" in arrays:
        log_probs = _column(arrays["log_probs"], np.float32)
        if len(log_probs) != len(ids):
            raise ValueError(f"{len(log_probs)} log probabilities of {len(ids)} tokens")
    for position, session, turn, digest, start, count, version, ended in calls:
        new, their = ids[at : at + count], None
        if log_probs is not None:
            their = log_probs[at : at + count]
        at += count
        found.append(_Logged((position, session, turn), digest, start, new, their, version, ended))
    if at != len(ids):
        raise ValueError(f"{at} tokens belong to its calls, and it has {len(ids)}")
    return found


def _column(array: np.ndarray, dtype: type[np.generic]) -> list[Any]:
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"{array.ndim} dimensions of {array.dtype}, expected 1 of {np.dtype(dtype)}")
    values: list[Any] = array.tolist()
    return values


def _record(attempt: int, new: Sequence[_Logged]) -> tuple[Calls, Arrays]:
    calls: list[_NewTokens] = [
        (*one.key, one.digest, one.start, len(one.ids), one.version, one.ended) for one in new
    ]
    arrays: Arrays = {"ids": np.array([token for one in new for token in one.ids], dtype=np.int64)}
    # All calls of an engine are asked for them, or none: verl's setting is one for the run.
    if all(one.log_probs is not None for one in new):
        arrays["log_probs"] = np.array(
            [value for one in new for value in one.log_probs or ()], dtype=np.float32
        )
    return Calls(attempt, calls), arrays
