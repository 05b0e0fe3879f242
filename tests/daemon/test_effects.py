"""What a lead does, with a scheduler that answers late, badly or not at all."""

import asyncio
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from verl_slurm_daemon.allocation.contract import Avoided
from verl_slurm_daemon.decide import actions as act, inputs
from verl_slurm_daemon.lead import agents_step, attempt_start, effects as module, requeueing, restarts
from verl_slurm_daemon.lead.agents_step import Step
from verl_slurm_daemon.lead.effects import Effects
from verl_slurm_daemon.lead.resume import ReadBack, ResumePoint
from verl_slurm_daemon.link.channel import connect

from tests.builders import run_config, write_config
from tests.fakes.allocation import ScriptedAllocation, first_attempt
from tests.journals import read_events
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checks.bad_nodes import recall, remember
from verl_slurm.config.schema import RunConfig
from verl_slurm.wire import messages as msg
from verl_slurm.wire.lead_file import read_lead_address

REQUEUED = inputs.RequeueAnswered(ExitCode.REQUEUED, "requeued")


def effects_of(
    tmp_path: Path, allocation: ScriptedAllocation
) -> tuple[Effects, "asyncio.Queue[inputs.Input]"]:
    paths, posted = RunPaths(tmp_path), asyncio.Queue[inputs.Input]()
    write_config(paths)
    return Effects(first_attempt(paths, RunConfig(), allocation, posted.put_nowait)), posted


@pytest.mark.scenario("L06")
def test_a_requeue_that_got_no_answer_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requeueing, "_ASK_AGAIN_S", 0.0)

    async def story() -> inputs.Input:
        allocation = ScriptedAllocation(
            "slurmctld does not answer", "unconfirmed: Restarts did not rise", REQUEUED
        )
        effects, posted = effects_of(tmp_path, allocation)
        effects.perform(act.AskRequeue())
        return await posted.get()

    assert asyncio.run(story()) == REQUEUED
    said = [e["accepted"] for e in read_events(RunPaths(tmp_path)) if e["event"] == "requeue"]
    assert said == [False, False, True]


def test_a_node_to_avoid_is_named_once_the_requeue_is_taken_and_remembered_for_the_next(
    tmp_path: Path,
) -> None:
    async def story(allocation: ScriptedAllocation, action: act.AskRequeue) -> None:
        effects, posted = effects_of(tmp_path, allocation)
        effects.perform(action)
        await posted.get()

    allocation = ScriptedAllocation(REQUEUED, REQUEUED, inputs.RequeueAnswered(ExitCode.REQUEUE_FAILED, "no"))
    asyncio.run(story(allocation, act.AskRequeue()))
    assert allocation.avoided == []  # a run that never had such a node asks Slurm nothing more
    asyncio.run(story(allocation, act.AskRequeue(("n2",))))
    asyncio.run(story(allocation, act.AskRequeue(("n3",))))  # refused: there is no next start
    assert allocation.avoided == [("n2",)]
    allocation.answers = [REQUEUED]
    asyncio.run(story(allocation, act.AskRequeue()))
    assert allocation.avoided[-1] == ("n2",)


def test_a_node_that_another_run_of_the_user_left_is_avoided_at_the_next_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    remember("cluster", "n5", "GPUs", Path("/another/run"), 1.0)
    allocation = ScriptedAllocation(REQUEUED)

    async def story() -> None:
        effects, posted = effects_of(tmp_path, allocation)
        effects.perform(act.AskRequeue(("n2",)))
        await posted.get()

    asyncio.run(story())
    assert allocation.avoided == [("n5", "n2")]
    (told,) = [event for event in read_events(RunPaths(tmp_path)) if event["event"] == "avoid"]
    assert told["nodes"] == ["n2"]  # the other one's time is not this run's to prolong


@pytest.mark.parametrize(
    ("passing", "names", "kept"),
    [
        (False, ("n2",), "runs of yours avoid it for 12 h"),
        (True, (), "this run avoids it for 3600 s (daemon.avoid_node_s)"),
    ],
)
def test_a_node_that_is_not_fit_is_left_and_told_and_written_down_if_that_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passing: bool, names: tuple[str, ...], kept: str
) -> None:
    monkeypatch.setattr(module, "scrub_forever", never)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    private_dir(RunPaths(tmp_path).control)

    async def story() -> inputs.Input:
        effects, posted = effects_of(tmp_path, ScriptedAllocation())
        await effects.open()
        address = read_lead_address(RunPaths(tmp_path))
        link = await connect(address.host, address.port, bytes.fromhex(address.token), 1)
        link.send(msg.NodeUnfit(node="n2", evidence="GPUs: off the bus", passing=passing))
        event = await posted.get()
        await asyncio.gather(
            *(task for task in effects.attempt.tasks if "write_down" in str(task.get_coro()))
        )
        await link.close()
        await effects.close()
        return event

    assert asyncio.run(story()) == inputs.LeaveNode("n2", "bad_node", "GPUs: off the bus")
    assert recall("cluster").names == names
    (told,) = [event for event in read_events(RunPaths(tmp_path)) if event["event"] == "warning"]
    assert told["text"] == f"n2: GPUs: off the bus; {kept}"


