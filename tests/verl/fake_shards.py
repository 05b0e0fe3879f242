"""Steps of verl's FSDP engine as torch itself writes them, of a few numbers, by one process that plays each rank."""

import json
import math
import os
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

WHOLE = {"embed": (7, 3), "layer.w": (4, 5), "layer.b": (2,), "norm": (1,)}
"""The parameters, by name. Two ranks and three divide none of them evenly."""


@contextmanager
def _rank(rank: int, shape: Sequence[int]) -> Iterator[Any]:
    """A mesh as this rank has it, without any other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=math.prod(shape), store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(shape), mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
    finally:
        dist.destroy_process_group()


def _numbers(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(sum(map(ord, name)) + seed)
    return torch.randn(tuple(shape), generator=draw)


def _divided(whole: torch.Tensor, mesh: Any, rank: int, placement: Placement) -> DTensor:
    placements = [*[Replicate()] * (mesh.ndim - 1), placement]
    local = whole
    if isinstance(placement, Shard):
        parts = whole.chunk(mesh.size(-1), placement.dim)
        number = rank % mesh.size(-1)
        # The last ranks may get no row.
        local = parts[number] if number < len(parts) else whole.narrow(placement.dim, 0, 0)
        local = local.clone().contiguous()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def fsdp2_step(
    directory: Path,
    step: int,
    ranks: int,
    *,
    roles: Sequence[str] = ("actor",),
    mesh: Sequence[int] | None = None,
    placements: dict[str, Placement] | None = None,
    samples: int = 12,
) -> Path:
    """`directory/global_step_N` of FSDP2 with AdamW's moments; a role of no name makes it one of SFT.

    Args:
        mesh: of more dimensions than one.
        placements: by parameter; default: divided along the first dimension.
    """
    path = directory / f"global_step_{step}"
    for role in roles:
        folder = path / role
        (folder / "huggingface").mkdir(parents=True)
        (folder / "huggingface" / "config.json").write_text('{"model_type": "qwen2"}')
        (folder / "fsdp_config.json").write_text(
            json.dumps({"FSDP_version": 2, "world_size": ranks}, indent=4)
        )
        for rank in range(ranks):
            name = f"world_size_{ranks}_rank_{rank}"
            with _rank(rank, mesh or (ranks,)) as place:
                _save(folder, name, place, rank, role, placements or {})
    if "" in roles:
        for rank in range(ranks):
            torch.save(_loader(samples, rank), path / f"data_{rank}.pt")
    else:
        torch.save(_loader(samples, 0), path / "data.pt")
    for name in [path, *path.rglob("*")]:
        os.chmod(name, 0o700 if name.is_dir() else 0o600)
    return path


def fsdp1_step(
    directory: Path, ranks: int, *, last: int | None = None, groups: int = 1, fill: float = 0.0
) -> Path:
    """`directory/global_step_4` of FSDP1 with a root and two layers, each a unit with a flat parameter.

    Args:
        last: length of the last unit's flat parameter; default: that of its parameters.
        groups: of the optimizer.
        fill: what the last rank's parts of flat parameters are filled up with.
    """
    path = fsdp2_step(directory, 4, ranks)
    names = {"embed": (7, 3), "layers.0.w": (4, 5), "layers.1.w": (3, 3), "lm_head.weight": (7, 3)}
    units = [21, 20, 9 if last is None else last]  # the output layer is the embedding
    for rank in range(ranks):
        with _rank(rank, (ranks,)) as mesh:
            wholes = {name: _numbers(name, shape, 0) for name, shape in names.items()}
            wholes["lm_head.weight"] = wholes["embed"]
            model = OrderedDict(
                (name, _divided(whole, mesh, rank, Shard(0)) if ranks > 1 else whole)
                for name, whole in wholes.items()
            )
            wrapped = "_fsdp_wrapped_module"
            modules = [
                "",
                wrapped,
                *(f"{wrapped}.layers.{n}{end}" for n in (0, 1) for end in ("", f".{wrapped}")),
            ]
            model._metadata = OrderedDict((name, {"version": 1}) for name in modules)  # type: ignore[attr-defined]
            state: dict[int, Any] = {}
            for at, length in enumerate(units):
                rows = -(-length // ranks)
                flat = torch.full((rows * ranks,), fill)
                flat[:length] = _numbers(f"flat{at}", (length,), 0)
                state[at] = {
                    "step": torch.tensor(4.0),
                    "exp_avg": flat[rank * rows : (rank + 1) * rows].clone(),
                }
            torch.save(model, path / f"actor/model_world_size_{ranks}_rank_{rank}.pt")
            optim = {
                "state": state,
                "param_groups": [{"lr": 1e-3, "params": [0, 1, 2]}, *[{"params": []}] * (groups - 1)],
            }
            torch.save(optim, path / f"actor/optim_world_size_{ranks}_rank_{rank}.pt")
    (path / "actor" / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 1, "world_size": ranks}))
    return path


def _save(folder: Path, name: str, mesh: Any, rank: int, role: str, placements: dict[str, Placement]) -> None:
    def dtensor(key: str, seed: int) -> DTensor:
        whole = _numbers(key + role, WHOLE[key], seed)
        return _divided(whole, mesh, rank, placements.get(key, Shard(0)))

    model = {key: dtensor(key, 0) for key in WHOLE}
    # One tensor under two names, and a buffer that is whole on every rank.
    torch.save({**model, "head": model["embed"], "buffer": torch.arange(3)}, folder / f"model_{name}.pt")
    state = {
        at: {"step": torch.tensor(4.0), "exp_avg": dtensor(key, 1), "exp_avg_sq": dtensor(key, 2)}
        for at, key in enumerate(WHOLE)
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(state)}]
    torch.save({"state": state, "param_groups": groups}, folder / f"optim_{name}.pt")
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    rng = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
    schedule = {"last_epoch": 4, "_last_lr": [1e-3], "lr_lambdas": [None]}
    # A GPU's generator: seed and offset.
    rng["cuda"] = torch.tensor([rank, 0, 0, 0, 0, 0, 0, 0] * 2, dtype=torch.uint8)
    torch.save({"lr_scheduler": schedule, "rng": rng}, folder / f"extra_state_{name}.pt")


def _loader(samples: int, rank: int) -> dict[str, Any]:
    """What torchdata's StatefulDataLoader keeps, with workers."""
    main = {
        "_sampler_iter_state": {"samples_yielded": samples},
        "_sampler_iter_yielded": 2,
        "_base_seed": 77 + rank,
    }
    workers = {"worker_0": {"worker_id": 0, "dataset_state": None}}
    return {"_snapshot": {"_snapshot_step": 2, "_main_snapshot": main, "_worker_snapshots": workers}}


