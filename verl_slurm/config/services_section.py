"""Declares the section `services` of a configuration: processes beside the ranks, and which nodes they get."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from verl_slurm.config.section import NonNegative, PositiveFloat, Section

MOST_SERVICES = 16


class ServiceConfig(Section, frozen=True):
    """A process that the ranks need or use, e.g. a judge model or a sandbox (docs/services.md).

    It is started before the ranks, probed, restarted, and ended with the job.
    """

    command: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1)], ...], msgspec.Meta(min_length=1, max_length=1000)
    ]
    """A program, a Python file, or `-m` and a module, and its arguments. `{port}` and `{host}` in a word become where
    it has to listen. A relative Python file is resolved from the directory of the YAML."""
    nodes: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """Nodes of its own, beyond distributed.nodes, with one such process on each. 0: one process, on the first node of
    the ranks."""
    cpus: NonNegative = 0
    """CPUs that it may use on a node. Beside the ranks they are taken from theirs. 0: all that the node has."""
    gpus: NonNegative = 0
    """GPUs that it sees on a node. Beside the ranks they are the last ones, and the ranks do not see them. 0: none."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Of its node, for a server that cannot be told one. 0: a free one, another at each start. The ranks' address of
    the service stays the same."""
    probe: str = "tcp"
    """When it counts as ready. `tcp`: its port takes a connection. A path, e.g. `/health`: an HTTP GET there is
    answered with 2xx. The probe carries no token."""
    start_timeout_s: PositiveFloat = 600.0
    """From its start to its first answer, and later without an answer: a service that takes longer is restarted."""
    restarts: NonNegative = 3
    """Restarts in a row. One that was ready for ten minutes has them all again."""
    needed: bool = True
    """true: the ranks wait until it is ready. If it cannot be restarted any more, the run saves and is requeued. false:
    the journal says so, and training goes on."""
    env: dict[str, str | int] = {}
    """Variables of its environment, beside those of the run's `env`."""
    env_from_files: dict[str, str] = {}
    """Secrets of its environment, in the form of the run's `env_from_files`, which it does not get."""
    slurm: dict[str, str | int | bool] = {}
    """Nodes of another kind: sbatch options by their long names, e.g. {partition: cpu, mem: 64G}. The job is then a
    heterogeneous one, and these nodes a component of it, with `cpus` and `gpus` of its own."""

    @property
    def is_apart(self) -> bool:
        """Returns whether its nodes are a component of their own."""
        return bool(self.nodes and self.slurm)


def nodes_of_services(ranks_nodes: int, services: Mapping[str, ServiceConfig]) -> dict[str, range]:
    """Returns the places of each service among all nodes of the job, which Slurm counts over its components.

    The ranks have the first nodes. Components of their own come last, since the first component holds the ranks.
    """
    places, there = {}, ranks_nodes
    for apart in (False, True):
        for name, service in services.items():
            if not service.nodes:
                places[name] = range(1)
            elif service.is_apart == apart:
                places[name] = range(there, there + service.nodes)
                there += service.nodes
    return places


def nodes_of_components(ranks_nodes: int, services: Mapping[str, ServiceConfig]) -> list[int]:
    """Returns the number of nodes of each component of the job; a job that is not heterogeneous has one."""
    first = ranks_nodes + sum(service.nodes for service in services.values() if not service.is_apart)
    return [first, *(service.nodes for service in services.values() if service.is_apart)]