@pytest.mark.scenario("FLT-A")
def test_storage_that_fails_before_the_step_is_neither_a_crash_nor_the_end_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(*_: object) -> ResumePoint:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(restarts, "find_resume_point", look)

    async def story() -> tuple[inputs.Input, object]:
        effects, posted = effects_of(tmp_path, ScriptedAllocation())
        effects.perform(act.StartRanks(1))
        return await posted.get(), effects.attempt.exit

    detail = "the step was not started: [Errno 5] Input/output error"
    assert asyncio.run(story()) == (inputs.StartHindered(detail), None)


@pytest.mark.scenario("FLT-A")
def test_what_a_run_can_do_without_ends_no_run_where_storage_fails_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scrub(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "scrub_forever", scrub)
    private_dir(RunPaths(tmp_path).control)

    async def story() -> object:
        effects, _ = effects_of(tmp_path, ScriptedAllocation())
        await effects.open()
        await asyncio.sleep(0.1)
        await effects.close()
        return effects.attempt.exit

    assert asyncio.run(story()) is None
    (said,) = [event for event in read_events(RunPaths(tmp_path)) if event["event"] == "warning"]
    assert "Input/output error" in said["text"]


def test_a_save_that_storage_does_not_give_back_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [ReadBack(False, "Input/output error", unreadable=True), ReadBack(True, "7 bytes")]
    monkeypatch.setattr(module, "read_back", lambda *_: found.pop(0))
    monkeypatch.setattr(attempt_start, "IN_PLACE_S", (0.0,))

    async def story() -> inputs.Input:
        effects, posted = effects_of(tmp_path, ScriptedAllocation())
        effects.perform(act.Verify("step_000001"))
        return await posted.get()

    assert asyncio.run(story()) == inputs.SaveReadBack("step_000001", True, "7 bytes")
    (said,) = [event for event in read_events(RunPaths(tmp_path)) if event["event"] == "warning"]
    assert "Input/output error: read again" in said["text"]


def test_a_slurm_that_is_slow_to_hear_of_a_node_does_not_hold_up_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requeueing, "_AVOID_S", 0.05)

    class Slow(ScriptedAllocation):
        async def avoid(self, nodes: Sequence[str], before: Collection[str]) -> Avoided:
            await asyncio.Event().wait()
            return Avoided("")

    async def story() -> inputs.Input:
        effects, posted = effects_of(tmp_path, Slow(REQUEUED))
        effects.perform(act.AskRequeue(("n2",)))
        return await posted.get()

    assert asyncio.run(story()) == REQUEUED
    (said,) = [event for event in read_events(RunPaths(tmp_path)) if event["event"] == "avoid"]
    assert said["detail"].startswith("nothing is avoided")


@pytest.mark.parametrize("moment", ["while looking for a checkpoint", "after the step was started"])
def test_a_take_down_reaches_a_restart_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    early = moment.startswith("while")
    looked, go_on = threading.Event(), threading.Event()

    def look(*_: object) -> ResumePoint:
        looked.set()
        assert go_on.wait(30)
        return ResumePoint("", (), "start+0")

    monkeypatch.setattr(restarts, "find_resume_point", look)
    monkeypatch.setattr(agents_step, "GOODBYE_S", 0.05)

    async def story() -> tuple[inputs.Input, int]:
        allocation = ScriptedAllocation()
        effects, posted = effects_of(tmp_path, allocation)
        effects.perform(act.StartRanks(1))
        await asyncio.to_thread(looked.wait, 30)
        if early:
            effects.perform(act.TakeDown())
            await asyncio.sleep(0)
        go_on.set()
        if not early:
            await allocation.step_started.wait()
            effects.perform(act.TakeDown())
        return await posted.get(), allocation.steps

    ended, steps = asyncio.run(story())
    assert isinstance(ended, inputs.RanksEnded)
    assert steps == (0 if early else 1)


