"""Run by test_models under torchrun: asserts on every rank that FSDP2 changes nothing but the place of numbers."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl_slurm.checkpoint.format.specification import Topology
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.tensors import model_tensors
from verl_slurm.trainer.models import (
    build_models,
    clip_gradients,
    copy_weights,
    load_causal_lm,
    logprobs_and_entropy,
    values,
)
from verl_slurm.trainer.objective.losses import masked_mean
from verl_slurm.trainer.parallel import fsdp
from verl_slurm.trainer.parallel.grid import make_grid


def main(path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, world, 1), mesh_dim_names=("pp", "dp", "tp"))
    small = check(path, mesh)
    fsdp._ONE_UNIT_BYTES = 0  # as a large model is sharded
    large = check(path, mesh)
    assert small.keys() == large.keys()
    for name, tensor in small.items():
        assert torch.equal(tensor, large[name]), name
    dist.destroy_process_group()


def check(path: Path, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """This rank's shards of the actor and of its gradients, in the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    batch = {
        "prompt_ids": torch.randint(0, 250, (4, 5), generator=generator),
        "prompt_mask": torch.ones(4, 5, dtype=torch.bool),
        "response_ids": torch.randint(0, 250, (4, 3), generator=generator),
        "response_mask": torch.tensor(
            [[True, True, True], [True] * 3, [True, False, False], [True, True, False]]
        ),
    }
    mine = {name: column[rank * 2 : rank * 2 + 2] for name, column in batch.items()}
    tokens = float(batch["response_mask"].sum())
    cpu = torch.device("cpu")
    whole = build_models(path, dtype="float32", mesh=None, device=cpu)
    sharded = build_models(path, dtype="float32", mesh=mesh, device=cpu)
    assert all(isinstance(p, DTensor) for p in sharded.actor.parameters())

    logprobs, entropy = logprobs_and_entropy(sharded.actor, mine, temperature=1.0)
    expected, _ = logprobs_and_entropy(whole.actor, batch, temperature=1.0)
    torch.testing.assert_close(logprobs, expected[rank * 2 : rank * 2 + 2], rtol=0, atol=1e-5)
    assert (entropy > 0).all()
    assert (values(sharded.critic, mine) == 0).all()

    # The denominator rule of losses.py: averaged over ranks, the gradient is that of the whole mini-batch.
    masked_mean(logprobs, mine["response_mask"], tokens / world).backward()
    masked_mean(expected, batch["response_mask"]).backward()
    for (name, parameter), other in zip(
        sharded.actor.named_parameters(), whole.actor.parameters(), strict=True
    ):
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6, msg=name)
    grid = make_grid(Topology(dp=world, tp=1, pp=1), cpu, Collective(dist.group.WORLD))
    norms = clip_gradients(sharded.actor, 0.5, grid), clip_gradients(whole.actor, 0.5)
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-6)
    for parameter, other in zip(sharded.actor.parameters(), whole.actor.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6)

    copy = load_causal_lm(path)
    for factor in (1.5, 2.0):  # the second time over what the first has left gathered
        for module in sharded.actor.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        with torch.no_grad():
            for parameter in sharded.actor.parameters():
                parameter.mul_(factor)
            for parameter in whole.actor.parameters():
                parameter.mul_(factor)
        copy_weights(sharded.actor, copy)
        for taken, original in zip(copy.parameters(), whole.actor.parameters(), strict=True):
            assert torch.equal(taken, original)
    actor = model_tensors(sharded.actor)
    assert all(isinstance(tensor, DTensor) for tensor in actor.values())
    parts = {name: tensor.to_local() for name, tensor in actor.items()}
    gradients = {f"{name}.grad": p.grad.to_local() for name, p in sharded.actor.named_parameters()}
    return parts | gradients


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 may abort at the interpreter's own end: wire.lifeline.run_and_leave
