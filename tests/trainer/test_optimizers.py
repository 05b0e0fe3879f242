"""AdamW over local shards is torch's AdamW."""

import torch
from torch import nn

from verl_slurm.config.schema import TrainConfig
from verl_slurm.trainer.objective.optimizers import LocalAdamW, build_optimizers


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 3))
    # What the second of two ranks has of a single row.
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 7)))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    for step in range(first, steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def test_updates_are_those_of_torchs_adamw_to_rounding() -> None:
    mine, other = make_model(), make_model()
    ours = build_optimizers({"actor": mine}, TrainConfig(actor_lr=0.01, weight_decay=0.1), to_be_loaded=False)
    train(mine, ours["actor"], 0, 5)
    train(other, torch.optim.AdamW(other.parameters(), lr=0.01, weight_decay=0.1, foreach=False), 0, 5)
    for found, expected in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    states = [ours["actor"].state[parameter] for parameter in mine.parameters()]
    assert [float(state["step"]) for state in states] == [5.0] * len(states)


def test_a_state_put_back_goes_on_to_the_bit() -> None:
    whole, cut = make_model(), make_model()
    settings = TrainConfig(actor_lr=0.01)
    train(whole, build_optimizers({"actor": whole}, settings, to_be_loaded=False)["actor"], 0, 4)
    first = build_optimizers({"actor": cut}, settings, to_be_loaded=False)["actor"]
    train(cut, first, 0, 2)
    second = build_optimizers({"actor": cut}, settings, to_be_loaded=True)["actor"]
    for parameter in cut.parameters():
        for name, value in second.state[parameter].items():
            value.copy_(first.state[parameter][name])
    train(cut, second, 2, 4)
    for found, expected in zip(cut.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_on_a_cpu_all_tensors_go_through_one_call() -> None:
    optimizer = LocalAdamW(list(make_model().parameters()), lr=0.1, weight_decay=0.0)
    assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == (True, False)
