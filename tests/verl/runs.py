"""A run of verl's SFT trainer on this machine, as a configuration of ours."""

from pathlib import Path
from typing import Any

from verl_slurm.config import strict_yaml


def write_config(
    path: Path, root: Path, section: dict[str, object], last: int, *, nodes: int = 1, every_steps: int = 2
) -> Path:
    """A configuration that ends with step `last`; `section` is verl's (`tiny.sft_words`)."""
    settings: dict[str, Any] = {
        "run_dir": str(root),
        "trainer": {"backend": "verl", "entry": "sft"},
        "verl": {**section, "trainer.total_training_steps": last},
        "distributed": {"dp_size": 2, "nodes": nodes, "device": "cpu", "threads_per_rank": 1},
        "checkpoint": {"every_steps": every_steps, "keep_last": 10},
        "daemon": {"backoff_s": 0.2, "requeue_delay_s": 2},
    }
    path.write_bytes(strict_yaml.dump(settings))
    return path
