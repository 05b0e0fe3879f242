"""Services as the lead holds them, as their hosts run them, and what the policy makes of a lost one."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
from verl_slurm_daemon.agent.rank_environment import RANKS, divide, past_proxies, variables_of_ranks
from verl_slurm_daemon.agent.service import answers, restarts_in_a_row, service_argv
from verl_slurm_daemon.decide import inputs
from verl_slurm_daemon.descendants import WARNINGS
from verl_slurm_daemon.lead import service_hosts as module
from verl_slurm_daemon.lead.service_hosts import Services
from verl_slurm_daemon.link.channel import AgentLink, serve

from tests.builders import new_run, run_config, write_config
from tests.fakes.allocation import ScriptedAllocation, first_attempt
from tests.journals import read_events
from tests.processes import free_port, python_path
from verl_slurm.base.errors import NOT_SET_UP
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig, ServiceConfig
from verl_slurm.program.code_record import CodeRecord
from verl_slurm.wire.lead_file import LeadAddress, write_lead_address
from verl_slurm.wire.messages import FromAgent, Launch, ServiceSaid, Shutdown, ToAgent

# ---- the probe


@asynccontextmanager
async def listening(answer: bytes) -> AsyncIterator[int]:
    """A stand-in for a service: says `answer` to whoever connects, and keeps the connection."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        while await reader.read(1024):  # until the other side has had enough
            pass
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "ready"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.0 204 No Content\r\n\r\n", True),
        (b"HTTP/1.1 503 Loading\r\n\r\n", False),
        (b"HTTP/1.1 301 Moved\r\n\r\n", False),
        (b"HTTP/1.1 2000 OK\r\n\r\n", False),
        (b"SSH-2.0-OpenSSH_9.2\r\n", False),
        (b"", False),
    ],
)
def test_a_service_is_ready_if_its_path_answers_with_2xx(answer: bytes, ready: bool) -> None:
    async def story() -> bool:
        async with listening(answer) as port:
            return await answers("/health", port, limit_s=0.5)

    assert asyncio.run(story()) == ready


def test_a_port_that_takes_a_connection_is_enough_for_tcp() -> None:
    async def story() -> tuple[bool, bool]:
        async with listening(b"") as port:
            there = await answers("tcp", port)
        return there, await answers("tcp", free_port())

    assert asyncio.run(story()) == (True, False)


# ---- pure parts of the host


@pytest.mark.parametrize(("before", "ready_s", "now"), [(0, 0.0, 1), (2, 599.0, 3), (2, 600.0, 1)])
def test_a_service_that_ran_for_long_has_all_its_restarts_again(
    before: int, ready_s: float, now: int
) -> None:
    assert restarts_in_a_row(before, ready_s) == now


AS_RANKS = ("-m", "verl_slurm.loops.rendezvous")


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (("/a/judge.py", "--port={port}"), ["py", "-P", *AS_RANKS, "/a/judge.py", "--port=8000"]),
        (("-m", "vllm.x", "--host", "{host}"), ["py", "-P", "-m", "vllm.x", "--host", "10.0.0.1"]),
        (("serve", '{"a": {}}'), ["serve", '{"a": {}}']),
    ],
)
def test_a_service_is_told_where_to_listen_and_other_braces_stay(
    command: tuple[str, ...], argv: list[str]
) -> None:
    assert service_argv("py", ServiceConfig(command=command), "10.0.0.1", 8000) == argv


def of(**services: ServiceConfig) -> RunConfig:
    return run_config(services=services, cpus_per_node=8, gpus_per_node=4)


