"""Finds the newest checkpoint of a run by its name and its manifest's own words, for tools that scan a thousand runs.

The manifest's digest and paths are not checked here: `catalog.list_checkpoints` does that, at fifty times the cost, and
`verify` reads the files. So this result alone must not decide what is resumed, copied or dropped.
"""

import os

import msgspec

from verl_slurm.base import bounded
from verl_slurm.base.errors import UNREADABLE
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.checkpoint.format.specification import MANIFEST


class _File(msgspec.Struct):
    size: int


class _Manifest(msgspec.Struct):
    step: int
    safe_point: int
    created_utc: str
    files: list[_File]
    components: list[str] = []


class Newest(msgspec.Struct, frozen=True):
    """The newest checkpoint's own description."""

    name: str
    step: int
    safe_point: int
    created_utc: str
    num_bytes: int


_DECODER = msgspec.json.Decoder(_Manifest)


def newest_checkpoint(paths: RunPaths) -> Newest | None:
    """Returns the checkpoint with the highest step whose manifest can be read. Reads one manifest, if that one is good.

    Raises:
        OSError: the directory of checkpoints cannot be read.
    """
    try:
        # One listing and one small file: `list` asks a thousand runs.
        names = os.listdir(paths.checkpoints)
    except FileNotFoundError:
        return None
    found = [match for name in names if (match := CHECKPOINT_NAME.fullmatch(name))]
    # By the numbers, since `step_9` and a name without a safe point sort wrongly as text.
    for match in sorted(found, key=lambda one: (int(one[1]), int(one[2] or 0)), reverse=True):
        manifest = _read(f"{paths.checkpoints}/{match[0]}/{MANIFEST}")
        # A partial one that was copied here is no state to resume from.
        if manifest is not None and not manifest.components:
            size = sum(file.size for file in manifest.files)
            return Newest(match[0], manifest.step, manifest.safe_point, manifest.created_utc, size)
    return None


def _read(path: str) -> _Manifest | None:
    try:
        data = bounded.read_regular(path, bounded.MANIFEST)
        # Before it is decoded: small JSON can become a multiple of its size in objects.
        bounded.check_json(data, bounded.MANIFEST)
        return _DECODER.decode(data)
    except (OSError, *UNREADABLE):
        return None