def gathered(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of model and optimizer, put together, as torch reads them."""
    ranks = len(list(folder.glob("model_*.pt")))
    found: dict[str, torch.Tensor] = {}
    for kind in ("model", "optim"):
        shards = [
            torch.load(folder / f"{kind}_world_size_{ranks}_rank_{rank}.pt", weights_only=False)
            for rank in range(ranks)
        ]
        for name, parts in _leaves([*shards]):
            first = parts[0]
            if not isinstance(first, DTensor):
                assert all(torch.equal(first, one) for one in parts)
                found[name] = first
                continue
            [placement] = first.placements
            assert [list(one.device_mesh.get_coordinate()) for one in parts] == [
                [rank] for rank in range(ranks)
            ]
            assert first.device_mesh.size() == ranks
            local = [one.to_local() for one in parts]
            whole = torch.cat(local, placement.dim) if isinstance(placement, Shard) else local[0]
            assert whole.shape == first.shape
            found[name] = whole
    return found


def _leaves(values: list[Any], name: str = "") -> Iterator[tuple[str, list[Any]]]:
    if isinstance(values[0], torch.Tensor):
        yield name, values
    elif isinstance(values[0], dict):
        assert all(one.keys() == values[0].keys() for one in values)
        for key in values[0]:
            yield from _leaves([one[key] for one in values], f"{name}.{key}")
    else:
        assert all(one == values[0] for one in values), name