def test_services_beside_the_ranks_take_from_the_end_and_the_ranks_keep_the_rest() -> None:
    """The CUDA form, with real devices: NOT RUN (no GPU here); the numbers are what CUDA_VISIBLE_DEVICES holds."""
    config = of(
        judge=ServiceConfig(command=("x",), cpus=2, gpus=1),
        sandbox=ServiceConfig(command=("x",), cpus=1),
        free=ServiceConfig(command=("x",)),
        apart=ServiceConfig(command=("x",), nodes=1, gpus=2),
    )
    cpus = divide(config, "cpus", list("01234567"))
    assert cpus[RANKS] == list("01234") == cpus["free"]
    assert (cpus["judge"], cpus["sandbox"], cpus["apart"]) == (["6", "7"], ["5"], list("01234567"))
    gpus = divide(config, "gpus", list("0123"))
    assert (gpus[RANKS], gpus["judge"], gpus["sandbox"], gpus["apart"]) == (
        ["0", "1", "2"],
        ["3"],
        [],
        ["0", "1"],
    )
    assert divide(config, "cpus", ["0"])[RANKS] == ["0"]


def test_ranks_find_the_addresses_and_the_token_and_not_the_services_gpus() -> None:
    config = of(judge=ServiceConfig(command=("x",), gpus=1))
    launch = Launch(restart=1, attempt=1, node_rank=0, master_addr="", master_port=1, resume="")
    launch.services["judge"] = "10.0.0.1:8000,10.0.0.2:8000"
    found = variables_of_ranks(config, launch, "secret", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert found == {
        "VERL_SLURM_SERVICE_JUDGE": "10.0.0.1:8000,10.0.0.2:8000",
        "VERL_SLURM_SERVICE_TOKEN": "secret",
        "CUDA_VISIBLE_DEVICES": "4,5,6",
    }


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        ({"no_proxy": "a"}, {}),
        ({"http_proxy": "p"}, dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1,10.0.0.1")),
        (
            {"HTTPS_PROXY": "p", "NO_PROXY": ".site, 127.0.0.1"},
            dict.fromkeys(("no_proxy", "NO_PROXY"), ".site,127.0.0.1,localhost,::1,10.0.0.1"),
        ),
        ({"http_proxy": "p", "no_proxy": "*"}, {"no_proxy": "*", "NO_PROXY": "*"}),
    ],
    ids=str,
)
def test_no_proxy_is_asked_for_the_nodes_of_the_run_and_the_users_words_stay(
    environ: dict[str, str], expected: dict[str, str]
) -> None:
    assert past_proxies(environ, ["10.0.0.1"]) == expected


# ---- the host, as a process, with a lead that a test holds

# Counts its starts in a file. The first one fails, the second one listens.
_SECOND_TRY = """
import http.server, os, sys
starts = sys.argv[1]
with open(starts, "a") as file:
    file.write(f"{os.getpid()}\\n")
open(f"{starts}.made", "a").close()
if len(open(starts).readlines()) == 1:
    sys.exit("no model here")
place = (os.environ["VERL_SLURM_HOST"], int(os.environ["VERL_SLURM_PORT"]))
http.server.HTTPServer(place, http.server.SimpleHTTPRequestHandler).serve_forever()
"""


class HostStory:
    """One host of the service `judge`, and all that it said."""

    def __init__(self, folder: Path, **keys: object) -> None:
        program, self.starts = folder / "judge.py", folder / "starts"
        program.write_text(_SECOND_TRY)
        self.starts.touch()
        judge = ServiceConfig(command=(str(program), str(self.starts)), **keys)  # type: ignore[arg-type]
        self.paths = new_run(
            folder / "run", nodes=1, dp_size=1, run_dir=folder / "run", services={"judge": judge}
        )
        private_dir(self.paths.control)
        private_dir(self.paths.logs)
        self.said: list[ServiceSaid] = []

    def run(self, done: Callable[[ServiceSaid], bool], *, lead_dies: bool = False) -> int:
        """Runs it until it has said that, then dismisses it, or ends the link; returns its exit code."""
        return asyncio.run(self.host(done, lead_dies))

    async def host(self, done: Callable[[ServiceSaid], bool], lead_dies: bool = False) -> int:
        def hear(message: FromAgent, link: AgentLink) -> None:
            assert isinstance(message, ServiceSaid)
            self.said.append(message)
            if done(message):
                link.close() if lead_dies else link.send(Shutdown())

        async def on_link(link: AgentLink) -> None:
            await link.messages(lambda message: hear(message, link))

        token = b"t" * 32
        server, port = await serve("127.0.0.1", token, 1, 4, on_link)
        address = LeadAddress(attempt=1, restart=0, host="127.0.0.1", port=port, token=token.hex())
        write_lead_address(self.paths, address)
        words = ["service", "--run", str(self.paths.root), "--attempt", "1", "--name", "judge"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        host = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "verl_slurm_daemon", *words), env=environ | python_path()
        )
        async with asyncio.timeout(120):
            code = await host.wait()
        server.close()
        return code

    def is_gone(self) -> bool:
        return not any(psutil.pid_exists(int(pid)) for pid in self.starts.read_text().split())


