"""Another user of the node tries to be one of the ranks: at the store where they meet, and at gloo's own sockets.

The run is whole and real, without Slurm: a lead, an agent, two ranks of a loop of the user's own. The other user is a
process of uid 65534 with torch. It is told the run's ports, so that it does not try those of others on this machine.
"""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.harness import ROOT
from tests.hostile.another_user import WITH_TORCH, python_with_torch
from tests.hostile.runs_of_ranks import (
    SAVES,
    listeners,
    living,
    planned,
    prepared,
    ranks_of,
    require_nothing_listens_but_lead_and_gloo,
)
from tests.journals import read_events
from tests.lanes import with_variants
from tests.local_runs import QUICK

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1500)]

MEETS = """
import os
import torch, torch.distributed as dist
import verl_slurm
dist.init_process_group("gloo")
hosts = [None, None]
dist.all_gather_object(hosts, os.uname().nodename)
"""

EVE = """
import os, pickle, sys
from datetime import timedelta
import torch.distributed as dist

class Evil:
    def __reduce__(self):
        return os.system, ("id > " + sys.argv[1],)

def attack(port):
    def say(text):
        os.write(1, f"{port} {text}\\n".encode())
    try:
        store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5), wait_for_workers=False)
        store.set("eve", "was here")
        say(f"store: {len(store.list_keys())} keys")
        prefixed = dist.PrefixStore("default_pg", store)
        dist.init_process_group("gloo", store=prefixed, rank=1, world_size=2, timeout=timedelta(seconds=20))
        say("joined")
        data = torch.frombuffer(bytearray(pickle.dumps(Evil())), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(2)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        most = int(max(sizes))
        row = torch.zeros(most, dtype=torch.uint8)
        row[: len(data)] = data
        dist.all_gather([torch.zeros(most, dtype=torch.uint8) for _ in range(2)], row)
    except BaseException as error:
        say(f"refused: {type(error).__name__}")
    os._exit(0)

print("ready", flush=True)
children = []
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        attack(int(line))
    children.append(child)
for child in children:
    os.waitpid(child, 0)
"""


