"""Reads from `scontrol show job ID --json` what a COMPLETING job will be; the text does not tell. Pure.

The text shows one word of a state that has several, and COMPLETING hides the others: a job that its user cancels and
one that Slurm ends for a preemption look alike (all versions). From 23.11 on the JSON lists all of them. 22.05's
scontrol has no such option and 23.02's JSON has the one word: then the answer stays unknown.
"""

import msgspec

__all__ = ["ended_as"]

_ENDS = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    }
)


class _Job(msgspec.Struct):
    job_id: int = 0
    job_state: str | list[str] = []


class _Answer(msgspec.Struct):
    jobs: list[_Job] = []


def ended_as(text: str, job_id: int) -> str | None:
    """Returns the end among the job's states; None: no known end, or no such answer."""
    try:
        answer = msgspec.json.decode(text, type=_Answer)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    states = [job.job_state for job in answer.jobs if job.job_id == job_id]
    if len(states) != 1 or isinstance(states[0], str):
        return None
    ends = [state for state in states[0] if state in _ENDS]
    return ends[0] if len(ends) == 1 else None
