"""Reads Alertmanager's webhook and decides what to do about it. Pure.

Of everything in an alert, three things are read: that it fires, that its rule says `action: emergency_checkpoint`,
and the run it is about (`run_id`). No text in it is taken as a command, a path or a job.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from verl_slurm.base.errors import UNREADABLE, WireError
from verl_slurm.base.run_id import RUN_ID

__all__ = ["ACTION", "Verdict", "decide_saves", "runs_to_save"]

ACTION = "emergency_checkpoint"
"""The value of the label `action` with which a rule asks for a save."""

Verdict = Literal["save", "unknown run", "asked already"]


class _Alert(msgspec.Struct):
    status: Annotated[str, msgspec.Meta(max_length=64)]
    labels: Annotated[dict[str, str], msgspec.Meta(max_length=128)]


class _Webhook(msgspec.Struct):
    """The fields that are read of https://prometheus.io/docs/alerting/latest/configuration/#webhook_config."""

    alerts: Annotated[list[_Alert], msgspec.Meta(max_length=1024)]


_DECODER = msgspec.json.Decoder(_Webhook)


def runs_to_save(body: bytes) -> list[str]:
    """Returns the ids of the runs that firing alerts ask a save for, each once, in their order.

    Raises:
        WireError: not what Alertmanager sends.
    """
    try:
        hook = _DECODER.decode(body)
    except UNREADABLE as error:
        raise WireError("not an alert", found=error) from error
    firing = [a.labels for a in hook.alerts if a.status == "firing" and a.labels.get("action") == ACTION]
    found = [labels.get("run_id", "") for labels in firing]
    return list(dict.fromkeys(run for run in found if RUN_ID.fullmatch(run)))


def decide_saves(
    asked: list[str], known: frozenset[str], last: Mapping[str, float], now: float, pause_s: float
) -> dict[str, Verdict]:
    """Decides what to do for each run.

    Args:
        asked: from `runs_to_save`.
        known: the runs that this receiver serves.
        last: when each was last asked for a save, by the clock of `now`.
        pause_s: no run is asked again sooner: an alert is repeated as long as it fires.
    """
    verdicts: dict[str, Verdict] = {}
    for run in asked:
        if run not in known:
            verdicts[run] = "unknown run"
        elif run in last and now - last[run] < pause_s:
            verdicts[run] = "asked already"
        else:
            verdicts[run] = "save"
    return verdicts
