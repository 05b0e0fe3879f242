"""A run's events as sentences. Pure: an event in, a line or nothing out."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

from verl_slurm.exit_codes import ExitCode

__all__ = ["progress", "tell"]

Event = dict[str, Any]
_SHOWN = ("reward", "kl", "policy_loss", "value_loss", "tokens_per_second")


def tell(event: Event) -> str | None:
    """`14:03:07  preempted: saving` for an event worth telling; events that are not known are told as they are."""
    kind = str(event.get("event"))
    teller = _TELLERS.get(kind, _tell_plain)
    text = teller(event)
    return None if text is None else f"{_clock(event.get('time'))}  {text}"


def progress(status: dict[str, Any]) -> str:
    """The snapshot of `status.json` as one line."""
    words = [f"step {status.get('step', 0)}/{status.get('steps', 0)}"]
    if status.get("phase"):
        words.append(f"{status['phase']} {status.get('index', 0)}")
    metrics = status.get("metrics")
    values = metrics if isinstance(metrics, dict) else {}
    for name in _SHOWN:
        value = values.get(name)
        if isinstance(value, int | float):
            words.append(f"{name.replace('_', ' ')} {value:.4g}")
    return "  ".join(words)


def _clock(time: object) -> str:
    try:
        return datetime.fromisoformat(str(time)).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return "--:--:--"


def _tell_plain(event: Event) -> str:
    hidden = {"event", "time", "epoch", "job_id"}
    words = [f"{key}={value}" for key, value in event.items() if key not in hidden and value is not None]
    return " ".join([str(event.get("event")), *words])


def _submitted(event: Event) -> str:
    return f"job {event.get('job_id')} submitted ({event.get('cluster')})"


def _started(event: Event) -> str:
    again = f", start {event.get('restart', 0) + 1}" if event.get("restart") else ""
    return f"job {event.get('job_id')} runs on {event.get('nodes')}, epoch {event.get('epoch')}{again}"


def _generation(event: Event) -> str:
    resume = event.get("resume")
    return f"ranks start, generation {event.get('number')}, from {resume or 'the beginning'}"


def _training(event: Event) -> str:
    return f"training at step {event.get('step')}, {event.get('phase')} {event.get('index')}"


def _cause(event: Event) -> str:
    left = event.get("seconds_left")
    deadline = f", {left} s left" if left is not None else ""
    return f"{str(event.get('cause')).upper()}{deadline}: {event.get('evidence')}"


def _save(event: Event) -> str:
    return f"asked the ranks to save and {'stop' if event.get('stop') else 'go on'}"


def _saved(event: Event) -> str:
    kind = "emergency checkpoint" if event.get("emergency") else "checkpoint"
    size = float(event.get("num_bytes") or 0) / 1e6
    return f"{kind} {event.get('name')}, {size:.1f} MB in {event.get('seconds')} s"


def _verified(event: Event) -> str:
    return f"verified {event.get('name')}: {event.get('detail')}"


def _corrupt(event: Event) -> str:
    return f"CORRUPT {event.get('name')}: {event.get('detail')}"


def _crash(event: Event) -> str:
    return f"CRASH {event.get('crashes')} of {event.get('budget')}: {event.get('detail')}"


def _requeue(event: Event) -> str:
    return f"requeue {'accepted' if event.get('accepted') else 'REFUSED'}: {event.get('detail')}"


def _ended(event: Event) -> str:
    code = next((c for c in ExitCode if c == event.get("exit_code")), None)
    name = code.description if code is not None else event.get("exit")
    return f"ended with {event.get('exit_code')}, {name}: {event.get('reason')}"


def _gone(event: Event) -> str:
    return f"job {event.get('job_id')} is {event.get('state')} and its daemon said nothing more"


def _drift(event: Event) -> str:
    counts = [f"{len(event.get(kind) or [])} {kind}" for kind in ("added", "removed", "changed")]
    return f"goes on with changed data, as asked: {', '.join(counts)}"


_TELLERS: dict[str, Callable[[Event], str | None]] = {
    "submitted": _submitted,
    "started": _started,
    "generation": _generation,
    "training": _training,
    "cause": _cause,
    "save": _save,
    "saved": _saved,
    "verified": _verified,
    "corrupt": _corrupt,
    "crash": _crash,
    "requeue": _requeue,
    "ended": _ended,
    "gone": _gone,
    "force_resume": _drift,
    "first_rollout": lambda event: f"first new rollout, at step {event.get('step')}",
    "cancel_asked": lambda event: "cancel asked for",
    "requeue_asked": lambda event: "requeue asked for",
    "resume": lambda event: f"resume: {event.get('reason')}",
}
