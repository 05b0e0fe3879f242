"""Tells whether a run has lost what it cannot make again: its id, or the checkpoints that it had. A run without a
checkpoint to resume from that once had one must not begin again in silence. Nor may one go back to an older one, or
sample again what its ledger had.

Files are lost one by one: a purge takes checkpoints, a full disk the journal, a user the logs. So each trace that a
checkpoint leaves is enough. A run that was killed before its first save has none of them, and its journal is whole.
Where no trace is left and the journal has a gap, nothing can tell, and that counts as lost.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress

from verl_slurm.base.bounded import RECORD, SMALL, TooMuch, decode_json, read_regular
from verl_slurm.base.errors import UNREADABLE, CheckpointsAbsent, CheckpointsLost, TierError, VerlSlurmError
from verl_slurm.base.fence import read_owner
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.base.run_id import is_adopted, run_id
from verl_slurm.base.tree import names_in
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.store.catalog import list_checkpoints, newest_listed
from verl_slurm.checkpoint.store.run_config import trained_with
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import read_events, read_last_events
from verl_slurm.journal.history import History
from verl_slurm.journal.status import read_status
from verl_slurm.journal.steps import every_row
from verl_slurm.runtime_state.samples import run_of_samples
from verl_slurm.runtime_state.segment import HEAD_BYTES, Frame, Gap
from verl_slurm.runtime_state.segment_files import segments, walk

_RANK_LOG = re.compile(r"attempt_(\d{6,9})\.restart_", re.ASCII)
_BEARS = re.compile(r"attempt_(\d{6,9})(?!\d)", re.ASCII)
_NO_ATTEMPT = 999_999_999
# Of the journal: some hundred events, and an attempt writes a few dozen.
_LAST_BYTES = 64 << 10
_NAME = re.compile(rb"step_\d{6}")
# As `check_from_step`: the frames' headers are read, and no rollout.
_NO_PAYLOAD = 1 << 62
_MOST_NAMED = 5


def require_never_saved(paths: RunPaths, config: RunConfig, attempt: int) -> None:
    """Refuses to begin a run from step 0 that had a checkpoint. `attempt` is the asking lead's own.

    Raises:
        CheckpointsAbsent: the directory of checkpoints is absent or empty, as one that is not mounted.
        CheckpointsLost: the run had one, or nothing can tell.
        OSError: the storage does not answer.
    """
    trace = former_checkpoint(paths, config, attempt=attempt)
    wanted = config.checkpoint.resume_from
    if not trace and wanted not in (None, "auto") and not paths.from_nothing.exists():
        trace = f"checkpoint.resume_from names {wanted}, and no attempt has begun from it"
    if trace:
        raise lost_error(paths, trace)


def require_run_id(paths: RunPaths) -> None:
    """Refuses, with TierError, an id that is damaged, or lost while files of the run or copies in tiers bear it."""
    found: object = "no such file"
    if paths.run_id.exists():
        try:
            run_id(paths)
            return
        except TierError as error:
            found, refused = error.found, error
    else:
        refused = None
    named = ""
    # No record bears an empty id, so each one is told with the id that it has.
    for _, _, item in walk(paths, run="", check_from_step=_NO_PAYLOAD):
        if isinstance(item, Gap) and item.run:
            named = item.run
    bearer = "ledger holds rollouts that bear it" if named else "journal bears it"
    named = named or next((event.run for event in reversed(read_events(paths)) if event.run), "")
    copies = in_tiers(paths)
    # Under a new id these would count as another run's.
    if named:
        raise TierError(
            f"the run's id is lost, and its {bearer}",
            where=paths.run_id,
            found=found,
            expected=f"{named}, as the newest of them",
            remedy=f"echo {named} > {shell_word(paths.run_id)}; or, if they were copied here from another run, move "
            f"{shell_word(paths.ledger)} and {paths.events.name} out of it",
        )
    if bearers := _checkpoints_by_run(paths):
        raise TierError(
            "the run's id is lost, and its checkpoints bear it",
            where=paths.run_id,
            found=found,
            expected="; or ".join(f"{run}, as {name}" for run, name in bearers.items()),
            remedy=f"echo {next(iter(bearers))} > {shell_word(paths.run_id)}; or, if they were copied here from "
            f"another run, move them out of {paths.checkpoints}: checkpoint.resume_from goes on from another run's",
        )
    if copies and refused is None:
        raise TierError(
            "the run's id is lost, and copies in its tiers bear it",
            where=paths.run_id,
            found=f"{found}, and {copies}",
            expected="16 hex digits",
            remedy="it is the end of PREFIX/NAME-ID in every tier of this run; write it there again",
        )
    if named := run_of_samples(paths):
        raise TierError(
            "the run's id is lost, and its samples bear it",
            where=paths.run_id,
            found=found,
            expected=f"{named}, as the newest of them",
            remedy=f"echo {named} > {shell_word(paths.run_id)}; or move samples*.jsonl out of the run",
        )
    if refused is not None:
        raise refused


def newest_attempt(paths: RunPaths) -> int:
    """Returns the greatest number of an attempt that the run bears, claims apart (`fence.read_owner`); 0: none.

    OSError: a file cannot be read.
    """
    numbers = {0}
    # In a run that was put back from a snapshot, an attempt that still lives has written here alone.
    with suppress(TooMuch):
        numbers.update(event.attempt or 0 for event in read_last_events(paths, _LAST_BYTES)[0])
        numbers.add(read_status(paths).get("attempt", 0))
    for folder in (paths.ledger, paths.logs, paths.work(0).parent):
        numbers.update(int(found[1]) for name in names_in(paths.run, folder) if (found := _BEARS.match(name)))
    newest = newest_listed(paths)
    numbers.add((newest.attempt if newest is not None else None) or 0)
    # What is greater is no number of an attempt.
    return max(number for number in numbers if number < _NO_ATTEMPT)


def parts_since(paths: RunPaths) -> int:
    """Returns the first attempt whose copies elsewhere count: the user abandoned older ones on purpose."""
    try:
        return int(read_regular(paths.parts_since, SMALL))
    except (FileNotFoundError, ValueError):
        return 0


def _checkpoints_by_run(paths: RunPaths) -> dict[str, str]:
    """Returns the newest checkpoint of each run whose checkpoints lie here, adopted ones apart; newest first."""
    found = dict[str, str]()
    for info in list_checkpoints(paths):
        if info.kind == "committed":
            with suppress(OSError, VerlSlurmError):
                manifest = read_manifest(info.path)
                if not is_adopted(paths, manifest.digest):
                    found.setdefault(manifest.run_id, info.name)
    return found


def lost_error(paths: RunPaths, trace: str, *, by_hand: bool = False) -> CheckpointsLost:
    """Returns the refusal, with the ways on; `trace` is from `former_checkpoint`."""
    # The hint alone is no content: storage may hide all that it names.
    absent = set(names_in(paths.run, paths.checkpoints)) <= {paths.latest.name}
    again = f"`verl-slurm submit {shell_word(paths.root)} --force-resume`, or a new run: name=NEW run_dir=NEW"
    return (CheckpointsAbsent if absent else CheckpointsLost)(
        "no checkpoint can be used, in a run that has had one: it does not begin again by itself",
        where=paths.checkpoints,
        found=trace,
        expected="a checkpoint that verifies",
        remedy=f"{'mount its file system, or ' * absent}bring one back (a backup, a tier, "
        f"checkpoints/quarantine); to begin again from step 0: {'another run_dir' if by_hand else again}",
    )


def missing_checkpoint(paths: RunPaths, history: History, present: str) -> tuple[str, str]:
    """Returns the run's last checkpoint and what was done with it, if `present` is older; else two `""`."""
    newest = history.newest_save
    if not any(newest):  # an emptied journal
        newest = read_status(paths).get("last_checkpoint", ""), "verified"
    if not newest[0] and newest[1] == "verified":  # a loop without a daemon
        with suppress(FileNotFoundError, TooMuch, ValueError):
            newest = read_regular(paths.latest, SMALL).decode().strip(), "saved"
    order, before = checkpoint_order(newest[0]), checkpoint_order(present)
    return newest if order is not None and before is not None and before < order else ("", "")


