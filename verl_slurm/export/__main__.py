"""The part of `verl-slurm export` that needs torch: fills a directory that somebody else makes and renames.

`checkpoint.inspect.export` starts `python -m verl_slurm.export --checkpoint DIR --digest D --to hf --model DIR
--staging DIR ...` after it has verified the checkpoint. D is the digest of the manifest that it verified, so that no
other directory is opened here by mistake. Standard output holds JSON lines: `{"total": n, "peak": n}` once, `{"done":
n}` now and then (bytes of the checkpoint), and at the end `{"ok": true}` or `{"error": {...}, "exit_code": n}`. If
their reader is gone, writing them ends the process.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers.utils import logging as hf_logging

from verl_slurm.base.errors import CheckpointCorrupt, PermissionRefused, VerlSlurmError
from verl_slurm.checkpoint.store.run_config import keys_for
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.export.hf import plan_shards, write_hf
from verl_slurm.export.layouts import largest_file, moments_bytes, write_layout
from verl_slurm.export.model_dir import take_small_files
from verl_slurm.export.skeleton import Role, Skeleton, build_skeleton, check_fit
from verl_slurm.export.source import ExportSource, cast_bytes

_DTYPES = {"keep": None, "float32": torch.float32, "bfloat16": torch.bfloat16}

_MODEL = ".model"
"""In the staging directory during the work: the files taken from the base model."""


def _run(options: argparse.Namespace, say: Callable[[object], Any]) -> None:
    keys = keys_for(options.checkpoint, options.key_file)
    # Between the verification and this another checkpoint may have taken the name.
    if read_manifest(options.checkpoint, keys=keys).digest != options.digest:
        raise CheckpointCorrupt("the checkpoint has changed since it was verified", where=options.checkpoint)
    dtype = _DTYPES[options.dtype]
    source = ExportSource(options.checkpoint, report=lambda done: say({"done": done}), keys=keys)
    skeletons: dict[Role, Skeleton] = {}
    model = options.staging / _MODEL
    model.mkdir(mode=0o700)
    # Libraries see these copies alone: the model directory may be another user's, and change.
    take_small_files(options.model, model)
    for role in options.roles:
        entries = source.entries(role)
        skeletons[role] = build_skeleton(model, role, len(entries), where=options.model)
        # For all roles before the first tensor is read: a wrong model is told in seconds.
        check_fit(skeletons[role], entries, where=options.checkpoint / role)
    roles: list[Role] = list(skeletons)
    total = sum(entry.num_bytes for role in roles for entry in source.entries(role).values())
    if options.to == "hf":
        role = roles[0]
        entries = source.entries(role)
        shards = plan_shards(source, role, skeletons[role], dtype)
        # One shard is in memory at a time, and the largest one decides.
        peak = max(sum(cast_bytes(entries[name], dtype) for name in names) for names in shards.values())
        say({"total": total, "peak": peak})
        write_hf(source, role, skeletons[role], model, options.staging, dtype=dtype, where=options.model)
    else:
        total += moments_bytes(source, roles)
        say({"total": total, "peak": largest_file(source, roles, dtype)})
        write_layout(
            source,
            options.to,
            skeletons,
            options.staging,
            dtype=dtype,
            weight_decay=options.weight_decay,
        )
    # These copies served the libraries, and are no part of the export.
    shutil.rmtree(model)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the words that `checkpoint.inspect.export` passes."""
    words = argparse.ArgumentParser(prog="verl_slurm.export", description=__doc__.splitlines()[0])
    for name in ("checkpoint", "model", "staging"):
        words.add_argument(f"--{name}", type=Path, required=True)
    words.add_argument("--digest", required=True)
    words.add_argument("--key-file", type=Path)
    words.add_argument("--to", choices=("hf", "single-file", "split"), required=True)
    words.add_argument("--dtype", choices=tuple(_DTYPES), required=True)
    words.add_argument("--weight-decay", type=float, default=0.0)
    words.add_argument("--roles", nargs="+", choices=("actor", "critic"), required=True)
    return words


def answer(options: argparse.Namespace, say: Callable[[object], Any]) -> int:
    """Does the export and reports how it ended; returns the exit code."""
    try:
        try:
            _run(options, say)
        # The parent cannot see an errno: here it becomes the error that a user reads.
        except OSError as error:
            raise PermissionRefused(
                "the export could not be written",
                where=error.filename or options.staging.parent,
                found=error.strerror or error,
                remedy="make room or choose another --out",
            ) from error
    # By its parts: the parent makes the same error of them, and adds nothing.
    except VerlSlurmError as error:
        facts = {name: getattr(error, name) for name in ("what", "where", "found", "expected", "remedy")}
        shown = {name: None if value is None else str(value) for name, value in facts.items()}
        say({"error": shown, "exit_code": int(error.exit_code)})
        return int(error.exit_code)
    say({"ok": True})
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs `answer` and writes its reports to standard output as JSON lines."""
    options = parser().parse_args(argv)
    # A library that prints must not write between our lines.
    lines = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return answer(options, lambda value: lines.write(msgspec.json.encode(value) + b"\n"))


if __name__ == "__main__":
    sys.exit(main())
