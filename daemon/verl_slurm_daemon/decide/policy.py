"""Decides how a lead reacts: one pure function from (model, event) to (model, actions).

It uses no clock, no process, no Slurm and no file; their facts arrive in events. So a journal can be replayed
through it.

Three rules stand above the rest:

1. A cancel is final. It turns any intention to requeue into an intention to leave, in every state in which the
   requeue has not been asked for yet. `effects` also reads the job's state once more before it asks.
2. The requeue is asked for before the deadline whether or not the save is done. A run without a fresh checkpoint
   loses a little (the ledger keeps the rollouts); a job that Slurm has ended loses its place.
3. All ranks done is the end, whatever was asked for in between.
"""

from typing import assert_never

import msgspec

from verl_slurm.base.errors import NOT_SET_UP, RECORD_LOST, WAYS_IN, names_missing_file, names_storage_error
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.journal import events as ev
from verl_slurm.wire import messages as msg
from verl_slurm_daemon.decide import actions as act, inputs
from verl_slurm_daemon.decide.lead_model import (
    IN_PLACE_S,
    MOST_FAILED_STARTS,
    NEXT,
    SLURM_AWAY_S,
    Decision,
    FailureKind,
    Intent,
    Model,
    State,
    delay_after,
    suspects,
)

_EXIT_OF = {Intent.CANCELLED: ExitCode.CANCELLED, Intent.ALREADY_REQUEUED: ExitCode.REQUEUED}
_MOST_DOUBLINGS = 6
_STRANGER_DELAY_S = 5
"""Wait in place after a start that met a stranger: 5 s, then 10, 20, 40; after that the job gives its nodes back."""
_ABSENT = (ExitCode.KEY, ExitCode.DATA)
"""Refusals of ranks that a file which is absent may explain."""
_BEFORE_RANKS = (State.LAUNCHING, State.PAUSED)
_TRAINING = (State.LAUNCHING, State.RUNNING)


def decide(model: Model, event: inputs.Input) -> Decision:
    """Returns what follows from `event`. Raises AssertionError: a transition that `NEXT` lacks: our bug."""
    decision = _decide(model, event)
    after = decision.model.state
    assert after is model.state or after in NEXT[model.state], f"{model.state} -> {after} on {event}"
    return decision


def _decide(model: Model, event: inputs.Input) -> Decision:
    match event:
        case inputs.Ready(world_size, strangers, unfit, failed, trained):
            known = {"strangers": strangers, "unfit": unfit, "starts_failed": failed, "trained": trained}
            return _launch(msgspec.structs.replace(model, world_size=world_size, **known))
        case inputs.Shaped(world_size):
            return Decision(msgspec.structs.replace(model, world_size=world_size))
        case inputs.Over(exit_code, reason):
            return _exit(model, exit_code, reason)
        case inputs.AllDone(name, detail):
            return _on_all_done(model, name, detail)
        case inputs.StartHindered():
            return _on_start_failed(model, event)
        case inputs.NeedsPerson(starts, detail):
            return _hold(model, ExitCode.NO_PROGRESS, starts, detail)
        case inputs.SignalArrived():
            return _on_signal(model, event)
        case inputs.CauseKnown():
            return _on_cause(msgspec.structs.replace(model, asking=False), event)
        case inputs.LeaveNode():
            return _on_leave_node(model, event)
        case inputs.ServiceLost(detail, environment):
            # Without ranks there is nothing to save: as if they could not start. A save is not given up for it.
            if model.state is State.RUNNING:
                return _act_on_cause(model, inputs.CauseKnown("service", detail, None))
            kind: FailureKind = "environment" if environment else "crash"
            return _on_failure(model, detail, kind) if model.state is State.LAUNCHING else Decision(model)
        case inputs.RankSaid(message):
            return _on_rank(model, message)
        case inputs.NodeFailed(node, detail, lost, environment):
            # No node: srun ended the whole step, so nothing speaks against the node whose link broke first.
            told = f"node {node}: {detail}" if node else detail
            spared = model.without(node) if lost else model
            if spared != model:
                return _on_explained(spared, told, "node", node)
            kind = "environment" if environment else "node" if lost else "crash"
            return _on_failure(model, told, kind, node)
        case inputs.StrangerFound(node, detail):
            return _on_explained(model, detail, "stranger", node)
        case inputs.Hung():
            return _on_hung(model, event)
        case inputs.RunLost(owner):
            return _on_run_lost(model, owner)
        case inputs.StartTimedOut(restart, limit_s, all_ranks):
            # A rank that has sent a message is slow, not lost: the watch for hangs judges it.
            missing = model.world_size - model.started.bit_count()
            if model.started and not all_ranks:
                missing = 0
            if model.state is State.LAUNCHING and restart == model.restart and missing > 0:
                late = f"{missing} of {model.world_size} ranks sent no message for {limit_s:.0f} s after their start"
                return _on_failure(model, f"{late} (daemon.start_timeout_s)")
            return Decision(model)
        case inputs.RanksEnded(exit_code):
            return _on_ranks_ended(model, exit_code)
        case inputs.SaveReadBack():
            return _on_verified(model, event)
        case inputs.SaveDeadline():
            if model.state in (State.SAVING, State.CHECKING):
                why = f"the deadline is near and the save is not verified{late_ranks(model)}"
                return _give_up(model, why)
            return Decision(model)
        case inputs.BackoffOver():
            return _on_backoff_over(model, event)
        case inputs.RequeueAnswered():
            return _maybe_exit(msgspec.structs.replace(model, requeue=event))
        case _:
            assert_never(event)