def gone_back(paths: RunPaths, history: History | None, present: str, config: RunConfig | None = None) -> str:
    """Returns what a start from `present` loses: a newer checkpoint, and steps that are done again, or `""`.

    `history` is None for a loop without a daemon; `config` is of a start to come, which may look elsewhere.
    """
    name, done = missing_checkpoint(paths, history or History(), present)
    if not name:
        return ""
    where = "gone"
    if os.path.lexists(paths.checkpoints / name):
        where = f"no longer what was saved{_why_foreign(paths, name)}"
    elif any(entry.startswith(f"{name}.") for entry in names_in(paths.run, paths.quarantine)):
        where = f"set aside in {paths.quarantine}"
    elsewhere = found_elsewhere(config, paths, name) if config is not None else ""
    instead = f"the next start looks for it in {elsewhere}; without it, " * bool(elsewhere)
    again = f"the run goes back to {present}, and does {steps_between(present, name)} again"
    return f"{name} was {done} and is {where}: {instead}{again}"


def steps_between(start: str, name: str) -> str:
    """Returns the steps from checkpoint `start` (empty: the beginning) to `name`, in words."""
    first = (checkpoint_order(start) or (0, 0))[0] + 1
    step, within = checkpoint_order(name) or (0, 0)
    last = step + bool(within)
    return f"steps {first} {'and' if last == first + 1 else 'to'} {last}" if last > first else f"step {last}"


