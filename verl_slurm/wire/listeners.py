"""Tells which user listens on a TCP port of this machine, from /proc/net/tcp, which every user may read."""

import os
import pwd
from pathlib import Path
from typing import NamedTuple

__all__ = ["Listener", "listener_of"]

_LISTEN = "0A"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


class Listener(NamedTuple):
    """Identifies who listens.

    Attributes:
        uid: None: none is listed. The port is bound without listening yet, or /proc cannot be read.
    """

    uid: int | None

    @property
    def stranger(self) -> bool:
        """Returns whether it may be another user. Root does not count: it could read the token anyway."""
        return self.uid not in (os.geteuid(), 0)

    @property
    def name(self) -> str:
        if self.uid is None:
            return "a process that /proc/net/tcp does not show"
        try:
            return f"uid {self.uid} ({pwd.getpwuid(self.uid).pw_name})"
        except KeyError:
            return f"uid {self.uid}"


def listener_of(port: int) -> Listener:
    """Finds who listens on `port`, at any address. If several do, another user's listener comes before ours."""
    found = set()
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 7 and fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(int(fields[7]))
    strangers = found - {os.geteuid(), 0}
    return Listener(min(strangers or found, default=None))