@pytest.mark.slow
@pytest.mark.parametrize("lead_dies", [False, True])
def test_a_service_is_started_again_at_the_same_address_and_ends_with_its_lead(
    tmp_path: Path, lead_dies: bool
) -> None:
    story = HostStory(tmp_path, probe="/")
    assert story.run(lambda said: said.what == "ready", lead_dies=lead_dies) == 0
    assert [said.what for said in story.said] == ["started", "ended", "ready"]
    assert story.said[1].detail == "exit code 1: no model here"
    assert len({said.address for said in story.said}) == 1
    assert story.is_gone()


def test_a_service_works_where_the_run_was_first_submitted(tmp_path: Path) -> None:
    story, first = HostStory(tmp_path, restarts=0), private_dir(tmp_path / "first")
    (tmp_path / "judge.py").write_text("import os, sys; sys.exit(os.getcwd())")
    story.paths.code_record.write_bytes(msgspec.json.encode(CodeRecord(directory=str(first))))
    assert story.run(lambda said: said.what == "failed") == 0
    assert story.said[-1].detail == f"exit code 1: {first}"


@pytest.mark.slow
def test_slurms_warnings_do_not_reach_a_handler_that_the_service_installs(tmp_path: Path) -> None:
    story = HostStory(tmp_path)
    masks = list[int]()

    def look(said: ServiceSaid) -> bool:
        if said.what == "ready":
            pid = story.starts.read_text().split()[-1]
            facts = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            masks.append(int(facts["SigBlk"], 16))
        return said.what == "ready"

    story.run(look)
    assert all(masks[0] & 1 << number - 1 for number in WARNINGS)


@pytest.mark.slow
def test_a_service_without_restarts_left_fails_and_its_host_waits_for_the_lead(tmp_path: Path) -> None:
    story = HostStory(tmp_path, restarts=0)
    before = os.umask(0o002)  # of who submitted: the service, which is a program of the user's, has it back
    try:
        assert story.run(lambda said: said.what == "failed") == 0
    finally:
        os.umask(before)
    assert (tmp_path / "starts.made").stat().st_mode & 0o777 == 0o664
    assert [said.what for said in story.said] == ["started", "failed"]
    assert story.said[1].detail == "exit code 1: no model here"


@pytest.mark.slow
def test_a_service_whose_program_is_away_is_not_tried_and_the_node_is_named(tmp_path: Path) -> None:
    story = HostStory(tmp_path, restarts=9)
    (tmp_path / "judge.py").unlink()
    assert story.run(lambda said: said.what == "failed") == 0
    assert [said.what for said in story.said] == ["started", "failed"]
    assert story.said[1].detail.startswith(f"{NOT_SET_UP}: services.judge.command (found no file {tmp_path}")


@pytest.mark.slow
def test_a_service_that_never_answers_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    story = HostStory(tmp_path, restarts=1, probe="/missing", start_timeout_s=2)
    assert story.run(lambda said: said.what == "failed") == 0
    assert story.said[-1].detail == "no answer to its probe (/missing) for 2 s"
    assert story.is_gone()


