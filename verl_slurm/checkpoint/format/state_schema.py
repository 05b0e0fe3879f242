"""The schema lock: describes the layout of saved state, and tells whether this code can read it.

`schema_version.json` holds a signature of each class of saved state: its fields and their types. The schema id is the
SHA-256 of the canonical JSON of those signatures. The code version is recorded but not compared, since most versions
change no layout. Limits (`msgspec.Meta`) are no part of a type: they guard readers, not layout.

Another layout is refused with the exact differences, unless `OLDER_LAYOUTS` says that this code reads it unchanged. No
saved state is rewritten to fit.
"""

import hashlib
import types
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from verl_slurm import __version__
from verl_slurm.base import bounded
from verl_slurm.base.errors import CheckpointCorrupt, SchemaMismatch
from verl_slurm.checkpoint.format.manifest import canonical
from verl_slurm.checkpoint.format.specification import SCHEMA_VERSION, FileEntry, Manifest, Topology
from verl_slurm.runtime_state.format import ArraySpec, RuntimeState

# Describes what the trainer saves beside these structs. Change the text when the meaning or layout changes: every older
# checkpoint is then refused instead of being misread.
TRAINER_COMPONENTS: dict[str, dict[str, str]] = {
    "trainer.actor": {"parameters": "tensor by qualified name, boxes in raw files (tensor_index)"},
    "trainer.critic": {"parameters": "tensor by qualified name, boxes in raw files (tensor_index)"},
    "trainer.optimizer": {
        "actor": "AdamW by role.parameter.key: step, exp_avg, exp_avg_sq",
        "critic": "AdamW by role.parameter.key: step, exp_avg, exp_avg_sq",
    },
    "trainer.scheduler": {
        "actor": "schedule, warmup_steps, decay_steps, min_ratio, base_lr, step, lr",
        "critic": "schedule, warmup_steps, decay_steps, min_ratio, base_lr, step, lr",
    },
    "trainer.sampling": {"noise": "Philox, key (run seed, step, sample id, sample index), counter position"},
    "trainer.step": {
        "phases": "generate score advantage update evaluate step_end",
        "micro_batch": "i * world + rank",
    },
}

# A change of a field here changes the schema id, so older checkpoints are refused unless OLDER_LAYOUTS has theirs.
_STRUCTS: tuple[type[msgspec.Struct], ...] = (
    ArraySpec,
    FileEntry,
    Manifest,
    RuntimeState,
    Topology,
)


