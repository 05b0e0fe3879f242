"""Reads and writes the pickle in a file of torch.save as a description of calls, none of which is made. No torch.

A pickle is a program: it names functions and says what they are called with. Here a name stays a `Name`, a call
becomes a `Made`, and a tensor's bytes stay where they are (`Storage`). So a pickle of any origin can be looked at,
changed in places and written again, and code runs only where torch loads the result.

torch.save writes protocol 2. The opcodes that it needs for state dicts are allowed, and all others are refused.
"""

import io
import pickle  # noqa: TID251 - an Unpickler that imports and calls nothing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

_MOST = 64 << 20
"""Bytes of a pickle. It holds names and shapes, some 600 bytes a tensor; the objects made of it take 20 times that."""


class PickleProblem(ValueError):
    """A pickle that torch.save does not write for a state dict."""


@dataclass(frozen=True)
class Name:
    """A global: a class or a function, by module and name. Not imported."""

    module: str
    name: str


@dataclass
class Made:
    """A call of `func`, and what is done to its result.

    Attributes:
        args: of the call.
        new: `func.__new__(func, *args)` instead of `func(*args)`.
        pairs: items that are set afterwards.
        has_state, state: given to `__setstate__` or `__dict__` afterwards.
    """

    func: Name
    args: tuple[Any, ...]
    new: bool = False
    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    has_state: bool = False
    state: Any = None


@dataclass(frozen=True)
class Storage:
    """The bytes of one or more tensors: a record of the zip.

    Attributes:
        kind: such as torch.FloatStorage, which gives the type of its elements.
        key: the record is `data/<key>`.
        location: the device that it is restored to.
        numel: elements, not bytes.
    """

    kind: Name
    key: str
    location: str
    numel: int


# Both are CPython's picklers in Python; those in C cannot be kept from single opcodes.
_Unpickler: Any = pickle._Unpickler
_Pickler: Any = pickle._Pickler

_ALLOWED = (
    pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD, pickle.BINPERSID,
    pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
    pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE,
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.APPEND,
    pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS,
)  # fmt: skip


class _Reader(_Unpickler):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Any]] = {code[0]: _Unpickler.dispatch[code[0]] for code in _ALLOWED}

    def find_class(self, module: str, name: str) -> Name:
        return Name(module, name)

    def persistent_load(self, pid: Any) -> Storage:
        match pid:
            case ("storage", Name() as kind, str(key), str(location), int(numel)) if numel >= 0:
                return Storage(kind, key, location, numel)
        raise PickleProblem("a persistent id that is no storage")

    def _load_call(self, *, new: bool) -> None:
        args, func = self.stack.pop(), self.stack.pop()
        if not isinstance(func, Name) or type(args) is not tuple:
            raise PickleProblem("a call of something that is no name")
        self.stack.append(Made(func, args, new))

    def load_reduce(self) -> None:
        self._load_call(new=False)

    def load_newobj(self) -> None:
        self._load_call(new=True)

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, Made) or made.has_state:
            raise PickleProblem(f"the state of a {type(made).__name__}")
        made.has_state, made.state = True, state

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, Made):
            target.pairs += pairs
        elif type(target) is dict:
            target.update(pairs)
        else:
            raise PickleProblem(f"items of a {type(target).__name__}")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._set(items)

    def _append(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise PickleProblem(f"elements of a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(items)

    def load_append(self) -> None:
        value = self.stack.pop()
        self._append([value])

    def load_appends(self) -> None:
        items = self.pop_mark()
        self._append(items)

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.APPEND[0]] = load_append
    dispatch[pickle.APPENDS[0]] = load_appends


class _Writer(_Pickler):  # type: ignore[misc]
    # Python's own dispatch would pickle a class of ours by its import path.
    dispatch: ClassVar[dict[type, Callable[..., None]]] = {
        kind: _Pickler.dispatch[kind] for kind in (type(None), bool, int, float, str, tuple, list, dict)
    }

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if not isinstance(value, Storage):
            return None
        return ("storage", value.kind, value.key, value.location, value.numel)

    def reducer_override(self, value: Any) -> Any:
        # Asked of every value, before the table above.
        if type(value) in self.dispatch:
            return NotImplemented
        raise PickleProblem(f"a {type(value).__name__} cannot be written")

    def save_name(self, value: Name) -> None:
        # By value, not by identity as Python's memo does it: each GLOBAL makes a Name of its own when it is read.
        known = self._names.get(value)
        if known is not None:
            self.write(self.get(self.memo[id(known)][0]))
            return
        self._names[value] = value
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        self.memoize(value)

    def save_made(self, value: Made) -> None:
        self.save(value.func)
        self.save(value.args)
        self.write(pickle.NEWOBJ if value.new else pickle.REDUCE)
        # Before its items and its state, which may refer to it.
        self.memoize(value)
        self._batch_setitems(iter(value.pairs))
        if value.has_state:
            self.save(value.state)
            self.write(pickle.BUILD)

    dispatch[Name] = save_name
    dispatch[Made] = save_made

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self._names: dict[Name, Name] = {}


def load(data: bytes) -> Any:
    """Returns the described value: plain values, `Name`, `Made` and `Storage`.

    Raises:
        PickleProblem: torch.save would not have written it for a state dict.
    """
    if len(data) > _MOST:
        raise PickleProblem(f"a pickle of {len(data)} bytes, at most {_MOST}")
    try:
        return _Reader(io.BytesIO(data)).load()
    except (PickleProblem, MemoryError):
        raise
    except KeyError as error:
        raise PickleProblem(f"an opcode or a reference that torch.save does not write: {error}") from None
    # The stack machine fails in any way on a pickle that is cut off or made up.
    except Exception as error:  # noqa: BLE001
        raise PickleProblem(f"{type(error).__name__}: {error}"[:200]) from None


def dump(value: Any) -> bytes:
    """Returns the pickle of a described value.

    Raises:
        PickleProblem: it holds something else than `load` gives.
    """
    out = io.BytesIO()
    try:
        _Writer(out).dump(value)
    except RecursionError:
        raise PickleProblem("nested too deeply") from None
    return out.getvalue()
