"""Lists the releases of verl that were run under verl-slurm, and judges the others. Pure.

The hooks depend on little: SFT on `SFTTrainer`, its `training_client.train_batch` and its `ckpt_handler`; PPO on
`register_trainer`, the v1 trainers' `on_step_end` and `_save_checkpoint`. Where these are missing, a run ends at its
start. Only running a release shows that a run with them is right, and this is the list.
"""

import re
from dataclasses import dataclass
from typing import Literal

from verl_slurm.base.errors import ConfigError

__all__ = ["OLDEST", "RELEASES", "Release", "judge", "require_usable"]

Entry = Literal["sft", "ppo"]
Word = Literal["run", "unknown", "too_old"]


@dataclass(frozen=True)
class Release:
    """The known facts of one release and one entry.

    Attributes:
        word: `run`: its tests pass with it. `unknown`: it was never tried. `too_old`: it cannot be served.
        line: for people.
    """

    version: str
    entry: Entry
    word: Word
    line: str


OLDEST: dict[Entry, tuple[tuple[int, int, int], str]] = {
    "sft": ((0, 8, 0), "0.7.1 was tried, and ended at its start with a TypeError (with transformers 5.10)"),
    "ppo": ((0, 9, 0), "older ones have no trainer that can be asked to save and leave (trainer.use_v1)"),
}
"""The oldest that can be served, and what its predecessor lacks: 0.7.1 and 0.8.0 were tried."""

RELEASES: dict[str, dict[Entry, str]] = {
    "0.9.1": {
        "sft": "preempted on Slurm, killed, and at an epoch's end: bit for bit",
        "ppo": "GRPO preempted on Slurm over two nodes, saved, resumed and finished",
    },
    "0.9.0": {
        "sft": "preempted, killed, and at an epoch's end: bit for bit",
        "ppo": "GRPO preempted on Slurm over two nodes, saved, resumed and finished",
    },
    "0.8.0": {
        "sft": "preempted, killed, and at an epoch's end: bit for bit, with numpy 2, which it does not ask for"
    },
}
"""The releases that were run, and how: tests/verl and tests/slurm_cluster, with that release in the environment; 0.9.0
and 0.8.0 with the packages of constraints/verl.txt otherwise.
"""

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def judge(version: str, entry: Entry) -> Release:
    """Returns verl-slurm's verdict on `version`."""
    how = RELEASES.get(version, {}).get(entry)
    if how is not None:
        return Release(version, entry, "run", f"verl {version} ({entry}) was run under verl-slurm: {how}")
    match, (oldest, why) = _VERSION.match(version), OLDEST[entry]
    if match and tuple(int(part or 0) for part in match.groups()) < oldest:
        return Release(version, entry, "too_old", why)
    ran = ", ".join(known for known, entries in RELEASES.items() if entry in entries)
    line = f"verl {version} ({entry}) was never run under verl-slurm; these were: {ran}"
    return Release(version, entry, "unknown", line)


def require_usable(version: str, entry: Entry) -> Release:
    """Judges a release and refuses one that is too old.

    Raises:
        ConfigError: the release cannot be served.
    """
    release = judge(version, entry)
    if release.word == "too_old":
        oldest = ".".join(map(str, OLDEST[entry][0]))
        raise ConfigError(
            f"this release of verl cannot be run with trainer.entry: {entry}: {release.line}",
            where="verl",
            found=version,
            expected=f"{oldest} or newer",
            remedy=f"pip install verl=={next(iter(RELEASES))}",
        )
    return release
