"""Asks slurmctld and gives it commands: absolute paths, deadlines, the outcome read back.

Measured on 22.05.8 (cluster of 4 slurmds on one machine): `scontrol show job` takes 8 ms. With slurmctld dead,
`scontrol` tries for 9 s and more, hence the deadline below that.
"""

import asyncio
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec

from verl_slurm.base.errors import NotFound, SlurmMissing, SlurmRefused
from verl_slurm.slurm import commands, parse
from verl_slurm.slurm.facts import JobFacts, NodeFacts, PartitionFacts
from verl_slurm.slurm.requeue_rules import RequeueOutcome, is_answer, names_expedite, offered, refuse_requeue
from verl_slurm.slurm.runner import Completed, run_command, slurm_words, waiting_for

# Slurm may still report the old start time while the job completes; the client looks this often, up to the time below
_READ_BACK_STEPS = 5
_READ_BACK_PAUSE_S = 0.1
_DELAY_SLACK_S = 5
_SETTLE_S = 8.0
"""Seconds after Slurm's yes to a requeue, for the start time and reading back together. TERM has come, and KillWait
runs."""
_OWN_DELAY_S = 120
"""Slurm's delay before it starts a requeued job again (cred_expire, by default)."""
_AHEAD = "this node's clock is far ahead: Slurm's own delay holds"
_ASIDE_S = 3.0
"""Deadline of a question that is not essential: at a preemption's end, KillWait runs."""

Now = Callable[[], datetime]
"""Returns slurmctld's time."""


def _today() -> datetime:
    return datetime.now(UTC)


