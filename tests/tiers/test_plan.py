"""The rules of the tiers: each in a case of its own, and what must never happen, in any case."""

from datetime import timedelta

from hypothesis import given, settings, strategies as st

from tests.tiers.conftest import NOW
from verl_slurm.checkpoint.tiers.tier_plan import Action, TierCopy, TierState, last_good, plan_tiers


def name(step: int) -> str:
    return f"step_{step:06d}"


def copy(
    step: int, days: float = 0, *, verified: bool | None = True, attempt: int = 1, **changes: object
) -> TierCopy:
    fields: dict[str, object] = {
        "name": name(step),
        "committed": True,
        "verified": verified,
        "digest": f"{step}.{attempt}",
        "attempt": attempt,
        "saved": NOW - timedelta(days=days),
    }
    return TierCopy(**(fields | changes))  # type: ignore[arg-type]


def local(*copies: TierCopy) -> TierState:
    return TierState(name="checkpoints", local=True, copies=copies)


def tier(where: str, *copies: TierCopy, keep: int | None = None, reachable: bool = True) -> TierState:
    return TierState(name=where, keep_days=keep, copies=copies, reachable=reachable)


def plan(*states: TierState) -> dict[tuple[str, str], Action]:
    actions = plan_tiers(states, NOW)
    found = {(action.tier, action.name): action for action in actions}
    assert len(found) == len(actions), "two actions for one checkpoint in one tier"
    assert all(action.reason for action in actions)
    return found


def kinds(*states: TierState) -> dict[tuple[str, int], str]:
    return {(where, int(which[5:])): action.kind for (where, which), action in plan(*states).items()}


def test_the_newest_goes_to_every_tier_before_anything_is_known_to_be_good() -> None:
    found = kinds(local(copy(20, 8, verified=None), copy(10, 9, verified=None)), tier("nvme", keep=7))
    assert (found["nvme", 20], found["nvme", 10]) == ("copy", "skip")


def test_a_verified_source_is_taken_before_a_nearer_one_that_nobody_read() -> None:
    found = plan(local(copy(1, verified=None)), tier("nvme", copy(1)), tier("cold"))
    assert found["cold", name(1)].source == "nvme"
    found = plan(local(copy(1, verified=None)), tier("cold"))
    assert found["cold", name(1)].source == "checkpoints"


def test_what_is_too_old_goes_once_a_later_tier_has_it_verified_and_stays_while_one_waits_for_it() -> None:
    new, old = copy(20), copy(10, 8)
    action = plan(local(new), tier("nvme", new, old, keep=7), tier("store", new, old))["nvme", name(10)]
    assert (action.kind, action.witnesses) == ("drop", (("store", name(10)),))
    assert action.reason == "8.0 days old, kept 7 days; verified in store"
    for there in (
        tier("store", new),
        tier("store", new, copy(10, 8, verified=None)),
        tier("store", reachable=False),
    ):
        action = plan(local(new), tier("nvme", new, old, keep=7), there)["nvme", name(10)]
        assert action.kind == "keep", action
        assert "needed for store" in action.reason


def test_of_the_last_tier_what_is_too_old_goes_once_a_newer_one_is_verified_there() -> None:
    states = (local(copy(30)), tier("store", copy(20, 1), copy(10, 91), keep=90))
    assert kinds(*states)["store", 10] == "drop"
    states = (local(copy(30)), tier("store", copy(20, 1, verified=None), copy(10, 91), keep=90))
    assert kinds(*states)["store", 10] == "keep"


def test_the_remains_of_a_dead_upload_go_once_something_newer_is_verified() -> None:
    remains = TierCopy(name=name(5), committed=False, litter=True, detail="3 objects without a manifest")
    action = plan(local(copy(20)), tier("cold", copy(20), remains))["cold", name(5)]
    assert (action.kind, action.witnesses) == ("drop", (("cold", name(20)),))
    assert kinds(local(), tier("cold", remains))["cold", 5] == "keep"
    # It can still be completed:
    assert kinds(local(copy(20), copy(5, 1)), tier("cold", copy(20), remains))["cold", 5] == "copy"


def test_what_is_damaged_in_a_tier_is_mended_from_another_and_never_copied_on() -> None:
    bad = copy(10, verified=False)
    found = plan(
        local(copy(20)), tier("nvme", copy(20), bad), tier("store", copy(20), copy(10)), tier("cold")
    )
    assert found["nvme", name(10)].source == "store"
    found = plan(local(copy(20)), tier("nvme", copy(20), bad), tier("store"))
    assert found["nvme", name(10)].kind == "keep"


def test_what_a_later_attempt_saved_is_newer_than_what_the_run_turned_its_back_on() -> None:
    live, abandoned = copy(501, 8, attempt=2), copy(1000, 9, attempt=1)
    states = (local(live), tier("nvme", live, abandoned, keep=7), tier("store", live, abandoned))
    assert last_good(states) == name(501)
    found = kinds(*states)
    assert (found["nvme", 501], found["nvme", 1000]) == ("keep", "drop")


# ---- in any case

_DAYS = st.sampled_from([0, 3, 10, 50, 200])
_copies = st.builds(
    lambda step, days, verified, attempt, shape: (
        copy(step, days, verified=verified, attempt=attempt)
        if shape == "whole"
        else TierCopy(name=name(step), committed=False, litter=shape == "litter", detail="x")
    ),
    st.integers(1, 5),
    _DAYS,
    st.sampled_from([True, True, None, False]),
    st.integers(1, 2),
    st.sampled_from(["whole", "whole", "whole", "litter", "unreadable"]),
)
_lists = st.lists(_copies, max_size=5, unique_by=lambda c: c.name).map(tuple)


