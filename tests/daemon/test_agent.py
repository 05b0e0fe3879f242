"""An agent as a process, with a lead and a Slurm of the test's: whatever ends it, somebody has been told."""

import asyncio
import os
import signal
import stat
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from verl_slurm_daemon.agent.node_check import look_at_node
from verl_slurm_daemon.link.channel import AgentLink, serve

from tests.builders import run_config, write_config
from tests.fakes.nvidia_smi import install_nvidia_smi
from tests.journals import read_events
from verl_slurm.base.errors import NOT_SET_UP
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checks import Finding
from verl_slurm.wire import messages as msg
from verl_slurm.wire.lead_file import LeadAddress, write_lead_address

TOKEN = b"t" * 32
LAUNCH = msg.Launch(restart=1, attempt=3, node_rank=0, master_addr="127.0.0.1", master_port=29500, resume="")
# torchrun takes seconds to say what a shell says at once.
SHIM = """
import sys
from verl_slurm_daemon.agent import node as agent, node_start, orphan
from verl_slurm_daemon.__main__ import main
launcher = sys.argv.pop()
node_start.ranks_argv = lambda *_: ["/bin/sh", "-c", launcher]
agent.CONNECT_PAUSES_S = (60.0,)
wait_for = agent.asyncio.wait_for
def noted(*args):
    sys.stderr.write("listening\\n")
    return wait_for(*args)
agent.asyncio.wait_for = noted
sys.exit(main())
"""
SCONTROL = """#!/bin/sh
echo "$1" >> {box}/asked
case "$1" in
requeue) touch {box}/requeued;;
show)
    restarts=0; [ -e {box}/requeued ] && restarts=1
    state="COMPLETING Reason=JobLaunchFailure"; [ -e {box}/running ] && state="RUNNING Reason=None"
    start=$(($(date +%s)+3))
    echo "JobId=7 JobName=x"
    echo "   JobState=$state Dependency=(null)"
    echo "   Requeue=1 Restarts=$restarts EligibleTime=$start StartTime=$start EndTime=$start"
    echo "   UserId=ada(1000) Partition=p TimeLimit=00:10:00 ExitCode=0:9 NumNodes=2";;
esac
"""


class Stage:
    """A run directory, a Slurm that ends job 7, and a lead that does what the test says."""

    def __init__(self, root: Path) -> None:
        self.box = private_dir(root / "box")
        self.paths = RunPaths(private_dir(root / "run"))
        for folder in (self.paths.control, self.paths.logs):
            private_dir(folder)
        write_config(self.paths, requeue_delay_s=1)
        program = self.box / "scontrol"
        program.write_text(SCONTROL.format(box=self.box))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.heard: asyncio.Queue[msg.FromAgent] = asyncio.Queue()
        self.links: list[AgentLink] = []
        self.places: tuple[str, ...] = ()
        self.process: asyncio.subprocess.Process | None = None
        self.server: asyncio.Server | None = None

    async def lead(self, on_message: Callable[[AgentLink, msg.FromAgent], None] = lambda *_: None) -> None:
        """Listen as a lead, and hand on what agents say."""

        async def on_link(link: AgentLink) -> None:
            self.links.append(link)
            link.send(msg.Baseline(time=time.time(), places=self.places))

            def deliver(message: msg.FromAgent) -> None:
                self.heard.put_nowait(message)
                on_message(link, message)

            await link.messages(deliver)

        self.server, port = await serve("127.0.0.1", TOKEN, 3, 8, on_link)
        self.publish(port)

    def publish(self, port: int) -> None:
        address = LeadAddress(attempt=3, restart=1, host="127.0.0.1", port=port, token=TOKEN.hex())
        write_lead_address(self.paths, address)

    async def agent(
        self, launcher: str = "exec sleep 600", shim: str = SHIM, **streams: int
    ) -> asyncio.subprocess.Process:
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        env |= {"PATH": f"{self.box}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
        env |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2", "SLURM_NODEID": "0"}
        env |= {"SLURM_JOB_PARTITION": "p"}
        argv = ["agent", "--run", str(self.paths.root), "--attempt", "3", launcher]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", shim, *argv, env=env, **streams
        )
        return self.process

    async def hear(self, kind: type[msg.FromAgent]) -> msg.FromAgent:
        while not isinstance(message := await self.heard.get(), kind):
            pass
        return message

    def die(self) -> None:
        """As a lead that is killed: nobody listens any more, and the links end."""
        if self.server is not None:
            self.server.close()
        for link in self.links:
            link.close()

    async def end(self) -> ExitCode:
        assert self.process is not None
        return ExitCode(await self.process.wait())

    @property
    def requeued(self) -> bool:
        return (self.box / "requeued").exists()

    @property
    def asked_slurm(self) -> bool:
        return (self.box / "asked").exists()

    def log(self) -> str:
        return self.paths.agent_log(3, 0).read_text()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    tmp_path.chmod(0o700)
    return Stage(tmp_path)


