"""The part of `verl-slurm export` that needs torch: fills a directory that somebody else makes and renames.

`exporting` starts `python -m verl_slurm.export` after it has verified the checkpoint, with an `ExportOrder` on standard
input. Standard output holds JSON lines: `{"total": n, "peak": n}` once, `{"done": n}` now and then (bytes of the
checkpoint), and at the end `{"ok": true}` or `{"error": {...}, "exit_code": n}`. If their reader is gone, writing them
ends the process.
"""

import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from transformers.utils import logging as hf_logging

from verl_slurm.base.errors import CheckpointCorrupt, PermissionRefused, VerlSlurmError
from verl_slurm.checkpoint.inspect.contents import Look
from verl_slurm.checkpoint.store.run_config import keys_for
from verl_slurm.config.roles import Role
from verl_slurm.export.exporting import ExportOrder, read_order
from verl_slurm.export.hf import plan_shards, write_hf
from verl_slurm.export.layouts import largest_file, moments_bytes, write_layout
from verl_slurm.export.model_dir import take_small_files
from verl_slurm.export.skeleton import Skeleton, build_skeleton, check_fit
from verl_slurm.export.source import ExportSource, cast_bytes

_DTYPES = {"keep": None, "float32": torch.float32, "bfloat16": torch.bfloat16}

# In the staging directory during the work: the files taken from the base model.
_MODEL = ".model"


def work(order: ExportOrder, say: Callable[[object], Any]) -> None:
    """Fills the staging directory; `say` is given the lines of standard output."""
    wish, keys = order.wish, keys_for(order.checkpoint, order.key_file)
    # Between the verification and this another checkpoint may have taken the name.
    # A `Look`: an error of the checkpoint's storage is told as that. Any other OSError is one of the output.
    reader = Look(order.checkpoint, keys)
    if reader.manifest.digest != order.digest:
        raise CheckpointCorrupt("the checkpoint has changed since it was verified", where=order.checkpoint)
    dtype = _DTYPES[wish.dtype]
    source = ExportSource(reader, report=lambda done: say({"done": done}))
    skeletons: dict[Role, Skeleton] = {}
    model = order.staging / _MODEL
    model.mkdir(mode=0o700)
    # Libraries see these copies alone: the model directory may be another user's, and change.
    take_small_files(wish.model, model)
    for role in wish.roles:
        entries = source.entries(role)
        skeletons[role] = build_skeleton(model, role, len(entries), where=wish.model)
        # For all roles before the first tensor is read: a wrong model is told in seconds.
        check_fit(skeletons[role], entries, where=order.checkpoint / role)
    roles: list[Role] = list(skeletons)
    total = sum(entry.num_bytes for role in roles for entry in source.entries(role).values())
    if wish.to == "hf":
        role = roles[0]
        entries = source.entries(role)
        shards = plan_shards(source, role, skeletons[role], dtype)
        # One shard is in memory at a time, and the largest one decides.
        peak = max(sum(cast_bytes(entries[name], dtype) for name in names) for names in shards.values())
        say({"total": total, "peak": peak})
        write_hf(
            source,
            role,
            skeletons[role],
            model,
            order.staging,
            dtype=dtype,
            where=wish.model,
            template=order.template,
        )
    else:
        total += moments_bytes(source, roles)
        say({"total": total, "peak": largest_file(source, roles, dtype)})
        write_layout(
            source,
            wish.to,
            skeletons,
            order.staging,
            dtype=dtype,
            weight_decay=wish.weight_decay,
        )
    # These copies served the libraries, and are no part of the export.
    shutil.rmtree(model)


def answer(order: ExportOrder, say: Callable[[object], Any]) -> int:
    """Does the export and reports how it ended; returns the exit code."""
    try:
        try:
            work(order, say)
        # The parent cannot see an errno: here it becomes the error that a user reads.
        except OSError as error:
            raise PermissionRefused(
                "the export could not be written",
                where=error.filename or order.staging.parent,
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


def main() -> int:
    """Runs `answer` and writes its reports to standard output as JSON lines."""
    # A library that prints must not write between our lines.
    lines = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return answer(
        read_order(sys.stdin.buffer.read()), lambda value: lines.write(msgspec.json.encode(value) + b"\n")
    )


if __name__ == "__main__":
    sys.exit(main())
