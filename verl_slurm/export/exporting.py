"""Exports a checkpoint into files that other programs read: verified first, whole or not at all.

Order: look at `--out` → verify every byte → make a directory under a hidden name beside it → a child process with torch
(`verl_slurm.export.__main__`) fills that → fsync all → rename → fsync of the parent. Any failure before the rename
removes the directory, an interrupt and SIGTERM included; SIGKILL leaves it under its hidden name.
"""

import hashlib
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

from verl_slurm.base.errors import CheckpointCorrupt, DataError, VerlSlurmError
from verl_slurm.base.files import fsync_path
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.packages import require_packages
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.components import require_own
from verl_slurm.checkpoint.format.specification import CHAT_TEMPLATE, Manifest
from verl_slurm.checkpoint.inspect.contents import Look
from verl_slurm.checkpoint.store.catalog import unless_removed
from verl_slurm.checkpoint.store.run_config import keys_for
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config.roles import Role
from verl_slurm.dataset.fingerprint.data_record import fingerprint
from verl_slurm.dataset.fingerprint.entries import recorded_tree
from verl_slurm.dataset.prompts.chat_template import model_template, same_template
from verl_slurm.export.model_dir import is_small, small_digests
from verl_slurm.export.whole_output import require_free, whole_output

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
        is_first_model: `model` is where the run had it, and is refused if it has changed. Otherwise it is the user's
            choice, and keeps what it has.
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
    # The chat template that the tokenizer is given; None: it keeps its own.
    template: str | None = None

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
    """Result of an export.

    Attributes:
        prompts: how the run's prompts were rendered, and whether the export does it so.
        model: how the user's `--model` differs from the run's; empty: it does not.
        peak_bytes: of tensors, in memory at once.
    """

    out: str
    checkpoint: str
    to: Layout
    roles: tuple[Role, ...]
    dtype: str
    prompts: str
    model: str
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
        NotFound: there is no checkpoint, or it was removed meanwhile; or `out` has no parent directory.
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
    look = Look(directory, keys)
    manifest = look.manifest
    require_own(manifest, directory)
    progress(ExportProgress(phase="verify", total=manifest.num_bytes))
    # Every byte, before any is written: the child checks each chunk that it reads, but would find a fault in the
    # middle.
    remedy = "export one that does (`verl-slurm verify RUN`)"
    with unless_removed(directory):
        manifest = verify(directory, keys=keys).require("the checkpoint does not verify", directory, remedy)
        trained = _trained_template(look)
    progress(ExportProgress(phase="model"))
    frozen = RunPaths(directory.parent.parent).frozen
    differs = _differs(wish.model, manifest, frozen)
    if differs and wish.is_first_model:
        raise _changed(wish.model, manifest, differs, frozen)
    with unless_removed(directory), whole_output(out, "the export") as staging:
        order = ExportOrder(
            checkpoint=directory, digest=manifest.digest, staging=staging, key_file=key_file, wish=wish
        )
        # Files that the user chose in place of the run's are left as they are, and told.
        order = order if differs else msgspec.structs.replace(order, template=trained)
        peak = fill(order, progress)
        source = _template_source(look, trained)
        prompts = _rendering(staging, wish, trained, source)
        digest = trained and hashlib.sha256(trained.encode()).hexdigest()
        beside = {"prompts": prompts, "template": source, "template_sha256": digest, "model": differs}
        _record(staging, manifest, wish, beside)
        progress(ExportProgress(phase="sync"))
        num_files, num_bytes = _make_durable(staging)
    return Exported(
        out=str(out),
        checkpoint=manifest.name,
        to=wish.to,
        roles=wish.roles,
        dtype=wish.dtype,
        prompts=prompts,
        model=differs,
        num_files=num_files,
        num_bytes=num_bytes,
        peak_bytes=peak,
        seconds=round(time.monotonic() - started, 3),
    )


def _differs(model: Path, manifest: Manifest, frozen: Path) -> str:
    """Says how config and tokenizer in `model` differ from those that the run was started with; empty: not known to.

    Args:
        frozen: where the run keeps copies of its models, and their records (`RUN/frozen`).
    """
    expected = manifest.frozen.get("reference")
    if expected is None or not model.is_dir():
        return ""  # not recorded; the reader of a missing directory refuses it
    record = recorded_tree(frozen, expected)
    if record is not None:
        # By the files that an export takes: a copy may lack the weights, or have files where the model had links.
        ours = {name: entry.sha256 for name, entry in record.files.items() if is_small(name, entry.size)}
        theirs = small_digests(model)
        names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        return f"not the run's: other {', '.join(names)}" if names else ""
    try:
        found = fingerprint(model).digest
    except DataError as error:
        return f"not compared with the run's: {error.what}: {error.where}"
    return (
        "" if found == expected else f"not the run's: digest {found[:16]}, the run recorded {expected[:16]}"
    )


def _changed(model: Path, manifest: Manifest, differs: str, frozen: Path) -> DataError:
    copy = frozen / manifest.frozen["reference"]
    remedy = f"take the run's own copy: --model {shell_word(copy)}" if copy.is_dir() else "put it back"
    return DataError(
        "the base model has changed since the run started",
        where=model,
        found=differs,
        expected="config and tokenizer as the run recorded them",
        remedy=f"{remedy}; or say that these are right: --model {shell_word(model)}",
    )


def _trained_template(look: Look) -> str | None:
    """Returns the chat template that rendered the run's prompts; None: all of them were text."""
    if CHAT_TEMPLATE not in look.entries:
        return None
    try:
        return look.read(CHAT_TEMPLATE).decode()
    except ValueError as error:
        raise CheckpointCorrupt(
            "the run's chat template is no UTF-8 text",
            where=look.directory / CHAT_TEMPLATE,
            found=error,
            remedy="export the weights alone: --to single-file",
        ) from None


def _template_source(look: Look, trained: str | None) -> str | None:
    if trained is None:
        return None
    named = look.config().get("data.chat_template")
    source = "the base model" if named in ("auto", None) else f"data.chat_template ({named})"
    # The ranks give all attempts the date of the first start; a server gives today's.
    began = str(look.json("orchestration.json").get("began", ""))[:10] if "strftime_now" in trained else ""
    return source + (f", whose date was {began} in training" if began else "")


def _rendering(staging: Path, wish: Wish, trained: str | None, source: str | None) -> str:
    own = model_template(staging)
    if trained is None:
        return "text in training, by no chat template" + ("; the tokenizer has one" if own else "")
    if wish.to != "hf":
        return f"in training by the chat template of {source}; this layout has none"
    if same_template(own, trained):
        return f"as in training, by the chat template of {source}"
    kept = "another chat template" if own else "no chat template"
    return f"NOT as in training, by the chat template of {source}: --model has {kept}, which is kept"


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


def _record(staging: Path, manifest: Manifest, wish: Wish, beside: dict[str, str | None]) -> None:
    origin = {
        name: getattr(manifest, name)
        for name in ("name", "step", "safe_point", "phase", "attempt", "created_utc", "digest", "schema_id")
    }
    how = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(wish).items()}
    # They tell about this command, and not about the files.
    del how["out"], how["is_first_model"]
    text = json.dumps(
        {"checkpoint": origin, "export": how, "beside_weights": beside}, indent=1, sort_keys=True
    )
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