def _launch(model: Model, *notes: act.Note) -> Decision:
    after = model.relaunched()
    return Decision(after, (*notes, act.StartRanks(after.restart, after.replaced)))


def _on_start_failed(model: Model, event: inputs.StartHindered) -> Decision:
    """Waits in place where ranks were to be started. The start of an attempt has waited so already."""
    if model.state is State.STARTING:
        return _try_later(model, event)
    model = msgspec.structs.replace(model, step_gone=True)
    if model.state is not State.LAUNCHING:
        return _maybe_exit(model)
    return _after_storage(model, msgspec.structs.replace(event, before=model.starts_failed))


def _after_storage(model: Model, event: inputs.StartHindered, *notes: act.Note) -> Decision:
    """Waits in place for some time, then without the nodes."""
    if model.intent is not None:  # Slurm wants the nodes, or the user the end
        return _leave(model, *notes)
    tries = 0 if model.fresh else model.tries
    # While Slurm is away it takes no requeue either, and no other job gets the nodes.
    if tries >= len(IN_PLACE_S) and event.exit_code is not ExitCode.NO_SLURM:
        return _try_later(model, event, *notes)
    pause_s = IN_PLACE_S[tries] if tries < len(IN_PLACE_S) else SLURM_AWAY_S
    note = act.Note(ev.Warned("start", f"{event.detail}: tries again in {pause_s:.0f} s"))
    after = msgspec.structs.replace(model, state=State.PAUSED, tries=tries + 1)
    return Decision(after, (*notes, note, act.Pause(pause_s)))


def _try_later(model: Model, event: inputs.StartHindered, *notes: act.Note) -> Decision:
    """Requeues: another node, or a later hour, may do."""
    note = act.Note(ev.StartFailed(event.detail, event.before))
    if event.before >= MOST_FAILED_STARTS:
        reason = f"{event.before + 1} attempts in a row could not begin: {event.detail}"
        return _hold(model, event.exit_code, event.before + 1, reason, *notes, note)
    # Each start in a row waits twice as long: storage that is away for a night costs minutes of the allocation.
    delay_s = delay_after(event.before)
    intent = model.intent or Intent.REQUEUE
    cause = model.cause or "start"
    return _leave(msgspec.structs.replace(model, intent=intent, cause=cause, delay_s=delay_s), *notes, note)


def _hold(model: Model, code: ExitCode, starts: int, reason: str, *notes: act.Note) -> Decision:
    """Has the job held, after so many starts that the environment stopped: it keeps what it has until a person acts."""
    if model.intent in (Intent.CANCELLED, Intent.ALREADY_REQUEUED):
        return _leave(model, *notes)
    after = msgspec.structs.replace(
        model, intent=Intent.REQUEUE, cause=model.cause or "start", hold=(code, reason)
    )
    return _leave(after, *notes, act.Note(ev.Held(starts, reason)))


