"""Which releases of verl were run under verl-slurm, and what is said about the others. Pure.

The hooks hold on to little: SFT to `SFTTrainer`, its `training_client.train_batch` and its `ckpt_handler`; PPO to
`register_trainer` and `checkpoint_callback_class`. That these are still there is checked at the start of each run; that
a run with them is bit for bit what it should be is known of a release only by running it, and this is the list.
"""

import re
from dataclasses import dataclass
from typing import Literal

from verl_slurm.errors import ConfigError

__all__ = ["OLDEST", "RELEASES", "Release", "judge", "require_usable"]

Entry = Literal["sft", "ppo"]
Word = Literal["run", "known", "unknown", "too_old"]


@dataclass(frozen=True)
class Release:
    """What is known of one release and one entry.

    Attributes:
        word: `run`: its tests pass with it. `known`: its source was read and the hooks are in it, nobody ran it.
            `unknown`: neither. `too_old`: the hooks are not in it.
        line: for people.
    """

    version: str
    entry: Entry
    word: Word
    line: str


OLDEST = (0, 8)
"""The first with `verl.trainer.sft_trainer` as we subclass it and the v1 trainers."""

RELEASES: dict[str, dict[Entry, tuple[Word, str]]] = {
    "0.9.1": {
        "sft": ("run", "killed, preempted and resumed, bit for bit"),
        "ppo": ("run", "preempted and resumed"),
    },
}
"""By version: what was done with it."""

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def judge(version: str, entry: Entry) -> Release:
    """What verl-slurm knows of `version`.

    Called by: submit's checks (where verl is installed on the login node) and the trainers' entries.
    """
    found = RELEASES.get(version, {}).get(entry)
    if found is not None:
        word, how = found
        return Release(version, entry, word, f"verl {version} ({entry}): {how}")
    match = _VERSION.match(version)
    if match and (int(match[1]), int(match[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return Release(
            version, entry, "too_old", f"verl {version} has not what verl-slurm holds on to; {oldest} has"
        )
    ran = ", ".join(v for v in RELEASES if RELEASES[v].get(entry, ("",))[0] == "run") or "none"
    line = f"verl {version} ({entry}) was never run under verl-slurm; these were: {ran}"
    return Release(version, entry, "unknown", line)


def require_usable(version: str, entry: Entry) -> Release:
    """`judge`, and no run with a release that is too old.

    Raises:
        ConfigError: the release cannot be served.
    """
    release = judge(version, entry)
    if release.word == "too_old":
        raise ConfigError(
            "this release of verl cannot be run",
            where="verl",
            found=version,
            expected=f"{'.'.join(map(str, OLDEST))} or newer",
            remedy="pip install verl==0.9.1, or set trainer.backend: native",
        )
    return release
