"""What a campaign does to a run: every way to interrupt it, and whom it strikes.

Called by: tests/slurm_cluster/test_campaign.py.
"""

import contextlib
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.devcluster.killed_daemons import fail_daemon, restore_daemon
from tests.fakes.faulty_mount import faulty_mount
from tests.harness import LiveRun
from verl_slurm.config.load import load_resolved
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import fail_node, preempt, restore_node
from verl_slurm.slurm.facts import JobFacts

WAYS = ("preempt", "requeue", "save", "kill_rank", "kill_rank", "kill_node", "kill_lead_node")
"""Of these `make test` draws, with a fixed seed: another tuple would be another campaign."""
EVERY_WAY = (*WAYS, "lose_node", "lose_lead_node", "down_node", "suspend")
"""Beyond processes: a node without power (its slurmd dies as well; Slurm finds out by itself), a node that an operator
sets DOWN, a job that Slurm stops and continues."""
ENVIRONMENT = (
    "slurmctld_stopped",
    "slurmctld_killed",
    "full",
    "no_inodes",
    "EIO",
    "dead",
    "silent",
    "short_limit",
)
"""Nothing of the run is struck, but what it needs; each for some seconds, and then it is back. Half of the time a start
falls into it."""
ASIDE = frozenset({"save", "suspend"})
"""These interrupt nothing: the same ranks go on."""


def fill(place: Path, data: bytes) -> None:
    """Raises OSError: it is full."""
    for number in itertools.count():
        (place / str(number)).write_bytes(data)


class Mischief:
    """Disturbs one run, and mends the cluster behind it.

    Args:
        dice: who is struck, where there is a choice.
    """

    def __init__(self, run: LiveRun, cluster: DevCluster, dice: random.Random) -> None:
        self._run, self._cluster, self._dice = run, cluster, dice
        self._mend: list[Callable[[], object]] = []

    def do(self, way: str) -> bool:
        """Disturb the run; False where there was nobody to disturb at this moment."""
        facts = self._run.facts()
        if facts.batch_host is None:
            return False
        match way:
            case _ if way in ENVIRONMENT:
                if self._dice.random() < 0.5 and (ranks := self._run.ranks()):
                    self._kill([self._dice.choice(ranks)])
                self._fail_environment(way)
            case "preempt":
                preempt(self._cluster, int(self._run.job_id), hold_s=1)
            case "requeue":
                self._run.slurm("scontrol", "requeue", self._run.job_id)
            case "save":
                self._run.slurm("scancel", "-b", "-s", "USR1", self._run.job_id)
            case "suspend":
                self._suspend()
            case "kill_rank":
                ranks = self._run.ranks()
                return self._kill(ranks and [self._dice.choice(ranks)])
            case "kill_node":
                others = self._run.other_nodes()
                return bool(others) and self._kill(self._run.processes(self._dice.choice(others)))
            case "kill_lead_node" | "lose_lead_node" if not self._run.other_nodes():
                return False  # no agent is left to ask for a requeue: docs/limits.md
            case "kill_lead_node":
                return self._kill(self._run.processes(facts.batch_host))
            case _:
                return self._take_node(way, facts)
        return True

    def mend(self) -> None:
        """Bring back the nodes that were taken."""
        while self._mend:
            self._mend.pop()()

    def _kill(self, victims: list) -> bool:  # type: ignore[type-arg]
        if victims:
            self._run.kill(victims)
        return bool(victims)

    def _suspend(self) -> None:
        self._run.slurm("scontrol", "suspend", self._run.job_id)
        try:
            time.sleep(self._dice.uniform(0.5, 5.0))
        finally:
            self._run.slurm("scontrol", "resume", self._run.job_id)

    def _fail_environment(self, way: str) -> None:
        run, seconds = self._run.paths, self._dice.uniform(5.0, 90.0 if "slurmctld" in way else 40.0)
        with contextlib.ExitStack() as faults:
            match way:
                case "slurmctld_killed":
                    fail_daemon(self._cluster, "slurmctld")
                    faults.callback(restore_daemon, self._cluster, "slurmctld")
                case "slurmctld_stopped":
                    pid = int((self._cluster.directory / "run" / "slurmctld.pid").read_text())
                    faults.callback(os.kill, pid, signal.SIGCONT)
                    os.kill(pid, signal.SIGSTOP)
                case "short_limit":
                    job, longer = f"JobId={self._run.job_id}", "TimeLimit=1000"
                    faults.callback(self._run.slurm, "scontrol", "update", job, longer, check=False)
                    self._run.slurm("scontrol", "update", job, "TimeLimit=1", check=False)
                case "full" | "no_inodes":
                    faults.callback(shutil.rmtree, filler := run.root.parent / "filler")
                    filler.mkdir()
                    with contextlib.suppress(OSError):
                        fill(filler, bytes(1 << 20) if way == "full" else b"")
                case "EIO" | "dead" | "silent":
                    faults.enter_context(faulty_mount(run.checkpoints, way))
            time.sleep(seconds)

    def _take_node(self, way: str, facts: JobFacts) -> bool:
        others = self._run.other_nodes()
        if way == "lose_lead_node":
            node = facts.batch_host
        elif way == "lose_node":
            node = self._dice.choice(others) if others else None
        elif load_resolved(self._run.paths.run_yaml).may_lose_nodes:
            # Not the first one: Slurm 22.05 would hold the job (docs/limits.md).
            node = self._dice.choice(others) if others else None
        else:
            node = self._dice.choice([*others, facts.batch_host])
        if node is None or (node == facts.batch_host and not others):
            return False
        if way == "down_node":
            self._set_node(node, "down", "reason=campaign")
            # Refused where the node has come back by itself, as it does where ReturnToService=2.
            self._mend.append(lambda: self._set_node(node, "resume", check=False))
        else:
            fail_node(self._cluster, node)
            self._mend.append(lambda: restore_node(self._cluster, node, timeout_s=120))
        return True

    def _set_node(self, node: str, state: str, *more: str, check: bool = True) -> None:
        self._run.slurm("scontrol", "update", f"nodename={node}", f"state={state}", *more, check=check)
