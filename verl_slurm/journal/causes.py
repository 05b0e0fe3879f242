"""What each cause of an interruption means, a row for each: the daemon, metrics, `status`, `plan` and report ask it.

`verl_slurm.slurm.cause` finds most of them, `events.Crash.cause` has those of the ranks. docs/preemption.md tells users
how each is recognised, and what the run does.
"""

from typing import Literal, NamedTuple

# What a lead finds when it is woken.
CauseKind = Literal[
    "preemption",
    "time_limit",
    "failed",
    "operator",
    "operator_requeue",
    "growth",
    "cancel",
    "requeued",
    "node_lost",
    "reclaimed",
    "bad_node",
    "service",
    "suspended",
    "none",
    "unknown",
]


class Meaning(NamedTuple):
    """What follows from a cause."""

    ended_by: Literal["", "Slurm", "us"] = ""
    """Who ends the attempt. Slurm: soon, whatever we do, so a save is bounded. Us: nothing presses, so it is not."""
    series: str = ""
    """Label in `verl_restarts` of a start that follows it. Closed, so that no text of an event becomes a label."""
    words: str = ""
    """For people, where Slurm's own words are left out."""
    strike: Literal["notice", "crash", "lost_node"] = "notice"
    """How a simulation has it come: with a warning, with the end of the ranks, or with that of a node."""
    goes_on: bool = True
    """The run is to go on in another attempt."""


# Each `CauseKind`, and what makes ranks start again beside these.
CAUSES: dict[str, Meaning] = {
    "preemption": Meaning("Slurm", "preemption", "Slurm takes the nodes for a more urgent job"),
    "time_limit": Meaning("Slurm", "time_limit", "the job's time is nearly up"),
    "node_lost": Meaning("Slurm", "node_lost", "a node of the job is gone", "lost_node"),
    "reclaimed": Meaning("Slurm", "reclaimed", "the cloud takes a node back"),
    "bad_node": Meaning("Slurm", "bad_node", "a node is not fit for ranks"),
    "service": Meaning("us", "service", "a service that the run needs cannot be started again"),
    "requeued": Meaning("Slurm", "requeued", "the job was requeued in Slurm, by a user or by Slurm itself"),
    "crash": Meaning(series="crash", strike="crash"),
    "hang": Meaning(series="hang", strike="crash"),
    "stranger": Meaning(series="stranger", strike="crash"),
    "lead_lost": Meaning(series="lead_lost", strike="lost_node"),
    "cancel": Meaning("Slurm", "cancel", "the job was cancelled", goes_on=False),
    "submitted": Meaning(series="submitted"),
    "other": Meaning(series="other"),
    # Of all that can fail, a lead lives to see a lost node.
    "failed": Meaning(
        "Slurm", "node_lost", "something broke, and Slurm does not start the job again", "lost_node"
    ),
    "operator_requeue": Meaning("us", "requeued", "an operator asked for a requeue"),
    "growth": Meaning("us", "requeued", "more nodes are idle"),
    "operator": Meaning(words="an operator asked for a save"),
    "suspended": Meaning(),
    "none": Meaning(),
    "unknown": Meaning(),
}
SERIES = tuple(dict.fromkeys(meaning.series for meaning in CAUSES.values() if meaning.series))


def meaning_of(cause: str) -> Meaning:
    """The row of a cause; nothing follows from a word that is none."""
    return CAUSES.get(cause, CAUSES["none"])