def _on_leave_node(model: Model, event: inputs.LeaveNode) -> Decision:
    """Leaves a node without a look at the budgets: nothing of ours has failed."""
    spared = model.without(event.node)
    if event.cause == "bad_node" and model.state is State.LAUNCHING and spared != model:
        return _on_explained(spared, f"node {event.node}: {event.evidence}", "node", event.node)
    model = msgspec.structs.replace(model, left=(*model.left, event.node))
    if event.cause == "bad_node" and model.state in _BEFORE_RANKS and model.intent is None:
        # The first time other nodes are likely. Where Slurm has none, each start would meet the same node again.
        model = msgspec.structs.replace(model, delay_s=delay_after(model.unfit))
        if model.unfit >= MOST_FAILED_STARTS:
            reason = f"{model.unfit + 1} attempts in a row met bad nodes: {event.node}: {event.evidence}"
            return _hold(model, ExitCode.NO_PROGRESS, model.unfit + 1, reason)
    evidence = f"node {event.node}: {event.evidence}"
    return _act_on_cause(model, inputs.CauseKnown(event.cause, evidence, event.seconds_left))


def _on_all_done(model: Model, name: str, detail: str) -> Decision:
    """Ends a start that needs no ranks. A cancel, or a requeue that Slurm accepted, that came in between is kept."""
    note = act.Note(ev.Done(name, detail))
    model = msgspec.structs.replace(model, step_gone=True)  # no step began, so no `RanksEnded` comes
    after = _exit(model, ExitCode.OK, detail) if model.state is State.LAUNCHING else _maybe_exit(model)
    return Decision(after.model, (note, *after.actions))


def _on_run_lost(model: Model, owner: str) -> Decision:
    """Takes the ranks down as if one had been refused: their work no longer counts. Asks for no save and no requeue."""
    # The event repeats. If the ranks are still there then (srun may wait for a lost node), the lead leaves anyway.
    lost = model.refusal is not None and model.refusal.exit_code == ExitCode.FENCED
    reason = f"a newer attempt owns the run: {owner}"
    if model.state is State.ENDED:
        return Decision(model)
    if lost or model.state in (State.STARTING, State.PAUSED, State.LEAVING):
        return _exit(model, ExitCode.FENCED, reason)
    # Without a save and a requeue: this attempt can commit nothing, and the job that owns the run looks after itself.
    refusal = msg.RankRefused(rank=-1, exit_code=int(ExitCode.FENCED), reason=reason)
    after = msgspec.structs.replace(model, failure=reason, refusal=refusal)
    return Decision(after, (act.Note(ev.Refused(reason)), act.TakeDown()))


def _on_signal(model: Model, event: inputs.SignalArrived) -> Decision:
    where = event.where
    # Slurm signals every step of a job at once; one question answers them all. Once the ranks were asked to stop, new
    # facts come with the lead's own signals: a cancel in the middle of the save, or of the requeue.
    stale = model.state not in (*_TRAINING, State.PAUSED) and where != "lead"
    if model.state is State.ENDED or stale:
        return Decision(model)
    trigger = f"{event.signal} to {where}"
    # A signal to a step adds nothing to the question under way. One to the lead may be a cancel.
    if model.asking:
        is_new = where == "lead" and not event.again
        return Decision(msgspec.structs.replace(model, ask_again=trigger) if is_new else model)
    after = msgspec.structs.replace(model, asking=True, repeated=event.again)
    return Decision(after, (act.AskCause(trigger),))


def _on_cause(model: Model, event: inputs.CauseKnown) -> Decision:
    again = model.ask_again
    after = msgspec.structs.replace(model, asking=bool(again), ask_again="", repeated=False)
    # The save of this signal was asked for when Slurm did not answer the first time.
    if model.repeated and event.kind in ("unknown", "operator"):
        decision = Decision(after)
    else:
        decision = _act_on_cause(after, event)
    return Decision(decision.model, (*decision.actions, act.AskCause(again))) if again else decision


