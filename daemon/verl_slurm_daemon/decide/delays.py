"""How long the next start waits after starts that came to nothing before any training."""

__all__ = ["MOST_FAILED_STARTS", "delay_after"]

MOST_FAILED_STARTS = 24
_FIRST_DELAY_S, _LONGEST_DELAY_S = 30, 3600


def delay_after(failed: int) -> int | None:
    """Returns the seconds that the next start waits: 30, 60, ... up to an hour. The last of `MOST_FAILED_STARTS` begins
    18 hours after the first.

    Args:
        failed: how many in a row failed before the present one. 0: the next one waits as the user configured it (None).
    """
    return min(_FIRST_DELAY_S << (failed - 1), _LONGEST_DELAY_S) if failed else None
