"""When engines are replaced, given up, and offered to requests again; Ray and verl are played here.

Real engines die in `tests/slurm_cluster/test_verl_vllm.py`.
"""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray comes with verl: make verl")

from verl_slurm.loops.verl import verl_engines
from verl_slurm.loops.verl.verl_engines import Engines

pytestmark = pytest.mark.verl


class Remote:
    """A method of an actor."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Replica:
    """As much of verl's replica as is replaced. Its servers are numbered over all starts."""

    def __init__(self, rank: int) -> None:
        self.replica_rank, self.starts, self.alive = rank, 0, True
        self.may_start = threading.Event()
        self.may_start.set()
        self.fails: Exception | None = None
        self.servers: list[Any] = [f"server {rank}.0"]
        self.adapter = SimpleNamespace(server_handle=self.servers[0])
        worker = SimpleNamespace(worker_dict={"actor_rollout": SimpleNamespace(rollout=self.adapter)})
        self.workers = [SimpleNamespace(__ray_call__=Remote(lambda call: call(worker)))]

    @property
    def server_address(self) -> str:
        return f"{self.replica_rank}.{self.starts}"

    server_handle = server_address

    def _get_server_name_prefix(self) -> str:
        return "vllm_"

    def watch(self) -> list["Replica"]:
        return [self]

    async def launch_servers(self) -> None:
        assert self.servers == []
        self.may_start.wait()
        if self.fails is not None:
            raise self.fails
        self.starts += 1
        self.servers, self.alive = [f"server {self.server_address}"], True


class Weights:
    """verl's manager of weights: notes what it is asked, and which engines it knows."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas, self.asked = list(replicas), list[Any]()

    def remove_replicas(self, replicas: list[Replica]) -> None:
        self.replicas = [one for one in self.replicas if one not in replicas]

    def add_replicas(self, replicas: list[Replica]) -> None:
        self.replicas.extend(replicas)

    def __getattr__(self, name: str) -> Any:
        return lambda *version: self.asked.append((name, *version, [r.server_address for r in self.replicas]))


class Played:
    """Two engines of a driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replicas, self.killed, self.told = [Replica(0), Replica(1)], list[Any](), list[str]()
        monkeypatch.setattr(
            verl_engines,
            "ray",
            SimpleNamespace(
                wait=lambda watched, timeout: ([one for one in watched if not one.alive], []),
                get=lambda answer: answer,
                kill=self.killed.append,
                util=SimpleNamespace(list_named_actors=lambda: ["vllm_server_1_0"]),
            ),
        )
        self.offered = {one.server_address: one.server_handle for one in self.replicas}
        balancer = SimpleNamespace(
            add_servers=Remote(self.offered.update),
            remove_servers=Remote(lambda names: [self.offered.pop(name) for name in names]),
        )
        self.servers = SimpleNamespace(
            rollout_replicas=self.replicas,
            get_replicas=lambda: self.replicas,
            global_load_balancer=balancer,
            server_handles=list(self.offered.values()),
            server_addresses=list(self.offered),
        )
        self.weights = Weights(self.replicas)
        self.engines = Engines(self.servers, self.weights, lambda text, loud: self.told.append(text))

    def started(self) -> None:
        """Waits for the starts that are under way."""
        for start in self.engines._starts:
            start.thread.join(60)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def test_a_dead_engine_is_offered_again_with_the_weights_of_all(played: Played) -> None:
    dead = played.replicas[0]
    dead.alive = False
    dead.may_start.clear()
    played.engines.poll(7)
    assert played.offered.keys() == {"1.0"}, "the others answer in the meantime"
    played.engines.poll(7)
    assert not played.weights.asked, "and are not disturbed before it is there"
    dead.may_start.set()
    played.started()
    played.engines.poll(7)
    both = ["1.0", "0.1"]
    assert played.weights.asked == [
        ("abort_replicas", both),
        ("sleep_replicas", both),
        ("update_weights", 7, both),
        ("resume_generation_replicas", both),
    ]
    assert played.offered.keys() == {"1.0", "0.1"}
    assert played.killed == ["server 0.0"], "what is left of it, say of an engine over two nodes"
    assert dead.adapter.server_handle is None, "the trainer rank looks for the new server"
    assert played.servers.server_addresses == ["0.1", "1.0"]
    assert played.told == [
        "rollout engine 0 has died and is replaced; the run goes on",
        "rollout engine 0 is back",
    ]


def test_the_update_of_the_trainer_waits_for_an_engine_that_starts(played: Played) -> None:
    dead = played.replicas[0]
    dead.alive = False
    dead.may_start.clear()
    played.engines.poll(7)
    threading.Timer(0.05, dead.may_start.set).start()
    played.engines.sampled()
    assert not played.weights.asked, "verl sends weights itself, before it samples again"
    assert [one.server_address for one in played.weights.replicas] == ["1.0", "0.1"]
    assert played.offered.keys() == {"1.0", "0.1"}


def test_an_engine_that_cannot_be_started_ends_the_start_of_the_run(played: Played) -> None:
    dead = played.replicas[1]
    dead.alive, dead.fails = False, OSError("no room on the device")
    dead.may_start.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verl_engines.ray.util, "list_named_actors", list)
        played.engines.poll(7)
        dead.may_start.set()
        played.started()
    with pytest.raises(RuntimeError, match="engine 1 cannot be replaced") as raised:
        played.engines.poll(7)
    assert raised.value.__cause__ is dead.fails


def test_an_engine_that_dies_again_and_again_in_a_step_is_given_up(played: Played) -> None:
    def dies() -> None:
        played.replicas[0].alive = False
        played.engines.poll(7)
        played.started()
        played.engines.poll(7)

    for _ in range(2):
        for _ in range(3):
            dies()
        played.engines.sampled()  # the step is over
    for _ in range(3):
        dies()
    with pytest.raises(RuntimeError, match="has died 4 times in one step"):
        dies()
