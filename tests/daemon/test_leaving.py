"""May an agent leave? The whole table, and what must hold in every row of it."""

from itertools import product

import pytest
from verl_slurm_daemon.decide.leaving import PATIENCE_S, AgentKnowledge, decide

EVERYTHING = [
    AgentKnowledge(
        in_slurm=in_slurm,
        released=released,
        link_up=link_up,
        joined=joined,
        looked=looked,
        lead_ended=lead_ended,
        lead_answers=lead_answers,
        job_runs=job_runs,
        waited_s=waited_s,
    )
    for in_slurm, released, link_up, joined, looked, lead_ended, lead_answers, job_runs, waited_s in product(
        *[(False, True)] * 5, (None, False, True), (False, True), (None, False, True), (0.0, PATIENCE_S)
    )
]


def known(**facts: object) -> AgentKnowledge:
    usual = {"in_slurm": True, "released": False, "link_up": False, "joined": True, "looked": True}
    return AgentKnowledge(**{**usual, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "do"),
    [
        ({"released": True, "link_up": True, "looked": False}, "leave"),
        ({"in_slurm": False, "looked": False}, "leave"),
        # the link was lost, a request broke, NodeExited was not answered: nothing is known yet
        ({"looked": False}, "look"),
        ({"link_up": True, "looked": False}, "look"),
        ({"joined": False, "looked": False}, "look"),
        ({"released": True, "looked": False}, "look"),
        ({"lead_answers": True}, "leave"),
        ({"lead_answers": True, "joined": False}, "leave"),
        # the lead is dead, and Slurm knows
        ({"job_runs": False}, "ask"),
        ({"job_runs": False, "link_up": True}, "ask"),
        ({"job_runs": False, "joined": False}, "ask"),
        # ... or does not know yet, or does not say
        ({"job_runs": True}, "look"),
        ({"job_runs": None}, "look"),
        ({"job_runs": True, "waited_s": PATIENCE_S}, "ask"),
        ({"job_runs": None, "waited_s": PATIENCE_S}, "ask"),
        ({"job_runs": True, "joined": False, "waited_s": PATIENCE_S}, "leave"),
        # it had said Shutdown before it was gone: to start anew, or for good?
        ({"released": True, "lead_ended": False, "job_runs": False}, "ask"),
        ({"released": True, "lead_ended": False, "job_runs": True}, "look"),
        ({"released": True, "lead_ended": False, "lead_answers": True}, "leave"),
        ({"released": True, "lead_ended": True, "job_runs": False}, "leave"),
        ({"released": True, "lead_ended": None, "job_runs": False}, "leave"),
    ],
)
def test_an_agent_at_its_end(facts: dict[str, object], do: str) -> None:
    assert decide(known(**facts)).do == do


def test_no_agent_leaves_but_the_lead_knows_or_nobody_can_be_asked() -> None:
    for row in EVERYTHING:
        verdict = decide(row)
        assert verdict.reason
        told = row.released and (row.link_up or (row.looked and row.lead_ended is not False))
        lives = row.looked and row.lead_answers
        stranger = row.looked and not row.joined and row.waited_s >= PATIENCE_S
        match verdict.do:
            case "leave":
                assert told or lives or stranger or not row.in_slurm, row
            case "ask":  # over a living lead's head, or against its last word: never
                assert row.in_slurm, row
                assert not told, row
                assert not lives, row
            case "look":
                assert row.in_slurm, row
                assert row.waited_s < PATIENCE_S or not row.looked, row


def test_nobody_looks_for_ever() -> None:
    assert {decide(row).do for row in EVERYTHING if row.looked and row.waited_s >= PATIENCE_S} == {
        "leave",
        "ask",
    }