def _why_foreign(paths: RunPaths, name: str) -> str:
    """Returns in brackets why what has a checkpoint's name is not this run's, e.g. a link; empty: it is."""
    foreign = {info.name: info.detail for info in list_checkpoints(paths) if info.kind == "foreign"}
    return f" ({foreign[name]})" if name in foreign else ""


def lost_rollouts(paths: RunPaths, config: RunConfig, history: History, present: str) -> str:
    """Returns what a start from `present` samples again though it was recorded; empty: nothing known.

    Call it before that start is in the journal. OSError: the ledger cannot be read.
    """
    last, reached = history.restart, history.reached
    if last is None or not paths.run_id.exists():
        return ""
    records = {(item.step, item.micro_batch) for item in _frames(paths)}
    at_work = any(event.attempt == last.attempt for event in reached)
    if config.trainer.is_guest:
        # Other loops, and a recipe's own main, need not keep one.
        keeps = config.trainer.on_ray and not config.trainer.command
        lost_some = _guest_lost(paths, last, present, began=at_work and keeps, empty=not records)
        number = None if lost_some else 0
    else:
        newest = paths.checkpoints / present if present else None
        theirs = trained_with(paths, config, newest) or config
        number = _not_recorded(paths, theirs, last, reached, checkpoint_order(present) or (0, 0), records)
    lost = []
    if number != 0:
        what = "an unknown number of" if number is None else f"at least {number}"
        lost.append(f"{what} finished responses are not in {paths.ledger} any more: they are sampled again")
    tokens = RunPaths(paths.ledger / "tokens")
    if tokens.ledger.is_dir() and at_work and not _of_attempt(tokens, last.attempt):
        lost.append(f"the log of tokens is gone from {tokens.root}: unfinished responses begin again")
    return "; ".join(lost)


