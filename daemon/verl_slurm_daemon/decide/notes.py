"""Builds the journal's notes about saves, including the note that a save has one copy. Pure."""

from verl_slurm.journal import events as ev
from verl_slurm.wire.messages import Saved, SavedOnNodes
from verl_slurm_daemon.decide import actions as act
from verl_slurm_daemon.decide.model import Model
from verl_slurm_daemon.decide.states import State

_MOST_NAMED = 8


def saved_notes(message: Saved) -> tuple[act.Note, ...]:
    """Returns the notes about a completed save, naming a medium that lacks it."""
    saved = ev.Saved(
        message.name,
        seconds=round(message.seconds, 3),
        num_bytes=message.num_bytes,
        emergency=message.request_id > 0,
        reason=message.reason,
        on_shared=message.on_shared,
    )
    missing = (act.Note(ev.OneCopy(message.name, message.problem)),)
    return (act.Note(saved), *(missing if message.problem else ()))


def kept_note(message: SavedOnNodes) -> act.Note:
    """Returns a note to be written at once: if the daemon is killed next, a person can still read where the work is."""
    reason = f"{message.name} is on the nodes' disks, read back; shared storage is still being written"
    return act.Note(ev.SecondCopy(reason, message.name))


def late_ranks(model: Model) -> str:
    """Names the ranks that the save before the end still waits for; empty: none."""
    if model.state is not State.SAVING:
        return ""
    absent = [rank for rank in range(model.world_size) if not model.came & model.bit(rank)]
    writing = [rank for rank in range(model.world_size) if model.came & ~model.wrote & model.bit(rank)]
    late, what = (absent, "not come to it") if absent else (writing, "not written its part")
    if not late:
        return ""
    named = ", ".join(str(rank) for rank in late[:_MOST_NAMED])
    more = f" and {len(late) - _MOST_NAMED} more" if len(late) > _MOST_NAMED else ""
    return f": rank {named}{more} has {what}"


def given_up(kept: SavedOnNodes | None, state: State, reason: str) -> tuple[act.Note, ...]:
    """Returns the notes for a save before the end that is no longer waited for.

    Args:
        kept: what the nodes' disks have of it, read back; None: nothing.
        state: in CHECKING, shared storage has it as well, but it was not read back there.
        reason: why the wait ends.
    """
    if kept is None:
        return (act.Note(ev.Degraded(reason)),)
    if state is State.CHECKING:
        return (act.Note(ev.OneCopy(kept.name, f"read back on the nodes' disks; {reason}")),)
    return saved_notes(
        Saved(
            rank=kept.rank,
            request_id=kept.request_id,
            name=kept.name,
            seconds=kept.seconds,
            num_bytes=kept.num_bytes,
            on_shared=False,
            problem=f"not on shared storage: it was still being written; {reason}",
            reason="the job ends",
        )
    )
