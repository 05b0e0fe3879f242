"""Decides whether an agent may leave: from what it knows, never from how it came to its end. Pure.

`decide` guarantees that an agent leaves in one of four cases. The lead knows: it said so itself, or it
answers and so will see the agent's link end. Or there is no Slurm to ask. Or the agent has asked Slurm to run
the job again; Slurm refuses that if the user cancelled the job (`requeue_rules.refuse_requeue`). Or there
never was a link, and no lead waits for the agent any longer. Every way an agent's work can end comes through
here: the lead's Shutdown, a lost link, ranks that have ended, and any exception.
"""

from typing import Literal

import msgspec

# Slurm learns of a batch process's death within a second (seen: 0.2 s), or within minutes if the node is
# lost, too. Storage that hangs may keep a lead silent for minutes, after which it goes on.
PATIENCE_S = 600.0
"""Seconds that Slurm may have the job as running while its lead does not answer."""


class AgentKnowledge(msgspec.Struct, frozen=True, kw_only=True):
    """The knowledge of an agent whose work is over."""

    in_slurm: bool
    released: bool
    """The lead said Shutdown; it may have been the answer to NodeExited."""
    link_up: bool
    """The connection to the lead has not ended."""
    joined: bool
    """There was a connection: the lead has counted on this agent."""
    looked: bool = False
    """The facts below have been looked at."""
    lead_ended: bool | None = None
    """The journal has the end of this attempt; None: it cannot be read."""
    lead_answers: bool = False
    """A lead that knows this attempt's token answered a new connection."""
    job_runs: bool | None = None
    """Slurm has the job as running; None: it does not say, or was not asked yet."""
    waited_s: float = 0.0


class LeavingStep(msgspec.Struct, frozen=True):
    """The next step, and its reason."""

    do: Literal["leave", "ask", "look"]
    """`ask`: for a requeue, then leave. `look`: at the facts again, then decide again."""
    reason: str


def decide(known: AgentKnowledge) -> LeavingStep:
    """Decides for one of the three verdicts."""
    if known.released and known.link_up:
        return LeavingStep("leave", "the lead said so")
    # Before every look: without Slurm there is no requeue that could be lost.
    if not known.in_slurm:
        return LeavingStep("leave", "there is no Slurm to ask")
    if not known.looked:
        return LeavingStep("look", "the lead may be gone")
    # A lead that ended the restart for good may end before its agents do; then its word stands. A lead that wanted to
    # start again, and was killed meanwhile, has not written an end.
    if known.released and known.lead_ended is not False:
        return LeavingStep("leave", "the lead said so, and has ended")
    if known.lead_answers:
        return LeavingStep("leave", "the lead lives, and sees this agent's link end")
    if known.job_runs is False:
        return LeavingStep("ask", "the lead is gone, and Slurm ends the job")
    # Neither of the two is proof: storage may hold up a lead for minutes, and Slurm may not know of a lost node yet.
    if known.waited_s < PATIENCE_S:
        return LeavingStep("look", "the lead does not answer, and Slurm has not ended the job")
    # The lead counted on this agent, and has been silent for longer than storage may hold one up.
    if known.joined:
        return LeavingStep("ask", "nobody leads this job")
    return LeavingStep("leave", "there never was a link; a lead that waits for this agent does so no longer")
