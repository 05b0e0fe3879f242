"""The bad nodes of a user, for all of their runs: one file for each node.

    $XDG_STATE_HOME/verl-slurm/bad_nodes/CLUSTER/NODE.json      (mostly below ~/.local/state)

A file is a `BadNode`, 0600, replaced as a whole, so writers need no lock: any of their verdicts will do. A file that
is damaged, too large or another user's is passed over and named. To forget a node, remove its file.
"""

import os
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from verl_slurm.base.bounded import SMALL, decode_json
from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.files import private_dir, read_private, write_file
from verl_slurm.base.one_line import printable
from verl_slurm.slurm.commands import NAME

_TOLD_CHARS = 500


class BadNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that failed a check."""

    node: str
    reason: str
    since: datetime
    until: datetime
    """When it may be used again."""
    run: str = ""
    """The directory of the run that found it."""

    @property
    def told(self) -> str:
        return f"{self.node} until {self.until.astimezone():%d %b %H:%M} ({printable(self.reason)[:_TOLD_CHARS]})"


class Recalled(msgspec.Struct, frozen=True):
    """What is remembered of one cluster."""

    nodes: tuple[BadNode, ...] = ()
    """The newest first."""
    problems: tuple[str, ...] = ()
    """Files that were passed over, and why."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(bad.node for bad in self.nodes)


def folder(cluster: str) -> Path:
    """Returns where the nodes of a cluster are remembered."""
    # In the home: the login nodes and all nodes of a cluster see it, wherever runs lie.
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    # Two clusters may share a home and have equal names.
    return Path(base) / "verl-slurm" / "bad_nodes" / (cluster if NAME.fullmatch(cluster) else "cluster")


def remember(cluster: str, node: str, reason: str, run: Path, hours: float) -> None:
    """Writes a node down, for so many hours.

    Raises:
        OSError, PermissionRefused: the folder does not take it, or is another user's.
        ValueError: no node has such a name.
    """
    if NAME.fullmatch(node) is None:
        raise ValueError(f"no name of a node: {node!r}")
    now = datetime.now(UTC)
    told = printable(reason)[:_TOLD_CHARS]
    found = BadNode(node=node, reason=told, since=now, until=now + timedelta(hours=hours), run=str(run))
    write_file(private_dir(folder(cluster)) / f"{node}.json", msgspec.json.encode(found))


def recall(cluster: str) -> Recalled:
    """Returns the nodes whose time is not over, and removes the files of the others. Raises nothing."""
    now, nodes, problems = datetime.now(UTC), [], []
    place = folder(cluster)
    try:
        names = sorted(os.listdir(place))
    except (FileNotFoundError, NotADirectoryError):
        return Recalled()
    except OSError as error:
        # Without the memory a run starts all the same.
        return Recalled((), (f"{place}: {error.strerror}",))
    for name in names:
        if not name.endswith(".json") or name.startswith("."):
            continue
        path = place / name
        try:
            found = decode_json(read_private(path), BadNode, SMALL)
            if f"{found.node}.json" != name or NAME.fullmatch(found.node) is None:
                raise ValueError("it names another node")
            if found.until > now:
                nodes.append(found)
                continue
        except FileNotFoundError:  # another run has removed it
            continue
        except (OSError, ValueError, TypeError, RecursionError, VerlSlurmError) as error:
            said = error.one_line() if isinstance(error, VerlSlurmError) else str(error)
            problems.append(f"{printable(str(path))}: {printable(said)[:_TOLD_CHARS]}")
            continue
        with suppress(OSError):
            path.unlink()
    return Recalled(tuple(sorted(nodes, key=lambda bad: bad.since, reverse=True)), tuple(problems))
