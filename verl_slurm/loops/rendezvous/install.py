"""Installs the run's own rendezvous below torch's: `env://` and `tcp://` of `init_process_group`, and gloo's groups.

A process that torchrun started would open a TCPStore on all interfaces, or connect to one, and neither side
authenticates the other. Here both handlers return the lead's store. Each gloo group, however it is built, is
checked before its constructor returns. With a version of torch that has no such place to hook, the process
ends with one line.

gloo takes the first connection with the right pair number. So when a gloo group is built, each rank sends every other
rank a proof over the very connections that the group will use:

    proof(i → j) = HMAC-SHA256(key of the restart, "gloo" ‖ nonce ‖ i ‖ j)

The key reaches a rank by its agent's private directory, and never crosses a network; the nonce is rank 0's, through the
ranks' store. A rank that receives anything but a peer's proof does not use the group.
"""

import hashlib
import hmac
import importlib
import importlib.abc
import importlib.machinery
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

from verl_slurm.base.errors import ConfigError, VerlSlurmError, WireError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import read_private
from verl_slurm.wire.environment import CONTROL_VARIABLE

_PLACE = "torch.distributed.distributed_c10d"
"""Once this is imported, every replaced function exists."""
_PROOF_S = 180.0
"""Timeout for a peer's proof, as long as a link may be silent. Usually it takes milliseconds."""

_PROOF_BYTES = 32
_MOST_NAMED = 8
_PAIR = struct.Struct(">II")

_SUSPICIOUS_S = 5.0
"""After this many seconds of silence a peer is investigated."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_installed = False
_calls: dict[str, int] = {}


def install() -> None:
    """Replaces the handlers now; does nothing without a daemon. Raises `ConfigError` for an unknown torch."""
    global _installed
    control = os.environ.get(CONTROL_VARIABLE)
    if _installed or not control:
        return
    _installed = True
    # Not as an attribute of torch.distributed, which is still being imported and ends with a function `rendezvous`.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    groups = importlib.import_module(_PLACE)
    from verl_slurm.wire.store_line import RANKS_KEY_NAME, StoreLine

    line, key = StoreLine(Path(control)), read_private(Path(control) / RANKS_KEY_NAME)
    handlers = getattr(rendezvous, "_rendezvous_handlers", None)
    if not isinstance(handlers, dict) or not {"env", "tcp"} <= handlers.keys():
        raise unknown_version("torch", "torch.distributed.rendezvous._rendezvous_handlers")
    handlers["env"], handlers["tcp"] = _handlers(line)
    if groups.is_gloo_available():
        _check_gloo(line, key)


def install_on_import() -> None:
    """Does the same as soon as the program imports torch.distributed, without importing torch."""
    if os.environ.get(CONTROL_VARIABLE):
        after_import(_PLACE, lambda _: install())


def reach_children() -> None:
    """Has `terminate()` end each child of the program, although it inherits that SIGTERM is ignored or blocked.

    Slurm warns every process of a step by that signal, so ranks and what is below them must outlive it.
    """
    _end_by_terminate(subprocess.Popen, "send_signal")
    after_import("multiprocessing.popen_fork", lambda module: _end_by_terminate(module.Popen, "_send_signal"))


def _end_by_terminate(owner: Any, name: str) -> None:
    send = getattr(owner, name)

    def sent(child: Any, sig: int) -> None:
        send(child, signal.SIGKILL if sig == signal.SIGTERM and _outlives_term(child.pid) else sig)

    setattr(owner, name, sent)


def _outlives_term(pid: int) -> bool:
    masks = dict.fromkeys(("SigBlk", "SigIgn", "SigCgt"), 0)
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            field, _, value = line.partition(":")
            if field in masks:
                masks[field] = int(value, 16)
    # One that catches it while it is blocked waits for it by itself, as the workers of torch's data loaders.
    mask = masks["SigIgn"] | masks["SigBlk"] & ~masks["SigCgt"]
    return bool(mask >> (signal.SIGTERM - 1) & 1)


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls `then` with a module now, or when it has been imported. An exception in it ends the process."""

    def or_end(module: ModuleType) -> None:
        try:
            then(module)
        except Exception as error:  # noqa: BLE001 - a program could catch it, and go on unprotected
            _end(error)

    if name in sys.modules:
        or_end(sys.modules[name])
    else:
        # First: a finder before this one would load the module without the hook.
        sys.meta_path.insert(0, _Finder(name, or_end))


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find one module, and calls a function after its import."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        # The finders behind it find the module as ever; its loader then runs it, and our function.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_follow(module: ModuleType) -> None:
                load(module)
                self._then(module)

            spec.loader.exec_module = load_and_follow  # type: ignore[method-assign]
        return spec


