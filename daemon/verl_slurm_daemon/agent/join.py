"""Runs on each further host of a run without Slurm: starts an agent for each restart that the lead announces."""

import asyncio
import contextlib
import time
from pathlib import Path

from verl_slurm.base.errors import VerlSlurmError, WireError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.processes import become_subreaper
from verl_slurm.config.load import load_own
from verl_slurm.journal.events import Ended
from verl_slurm.journal.files import read_events
from verl_slurm.wire.lead_file import LeadAddress, read_lead_address
from verl_slurm_daemon.agent.node import Agent
from verl_slurm_daemon.allocation.hostfile import check_hosts, find_host, read_hostfile

# Polled: the run directory may be on a network file system, which reports no changes.
_LOOK_S = 0.3


def run_join(root: Path, hostfile: Path, name: str) -> ExitCode:
    """Takes part in the run as the host `name`; returns how the run ended."""
    become_subreaper()
    paths = RunPaths(root)
    config = load_own(paths.run_yaml)
    hosts = read_hostfile(hostfile)
    check_hosts(hosts, config)
    place = find_host(hosts, name)
    # Ends that are in the journal already are those of former leads.
    since = len(read_events(paths))
    seen = (0, 0)
    while True:
        address = _address(paths)
        if address is not None and address.restart > 0 and (address.attempt, address.restart) != seen:
            seen = (address.attempt, address.restart)
            # The lead may have left in between: a later look finds the next lead, or the end.
            with contextlib.suppress(VerlSlurmError):
                asyncio.run(_one_restart(paths, address.attempt, hosts[place].name, place))
        ended = _ended(paths, since)
        if ended is not None:
            return ended
        time.sleep(_LOOK_S)


async def _one_restart(paths: RunPaths, attempt: int, node: str, place: int) -> None:
    await Agent(paths, load_own(paths.run_yaml), attempt, node, place).run()


def _address(paths: RunPaths) -> LeadAddress | None:
    try:
        return read_lead_address(paths)
    except (OSError, WireError):
        return None  # there is no lead now


def _ended(paths: RunPaths, since: int) -> ExitCode | None:
    for event in read_events(paths)[since:]:
        if isinstance(event, Ended) and event.is_final:
            return event.code
    return None
