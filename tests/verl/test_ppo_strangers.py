"""Another user of the node at every port of a PPO run of verl's: its workers' groups, its transfer queue, Ray's own."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.processes import captured, python_path
from verl_slurm.config import strict_yaml

pytest.importorskip("verl", reason="needs verl: make verl")

from tests.hostile.another_user import WITH_OUR_PACKAGES, WITH_TORCH, python_with
from tests.hostile.runs_of_ranks import BELOW_RAY, listeners, living, planned
from tests.journals import read_events
from tests.verl.grpo import MODULES, grpo_words, make_prompts
from tests.verl.tiny import make_model

pytestmark = [pytest.mark.verl, pytest.mark.torch, pytest.mark.timeout(2400)]

EVE = """
import os, pickle, signal, socket
from datetime import timedelta
import torch.distributed as dist
import zmq

class Evil:
    def __reduce__(self):
        return os.system, (f"id > {sys.argv[1]}",)

def attack(host, port):
    met = []
    signal.signal(signal.SIGALRM, lambda *_: tell(host, port, met))
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        socket.create_connection((host, port), 2).close()
    except OSError:
        met.append("gone")
    try:
        store = dist.TCPStore(host, port, None, False, timedelta(seconds=3), wait_for_workers=False)
        met.append(f"a store of {len(store.list_keys())} keys")
    except BaseException:
        pass
    context = zmq.Context()  # never ended: that waits for what was not sent
    for identity in (b"TQ_STORAGE_eve", b"eve"):
        queue = context.socket(zmq.DEALER)
        queue.setsockopt(zmq.IDENTITY, identity)
        queue.connect(f"tcp://{host}:{port}")
        queue.send_multipart([bytes.fromhex("c1feed"), pickle.dumps(Evil())])
        if queue.poll(2000):
            met.append("an answer")
        queue.close(linger=0)
    tell(host, port, met)

def tell(host, port, met):
    os.write(1, f"{host} {port} {', '.join(met) or 'nothing'}\\n".encode())
    os._exit(0)

print("ready", flush=True)
children = []
for line in sys.stdin:
    host, port = line.split()
    child = os.fork()
    if child == 0:
        attack(host, int(port))
    children.append(child)
for child in children:
    os.waitpid(child, 0)
"""


QUEUE = """
import sys
from transfer_queue.storage.simple_storage import SimpleStorageUnit
unit = SimpleStorageUnit.__ray_metadata__.modified_class({})
print(unit._node_ip, unit._put_get_socket_port, flush=True)
sys.stdin.read()
"""

ASKS = """
import sys, zmq
queue = zmq.Context().socket(zmq.DEALER)
queue.setsockopt(zmq.IDENTITY, b"TQ_STORAGE_" + sys.argv[4].encode())
queue.connect(f"tcp://{sys.argv[1]}:{sys.argv[2]}")
queue.send_multipart([bytes.fromhex("c1feed"), f"cos\\nsystem\\n(S'id > {sys.argv[3]}'\\ntR.".encode()])  # a pickle
print("answered" if queue.poll(int(sys.argv[5])) else "silence")
queue.close(linger=0)
"""


@pytest.mark.scenario("SEC01")
def test_verls_transfer_queue_unpickles_what_the_run_says_and_nothing_of_another_user(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its real storage unit, in a process like those of Ray. The run's own message, the same bytes, is taken."""
    loot = tmp_path_factory.mktemp("loot")
    loot.chmod(0o777)
    (tmp_path / "ranks.key").write_bytes(bytes(range(32)))
    (tmp_path / "ranks.key").chmod(0o600)
    environ = os.environ | python_path(BELOW_RAY) | {"VERL_SLURM_CONTROL": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", QUEUE], env=environ, text=True, **pipes) as unit:  # type: ignore[call-overload]
        place = unit.stdout.readline().split()

        def ask(python: list[str], program: str, who: str, patience_ms: int) -> str:
            argv = [*python, "-c", program, *place, str(loot / who), who, str(patience_ms)]
            return captured(argv, env=environ, cwd="/", check=True).stdout

        stranger = ask(python_with("zmq"), WITH_OUR_PACKAGES + ASKS, "stranger", 5_000)
        friend = ask([sys.executable], ASKS, "friend", 120_000)
        unit.stdin.close()
    assert [file.name for file in loot.iterdir()] == ["friend"]
    assert (stranger, friend) == ("silence\n", "answered\n")


def ppo_config(root: Path, steps: int) -> Path:
    """GRPO on one node with two ranks."""
    section = grpo_words(make_model(root / "model"), make_prompts(root / "sums.parquet"), steps)
    settings = {
        "trainer": {"backend": "verl", "entry": "ppo"},
        "verl": section,
        "distributed": {"dp_size": 2, "nodes": 1, "device": "cpu", "threads_per_rank": 1},
        "checkpoint": {"every_steps": 1},
        "daemon": {"start_timeout_s": 1200},
    }
    config = root / "grpo.yaml"
    config.write_bytes(strict_yaml.dump(settings))
    return config


@pytest.mark.soak  # those of Ray: test_ray.py
@pytest.mark.scenario("SEC01")
def test_another_user_gets_no_answer_at_the_ports_of_verls_ppo(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No store answers, and no pickle is taken, from the run's first moment to its last; the run ends as ever."""
    loot = tmp_path_factory.mktemp("loot")
    loot.chmod(0o777)
    paths = planned(ppo_config(tmp_path, 1), tmp_path / "run")
    environ = {"VERL_USE_EXTERNAL_MODULES": MODULES, "HF_HUB_OFFLINE": "1", **python_path()}
    environ["RAY_worker_register_timeout_seconds"] = "900"  # of a busy machine
    tried: dict[tuple[str, int], str] = {}
    said: list[str] = []
    attacker = subprocess.Popen(
        [*python_with("torch.distributed", "zmq"), "-c", WITH_TORCH + EVE, str(loot / "owned")],
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with attacker, living(paths, environ) as process:
        assert attacker.stdin is not None
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "ready\n"
        output: list[str] = []
        watcher = threading.Thread(target=lambda: output.extend(process.stdout or ()))
        hearing = threading.Thread(target=lambda: said.extend(attacker.stdout or ()))
        watcher.start()
        hearing.start()
        while process.poll() is None:
            for (_, ip, port), words in listeners(process.pid).items():
                host = {"::": "127.0.0.1", "0.0.0.0": "127.0.0.1"}.get(ip, ip.removeprefix("::ffff:"))
                if (host, port) not in tried:
                    tried[host, port] = words[0]
                    attacker.stdin.write(f"{host} {port}\n")
                    attacker.stdin.flush()
            time.sleep(2)  # that a port opens is no event
        attacker.stdin.close()
        watcher.join()
        hearing.join()
    met = {(host, int(port)): what for host, port, what in (line.strip().split(" ", 2) for line in said)}
    queues = [place for place, name in tried.items() if name.startswith(("ray::TransferQ", "ray::SimpleS"))]
    assert not list(loot.iterdir()), met
    assert len(queues) >= 3, tried
    assert {met[place] for place in queues} == {"nothing"}
    assert not [what for what in met.values() if "store" in what]
    assert process.returncode == 0, "".join(output)[-2000:]
    assert [event for event in read_events(paths) if event["event"] == "crash"] == []
