"""A reward's files on disk: its digest, the copy that a run keeps, and the record of one that was replaced."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.reward_spec import parse_reward, source_file
from verl_slurm.dataset.fingerprint.record import Fingerprint, fingerprint
from verl_slurm.trainer.reward.python import read_source
from verl_slurm.trainer.reward.scoring import Reward
from verl_slurm.trainer.state.reward_state import RewardState

__all__ = ["Keep", "digest_and_keep", "write_light_snapshot"]

Keep = Callable[[Path, Fingerprint], None]
"""Copies a model directory (`checkpoint.store.frozen`)."""


def digest_and_keep(paths: RunPaths, reward: str, keep: Keep | None) -> str:
    """Returns the reward's present digest, and with `keep` copies it into the run's directory. Rank 0 only.

    Returns:
        Of a model directory its tree hash, of a function the SHA-256 of its source; empty for a rule.

    Raises:
        ConfigError, DataError: it is not there.
    """
    spec = parse_reward(reward)
    if spec is None or spec.kind == "rule":
        return ""
    if spec.kind == "classifier":
        seen = fingerprint(Path(spec.name))
        if keep is not None:
            keep(Path(spec.name), seen)
        return seen.digest
    source = read_source(source_file(spec))
    digest = hashlib.sha256(source).hexdigest()
    copy = paths.reward_source(digest)
    if keep is not None and not copy.is_file():
        private_dir(copy.parent)
        write_file(copy, source)  # the bytes that were hashed: the file may have changed since
    return digest


def write_light_snapshot(paths: RunPaths, number: int, former: Reward, state: RewardState) -> None:
    """Keeps a small record of the reward that the `number`-th replacement removes. Rank 0 only.

    The record is its head and tokenizer configuration, or its source, and rank 0's last scores. It is small whatever
    the model's size: the whole model is in RUN/frozen.
    """
    directory = private_dir(paths.reward_snapshot(number))
    light: Callable[[], dict[str, bytes]] = getattr(former, "light", dict)
    for name, data in light().items():
        write_file(directory / name, data)
    cached = state.cached
    scores = {
        "reward": state.spec,
        "digest": state.digest,
        "sample_id": cached["sample_id"].tolist() if cached else [],
        "scores": cached["scores"].tolist() if cached else [],
    }
    write_file(directory / "last_scores.json", msgspec.json.encode(scores))
