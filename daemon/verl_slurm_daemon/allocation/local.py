"""Two `Allocation`s without Slurm: this machine, or the hosts of a hostfile."""

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from typing import Literal

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import RunOwner
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.processes import KnownProcess
from verl_slurm.config.schema import RunConfig, nodes_of_services
from verl_slurm.journal.causes import CauseKind
from verl_slurm.journal.events import RequeueAsked, Started
from verl_slurm.journal.files import read_events
from verl_slurm.journal.history import since
from verl_slurm.wire.environment import LOCAL_RESTART_VARIABLE
from verl_slurm_daemon.allocation.contract import Allocation, Outlook
from verl_slurm_daemon.decide.inputs import CauseKnown, RequeueAnswered


class LocalAllocation(Allocation):
    """This machine without Slurm: the "nodes" are agents on it, and a requeue is a new attempt in this very process.

    Signals stand for Slurm's events, so that the same path can be tried on a laptop. SIGUSR2 is a preemption with
    `PREEMPTION_GRACE_S` to live, or the requeue that `verl-slurm requeue` has written down before. SIGTERM and SIGINT
    are the user's cancel, SIGUSR1 asks for a save.
    """

    PREEMPTION_GRACE_S = 30.0
    CANCEL_GRACE_S = 10.0
    cluster: Literal["slurm", "local"] = "local"
    starts_all_agents = True

    def __init__(self, config: RunConfig, paths: RunPaths) -> None:
        self.job_id = os.environ.get("SUBMITIT_LOCAL_JOB_ID") or f"local-{os.getpid()}"
        self.restart = int(os.environ.get(LOCAL_RESTART_VARIABLE) or 0)
        self._config, self._paths = config, paths

    async def address(self) -> str:
        return "127.0.0.1"

    async def cause(self, trigger: str) -> CauseKnown:
        signal = trigger.split(" ", 1)[0]
        if signal == "SIGUSR2":
            kind = await asyncio.to_thread(self._asked)
            left = None if kind == "operator_requeue" else self.PREEMPTION_GRACE_S
            return CauseKnown(kind, f"{trigger}; no Slurm", left)
        if signal in ("SIGTERM", "SIGINT"):
            return CauseKnown("cancel", f"{trigger}; no Slurm", self.CANCEL_GRACE_S)
        if signal == "SIGUSR1":
            return CauseKnown("operator", f"{trigger}; no Slurm", None)
        # SIGCONT: it follows every stop, as `fg` at a terminal does after Ctrl-Z.
        return CauseKnown("none", f"{trigger}; no Slurm", None)

    def _asked(self) -> CauseKind:
        """Returns what a user has asked for since this attempt began; if nothing, it is a preemption."""
        now = [event for event in since(read_events(self._paths), Started) if isinstance(event, RequeueAsked)]
        return "preemption" if not now else "requeued" if now[-1].at_once else "operator_requeue"

    async def outlook(self) -> Outlook:
        return Outlook(answered=True)

    async def requeue(self, delay_s: int | None = None, *, hold: bool = False) -> RequeueAnswered | str:
        if hold:
            said = f"nothing holds a job here: `verl-slurm submit {shell_word(self._paths.root)}` goes on"
            return RequeueAnswered(ExitCode.REQUEUE_FAILED, said)
        await asyncio.sleep(delay_s or 0)  # the delay itself: only this process starts the next one
        return RequeueAnswered(ExitCode.REQUEUED, "no Slurm: the next attempt starts in place of this one")

    def now(self) -> float:
        return time.time()

    async def still_alive(self, owner: RunOwner) -> str:
        # Nothing is known of another host's processes; and the next attempt is this very process.
        if owner.host != socket.gethostname() or owner.pid == os.getpid():
            return ""
        # By its birth: a pid is reused, and dates change when the clock is set.
        lives = KnownProcess(owner.pid, owner.born).is_running()
        return f"process {owner.pid} of job {owner.job_id} lives" if lives else ""

    async def start_step(
        self, argv: list[str], service: str = "", names: Sequence[str] = ()
    ) -> list[asyncio.subprocess.Process]:
        nodes = range(self._config.distributed.nodes)
        if service:
            nodes = nodes_of_services(len(nodes), self._config.services)[service]
        return [await self._start(argv, number, f"local{node}") for number, node in enumerate(nodes)]

    async def _start(self, argv: list[str], node: int, name: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            # As in a step of Slurm's, so that an agent needs to know of one kind of place.
            env={**os.environ, "SLURM_NODEID": str(node), "SLURMD_NODENAME": name},
            # A Ctrl-C at a terminal reaches the lead alone, which then decides about its agents.
            start_new_session=True,
        )


class HostfileAllocation(LocalAllocation):
    """Several machines without Slurm: as `LocalAllocation`, but the other hosts start their own agents."""

    starts_all_agents = False

    def __init__(self, config: RunConfig, paths: RunPaths, host: str) -> None:
        super().__init__(config, paths)
        self._host = host

    async def address(self) -> str:
        return self._host

    async def start_step(
        self, argv: list[str], service: str = "", names: Sequence[str] = ()
    ) -> list[asyncio.subprocess.Process]:
        # Services are beside the ranks, here (`hostfile.check_hosts`).
        return [await self._start(argv, 0, self._host)]
