"""Checkpoints of verl, made with the real torch.save, of tensors of a few bytes."""

import json
import os
from pathlib import Path

import torch


def save_role(folder: Path, world: int, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        generator = torch.Generator().manual_seed(seed * 100 + rank)
        weights = {"w": torch.randn(64, generator=generator), "b": torch.ones(3)}
        moments = {
            "state": {0: {"exp_avg": torch.randn(64, generator=generator)}},
            "param_groups": [{"lr": 1e-3}],
        }
        extra = {"lr_scheduler": {"last_epoch": seed}, "rng": {"cpu": torch.get_rng_state()}}
        for kind, value in (("model", weights), ("optim", moments), ("extra_state", extra)):
            torch.save(value, folder / f"{kind}_world_size_{world}_rank_{rank}.pt")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))
    hf = folder / "huggingface"
    hf.mkdir(exist_ok=True)
    (hf / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (hf / "merges.txt").write_text("#version: 0.2\n")


def make_step(
    directory: Path, step: int, *, world: int = 2, entry: str = "sft", critic: bool = False
) -> Path:
    """`directory/global_step_N` as verl's trainer `entry` leaves it."""
    path = directory / f"global_step_{step}"
    if entry == "sft":
        save_role(path, world, step)
        for rank in range(world):
            torch.save({"_snapshot": {"step": step}, "rank": rank}, path / f"data_{rank}.pt")
    else:
        save_role(path / "actor", world, step)
        if critic:
            save_role(path / "critic", world, step + 1)
        torch.save({"_snapshot": {"step": step}}, path / "data.pt")
    for folder, _, names in os.walk(path):
        os.chmod(folder, 0o755)
        for name in names:
            os.chmod(os.path.join(folder, name), 0o644)
    return path


def make_directory(directory: Path, *steps: int, tracker: str | None = None, **how: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    for step in steps:
        make_step(directory, step, **how)  # type: ignore[arg-type]
    text = str(max(steps, default=0)) if tracker is None else tracker
    (directory / "latest_checkpointed_iteration.txt").write_text(text)
    return directory
