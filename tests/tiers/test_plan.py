"""The rules of the tiers: each in a case of its own, and what must never happen, in any case."""

from datetime import timedelta

from hypothesis import given, settings, strategies as st

from tests.tiers.conftest import NOW
from verl_slurm.tiers.tier_plan import Action, TierCopy, TierState, last_good, plan_tiers


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


def test_a_checkpoint_goes_to_every_tier_that_would_keep_it() -> None:
    found = plan(local(copy(10, 8)), tier("nvme", keep=7), tier("store", keep=90), tier("cold"))
    # Nothing else is verified: it is the last good one, and nvme gets it although it is too old there.
    assert [a.kind for a in found.values()] == ["keep", "copy", "copy", "copy"]
    found = plan(local(copy(20), copy(10, 8)), tier("nvme", keep=7), tier("cold"))
    assert found["nvme", name(10)].kind == "skip"
    assert found["nvme", name(10)].reason == "older than 7 days"
    assert found["cold", name(10)].kind == "copy"


def test_the_newest_goes_to_every_tier_before_anything_is_known_to_be_good() -> None:
    found = kinds(local(copy(20, 8, verified=None), copy(10, 9, verified=None)), tier("nvme", keep=7))
    assert (found["nvme", 20], found["nvme", 10]) == ("copy", "skip")


def test_a_verified_source_is_taken_before_a_nearer_one_that_nobody_read() -> None:
    found = plan(local(copy(1, verified=None)), tier("nvme", copy(1)), tier("cold"))
    assert found["cold", name(1)].source == "nvme"
    found = plan(local(copy(1, verified=None)), tier("cold"))
    assert found["cold", name(1)].source == "checkpoints"


def test_what_is_too_old_goes_once_a_later_tier_has_it_verified() -> None:
    new = copy(20)
    old = copy(10, 8)
    action = plan(local(new), tier("nvme", new, old, keep=7), tier("store", new, old))["nvme", name(10)]
    assert (action.kind, action.witnesses) == ("drop", (("store", name(10)),))
    assert action.reason == "8.0 days old, kept 7 days; verified in store"


def test_what_is_too_old_stays_while_a_later_tier_waits_for_it() -> None:
    new, old = copy(20), copy(10, 8)
    for there in (
        tier("store", new),
        tier("store", new, copy(10, 8, verified=None)),
        tier("store", reachable=False),
    ):
        action = plan(local(new), tier("nvme", new, old, keep=7), there)["nvme", name(10)]
        assert action.kind == "keep", action
        assert "needed for store" in action.reason


def test_another_checkpoint_of_the_same_name_is_no_copy() -> None:
    new, old = copy(20), copy(10, 8, attempt=1)
    action = plan(
        local(new), tier("nvme", new, old, keep=7), tier("store", new, copy(10, 8, attempt=2), keep=90)
    )
    assert action["nvme", name(10)].kind == "copy"  # the later one, from store
    assert action["nvme", name(10)].replace
    again = copy(10, 8, attempt=2)
    action = plan(local(new), tier("nvme", new, again, keep=7), tier("store", new, old, keep=90))
    assert (action["store", name(10)].kind, action["store", name(10)].replace) == ("copy", True)
    assert action["nvme", name(10)].kind == "keep"


def test_what_is_too_old_does_not_go_for_another_one_of_its_name() -> None:
    new, other = copy(20), copy(10, 8, digest="another")
    assert (
        kinds(local(new), tier("nvme", new, copy(10, 8), keep=7), tier("store", other))["nvme", 10] == "keep"
    )


def test_of_the_last_tier_what_is_too_old_goes_once_a_newer_one_is_verified_there() -> None:
    states = (local(copy(30)), tier("store", copy(20, 1), copy(10, 91), keep=90))
    assert kinds(*states)["store", 10] == "drop"
    states = (local(copy(30)), tier("store", copy(20, 1, verified=None), copy(10, 91), keep=90))
    assert kinds(*states)["store", 10] == "keep"


def test_the_last_good_one_stays_everywhere_however_old() -> None:
    old = copy(10, 1000)
    damaged = copy(20, verified=False)
    found = kinds(local(damaged), tier("nvme", old, keep=7), tier("store", old, keep=90))
    assert found["nvme", 10] == found["store", 10] == "keep"


def test_the_newest_verified_one_of_a_tier_stays_there() -> None:
    found = kinds(
        local(copy(20)), tier("nvme", copy(10, 100), keep=7), tier("store", copy(20), copy(10, 100))
    )
    assert found["nvme", 10] == "keep"


def test_an_archive_loses_nothing_that_was_ever_committed_there() -> None:
    bad = copy(5, 9999, verified=False)
    strange = TierCopy(name=name(6), committed=False, detail="the checkpoint is of another format version")
    found = kinds(local(copy(20)), tier("cold", copy(20), copy(10, 9999), bad, strange))
    assert {kind for (where, _), kind in found.items() if where == "cold"} == {"keep"}


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
    assert found["cold", name(10)].source == "store"
    found = plan(local(copy(20)), tier("nvme", copy(20), bad), tier("store"))
    assert found["nvme", name(10)].kind == "keep"
    assert ("store", name(10)) not in found


def test_a_tier_that_does_not_answer_has_no_actions() -> None:
    found = kinds(local(copy(10)), tier("store", reachable=False), tier("cold"))
    assert found == {("checkpoints", 10): "keep", ("cold", 10): "copy"}


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


@settings(max_examples=120, deadline=None)
@given(_worlds(), st.booleans(), st.integers(0, 20))
def test_no_plan_ever_loses_the_last_good_one_or_relies_on_what_goes(
    states: list[TierState], copies: bool, drops: int
) -> None:
    actions = plan_tiers(states, NOW)
    best = last_good(states)
    dropped = {(a.tier, a.name) for a in actions if a.kind == "drop"}
    by_name = {s.name: s for s in states}
    for action in actions:
        assert by_name[action.tier].reachable
        if action.kind in ("copy", "drop"):
            assert not by_name[action.tier].local, "the run's own directory is another command's"
        if action.kind == "drop":
            assert action.name != best
            assert action.witnesses
            assert not set(action.witnesses) & dropped
            gone = next(c for c in by_name[action.tier].copies if c.name == action.name)
            assert by_name[action.tier].keep_days is not None or gone.litter
            assert gone.litter or gone.committed, "a record that cannot be read was dropped"
    after = _carried_out(states, actions, copies=copies, drops=drops)
    if best is not None:
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