def play(stage: Stage, story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        try:
            async with asyncio.timeout(20):
                await story()
        finally:
            stage.die()
            if stage.process is not None and stage.process.returncode is None:
                stage.process.kill()
                await stage.process.wait()

    asyncio.run(bounded())


def launch(link: AgentLink, message: msg.FromAgent) -> None:
    if isinstance(message, msg.AgentReady):
        link.send(LAUNCH)


def launch_and_answer(link: AgentLink, message: msg.FromAgent) -> None:
    launch(link, message)
    if isinstance(message, msg.NodeExited):
        link.send(msg.Shutdown())


def test_a_lead_that_heard_of_the_end_of_its_ranks_lets_the_agent_go(stage: Stage) -> None:
    async def story() -> None:
        await stage.lead(launch_and_answer)
        await stage.agent("exit 3")
        heard = await stage.hear(msg.NodeExited)
        assert isinstance(heard, msg.NodeExited)
        assert heard.exit_code == 3
        assert await stage.end() is ExitCode.OK

    play(stage, story)
    assert not stage.asked_slurm


def test_a_python_that_is_not_on_the_node_is_no_crash_of_the_ranks(stage: Stage) -> None:
    async def story() -> None:
        await stage.lead(launch_and_answer)
        await stage.agent(shim=SHIM.replace("/bin/sh", "/away/bin/python"))
        heard = await stage.hear(msg.NodeExited)
        assert isinstance(heard, msg.NodeExited)
        assert heard.detail.startswith(f"{NOT_SET_UP}: /away/bin/python (found [Errno 2] No such file")
        await stage.end()

    play(stage, story)


@pytest.mark.parametrize("code", [0, 1])
def test_a_lead_that_died_before_it_heard_of_that_is_not_taken_for_one_that_knows(
    stage: Stage, code: int
) -> None:
    async def story() -> None:
        await stage.lead(launch)  # it hears nothing any more: it waits for its disk, and is killed
        await stage.agent(f"exit {code}")
        await stage.hear(msg.NodeExited)
        stage.die()
        assert await stage.end() is ExitCode.WIRE

    play(stage, story)
    assert stage.requeued, stage.log()
    assert [event["accepted"] for event in read_events(stage.paths) if event["event"] == "orphaned"] == [True]


def test_a_lead_that_dies_right_after_its_shutdown_leaves_the_requeue_to_the_agent(stage: Stage) -> None:
    async def story() -> None:
        await stage.lead(launch)
        await stage.agent("trap '' TERM; sleep 600 & wait")
        await stage.hear(msg.AgentReady)
        (link,) = stage.links
        link.send(msg.Shutdown())
        stage.die()
        await stage.end()

    play(stage, story)
    assert stage.requeued, stage.log()


def test_no_signal_of_slurms_ends_an_agent_and_a_dead_srun_does_not_either(stage: Stage) -> None:
    numbers = (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGUSR2)

    async def story() -> None:
        nobody, out = os.pipe()
        os.close(nobody)
        await stage.lead(launch)
        process = await stage.agent(stdout=out, stderr=out)
        os.close(out)
        await stage.hear(msg.AgentReady)
        seen = set()
        for number in numbers:
            process.send_signal(number)
            heard = await stage.hear(msg.SignalSeen)
            assert isinstance(heard, msg.SignalSeen)
            seen.add(heard.signal)
        assert seen == set(numbers)
        stage.die()
        for number in numbers:
            process.send_signal(number)
        assert await stage.end() is ExitCode.WIRE

    play(stage, story)
    assert stage.requeued, stage.log()


def test_a_term_before_the_lead_could_be_reached_is_a_reason_to_look_at_once(stage: Stage) -> None:
    async def story() -> None:
        stage.publish(port=1)  # nobody listens there
        process = await stage.agent(stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        assert await process.stderr.readline() == b"listening\n"
        process.send_signal(signal.SIGTERM)
        assert await stage.end() is ExitCode.WIRE

    play(stage, story)
    assert stage.requeued, stage.log()


@pytest.mark.parametrize("what", ["logs", "run.yaml", "lead.json"])
def test_an_agent_that_cannot_work_still_sees_its_job_off(stage: Stage, what: str) -> None:
    async def story() -> None:
        await stage.lead(launch)
        match what:
            case "logs":
                stage.paths.logs.rmdir()
            case "run.yaml":
                stage.paths.run_yaml.write_text("nonsense: [")
            case "lead.json":
                stage.paths.lead_address.unlink()
        process = await stage.agent(stderr=asyncio.subprocess.PIPE)
        if what == "logs":
            await stage.hear(msg.AgentReady)
        stage.die()
        _, said = await process.communicate()
        assert said.startswith(b"verl-slurmd: ")
        assert process.returncode not in (0, None)

    play(stage, story)
    assert stage.requeued


@pytest.mark.parametrize("what", ["run.yaml", "socket"])
def test_an_agent_that_cannot_begin_tells_the_lead_why(stage: Stage, what: str) -> None:
    """The lead waited a minute for it, four times over, and said "the ranks did not start in time"."""
    if what == "run.yaml":
        stage.paths.run_yaml.write_text("nonsense: [")

    async def story() -> None:
        await stage.lead(launch)
        few = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (0, 0))\n{SHIM}"  # no file of its own can be written
        await stage.agent(shim=SHIM if what == "run.yaml" else few, stderr=asyncio.subprocess.DEVNULL)
        heard = await stage.hear(msg.NodeExited)
        assert isinstance(heard, msg.NodeExited)
        assert heard.node == "n2"
        assert heard.exit_code not in (0, None)
        assert ("run.yaml" if what == "run.yaml" else "temporary directory") in heard.detail
        assert await stage.end() is not ExitCode.OK

    play(stage, story)


def test_the_log_tells_the_story_and_is_private(stage: Stage) -> None:
    async def story() -> None:
        await stage.lead(launch)
        await stage.agent()
        await stage.hear(msg.AgentReady)
        stage.die()
        await stage.end()

    play(stage, story)
    words = [line.split("] ")[1].split()[0] for line in stage.log().splitlines()]
    order = [
        word for word in words if word in ("agent", "joined", "alone", "asking", "orphaned", "done", "leaves")
    ]
    assert order == ["agent", "joined", "alone", "asking", "orphaned", "done", "leaves"]
    assert stat.S_IMODE(stage.paths.agent_log(3, 0).stat().st_mode) == 0o600
    assert TOKEN.hex() not in stage.log()


def test_on_a_node_that_is_not_fit_no_rank_starts_and_the_lead_is_told(stage: Stage) -> None:
    async def story() -> None:
        stage.places = ("/nowhere/data",)
        started = stage.box / "started"
        await stage.lead(launch)
        await stage.agent(f"touch {started}")
        heard = await stage.hear(msg.NodeUnfit)
        assert heard == msg.NodeUnfit(node="n2", evidence="mounts: /nowhere/data: No such file or directory")
        stage.links[0].send(msg.Shutdown())
        assert await stage.end() is ExitCode.OK
        assert not started.exists()

    play(stage, story)


def test_a_gpu_driver_that_hangs_makes_a_node_bad_and_hangs_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = tmp_path / "waits"
    install_nvidia_smi(tmp_path / "bin", {"n2": f"touch {waits}; exec sleep 600"})
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = asyncio.run(look_at_node(run_config(), (), 0.0, patience_s=3.0))
    assert waits.exists()
    assert found[-1] == Finding("GPUs", "bad", "no answer in 3 s")


def test_a_check_that_breaks_says_nothing_against_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (clock, found) = asyncio.run(look_at_node(run_config(), (), 0.0))
    assert (clock.verdict, found.verdict) == ("good", "not checked")