def _act_on_cause(model: Model, event: inputs.CauseKnown) -> Decision:
    leaving = model.state is State.LEAVING and event.kind != "cancel"
    if leaving or (event.kind == "growth" and model.state is not State.RUNNING):
        # Leaving already: the requeue's own TERM, or a preemption of a job that ends anyway.
        return Decision(model)
    if event.kind in ("operator_requeue", "growth") and model.state is State.RUNNING:
        return _wish(model, event) if model.wish is None else Decision(model)
    return _act_on(model, event)


def _wish(model: Model, event: inputs.CauseKnown) -> Decision:
    """Has the ranks save and train on: what they have done since the last checkpoint is not given up for a wish."""
    request_id = model.request_id + 1
    after = msgspec.structs.replace(
        model, request_id=request_id, wish=event, wish_save=request_id, wish_name=""
    )
    note = act.Note(ev.Notice("requeue", f"asked for, and waits for a checkpoint: {event.evidence}"))
    return Decision(after, (note, act.SaveRequest(request_id=request_id, stop=False)))


def _wish_fails(model: Model, reason: str, *notes: act.Note) -> Decision:
    if model.wish is not None and RECORD_LOST in reason:
        text = f"goes on without a save, since none can succeed in this attempt: {reason}"
        after = msgspec.structs.replace(model, intent=Intent.REQUEUE, cause=model.wish.kind, wish=None)
        return _leave(after, *notes, act.Note(ev.Warned("requeue", text)))
    text = (
        f"not requeued: the save before it failed, and nothing presses, so the ranks train on: {reason}. Once saves "
        "succeed, verl-slurm requeue asks again; with --now it gives up what is not saved"
    )
    after = msgspec.structs.replace(model, wish=None, wish_save=0)
    return Decision(after, (*notes, act.Note(ev.Warned("requeue", text))))


def _act_on(model: Model, event: inputs.CauseKnown) -> Decision:
    left = None if event.seconds_left is None else round(event.seconds_left, 1)
    note = act.Note(ev.Cause(event.kind, event.evidence, left))
    match event.kind:
        case "unknown" | "operator":  # Slurm may be away: a save can only help, whatever the cause
            return _operator_save(model, note)
        # The ranks stand still with the job, so they could not save.
        case "suspended":
            return Decision(model, (note,))
        case "preemption" | "time_limit" | "failed" | "reclaimed" | "bad_node" | "service":
            intent = model.intent or Intent.REQUEUE  # a cancel that came before stays a cancel
        case "operator_requeue" | "growth":
            intent = model.intent or Intent.REQUEUE
        # This replaces an intent to requeue (rule 1). It is saved all the same: the user may submit the run again.
        case "cancel":
            intent = Intent.CANCELLED
        case "requeued" | "node_lost":
            intent = Intent.ALREADY_REQUEUED
        case "none":
            return Decision(model)
        case _:
            assert_never(event.kind)
    known = event.kind == model.cause and model.state in (State.SAVING, State.CHECKING)
    notes = () if known else (note,)  # Slurm sends CONT and USR1: one note is enough
    model = msgspec.structs.replace(model, intent=intent, cause=event.kind)
    if model.state in _BEFORE_RANKS or (
        # Ranks are missing: a save, which needs all of them, cannot complete.
        model.state is State.RUNNING and event.kind in ("node_lost", "failed")
    ):
        return _leave(model, note)  # no rank is there to save
    if model.state is State.RUNNING:
        request_id = model.request_id + 1
        bounded = event.seconds_left is not None
        model = msgspec.structs.replace(
            model, state=State.SAVING, request_id=request_id, came=0, wrote=0, has_deadline=bounded
        )
        request = act.SaveRequest(request_id=request_id, stop=True, seconds_left=event.seconds_left)
        return Decision(model, (note, request))
    if model.state in (State.SAVING, State.CHECKING) and event.seconds_left is not None:
        # The deadline may be nearer now.
        model = msgspec.structs.replace(model, has_deadline=True)
        return Decision(model, (*notes, act.ArmDeadline(event.seconds_left)))
    # LEAVING, and a cancel: the step may be gone already.
    exit_now = _maybe_exit(model)
    return Decision(exit_now.model, (*notes, *exit_now.actions))


