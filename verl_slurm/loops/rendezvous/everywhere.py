"""Protects TCPStore and ZeroMQ by the restart's key, too, in processes below Ray, which all belong to one run.

verl and vLLM open both by themselves, on all interfaces, and authenticate no peer. TransferQueue and vLLM may receive a
pickle from a ZeroMQ socket, and vLLM's `StatelessProcessGroup` from a store.

* A `TCPStore` becomes a prefix of the lead's store and listens nowhere.
* Each ZeroMQ socket on TCP speaks CURVE (RFC 26). Both ends have one key pair, derived from the restart's
  key. A socket for which the program set a mechanism keeps it.

A run of the user's own loop is not changed in this way: it may talk to servers outside the run.
"""

import hashlib
import hmac
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakSet

from verl_slurm.base.files import read_private
from verl_slurm.loops.rendezvous.install import (
    after_import,
    install_on_import,
    node_of,
    reach_children,
    unknown_version,
)
from verl_slurm.wire.environment import CONTROL_VARIABLE
from verl_slurm.wire.store_line import RANKS_KEY_NAME, StoreLine

_STORES = ("torch._C._distributed_c10d", "torch.distributed.rendezvous", "torch.distributed")
"""Modules in which torch keeps the name; later imports take it from there."""

_installed = False


def install_everywhere() -> None:
    """Makes torch and pyzmq be changed as they are imported; imports neither. Does nothing without a daemon."""
    global _installed
    control = os.environ.get(CONTROL_VARIABLE)
    if _installed or not control:
        return
    _installed = True
    install_on_import()
    reach_children()
    after_import("torch.distributed.distributed_c10d", lambda _: _replace_tcp_store(StoreLine(Path(control))))
    after_import("zmq.sugar.socket", lambda module: _guard_zmq(module, Path(control)))


def _replace_tcp_store(line: StoreLine) -> None:
    from verl_slurm.loops.rendezvous.store import LeadStore

    class TCPStore(LeadStore):
        """Takes the arguments of torch's own. A master that asks for any port gets a number of the run's own."""

        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            timeout: timedelta = timedelta(seconds=300),
            wait_for_workers: bool = True,
            multi_tenant: bool = False,
            master_listen_fd: int | None = None,
            use_libuv: bool = True,
        ) -> None:
            # The caller has opened a listener for the store: it must not stay open for strangers.
            if master_listen_fd is not None:
                os.close(master_listen_fd)
            if is_master and not port:
                # A name and no port: nobody listens there, so no free one is needed, and a counter is never the same
                # twice.
                port = LeadStore(line, "").add("tcp-ports", 1)
            self.host, self.port = host_name, port
            super().__init__(line, f"tcp/{node_of(host_name)}:{port}/")
            self.set_timeout(timeout)
            if wait_for_workers and world_size:
                # The last one to come lets all go, as torch's own constructor waits for its workers.
                if self.add("joined", 1) == world_size:
                    self.set("all", b"")
                self.wait(["all"])

    for name in _STORES:
        if not hasattr(sys.modules.get(name), "TCPStore"):
            raise unknown_version("torch", f"{name}.TCPStore")
        # In each module that has the name already: an import from there would give the one that listens.
        setattr(sys.modules[name], "TCPStore", TCPStore)  # noqa: B010 - mypy knows the module's own


def _guard_zmq(module: ModuleType, control: Path) -> None:
    import zmq
    from zmq.utils import z85

    if not zmq.has("curve") or not hasattr(module, "Socket"):
        raise unknown_version("pyzmq", "zmq.sugar.socket.Socket, with libsodium")
    key = read_private(control / RANKS_KEY_NAME)
    # Both ends derive the one key pair from the restart's key, so no list of allowed clients is needed; CurveZMQ never
    # sends the server's permanent key, so a stranger does not know its public half either.
    secret = z85.encode(hmac.new(key, b"zmq", hashlib.sha256).digest())
    public = zmq.curve_public(secret)
    bind, connect = module.Socket.bind, module.Socket.connect

    ours: WeakSet[Any] = WeakSet()

    def by_tcp(socket: Any, address: Any) -> bool:
        text = address.decode() if isinstance(address, bytes) else address
        # A socket for which the program chose a mechanism keeps it; one of ours may bind or connect again.
        if text.startswith("tcp:") and socket.getsockopt(zmq.MECHANISM) == zmq.NULL:
            ours.add(socket)
        return socket in ours

    def guarded_bind(self: Any, addr: Any) -> Any:
        if by_tcp(self, addr):
            self.setsockopt(zmq.CURVE_SECRETKEY, secret)
            self.setsockopt(zmq.CURVE_SERVER, 1)
        return bind(self, addr)

    def guarded_connect(self: Any, addr: Any) -> Any:
        if by_tcp(self, addr):
            for option, value in (
                (zmq.CURVE_SERVERKEY, public),
                (zmq.CURVE_PUBLICKEY, public),
                (zmq.CURVE_SECRETKEY, secret),
            ):
                self.setsockopt(option, value)
        return connect(self, addr)

    module.Socket.bind, module.Socket.connect = guarded_bind, guarded_connect