class SchemaVersion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the content of schema_version.json."""

    code_version: str
    schema_id: str
    classes: dict[str, dict[str, str]]
    """Class → field → type."""


class OlderLayout(NamedTuple):
    """An older layout that newer code reads unchanged."""

    schema_id: str
    read_by: str
    """The schema id of that code. A change of the layout requires a new look at each entry."""
    why: str


OLDER_LAYOUTS: tuple[OlderLayout, ...] = ()
"""A test compares these entries with the layout of this code."""


def current_schema() -> SchemaVersion:
    """Returns the schema of this code."""
    return schema_of({c.__name__: _signature(c) for c in _STRUCTS} | TRAINER_COMPONENTS)


def schema_of(classes: dict[str, dict[str, str]], code_version: str = __version__) -> SchemaVersion:
    """Returns the schema with these classes; the id follows from them."""
    # Canonical: the id must not depend on the order in which classes or fields are listed.
    digest = hashlib.sha256(canonical(classes)).hexdigest()
    return SchemaVersion(code_version=code_version, schema_id=digest, classes=classes)


def render_schema(schema: SchemaVersion) -> bytes:
    """Returns the bytes of schema_version.json."""
    return msgspec.json.format(msgspec.json.encode(schema, order="sorted"), indent=1) + b"\n"


def parse_schema(data: bytes, *, where: object) -> SchemaVersion:
    """Parses the schema. CheckpointCorrupt: it does not decode, or its id is not that of its classes."""
    try:
        schema = bounded.decode_json(data, SchemaVersion, bounded.SMALL)
        # The id decides whether the state is read, and the classes explain a refusal: they must belong together.
        expected = schema_of(schema.classes).schema_id
        if schema.schema_id != expected:
            raise ValueError(f"schema id {schema.schema_id}, its classes give {expected}")
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise _unreadable(where, error) from error
    return schema


def _unreadable(where: object, error: Exception) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "the schema file cannot be read",
        where=where,
        found=error,
        remedy="resume from another checkpoint (verl-slurm list RUN)",
    )


def read_schema(checkpoint: Path) -> SchemaVersion:
    """Reads the schema of a checkpoint that verifies. Raises as `parse_schema`; OSError of the storage."""
    where = checkpoint / SCHEMA_VERSION
    try:
        data = bounded.read_regular(where, bounded.SMALL)
    except bounded.TooMuch as error:
        raise _unreadable(where, error) from None
    return parse_schema(data, where=where)


def differences(saved: SchemaVersion, current: SchemaVersion) -> list[str]:
    """Lists every difference in layout, one line each, sorted; empty when there is none."""
    lines = []
    for name in sorted(saved.classes.keys() | current.classes.keys()):
        old, new = saved.classes.get(name), current.classes.get(name)
        if old is None:
            lines.append(f"{name}: not in the checkpoint")
        elif new is None:
            lines.append(f"{name}: only in the checkpoint")
        else:
            for field in sorted(old.keys() | new.keys()):
                if field not in new:
                    lines.append(f"{name}.{field}: only in the checkpoint ({old[field]})")
                elif field not in old:
                    lines.append(f"{name}.{field}: not in the checkpoint ({new[field]})")
                elif old[field] != new[field]:
                    lines.append(f"{name}.{field}: {old[field]} in the checkpoint, {new[field]} here")
    return lines


def check_schema(saved: SchemaVersion, current: SchemaVersion, *, where: object) -> None:
    """Refuses a layout that the code of `current` does not read: SchemaMismatch, with every difference."""
    # An entry was judged for one layout of this code. After the next change it no longer counts until it is looked at
    # again.
    read_too = {older.schema_id for older in OLDER_LAYOUTS if older.read_by == current.schema_id}
    if saved.schema_id not in read_too | {current.schema_id}:
        raise SchemaMismatch(
            "the checkpoint has another state layout",
            where=where,
            found=f"{saved.code_version}: " + "; ".join(differences(saved, current)),
            expected=f"the layout of {current.code_version}",
            remedy=f"resume with verl-slurm {saved.code_version}, or start with checkpoint.resume_from=null",
        )


def _signature(struct: type[msgspec.Struct]) -> dict[str, str]:
    # A stand-in for `numpy.ndarray`, used by name: the daemon computes this, and numpy would be a third of its memory.
    numpy = types.SimpleNamespace(ndarray=type("ndarray", (), {}))
    hints = get_type_hints(struct, localns={"np": numpy}, include_extras=True)
    return {field: _type_name(hints[field]) for field in struct.__struct_fields__}


def _type_name(hint: Any) -> str:
    """Returns a type as text that is the same on every Python version; limits are left out."""
    origin, args = get_origin(hint), get_args(hint)
    # Limits may be tightened or widened without a new layout.
    if origin is Annotated:
        return _type_name(args[0])
    if origin is Literal:
        return "Literal[" + ", ".join(repr(a) for a in args) + "]"
    # `X | Y` and `Union[X, Y]` have different origins and are one type.
    if origin in {Union, types.UnionType}:
        return " | ".join(_type_name(a) for a in args)
    if hint is type(None) or hint is None:
        return "None"
    if hint is Ellipsis:
        return "..."
    # The stand-in, and a numpy that is loaded, must give the same text.
    if getattr(origin or hint, "__name__", "") == "ndarray":
        return "ndarray"
    if origin is not None:
        return f"{origin.__name__}[" + ", ".join(_type_name(a) for a in args) + "]"
    return str(getattr(hint, "__name__", hint))
