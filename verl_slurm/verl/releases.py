"""Lists the releases of verl that were run under verl-slurm, judges the others, and finds the installed one.

The hooks depend on little: SFT on `SFTTrainer`, its `training_client.train_batch` and its `ckpt_handler`; PPO on
`register_trainer`, the v1 trainers' `on_step_end` and `_save_checkpoint`. Where these are missing, a run ends at its
start. Only running a release shows that a run with them is right, and this is the list.

verl itself is not imported, neither by submit nor at a start.
"""

import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl_slurm.base.errors import ConfigError

__all__ = ["OLDEST", "RELEASES", "Release", "installed_verl", "judge", "require_installed", "require_usable"]

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
    # Before the oldest: what was run is served, whatever the comparison of numbers says.
    how = RELEASES.get(version, {}).get(entry)
    if how is not None:
        return Release(version, entry, "run", f"verl {version} ({entry}) was run under verl-slurm: {how}")
    match, (oldest, why) = _VERSION.match(version), OLDEST[entry]
    # A version that is no number, such as a checkout's, is not called too old: it is unknown.
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


def installed_verl() -> str | None:
    """Returns the version of verl in this Python, which is the job's; None: there is none. verl is not imported."""
    try:
        return importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        pass
    # A checkout has no distribution's metadata. submit and every start ask here, so that they give the same answer.
    spec = importlib.util.find_spec("verl")  # a checkout on PYTHONPATH
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        try:
            return (Path(place) / "version" / "version").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
    return None


def require_installed(entry: Entry, version: str | None) -> Release:
    """Returns the known facts of the installed release.

    Args:
        version: `installed_verl()`.

    Raises:
        ConfigError: there is none, or one that cannot be served.
    """
    if version is None:
        pip = f"{sys.executable} -m pip install verl=={next(iter(RELEASES))}"
        raise ConfigError(
            "verl is not installed in the Python that the job runs",
            where=sys.executable,
            expected="the package verl",
            remedy=f"{pip}, or submit from the environment that has it",
        )
    return require_usable(version, entry)
