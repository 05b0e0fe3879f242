"""What the ranks do together besides training: agree, gather small records, fail as one.

All of it runs on a CPU (gloo) group and carries numbers or bytes, never pickled objects. Every method is
collective: all ranks call it, in the same order, and none from a signal handler. A piece of work that may
fail on one rank alone (a full disk on one node) goes through `together`, so that all ranks learn of it at
the same place and none waits for ever in the next collective.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode

T = TypeVar("T")

# Characters of one rank's error text that the others are told.
_MAX_REASON = 500


class RanksFailed(VerlSlurmError):
    """Some rank could not do its part of a common work; raised on all ranks alike.

    `kinds`: names of the classes of the errors behind it.
    """

    exit_code = ExitCode.INTERNAL
    kinds: frozenset[str] = frozenset()


class Collective:
    """The ranks as one, over a CPU process group; None: one process and no group. Runs on every rank."""

    waited_s: float = 0.0
    """Seconds in the methods below but `together` so far, with what was waited there for slower ranks."""

    def __init__(self, group: "dist.ProcessGroup | None") -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1

    @property
    def group(self) -> "dist.ProcessGroup | None":
        return self._group

    def another(self) -> "Collective":
        """The same ranks over a group of their own, for another thread. Collective."""
        # gloo: these groups carry CPU tensors, also where the model trains over NCCL.
        return Collective(None if self._group is None else dist.new_group(backend="gloo"))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - began

    def max(self, values: Sequence[int]) -> list[int]:
        """The greatest of each value over all ranks."""
        tensor = torch.tensor(list(values), dtype=torch.int64)
        if self._group is not None:
            with self._waiting():
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor.tolist()]

    def sum(self, values: Sequence[float]) -> list[float]:
        """The float64 sum of each value over all ranks; the same bits on every rank and in every run."""
        tensor = torch.tensor(list(values), dtype=torch.float64)
        if self._group is None:
            return [float(value) for value in tensor.tolist()]
        # Gathered and added in rank order: an all-reduce may choose its order by algorithm and size.
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._waiting():
            dist.all_gather(parts, tensor, group=self._group)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return [float(value) for value in total.tolist()]

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, on every rank, in rank order."""
        if self._group is None:
            return [payload]
        # Lengths first: all_gather wants tensors of one size, so each is padded to the longest.
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with self._waiting():
            dist.all_gather(lengths, torch.tensor([len(payload)], dtype=torch.int64), group=self._group)
        longest = max(int(length.item()) for length in lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        if payload:
            # bytearray: torch warns of memory that it may not write.
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        buffers = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        with self._waiting():
            dist.all_gather(buffers, mine, group=self._group)
        return [
            buffer[: int(length.item())].numpy().tobytes()
            for buffer, length in zip(buffers, lengths, strict=True)
        ]

    def gather_to_first(self, payload: bytes) -> list[bytes]:
        """Returns every rank's bytes, in rank order, on rank 0 alone; the others get an empty list."""
        if self._group is None:
            return [payload]
        # Not `gather`: of what grows with the number of ranks, each of 10,000 would hold all, eight times a node.
        longest = self.max([len(payload)])[0]
        # The length travels with the bytes: what others hold is of no use to any rank but the first.
        mine = torch.zeros(8 + longest, dtype=torch.uint8)
        framed = bytearray(len(payload).to_bytes(8, "little") + payload)
        mine[: len(framed)] = torch.frombuffer(framed, dtype=torch.uint8)
        buffers = [torch.empty_like(mine) for _ in range(self.world_size)] if self.rank == 0 else None
        with self._waiting():
            dist.gather(mine, buffers, group=self._group, group_dst=0)
        framed_parts = (buffer.numpy().tobytes() for buffer in buffers or ())
        return [part[8 : 8 + int.from_bytes(part[:8], "little")] for part in framed_parts]

    def share(self, payload: bytes, *, source: int) -> bytes:
        """The bytes of rank `source`, on every rank; the others' are not looked at."""
        if self._group is None:
            return payload
        length = torch.tensor([len(payload)], dtype=torch.int64)
        with self._waiting():
            dist.broadcast(length, group=self._group, group_src=source)
        data = torch.zeros(int(length.item()), dtype=torch.uint8)
        if self.rank == source and payload:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        # Every rank has the length by now, so all leave out the second broadcast or none.
        if len(data):
            with self._waiting():
                dist.broadcast(data, group=self._group, group_src=source)
        return data.numpy().tobytes()

    def exchange(self, rows: torch.Tensor, going: Sequence[int], coming: Sequence[int]) -> torch.Tensor:
        """Rows of a matrix to those for whom they are; one all-to-all.

        Args:
            rows: [sum of `going`, W] on the CPU: those for rank 0, then those for rank 1, ...; the same type and W on
                every rank.
            going: how many of them are for each rank.
            coming: how many each rank has for this one; the ranks know it of each other.

        Returns:
            [sum of `coming`, W]: those of rank 0, then those of rank 1, ...
        """
        if self._group is None:
            return rows
        found = rows.new_empty((sum(coming), *rows.shape[1:]))
        with self._waiting():
            dist.all_to_all_single(found, rows, list(coming), list(going), group=self._group)
        return found

    def together(self, what: str, work: Callable[[], T]) -> T:
        """Does `work` on this rank; returns its result only if no rank's raised.

        RanksFailed: on all ranks, if any rank's work raised; it names the ranks and their errors.
        """
        failure: Exception | None = None
        result: T | None = None
        try:
            # No collective inside: a rank whose work raises would leave the others waiting in it.
            result = work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            failure = error
        # The class first: `kinds` reads it from there on the other ranks.
        reason = "" if failure is None else f"{type(failure).__name__}: {failure}"[:_MAX_REASON]
        reasons = [raw.decode(errors="replace") for raw in self.gather(reason.encode())]
        if any(reasons):
            found = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text)
            failed = RanksFailed(f"{what} failed", found=found)
            failed.kinds = frozenset(text.partition(":")[0] for text in reasons if text)
            # On the rank that failed the cause is its own error, which `errors.underlying` finds.
            raise failed from failure
        return result  # type: ignore[return-value]  # T may itself be None

    def values(self, mine: T, kind: type[T]) -> list[T]:
        """The value of each rank, on every rank; `kind`: its type, as msgspec has it."""
        return [msgspec.msgpack.decode(raw, type=kind) for raw in self.gather(msgspec.msgpack.encode(mine))]

    def on_first(self, what: str, work: Callable[[], T], kind: type[T]) -> T:
        """Does `work` on rank 0 only, and gives its result, of type `kind`, to all. Raises as `together`."""
        first = self.rank == 0
        raw = self.together(what, lambda: msgspec.msgpack.encode(work()) if first else b"")
        # A broadcast: a gather would give each rank room for as many copies as there are ranks.
        return msgspec.msgpack.decode(self.share(raw, source=0), type=kind)

    def first_does(self, what: str, work: Callable[[], object]) -> None:
        """Does `work` on rank 0 only; all wait for it. Raises as `together`."""
        self.together(what, work if self.rank == 0 else lambda: None)
