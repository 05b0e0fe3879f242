"""`python -m verl_slurm.verl.gather_rollouts NODES GPUS SECONDS`: ends when Ray has all nodes and GPUs of the job.

It is a separate process: it connects to Ray with its own settings, and the launcher, which stays for the whole job,
needs none of Ray's threads. It waits for a placement group that needs one place on every node, so Ray notifies it
without polling.
"""

import sys
import time

_TRY_EVERY_S = 0.2


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