class SlurmClient:
    """Asks and commands slurmctld. Holds no connection; every call is one command, of `timeout_s` at most.

    `env`: of the commands (SLURM_CONF chooses the cluster); None: this process's.
    """

    def __init__(self, env: Mapping[str, str] | None = None, *, timeout_s: float = 8.0) -> None:
        base = dict(os.environ if env is None else env)
        # variables that change what the commands print or do would be a hidden second command line
        for name in list(base):
            if name.startswith(("SCONTROL_", "SQUEUE_", "SINFO_", "SCANCEL_", "POSIXLY_CORRECT")):
                del base[name]
        # English, because answers are told apart by their words; times in seconds since 1970, free of zones and summer
        # time.
        self._env = base | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
        self._timeout_s = timeout_s
        self._programs: dict[str, str] = {}

    def _program(self, name: str) -> str:
        if name not in self._programs:
            found = shutil.which(name, path=self._env.get("PATH", os.defpath))
            if found is None:
                raise SlurmMissing(
                    f"there is no {name} here",
                    where=f"PATH={self._env.get('PATH', '')}",
                    remedy="run this on a Slurm login node, start `verl-slurm devcluster start`, "
                    "or submit with --cluster local",
                )
            # Absolute: a relative element of PATH names another program after the next change of the working directory.
            self._programs[name] = os.path.abspath(found)
        return self._programs[name]

    async def run(self, argv: list[str], within_s: float | None = None, cwd: str | None = None) -> Completed:
        """Runs one command to its end, within `within_s` if that is less than the client's deadline.

        Raises SlurmMissing: no such program, or as `run_command`.
        """
        command = [self._program(argv[0]), *argv[1:]]
        timeout_s = self._timeout_s if within_s is None else max(0.0, min(self._timeout_s, within_s))
        try:
            # In a thread: the runner blocks TERM for the command, and does without asyncio's watching of children.
            with waiting_for(" ".join(argv[:2]), timeout_s):
                return await asyncio.to_thread(run_command, command, self._env, timeout_s, cwd)
        except RuntimeError as error:  # no thread is available
            raise SlurmMissing(
                "Slurm cannot be asked",
                where=" ".join(argv),
                found=str(error),
                remedy="see what uses up this node's processes: ulimit -u, pids.max of the job's control group",
            ) from error

    async def _ask(self, argv: list[str], what: str, where: object, within_s: float | None = None) -> str:
        """Returns the output of a command that only reads."""
        done = await self.run(argv, within_s)
        if done.exit_code == 0:
            return done.stdout
        said = slurm_words(f"{done.stderr}\n{done.stdout}")
        lowered = said.lower()
        # The exit code is 1 for an unknown job as for a slurmctld that is away; the words tell them apart.
        if "invalid job id" in lowered or "not found" in lowered:
            raise NotFound(what, where=where, found=said, remedy="squeue --me and sinfo list what there is")
        raise SlurmMissing(
            "Slurm does not answer",
            where=" ".join(argv),
            found=said or f"exit code {done.exit_code}",
            remedy="see whether slurmctld is up: scontrol ping",
        )

    async def _change(
        self,
        argv: list[str],
        what: str,
        where: object,
        remedy: str | None = None,
        *,
        within_s: float | None = None,
    ) -> None:
        """Runs a command that changes something. Raises SlurmRefused: Slurm said no. SlurmMissing: no answer."""
        done = await self.run(argv, within_s)
        # scancel may say so with an exit code of 0.
        if done.exit_code != 0 or (argv[0] == "scancel" and "error" in done.stderr.lower()):
            raise SlurmRefused(what, where=where, found=slurm_words(done.stderr), remedy=remedy)

    async def job(self, job_id: int, within_s: float | None = None) -> JobFacts:
        """Returns the job as slurmctld has it now.

        Raises NotFound: unknown, or forgotten (MinJobAge after its end). SlurmMissing: no answer.
        """
        text = await self._ask(commands.show_job(job_id), "Slurm does not know the job", job_id, within_s)
        facts = parse.parse_job(text, job_id)
        if facts.state != "COMPLETING" or facts.preempt_time is None:
            return facts
        # Ended by the preemption, or cancelled in its grace time: the text is the same for both.
        try:
            done = await self.run(commands.show_job_json(job_id), _ASIDE_S)
            # 23.11 and newer say it in JSON; 22.05's scontrol refuses the option.
            end = parse.ended_as(done.stdout, job_id) if done.exit_code == 0 else None
            # Equal times: Slurm ended it at that moment, or its user did in the first second of the grace time.
            if end is None and facts.end_time == facts.preempt_time:
                end = "PREEMPTED" if await self._without_grace(facts.partition.partition(",")[0]) else None
        # An aside: without its answer the facts stay as they are, and a cancel is never undone.
        except (SlurmMissing, NotFound):
            return facts
        return msgspec.structs.replace(facts, ended_as=end)

    async def _without_grace(self, partition: str) -> bool:
        """Returns whether jobs there are preempted at once: then none can be cancelled in its grace time."""
        argv = commands.show_partition(partition)
        text = await self._ask(argv, "Slurm has no such partition", partition, _ASIDE_S)
        conf = parse.parse_config(
            await self._ask(commands.show_config(), "Slurm has no config", None, _ASIDE_S)
        )
        # with preempt/qos the grace time is the QOS's, which sacctmgr shows and scontrol does not
        return (
            parse.parse_partition(text, partition).grace_s == 0
            and conf.get("PreemptType") == "preempt/partition_prio"
        )

    async def node(self, name: str) -> NodeFacts:
        """Returns one node. Raises as `job`."""
        text = await self._ask(commands.show_node(name), "Slurm does not know the node", name)
        return parse.parse_node(text, name)

    async def node_addr(self, name: str) -> str:
        """Returns where to reach a node: its NodeAddr (an address or a resolvable name)."""
        return (await self.node(name)).addr

    async def partition(self, name: str) -> PartitionFacts:
        """Returns one partition. Raises as `job`."""
        text = await self._ask(commands.show_partition(name), "Slurm has no such partition", name)
        return parse.parse_partition(text, name)

    async def partitions_of(self, names: str | None) -> list[PartitionFacts]:
        """Returns those that a job names, `a,b`, or the default one. Raises as `job`."""
        if names is None:
            return [await self.default_partition()]
        return [await self.partition(name) for name in names.split(",")]

    async def usable_nodes(self, partition: str, reservation: str | None = None) -> dict[str, str]:
        """Returns what `parse_usable_nodes` finds; of a reservation, if one is named, alone. Raises as `job`."""
        # sinfo: far less text than all nodes by scontrol, and `run_command` cuts at 1 MiB.
        argv = commands.list_nodes(partition)
        text = await self._ask(argv, "Slurm has no such partition", partition)
        if not reservation:
            return parse.parse_usable_nodes(text)
        # Slurm takes one of several, so a job that the first one can start will start.
        name = reservation.partition(",")[0]
        shown = await self._ask(commands.show_reservation(name), "Slurm has no such reservation", name)
        nodes = parse.parse_reservation(shown, name)
        if nodes is None:  # of licenses alone
            return parse.parse_usable_nodes(text)
        inside = set(await self.expand(nodes))
        usable = parse.parse_usable_nodes(text, parse.USABLE_RESERVED)
        return {node: kind for node, kind in usable.items() if node in inside}

    async def usable_and_idle(self, partition: str) -> tuple[dict[str, str], list[str]]:
        """Returns the same, and which of them are idle. Raises as `job`."""
        text = await self._ask(commands.list_nodes(partition), "Slurm has no such partition", partition)
        return parse.parse_usable_nodes(text), list(parse.parse_usable_nodes(text, parse.IDLE))

    async def own_jobs(self) -> list[tuple[str, str, str]]:
        """Returns number, command (batch script and arguments) and working directory of each of our unfinished jobs,
        the newest last. The waiting tasks of an array are one job. Raises as `job`.
        """
        text = await self._ask(commands.list_jobs(), "Slurm does not list jobs", None)
        return parse.parse_own_jobs(text)

    async def own_job_with(self, script: str) -> str:
        """Returns the newest unfinished job of ours with this batch script; empty if there is none. Raises as `job`."""
        return next((number for number, run, _ in reversed(await self.own_jobs()) if run == script), "")

    async def dependencies(self) -> list[tuple[int, str, str]]:
        """Returns (number, dependency, command) of each of our jobs that waits for another. Raises as `job`."""
        text = await self._ask(commands.list_dependencies(), "Slurm does not list jobs", None)
        return parse.parse_dependencies(text)

    async def states(self, users: Iterable[int]) -> dict[int, tuple[str, str, str, str, str]]:
        """Returns (state, reason, command, working directory, comment) of each unfinished job of these users (uids).

        Raises SlurmMissing.
        """
        text = await self._ask(commands.list_states(users), "Slurm does not list jobs", None)
        return parse.parse_states(text)

    async def default_partition(self) -> PartitionFacts:
        """Returns the partition of jobs that name none. Raises as `job`."""
        return parse.parse_default_partition(
            await self._ask(commands.show_partitions(hidden=True), "Slurm has no partitions", None)
        )

    async def partitions(self) -> list[PartitionFacts]:
        """Returns all partitions that Slurm offers this user. Raises SlurmMissing."""
        return parse.parse_partitions(
            await self._ask(commands.show_partitions(), "Slurm has no partitions", None)
        )

    async def cluster_name(self) -> str:
        """Returns the name of the cluster that answers; empty: it does not say. Raises SlurmMissing."""
        return (await self.config()).get("ClusterName", "")

    async def config(self) -> dict[str, str]:
        """Returns slurm.conf as slurmctld has it, e.g. `KillWait` → `30 sec`."""
        return (await self.config_and_time())[0]

    async def config_and_time(self) -> tuple[dict[str, str], datetime | None]:
        """Returns the same and slurmctld's time in whole seconds; None if it does not report it."""
        text = await self._ask(commands.show_config(), "Slurm does not show its config", None)
        return parse.parse_config(text), parse.parse_config_time(text)

    async def past_jobs(self, partition: str, days: int) -> parse.PastJobs:
        """Returns our jobs of the last days there. Raises SlurmMissing: no accounting, or no answer."""
        argv = commands.list_past_jobs(partition, days)
        return parse.parse_past_jobs(await self._ask(argv, "Slurm does not list past jobs", partition))

    async def offers_expedite(self) -> bool:
        """Returns `requeue_rules.offered`; no answer counts as no."""
        try:
            said = (await self.run(commands.sbatch_help())).stdout
            # An sbatch before 25.11 does not know the option; then slurmctld is not asked.
            return names_expedite(said) and offered(said, await self.config())
        except (SlurmMissing, NotFound):
            return False

    async def forbid_requeue(self, job: JobFacts) -> str:
        """Sets Requeue=0 and reads it back. Returns Slurm's objection, or its silence; empty: done."""
        try:
            # So that Slurm does not start the job again by itself.
            done = await self.run(commands.forbid_requeue(job.target))
            if done.exit_code != 0:
                return slurm_words(done.stderr) or f"exit code {done.exit_code}"
            # Read back: the lead ends its job for good after this, and Slurm would start it again.
            return "Requeue is still 1" if (await self.job(job.job_id)).requeue else ""
        except (SlurmMissing, NotFound) as error:
            return error.one_line()

    async def expand(self, node_list: str) -> list[str]:
        """Expands `node[1-2]` to `[node1, node2]`, in Slurm's order."""
        argv = commands.show_hostnames(node_list)
        return parse.parse_hostnames(await self._ask(argv, "Slurm does not read the node list", node_list))

    async def lost_nodes(self, node_list: str) -> tuple[str, ...]:
        """Returns those of the listed nodes that Slurm calls DOWN or not responding. Raises as `job`."""
        argv = commands.show_nodes(node_list)
        return parse.parse_lost_nodes(await self._ask(argv, "Slurm does not show the nodes", node_list))

    async def cancel(self, job_id: int) -> None:
        """Ends a job permanently.

        Raises SlurmRefused: not ours, or over already. NotFound, SlurmMissing: as `job`. The job may have
        been cancelled.
        """
        # Asked for its target: the number of one task of an array stands for the whole array.
        job = await self.job(job_id)
        done = await self.run(commands.cancel(job.target))
        _require_answer(done, f"scancel {job.target}")
        if done.exit_code != 0 or "error" in done.stderr.lower():
            raise SlurmRefused(
                "Slurm did not cancel the job",
                where=job_id,
                found=slurm_words(done.stderr),
                remedy="squeue --me lists your jobs",
            )

    async def set_dependency(self, job_id: int, dependency: str) -> None:
        """Sets what a waiting job waits for. Raises SlurmRefused: Slurm said no. SlurmMissing: no answer."""
        argv = commands.update_dependency(str(job_id), dependency)
        done = await self.run(argv)
        _require_answer(done, " ".join(argv))
        if done.exit_code != 0:
            found = slurm_words(done.stderr)
            raise SlurmRefused("Slurm did not take the dependency", where=job_id, found=found)

    async def signal_batch(self, job_id: int, signal: str) -> None:
        """Signals a running job's batch process, e.g. with `USR1`.

        Raises SlurmRefused: not ours, or not running. NotFound, SlurmMissing: as `job`.
        """
        # Asked for its target, as in `cancel`.
        job = await self.job(job_id)
        argv = commands.signal_batch(job.target, signal)
        await self._change(argv, "Slurm did not signal the job", job_id, "squeue --me lists your jobs")

    async def submit(self, words: Sequence[str], what: str, *, where: object = None, remedy: str = "") -> int:
        """Queues a batch job (`sbatch --parsable WORDS`) and returns its id. `what` names it in an error.

        Raises SlurmRefused: sbatch refused; the error quotes it. SlurmMissing: no answer, or one that is not
        understood; the job may have been queued anyway.
        """
        # Not asked again by itself: an answer that was lost does not tell whether the job is queued.
        done = await self.run(["sbatch", "--parsable", *words])
        # `isdigit` alone accepts the digits of all scripts.
        number = done.stdout.strip().partition(";")[0]  # with --clusters, `ID;CLUSTER`
        if done.exit_code == 0 and number.isascii() and number.isdigit():
            return int(number)
        said = slurm_words(f"{done.stderr}\n{done.stdout}") or f"exit code {done.exit_code}"
        # Only a refusal is one: otherwise the job may be queued.
        if done.exit_code == 0 or not is_answer(done):
            raise SlurmMissing(f"{what} may be queued", where=where, found=said, remedy="see `squeue --me`")
        raise SlurmRefused(f"{what} was not accepted", where=where, found=said, remedy=remedy)

    async def exclude(self, job: JobFacts, nodes: str) -> None:
        """Sets the nodes that the job avoids, in Slurm's bracket form.

        Raises SlurmRefused: an unknown node, or the job is over. SlurmMissing: no answer.
        """
        argv = commands.update_excluded(job.target, nodes)
        await self._change(argv, "Slurm did not take the nodes to exclude", nodes, "sinfo -N")

    async def requeue(
        self, job_id: int, delay_s: int, *, own_restarts: int, now: Now = _today, hold: bool = False
    ) -> RequeueOutcome:
        """Ends this run of the job and has it run again about `delay_s` from now, or when a person releases
        it (`hold`). TERM is on its way to every process of the job when this returns. A job that its user has
        cancelled is never requeued.

        Args:
            delay_s: if the job is still COMPLETING by then, Slurm uses its own delay.
            now: slurmctld's clock; a node's clock may be minutes off.

        Raises SlurmMissing, NotFound: Slurm could not be asked; nothing was changed.
        """
        began = time.monotonic()
        # Read just before: `scontrol requeue` revives a job that its user has cancelled, with exit code 0.
        facts = await self.job(job_id)
        refusal = refuse_requeue(facts, own_restarts)
        # Where Slurm or somebody was first, the start time is still to be set: its own delay is 120 s. Not so for an
        # expedited job: it may start at once, and until a later time it would leave its nodes to others.
        if refusal is not None and (refusal.kind != "already_requeued" or facts.expedited or hold):
            return refusal
        kind: Literal["requeued", "already_requeued"] = "already_requeued"
        if refusal is None:
            kind = "requeued"
            done = await self.run(commands.requeue(facts.target, hold=hold))
            if done.exit_code != 0:
                said = slurm_words(done.stderr) or f"exit {done.exit_code}"
                # Killed or lost on its way: it may have arrived. The caller asks again, and then finds it requeued.
                if not is_answer(done):
                    return RequeueOutcome(kind="unconfirmed", detail=said)
                disabled = "disabled" in said.lower()  # "Requested operation is presently disabled": 22.05.8
                return RequeueOutcome(kind="forbidden" if disabled else "refused", detail=said)
        if hold:  # a start time would be a way around it
            detail = f"held until somebody says: scontrol release {facts.target}"
            return RequeueOutcome(kind=kind, detail=detail)
        # At once, in the same process: TERM is on its way to every process of the job. Measured with Slurm's default
        # cred_expire and a job that left at once: it ran again 1.0, 3.0, 4.0, 4.9 and 11.0 s after the requeue for
        # delays of 1, 2, 3, 5 and 10 s, not 121.
        outcome = await self._settle(facts, delay_s, kind, own_restarts, now)
        return msgspec.structs.replace(outcome, seconds=round(time.monotonic() - began, 3))

    async def shrink(self, job: JobFacts, node: str) -> None:
        """Takes all nodes but one from a running job. Raises SlurmMissing, SlurmRefused: it was not done."""
        # scontrol leaves two scripts where it runs, with variables for the shell of such a job.
        with tempfile.TemporaryDirectory(prefix="vs-") as aside:
            done = await self.run(commands.keep_node(job.target, node), _ASIDE_S, aside)
        if done.exit_code != 0:
            raise SlurmRefused(
                "the job's other nodes were not taken", where=job.target, found=slurm_words(done.stderr)
            )

    async def set_start(self, job: JobFacts, delay_s: int, now: Now = _today) -> datetime | None:
        """Makes a requeued job start `delay_s` from now; returns that time, or None: Slurm's own delay ends
        sooner.

        Raises SlurmMissing: no answer. SlurmRefused: Slurm said no.
        """
        # Rounded up: Slurm ignores a start time that is past, and its own delay stays.
        start = datetime.fromtimestamp(math.ceil(now().timestamp()) + delay_s, UTC)
        ahead_s = (_today() - now()).total_seconds()
        # scontrol turns a time that is past for its node into that node's present: a clock so far ahead would delay the
        # job for longer than Slurm itself does.
        if ahead_s > max(delay_s, _OWN_DELAY_S):
            return None
        argv, remedy = commands.update_start_time(job.target, start), "it starts after Slurm's own delay"
        await self._change(argv, "Slurm did not take the start time", job.target, remedy, within_s=_ASIDE_S)
        return start

    async def _settle(
        self,
        job: JobFacts,
        delay_s: int,
        kind: Literal["requeued", "already_requeued"],
        own_restarts: int,
        now: Now,
    ) -> RequeueOutcome:
        """Sets the start time and reads it back; repeats while Slurm has a later one, for at most `_SETTLE_S`."""
        said = ""
        facts: JobFacts | None = None
        until = time.monotonic() + _SETTLE_S
        # Again and again: while the job is COMPLETING Slurm accepts a start time, and may overwrite it.
        for step in range(_READ_BACK_STEPS):
            if step:
                await asyncio.sleep(_READ_BACK_PAUSE_S)
            if until - time.monotonic() <= 0:
                break
            start: datetime | None = None
            try:
                # a hanging slurmctld must leave time to see whether the requeue was accepted
                start = await self.set_start(job, delay_s, now)
                said = "" if start is not None else _AHEAD
            except (SlurmMissing, SlurmRefused) as error:
                said = error.one_line()
            try:
                facts = await self.job(job.job_id, until - time.monotonic())
            except (SlurmMissing, NotFound) as error:
                said = error.one_line()
                continue
            # slurmctld has said yes and does not show it yet.
            if facts.restarts <= own_restarts:
                continue
            eligible, slack = facts.eligible_time, timedelta(seconds=_DELAY_SLACK_S)
            # Later than asked means overwritten; a time that is past has no effect on a job that is still COMPLETING.
            kept = start is not None and eligible is not None and now() < eligible <= start + slack
            if kept or said == _AHEAD:
                return RequeueOutcome(
                    kind=kind, detail=_shown(facts, said), start_time=eligible, delay_kept=kept
                )
        if facts is None or facts.restarts <= own_restarts:
            return RequeueOutcome(kind="unconfirmed", detail=said or "Restarts did not rise")
        return RequeueOutcome(kind=kind, detail=_shown(facts, said), start_time=facts.eligible_time)


def _require_answer(done: Completed, asked: str) -> None:
    """Raises SlurmMissing: a command that changes something failed without slurmctld's word."""
    if done.exit_code != 0 and not is_answer(done):
        raise SlurmMissing(
            "Slurm does not answer",
            where=asked,
            found=slurm_words(done.stderr) or f"exit code {done.exit_code}",
            remedy="see whether slurmctld is up: scontrol ping",
        )


def _shown(facts: JobFacts, said: str) -> str:
    return f"JobState={facts.state} Reason={facts.reason} Restarts={facts.restarts} {said}".strip()
