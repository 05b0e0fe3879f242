"""Builds the command lines and the environment of Ray over a job's nodes, as values; pure. As a program it waits:

    python -P -m verl_slurm.loops.verl.ray_nodes NODES GPUS SECONDS

ends when Ray has all nodes and GPUs of the job: so the launcher needs none of Ray's threads. It waits for a placement
group with one place on every node.

The lead has given the head's address to all nodes with their launch. Every other port is free at that moment, so two
runs may share a node. No process joins, or submits code, without the token: all of Ray's own ports require it
(RAY_AUTH_MODE=token). It is derived from the lead's own secret, and differs in each restart.
docs/decisions/0009-verl-on-ray.md has the findings about Ray 2.60.
"""

import hashlib
import hmac
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from verl_slurm.loops import rendezvous

_SOCKET_MOST = 107
"""Bytes of a Unix socket's path (unix(7))."""
_BELOW_TEMP = len("/session_2026-11-21_21-04-03_422851_4194304/sockets/plasma_store")
_STORE_SHARE = 0.3
"""Of the node's memory: Ray's own default. Ray takes it of the whole machine's, but Slurm may have given us a part."""
_TRY_EVERY_S = 0.2
_LEAST_STORE = 80 << 20
"""Ray refuses less (75 MiB)."""
_EXTERNAL = "VERL_USE_EXTERNAL_MODULES"
_OUR_MODULE = "verl_slurm.loops.verl.verl_ppo"
_BELOW_RAY = str(Path(rendezvous.__file__).with_name("below_ray"))


def ray_argv(
    python: str,
    *,
    head: str,
    is_head: bool,
    own_address: str,
    temp: Path,
    ranks: int,
    cpus: int,
    store_bytes: int | None,
    free_port: int = 0,
) -> list[str]:
    """Returns `ray start --block` for one node.

    Args:
        head: host:port of Ray's GCS on the first node.
        own_address: under which other nodes reach this one.
        temp: Ray's directory. Ray makes that 0777 itself: it has to be below one that is private.
        ranks: training processes of this node; Ray's "GPUs", whatever the device is.
        store_bytes: of Ray's object store; None: Ray's own choice.
        free_port: on the head, for Ray's client server, which cannot be left out.
    """
    argv = [python, "-P", "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    argv += ["--log-color=false", f"--node-ip-address={own_address}", f"--temp-dir={temp}"]
    # 0: free ones. The next run on this node would collide with fixed ones.
    argv += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    # Ray's CPUs are names to count with, not cores: with fewer than verl's actors ask for, they wait without end.
    argv += [f"--num-cpus={max(cpus, 8 + 8 * ranks)}", f"--num-gpus={ranks}"]
    if store_bytes is not None:
        argv.append(f"--object-store-memory={store_bytes}")
    if not is_head:
        return [*argv, f"--address={head}"]
    assert free_port, "or it takes 10001"
    argv += ["--head", f"--port={head.rpartition(':')[2]}", f"--ray-client-server-port={free_port}"]
    return [*argv, "--include-dashboard=false", "--no-monitor"]


def ray_environment(environ: Mapping[str, str], token_file: Path, head: str, nodes: int) -> dict[str, str]:
    """Returns the environment of Ray's own processes, which pass it to every actor, and of verl's driver."""
    modules = [name for name in environ.get(_EXTERNAL, "").split(",") if name and name != _OUR_MODULE]
    ours = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_ADDRESS": head,
        "RAY_USAGE_STATS_ENABLED": "0",
        _EXTERNAL: ",".join([*modules, _OUR_MODULE]),
        # A directory with a sitecustomize.py: it is the one hook that runs in all processes that Ray, verl and vLLM
        # start.
        "PYTHONPATH": ":".join(filter(None, [_BELOW_RAY, environ.get("PYTHONPATH", "")])),
        "TORCH_GLOO_LAZY_INIT": "0",  # a group's connections are checked when it is built
    }
    # Ray kills workers when the whole machine's memory is short. Slurm has given us a part of it and watches that.
    unless_said = {"RAY_memory_monitor_refresh_ms": "0"}
    if nodes == 1:
        unless_said["GLOO_SOCKET_IFNAME"] = "lo"
    others = {key: value for key, value in environ.items() if key != "RAY_AUTH_TOKEN"}
    return unless_said | others | ours


def ray_token(secret: str, attempt: int, restart: int) -> str:
    """Returns the token of one restart's Ray, which reveals nothing of `secret`, the lead's (`lead.json`)."""
    message = f"ray {attempt} {restart}".encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def object_store_bytes(mem_mb: int, shm_free: int) -> int | None:
    """Returns Ray's share of the memory that Slurm gives this node, as far as /dev/shm has it; None: unknown."""
    if mem_mb == 0:
        return None
    return max(_LEAST_STORE, min(int(mem_mb * (1 << 20) * _STORE_SHARE), int(shm_free * 0.9)))


def temp_fits(temp: Path) -> bool:
    """Returns whether the paths of Ray's sockets below `temp` are short enough."""
    return len(str(temp).encode()) + _BELOW_TEMP <= _SOCKET_MOST


def main(argv: list[str]) -> int:
    """Returns 0 once the nodes are there, and 1 with the reason on stderr otherwise."""
    import ray
    from ray.util.placement_group import placement_group

    nodes, gpus, patience_s = int(argv[0]), int(argv[1]), float(argv[2])
    until = time.monotonic() + patience_s
    while True:
        try:
            ray.init(logging_level="ERROR", log_to_driver=False)
            break
        except ConnectionError as error:  # the head is not there yet
            if time.monotonic() > until:
                sys.stderr.write(f"RayError: Ray's head did not start within {patience_s:.0f} s: {error}\n")
                return 1
            time.sleep(_TRY_EVERY_S)
    group = placement_group([{"CPU": 1, "GPU": gpus}] * nodes, strategy="STRICT_SPREAD")
    if group.wait(max(1.0, until - time.monotonic())):
        ray.shutdown()  # releases its reservation, too
        return 0
    there = [node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]]
    sys.stderr.write(
        f"RayError: Ray has {len(there)} of {nodes} nodes after {patience_s:.0f} s (GPUs on each: "
        f"{', '.join(f'{count:.0f}' for count in there)}; {gpus} are wanted); are connections between nodes allowed?\n"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
