"""A run's events as sentences: an event in, a line or nothing out. `Story` remembers what it has told."""

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from verl_slurm.exit_codes import ExitCode

__all__ = ["Story", "for_people", "outcome", "progress", "tell"]

Event = dict[str, Any]
_PHASES = {
    "generate": "sampling",
    "score": "scoring",
    "advantage": "advantages",
    "update": "updating",
    "evaluate": "evaluating",
}
_COUNTED = ("generate", "update")
_SHOWN = (
    *(("reward", "reward {:.3f}"), ("kl", "kl {:.2g}"), ("tokens_per_second", "{:.0f} tok/s")),
    *(
        ("critic/score/mean", "score {:.3f}"),
        ("loss", "loss {:.4g}"),
        ("train/loss", "loss {:.4g}"),
    ),  # guests'
)


_PLAIN = {
    "preemption": "Slurm takes the nodes for a more urgent job",
    "time_limit": "the job's time is nearly up",
    "cancel": "the job was cancelled",
    "requeued": "somebody requeued the job in Slurm",
    "operator": "an operator asked for a save",
    "operator_requeue": "an operator asked for a requeue",
}
# A hostile event has 8 MiB of mentions. So a match takes the rest of the text, and a mention that is none fails soon.
_RAW_FACTS = re.compile(r"(?:^|[;:,] ?)JobState=\S{1,64} .*", re.DOTALL)


def for_people(event: Event) -> Event:
    """`event` without the words of scontrol; those are evidence, and stay in the journal."""
    shown = dict(event)
    for key in ("evidence", "detail"):
        if isinstance(text := event.get(key), str) and (plain := _RAW_FACTS.sub("", text)) != text:
            reason = _PLAIN.get(str(event.get("cause")), "") if key == "evidence" else ""
            shown[key] = "; ".join(part for part in (reason, plain) if part) or "Slurm says so"
    return shown