@pytest.mark.scenario("FLT-B")
@pytest.mark.parametrize("refused", [True, False])
def test_agents_that_slurm_does_not_bring_are_the_environments_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    monkeypatch.setattr(restarts, "find_resume_point", lambda *_: ResumePoint("", (), "start+0"))
    monkeypatch.setattr(restarts, "AGENTS_READY_S", 600.0 if refused else 0.0)
    monkeypatch.setattr(agents_step, "GOODBYE_S", 0.05)

    class Refusing(ScriptedAllocation):
        async def start_step(self, *_: object, **__: object) -> list[asyncio.subprocess.Process]:
            return [await asyncio.create_subprocess_exec("false" if refused else "cat", stdin=-1)]

    async def story() -> inputs.Input:
        effects, posted = effects_of(tmp_path, Refusing())
        effects.perform(act.StartRanks(1))
        failed = await posted.get()
        await effects.restarts.step.end()
        return failed

    failed = asyncio.run(story())
    assert isinstance(failed, inputs.NodeFailed)
    assert (failed.node, failed.environment) == ("", True)
    how = "the step ended with 1 before any agent came" if refused else "2 of 2 agents had not come after 0 s"
    assert failed.detail.startswith(how)


class Heard:
    """A link that only notes what it is to send."""

    def __init__(self) -> None:
        self.sent: list[msg.ToAgent] = []

    def send(self, message: msg.ToAgent) -> None:
        self.sent.append(message)


def test_stacks_that_come_late_do_not_end_the_restart_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents_step, "_STACKS_S", 0.02)

    async def story(ends: bool) -> list[msg.ToAgent]:
        effects, _ = effects_of(tmp_path, ScriptedAllocation())
        hung, following = Heard(), Heard()
        effects.restarts.step = first = Step(1, 1)
        first.links = {"n1": hung}  # type: ignore[dict-item]
        effects.perform(act.TakeDown(stacks=True))
        await asyncio.sleep(0)
        if ends:
            effects.restarts.step = Step(2, 1)
            effects.restarts.step.links = {"n1": following}  # type: ignore[dict-item]
        await asyncio.gather(*effects.attempt.tasks)
        assert first.leaving.is_set() is not ends
        return [*hung.sent, *following.sent]

    assert asyncio.run(story(ends=False)) == [msg.DumpStacks(), msg.Shutdown()]
    assert asyncio.run(story(ends=True)) == [msg.DumpStacks()]


@pytest.mark.scenario("K03")
def test_a_deadline_counts_from_when_it_was_set_however_long_it_takes_to_write_that_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> list[inputs.Input]:
        loop, passed = asyncio.get_running_loop(), [0.0]
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + passed[0])

        def slow_disk(*_: object, **__: object) -> None:
            passed[0] += 3600.0

        effects, posted = effects_of(tmp_path, ScriptedAllocation())
        monkeypatch.setattr(effects.attempt.journal, "write", slow_disk)
        effects.perform(act.SaveRequest(request_id=1, stop=True, seconds_left=3500.0))
        for _ in range(3):
            await asyncio.sleep(0)
        return [posted.get_nowait() for _ in range(posted.qsize())]

    assert asyncio.run(story()) == [inputs.SaveDeadline()]


@pytest.mark.parametrize("trigger", ["SIGUSR1 to lead", "SIGTERM to node n1"])
def test_a_slurm_that_did_not_say_why_a_signal_came_is_asked_until_it_does(
    trigger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ASK_AGAIN_S", 0.0)
    signal, _, where = trigger.partition(" to ")

    async def story() -> list[inputs.Input]:
        allocation = ScriptedAllocation()
        allocation.causes = ["unknown", "preemption"]
        effects, posted = effects_of(tmp_path, allocation)
        effects.perform(act.AskCause(trigger))
        told = [await posted.get(), await posted.get()]
        effects.perform(act.AskCause(trigger))
        told.append(await posted.get())
        await asyncio.sleep(0)
        assert posted.empty(), "it is known"
        return told

    assert asyncio.run(story()) == [
        inputs.CauseKnown("unknown", trigger, None),
        inputs.SignalArrived(signal, where, again=True),
        inputs.CauseKnown("preemption", trigger, None),
    ]


def test_an_effect_that_breaks_ends_the_lead_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(*_: object) -> ResumePoint:
        raise RuntimeError("a bug")

    monkeypatch.setattr(restarts, "find_resume_point", look)

    async def story() -> tuple[ExitCode, str] | None:
        effects, posted = effects_of(tmp_path, ScriptedAllocation())
        effects.perform(act.StartRanks(1))
        await posted.get()
        return effects.attempt.exit

    assert asyncio.run(story()) == (ExitCode.INTERNAL, "a bug")


def test_a_checkpoint_that_was_pruned_is_not_asked_for_from_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "read_back", lambda *_: ReadBack(False, "removed", pruned=True))

    async def story() -> tuple[inputs.Input, int]:
        paths, posted, allocation = RunPaths(tmp_path), asyncio.Queue[inputs.Input](), ScriptedAllocation()
        config = run_config(local_dir="/scratch")
        effects = Effects(first_attempt(paths, config, allocation, posted.put_nowait))
        effects.perform(act.Verify("step_000002"))
        return await posted.get(), allocation.steps

    assert asyncio.run(story()) == (inputs.SaveReadBack("step_000002", False, "removed", pruned=True), 0)
    assert not [e for e in read_events(RunPaths(tmp_path)) if e["event"] == "corrupt"]


