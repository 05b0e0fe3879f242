"""Tells the events of a run as sentences: an event in, a line or nothing out. `Story` remembers what it has told."""

import re
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.journal import events as ev
from verl_slurm.journal.causes import meaning_of
from verl_slurm.journal.files import to_json

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


# A hostile event may have 8 MiB of such mentions. So a match takes the rest of the text, and a false one fails soon.
_RAW_FACTS = re.compile(r"(?:^|[;:,] ?)JobState=\S{1,64} .*", re.DOTALL)


def for_people(event: ev.Event) -> ev.Event:
    """Returns `event` without the words of scontrol."""
    # Those are evidence, and stay in the journal.
    if isinstance(event, ev.Cause):
        plain = _without_facts(event.evidence)
        if plain != event.evidence:
            words = [part for part in (meaning_of(event.cause).words, plain) if part]
            return msgspec.structs.replace(event, evidence="; ".join(words) or "Slurm says so")
    detail = getattr(event, "detail", "")
    if (plain := _without_facts(detail)) != detail:
        return msgspec.structs.replace(event, detail=plain or "Slurm says so")
    return event


def _without_facts(text: str) -> str:
    return _RAW_FACTS.sub("", text)


class Story:
    """Tells the events of one run in order, and no reason twice; `verbose`: with Slurm's answers, word for word."""

    def __init__(self, *, verbose: bool = False) -> None:
        self._told: set[str] = set()
        self._verbose = verbose

    def tell(self, event: ev.Event) -> str | None:
        """Tells the event as `tell` does; None: it repeats one."""
        if not self._verbose:
            event = for_people(event)
        match event:
            case ev.Submitted() | ev.Started():
                # A new start may refuse for the same reason, and that is news.
                self._told.clear()
            # Other ranks, and the end, repeat one rank's refusal to train.
            case ev.Refused(reason=reason):
                if reason in self._told:
                    return None
                self._told.add(reason)
            # The event stays and its reason goes: that the run ended has not been told yet.
            case ev.Ended(reason=reason) if reason in self._told:
                event = msgspec.structs.replace(event, reason="")
            case ev.Crash(detail=detail) if detail in self._told:
                event = msgspec.structs.replace(event, detail="")
        return tell(event)


def tell(event: ev.Event) -> str:
    """Formats `14:03:07  asked the ranks to save and stop`; unknown events are shown as they are."""
    return f"{_clock(event.time)}  {_words(event)}"


def progress(status: dict[str, Any]) -> str:
    """Formats the snapshot of `status.json` as one line."""
    # A guest's loop may not know its number of steps, or not have reported it yet.
    words = [f"step {status.get('step', 0)}" + (f"/{status['steps']}" if status.get("steps") else "")]
    phase = status.get("phase")
    if phase and phase != "step_end":
        count = f" {status.get('index', 0)}" if phase in _COUNTED else ""
        words.append(f"{_PHASES.get(phase, phase)}{count}")
    values = status["metrics"] if isinstance(status.get("metrics"), dict) else {}
    for name, form in _SHOWN:
        value = values.get(name)
        # A step whose responses were all replayed has sampled none, and no speed.
        if isinstance(value, int | float) and not (name == "tokens_per_second" and value <= 0):
            with suppress(OverflowError):  # a whole number that is no float, in a file of a stranger's
                words.append(form.format(value))
    return "  ".join(words)


def _clock(time: str) -> str:
    try:
        return datetime.fromisoformat(time).astimezone().strftime("%H:%M:%S")
    # A journal may be damaged, and a year may be one that no local time has.
    except (ValueError, OverflowError):
        return "--:--:--"


# Sentences without a choice. Behind `|`: a field that follows after a colon if it is not empty.
_SENTENCES: dict[type[ev.Event], str] = {
    # jobs and attempts
    ev.Submitted: "job {0.job_id} submitted ({0.cluster})",
    ev.Successor: "job {0.job_id} is queued to follow job {0.after}",
    ev.Started: "job {0.job_id} runs on {0.nodes}, attempt {0.attempt}",
    ev.AttemptFenced: "another attempt has taken over, this one leaves with {0.exit_code}|reason",
    ev.Held: "HELD after {0.stuck} starts|reason",
    ev.Avoid: "nodes|detail",
    ev.StartOverruled: "Slurm overruled the start at {0.wanted} by {0.eligible}: the next requeue asks for a later one",
    ev.Gone: "job {0.job_id} is {0.state} and its daemon said nothing more",
    # restarts of the ranks, and training
    ev.Resume: "resume: {0.reason}",
    ev.FirstRollout: "first new rollout, at step {0.step}",
    ev.Done: "nothing is left to do|reason",
    ev.Hang: "HANG: {0.detail}",
    ev.Stacks: "the stacks of {0.node}'s ranks are in {0.log}",
    ev.Refused: "the ranks REFUSED to train|reason",
    ev.Internal: "an ERROR inside the daemon|error",
    # why a job ends
    ev.Ignored: "not acted upon|reason",
    ev.CancelAsked: "cancel asked for",
    ev.RequeueAsked: "requeue asked for",
    ev.AlertSaveAsked: "an alert asked for a save",
    ev.RewardAsked: "another reward asked for: {0.reward}",
    # saves
    ev.SaveFailed: "the save FAILED on rank {0.rank}|reason",
    ev.Verified: "verified {0.name}|detail",
    ev.Corrupt: "CORRUPT {0.name}|detail",
    ev.Pruned: "{0.name} was {0.detail}",
    ev.OneCopy: "{0.name} has ONE copy only|reason",
    ev.SecondCopy: "second copy: {0.reason}",
    ev.Degraded: "leaves WITHOUT a verified save|reason",
    # services
    ev.ServiceStarted: "service {0.service} starts on {0.node}, as {0.address}",
    ev.ServiceReady: "service {0.service} on {0.node} is ready after {0.seconds} s",
    ev.ServiceEnded: "service {0.service} on {0.node} ENDED, restart {0.restarts} of {0.budget}|detail",
    # tiers
    ev.TierCopied: "{0.name} is in tier {0.tier}|reason",
    ev.TierRemoved: "{0.name} was taken from tier {0.tier}|reason",
    ev.TierFetched: "{0.name} was fetched back from tier {0.tier}",
    ev.TierUnreachable: "tier {0.tier} does not answer|reason",
    ev.Tiers: "the storage tiers|detail",
}


