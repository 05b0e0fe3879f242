"""The responses of a loop that is not ours as records of the ledger: packed, looked up and written in groups. No verl.

A response is one session of one prompt. Its key is the prompt's position in the order in which the data gave it out,
and the number of the session (`runtime_state.ledger`: step and micro-batch). Its record's head is `Responses`: a digest
of what was asked (the prompt, the agent, and the sampling parameters), and the fields of each output. A record of
another digest is not used. What msgpack cannot hold, and each long list of numbers, is an array of the record, and
`places` says where in `outputs` it belongs; None is there meanwhile.
"""

import asyncio
import hashlib
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Literal

import msgspec
import numpy as np

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state.format import DTYPES, Arrays
from verl_slurm.runtime_state.ledger import Index, Ledger, PackedRecord, entry

Outputs = Sequence[Mapping[str, Any]]

_LONG = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "token_ids", "log_probs")
"""Fields of verl's `AgentLoopOutput` and `TokenOutput` that have a number for each token."""
_Kind = Literal["list", "numpy", "scalar", "torch"]
_Place = tuple[_Kind, list[Any]]
"""What an array was, and the keys and indices that lead to it."""
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
"""Exact types: a subclass would come back as another type."""
_NO_RESPONSE = (KeyError, ValueError, TypeError, IndexError, OverflowError, AttributeError)
"""Errors of reading fields that have other names, types or sizes than a response's; pydantic's is a ValueError."""
_NOT_HELD = (ValueError, TypeError, OverflowError, RecursionError)
"""Errors of msgspec, numpy and torch for what they cannot write."""
_MOST_IN_GROUP = 256
"""Records of one write: bounds the memory, and what the first of them waits for."""


class Responses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the head of a record says."""

    digest: str
    outputs: list[dict[str, Any]]
    places: list[_Place]
    """One for each array, in their order."""


class NotRecordable(Exception):
    """A response has something in it that no record can hold, such as an image or an object of the user's."""


def digest_of(*asked: Any) -> str:
    """Returns the SHA-256 of what was asked for.

    Raises:
        NotRecordable: it holds something without a representation of its own, such as an image.
    """
    places: list[_Place] = []
    arrays: list[np.ndarray] = []
    try:
        plain = _taken_out(asked, [], places, arrays)
        forms = [(array.dtype.str, array.shape) for array in arrays]
        digest = hashlib.sha256(msgspec.msgpack.encode([plain, places, forms]))
    except _NOT_HELD as error:
        raise NotRecordable(str(error)) from error
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def turn_paths(paths: RunPaths) -> RunPaths:
    """Returns the names of the records of single turns and tools: below the ledger, to be set aside with it."""
    return RunPaths(paths.ledger / "turns", run=paths.run)


def session_seed(seed: int, position: int, session: int) -> int:
    """Returns the seed with which a session is sampled, at every attempt: 31 bits, which all engines take."""
    digest = hashlib.sha256(f"{seed} {position} {session}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def response_entry(position: int, session: int, outputs: Outputs, digest: str) -> PackedRecord:
    """Packs the outputs of one session: the set fields of each. Raises NotRecordable if one cannot be held."""
    places: list[_Place] = []
    arrays: list[np.ndarray] = []
    plain = []
    # Packed here and not by the ledger: a response that cannot be held must not cost those that are written with it.
    try:
        for number, output in enumerate(outputs):
            short = dict(output)
            for name in _LONG:
                if short.get(name) is not None:
                    arrays.append(_numbers(short[name]))
                    places.append(("list", [number, name]))
                    short[name] = None
            plain.append(_taken_out(short, [number], places, arrays))
        by_number = {str(number): array for number, array in enumerate(arrays)}
        return entry(position, session, by_number, Responses(digest, plain, places))
    except _NOT_HELD as error:
        raise NotRecordable(str(error)) from error


def unpack_outputs(said: Responses, arrays: Arrays, digest: str) -> list[dict[str, Any]] | None:
    """Returns the fields of each output; None: the record answers another question. Raises CheckpointCorrupt if it is
    no record of responses.
    """
    if said.digest != digest:
        return None
    try:
        for (kind, path), array in zip(said.places, arrays.values(), strict=True):
            place: Any = said.outputs
            # Any path: what does not lead to a place in `outputs` raises, as any other record that is no response.
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = _put_back(kind, array)
    except _NO_RESPONSE as error:
        raise _no_responses(error) from error
    return said.outputs


def _no_responses(error: Exception) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "a ledger record holds no responses",
        found=f"{type(error).__name__}: {error}",
        expected="what runtime_state/rollout_records.py specifies",
        remedy="its responses are sampled again; check the storage",
    )