def _not_recorded(
    paths: RunPaths,
    config: RunConfig,
    last: ev.Restart,
    reached: Sequence[ev.Training | ev.FirstRollout],
    start: tuple[int, int],
    records: Collection[tuple[int, int]],
) -> int | None:
    """Returns how many responses our trainer had before its position, and the ledger has not; None: some.

    Args:
        last, config: the newest start of ranks and its configuration; `reached`: what they reported first.
        start: step and safe point to resume from.
        records: (step, micro-batch) of the ledger.
    """
    each, ranks = config.rollout.micro_batch_size_per_device, config.distributed.dp_size
    most = config.train.batch_size_per_device // each

    def pieces(phase: str, index: int) -> int:
        done = {"generate": index, "score": most + index, "step_end": 0, "": 0}
        return done.get(phase, most + 1)

    # What the checkpoint holds itself.
    held = min(start[1], most) * ranks
    status = read_status(paths)
    known = [(event.step, pieces(event.phase, event.index)) for event in reached]
    if reached and status.get("attempt", 0) >= (last.attempt or 0):
        known.append((status.get("step", 0), pieces(status.get("phase", ""), status.get("index", 0))))
    step, done = max(known, default=(0, 0))
    step = min(step, config.train.steps)
    # The position is rank 0's: at a safe point the others may be one piece short of it. Where ranks may become more or
    # fewer, how many there were is not known.
    sampled = 0 if config.may_lose_nodes else min(max(done - 1, 0), most) * ranks
    lowest = (start[0], held)
    expected = max((step - start[0]) * most * ranks + sampled - held, 0) if (step, sampled) > lowest else 0
    found = sum(lowest <= one < (step, sampled) and one[1] < most * ranks for one in records)
    if expected > found:
        return (expected - found) * each
    # At least the rank that reported has done this piece.
    for at, count in known:
        end = min(count, most) * ranks
        if lowest < (at, end) and count and not any(lowest <= one < (at, end) for one in records):
            return None
    return 0


def _guest_lost(paths: RunPaths, last: ev.Restart, present: str, *, began: bool, empty: bool) -> bool:
    """Returns whether records of a guest are gone: its ledger had `began`, and is `empty` or lacks a part."""
    # Each of its processes has a segment from its start on, and one for single turns after that.
    processes = _of_attempt(paths, last.attempt)
    turns = _of_attempt(RunPaths(paths.ledger / "turns"), last.attempt)
    wanted = turns | set(range(max(processes, default=0) + 1))
    if paths.ledger.is_dir() and (began or processes or turns) and not processes >= wanted:
        return True
    match = re.fullmatch(r"(.+)\+[1-9]\d*", last.progress)
    return match is not None and match[1] == (present or "start") and empty


def _of_attempt(paths: RunPaths, attempt: int | None) -> set[int]:
    """Returns the numbers of the processes whose segments of this attempt are there, with a head."""
    found = segments(paths)
    return {rank for number, rank, path in found if number == attempt and path.stat().st_size >= HEAD_BYTES}


def found_elsewhere(config: RunConfig, paths: RunPaths | None = None, wanted: str = "") -> str:
    """Returns the media where a start looks for what RUN/checkpoints lacks; empty: there is none.

    `paths` and `wanted`: it lacks this one, and has older ones.
    """
    if config.tiers and (paths is None or may_be_in_tiers(paths, wanted)):
        return "the tiers"
    return "the nodes' disks" if config.checkpoint.local_dir else ""


def former_checkpoint(
    paths: RunPaths, config: RunConfig, *, attempt: int | None = None, by_hand: bool = False
) -> str:
    """Returns what tells that the run had a checkpoint, or that nothing can tell.

    Empty: it never had one, or the user had it begin again and it has saved nothing since. `attempt` is of
    the lead that asks; `by_hand`: a loop without a daemon, which keeps no journal. OSError: a file cannot be
    read.
    """
    if paths.from_nothing.exists():
        return ""
    damaged: list[bytes] = []
    events = read_events(paths, damaged)
    traces = _named_by_events(events), _found_beside(paths, events), _named_by_files(paths, damaged)
    for trace in (*traces, _by_progress(paths, config, events)):
        if trace:
            return trace
    return "" if by_hand else _gap(paths, events, attempt)


