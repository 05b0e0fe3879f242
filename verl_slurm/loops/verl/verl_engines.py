"""Replaces a vLLM engine that dies while verl samples, without a restart of the run; in verl's driver.

The other engines answer its requests in the meantime, and the worker that asked puts the logged tokens of an unfinished
response behind its prompt (`verl_turns`). The new engine stands under the old one's rank and name, and starts in a
thread, so that the driver still hears of a preemption. When it is there, weights go to all engines in verl's own order.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import ray

_MOST_A_STEP = 3
"""So often one engine is replaced within a step. What fails more often fails by itself, and is left to a restart."""


class _Start(NamedTuple):
    """One replacement that is under way."""

    replica: Any
    thread: threading.Thread
    failed: list[Exception]


class Engines:
    """The engines of one driver. All methods are the driver's thread's.

    Args:
        servers: verl's `LLMServerManager`, of replicas that can be watched (`verl_vllm`).
        weights: verl's `CheckpointEngineManager`.
        tell: called with a line for people, and whether it is a warning.
    """

    def __init__(self, servers: Any, weights: Any, tell: Callable[[str, bool], None]) -> None:
        self._servers, self._weights, self._tell = servers, weights, tell
        self._watched = {replica: replica.watch() for replica in servers.get_replicas()}
        self._starts: list[_Start] = []
        self._replaced: dict[int, int] = {}

    def poll(self, version: int) -> None:
        """Begins to replace engines that have died since, and takes in those that have started.

        Args:
            version: of the weights that are sampled with, verl's `global_steps` when it sent them.

        Raises:
            RuntimeError: one cannot be replaced.
        """
        for replica, watch in list(self._watched.items()):
            if ray.wait(watch, timeout=0)[0]:
                self._begin(replica)
        if ready := [start for start in self._starts if not start.thread.is_alive()]:
            self._take_in(ready)
            # At this moment verl's GPUs have room for the new engine.
            # verl's order around an update of weights.
            self._weights.abort_replicas()
            self._weights.sleep_replicas()
            self._weights.update_weights(version)
            self._weights.resume_generation_replicas()
            self._offer(ready)

    def sampled(self) -> None:
        """Waits for engines that are starting, as the GPUs are the trainer's from here on; weights come with verl's
        next update.

        Raises:
            RuntimeError: one has not started.
        """
        starts = list(self._starts)
        for start in starts:
            start.thread.join()
        self._take_in(starts)
        self._offer(starts)
        self._replaced.clear()

    def _begin(self, replica: Any) -> None:
        rank = replica.replica_rank
        self._replaced[rank] = self._replaced.get(rank, 0) + 1
        if self._replaced[rank] > _MOST_A_STEP:
            raise RuntimeError(f"rollout engine {rank} has died {self._replaced[rank]} times in one step")
        self._tell(f"rollout engine {rank} has died and is replaced; the run goes on", True)
        del self._watched[replica]
        # Those that wake, sleep or stop all engines would wait for it.
        self._weights.remove_replicas([replica])
        balancer = self._servers.global_load_balancer
        ray.get(balancer.remove_servers.remote([replica.server_address]))
        failed: list[Exception] = []

        def start() -> None:
            try:
                asyncio.run(_restart(replica))
            except Exception as error:  # noqa: BLE001 - raised in the driver's thread
                failed.append(error)

        thread = threading.Thread(target=start, name=f"engine-{rank}", daemon=True)
        thread.start()
        self._starts.append(_Start(replica, thread, failed))

    def _take_in(self, starts: list[_Start]) -> None:
        for start in starts:
            self._starts.remove(start)
            for error in start.failed:
                raise RuntimeError(
                    f"rollout engine {start.replica.replica_rank} cannot be replaced"
                ) from error
            ray.get([worker.__ray_call__.remote(_forget_server) for worker in start.replica.workers])
            self._weights.add_replicas([start.replica])
            self._watched[start.replica] = start.replica.watch()

    def _offer(self, starts: list[_Start]) -> None:
        for replica in [start.replica for start in starts]:
            at = self._servers.rollout_replicas.index(replica)
            self._servers.server_handles[at] = replica.server_handle
            self._servers.server_addresses[at] = replica.server_address
            balancer = self._servers.global_load_balancer
            ray.get(balancer.add_servers.remote({replica.server_address: replica.server_handle}))
            self._tell(f"rollout engine {replica.replica_rank} is back", False)


async def _restart(replica: Any) -> None:
    """Starts a replica's servers again, under their names."""
    # Those that are left: of an engine over several nodes, or around one that is dead.
    for server in replica.servers:
        ray.kill(server)
    mine = f"{replica._get_server_name_prefix()}server_{replica.replica_rank}_"
    # Ray gives a name back when it has heard of the death, and tells nobody.
    while any(name.startswith(mine) for name in ray.util.list_named_actors()):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    replica.servers = []
    await replica.launch_servers()


def _forget_server(worker: Any) -> None:
    """Runs in a trainer rank, which keeps the handle of the server that it sends weights to."""
    for part in getattr(worker, "worker_dict", {"": worker}).values():
        adapter: Any = getattr(part, "rollout", None)
        if hasattr(adapter, "server_handle"):
            adapter.server_handle = None
