"""Exports a checkpoint into files that other programs read: verified first, whole or not at all.

Order: look at `--out` → verify every byte → make a directory under a hidden name beside it → a child process with torch
(`verl_slurm.export.__main__`) fills that → fsync all → rename → fsync of the parent. Any failure before the rename
removes the directory, an interrupt and SIGTERM included; SIGKILL leaves it under its hidden name.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from verl_slurm.base.errors import DataError, VerlSlurmError
from verl_slurm.base.files import fsync_path
from verl_slurm.base.packages import require_packages
from verl_slurm.checkpoint.format.components import require_own
from verl_slurm.checkpoint.format.specification import Manifest
from verl_slurm.checkpoint.inspect.contents import Look
from verl_slurm.checkpoint.store.run_config import keys_for
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.checkpoint.store.whole_output import require_free, whole_output
from verl_slurm.config.roles import Role
from verl_slurm.dataset.fingerprint.data_record import fingerprint

Layout = Literal["hf", "single-file", "split"]

RECORD = "verl_slurm_export.json"
"""Part of every export: names its checkpoint and how it was made."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A request for an export.

    Attributes:
        out: does not exist, or is an empty directory; its parent exists.
        roles: for `hf` one, for the others one or both.
        model: the base model's directory, for config and tokenizer.
        is_first_model: compare `model` with the digest that the run recorded at its start.
    """

    to: Layout
    out: Path
    roles: tuple[Role, ...]
    dtype: Literal["keep", "float32", "bfloat16"]
    model: Path
    is_first_model: bool
    weight_decay: float


class ExportOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is told, on its standard input; `staging`: the directory that it fills."""

    checkpoint: Path
    # Of the manifest that was verified: the child refuses another one that has taken its place.
    digest: str
    staging: Path
    key_file: Path | None
    wish: Wish

    def render(self) -> bytes:
        """Returns it as JSON."""
        return msgspec.json.encode(self, enc_hook=str)


def read_order(data: bytes) -> ExportOrder:
    """Returns what `ExportOrder.render` wrote."""
    return msgspec.json.decode(data, type=ExportOrder, dec_hook=lambda kind, value: kind(value))


