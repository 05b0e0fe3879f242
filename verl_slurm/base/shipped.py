"""Finds files that ship beside the code: examples, batch scripts, documentation, tested versions.

In a checkout they lie in its root. pip installs them below `share/verl-slurm/` of the environment.
"""

import os
import re
from pathlib import Path

_MENTION = re.compile(r"(?<![\w./-])(?:docs|configs|sbatch|constraints)/[\w/-]+\.(?:md|yaml|py|sbatch|txt)")


def shipped(name: str) -> str:
    """The absolute path of a file of the checkout, or of what pip installed of it; where there is neither, `name`."""
    above, installed = Path(__file__).resolve().parents[2], f"share/verl-slurm/{name}"
    # The checkout; then `pip install --target`, which records other places than it installs to.
    places = [above / name, above / installed]
    if not any(place.is_file() for place in places):
        from importlib import metadata

        try:
            files = metadata.files("verl-slurm") or []
        except metadata.PackageNotFoundError:
            return name
        places = [Path(str(file.locate())) for file in files if file.as_posix().endswith(installed)]
    return next((os.path.realpath(place) for place in places if place.is_file()), name)


def examples() -> list[str]:
    """Lists the names of shipped configurations that `submit` takes, e.g. `quickstart`."""
    place = Path(shipped("configs/quickstart.yaml")).parent
    return sorted(path.stem for path in place.glob("*.yaml"))


def example(word: str) -> Path | None:
    """Returns the shipped configuration of that name; None if there is none."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", word):
        return None
    # Before a file of that name in the working directory, which may be another user's.
    found = Path(shipped(f"configs/{word}.yaml"))
    return found if found.is_file() else None


def with_places(text: str) -> str:
    """Returns `text` with the path from here of every shipped file that it names, such as `docs/doctor.md`."""
    return _MENTION.sub(lambda found: found[0] if Path(found[0]).exists() else shipped(found[0]), text)