def node_of(host: str) -> str:
    """Returns a name of the host that another node does not use for itself."""
    # 127.0.0.1:PORT is another place on each node, and the keys of all nodes lie in one store; the control directory's
    # name is unguessable, so it differs from node to node.
    return os.environ[CONTROL_VARIABLE] if host in _LOOPBACK else host


def unknown_version(package: str, what: str) -> ConfigError:
    """Returns the error for a release that lacks the place for our hook."""
    return ConfigError(
        f"this {package} cannot be kept from meeting strangers",
        where=what,
        found=f"{package} {metadata.version(package)}",
        expected="a version that verl-slurm was tested with (constraints/)",
    )


def _handlers(line: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the handlers for `env://` and `tcp://`. torch adds rank and world size to the URL if it knows them."""

    def meet(
        url: str, where: str, environ: "os._Environ[str] | dict[str, str]"
    ) -> Iterator[tuple[Any, int, int]]:
        from torch._C._distributed_c10d import HashStore, Store

        from verl_slurm.loops.rendezvous.store import LeadStore

        query = parse_qs(urlsplit(url).query)
        numbers = []
        for name in ("rank", "world_size"):
            value = query.get(name, [environ.get(name.upper(), "")])[0]
            if not value.isdigit():
                raise ValueError(f"Error initializing torch.distributed: {url} says no {name}")
            numbers.append(int(value))
        rank, world_size = numbers
        # A second group at one address (after destroy_process_group) must not read the keys of the first.
        turn = _calls[where] = _calls.get(where, 0) + 1
        # A single rank meets nobody: it needs no key of the lead's.
        store: Store = HashStore() if world_size == 1 else LeadStore(line, f"{where}/{turn}/")
        yield store, rank, world_size
        # As torch's own handlers: the generator is asked once.
        raise RuntimeError(f"Unable to perform re-rendezvous using {url}")

    def by_env(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
        where = f"{node_of(os.environ.get('MASTER_ADDR', ''))}:{os.environ.get('MASTER_PORT', '')}"
        return meet(url, where, os.environ)

    def by_tcp(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
        place = urlsplit(url)
        # As in torch, `tcp://` takes rank and size from the URL, and nothing from the environment.
        return meet(url, f"{node_of(place.hostname or '')}:{place.port}", {})

    return by_env, by_tcp


def _check_gloo(line: Any, key: bytes) -> None:
    """Makes each group of gloo be checked where it is built: by Python (all but `split_group`), or by C++ for it."""
    from torch._C import _distributed_c10d as c10d

    prefixed = c10d.PrefixStore

    def after_building(build: Callable[..., None]) -> Callable[..., None]:
        def build_and_check(self: Any, store: Any, rank: int, size: int, *args: Any, **more: Any) -> None:
            build(self, store, rank, size, *args, **more)
            # Before the constructor returns, so that no code of the program has had the group yet.
            _require_our_peers(self, prefixed("verl-slurm", store), rank, size, line, key)

        return build_and_check

    def after_splitting(split: Callable[..., Any], what: str) -> Callable[..., Any]:
        def split_and_check(self: Any, *args: Any, **more: Any) -> Any:
            import torch

            # C++ builds this group, past the constructor that is replaced below.
            group = split(self, *args, **more)
            if group is not None and torch.device("cpu") in group._device_types:
                backend = group._get_backend(torch.device("cpu"))
                if isinstance(backend, c10d.ProcessGroupGloo):
                    store = prefixed(f"verl-slurm-{what}-{group.group_name}", group.get_group_store())
                    _require_our_peers(backend, store, group.rank(), group.size(), line, key)
            return group

        return split_and_check

    if not hasattr(c10d, "ProcessGroupGloo"):
        raise unknown_version("torch", "ProcessGroupGloo")
    gloo, groups = c10d.ProcessGroupGloo, c10d.ProcessGroup
    gloo.__init__ = after_building(gloo.__init__)  # type: ignore[method-assign]
    for name in ("split_group", "merge_remote_group"):
        if hasattr(groups, name):
            setattr(groups, name, after_splitting(getattr(groups, name), name))


def _proof(key: bytes, nonce: bytes, sender: int, receiver: int) -> bytes:
    return hmac.new(key, b"gloo" + nonce + _PAIR.pack(sender, receiver), hashlib.sha256).digest()


def _wrong_peers(key: bytes, nonce: bytes, rank: int, said: bytes) -> list[int]:
    """Lists the peers that did not send their proof; `said` has _PROOF_BYTES of each rank in turn."""
    words = [said[at : at + _PROOF_BYTES] for at in range(0, len(said), _PROOF_BYTES)]
    return [
        peer
        for peer, word in enumerate(words)
        # The pair is part of the proof: one that was sent to another rank, or comes back, is none.
        if not hmac.compare_digest(word, _proof(key, nonce, peer, rank))
    ]


def _require_our_peers(backend: Any, store: Any, rank: int, size: int, line: Any, key: bytes) -> None:
    """Exchanges proofs with all peers of a new group, over its own connections, without unpickling anything.

    If the other end of one does not belong to this run, the daemon is told and the process ends.

    Raises:
        RuntimeError: torch's own: a peer is gone, or silent for `_PROOF_S`.
    """
    if size < 2:
        return
    import torch
    from torch.distributed import AllToAllOptions

    # ---- exchange proofs. The nonce comes by the store, which strangers cannot reach.
    if rank == 0:
        store.set("nonce", os.urandom(32))
    nonce = store.get("nonce")
    said = b"".join(_proof(key, nonce, rank, peer) for peer in range(size))
    # Bytes in a tensor: torch's collectives of objects would unpickle what a stranger sends.
    ours = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    theirs = torch.zeros_like(ours)
    options = AllToAllOptions()
    options.timeout = timedelta(seconds=_PROOF_S)
    try:
        work = backend.alltoall_base(theirs, ours, [], [], options)
        pause, suspicious = 0.0002, time.monotonic() + _SUSPICIOUS_S
        # Polled instead of waited for: a stranger that says nothing is found after seconds, not when `_PROOF_S` is
        # over.
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            # Not at once: a stranger may hold a connection that no pair of gloo's has taken, and does no harm with it.
            if time.monotonic() > suspicious and (found := _others_connected()):
                _leave(rank, "a peer says nothing", found, line)
        work.wait()
    except RuntimeError as error:
        # gloo's own error says that a peer is gone; that another user is connected says why.
        if found := _others_connected():
            _leave(rank, str(error)[:200], found, line)
        raise
    # ---- judge what the peers sent
    if wrong := _wrong_peers(key, nonce, rank, bytes(theirs.tolist())):
        _leave(rank, f"in the place of rank {', '.join(map(str, wrong[:8]))}", _others_connected(), line)


def _others_connected() -> list[str]:
    """Lists connections of this process whose other end, on this node, belongs to another user, for people.

    A peer on another node is not seen. Never raises.
    """
    from verl_slurm.wire.tcp_table import ESTABLISHED, TABLES, rows_of

    with suppress(OSError, ValueError, IndexError):
        # Of this process alone: the tables list the sockets of the whole node.
        mine = set(_socket_inodes())
        rows = [
            (_end_of(row[1]), _end_of(row[2]), int(row[7]), int(row[9]))
            for table in TABLES
            for row in rows_of(table)
            if row[3] == ESTABLISHED
        ]
        owners = {(local, remote): uid for local, remote, uid, _ in rows}
        # The other end's row has the addresses the other way round; a peer on another node has none here.
        found = [
            f"{remote} of uid {uid}"
            for local, remote, _, inode in rows
            if inode in mine and (uid := owners.get((remote, local), os.geteuid())) != os.geteuid()
        ]
        return found[:_MOST_NAMED]
    return []


def _end_of(in_table: str) -> str:
    """Returns address and port for people."""
    from verl_slurm.wire.tcp_table import address_of

    # An address that is mapped into IPv6 is the same one: each end may see the connection in its own way.
    host, _, port = in_table.rpartition(":")
    return f"{address_of(host)}:{int(port, 16)}"


def _socket_inodes() -> Iterator[int]:
    for fd in os.listdir("/proc/self/fd"):
        # A descriptor may be closed between the two calls.
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:["):
                yield int(target[8:-1])


def _leave(rank: int, what: str, strangers: list[str], line: Any) -> NoReturn:
    """Tells the daemon, and ends this process."""
    from verl_slurm.wire.messages import StrangerMet

    peers = f"{what}: {', '.join(strangers) or 'nothing is known of them on this node'}"
    error = WireError(
        "a stranger is among the ranks, and their group is not used",
        where=f"rank {rank}",
        found=peers,
        remedy="the run starts again; ask for whole nodes (slurm.extra: {exclusive: true}) where others share them",
    )
    # The daemon first: it then counts this start as a stranger's, and not as a crash of the program.
    with suppress(WireError):
        line.call(StrangerMet(call=0, rank=int(os.environ.get("RANK") or rank), peers=peers[:1000]))
    _end(error)


def _end(error: Exception) -> NoReturn:
    """Ends this process with one line on stderr."""
    said, code = str(error), ExitCode.INTERNAL
    if isinstance(error, VerlSlurmError):
        said, code = error.one_line(), error.exit_code
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"{type(error).__name__}: {said}\n")
        sys.stderr.flush()
    # No exception and no SystemExit: a program could catch either, and use the group.
    os._exit(int(code))
