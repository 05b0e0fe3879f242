"""Checks the services of a run. Pure."""

import re
from collections import Counter
from collections.abc import Iterator

from verl_slurm.config.checks import Complaint
from verl_slurm.config.checks.options import OWN_OPTIONS, asks_for_gpus, option_complaints
from verl_slurm.config.checks.rank_environment import variable_complaints
from verl_slurm.config.schema import RunConfig
from verl_slurm.config.services import MOST_SERVICES, ServiceConfig

# A part of a log's name and of a variable's.
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TAKEN = {
    "token": "token, and VERL_SLURM_SERVICE_TOKEN is theirs together",
    "index": "index, and VERL_SLURM_SERVICE_INDEX is another variable",
}
_PATH = re.compile(r"/[!-~]*")
_FIRST_FREE_PORT = 1024
_KEYS = {"cpus-per-task": "cpus", "gpus-per-node": "gpus", "nodes": "nodes"}


def service_complaints(config: RunConfig) -> Iterator[Complaint]:
    """Yields every complaint about the section."""
    if len(config.services) > MOST_SERVICES:
        yield Complaint(
            "services", str(len(config.services)), f"at most {MOST_SERVICES}", "join some of them"
        )
    for name, service in config.services.items():
        key = f"services.{name}"
        if not _NAME.fullmatch(name) or name in _TAKEN:
            expected = "a small letter, then small letters, digits and `_`; at most 32"
            yield Complaint(key, _TAKEN.get(name, repr(name)), expected, "choose another name")
        yield from _one(key, service)
        for option in set(service.slurm) & set(OWN_OPTIONS):
            remedy = f"set {key}.{_KEYS[option]}" if option in _KEYS else "remove it"
            if option != "mem":
                yield Complaint(
                    f"{key}.slurm.{option}", "an option that submit sets itself", "another", remedy
                )
        yield from option_complaints(f"{key}.slurm", service.slurm)
        yield from variable_complaints(key, service.env, service.env_from_files)
    yield from _room(config)


def _one(key: str, service: ServiceConfig) -> Iterator[Complaint]:
    words = service.command
    if any("\0" in word for word in words) or not words[0].strip() or words == ("-m",):
        yield Complaint(f"{key}.command", repr(list(words)), "a program and its arguments", "write it out")
    if service.probe != "tcp" and not _PATH.fullmatch(service.probe):
        yield Complaint(f"{key}.probe", repr(service.probe), "tcp, or a path", f"e.g. {key}.probe: /health")
    if 0 < service.port < _FIRST_FREE_PORT:
        yield Complaint(
            f"{key}.port", str(service.port), "0 (any free one), or 1024 to 65535", "take e.g. 8000"
        )
    if service.slurm and not service.nodes:
        yield Complaint(f"{key}.slurm", "options, and no nodes of its own", "nodes", f"set {key}.nodes")


def _room(config: RunConfig) -> Iterator[Complaint]:
    """Checks ports, CPUs and GPUs against what the nodes have."""
    services, slurm = config.services, config.slurm
    beside = {name: service for name, service in services.items() if not service.nodes}
    ports = Counter(service.port for service in beside.values() if service.port)
    for port in (port for port, times in ports.items() if times > 1):
        yield Complaint(
            "services", f"port {port} twice on one node", "another port for each", "leave one at 0"
        )
    for what, there in (("cpus", slurm.cpus_per_node), ("gpus", slurm.gpus_per_node)):
        if what == "gpus" and asks_for_gpus(slurm.extra) and not there:
            continue  # asked for in other words of sbatch's
        of_ranks = 1 if what == "cpus" else 0
        if what == "gpus" and config.distributed.device != "cpu":
            of_ranks = config.distributed.ranks_per_node
        taken = sum(getattr(service, what) for service in beside.values())
        if taken and taken + of_ranks > there:
            yield Complaint(
                f"services: {what} of {', '.join(beside)}",
                f"{taken}, and {of_ranks} for the ranks",
                f"together at most slurm.{what}_per_node={there}",
                f"raise slurm.{what}_per_node, or give them nodes of their own",
            )
        for name, service in services.items():
            if service.nodes and not service.slurm and getattr(service, what) > there:
                yield Complaint(
                    f"services.{name}.{what}",
                    str(getattr(service, what)),
                    f"at most slurm.{what}_per_node={there}, on nodes of the same kind as the ranks'",
                    f"raise that, or name the kind of its nodes: services.{name}.slurm: {{partition: ...}}",
                )
