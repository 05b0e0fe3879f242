"""How long the next start waits after starts that came to nothing before any training."""

IN_PLACE_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Between tries in place: half a minute in all. A busy file server may need that, and a place in a full
cluster is worth it.
"""
SLURM_AWAY_S = 60.0
"""Between tries after that while Slurm does not answer: it takes no requeue either."""

MOST_FAILED_STARTS = 24
_FIRST_DELAY_S, _LONGEST_DELAY_S = 30, 3600


def delay_after(failed: int) -> int | None:
    """Returns the seconds that the next start waits: 30, 60, ... up to an hour. The last of `MOST_FAILED_STARTS` begins
    18 hours after the first.

    Args:
        failed: how many in a row failed before the present one. 0: the next one waits as the user configured it (None).
    """
    return min(_FIRST_DELAY_S << (failed - 1), _LONGEST_DELAY_S) if failed else None