@dataclass(frozen=True, kw_only=True)
class ExportProgress:
    """Progress in bytes of the checkpoint; `peak`: of tensors in memory at once."""

    phase: Literal["verify", "model", "load", "write", "sync"]
    done: int = 0
    total: int = 0
    peak: int = 0


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export; `peak_bytes`: of tensors, in memory at once."""

    out: str
    checkpoint: str
    to: Layout
    roles: tuple[Role, ...]
    dtype: str
    num_files: int
    num_bytes: int
    peak_bytes: int
    seconds: float


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    total: int | None = None
    peak: int = 0
    done: int | None = None
    ok: bool = False
    error: dict[str, str | None] | None = None
    exit_code: int = 0


def export(
    directory: Path,
    wish: Wish,
    progress: Callable[[ExportProgress], None] = lambda _: None,
    *,
    key_file: Path | None = None,
) -> Exported:
    """Exports one checkpoint directory; `key_file`: the key to open it with, if not its run's own.

    Raises:
        PermissionRefused: `out` holds something, or the storage refused.
        NotFound: there is no checkpoint, or `out` has no parent directory.
        CheckpointCorrupt: the checkpoint does not verify.
        DataError: the base model is not the run's, or lacks config or tokenizer.
        SchemaMismatch: another version laid out the state.
        KeyRefused: it needs a key that is missing.
    """
    started = time.monotonic()
    # All that can be refused without reading tensors comes first.
    require_packages("torch", "transformers", "safetensors", wanted_by="export")
    # Resolve the parent's links, not `out` itself: a rename would replace a link.
    out = wish.out.parent.resolve() / wish.out.name
    require_free(out, directory, "an export")
    keys = keys_for(directory, key_file)
    manifest = Look(directory, keys).manifest
    require_own(manifest, directory)
    progress(ExportProgress(phase="verify", total=manifest.num_bytes))
    # Every byte, before any is written: the child checks each chunk that it reads, but would find a fault in the
    # middle.
    remedy = "export one that does (`verl-slurm verify RUN`)"
    manifest = verify(directory, keys=keys).require("the checkpoint does not verify", directory, remedy)
    if wish.is_first_model:
        progress(ExportProgress(phase="model"))
        _require_first_model(wish.model, manifest)
    with whole_output(out, "the export") as staging:
        order = ExportOrder(
            checkpoint=directory, digest=manifest.digest, staging=staging, key_file=key_file, wish=wish
        )
        peak = fill(order, progress)
        _record(staging, manifest, wish)
        progress(ExportProgress(phase="sync"))
        num_files, num_bytes = _make_durable(staging)
    return Exported(
        out=str(out),
        checkpoint=manifest.name,
        to=wish.to,
        roles=wish.roles,
        dtype=wish.dtype,
        num_files=num_files,
        num_bytes=num_bytes,
        peak_bytes=peak,
        seconds=round(time.monotonic() - started, 3),
    )


def _require_first_model(model: Path, manifest: Manifest) -> None:
    """Requires the config and tokenizer that the run was started with, as far as it recorded them."""
    expected = manifest.frozen.get("reference")
    if expected is None or not model.is_dir():
        return  # not recorded; the reader of a missing directory refuses it
    found = fingerprint(model).digest
    if found != expected:
        raise DataError(
            "the base model has changed since the run started",
            where=model,
            found=f"digest {found[:16]}",
            expected=expected[:16],
            remedy=f"put it back, or say that its config and tokenizer are right: --model {model}",
        )


@contextmanager
def torch_environment() -> Iterator[dict[str, str]]:
    """Builds the environment of a child that imports torch; its compile cache is removed afterwards."""
    # torch's default is /tmp/torchinductor_USER, which another user may have made before. tokenizers gets one thread,
    # so that the child's memory does not depend on the machine.
    with tempfile.TemporaryDirectory(prefix="verl-slurm-torch-") as cache:
        yield {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TOKENIZERS_PARALLELISM": "false"}


def fill(order: ExportOrder, progress: Callable[[ExportProgress], None]) -> int:
    """Lets the child write; returns the bytes of tensors that it holds in memory at once."""
    progress(ExportProgress(phase="load"))
    # stderr goes to a file: it is read when the child has ended, and a full pipe would stop the child before.
    with (
        torch_environment() as environment,
        tempfile.TemporaryFile() as words,
        tempfile.TemporaryFile() as told,
    ):
        told.write(order.render())
        told.seek(0)
        # -P: without it Python would look for modules in the working directory first, which may be anybody's.
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "verl_slurm.export"],
            stdin=told,
            stdout=subprocess.PIPE,
            stderr=words,
            env=environment,
        )
        assert child.stdout is not None
        last = _Line()
        total = peak = 0
        try:
            # Ends when the child has closed its output, however it ended.
            for raw in child.stdout:
                last = _parsed(raw)
                if last.total is not None:
                    total, peak = last.total, last.peak
                if last.total is not None or last.done is not None:
                    progress(ExportProgress(phase="write", done=last.done or 0, total=total, peak=peak))
            child.wait()
        finally:
            # `progress` raised, or a signal came: the child must not write into a directory that is being removed.
            if child.poll() is None:
                child.kill()
            child.wait()
            child.stdout.close()
        # Its own words first: with an error it also leaves with another exit code.
        if last.error is not None:
            raise _as_error(last)
        # The last line counts as well: a library that ends the process with 0 leaves half an export.
        if child.returncode != 0 or not last.ok:
            raise _broken(child.returncode, words)
    return peak


def _parsed(raw: bytes) -> _Line:
    try:
        return msgspec.json.decode(raw, type=_Line)
    except msgspec.MsgspecError:
        # A line that is none of ours counts as silence: without `ok` the export fails in the end.
        return _Line()


def _as_error(line: _Line) -> VerlSlurmError:
    facts: dict[str, Any] = dict(line.error or {})
    # The child passes an error as its exit code and its parts; the class is found again here.
    kinds = VerlSlurmError.__subclasses__()
    kind = next((kind for kind in kinds if int(kind.exit_code) == line.exit_code), VerlSlurmError)
    return kind(facts.pop("what", None) or "the export broke", **facts)


def _broken(returncode: int, words: IO[bytes]) -> VerlSlurmError:
    # The last line of stderr usually names the cause.
    words.seek(0)
    lines = words.read().decode(errors="replace").strip().splitlines()
    # `skeleton.bounded_work` has the kernel end the child by this signal.
    if returncode == -signal.SIGXCPU:
        return DataError(
            "the base model's config or tokenizer keeps a library busy without end",
            found="more CPU time than any good one takes",
            remedy="name another directory of the base model with --model DIR",
        )
    killed = f"killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"
    hint = "more memory, or a layout of smaller files: --to hf" if returncode == -signal.SIGKILL else None
    return VerlSlurmError(
        "the export broke", found=f"{killed}: {lines[-1]}" if lines else killed, remedy=hint or "report it"
    )


def _record(staging: Path, manifest: Manifest, wish: Wish) -> None:
    origin = {
        name: getattr(manifest, name)
        for name in ("name", "step", "safe_point", "phase", "attempt", "created_utc", "digest", "schema_id")
    }
    how = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(wish).items()}
    # They tell about this command, and not about the files.
    del how["out"], how["is_first_model"]
    text = json.dumps({"checkpoint": origin, "export": how}, indent=1, sort_keys=True)
    (staging / RECORD).write_text(text + "\n")


def _make_durable(staging: Path) -> tuple[int, int]:
    """Sets the modes of all of it and fsyncs it; returns the number of files and their bytes."""
    num_files = num_bytes = 0
    # What is in a directory comes before it: its fsync makes the names in it durable.
    for path in sorted(staging.rglob("*"), reverse=True):
        path.chmod(0o700 if path.is_dir() else 0o600)
        fsync_path(path)
        if path.is_file():
            num_files, num_bytes = num_files + 1, num_bytes + path.stat().st_size
    fsync_path(staging)
    return num_files, num_bytes