class Story:
    """Tells the events of one run in their order, and no reason twice.

    Args:
        verbose: with what Slurm said, word for word.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self._told: set[str] = set()
        self._verbose = verbose

    def tell(self, event: Event) -> str | None:
        """As `tell`. What one rank said in refusing to train, the others and the end say again."""
        if not self._verbose:
            event = for_people(event)
        kind, reason = event.get("event"), str(event.get("reason") or event.get("detail") or "")
        if kind in ("submitted", "started"):
            self._told.clear()
        if kind == "refused":
            if reason in self._told:
                return None
            self._told.add(reason)
        elif kind in ("ended", "crash") and reason in self._told:
            event = {key: value for key, value in event.items() if key not in ("reason", "detail")}
        return tell(event)


def outcome(event: Event) -> str | None:
    """How a run came out: `done`, `cancelled` or `failed with 11`; None for an event that is not its end."""
    code = event.get("exit_code")
    if event.get("event") != "ended" or code == ExitCode.REQUEUED:
        return None
    names = {int(ExitCode.OK): "done", int(ExitCode.CANCELLED): "cancelled"}
    return names.get(code, f"failed with {code}") if isinstance(code, int) else "failed"


def tell(event: Event) -> str | None:
    """`14:03:07  preempted: saving` for an event worth telling; events that are not known are told as they are."""
    kind = str(event.get("event"))
    teller = _TELLERS.get(kind, _tell_plain)
    try:
        text = teller(event)
    except (TypeError, ValueError, OverflowError):  # the journal is a file: who knows who wrote in it
        text = _tell_plain(event)
    return None if text is None else f"{_clock(event.get('time'))}  {text}"


def progress(status: dict[str, Any]) -> str:
    """The snapshot of `status.json` as one line."""
    of = (
        f"/{status['steps']}" if status.get("steps") else ""
    )  # a guest's loop may not know, or not have said yet
    words = [f"step {status.get('step', 0)}{of}"]
    phase = status.get("phase")
    if phase and phase != "step_end":
        count = f" {status.get('index', 0)}" if phase in _COUNTED else ""
        words.append(f"{_PHASES.get(phase, phase)}{count}")
    metrics = status.get("metrics")
    values = metrics if isinstance(metrics, dict) else {}
    for name, form in _SHOWN:
        value = values.get(name)
        if isinstance(value, int | float):
            words.append(form.format(value))
    return "  ".join(words)


def _clock(time: object) -> str:
    try:
        return datetime.fromisoformat(str(time)).astimezone().strftime("%H:%M:%S")
    except (ValueError, OverflowError):
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
    phase = event.get("phase")  # a guest's loop tells whole steps only
    within = "" if phase == "step_end" else f", {phase} {event.get('index')}"
    return f"training at step {event.get('step')}{within}"


def _cause(event: Event) -> str:
    left = event.get("seconds_left")
    deadline = f", {left} s left" if left is not None else ""
    return f"{str(event.get('cause')).upper()}{deadline}: {event.get('evidence')}"


def _save(event: Event) -> str:
    return f"asked the ranks to save and {'stop' if event.get('stop') else 'go on'}"


def _saved(event: Event) -> str:
    kind = "emergency checkpoint" if event.get("emergency") else "checkpoint"
    size = float(event.get("num_bytes") or 0) / 1e6
    return f"{kind} {event.get('name')}, {size:.1f} MB in {event.get('seconds')} s{_because(event)}"


def _verified(event: Event) -> str:
    return f"verified {event.get('name')}{_because(event, 'detail')}"


def _corrupt(event: Event) -> str:
    return f"CORRUPT {event.get('name')}{_because(event, 'detail')}"


def _crash(event: Event) -> str:
    kind = str(event.get("kind", "crash")).upper()
    return f"{kind} {event.get('crashes')} of {event.get('budget')}{_because(event, 'detail')}"


def _because(event: Event, key: str = "reason") -> str:
    return f": {event[key]}" if event.get(key) else ""


def _refused(event: Event) -> str:
    return f"the ranks REFUSED to train{_because(event)}"


def _orphaned(event: Event) -> str:
    then = "the job is requeued" if event.get("accepted") else "the job could NOT be requeued"
    return f"the daemon is dead; node {event.get('node_id')} noticed, {then}{_because(event, 'detail')}"


def _held(event: Event) -> str:
    return f"HELD after {event.get('stuck')} starts without anything new{_because(event)}"


def _fenced(event: Event) -> str:
    return f"another start of this run has taken over, this one leaves with {event.get('exit_code')}{_because(event)}"


def _requeue(event: Event) -> str:
    return f"requeue {'accepted' if event.get('accepted') else 'REFUSED'}: {event.get('detail')}"


def _ended(event: Event) -> str:
    code = next((c for c in ExitCode if c == event.get("exit_code")), None)
    name = code.description if code is not None else event.get("exit")
    return f"ended with {event.get('exit_code')}, {name}{_because(event)}"


def _gone(event: Event) -> str:
    return f"job {event.get('job_id')} is {event.get('state')} and its daemon said nothing more"


def _notice(event: Event) -> str:
    if event.get("text") is None:  # as former versions wrote them
        return str(event.get("reason") or "something, and the journal does not say what")
    return f"{event.get('topic')}: {event.get('text')}" if event.get("topic") else str(event["text"])


def _start_failed(event: Event) -> str:
    again = f", after {event['before']} that could not either" if event.get("before") else ""
    return f"this start could not begin{again}{_because(event, 'detail')}"


def _stranger(event: Event) -> str:
    peer, total = event.get("peer"), event.get("total")
    if event.get("reason") == "ranks":
        return f"rank {event.get('rank')} on {event.get('node')} met a stranger and ended itself: {peer}"
    return f"a connection from {peer} was turned away ({total} so far){_because(event)}"


def _adopted(event: Event) -> str:
    names = event.get("checkpoints")
    listed = ", ".join(str(name) for name in names) if isinstance(names, list) else "checkpoints"
    return f"{listed} taken over from {event.get('source')}"


def _tier_failed(event: Event) -> str:
    what, name = event.get("what") or "work", event.get("name") or ""
    return f"{what} {name} with tier {event.get('tier')} FAILED{_because(event, 'problem')}".replace(
        "  ", " "
    )


def _drift(event: Event) -> str:
    counts = [f"{len(event.get(kind) or [])} {kind}" for kind in ("added", "removed", "changed")]
    return f"goes on with changed data, as asked: {', '.join(counts)}"


def _scrubbed(event: Event) -> str:
    found = "good" if event.get("good") is True else f"BAD: {event.get('detail')}"
    return f"scrub of {event.get('name')}: {found}"


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
    "pruned": lambda event: f"{event.get('name')} was {event.get('detail')}",
    "crash": _crash,
    "requeue": _requeue,
    "ended": _ended,
    "gone": _gone,
    "force_resume": _drift,
    "first_rollout": lambda event: f"first new rollout, at step {event.get('step')}",
    "refused": _refused,
    "one_copy": lambda event: f"{event.get('name')} has ONE copy only{_because(event)}",
    "notice": _notice,
    "warning": lambda event: f"WARNING, {_notice(event)}",
    "degraded": lambda event: f"leaves WITHOUT a verified save{_because(event)}",
    "orphaned": _orphaned,
    "held": _held,
    "hang": lambda event: f"HANG: {event.get('detail')}",
    "done": lambda event: f"nothing is left to do{_because(event)}",
    "start_failed": _start_failed,
    "stranger": _stranger,
    "save_failed": lambda event: f"the save FAILED on rank {event.get('rank')}{_because(event)}",
    "ignored": lambda event: f"not acted upon{_because(event)}",
    "internal": lambda event: f"an ERROR inside the daemon{_because(event, 'error')}",
    "link": lambda event: f"the link to {event.get('node') or 'an agent'} broke{_because(event, 'error')}",
    "stacks": lambda event: f"the stacks of {event.get('node')}'s ranks are in {event.get('log')}",
    "avoid": lambda event: f"nodes: {event.get('detail')}",
    "successor": lambda event: f"job {event.get('job_id')} is queued to follow job {event.get('after')}",
    "fenced": _fenced,
    "cancel_asked": lambda event: "cancel asked for",
    "requeue_asked": lambda event: "requeue asked for",
    "reward_asked": lambda event: f"another reward asked for: {event.get('reward')}",
    "alert_save_asked": lambda event: "an alert asked for a save",
    "resume": lambda event: f"resume: {event.get('reason')}",
    "scrubbed": _scrubbed,
    "adopted": _adopted,
    "tier_copied": lambda event: f"{event.get('name')} is in tier {event.get('tier')}{_because(event)}",
    "tier_removed": lambda event: (
        f"{event.get('name')} was taken from tier {event.get('tier')}{_because(event)}"
    ),
    "tier_fetched": lambda event: f"{event.get('name')} was fetched back from tier {event.get('tier')}",
    "tier_failed": _tier_failed,
    "tier_unreachable": lambda event: f"tier {event.get('tier')} does not answer{_because(event)}",
    "tiers": lambda event: f"the storage tiers{_because(event, 'detail')}",
    "second_copy": lambda event: f"second copy: {event.get('reason')}",
}
