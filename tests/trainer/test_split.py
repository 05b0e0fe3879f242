"""Which prompts are held out: by their text alone, and never on both sides."""

from verl_slurm.trainer.data import drop_shared, first_by_digest, split_by_digest

ROWS = [(f"{a}+{b}=", str(a + b)) for a in range(40) for b in range(40)]


def test_every_prompt_is_on_one_side_and_the_order_stays() -> None:
    train, held_out = split_by_digest([*ROWS, *ROWS[::7]], 0.1)
    assert not set(train) & set(held_out)
    assert sorted([*train, *held_out]) == sorted([*ROWS, *ROWS[::7]])
    assert train[: len(ROWS) // 2] == [row for row in ROWS if row in set(train)][: len(ROWS) // 2]
    assert 0.08 < len(held_out) / len(train) < 0.14


def test_a_side_is_of_the_text_alone_so_other_lines_move_nothing() -> None:
    _, held_out = split_by_digest(ROWS, 0.1)
    _, later = split_by_digest([("new", "1"), *reversed(ROWS)], 0.1)
    assert set(held_out) <= set(later) <= {*held_out, ("new", "1")}
    # Frozen: another split would be another experiment.
    assert [row for row, _ in held_out[:4]] == ["0+10=", "0+14=", "1+5=", "1+14="]


def test_a_larger_share_holds_out_what_a_smaller_one_did() -> None:
    assert set(split_by_digest(ROWS, 0.1)[1]) < set(split_by_digest(ROWS, 0.2)[1])
    assert split_by_digest(ROWS, 0.0) == (ROWS, [])


def test_what_is_held_out_elsewhere_does_not_train_whatever_its_answer() -> None:
    assert drop_shared([("a", "1"), ("b", "2"), ("a", "3")], [("a", "9")]) == [("b", "2")]


def test_a_cap_takes_each_prompt_once_and_the_same_ones_in_any_order() -> None:
    few = first_by_digest([*ROWS, *ROWS], 10)
    assert len(set(few)) == 10
    assert first_by_digest(list(reversed(ROWS)), 10) == few
    assert len(first_by_digest(ROWS, 5000)) == len(ROWS)
    assert first_by_digest([("a", "first"), ("a", "second")], 5) == [("a", "first")]
