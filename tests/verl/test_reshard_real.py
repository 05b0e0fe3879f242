"""Checkpoints of verl's own FSDP manager, divided among other numbers of ranks and loaded by that manager again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="the package verl: make verl")

import torch
import torch.distributed as dist

from tests.verl.fsdp_ranks import Training, on_ranks
from tests.verl.same import differences
from verl_slurm.base.errors import ConfigError
from verl_slurm.verl.reshard.checkpoint import division_of, open_source, write_step
from verl_slurm.verl.reshard.dividing import this_python
from verl_slurm.verl.shards import judge_step

pytestmark = [pytest.mark.verl, pytest.mark.torch]

FORMS = [("fsdp2", True), ("fsdp", False)]
"""verl's strategy, and whether the output layer is the embedding."""


def made(
    place: Path, ranks: int, work: Callable[[Training], object], form: tuple[str, bool], **how: bool
) -> None:
    """Has `ranks` ranks build what verl trains, and do `work`."""
    on_ranks(ranks, lambda: work(Training(form[0], tied=form[1], **how)))


def saved(place: Path, form: tuple[str, bool], ranks: int, source: Path | None = None, **how: bool) -> Path:
    """A step as verl's PPO leaves it: a step of training after `source`, with its numbers in `place`/numbers.pt."""
    step = place / "global_step_1"

    def work(training: Training) -> None:
        if source is not None:
            training.load(source / "actor")
            noted(training, place / "loaded.pt")
        training.train(1)
        training.save(step / "actor")
        noted(training, place / "numbers.pt")

    place.mkdir()
    made(place, ranks, work, form, **how)
    torch.save({"_num_yielded": 3}, step / "data.pt")
    for path in [step, *step.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return step


def noted(training: Training, path: Path) -> None:
    numbers = training.numbers()  # collective
    if dist.get_rank() == 0:
        torch.save(numbers, path)


def divided(step: Path, ranks: int, place: Path) -> Path:
    source = open_source(step)
    place.mkdir()
    with division_of(source, ranks, this_python, below=[place]) as division:
        return write_step(source, division, place).path


def unequal(ours: Path, theirs: Path) -> list[str]:
    """Names of the numbers that differ in a bit."""
    a, b = (torch.load(path, weights_only=False) for path in (ours, theirs))
    assert len(a) > 50
    return [name for name in a.keys() | b.keys() if not same(a.get(name), b.get(name))]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


@pytest.mark.scenario("L21")
@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form[0]))
def test_two_ranks_then_three_one_and_two_load_the_same_bits_and_train_on(
    tmp_path: Path, form: tuple[str, bool]
) -> None:
    former = saved(tmp_path / "first", form, 2)
    for ranks in (3, 1, 2):
        whole = divided(former, ranks, tmp_path / f"divided_{ranks}")
        assert judge_step(whole).ok
        later = saved(tmp_path / f"later_{ranks}", form, ranks, whole)
        # verl's manager and torch's collectives, not ours, have put it together.
        assert unequal(tmp_path / f"later_{ranks}" / "loaded.pt", former.parent / "numbers.pt") == []
        # It has trained: each step moves every weight.
        assert "schedule" in unequal(later.parent / "numbers.pt", former.parent / "numbers.pt")
        former = later


@pytest.mark.soak  # the test before it, and back
@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form[0]))
def test_there_and_back_gives_every_rank_its_own_numbers_again(
    tmp_path: Path, form: tuple[str, bool]
) -> None:
    first = saved(tmp_path / "first", form, 2)
    there = divided(first, 5, tmp_path / "there")
    back = divided(there, 2, tmp_path / "back")
    assert differences(back / "actor", first / "actor") == []
    # Rank 1 was gone in between: its generators are its own, and other than they were.
    alone = divided(divided(first, 1, tmp_path / "alone"), 2, tmp_path / "again")
    found = differences(alone / "actor", first / "actor")
    assert found
    assert all("extra_state_world_size_2_rank_1.pt.rng." in name for name in found)


@pytest.mark.soak  # the test before it, the other way
def test_one_rank_of_fsdp1_and_three_understand_each_other(tmp_path: Path) -> None:
    """One rank of FSDP1 divides nothing, and its files have no DTensor."""
    form = ("fsdp", True)
    first = saved(tmp_path / "first", form, 1)
    three = divided(first, 3, tmp_path / "three")
    saved(tmp_path / "later", form, 3, three)
    assert unequal(tmp_path / "later" / "loaded.pt", first.parent / "numbers.pt") == []


def test_the_new_ranks_generators_are_their_own_and_the_same_each_time(tmp_path: Path) -> None:
    step = saved(tmp_path / "first", ("fsdp2", False), 1)
    states = []
    for name in ("one", "two"):
        whole = divided(step, 3, tmp_path / name) / "actor"
        states.append(
            [
                torch.load(whole / f"extra_state_world_size_3_rank_{rank}.pt", weights_only=False)["rng"]
                for rank in range(3)
            ]
        )
    drawn = []
    for state in states[0]:
        torch.set_rng_state(state["cpu"])
        drawn.append(torch.rand(4).tolist())
    assert len({tuple(one) for one in drawn}) == 3
    assert [torch.equal(a["cpu"], b["cpu"]) for a, b in zip(*states, strict=True)] == [True] * 3
    assert len({one["numpy"][1].tobytes() for one in states[0]}) == 3
    assert len({one["random"] for one in states[0]}) == 3


def test_parameters_that_fsdp1_keeps_as_they_were_are_refused(tmp_path: Path) -> None:
    step = saved(tmp_path / "first", ("fsdp", False), 2, original=True)
    wanted = r"optim.*rank 1 holds other things.*docs/verl.md"
    with pytest.raises(ConfigError, match=wanted), division_of(open_source(step), 3, this_python):
        pass


def test_moments_that_do_not_fit_the_models_units_are_refused(tmp_path: Path) -> None:
    """The length of a flat parameter follows from the model; one that does not fit must not be cut anywhere."""
    step = saved(tmp_path / "first", ("fsdp", False), 2)
    for rank in range(2):
        path = step / f"actor/optim_world_size_2_rank_{rank}.pt"
        value = torch.load(path, weights_only=False)
        for name in ("exp_avg", "exp_avg_sq"):
            value["state"][1][name] = value["state"][1][name][:-1].clone()
        torch.save(value, path)
    wanted = "flat parameters"
    with pytest.raises(ConfigError, match=wanted), division_of(open_source(step), 3, this_python):
        pass