def _operator_save(model: Model, note: act.Note) -> Decision:
    if model.state is not State.RUNNING:
        return Decision(model, (note, act.Note(ev.Ignored(f"no save while {model.state}"))))
    request_id = model.request_id + 1
    after = msgspec.structs.replace(model, request_id=request_id)
    return Decision(after, (note, act.SaveRequest(request_id=request_id, stop=False)))


def _on_rank(model: Model, message: msg.FromRank) -> Decision:
    match message:
        # Models may load for minutes after this, before the first safe point makes the state RUNNING.
        case msg.RankStarted():
            started = model.started | model.bit(message.rank)
            spoke = model.spoke or message.by_program
            return Decision(msgspec.structs.replace(model, started=started, spoke=spoke))
        case msg.Stopped() | msg.RankUnfit():  # the second comes as `LeaveNode`, with its node
            return Decision(model)
        case msg.SaveStarted() | msg.PartSaved():
            return Decision(model.further(message))
        case msg.Progress():
            return _on_progress(model, message)
        # Kept until shared storage answers: if the deadline or a crash comes first, this copy is what is left.
        case msg.SavedOnNodes():
            if model.state is not State.SAVING or message.request_id != model.request_id:
                return Decision(model)
            return Decision(msgspec.structs.replace(model, on_nodes=message), (kept_note(message),))
        case msg.RankSaved():
            # A rank's number is not trusted: a later request would find its answer here already.
            if message.request_id > model.request_id:  # no such request was made
                return Decision(model, (act.Note(ev.Ignored(f"an answer to {message.request_id}")),))
            notes = saved_notes(message)
            # A later request replaces the wish's on the ranks' page, and answers it.
            if model.wish is not None and message.request_id >= model.wish_save:
                if not message.on_shared and model.state is State.RUNNING:
                    return _wish_fails(model, f"the nodes' disks alone took it: {message.problem}", *notes)
                model = msgspec.structs.replace(model, wish_name=message.name)
            if not message.on_shared:
                # The ranks have read it back on their nodes; the lead cannot read it from here.
                if model.state is State.SAVING and message.request_id == model.request_id:
                    return _leave(model, *notes)
                return Decision(model, notes)
            # Periodic saves are read back, too: each good one renews the budgets.
            actions: tuple[act.Action, ...] = (*notes, act.Verify(message.name))
            if model.state is State.CHECKING and model.unverified and message.request_id != model.request_id:
                return Decision(model, actions)  # late; the awaited answer has come already
            model = msgspec.structs.replace(model, unverified=message.name, lost="")
            if model.state is State.SAVING and message.request_id == model.request_id:
                return Decision(msgspec.structs.replace(model, state=State.CHECKING), actions)
            return Decision(model, actions)
        case msg.RankSaveFailed():
            note = act.Note(ev.SaveFailed(message.reason, message.rank))
            if model.state is State.SAVING and message.request_id == model.request_id:
                return _leave(model, note)
            if model.wish is not None and message.request_id >= model.wish_save:
                return _wish_fails(model, message.reason, note)
            return Decision(model, (note,))
        case msg.RankNotice():
            form = ev.Warned if message.loud else ev.Notice
            return Decision(model, (act.Note(form(message.topic, message.text)),))
        case msg.RankRefused():
            return _on_refused(model, message)
        case msg.Finished():
            return Decision(msgspec.structs.replace(model, finished=model.finished | model.bit(message.rank)))
        case _:
            assert_never(message)


def _on_refused(model: Model, message: msg.RankRefused) -> Decision:
    """Ends the run if another start would not change the refusal."""
    note = act.Note(ev.Refused(message.reason, message.rank))
    if model.state not in _TRAINING:
        return Decision(model, (note,))
    # It was there before: a file system that is not mounted, and not a wrong path.
    absent = message.exit_code in _ABSENT and names_missing_file(message.reason)
    # And neither is a mode that somebody has changed since a wrong one. What user code never found was not.
    worked = message.worked or model.step > 0
    before = model.trained and (worked or not message.place)
    if before and (absent or message.exit_code == ExitCode.PERMISSION):
        return _on_failure(model, message.reason, "environment")
    if message.place and model.failure:
        return Decision(model)  # other ranks raise as well
    # User code that had worked is started once more: a service that it uses may answer again. The same exception at
    # the same place, with nothing new in between, is final.
    if message.place and worked and (message.place != model.raised or model.fresh):
        after = msgspec.structs.replace(model, failure=message.reason, raised=message.place)
        return Decision(after, (act.TakeDown(),))
    model = msgspec.structs.replace(model, failure=message.reason, refusal=message)
    return Decision(model, (note, act.TakeDown()))