def eve(*arguments: str, program: str = EVE) -> "subprocess.Popen[str]":
    """Her process, when it is ready."""
    process = subprocess.Popen(
        [*python_with_torch(), "-c", WITH_TORCH + program, *arguments],
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "ready":
            return process
    raise AssertionError("no eve")


@pytest.fixture
def loot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place where the other user can have the victim write, and see that it did."""
    place = tmp_path_factory.mktemp("loot")
    place.chmod(0o777)
    return place / "owned"


@pytest.mark.scenario("SEC01")
def test_another_user_gets_no_key_no_rank_and_nothing_unpickled(tmp_path: Path, loot: Path) -> None:
    """The review's attack: at each port that the job listens on, from its first moment to its last."""
    paths = prepared(tmp_path, MEETS + SAVES)
    tried: set[int] = set()
    said: list[str] = []
    with eve(str(loot)) as attacker, living(paths) as process:
        assert attacker.stdin is not None
        watcher = threading.Thread(target=process.communicate)
        listening = threading.Thread(target=lambda: said.extend(attacker.stdout or ()))
        watcher.start()
        listening.start()
        while process.poll() is None and not any("store" in line for line in said):
            for _, _, port in listeners(process.pid):
                if port not in tried:
                    tried.add(port)
                    attacker.stdin.write(f"{port}\n")
                    attacker.stdin.flush()
            time.sleep(0.05)  # that a port opens is no event
        attacker.stdin.close()
        listening.join()
        told = [line.partition(" ")[2].strip() for line in said if line.partition(" ")[0].isdigit()]
        assert [line for line in told if not line.startswith("refused")] == []
        watcher.join()
        assert process.returncode == 0
    assert len(told) == len(tried) >= 3, "the lead's, and gloo's of two ranks"
    assert not loot.exists()
    assert [event for event in read_events(paths) if event["event"] == "crash"] == []


HELD = """
import os, signal
import torch, torch.distributed as dist
import verl_slurm

class Held(dist.Store):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def set(self, key, value):
        self.inner.set(key, value)
    def get(self, key):
        return self.inner.get(key)
    def clone(self):
        return self
    def wait(self, keys, *timeout):
        if not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)  # it listens, and is not connected yet
        self.inner.wait(keys, *timeout)

store, rank, size = next(iter(dist.rendezvous("env://")))
mark = f"{os.path.dirname(__file__)}/held.{rank}"
held = Held(store)
dist.init_process_group("gloo", store=held, rank=rank, world_size=size)
hosts = [None, None]
dist.all_gather_object(hosts, os.uname().nodename)
"""

FIRST = """
import os, socket, struct, sys, threading
held = []
PREAMBLE = struct.Struct("=6Q")  # gloo/transport/tcp/pair.h: nbytes, opcode, slot, offset, length, roffset
SEND, SEND_READY, RECV_READY = 1, 2, 3
PICKLE = f"cos\\nsystem\\n(S'id > {sys.argv[1]}'\\ntR.".encode()

def speak(connection):
    # As a rank would: take what is offered, and give what is asked for; a size where that is wanted, then a pickle.
    words = connection.makefile("rb")
    while len(head := words.read(PREAMBLE.size)) == PREAMBLE.size:
        nbytes, opcode, slot, _, length, _ = PREAMBLE.unpack(head)
        if opcode == SEND_READY:
            connection.sendall(PREAMBLE.pack(PREAMBLE.size, RECV_READY, slot, 0, length, 0))
        elif opcode == RECV_READY:
            said = struct.pack("=q", len(PICKLE)) if length == 8 else PICKLE.ljust(length, b".")[:length]
            notice = PREAMBLE.pack(PREAMBLE.size, SEND_READY, slot, 0, length, 0)
            connection.sendall(notice + PREAMBLE.pack(PREAMBLE.size + length, SEND, slot, 0, length, 0) + said)
            os.write(1, f"said {length}\\n".encode())
        elif opcode == SEND:
            words.read(nbytes - PREAMBLE.size)
            os.write(1, f"heard {length}\\n".encode())

print("ready", flush=True)
for line in sys.stdin:
    host, port, word = line.split()
    for number in range(16):
        connection = socket.create_connection((host, int(port)))
        connection.sendall(struct.pack("=Q", number))
        if word == "noise":
            connection.sendall(bytes(range(256)) * 16)
        if word == "gloo":
            threading.Thread(target=speak, args=[connection], daemon=True).start()
        held.append(connection)
    print("connected", flush=True)
os._exit(0)
"""


@pytest.mark.long
@pytest.mark.scenario("SEC01")
@pytest.mark.parametrize(
    "word",
    [
        "silence",
        pytest.param("noise", marks=pytest.mark.soak),
        pytest.param("gloo", marks=pytest.mark.variant),
    ],
)
def test_a_stranger_who_is_first_at_gloos_port_is_refused(tmp_path: Path, loot: Path, word: str) -> None:
    """gloo takes the first connection with the right pair number. The run ends that start, and goes on without.

    "gloo": the stranger speaks its whole protocol, and says a pickle where ranks say proofs, sizes and objects.
    """
    paths = prepared(tmp_path, HELD + SAVES)
    with eve(str(loot), program=FIRST) as attacker, living(paths) as process:
        assert attacker.stdin is not None
        assert attacker.stdout is not None
        until = time.monotonic() + 400
        while not all((tmp_path / f"held.{rank}").exists() for rank in range(2)):
            assert time.monotonic() < until
            time.sleep(0.05)
        ranks = ranks_of(process.pid)
        for rank in ranks.values():
            while rank.status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
        doors = [
            (ip, port) for pid, ip, port in listeners(process.pid) if pid in {r.pid for r in ranks.values()}
        ]
        assert len(doors) == 2
        for ip, port in doors:
            attacker.stdin.write(f"{ip} {port} {word}\n")
            attacker.stdin.flush()
            assert attacker.stdout.readline() == "connected\n"
        for rank in ranks.values():
            os.kill(rank.pid, signal.SIGCONT)
        process.communicate(timeout=900)
        assert not loot.exists()
        assert process.returncode == 0
        attacker.stdin.close()
        spoken = attacker.stdout.read().splitlines()
    if word == "gloo":
        # A proof of 32 bytes for each of two ranks went each way, and nothing after it.
        assert set(spoken) == {"said 32", "heard 32"}
    events = read_events(paths)
    restarts = [event["number"] for event in events if event["event"] == "restart"]
    strangers = [event for event in events if event["event"] == "stranger"]
    assert restarts == [1, 2], events
    assert strangers
    assert "uid 65534" in strangers[0]["peer"]
    if word == "gloo":
        assert "in the place of rank" in strangers[0]["peer"]
    assert events[-1]["exit"] == "OK"


def _guest(name: str, root: Path) -> tuple[Path, list[str]]:
    if name == "native":
        return ROOT / "configs/quickstart.yaml", [*QUICK]
    return ROOT / f"configs/{name}.yaml", []


@pytest.mark.long
@pytest.mark.scenario("SEC01")
@pytest.mark.parametrize(
    "name", with_variants("native", "pytorch_loop", "huggingface_trainer", "lightning_trainer")
)
def test_no_process_of_a_job_listens_but_the_lead_and_gloo(tmp_path: Path, name: str) -> None:
    config, overrides = _guest(name, tmp_path)
    paths = planned(config, tmp_path / "run", *overrides)
    require_nothing_listens_but_lead_and_gloo(paths)