@st.composite
def _worlds(draw: st.DrawFn) -> list[TierState]:
    states = [local(*draw(_lists))]
    for number in range(draw(st.integers(0, 3))):
        reachable = draw(st.sampled_from([True, True, True, False]))
        keep = draw(st.sampled_from([None, 1, 7, 90]))
        states.append(
            tier(f"t{number}", *(draw(_lists) if reachable else ()), keep=keep, reachable=reachable)
        )
    return states


def _carried_out(
    states: list[TierState], actions: list[Action], *, copies: bool, drops: int
) -> list[TierState]:
    """The tiers after all copies (or none: they failed), and the first `drops` removals."""
    held = {state.name: {c.name: c for c in state.copies} for state in states}
    if copies:
        for action in (a for a in actions if a.kind == "copy"):
            source = held[action.source].get(action.name)
            assert source is not None, "copied from where it is not"
            if source.verified is not False:
                held[action.tier][action.name] = copy(
                    int(action.name[5:]), attempt=source.attempt, saved=source.saved, digest=source.digest
                )
    for action in [a for a in actions if a.kind == "drop"][:drops]:
        if all(held[where][which].good for where, which in action.witnesses):
            del held[action.tier][action.name]
    return [
        TierState(
            name=s.name,
            keep_days=s.keep_days,
            reachable=s.reachable,
            local=s.local,
            copies=tuple(held[s.name].values()),
        )
        for s in states
    ]


@settings(max_examples=200, deadline=None)
@given(_worlds(), st.booleans(), st.integers(0, 20))
def test_each_action_keeps_the_six_rules(states: list[TierState], copies: bool, drops: int) -> None:
    actions = plan_tiers(states, NOW)
    planned = {(a.tier, a.name): a for a in actions}
    best, by_name = last_good(states), {s.name: s for s in states}
    found = {(s.name, c.name): c for s in states for c in s.copies}
    attempts = {c.name: max(o.attempt for o in found.values() if o.name == c.name) for c in found.values()}

    def rank(which: str) -> tuple[int, str]:
        return attempts[which], which

    for a in actions:
        state, here, source = by_name[a.tier], found.get((a.tier, a.name)), found.get((a.source, a.name))
        number = states.index(state)
        assert state.reachable, "4: a tier that does not answer"
        assert not (state.local and a.kind in ("copy", "drop")), "2: the run's own directory"
        if a.kind == "copy":
            assert source is not None
            assert source.usable, "4: from what is known to be bad"
            assert by_name[a.source].reachable
            assert not a.replace or (here is not None and source.digest != here.digest)
        if a.kind != "drop":
            continue
        assert here is not None
        good = [c.name for c in state.copies if c.good]
        assert a.name != best, "1: the last good one"
        assert not here.good or a.name != max(good, key=rank), "1: the newest verified one of its tier"
        assert a.witnesses
        for where, which in a.witnesses:
            assert found[where, which].good, "3: a witness is verified"
            assert planned[where, which].kind == "keep", "3: and stays"
        ((where, which),) = a.witnesses
        if here.litter:
            assert where == a.tier, "6: something newer is verified there"
            assert which > a.name
            continue
        assert here.committed, "6: a record that cannot be read"
        assert state.keep_days is not None, "2: an archive"
        assert here.saved is not None
        assert NOW - here.saved > timedelta(days=state.keep_days), "3: too old"
        beyond = states[min(number + 1, len(states) - 1)].name
        same = where in {s.name for s in states[number + 1 :]} and found[where, which].digest == here.digest
        assert same or (where == beyond and rank(which) > rank(a.name)), "3: a witness stands in for it"
        for later in states[number + 1 :]:
            waits = (later.name, a.name) in planned and planned[later.name, a.name].kind == "copy"
            assert not waits, "3: a later tier is to have it"
            young = later.keep_days is None or NOW - here.saved <= timedelta(days=later.keep_days)
            assert later.reachable or not young or not here.usable, "3: a later tier may lack it"
    for state in states[1:]:
        for (where, which), c in found.items():
            others = [o for (t, n), o in found.items() if n == which and t != state.name and o.usable]
            newest = bool(others) and c.attempt == max(o.attempt for o in others)
            young = state.keep_days is None or NOW - (c.saved or NOW) <= timedelta(days=state.keep_days)
            if where != state.name and c.good and newest and state.reachable and (young or which == best):
                there = found.get((state.name, which))
                missing = there is None or not there.committed
                assert not missing or planned[state.name, which].kind == "copy", "5: copied on"
    after = _carried_out(states, actions, copies=copies, drops=drops)
    for before, now in zip(states, after, strict=True):
        if any(c.name == best and c.good for c in before.copies):
            assert any(c.name == best and c.good for c in now.copies), "the last good one went"
        if any(c.good for c in before.copies):
            assert any(c.good for c in now.copies), "a tier lost its last good one"


def test_an_older_attempt_is_not_copied_where_the_newest_is_too_old_to_stay() -> None:
    """Found by the property below: copied, replaced by the newest, dropped as too old, copied again for ever."""
    states = (
        local(copy(1, attempt=1), copy(2, attempt=1)),
        tier("t0", copy(1, 3, attempt=2), copy(2, attempt=2)),
        tier("t1", copy(2, attempt=2), keep=1),
    )
    assert kinds(*states)["t1", 1] == "skip"


@settings(max_examples=60, deadline=None)
@given(_worlds())
def test_passes_come_to_rest(states: list[TierState]) -> None:
    """Without new checkpoints, a few passes leave nothing to do: nothing is copied back and forth."""
    for _ in range(4):
        states = _carried_out(states, plan_tiers(states, NOW), copies=True, drops=99)
    left = [a for a in plan_tiers(states, NOW) if a.kind in ("copy", "drop")]
    assert left == []
