"""How a model is cut, and what the ranks of a replica tell each other: without other ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from verl_slurm.base.errors import ConfigError
from verl_slurm.checkpoint.format.specification import Topology
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.models import load_causal_lm, load_critic
from verl_slurm.trainer.parallel.fsdp import recompute_layers
from verl_slurm.trainer.parallel.grid import Grid, Replica
from verl_slurm.trainer.parallel.pipeline import Line, Stage, layers_of, owner_of
from verl_slurm.trainer.parallel.places import Place3

pytestmark = pytest.mark.torch


def _line(index: int, count: int) -> Line:
    group: Any = None
    return Line(index, count, group)


@pytest.mark.parametrize(("stages", "num_layers"), [(1, 1), (2, 2), (2, 5), (3, 7), (4, 4)])
def test_every_layer_is_on_one_stage_and_none_has_two_more_than_another(stages: int, num_layers: int) -> None:
    parts = [layers_of(stage, stages, num_layers) for stage in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for layer in range(num_layers):
        assert layer in parts[owner_of(f"model.layers.{layer}.mlp.up_proj.weight", stages, num_layers)]


def test_stages_have_the_names_of_the_whole_model_and_nothing_twice(tiny: Path) -> None:
    for load in (load_causal_lm, load_critic):
        whole = load(tiny)
        names = [name for name, _ in whole.named_parameters()]
        stages = [Stage(load(tiny), _line(index, 2)) for index in range(2)]
        held = [{name for name, _ in stage.named_parameters()} for stage in stages]
        assert not held[0] & held[1]
        assert held[0] | held[1] == set(names)
        assert [name for name, _, _ in stages[0].directory] == names
        for index in range(2):
            assert {name for name, _, owner in stages[0].directory if owner == index} == held[index]


def test_a_model_that_cannot_be_cut_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="3 stages, 2 layers"):
        Stage(load_causal_lm(tiny), _line(0, 3))
    tied: Any = load_causal_lm(tiny)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        Stage(tied, _line(0, 2))


def test_layers_that_forget_are_computed_twice_and_give_the_same_gradients(tiny: Path) -> None:
    ids = torch.randint(0, 250, (2, 5), generator=torch.Generator().manual_seed(0))
    gradients, calls = [], []
    for recompute in (False, True):
        model: Any = load_causal_lm(tiny)
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, kind=recompute: calls.append(kind))
        if recompute:
            recompute_layers(model)
        model(input_ids=ids, use_cache=False).logits.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert calls == [False, True, True]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_replica_of_one_rank_does_nothing_that_it_would_not_do_alone() -> None:
    alone, mesh = Collective(None), Any
    grid = Grid(
        shape=Topology(dp=1),
        place=Place3(0, 0, 0),
        mesh=mesh,  # type: ignore[arg-type]
        world=alone,
        data=alone,
        replica=alone,
        stages=alone,
    )
    replica, batch = Replica(grid), {"x": torch.ones(2)}

    class Echo:
        def generate(self, prompts: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
            return prompts

    assert replica.is_leader
    assert replica.speaks
    assert replica.found(lambda: None) is None
    assert replica.found(lambda: batch) is batch
    assert replica.sample(Echo(), batch, 0) is batch
    assert replica.told(batch) is batch
    assert replica.told_numbers((1.0, 2.0)) == [1.0, 2.0]
