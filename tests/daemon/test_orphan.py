"""An agent without a lead asks Slurm until Slurm has answered."""

import asyncio
from typing import Any, cast

from verl_slurm_daemon.allocation import SlurmAllocation
from verl_slurm_daemon.events import RequeueAnswered
from verl_slurm_daemon.orphan import ask_until_answered

from verl_slurm.exit_codes import ExitCode

DONE = RequeueAnswered(ExitCode.REQUEUED, "requeued")


class Asked:
    """An allocation that gives these answers, the last one for ever."""

    def __init__(self, *answers: RequeueAnswered | str) -> None:
        self.answers, self.count = answers, 0

    async def requeue(self) -> RequeueAnswered | str:
        self.count += 1
        return self.answers[min(self.count, len(self.answers)) - 1]


def ask(allocation: Asked) -> Any:
    return asyncio.run(ask_until_answered(cast(SlurmAllocation, allocation), pause_s=0.0))


def test_a_request_that_died_is_made_again() -> None:
    allocation = Asked("scontrol: killed by signal 15", "no answer", DONE)
    assert ask(allocation) == DONE
    assert allocation.count == 3


def test_an_answer_is_an_answer() -> None:
    for answer in (DONE, RequeueAnswered(ExitCode.CANCELLED, "ended by its user")):
        allocation = Asked(answer)
        assert ask(allocation) == answer
        assert allocation.count == 1


def test_a_slurm_that_never_answers_is_given_up() -> None:
    allocation = Asked("no answer")
    assert ask(allocation) == "no answer"
    assert 5 < allocation.count < 50
