"""torch's `Store` over the line to this node's agent: the keys are the lead's (`verl_slurm_daemon.link.rank_store`).

torch calls these methods from Python and, through pybind11, from threads of C++; `StoreLine` may be used from any.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from verl_slurm.base.errors import WireError
from verl_slurm.wire.messages import MAX_KEY, MAX_VALUE, StoreAnswer, StoreCall
from verl_slurm.wire.store_line import StoreLine

_FOREVER = timedelta(days=7)
# Keeps stores alive. C++ holds the C++ half of a store alone; without its Python half its methods would be
# pure virtual.
_KEPT: list["LeadStore"] = []


def _bytes(value: "str | bytes") -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class LeadStore(Store):
    """The restart's keys below `prefix`.

    Each method raises DistStoreError: a key did not appear in time. WireError: the lead refuses (a limit), or
    the agent is gone.
    """

    timeout: timedelta
    """The C++ half's timeout for a key to appear: `set_timeout`, which init_process_group calls."""

    def __init__(self, line: StoreLine, prefix: str) -> None:
        super().__init__()
        self._line, self._prefix = line, prefix
        _KEPT.append(self)

    # The line is shared: any thread may call it.
    def clone(self) -> "LeadStore":
        return LeadStore(self._line, self._prefix)

    def set(self, key: str, value: "str | bytes") -> None:
        self._call("set", [key], [value])

    def get(self, key: str) -> bytes:
        return self._call("get", [key], timeout=self.timeout).value

    def add(self, key: str, value: int) -> int:
        return self._call("add", [key], number=value).number

    def compare_set(self, key: str, expected_value: "str | bytes", desired_value: "str | bytes") -> bytes:
        return self._call("compare_set", [key], [expected_value, desired_value]).value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._call("wait", keys, timeout=self.timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call("check", keys).number)

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete", [key]).number)

    def num_keys(self) -> int:
        """Returns the number of keys of the whole restart, as a PrefixStore does."""
        return self._call("count", []).number

    def append(self, key: str, value: "str | bytes") -> None:
        self._call("append", [key], [value])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        # One wait for all of them, so that the time-out counts once.
        self.wait(keys)
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence["str | bytes"]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def queue_push(self, key: str, value: "str | bytes") -> None:
        self._call("push", [key], [value])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        timeout = self.timeout if block else timedelta(0)
        return self._call("pop", [key], timeout=timeout, empty=not block).value

    def queue_len(self, key: str) -> int:
        return self._call("length", [key]).number

    # torch asks before it uses append, multi_get and multi_set.
    def has_extended_api(self) -> bool:
        return True

    def _call(
        self,
        op: Any,
        keys: Sequence[str],
        values: "Sequence[str | bytes]" = (),
        *,
        number: int = 0,
        timeout: timedelta = timedelta(0),
        empty: bool = False,
    ) -> StoreAnswer:
        if op in ("get", "wait") and not timeout:
            timeout = _FOREVER  # as in torch: kNoTimeout
        call = StoreCall(
            call=0,
            op=op,
            keys=tuple(self._prefix + key for key in keys),
            values=tuple(_bytes(value) for value in values),
            number=number,
            timeout_s=max(timeout.total_seconds(), 0.0),
        )
        # Checked before it is sent: the agent closes the connection of a message that it cannot decode, and the program
        # would be told of a lost agent.
        if any(len(key) > MAX_KEY for key in call.keys) or any(
            len(value) > MAX_VALUE for value in call.values
        ):
            raise WireError(
                "a key or value is too large for the ranks' store",
                where=", ".join(key[:80] for key in keys[:4]),
                expected=f"at most {MAX_KEY} and {MAX_VALUE} bytes",
            )
        answer = self._line.call(call)
        if answer.outcome == "timeout":
            # As torch's own stores, for a queue that is asked without waiting.
            if empty:
                raise dist.QueueEmptyError(f"the queue {keys[0]} is empty")
            raise dist.DistStoreError(
                f"{op} of {', '.join(keys[:4])}: timed out after {timeout.total_seconds():g} s"
            )
        if answer.outcome == "refused":
            raise WireError(
                f"the ranks' store refuses to {op}", where=", ".join(keys[:4]), found=answer.reason
            )
        return answer