# A program with a child in a session of its own, which a signal to its process group does not reach.
_WITH_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
if sys.argv[1] == "stay": time.sleep(600)
"""
_HOST = """
import os, subprocess, sys
launcher = [sys.executable, "-m", "verl_slurm_daemon.agent.ranks", "--service"]
program = [sys.executable, "-c", *sys.argv[1:]]
subprocess.Popen([*launcher, *program], env=os.environ | {"VERL_SLURM_HOST_PID": str(os.getpid())}).wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stay", "end"])
def test_nothing_of_a_service_outlives_it_or_a_host_that_is_killed(how: str) -> None:
    argv = [sys.executable, "-c", _HOST, _WITH_CHILD, how]
    with subprocess.Popen(argv, env=os.environ | python_path(), stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        pids = [int(word) for word in host.stdout.readline().split()]
        left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        if how == "stay":
            assert len(left) == 2
            host.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(left, timeout=60)
        assert not alive


# ---- the lead


class Link:
    """A host's end of the lead's link: its step ends when it is told to."""

    def __init__(self, stage: "Stage", *, stranger: bool = False) -> None:
        self.told: list[ToAgent] = []
        self._stage, self._stranger = stage, stranger

    def send(self, message: ToAgent) -> None:
        self.told.append(message)
        for process in () if self._stranger else self._stage.steps:
            if process.returncode is None:
                process.kill()


class Stage(ScriptedAllocation):
    """The services of a lead, on an allocation whose steps are `sleep`."""

    def __init__(self, folder: Path, **services: ServiceConfig) -> None:
        super().__init__()
        self.steps_of: list[str] = []
        self.steps: list[asyncio.subprocess.Process] = []  # type: ignore[assignment]
        self.posted: list[inputs.Input] = []
        self.paths = RunPaths(folder)
        config = write_config(self.paths, services=services)
        self.services = Services(first_attempt(self.paths, config, self, self.posted.append))

    async def start_step(
        self, argv: list[str], service: str = "", names: Sequence[str] = ()
    ) -> list[asyncio.subprocess.Process]:
        self.steps_of.append(service)
        self.steps.append(await asyncio.create_subprocess_exec("sleep", "600"))
        self.step_started.set()
        return self.steps[-1:]

    def say(self, what: str, link: Link, *, service: str = "judge", index: int = 0) -> None:
        said = ServiceSaid(service=service, index=index, node=f"n{index}", what=what, address=f"h{index}:1")  # type: ignore[arg-type]
        self.services.hear(said, link)  # type: ignore[arg-type]

    def journal(self) -> list[str]:
        return [event["event"] for event in read_events(self.paths)]


def judge(**keys: object) -> ServiceConfig:
    return ServiceConfig(command=("judge.py",), **keys)  # type: ignore[arg-type]


def test_ranks_start_when_each_place_of_a_needed_service_is_ready(tmp_path: Path) -> None:
    async def story() -> None:
        stage, leaving = Stage(tmp_path, judge=judge(nodes=2)), asyncio.Event()
        links = [Link(stage), Link(stage)]
        start = asyncio.create_task(stage.services.start(leaving))
        await stage.step_started.wait()
        for what, index in (("started", 0), ("started", 1), ("ready", 1)):
            stage.say(what, links[index], index=index)
            await asyncio.sleep(0)
            assert not start.done()
        stage.say("ready", links[0])
        await start
        assert stage.services.addresses() == {"judge": "h0:1,h1:1"}
        # At the next restart of the ranks it still runs.
        await stage.services.start(leaving)
        assert stage.steps_of == ["judge"]
        await stage.services.close()
        assert [type(one) for link in links for one in link.told] == [Shutdown, Shutdown]
        assert not stage.posted
        assert stage.journal() == ["service_started"] * 2 + ["service_ready"] * 2

    asyncio.run(story())


def test_a_needed_service_that_fails_is_told_to_the_policy_and_started_anew_with_the_ranks(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        stage, leaving = Stage(tmp_path, judge=judge()), asyncio.Event()
        start = asyncio.create_task(stage.services.start(leaving))
        await stage.step_started.wait()
        link = Link(stage)
        stage.say("started", link)
        stage.say("failed", link)
        assert stage.posted == [inputs.ServiceLost("service judge on n0: ")]
        leaving.set()  # what the policy does: TakeDown
        await start
        assert stage.services.addresses() == {}
        again = asyncio.create_task(stage.services.start(asyncio.Event()))
        stage.step_started.clear()
        await stage.step_started.wait()
        stage.say("ended", link)  # from before, late
        fresh = Link(stage)
        stage.say("started", fresh)
        stage.say("ready", fresh)
        await again
        assert stage.steps_of == ["judge", "judge"]
        assert len(stage.posted) == 1
        await stage.services.close()

    asyncio.run(story())


def test_a_service_that_is_not_needed_may_fail_and_the_ranks_start_without_it(tmp_path: Path) -> None:
    async def story() -> None:
        stage = Stage(tmp_path, judge=judge(needed=False))
        start = asyncio.create_task(stage.services.start(asyncio.Event()))
        await stage.step_started.wait()
        stage.steps[0].kill()  # its host died before it could say a word
        await start
        assert stage.services.addresses() == {}
        assert not stage.posted
        assert stage.journal() == ["service_failed"]
        await stage.services.close()

    asyncio.run(story())


def test_a_host_that_is_gone_without_a_word_is_a_lost_service(tmp_path: Path) -> None:
    async def story() -> None:
        stage = Stage(tmp_path, judge=judge())
        start = asyncio.create_task(stage.services.start(asyncio.Event()))
        await stage.step_started.wait()
        link = Link(stage)
        stage.say("started", link)
        stage.say("ready", link)
        await start
        assert not stage.services.gone(Link(stage))  # type: ignore[arg-type]
        assert stage.services.gone(link)  # type: ignore[arg-type]
        assert stage.posted == [inputs.ServiceLost("service judge: its host is gone without a word")]
        await stage.services.close()

    asyncio.run(story())


def test_a_host_of_no_service_or_for_a_place_that_is_taken_is_dismissed(tmp_path: Path) -> None:
    async def story() -> None:
        stage = Stage(tmp_path, judge=judge())
        start = asyncio.create_task(stage.services.start(asyncio.Event()))
        await stage.step_started.wait()
        first, *others = Link(stage), *(Link(stage, stranger=True) for _ in range(3))
        second, other, beyond = others
        stage.say("started", first)
        stage.say("started", second)
        stage.say("started", other, service="sandbox")
        stage.say("started", beyond, index=1)
        assert [len(link.told) for link in (first, second, other, beyond)] == [0, 1, 1, 1]
        start.cancel()
        await stage.services.close()

    asyncio.run(story())


def test_a_host_that_does_not_come_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HOSTS_COME_S", 0.0)

    async def story() -> None:
        stage, leaving = Stage(tmp_path, judge=judge(needed=False)), asyncio.Event()
        await stage.services.start(leaving)
        (failed,) = read_events(stage.paths)
        assert failed["detail"] == "1 of 1 hosts did not come in 0 s"
        stage.steps[0].kill()
        await stage.services.close()

    asyncio.run(story())


def test_a_needed_service_whose_host_slurm_does_not_start_is_the_environments_fault(tmp_path: Path) -> None:
    async def story() -> list[inputs.Input]:
        stage, leaving = Stage(tmp_path, judge=judge()), asyncio.Event()
        start = asyncio.create_task(stage.services.start(leaving))
        await stage.step_started.wait()
        stage.steps[0].kill()
        await next(iter(task for task in asyncio.all_tasks() if "_run" in str(task.get_coro())))
        leaving.set()
        await start
        await stage.services.close()
        return stage.posted

    assert asyncio.run(story()) == [
        inputs.ServiceLost("service judge: its host ended with -9", environment=True)
    ]
