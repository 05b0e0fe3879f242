"""Several machines without Slurm: a hostfile names them, and each one is started by hand (or by mpirun, pdsh).

```
worker-0 slots=8
worker-1 slots=8      # comments and empty lines are skipped
```

On the first host: `verl-slurmd lead --run RUN --hostfile FILE`; on each of the others: `verl-slurmd join
--run RUN --hostfile FILE`. The run directory lies on a file system that all hosts see; nothing is started
over SSH. The lead publishes its address and the number of each restart in `RUN/control/lead.json`. A joined
host starts an agent for every new number.
"""

import re
from pathlib import Path
from typing import NamedTuple

from verl_slurm.base.bounded import Limit, TooMuch, read_regular
from verl_slurm.base.errors import ConfigError
from verl_slurm.config.schema import RunConfig

_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.:-]{0,252})\s+slots=([1-9]\d{0,3})", re.ASCII)


_MAX_BYTES = 1 << 20


class Host(NamedTuple):
    """One line of the file: the host and how many ranks fit."""

    name: str
    slots: int


def parse_hostfile(data: bytes, source: object) -> tuple[Host, ...]:
    """Returns the hosts in their order; the first one leads. Raises ConfigError: the text is no hostfile."""
    if len(data) > _MAX_BYTES:
        raise _wrong(source, f"{len(data)} bytes", f"at most {_MAX_BYTES}")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _wrong(source, f"byte {error.start} is no UTF-8", "text") from None
    hosts: list[Host] = []
    seen: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise _wrong(f"{source}:{number}", content[:80], "NAME slots=N")
        # `find_host` finds the first line alone, so the lead would wait for the agent of the second.
        if match[1] in seen:
            raise _wrong(f"{source}:{number}", f"{match[1]} again", "each host once")
        seen.add(match[1])
        hosts.append(Host(match[1], int(match[2])))
    if not hosts:
        raise _wrong(source, "no host", "a line for each host")
    return tuple(hosts)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Reads a file as `parse_hostfile` does. Raises ConfigError also for no regular file, and OSError."""
    try:
        data = read_regular(path, Limit(num_bytes=_MAX_BYTES), follow=True)
    except TooMuch as error:
        raise _wrong(path, str(error), f"a file of at most {_MAX_BYTES} bytes") from None
    return parse_hostfile(data, path)


def check_hosts(hosts: tuple[Host, ...], config: RunConfig) -> None:
    """Raises ConfigError: the hosts do not fit the run, or it asks for what needs Slurm."""
    shape = config.distributed
    if len(hosts) != shape.nodes:
        raise _wrong("distributed.nodes", f"{len(hosts)} hosts", f"{shape.nodes}")
    if len(hosts) > 1 and config.checkpoint.local_dir:
        # Without Slurm there is no way to make every node send the parts it holds.
        raise _wrong(
            "checkpoint.local_dir", config.checkpoint.local_dir, "null, with several hosts and no Slurm"
        )
    for name, service in config.services.items():
        if service.nodes:
            # Its host would have to be started there by hand.
            raise _wrong(f"services.{name}.nodes", f"{service.nodes}", "0, with several hosts and no Slurm")
    for host in hosts:
        if host.slots < shape.ranks_per_node:
            raise _wrong(host.name, f"slots={host.slots}", f"slots={shape.ranks_per_node} or more")


def find_host(hosts: tuple[Host, ...], name: str) -> int:
    """Returns the index of a host, by its full or short name. Raises ConfigError: the file lacks it."""
    for place, host in enumerate(hosts):
        if name == host.name or name.split(".")[0] == host.name:
            return place
    raise ConfigError(
        "this host is not in the hostfile",
        where=name,
        expected=", ".join(host.name for host in hosts[:8]),
        remedy="add it, or say which line this host is with --host NAME",
    )


def _wrong(where: object, found: str, expected: str) -> ConfigError:
    return ConfigError(
        "the hostfile does not fit", where=where, found=found, expected=expected, remedy="fix the hostfile"
    )