def _named_by_events(events: Iterable[ev.Event]) -> str:
    last, bad = "", set[str]()
    names: dict[str, str] = {}
    for event in events:
        match event:
            case ev.Corrupt(name=name):
                bad.add(name)
            case ev.Verified(name=name) | ev.TierCopied(name=name) | ev.TierFetched(name=name):
                names[name] = "verified"
            case ev.Restart(resume=str(name)):
                names[name] = "resumed from"
            case ev.Ended(checkpoint=str(name)):
                names[name] = "ended with"
            case ev.Saved(name=name) | ev.Pruned(name=name) | ev.SecondCopy(name=name):
                names.setdefault(name, "saved")
            case ev.Adopted(checkpoints=adopted):
                names |= dict.fromkeys(adopted, "took over")
    # A save whose first reading found it damaged was never a checkpoint: the ledger still has all of its rollouts.
    for name, what in names.items():
        if checkpoint_order(name) is not None and not (what == "saved" and name in bad):
            last = f"the journal: {what} {name}"
    return last


def _found_beside(paths: RunPaths, events: Iterable[ev.Event]) -> str:
    bad = {event.name for event in events if isinstance(event, ev.Corrupt)}
    for info in list_checkpoints(paths):
        name = info.name.split(".", 1)[0]
        if checkpoint_order(name) is not None:
            if info.kind != "quarantined":
                return f"{info.name}, which cannot be used{_why_foreign(paths, info.name)}"
            if name not in bad:
                return f"{name} is in {paths.quarantine.name}"
    for name in names_in(paths.run, paths.resharded.checkpoints):
        if checkpoint_order(name) is not None:
            return f"a copy of {name} in {paths.resharded.checkpoints}"
    return in_tiers(paths)


def in_tiers(paths: RunPaths, wanted: str = "") -> str:
    """Returns where `wanted`, or the newest, was by the run's own records of tiers; empty: nowhere."""
    with suppress(FileNotFoundError, *UNREADABLE):
        return _by_tier_records(paths, wanted)
    return ""


def may_be_in_tiers(paths: RunPaths, wanted: str) -> bool:
    """Returns whether a start asks the tiers for `wanted`: the run's records or its journal name it there.

    Records that are gone (RUN was put back without `control/`) or damaged say nothing against it.
    """
    try:
        known = bool(_by_tier_records(paths, wanted))
    except (FileNotFoundError, *UNREADABLE):
        return True
    return known or any(
        isinstance(event, ev.TierCopied) and event.name == wanted for event in read_events(paths)
    )


def missing_in_tiers(paths: RunPaths, config: RunConfig, name: str) -> str:
    """Returns which tiers lack this checkpoint of the run, or were not read back with it; empty: none."""
    if not (name and config.tiers):
        return ""
    try:
        digest = read_manifest(paths.checkpoints / name).digest
    except (OSError, VerlSlurmError):  # its own fault is told elsewhere
        return ""
    held = dict[str, dict[str, object]]()
    with suppress(OSError, *UNREADABLE):  # without the record nothing was read back
        held = _tier_records(paths)

    def lacks(tier: str) -> bool:
        record = held.get(tier, {}).get(name)
        return not (isinstance(record, dict) and record.get("ok") and record.get("digest") == digest)

    names = [tier.name for tier in config.tiers if lacks(tier.name)]
    return f"{name} is not whole in tier {' and '.join(names)}" if names else ""


def _tier_records(paths: RunPaths) -> dict[str, dict[str, object]]:
    data = read_regular(paths.tier_records, RECORD)
    return decode_json(data, dict[str, dict[str, dict[str, object]]], RECORD).get("tiers", {})


