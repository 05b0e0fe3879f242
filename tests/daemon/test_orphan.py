"""An agent without a lead stays until it knows that it may leave, and asks Slurm until Slurm has answered."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from verl_slurm_daemon.agent.agent_log import AgentLog
from verl_slurm_daemon.agent.orphan import ask_until_answered, see_off
from verl_slurm_daemon.decide.inputs import RequeueAnswered
from verl_slurm_daemon.decide.leaving import PATIENCE_S, AgentKnowledge, LeavingStep

from verl_slurm.base.exit_codes import ExitCode

DONE = RequeueAnswered(ExitCode.REQUEUED, "requeued")
CANCELLED = RequeueAnswered(ExitCode.CANCELLED, "ended by its user")
REFUSED = RequeueAnswered(ExitCode.REQUEUE_FAILED, "refused: not now")
ALONE = AgentKnowledge(in_slurm=True, released=False, link_up=False, joined=True)


class World:
    """What an agent senses, answer by answer, the last one for ever; an exception is raised."""

    def __init__(
        self,
        *requeue: RequeueAnswered | str | Exception,
        runs: tuple[bool | Exception | None, ...] = (False,),
        answers: tuple[bool | Exception, ...] = (False,),
        ended: bool | Exception = False,
    ) -> None:
        self._requeue, self._runs, self._answers, self._ended = (
            list(requeue or (DONE,)),
            [*runs],
            [*answers],
            ended,
        )
        self.asked = 0
        self.told: list[tuple[bool, str]] = []
        self.now = 0.0

    @staticmethod
    def _next(answers: list[Any]) -> Any:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def lead_ended(self) -> bool:
        return self._next([self._ended])

    async def lead_answers(self) -> bool:
        return self._next(self._answers)

    async def job_runs(self) -> bool | None:
        return self._next(self._runs)

    async def requeue(self) -> RequeueAnswered | str:
        self.asked += 1
        return self._next(self._requeue)

    def tell(self, accepted: bool, detail: str) -> None:
        self.told.append((accepted, detail))

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def stay(world: World, known: AgentKnowledge, node_id: int = 0) -> LeavingStep:
    log = AgentLog(Path("/dev/null"), "1 n")
    return asyncio.run(see_off(known, world, node_id, log, sleep=world.sleep, clock=lambda: world.now))


def ask(world: World) -> RequeueAnswered | str:
    return asyncio.run(ask_until_answered(world, sleep=world.sleep))


def test_where_the_lead_is_gone_the_requeue_is_asked_for_until_there_is_an_answer() -> None:
    world = World()
    assert stay(world, ALONE).do == "ask"
    assert (world.asked, world.told) == (1, [(True, "requeued")])
    world = World("scontrol: killed by signal 15", "no answer", OSError(11, "fork"), REFUSED, DONE)
    assert ask(world) == DONE
    assert world.asked == 5
    for answer in (DONE, CANCELLED):
        world = World(answer)
        assert ask(world) == answer
        assert world.asked == 1


def test_a_lead_that_lives_or_ended_is_not_passed_over_and_outside_slurm_nobody_is_asked() -> None:
    world = World(answers=(True,))
    assert stay(world, ALONE, node_id=900).do == "leave"
    assert (world.asked, world.now) == (0, 0.0)
    released = AgentKnowledge(in_slurm=True, released=True, link_up=False, joined=True)
    killed, ended, unreadable = World(), World(ended=True), World(ended=TimeoutError())
    assert [stay(world, released).do for world in (killed, ended, unreadable)] == ["ask", "leave", "leave"]
    assert (killed.asked, ended.asked, unreadable.asked) == (1, 0, 0)
    log = AgentLog(Path("/dev/null"), "1 n")
    outside = AgentKnowledge(in_slurm=False, released=False, link_up=False, joined=True)
    assert asyncio.run(see_off(outside, None, 0, log)).do == "leave"


def test_slurm_that_is_late_to_know_is_waited_for_and_asked_in_the_end() -> None:
    world = World(runs=(None, *(True,) * 40, False))
    assert stay(world, ALONE).do == "ask"
    assert (world.asked, world.told) == (1, [(True, "requeued")])
    world = World(runs=(True,))
    assert stay(world, ALONE).do == "ask"
    assert world.now >= PATIENCE_S
    assert world.asked == 1


def test_agents_ask_in_their_turn() -> None:
    early, late = World(), World()
    stay(early, ALONE, node_id=1)
    stay(late, ALONE, node_id=4)
    assert late.now - early.now > 4


@pytest.mark.parametrize("error", [OSError(11, "no more processes"), RuntimeError("can't start new thread")])
def test_whatever_goes_wrong_in_asking_is_no_end(error: Exception) -> None:
    world = World(error, DONE, runs=(error, error, False), answers=(error, False))
    assert stay(world, ALONE).do == "ask"
    assert (world.asked, world.told) == (2, [(True, "requeued")])


@pytest.mark.parametrize("answer", ["no answer", REFUSED])
def test_a_slurm_that_never_agrees_is_given_up_and_that_is_said(answer: RequeueAnswered | str) -> None:
    world = World(answer)
    assert stay(world, ALONE).do == "ask"
    assert 5 < world.asked < 50
    assert [accepted for accepted, _ in world.told] == [False]