def _on_progress(model: Model, message: msg.Progress) -> Decision:
    where = (message.step, message.phase, message.index)
    notes = []
    model = msgspec.structs.replace(model, step=message.step)
    if model.state is State.LAUNCHING:
        model = msgspec.structs.replace(model, state=State.RUNNING, trained=True)
        notes.append(act.Note(ev.Training(*where)))
    if message.new_rollouts > 0 and not model.fresh:
        model = msgspec.structs.replace(model, fresh=True)
        notes.append(act.Note(ev.FirstRollout(*where)))
    return Decision(model, tuple(notes))


def _on_failure(model: Model, detail: str, kind: FailureKind = "crash", node: str = "") -> Decision:
    """Reacts to a node that is dead or silent. The others are taken down too: no rank can go on alone."""
    away = names_storage_error(detail) or (model.trained and NOT_SET_UP in detail)
    if kind == "crash" and away:
        kind = "environment"
    # The first failure is kept: the peers of a dead rank fail in their collectives because of it.
    if model.state not in (*_TRAINING, State.SAVING) or model.failure or model.all_finished:
        # The word of another node's rank that failed because of it may have come first.
        if kind == "environment" and model.failure and model.failure_kind == "crash":
            model = msgspec.structs.replace(model, failure=detail, failure_kind=kind)
        return Decision(model)
    after = msgspec.structs.replace(model, failure=detail, failure_kind=kind, failure_node=node)
    if kind == "hang":
        return Decision(after, (act.Note(ev.Hang(detail, node)), act.TakeDown(stacks=True)))
    return Decision(after, (act.TakeDown(),))


def _on_hung(model: Model, event: inputs.Hung) -> Decision:
    # This save has no `SaveDeadline`: a rank that hangs in it would hold the job to its time limit.
    if event.restart == model.restart and model.saves_unbounded:
        return _give_up(model, event.detail)
    if event.restart != model.restart or model.state not in _TRAINING:
        return Decision(model)  # any other save before the end has its own deadline
    if model.all_finished:  # their work is done and counts; their processes do not end
        warning = act.Note(ev.Warned("hang", event.detail))
        return Decision(model, (warning, act.TakeDown(True)))
    return _on_failure(model, event.detail, "hang", event.node)


def _on_explained(model: Model, detail: str, kind: FailureKind, node: str) -> Decision:
    """Reacts to what explains all ranks' failures: a stranger among them, a node that is lost."""
    refused = model.refusal is not None and not model.refusal.place
    if model.state not in (*_TRAINING, State.SAVING) or refused or model.all_finished:
        return Decision(model)
    # The ranks' own reports, which may have come first, follow from it: they are overwritten.
    after = msgspec.structs.replace(model, failure=detail, failure_kind=kind, failure_node=node, refusal=None)
    return Decision(after, () if model.failure else (act.TakeDown(),))


def _on_ranks_ended(model: Model, exit_code: int) -> Decision:
    model = msgspec.structs.replace(model, step_gone=True)
    if model.refusal is not None and model.refusal.exit_code == ExitCode.FENCED:
        return _exit(model, ExitCode.FENCED, model.refusal.reason)
    if model.all_finished and model.state in (*_TRAINING, State.SAVING, State.CHECKING):
        if model.unverified:  # the run is done once the last checkpoint has been read back
            return Decision(msgspec.structs.replace(model, state=State.CHECKING))
        return _on_end(model)
    match model.state:
        case State.LAUNCHING if exit_code == 0 and _knows_no_daemon(model):
            exit_now = _exit(model, ExitCode.DATA, _WITHOUT_A_WORD)
            return Decision(exit_now.model, (act.Note(ev.Refused(_WITHOUT_A_WORD)), *exit_now.actions))
        case State.LAUNCHING | State.RUNNING:
            return _on_crash(model, model.failure or f"the step ended with {exit_code}")
        case State.SAVING:
            return _give_up(model, model.failure or "the ranks left before the save")
        case State.CHECKING:
            return Decision(model)
        case _:
            return _maybe_exit(model)


