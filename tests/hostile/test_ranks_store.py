"""The store of the ranks against what torch promises of one: two real ranks, a real agent and lead."""

from pathlib import Path

import pytest

from tests.hostile.runs_of_ranks import (
    BELOW_RAY,
    SAVES,
    living,
    prepared,
    require_nothing_listens_but_lead_and_gloo,
)
from tests.processes import python_path

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

CONTRACT = """
import os, signal, threading, time
from datetime import timedelta
import torch, torch.distributed as dist
import verl_slurm

store, rank, size = next(iter(dist.rendezvous("env://")))
assert (rank, size) == (int(os.environ["RANK"]), 2)
other = 1 - rank
store.set_timeout(timedelta(seconds=300))
store.set(f"a{rank}", f"value {rank}")
assert store.get(f"a{other}") == f"value {other}".encode()
store.set(f"empty{rank}", "")
assert store.get(f"empty{other}") == b""
store.set("b", bytes(range(256)) if rank else bytes(range(256)))
assert store.get("b") == bytes(range(256))
for _ in range(100):
    store.add("sum", rank + 1)
store.set(f"added{rank}", "1")
store.wait([f"added{other}"])
assert store.add("sum", 0) == 300
assert store.get("sum") == b"300"
winners = store.compare_set("winner", "", str(rank))
assert winners in (b"0", b"1")
assert store.compare_set("winner", "nobody", "x") == winners
assert store.compare_set(f"absent{rank}", "nobody", "x") == b"nobody"
assert not store.check([f"absent{rank}"])
assert store.check(["a0", "a1"])
store.append(f"log{rank}", "one ")
store.append(f"log{rank}", "two")
assert store.get(f"log{rank}") == b"one two"
assert store.delete_key(f"log{rank}")
assert not store.delete_key(f"log{rank}")
began = time.monotonic()
try:
    store.wait(["never"], timedelta(seconds=1))
    raise SystemExit("waited for nothing")
except dist.DistStoreError:
    assert 1.0 <= time.monotonic() - began < 60
big = os.urandom(1) * (8 << 20)
store.set(f"big{rank}", big)
assert store.get(f"big{rank}") == big
store.delete_key(f"big{rank}")
try:
    store.set("too big", bytes((8 << 20) + 1))
    raise SystemExit("took it")
except Exception as error:
    assert "too large" in str(error), error
for number in range(1000):
    store.set(f"many/{rank}/{number}", str(number))
store.wait([f"many/{other}/{number}" for number in range(1000)])
assert store.multi_get([f"many/{other}/{number}" for number in range(3)]) == [b"0", b"1", b"2"]
store.queue_push("queue" + str(other), "word")
assert store.queue_pop("queue" + str(rank)) == b"word"
assert store.queue_len("queue" + str(rank)) == 0
try:
    store.queue_pop("queue" + str(rank), False)
    raise SystemExit("popped nothing")
except dist.QueueEmptyError:
    pass

# A call that waits holds up no other one, and a clone is the same store.
got = []
waiting = threading.Thread(target=lambda: got.append(store.clone().get(f"late{rank}")))
waiting.start()
store.set(f"early{rank}", "1")
store.set(f"late{rank}", "2")
waiting.join()
assert got == [b"2"]

# A client that dies in the middle of a call.
child = os.fork()
if child == 0:
    store.get("that nobody sets")
time.sleep(0.5)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
store.set(f"after{rank}", "1")
store.wait([f"after{other}"])

# Memory of the lead is bounded.
if rank == 0:
    held = 0
    try:
        for number in range(64):
            store.set(f"hoard{number}", bytes(8 << 20))
            held += 1
        raise SystemExit("it took all of it")
    except Exception as error:
        assert "268435456" in str(error), error
    for number in range(held):
        store.delete_key(f"hoard{number}")
    store.set("hoarded", "1")
store.wait(["hoarded"])
dist.init_process_group("gloo")
with open(f"{os.path.dirname(__file__)}/contract.{rank}", "w") as file:
    file.write("kept")
"""


@pytest.mark.long
@pytest.mark.scenario("SEC01")
def test_the_store_of_the_ranks_keeps_what_torch_promises_of_one(tmp_path: Path) -> None:
    paths = prepared(tmp_path, CONTRACT + SAVES)
    with living(paths) as process:
        said, _ = process.communicate(timeout=600)
        logs = "".join(log.read_text() for log in paths.logs.glob("*.log"))
        assert process.returncode == 0, f"{said}\n{logs}"
    assert [(tmp_path / f"contract.{rank}").read_text() for rank in range(2)] == ["kept", "kept"]


OWN_STORE = """
import os
from datetime import timedelta
import torch, torch.distributed as dist
import verl_slurm
from torch.distributed import TCPStore

meeting, rank, size = next(iter(dist.rendezvous("env://")))
if rank == 0:
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    assert isinstance(store, dist.TCPStore)
    meeting.set("port", str(store.port))
else:
    store = TCPStore("127.0.0.1", int(meeting.get("port")), size, timeout=timedelta(seconds=200))
if rank == 0:
    assert TCPStore("127.0.0.1", store.port, size).port == store.port
prefixed = dist.PrefixStore("part", store)  # calls from C++
prefixed.set(f"key{rank}", str(rank))
assert store.get(f"part/key{1 - rank}") == str(1 - rank).encode()
another = TCPStore("127.0.0.1", 0, 1, is_master=True)
assert not another.check(["part/key0"]), "each has keys of its own"
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{store.port}", rank=rank, world_size=size)
total = torch.ones(1)
dist.all_reduce(total)
assert total == 2
"""


@pytest.mark.long
@pytest.mark.scenario("SEC01")
def test_below_ray_a_tcpstore_is_a_part_of_the_leads_store_and_listens_nowhere(tmp_path: Path) -> None:
    require_nothing_listens_but_lead_and_gloo(prepared(tmp_path, OWN_STORE + SAVES), python_path(BELOW_RAY))