def _words(event: ev.Event) -> str:
    if sentence := _SENTENCES.get(type(event)):
        words, _, field = sentence.partition("|")
        return words.format(event) + (_colon(getattr(event, field)) if field else "")
    match event:
        case ev.StartFailed(detail=detail, before=before):
            again = f", after {before} that could not either" if before else ""
            return f"this attempt could not begin{again}{_colon(detail)}"
        case ev.Ended(reason=reason, exit_code=number):
            name = event.code.description if event.code == number else event.exit
            if number == ExitCode.REQUEUED and "held until" in reason:
                return f"ended with {number}: {reason}"  # it does not go on by itself
            return f"ended with {number}, {name}{_colon(reason)}"
        case ev.Orphaned(node_id=node_id, accepted=accepted, detail=detail):
            then = "the job is requeued" if accepted else "the job could NOT be requeued"
            return f"the daemon is dead; node {node_id} noticed, {then}{_colon(detail)}"
        case ev.Requeue(accepted=accepted, detail=detail):
            return f"requeue {'accepted' if accepted else 'REFUSED'}{_colon(detail)}"
        case ev.Restart(number=number, resume=resume, standby=standby):
            said = ", with ranks that stood by" if standby else ""
            return f"ranks start, restart {number}, from {resume or 'the beginning'}{said}"
        case ev.NodesChosen(train=train, spare=spare):
            return f"ranks get {', '.join(train)}; spare: {', '.join(spare) or 'none any more'}"
        case ev.Training(step=step, phase=phase, index=index):
            within = "" if phase == "step_end" else f", {phase} {index}"  # a guest's loop reports whole steps
            return f"training at step {step}{within}"
        case ev.Crash(node=node, detail=detail, replaced=True):
            return f"NODE {node} is left out: the job goes on without it{_colon(detail)}"
        case ev.Crash(kind=kind, crashes=crashes, budget=budget, detail=detail):
            return f"{kind.upper()} {crashes} of {budget}{_colon(detail)}"
        case ev.Stranger(reason="ranks", rank=rank, node=node, peer=peer):
            return f"rank {rank} on {node} met a stranger and ended itself: {peer}"
        case ev.Stranger(reason=reason, peer=peer, total=total):
            return f"a connection from {peer} was turned away ({total} so far){_colon(reason)}"
        case ev.Link(node=node, error=error):
            return f"the link to {node or 'an agent'} broke{_colon(error)}"
        case ev.Notice(topic=topic, text=text):
            said = text or "something, and the journal does not say what"
            loud = "WARNING, " if isinstance(event, ev.Warned) else ""
            return f"{loud}{topic}: {said}" if topic else f"{loud}{said}"
        case ev.Cause(cause=cause, seconds_left=left, evidence=evidence):
            deadline = f", {left} s left" if left is not None else ""
            return f"{cause.upper()}{deadline}: {evidence}"
        case ev.ForceResume(lost=lost) if lost:
            return f"begins again from step 0, as asked; it had a checkpoint: {lost}"
        case ev.ForceResume():
            counts = [f"{len(getattr(event, kind))} {kind}" for kind in ("added", "removed", "changed")]
            return f"goes on with changed data, as asked: {', '.join(counts)}"
        case ev.Adopted(checkpoints=names, source=source):
            return f"{', '.join(names) or 'checkpoints'} taken over from {source}"
        case ev.Resharded(name=name, before=before, after=after, seconds=seconds):
            took = "" if seconds is None else f" in {seconds} s"
            return f"{name} of {before} ranks divided among {after}{took}; every tensor is the same"
        case ev.Save(stop=stop):
            return f"asked the ranks to save and {'stop' if stop else 'go on'}"
        case ev.Saved(name=name, emergency=emergency, num_bytes=num_bytes, seconds=seconds, reason=reason):
            kind = "emergency checkpoint" if emergency else "checkpoint"
            took = "" if seconds is None else f" in {seconds} s"
            return f"{kind} {name}, {(num_bytes or 0) / 1e6:.1f} MB{took}{_colon(reason)}"
        case ev.Scrubbed(name=name, good=good, detail=detail):
            return f"scrub of {name}: {'good' if good else 'BAD'}{_colon(detail)}"
        case ev.ServiceFailed(service=service, node=node, detail=detail, needed=needed):
            then = "the run needs it" if needed else "the run goes on without it"
            return f"service {service} on {node} is NOT started again, {then}{_colon(detail)}"
        case ev.TierFailed(what=what, name=name, tier=tier, problem=problem):
            did = " ".join(word for word in (what or "work", name) if word)
            return f"{did} with tier {tier} FAILED{_colon(problem)}"
        # An event of another version has no sentence here, and is shown rather than dropped.
        case _:
            return _as_it_is(event)


def _colon(text: str) -> str:
    return f": {text}" if text else ""


def _as_it_is(event: ev.Event) -> str:
    hidden = {"event", "time", "attempt", "job_id"}
    facts = to_json(event)
    words = [f"{key}={value}" for key, value in facts.items() if key not in hidden and value is not None]
    return " ".join([str(facts["event"]), *words])
