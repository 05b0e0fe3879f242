"""The user's past jobs, as `sacct` lists them: how long they waited, how long they ran, how often they were thrown out.

Pure; `client.past_jobs` asks. Recorded on 22.05.8 with slurmdbd: a job that is preempted or requeued has a line of its
own for each time it ran (`--duplicates`).
"""

import msgspec


class PastJobs(msgspec.Struct, frozen=True, kw_only=True):
    """What the lines add up to. A line is one start of a job."""

    waits_s: tuple[float, ...] = ()
    """From when a job could start to when it did, of each start."""
    ran_s: float = 0.0
    """Of all starts together."""
    thrown_out: int = 0
    """Starts that ended as PREEMPTED or REQUEUED."""


def parse_past_jobs(text: str) -> PastJobs:
    """Parses lines of `commands.list_past_jobs`; one that is not understood is passed over."""
    waits: list[float] = []
    ran, thrown_out = 0.0, 0
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 4:
            continue
        state, eligible, start, elapsed = fields
        # A job that never started has `Unknown` there.
        if eligible.isascii() and eligible.isdigit() and start.isascii() and start.isdigit():
            waits.append(max(float(int(start) - int(eligible)), 0.0))
        if elapsed.isascii() and elapsed.isdigit():
            ran += int(elapsed)
        # `CANCELLED by 1000`: the first word is the state.
        thrown_out += state.partition(" ")[0] in ("PREEMPTED", "REQUEUED")
    return PastJobs(waits_s=tuple(waits), ran_s=ran, thrown_out=thrown_out)