@pytest.mark.parametrize("is_home", [True, False])
def test_a_damaged_checkpoint_is_written_down_once_whether_the_nodes_have_it_or_not(
    is_home: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").touch()
    looks = iter([ReadBack(False, "actor/x: sha256"), ReadBack(is_home, "")])
    monkeypatch.setattr(module, "read_back", lambda *_: next(looks))

    async def home(*_: object) -> bool:
        return True

    monkeypatch.setattr(restarts.Restarts, "bring_home", home)

    async def story() -> inputs.Input:
        paths, posted = RunPaths(tmp_path), asyncio.Queue[inputs.Input]()
        config = run_config(local_dir="/scratch")
        effects = Effects(first_attempt(paths, config, ScriptedAllocation(), posted.put_nowait))
        effects.perform(act.Verify("step_000002"))
        return await posted.get()

    told = asyncio.run(story())
    assert isinstance(told, inputs.SaveReadBack)
    assert told.good is is_home
    # What is no good by then is the policy's to write.
    assert sum(e["event"] == "corrupt" for e in read_events(RunPaths(tmp_path))) == is_home


def test_an_agent_whose_ranks_have_ended_hears_that_this_was_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for that: what it sent to a lead that dies before reading it was told to nobody."""
    monkeypatch.setattr(module, "scrub_forever", never)
    private_dir(RunPaths(tmp_path).control)

    async def story() -> tuple[list[msg.ToAgent], inputs.Input]:
        effects, posted = effects_of(tmp_path, ScriptedAllocation())
        await effects.open()
        address = read_lead_address(RunPaths(tmp_path))
        link = await connect(address.host, address.port, bytes.fromhex(address.token), 1)
        heard: asyncio.Queue[msg.ToAgent] = asyncio.Queue()
        listening = asyncio.create_task(link.messages(heard.put_nowait))
        link.send(msg.AgentReady(node="n", node_id=0, address="127.0.0.1", free_port=1))
        link.send(msg.NodeExited(node="n", exit_code=1, detail="killed"))
        answers, event = [await heard.get(), await heard.get()], await posted.get()
        listening.cancel()
        await link.close()
        await effects.close()
        return answers, event

    answers, event = asyncio.run(story())
    assert isinstance(answers[0], msg.Baseline)
    assert answers[1:] == [msg.Shutdown()]
    assert event == inputs.NodeFailed("n", "killed")


@pytest.mark.scenario("N03")
@pytest.mark.parametrize("leaving", [False, True])
def test_a_frame_that_is_refused_is_journaled_and_its_node_is_lost_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaving: bool
) -> None:
    """While a step is told to end, its links may end in any way: no node is called bad for that."""
    monkeypatch.setattr(module, "scrub_forever", never)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    private_dir(RunPaths(tmp_path).control)

    async def story() -> inputs.Input:
        effects, posted = effects_of(tmp_path, ScriptedAllocation())
        await effects.open()
        address = read_lead_address(RunPaths(tmp_path))
        link = await connect(address.host, address.port, bytes.fromhex(address.token), 1)
        link.send(msg.AgentReady(node="n", node_id=0, address="127.0.0.1", free_port=1))
        if leaving:
            effects.restarts.step.leaving.set()
        link._framer._sent -= 1  # the next frame has the number of this one
        link.send(msg.NodeExited(node="n", exit_code=1, detail="killed"))
        event = await posted.get()
        assert posted.empty()
        await link.close()
        await effects.close()
        return event

    assert asyncio.run(story()) == inputs.NodeFailed("n", "the agent is gone without a word", lost=True)
    told = [event for event in read_events(RunPaths(tmp_path)) if event["event"] == "link"]
    assert [event["node"] for event in told] == ([] if leaving else ["n"])
    assert all("out of order" in str(event["error"]) for event in told)


async def never(*_: object) -> None:
    """No scrub in this test."""
