"""A run on the embedded cluster, as a test holds it: submit it, wait for what it does, disturb it, compare it.

Waiting is for events (the journal and the status file, by inotify), never for time.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tests.hostile.measured import measured_program
from tests.journals import Line, read_events
from tests.ledger_stats import ledger_stats
from tests.lines import follow_lines
from tests.processes import captured, tell
from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.events import KINDS
from verl_slurm.journal.status import read_status
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.facts import JobFacts
from verl_slurm.slurm.slurm_client import SlurmClient
from verl_slurm.wire.environment import LOG_VARIABLE

ROOT = Path(__file__).parent.parent

# A run of seconds. Few steps, each phase of about a second: long enough to be struck in its middle.
SMALL = (
    "train.steps=5",
    "train.batch_size_per_device=256",
    "train.mini_batch_size_per_device=16",
    "train.micro_batch_size_per_device=16",
    "train.ppo_epochs=2",
    "rollout.micro_batch_size_per_device=4",
    "checkpoint.every_steps=4",
    "checkpoint.runtime_every_steps=4",
    "daemon.requeue_delay_s=2",
    "daemon.backoff_s=0.2",
    # Of a run that is slow beside others, the second copies of ranks would do their imports in vain.
    "daemon.standby_after_s=9999",
    "slurm.time_limit_min=20",
)
ONE_RANK = ("distributed.nodes=1", "distributed.dp_size=1")
"""For what a second rank, whose imports take 8 s of a processor, would show nothing of."""


def _waits_for_orders(process: psutil.Process) -> bool:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/0").startswith("pipe:")
    except OSError:
        return True  # it is gone


class LiveRun:
    """One run and its job."""

    def __init__(
        self, cluster: DevCluster, root: Path, *overrides: str, config: str = "configs/quickstart.yaml"
    ) -> None:
        self.cluster, self.paths = cluster, RunPaths(root)
        self.argv = [str(ROOT / config), f"run_dir={root}", *overrides]
        self.job_id = ""

    def env(self) -> dict[str, str]:
        return {**os.environ, **self.cluster.env()}

    def cli(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`verl-slurm ...` as a person would type it."""
        done = measured_program(
            "verl_slurm.cli", *argv, cwd=Path.cwd(), environ=self.cluster.env(), timeout_s=180
        )
        assert done.code == 0 or not check, done.err
        return subprocess.CompletedProcess(argv, done.code, done.out, done.err)

    def slurm(self, *argv: str, check: bool = True) -> str:
        """A Slurm command, aimed at the cluster of this run, with this environment's programs in PATH."""
        environment = self.cluster.client_env()
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        done = captured(argv, env=environment, timeout=60, check=check)
        return done.stdout

    def submit(self, *more: str) -> "LiveRun":
        done = self.cli("submit", *self.argv, "--cluster", "slurm", "--json", *more, check=False)
        assert done.returncode == 0, done.stderr
        self.job_id = msgspec.json.decode(done.stdout)["job_id"]
        return self

    def facts(self) -> JobFacts:
        """The job as Slurm has it now."""
        return asyncio.run(SlurmClient(self.cluster.client_env()).job(int(self.job_id)))

    def events(self, name: str | None = None) -> list[Line]:
        return [e for e in read_events(self.paths) if name is None or e["event"] == name]

    def status(self) -> dict[str, Any]:
        return read_status(self.paths)

    def wait(self, until: Callable[[], Any], timeout_s: float = 300.0) -> Any:
        """Wait, woken by the journal and the status file, until `until()` is true; return what it gave."""
        if found := until():
            return found
        seen: list[Any] = []

        class _Found(Exception):
            pass

        def look() -> None:
            if found := until():
                seen.append(found)
                raise _Found

        try:
            lines = follow_lines(
                self.paths.events, 0, silence_s=lambda: timeout_s, beside=self.paths.status, on_beside=look
            )
            for line in lines:
                if line is None:
                    break
                look()
        except _Found:
            return seen[0]
        raise AssertionError(f"nothing for {timeout_s} s; so far:\n{self.story()}")

    def wait_event(
        self, event_name: str, /, *, after: int = 0, timeout_s: float = 300.0, **wanted: object
    ) -> Line:
        """The first event of that name behind the first `after` ones."""
        assert event_name in KINDS, f"no journal ever has {event_name!r}"

        def there() -> Line | None:
            for event in read_events(self.paths)[after:]:
                if event["event"] == "ended" and event_name != "ended" and event["exit_code"] not in (0, 25):
                    raise AssertionError(f"the run ended:\n{self.story()}")
                if event["event"] == event_name and all(event.get(k) == v for k, v in wanted.items()):
                    return event
            return None

        found: Line = self.wait(there, timeout_s)
        return found

    def wait_phase(self, phase: str, *, step: int = 1, index: int = 0) -> dict[str, Any]:
        """Until rank 0 is in the middle of that phase of a step."""

        def there() -> dict[str, Any] | None:
            now = self.status()
            over = self.events("ended")
            assert not over or over[-1]["exit_code"] == 25, f"it ended before that:\n{self.story()}"
            right = now.get("state") == "running" and now.get("phase") == phase
            return now if right and now["step"] >= step and index <= now["index"] <= index + 12 else None

        found: dict[str, Any] = self.wait(there)
        return found

    def wait_end(self, exit_code: int = 0, timeout_s: float = 600.0) -> Line:
        """Until the last lead has said how the run ended, and Slurm has it that way too."""
        ended = self.wait_event("ended", timeout_s=timeout_s, exit_code=exit_code)
        return ended

    def wait_slurm(self, until: Callable[[JobFacts], bool], timeout_s: float = 300.0) -> JobFacts:
        """Until Slurm has the job so. It tells nobody by itself: one has to ask."""
        deadline = time.monotonic() + timeout_s
        while not until(facts := self.facts()):
            assert time.monotonic() < deadline, self.story()
            time.sleep(0.2)
        return facts

    def ranks(self, node: str | None = None) -> list[psutil.Process]:
        """The trainer processes of this run, on one node or on all."""
        found = []
        for process in psutil.process_iter():
            try:
                argv, env = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            mine = "verl_slurm.trainer" in argv and str(self.paths.root) in argv and "RANK" in env
            if "--imports" in argv:  # one that stood by, and trains now
                log = env.get(LOG_VARIABLE, "")
                mine = log.startswith(str(self.paths.root)) and not _waits_for_orders(process)
            if mine and node in (None, env.get("SLURMD_NODENAME")):
                found.append(process)
        return found

    def daemons(self) -> dict[str, psutil.Process]:
        """`lead` and the agents, `agent NODE`, as they run now."""
        found = {}
        for process in psutil.process_iter():
            try:
                argv, env = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            if "verl_slurm_daemon" in argv and str(self.paths.root) in argv and not argv[0].endswith("srun"):
                role = argv[argv.index("verl_slurm_daemon") + 1]
                if "--stand-by" in argv:
                    role = "standby"
                found[role if role == "lead" else f"{role} {env.get('SLURMD_NODENAME', '')}"] = process
        return found

    def stands_by(self, agents: int) -> bool:
        """Whether so many agents stand by for the next restart."""
        return sum(role.startswith("standby") for role in self.daemons()) == agents

    def processes(self, node: str) -> list[psutil.Process]:
        """Everything of this run on one node: lead, agent, launcher, ranks."""
        found = []
        for process in psutil.process_iter():
            try:
                argv, env = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            if str(self.paths.root) in argv and env.get("SLURMD_NODENAME") == node:
                found.append(process)
        return found

    def other_nodes(self) -> list[str]:
        """The nodes with ranks that are not the lead's."""
        batch_host, found = self.facts().batch_host, set()
        for process in self.ranks():
            with contextlib.suppress(psutil.Error):
                found.add(process.environ()["SLURMD_NODENAME"])
        return sorted(found - {batch_host or ""})

    def kill(self, processes: list[psutil.Process]) -> None:
        assert processes, "nobody there to kill"
        tell(processes, signal.SIGKILL)

    def story(self) -> str:
        try:
            events = [str(event) for event in read_events(self.paths)]
        except VerlSlurmError as error:
            events = [str(error)]
        logs = sorted(self.paths.logs.glob("*.[lo]*"), key=lambda path: path.stat().st_mtime)[-6:]
        said = [f"--- {log}\n{log.read_text()[-2000:]}" for log in logs]
        return "\n".join([*events, *said, *self.slurm_story()])

    def slurm_story(self) -> list[str]:
        """What Slurm itself has to say: a job that never starts tells of it nowhere else."""
        asked = (
            ["scontrol", "show", "job", self.job_id],
            ["sinfo", "-N", "-o", "%N %T %E"],
            ["squeue", "-o", "%i %T %r %N"],
        )
        said = [f"--- {' '.join(argv)}\n{self.slurm(*argv, check=False)}" for argv in asked]
        log = self.cluster.directory / "log" / "slurmctld.log"
        tail = log.read_text()[-4000:] if log.exists() else "(no such file)"
        return [*said, f"--- {log}\n{tail}"]

    def cancel(self) -> None:
        if self.job_id:
            self.slurm("scancel", self.job_id, check=False)


def same_weights(a: Path, b: Path) -> tuple[bool, str]:
    """`verl-slurm inspect A B --bits`."""
    done = captured(
        [sys.executable, "-m", "verl_slurm.cli", "inspect", "--bits", str(a), str(b)], timeout=120
    )
    return done.returncode == 0, done.stdout + done.stderr


def ends_like(run: LiveRun, twin: LiveRun) -> None:
    """The run goes on to its end, with the twin's weights, and nothing was generated twice."""
    run.wait_end()
    same, said = same_weights(run.paths.root, twin.paths.root)
    assert same, said
    stats = ledger_stats(run.paths)
    assert stats.duplicates == (), run.story()


def wait_until_gone(word: str, patience_s: float = 60.0) -> None:
    """Until no process has `word` in its command line."""
    left = [p for p in psutil.process_iter() if _has_word(p, word)]
    _, alive = psutil.wait_procs(left, timeout=patience_s)
    assert not alive, [p.cmdline() for p in alive]


def _has_word(process: psutil.Process, word: str) -> bool:
    try:
        return word in process.cmdline()
    except psutil.Error:
        return False