_WITHOUT_A_WORD = (
    f"the program ended with exit code 0 and never called {WAYS_IN}: nothing of it was saved here. What it wrote "
    "itself is kept (by a relative name, below RUN/code). Add the lines, and submit the run again with --code new"
)


def _knows_no_daemon(model: Model) -> bool:
    """Returns whether a program that ended with 0 would end so again, without a step that counts."""
    # A run that has trained has a program that speaks. A node that is lost, or Slurm's signal, may have ended it.
    may_differ = model.spoke or model.trained or model.failure or model.asking
    return model.started > 0 and not may_differ


def _on_crash(model: Model, detail: str) -> Decision:
    if model.refusal is not None:  # trying again would change nothing
        code = next((c for c in ExitCode if c == model.refusal.exit_code), ExitCode.INTERNAL)
        return _exit(model, code, model.refusal.reason)
    if model.intent is None and model.wish is not None:
        model = msgspec.structs.replace(model, intent=Intent.REQUEUE, cause=model.wish.kind)
    if model.intent is not None:  # Slurm wants the nodes, or the user the end: not in this job
        return _leave(model)
    kind, node = model.failure_kind, model.failure_node
    failed = (*model.failed, (kind, node))
    of_kind, budget = sum(1 for k, _ in failed if k == kind), model.limits.budget(kind)
    replaced = kind == "node" and node in model.replaced
    note = act.Note(ev.Crash(detail, kind, node or None, of_kind, budget, replaced))
    model = msgspec.structs.replace(model, crashes=len(failed), failed=failed)
    # Nothing of the program's failed, and what failed is not used again.
    if replaced and of_kind <= budget:
        return Decision(msgspec.structs.replace(model, state=State.PAUSED), (note, act.Pause(0.0)))
    if kind == "stranger":
        return _after_stranger(model, of_kind, note)
    if kind == "environment":
        return _after_storage(model, inputs.StartHindered(detail, model.starts_failed), note)
    # None after a restart that sampled something new; else it grows from one to the next.
    fruitless = 0 if model.fresh else model.fruitless + 1
    model = msgspec.structs.replace(model, fruitless=fruitless)
    if of_kind > budget:
        return _leave(msgspec.structs.replace(model, intent=Intent.REQUEUE, cause=kind), note)
    pause = act.Pause(model.limits.backoff_s * 2 ** min(fruitless - 1, _MOST_DOUBLINGS) if fruitless else 0.0)
    return Decision(msgspec.structs.replace(model, state=State.PAUSED), (note, pause))


