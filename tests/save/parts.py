"""A small model, its optimizer, and a saver for them: one process, unsharded."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from tests.builders import RUN_ID, runtime_state
from verl_slurm.base.files import private_dir
from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.specification import SCHEMA_VERSION, Topology
from verl_slurm.checkpoint.format.state_schema import current_schema, render_schema
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.config.schema import EncryptionConfig
from verl_slurm.runtime_state.format import RuntimeState
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.loader import read_runtime_state, read_tensors
from verl_slurm.save.ranks.saver import CheckpointSaver, LocalPlace, Provenance, SaveContents
from verl_slurm.save.ranks.tensors import initialise_adamw, model_tensors, optimizer_tensors

ALONE = Collective(None)


def load_tensors(
    directory: Path, domains: Any, ranks: Collective, keys: Keyring | None = None, *, near: Path | None = None
) -> None:
    read_tensors(CheckpointReader(directory, keys), domains, ranks, near=near)


def load_runtime_state(
    directory: Path, rank: int, world_size: int, keys: Keyring | None = None
) -> RuntimeState:
    return read_runtime_state(CheckpointReader(directory, keys), rank, world_size)


class Net(nn.Module):
    """Two layers that share a weight, a buffer, and a frozen parameter."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("scale", torch.tensor([1.5, float("nan")]))

    def forward(self, x: Any) -> Any:
        return self.tied(self.inner(x)) * self.scale[0]


class Parts:
    """A model and its optimizer, trained for `updates` updates."""

    def __init__(self, *, seed: int = 0, updates: int = 0, initialise: bool = True) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.1)
        if initialise:
            initialise_adamw(self.optimizer)
        for index in range(updates):
            self.model(torch.full((1, 3), 1.0 + index)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def tensors(self) -> dict[str, dict[str, Any]]:
        return {
            "actor": model_tensors(self.model),
            "critic": {"w": torch.ones(2)},
            "optimizer": optimizer_tensors({"actor": (self.model, self.optimizer)}),
        }

    def digest(self) -> str:
        """Of every bit of every tensor."""
        found = hashlib.sha256()
        for domain, tensors in sorted(self.tensors().items()):
            for name, tensor in sorted(tensors.items()):
                found.update(f"{domain}/{name}".encode())
                found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def runtime(step: int = 2, **changes: Any) -> RuntimeState:
    """A state at the end of `step`."""
    state = runtime_state(
        step=step,
        kl_window=[0.5],
        rng={"torch": bytes(range(4)), "python": b"abc"},
        history=[{"reward": 0.5}],
    )
    return msgspec.structs.replace(state, **changes)


def contents(step: int = 2, state: RuntimeState | None = None) -> SaveContents:
    """What a save needs beside the tensors."""
    texts = dict.fromkeys(("scheduler.json", "metadata.json", "config.yaml", "orchestration.json"), b"{}\n")
    return SaveContents(
        runtime=state or runtime(step), texts=texts | {SCHEMA_VERSION: render_schema(current_schema())}
    )


def provenance(attempt: int = 1, **changes: Any) -> Provenance:
    """Of nobody in particular."""
    fields: dict[str, Any] = {"schema_id": current_schema().schema_id, "dataset_fingerprint": "0" * 64}
    fields |= {"run_id": RUN_ID, "parent": None, "frozen": {}, "topology": Topology(dp=1)}
    return Provenance(attempt=attempt, **(fields | changes))


def checkpoint_saver(
    root: Path,
    parts: Parts,
    *,
    fence: Callable[[], None] = lambda: None,
    local: LocalPlace | None = None,
    encryption: EncryptionConfig | None = None,
    attempt: int = 1,
    usual_seconds: float | None = None,
) -> CheckpointSaver:
    """A saver for `parts`; close it."""
    return CheckpointSaver(
        RunPaths(private_dir(root)),
        parts.tensors(),
        provenance(attempt),
        ALONE,
        attempt_check=fence,
        local=local,
        usual_seconds=usual_seconds,
        encryption=encryption,
    )