def _by_tier_records(paths: RunPaths, wanted: str) -> str:
    for tier, copies in _tier_records(paths).items():
        for name in sorted(copies, reverse=True):
            if checkpoint_order(name) is not None and wanted in ("", name):
                return f"{name} was in tier {tier}"
    return ""


def _named_by_files(paths: RunPaths, damaged: Iterable[bytes]) -> str:
    with suppress(FileNotFoundError, TooMuch, ValueError):
        name = read_regular(paths.latest, SMALL).decode().strip()
        if CHECKPOINT_NAME.fullmatch(name):
            return f"checkpoints/latest names {name}"
    if verified := read_status(paths).get("last_checkpoint"):
        return f"{paths.status.name} names {verified}"
    for line in damaged:
        # A line of zeros may have been any event; a torn one that names no checkpoint was none of a save.
        if b"\0" in line or _NAME.search(line):
            return "a damaged line of the journal, which may have named one"
    return ""


def _by_progress(paths: RunPaths, config: RunConfig, events: Iterable[ev.Event]) -> str:
    """An attempt that went on from a step after the first; or rollouts that were recorded, and are gone."""
    first: dict[object, float] = {}
    for row in every_row(paths):
        first.setdefault(row.get("attempt"), row["step"])
    begun = next(iter(first.values()), 0)
    for attempt, step in first.items():
        if step > (begun if config.trainer.is_guest else 1):
            return f"attempt {attempt} went on after step {step - 1:g} ({paths.steps.name})"
    found = segments(paths)
    # A guest numbers its records in its own way, and they come in any order.
    if not config.trainer.is_guest and (step := _first_step(_frames(paths))) > 0:
        return f"the ledger begins after step {step}"
    if not any(path.stat().st_size > HEAD_BYTES for _, _, path in found):
        for event in events:
            gone = isinstance(event, ev.Restart) and re.fullmatch(r"start\+[1-9]\d*", event.progress)
            # The loss of a node may cost the first record, and leaves the segment's name.
            if gone or (isinstance(event, ev.FirstRollout) and not found):
                return "rollouts were recorded, and the ledger has none"
    return ""


def data_digest(paths: RunPaths) -> str:
    """Returns the digest of the data in the newest checkpoint whose manifest can be read; empty: none has one."""
    for info in list_checkpoints(paths):
        if info.kind == "committed":
            with suppress(OSError, VerlSlurmError):
                return read_manifest(info.path).dataset_fingerprint
    return ""


def _frames(paths: RunPaths) -> Iterator[Frame]:
    """Yields the headers of the run's own records."""
    if paths.run_id.exists():  # else one would be made, and no record bears it
        for _, _, item in walk(paths, check_from_step=_NO_PAYLOAD):
            if isinstance(item, Frame):
                yield item


def _first_step(frames: Iterable[Frame]) -> int:
    first = None
    for item in frames:
        first = item.step if first is None else min(first, item.step)
        if first == 0:
            break
    return first or 0


def _gap(paths: RunPaths, events: Iterable[ev.Event], attempt: int | None) -> str:
    """The attempts that left something and of which the journal says nothing: it is not whole."""
    told = {event.attempt for event in events if isinstance(event, ev.Started)}
    queued = any(isinstance(event, ev.Submitted) for event in events)
    trained = {row.get("attempt") for row in every_row(paths)} | {number for number, _, _ in segments(paths)}
    trained |= {int(match[1]) for name in names_in(paths.run, paths.logs) if (match := _RANK_LOG.match(name))}
    if gap := sorted(number for number in trained - told if isinstance(number, int)):
        named = ", ".join(map(str, gap[:_MOST_NAMED]))
        return f"the journal has lost {counted(len(gap), 'attempt')} ({named}), and nothing tells that it had none"
    owner = read_owner(paths)
    before = 0 if owner is None else owner.attempt - (attempt is not None)
    if before > 0 and not queued and not told - {attempt}:
        return f"the journal has lost {counted(before, 'attempt')}, and nothing tells that it had none"
    return ""