def _after_stranger(model: Model, of_kind: int, note: act.Note) -> Decision:
    """Waits longer each time: some minutes in place, then without the nodes, up to an hour at a time."""
    starts = 1 if model.fresh else model.strangers + 1
    model = msgspec.structs.replace(model, strangers=starts)
    budget = model.limits.stranger_budget
    if of_kind <= budget:
        pause = act.Pause(float(_STRANGER_DELAY_S << (of_kind - 1)))
        return Decision(msgspec.structs.replace(model, state=State.PAUSED), (note, pause))
    jobs = max(starts // (budget + 1), 1)
    # After most of a day a person has to look: else it would queue for weeks and train on no day of them.
    if jobs > MOST_FAILED_STARTS:
        reason = f"{starts} restarts in a row met strangers: {model.failure}"
        return _hold(model, ExitCode.NO_PROGRESS, starts, reason, note)
    after = msgspec.structs.replace(model, intent=Intent.REQUEUE, cause="stranger", delay_s=delay_after(jobs))
    return _leave(after, note)


def _on_backoff_over(model: Model, event: inputs.BackoffOver) -> Decision:
    if model.state is not State.PAUSED:
        return Decision(model)
    if event.stuck >= model.limits.no_progress_limit:
        return _exit(model, ExitCode.NO_PROGRESS, event.reason)
    return _launch(model)


def _on_verified(model: Model, event: inputs.SaveReadBack) -> Decision:
    found = ev.Verified if event.good else ev.Pruned if event.pruned else ev.Corrupt
    note = act.Note(found(event.name, event.detail))
    if event.unreadable:
        note = act.Note(ev.Warned("storage", f"{event.name} cannot be read back: {event.detail}"))
    # A checkpoint that verifies is progress: budgets start again, and no node is suspected any more.
    if event.good:
        model = msgspec.structs.replace(model, crashes=0, failed=(), strangers=0, starts_failed=0, tries=0)
    if model.wish is not None and event.name == model.wish_name and model.state is State.RUNNING:
        if event.pruned:  # a newer one is there, or comes
            return Decision(msgspec.structs.replace(model, wish_save=0), (note,))
        if not event.good:
            return _wish_fails(model, event.detail or event.name, note)
        asked = _act_on(msgspec.structs.replace(model, wish=None, unverified=""), model.wish)
        return Decision(asked.model, (note, *asked.actions))
    if event.name != model.unverified:
        return Decision(model, (note,))
    lost = "" if event.good else "pruned" if event.pruned else "corrupt"
    if event.unreadable:
        lost = "not readable"
        model = msgspec.structs.replace(model, failure_kind="environment")
    model = msgspec.structs.replace(model, unverified="", lost=lost)
    if model.state is State.CHECKING and not model.all_finished:
        return _leave(model, note)
    # If all are done, their end is the next event.
    after = _on_end(model) if model.state is State.CHECKING and model.step_gone else Decision(model)
    return Decision(after.model, (note, *after.actions))


def _on_end(model: Model) -> Decision:
    done = _exit(model, ExitCode.OK, "all steps are done")
    return _on_crash(model, f"the last save is {model.lost}") if model.lost else done


def _leave(model: Model, *notes: act.Note) -> Decision:
    """Takes the step down. If the intent is to requeue, asks for it at the same time."""
    actions: list[act.Action] = list(notes)
    if model.intent is Intent.REQUEUE:
        # Asked for before the ranks are gone: taking them down may use up the time that Slurm leaves.
        avoid = (*suspects(model.failed), *model.left)
        actions.append(act.AskRequeue(avoid, model.delay_s, hold=model.hold is not None))
    if not model.step_gone:
        actions.append(act.TakeDown())
    after = msgspec.structs.replace(model, state=State.LEAVING)
    exit_now = _maybe_exit(after)
    return Decision(exit_now.model, (*actions, *exit_now.actions))


def _give_up(model: Model, reason: str) -> Decision:
    kept = model.on_nodes
    ours = kept if kept is not None and kept.request_id == model.request_id else None
    return _leave(model, *given_up(ours, model.state, reason))


def _maybe_exit(model: Model) -> Decision:
    if model.state is not State.LEAVING or not model.step_gone:
        return Decision(model)
    if model.intent in _EXIT_OF:
        return _exit(model, _EXIT_OF[model.intent], f"{model.cause}: {model.intent}")
    if model.requeue is None:  # Slurm has not answered yet: `RequeueAnswered` comes back here
        return Decision(model)
    if model.hold is not None and model.requeue.exit_code is ExitCode.REQUEUE_FAILED:
        code, reason = model.hold
        return _exit(model, code, f"{reason} ({model.requeue.detail})")
    return _exit(model, model.requeue.exit_code, model.requeue.detail)


def _exit(model: Model, code: ExitCode, reason: str) -> Decision:
    return Decision(msgspec.structs.replace(model, state=State.ENDED), (act.Exit(code, reason),))


_MOST_NAMED = 8


def saved_notes(message: msg.RankSaved) -> tuple[act.Note, ...]:
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


def kept_note(message: msg.SavedOnNodes) -> act.Note:
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


def given_up(kept: msg.SavedOnNodes | None, state: State, reason: str) -> tuple[act.Note, ...]:
    """Returns the notes for a save before the end that is given up. `kept`: what the nodes' disks have of it."""
    if kept is None:
        return (act.Note(ev.Degraded(reason)),)
    # Shared storage has it as well, but it was not read back there.
    if state is State.CHECKING:
        return (act.Note(ev.OneCopy(kept.name, f"read back on the nodes' disks; {reason}")),)
    return saved_notes(
        msg.RankSaved(
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
