"""The real Ray, as a node's launcher starts it: what Slurm's signals do to it, who may join, and what stays of it."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.processes import captured, free_port, python_path, tell

pytest.importorskip("ray", reason="Ray comes with verl: make verl")

from tests.hostile.another_user import WITH_OUR_PACKAGES, python_with
from tests.hostile.runs_of_ranks import listeners
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.loops.verl import ray_node as node
from verl_slurm.loops.verl.ray_nodes import ray_argv, ray_environment

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1500)]

_JOIN = "import ray; ray.init(logging_level='ERROR', log_to_driver=False); print('joined', len(ray.nodes()))"

_PATIENCE = (
    "raylet_start_wait_time_s",
    "worker_register_timeout_seconds",
    "gcs_server_request_timeout_seconds",
)
"""On a machine that is busy with other tests."""

_GUARDED = """
import ray
ray.init(logging_level="ERROR", log_to_driver=False)
def names():
    import zmq
    return zmq.Socket.bind.__name__
print(names(), ray.get(ray.remote(names).remote()))
"""

_STRANGER = """
import grpc
CALLS = (
    "NodeInfoGcsService/GetAllNodeInfo", "InternalKVGcsService/InternalKVKeys", "NodeManagerService/GetNodeStats",
    "ObjectManagerService/Pull", "CoreWorkerService/PushTask", "CoreWorkerService/GetCoreWorkerStats",
    "RayletDriver/Init", "ReporterService/GetTraceback",
)
for place in sys.argv[1:]:
    channel, codes = grpc.insecure_channel(place), []
    for call in CALLS:
        try:
            channel.unary_unary("/ray.rpc." + call)(b"", timeout=60)
            codes.append("OK")
        except grpc.RpcError as error:
            codes.append(error.code().name)
        if codes == ["UNAVAILABLE"]:
            break
    print(place, *sorted(set(codes)), flush=True)
"""


class Head:
    """One node's Ray, below this process."""

    def __init__(self, root: Path) -> None:
        self.scratch = private_dir(root / "s")
        write_file(self.scratch / "ray.token", b"ab" * 32)
        address = f"127.0.0.1:{free_port()}"
        write_file(self.scratch / "ranks.key", bytes(range(32)))
        self.environ = ray_environment(
            os.environ | python_path() | {"VERL_SLURM_CONTROL": str(self.scratch)},
            self.scratch / "ray.token",
            address,
            nodes=1,
        )
        del self.environ["VERL_USE_EXTERNAL_MODULES"]
        self.environ |= {f"RAY_{name}": "900" for name in _PATIENCE}
        argv = ray_argv(
            sys.executable,
            head=address,
            is_head=True,
            own_address="127.0.0.1",
            temp=self.scratch / "r",
            ranks=1,
            cpus=1,
            store_bytes=80 << 20,
            free_port=node._free_port(),
        )
        with open(self.scratch / "out", "wb") as out:
            self.process = subprocess.Popen(
                argv, env=self.environ, stdout=out, stderr=out, preexec_fn=_as_a_launcher
            )

    def python(self, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return captured([sys.executable, *argv], env=self.environ | environ, timeout=900)

    def all(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]


def _as_a_launcher() -> None:
    """As `node.main` blocks them; Ray's launcher comes below it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, node._BLOCKED)


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    import shutil
    import tempfile

    root = Path(tempfile.mkdtemp(prefix="vs-", dir="/tmp"))  # names of Unix sockets must be short
    made = Head(root)
    yield made
    below = made.all()
    tell(below, signal.SIGKILL)
    _, alive = psutil.wait_procs(below, timeout=20)
    made.process.wait()
    shutil.rmtree(root)
    assert not alive


def test_a_node_is_waited_for_until_it_is_there_with_its_gpus(head: Head) -> None:
    done = head.python("-m", "verl_slurm.loops.verl.ray_nodes", "1", "1", "100")
    assert done.returncode == 0, done.stderr + (head.scratch / "out").read_text()
    short = head.python("-m", "verl_slurm.loops.verl.ray_nodes", "1", "2", "1")
    assert short.returncode == 1
    assert "RayError: Ray has 1 of 1 nodes after 1 s (GPUs on each: 1; 2 are wanted)" in short.stderr


def test_nobody_joins_without_the_token(head: Head) -> None:
    assert head.python("-c", _JOIN).stdout == "joined 1\n"
    wrong = head.scratch / "wrong"
    write_file(wrong, b"cd" * 32)
    strangers = ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN_PATH": str(wrong)})
    with ThreadPoolExecutor() as pool:  # each tries for 20 s
        for done in pool.map(lambda environ: head.python("-c", _JOIN, **environ), strangers):
            assert done.returncode != 0
            assert "joined" not in done.stdout


@pytest.mark.scenario("SEC01")
def test_each_python_of_ray_starts_with_our_rendezvous(head: Head) -> None:
    done = head.python("-c", _GUARDED)
    assert done.stdout.split() == ["guarded_bind", "guarded_bind"], done.stderr


@pytest.mark.scenario("SEC01")
def test_another_user_is_refused_at_each_port_where_ray_takes_calls(head: Head) -> None:
    """Its GCS, raylet and workers listen on all interfaces, and take pickles of those who have the token."""
    assert head.python("-c", _JOIN).stdout == "joined 1\n"
    doors = {
        f"{ip if '.' in ip and ip != '0.0.0.0' else '127.0.0.1'}:{port}".replace("::ffff:", ""): words
        for (_, ip, port), words in listeners(head.process.pid).items()
    }
    said = captured(
        [*python_with("grpc"), "-c", WITH_OUR_PACKAGES + _STRANGER, *doors], cwd="/", check=True, timeout=600
    ).stdout
    codes = {place: set(words) for place, *words in map(str.split, said.splitlines())}
    assert not [place for place, found in codes.items() if "OK" in found]
    asked = [place for place, found in codes.items() if "UNAUTHENTICATED" in found]
    assert len(asked) >= 4, "GCS, raylet twice, a worker"


def test_slurms_signals_end_nothing_of_it(head: Head) -> None:
    before = head.all()
    assert {"gcs_server", "raylet"} <= {process.name() for process in before}
    for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGUSR1):
        for process in before:
            process.send_signal(number)
    gone, _ = psutil.wait_procs(before, timeout=2)
    assert not gone
    assert head.python("-c", _JOIN).stdout == "joined 1\n"


def test_what_ray_opens_to_all_lies_below_what_is_private(head: Head) -> None:
    assert stat.S_IMODE((head.scratch / "r").stat().st_mode) == 0o777, (
        "or else nothing is the matter any more"
    )
    assert stat.S_IMODE(head.scratch.stat().st_mode) == 0o700
