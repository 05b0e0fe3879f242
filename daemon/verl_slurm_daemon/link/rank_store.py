"""Holds the keys under which the ranks of one restart find each other: torch's `Store`, kept in the lead.

It keeps the promises of `torch.distributed.Store` as TCPStore does: an absent counter is 0, and `compare_set`
with an empty expectation creates. Nothing here touches a socket. All of it runs in the lead's loop, so an
operation is atomic.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from verl_slurm.wire.messages import MAX_VALUE, StoreAnswer, StoreCall

# TCPStore's own limit, as those of one key and one value in `wire.messages`.
MAX_KEYS = 131_072
MAX_BYTES = 256 * 1024 * 1024
"""Of all keys and values. gloo needs 154 + 8 N bytes for each of N ranks and each group."""
MAX_WAITING = 65_536
_LONGEST_S = 7 * 86_400.0
_KEY_COST = 100
"""Bytes of overhead of an entry, besides its key and value."""


@dataclass(eq=False)
class _Waiter:
    call: StoreCall
    answer: Callable[[StoreAnswer], None]
    missing: set[str]
    timer: asyncio.TimerHandle | None = field(default=None)


class RankStore:
    """The keys of one restart. `close` answers all calls that still wait."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._waiting: dict[str, deque[_Waiter]] = {}
        self._popping: dict[str, deque[_Waiter]] = {}
        self._waiters = 0
        self._bytes = 0

    def call(self, call: StoreCall, answer: Callable[[StoreAnswer], None]) -> None:
        """Carries out the call. `answer` is called once: now, when the key appears, or when the time is over."""
        reason = self._refusal(call)
        if reason:
            answer(StoreAnswer(call=call.call, outcome="refused", reason=reason))
            return
        # ---- calls that may have to wait: for keys, or for an entry of a queue
        if call.op in ("get", "wait"):
            missing = {key for key in call.keys if key not in self._values}
            if missing:
                self._wait(call, answer, missing)
                return
        if call.op == "pop" and not self._queues.get(call.keys[0]):
            self._wait(call, answer, set())
            return
        # ---- all others are answered at once
        try:
            value, number = self._do(call)
        except ValueError as error:
            answer(StoreAnswer(call=call.call, outcome="refused", reason=str(error)))
            return
        answer(StoreAnswer(call=call.call, outcome="ok", value=value, number=number))

    def close(self) -> None:
        """Ends the store, because the restart is over."""
        # By identity: a call that waits for several keys stands in several queues, and is answered once.
        waiters = {id(w): w for many in (*self._waiting.values(), *self._popping.values()) for w in many}
        for waiter in waiters.values():
            self._end(
                waiter,
                StoreAnswer(
                    call=waiter.call.call, outcome="refused", reason="this restart of the ranks is over"
                ),
            )
        self._values, self._queues, self._bytes = {}, {}, 0

    def _refusal(self, call: StoreCall) -> str:
        """Returns why `call` cannot be done; empty: it can."""
        wanted = {"count": 0, "wait": len(call.keys), "check": len(call.keys)}.get(call.op, 1)
        values = {"set": 1, "append": 1, "push": 1, "compare_set": 2}.get(call.op, 0)
        if len(call.keys) != wanted or len(call.values) != values:
            return f"{call.op} takes {wanted} keys and {values} values, not {len(call.keys)} and {len(call.values)}"
        if values or call.op == "add":
            # As if the key were new: sometimes too much, never too little.
            grows = sum(len(value) for value in call.values) + len(call.keys[0]) + _KEY_COST
            is_new = call.keys[0] not in self._values and call.keys[0] not in self._queues
            if is_new and len(self._values) + len(self._queues) >= MAX_KEYS:
                return f"there are {MAX_KEYS} keys already"
            if self._bytes + grows > MAX_BYTES:
                return f"all keys and values would take more than {MAX_BYTES} bytes"
        return ""

    def _do(self, call: StoreCall) -> tuple[bytes, int]:
        """Returns the answer's value and number. Raises ValueError: the call is refused."""
        key = call.keys[0] if call.keys else ""
        held = self._values.get(key)
        match call.op:
            case "set":
                self._set(key, call.values[0])
            case "append":
                joined = (held or b"") + call.values[0]
                if len(joined) > MAX_VALUE:
                    raise ValueError(f"{key!r} would have more than {MAX_VALUE} bytes")
                self._set(key, joined)
            case "add":
                number = _integer(key, held) + call.number
                # torch's counters are int64; C++ could not take the answer.
                if not -(2**63) <= number < 2**63:
                    raise ValueError(f"{key!r} would be no 64-bit number")
                self._set(key, b"%d" % number)
                return b"", number
            case "compare_set":
                expected, desired = call.values
                # An absent key is created by an empty expectation. With another one, the answer is the expectation: so
                # does TCPStore.
                if held == expected or (held is None and not expected):
                    self._set(key, desired)
                    return desired, 0
                return (expected if held is None else held), 0
            case "get":
                return held or b"", 0
            case "check":
                return b"", int(all(name in self._values for name in call.keys))
            case "delete":
                if held is not None:
                    del self._values[key]
                    self._bytes -= len(key) + len(held) + _KEY_COST
                return b"", int(held is not None)
            case "count":
                return b"", len(self._values)
            case "push":
                self._push(key, call.values[0])
            case "pop":
                return self._pop(key), 0
            case "length":
                return b"", len(self._queues.get(key, ()))
        return b"", 0

    def _set(self, key: str, value: bytes) -> None:
        held = self._values.get(key)
        self._bytes += len(value) - len(held) if held is not None else len(key) + len(value) + _KEY_COST
        self._values[key] = value
        # Nobody waits for a key that was there already.
        if held is not None:
            return
        for waiter in self._waiting.pop(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing:
                got = value if waiter.call.op == "get" else b""
                self._end(waiter, StoreAnswer(call=waiter.call.call, outcome="ok", value=got))

    def _push(self, key: str, value: bytes) -> None:
        self._queues.setdefault(key, deque()).append(value)
        self._bytes += len(key) + len(value) + _KEY_COST
        if popping := self._popping.get(key):
            # Values and waiters both in the order of their arrival; `_end` takes the waiter out of the queue.
            waiter = popping[0]
            self._end(waiter, StoreAnswer(call=waiter.call.call, outcome="ok", value=self._pop(key)))

    def _pop(self, key: str) -> bytes:
        queue = self._queues[key]
        value = queue.popleft()
        self._bytes -= len(key) + len(value) + _KEY_COST
        if not queue:
            del self._queues[key]
        return value

    # ---- calls that wait

    def _wait(self, call: StoreCall, answer: Callable[[StoreAnswer], None], missing: set[str]) -> None:
        if call.timeout_s <= 0 or self._waiters >= MAX_WAITING:
            outcome = StoreAnswer(call=call.call, outcome="timeout")
            # The lead's memory is bounded: each waiting call holds a timer and its keys.
            if self._waiters >= MAX_WAITING:
                outcome = StoreAnswer(
                    call=call.call, outcome="refused", reason=f"{MAX_WAITING} calls wait already"
                )
            answer(outcome)
            return
        waiter = _Waiter(call, answer, missing)
        self._waiters += 1
        for key in missing:
            self._waiting.setdefault(key, deque()).append(waiter)
        if call.op == "pop":
            self._popping.setdefault(call.keys[0], deque()).append(waiter)
        over = StoreAnswer(call=call.call, outcome="timeout")
        seconds = min(call.timeout_s, _LONGEST_S)
        waiter.timer = asyncio.get_running_loop().call_later(seconds, self._end, waiter, over)

    def _end(self, waiter: _Waiter, outcome: StoreAnswer) -> None:
        self._waiters -= 1
        if waiter.timer is not None:
            waiter.timer.cancel()
        table = self._popping if waiter.call.op == "pop" else self._waiting
        for key in waiter.call.keys:
            # Absent where `_set` has taken the whole queue of this key.
            others = table.get(key)
            if others is not None and waiter in others:
                others.remove(waiter)
                if not others:
                    del table[key]
        waiter.answer(outcome)


def _integer(key: str, held: bytes | None) -> int:
    try:
        return int(held or b"0")
    except ValueError:
        raise ValueError(f"{key!r} does not hold a number") from None
