"""Reads the facts of this machine: Slurm's programs and version, GPUs, free ports, the user."""

import os
import pwd
import random
import re
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from verl_slurm.base.errors import ConfigError, SlurmMissing

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "scontrol", "sbatch", "srun")
# Debian puts the daemons into directories that are not in an ordinary user's PATH
EXTRA_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"


def find_programs() -> dict[str, str]:
    """Returns the absolute paths of the required programs. SlurmMissing names every one that is not there."""
    path = f"{os.environ.get('PATH', '')}:{EXTRA_PATH}"
    found = {name: shutil.which(name, path=path) for name in _PROGRAMS}
    if missing := [name for name, where in found.items() if where is None]:
        get = "apt-get install slurm-wlm munge (not to be started)"
        if os.geteuid() != 0:
            # The cluster itself needs no root, its installation does.
            get = f"ask an administrator of this machine for: {get}"
        raise SlurmMissing(
            "the embedded cluster needs the programs of Slurm and munge",
            found=f"no {', '.join(missing)}",
            remedy=f"{get}, or submit with --cluster local",
        )
    return {name: where for name, where in found.items() if where is not None}


def slurm_version(slurmctld: str) -> tuple[tuple[int, int], str]:
    """Returns for example `(22, 5)` and `22.05.8`."""
    done = subprocess.run(
        [slurmctld, "-V"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=15, check=False
    )
    match = re.search(r"(\d+)\.(\d+)(?:\.\d+)?", done.stdout)
    if match is None:
        raise SlurmMissing(
            "slurmctld does not say its version",
            where=slurmctld,
            found=done.stdout[:80],
            remedy="reinstall the package slurm-wlm",
        )
    return (int(match[1]), int(match[2])), match[0]


def real_gpus(devices: Path = Path("/dev")) -> list[str]:
    """Lists the device files of NVIDIA's GPUs, by number."""
    found = {
        int(m[1]): path for path in devices.iterdir() if (m := re.fullmatch(r"nvidia([0-9]+)", path.name))
    }
    return [str(found[number]) for number in sorted(found)]


def user_name() -> str:
    """Returns the login name, for slurm.conf."""
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        # slurmctld takes no user without a name.
        raise ConfigError(
            "the embedded cluster needs a user who has a name",
            where="/etc/passwd",
            found=f"no line for uid {uid}",
            remedy="add one, run as another user of the container, or submit with --cluster local",
        ) from None


def is_known_by_loopback() -> bool:
    """Returns whether the address of this machine's name is 127.0.0.1. On Debian it is 127.0.1.1; it may have none."""
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname()) == "127.0.0.1"
    return False


def free_ports(count: int) -> tuple[int, ...]:
    """Returns `count` TCP ports that are free now, below the range from which the kernel assigns ports."""
    rng = random.SystemRandom()
    ports: list[int] = []
    for _ in range(1000):
        if len(ports) == count:
            break
        # Below 32768, where Linux begins to assign ports by itself (ip_local_port_range): none is taken by chance
        # meanwhile.
        port = rng.randrange(10000, 32000)
        if port in ports:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
    return tuple(ports)
