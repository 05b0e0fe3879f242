"""Two network namespaces and a cable between them, which can be cut: no packet of a test leaves the machine.

Neither namespace has a default route. As root and with iproute2 and nftables only; elsewhere the tests say NOT RUN.
This is the kernel's own network: a cut loses packets without a word, as a dead switch does.
"""

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any, Literal

import pytest

Side = Literal["a", "b"]
ADDRESS: dict[Side, str] = {"a": "10.213.7.1", "b": "10.213.7.2"}
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_numbers = itertools.count()


class Netlab:
    """The cable. Every fault is put in at side b; `heal` takes out all of them."""

    def __init__(self, tag: str) -> None:
        self._names: dict[Side, str] = {"a": f"vs{tag}a", "b": f"vs{tag}b"}

    def cut(self) -> None:
        """Nothing gets through, either way, and nobody is told."""
        self._rules("i iif veth counter drop", "o oif veth counter drop")

    def one_way(self) -> None:
        """What a sends is lost; what b sends arrives."""
        self._rules("i iif veth counter drop")

    def lose(self, percent: int) -> None:
        """Of what a sends."""
        self._rules(f"i iif veth numgen random mod 100 < {percent} counter drop")

    def slow(self, rate: str) -> None:
        """What a sends: `2mbit`."""
        self._do("a", f"tc qdisc add dev veth root tbf rate {rate} burst 16kbit latency 400ms")

    def heal(self) -> None:
        for chain in ("i", "o"):
            self._do("b", f"nft flush chain inet f {chain}")
        self._do("a", "tc qdisc del dev veth root", check=False)

    def wait_for_losses(self, number: int = 1) -> None:
        """Until so many packets have been lost. The kernel has no event for it; this asks it again and again."""
        while self.lost() < number:
            pass

    def lost(self) -> int:
        """Packets, since the fault was put in."""
        found = json.loads(self._do("b", "nft -j list table inet f"))
        rules = [entry["rule"] for entry in found["nftables"] if "rule" in entry]
        return sum(part["counter"]["packets"] for rule in rules for part in rule["expr"] if "counter" in part)

    def reset(self, port: int) -> None:
        """The kernel ends the connections to that port of side a, as an administrator's `ss -K` does."""
        ended = self._do("b", f"ss -H -n -K dst {ADDRESS['a']} dport = {port}")
        if str(port) not in ended:
            pytest.skip("NOT RUN: this kernel ends no connections (INET_DIAG_DESTROY)")

    def argv(self, side: Side, argv: list[str]) -> list[str]:
        """The command, on that side."""
        return ["ip", "netns", "exec", self._names[side], *argv]

    @contextlib.contextmanager
    def inside(self, side: Side) -> Iterator[None]:
        """Sockets that this thread makes, and processes that it starts, are on that side."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{self._names[side]}") as away:
            assert libc.setns(away.fileno(), _CLONE_NEWNET) == 0
            try:
                yield
            finally:
                assert libc.setns(home.fileno(), _CLONE_NEWNET) == 0

    def up(self) -> None:
        a, b = self._names["a"], self._names["b"]
        for name in (a, b):
            _run(f"ip netns add {name}")
        _run(f"ip link add veth netns {a} type veth peer name veth netns {b}")
        for side, name in self._names.items():
            _run(f"ip -n {name} addr add {ADDRESS[side]}/24 dev veth")
            _run(f"ip -n {name} link set veth up")
            _run(f"ip -n {name} link set lo up")
        self._do("b", "nft add table inet f")
        for chain, hook in (("i", "input"), ("o", "output")):
            self._do("b", f"nft add chain inet f {chain} {{ type filter hook {hook} priority 0; }}")
        self.lose(1)  # what a kernel may lack is missed now
        self.slow("2mbit")
        self.heal()

    def down(self) -> None:
        for name in self._names.values():
            _run(f"ip netns del {name}", check=False)

    def _rules(self, *rules: str) -> None:
        for rule in rules:
            self._do("b", f"nft add rule inet f {rule}")

    def _do(self, side: Side, command: str, *, check: bool = True) -> str:
        return _run(f"ip netns exec {self._names[side]} {command}", check=check)


def _run(command: str, *, check: bool = True) -> str:
    done: Any = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")
    return str(done.stdout)


@contextlib.contextmanager
def netlab() -> Iterator[Netlab]:
    """A fresh one, and gone without a trace afterwards."""
    missing = [tool for tool in ("ip", "nft", "tc", "ss") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"NOT RUN: needs root and {', '.join(missing) or 'nothing else'} (iproute2, nftables)")
    lab = Netlab(f"{os.getpid() % 10**6}-{next(_numbers)}")
    try:
        try:
            lab.up()
        except OSError as error:
            pytest.skip(f"NOT RUN: no network namespaces here: {error}")
        yield lab
    finally:
        lab.down()
