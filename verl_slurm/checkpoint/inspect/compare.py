"""Compares two checkpoints bit for bit, in a process of its own, because the comparison needs torch.

`verl_slurm.save.ranks.compare` verifies both before it opens them, then compares every tensor of models and optimizers
and the runtime state of every rank. Where a framework wrote the files, the files themselves are compared, here and
without torch.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from verl_slurm.base.errors import CheckpointCorrupt, ConfigError, KeyRefused, NotFound, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.packages import require_packages
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.specification import Manifest
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.verify import read_manifest, verify


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a comparison."""

    a: str
    b: str
    num_tensors: int
    num_bytes: int
    differing: list[str]
    """Names of the tensors and states that differ; empty: all are the same."""
    num_files: int = 0
    """Number of files compared byte by byte, where a framework wrote them; `differing` then names files."""

    @property
    def same(self) -> bool:
        return not self.differing


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    num_tensors: int
    num_bytes: int
    differing: list[str]


def newest_checkpoint(run: Path) -> Path:
    """Returns the newest committed checkpoint of a run.

    Raises:
        NotFound: it has none.
    """
    committed = [i.path for i in list_checkpoints(RunPaths(run)) if i.kind == "committed"]
    if not committed:
        raise NotFound(
            "the run has no checkpoint yet", where=run, remedy=f"verl-slurm status {shell_word(run)}"
        )
    return committed[0].resolve()


def compare(a: Path, b: Path, key_file: Path | None = None) -> Comparison:
    """Compares two checkpoint directories.

    Args:
        key_file: the key of both, if it is not the one that their runs are configured with.

    Raises:
        KeyRefused: they are encrypted, and the key is missing or another one.
        CheckpointCorrupt: one of them does not verify.
        ConfigError: they come from two kinds of loops.
        VerlSlurmError: the comparison itself failed, or a package is missing.
    """
    # Before torch is asked for: files of a framework are compared without it.
    if guests := [manifest for side in (a, b) if (manifest := _of_a_guest(side)) is not None]:
        return _compare_guests(a, b, guests)
    require_packages("torch", "numpy", wanted_by="comparing tensors")
    more = [] if key_file is None else ["--key-file", str(key_file)]
    # -P: no module of the working directory, which may be anybody's, is imported.
    command = [sys.executable, "-P", "-m", "verl_slurm.save.ranks.compare", str(a), str(b), "--json", *more]
    with torch_environment() as environment:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=environment
        )
    try:
        answer = msgspec.json.decode(done.stdout, type=_Answer)
    except msgspec.MsgspecError:
        # No answer: what went wrong is told by the exit code and the last line of stderr.
        raise _broken(done) from None
    return Comparison(
        a=str(a),
        b=str(b),
        num_tensors=answer.num_tensors,
        num_bytes=answer.num_bytes,
        differing=answer.differing,
    )


@contextmanager
def torch_environment() -> Iterator[dict[str, str]]:
    """Builds the environment of a child that imports torch, with a compile cache of its own, which is removed
    afterwards.
    """
    # torch's default is /tmp/torchinductor_USER, which another user may have made before. tokenizers gets one thread,
    # so that the child's memory does not depend on the machine.
    with tempfile.TemporaryDirectory(prefix="verl-slurm-torch-") as cache:
        yield {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TOKENIZERS_PARALLELISM": "false"}


def _of_a_guest(directory: Path) -> Manifest | None:
    """Returns its manifest, if a framework wrote its files. None also if it cannot be read: that is told later."""
    try:
        manifest = read_manifest(directory)
    # Not judged here: the comparing process verifies both and names the fault.
    except (OSError, VerlSlurmError):
        return None
    return None if manifest.guest is msgspec.UNSET or manifest.domains else manifest


def _compare_guests(a: Path, b: Path, manifests: list[Manifest]) -> Comparison:
    if len({manifest.guest for manifest in manifests}) != 1 or len(manifests) != 2:
        raise ConfigError(
            "checkpoints of two kinds of loops cannot be compared",
            where=a,
            found=", ".join(str(manifest.guest) for manifest in manifests),
            expected="both of one trainer.backend",
        )
    for side in (a, b):
        verdict = verify(side)
        if not verdict.ok:
            # In the words of the comparing process: `found` is the whole sentence.
            told = f"a checkpoint to compare does not verify: {side}: {verdict.one_line()}"
            raise CheckpointCorrupt("a checkpoint to compare does not verify", found=told)
    left, right = (
        {entry.path: entry for entry in manifest.files if _is_state(entry.path)} for manifest in manifests
    )
    # Both have just been verified, so equal entries mean equal bytes.
    differing = [path for path in sorted(left.keys() | right.keys()) if left.get(path) != right.get(path)]
    num_bytes = sum(entry.size for entry in left.values())
    return Comparison(
        a=str(a), b=str(b), num_tensors=0, num_bytes=num_bytes, differing=differing, num_files=len(left)
    )


def _is_state(path: str) -> bool:
    """Returns whether a guest's file holds state."""
    # torch.distributed.checkpoint gives each save a number of its own in `.metadata`.
    return "/" in path and not path.endswith("/.metadata")


def _broken(done: "subprocess.CompletedProcess[bytes]") -> VerlSlurmError:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    said = lines[-1] if lines else f"exit code {done.returncode}"
    if done.returncode == ExitCode.KEY:
        return KeyRefused("the checkpoints do not open", found=said)
    if done.returncode == ExitCode.CORRUPT:
        return CheckpointCorrupt(
            "a checkpoint to compare does not verify", found=said, remedy="see `verl-slurm verify`"
        )
    return VerlSlurmError("the comparison broke", found=said, remedy="report it with both `verify` outputs")