class RolloutLedger:
    """The ledger of one process that collects responses: answers from former attempts, and records new ones.

    Belongs to one event loop; a thread packs, writes and syncs those together that wait at the same time.

    Args:
        rank: of this process among those that record, for the name of its segment.

    Attributes:
        replayed, recorded: responses that were answered from the ledger, and that were written to it.
    """

    def __init__(self, paths: RunPaths, attempt: int, rank: int, *, keys: Keyring | None = None) -> None:
        self.replayed = self.recorded = 0
        self._told: dict[str, bool] = {}
        # Before the segment is opened: that of an earlier restart of this attempt is among the files to read.
        self._index = Index(paths, Responses, report=self.tell, keys=keys)
        self._ledger = Ledger(paths, attempt, rank, keys=keys)
        self._todo: SimpleQueue[tuple[_Record, _Done] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="rollout-ledger", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._index)

    def find(
        self, position: int, session: int, digest: str, made: Callable[[dict[str, Any]], Any] = dict
    ) -> list[Any] | None:
        """Returns the recorded outputs of a session, each `made` of its fields; None: it has to be sampled."""
        try:
            record = self._index.read(position, session)
            outputs = None if record is None else unpack_outputs(*record, digest)
            try:
                found = None if outputs is None else [made(fields) for fields in outputs]
            # What `made` refuses is no record of a response.
            except _NO_RESPONSE as error:
                raise _no_responses(error) from error
        except CheckpointCorrupt as error:
            self.tell(error.one_line())
            return None
        if record is not None and outputs is None:
            self.tell(f"prompt {position} is another one than in the ledger: its responses are sampled again")
        self.replayed += found is not None
        return found

    async def record(self, position: int, session: int, outputs: Outputs, digest: str) -> None:
        """Returns when the outputs may be used: they are durable, or `news` tells why not."""
        done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._todo.put(((position, session, outputs, digest), done))
        error = await done
        if error is None:
            self.recorded += 1
        # A run that could not write its ledger has to sample it again after an interruption, and loses nothing else.
        else:
            self.not_recorded(error)

    def forget(self, before: int) -> None:
        """Drops this process's records of prompts before position `before`; from a thread of the caller's."""
        self._ledger.compact(before)

    def news(self) -> list[str]:
        """Returns what people should know and has not been told yet."""
        lines = [line for line, told in self._told.items() if not told]
        self._told.update(dict.fromkeys(lines, True))
        return lines

    def not_recorded(self, reason: object) -> None:
        """Notes that responses are not recorded."""
        self.tell(f"responses are not recorded, and would be sampled again: {reason}")

    def close(self) -> None:
        """Writes what waits, and gives the segment back."""
        self._todo.put(None)
        self._thread.join()
        self._ledger.close()

    def tell(self, line: str) -> None:
        """Has `news` say this, once."""
        # Once each: a full disk would fill the journal with one line for each response.
        self._told.setdefault(line, False)

    def _write(self) -> None:
        while (first := self._todo.get()) is not None:
            # In groups: the disk's speed bounds the latency of responses, and not their number.
            group = [first]
            while len(group) < _MOST_IN_GROUP:
                try:
                    more = self._todo.get_nowait()
                except Empty:
                    break
                if more is None:
                    self._todo.put(None)
                    break
                group.append(more)
            ready: list[PackedRecord] = []
            errors: list[Exception | None] = []
            for (position, session, outputs, digest), _ in group:
                try:
                    ready.append(response_entry(position, session, outputs, digest))
                    errors.append(None)
                except NotRecordable as error:
                    errors.append(error)  # this one alone
            failure = self._append(ready)
            answers = [(done, error or failure) for (_, done), error in zip(group, errors, strict=True)]
            # Once for all of them: waking the loop takes a system call. A closed loop belongs to a process that is
            # being ended: nothing waits any more.
            with suppress(RuntimeError):
                group[0][1].get_loop().call_soon_threadsafe(_answer, answers)

    def _append(self, ready: Sequence[PackedRecord]) -> Exception | None:
        try:
            self._ledger.append_many(ready)
            self._ledger.settle()
        except OSError as error:
            return error
        return None


_Record = tuple[int, int, Outputs, str]
_Done = asyncio.Future[Exception | None]


def _answer(answers: Sequence[tuple[_Done, Exception | None]]) -> None:
    for done, error in answers:
        if not done.done():  # its task may have been cancelled
            done.set_result(error)


def _numbers(values: Any) -> np.ndarray:
    array = _array(values)
    if array.dtype.kind in "iub" and array.dtype != np.uint64:
        return array.astype(np.int64, copy=False)
    if array.dtype.kind != "f":
        raise NotRecordable(f"no list of numbers: {array.dtype}")
    narrow = array.astype(np.float32)
    # Log probabilities come from float32 as a rule; half the bytes then. NaN equals nothing: the first look may fail.
    fits = bool((narrow == array).all()) or np.array_equal(narrow.astype(array.dtype), array, equal_nan=True)
    return narrow if fits else array.astype(np.float64, copy=False)


def _array(values: Any) -> np.ndarray:
    # A third of the time of `np.asarray`, which looks at the type of each number first.
    if type(values) is list and values:
        with suppress(struct.error, OverflowError):
            code = "d" if type(values[0]) is float else "q"
            return np.frombuffer(struct.pack(f"{len(values)}{code}", *values), f"{code}")
    return np.asarray(values)


def _taken_out(value: Any, path: list[Any], places: list[_Place], arrays: list[np.ndarray]) -> Any:
    """Returns `value` with None in the place of each array, which is appended; tuples as lists, and mappings of any
    kind as dicts."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        if _PLAIN.issuperset(map(type, value)):
            return list(value)  # token ids: item by item they would take ten times as long
        return [_taken_out(item, [*path, at], places, arrays) for at, item in enumerate(value)]
    if isinstance(value, Mapping) and _PLAIN.issuperset(map(type, value)):
        return {key: _taken_out(item, [*path, key], places, arrays) for key, item in value.items()}
    kind: _Kind = "scalar" if isinstance(value, np.generic) else "numpy"
    if type(value).__module__ == "torch" and hasattr(value, "detach"):
        kind, value = "torch", value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.name not in DTYPES:
        raise NotRecordable(f"no record can hold a {type(value).__name__}")
    # Named by its place in the list: a path may have keys that are no name for an array.
    places.append((kind, path))
    arrays.append(np.asarray(value))
    return None


def _put_back(kind: _Kind, array: np.ndarray) -> Any:
    if kind == "list":
        return array.tolist()
    if kind == "scalar":
        return array[()]
    if kind == "torch":
        # Not imported: what asks for a tensor has loaded it, and the command line works without.
        return sys.modules["torch"].from_numpy(array)
    return array
