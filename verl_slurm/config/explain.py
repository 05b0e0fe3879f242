"""Lists every key of a configuration with its type, default and meaning, read from the schema itself.

The meaning is the string below a field. Python drops such strings at run time, so this module parses the schema's
source.
"""

import ast
import inspect
import typing
from collections.abc import Iterator

import msgspec

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.hints import nearest_keys
from verl_slurm.config.schema import RunConfig

__all__ = ["Key", "all_keys", "explain"]


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One key as a user writes it."""

    key: str
    type: str
    default: str
    """As in YAML; `required` for a key of a list's entry that has no default."""
    meaning: str
    """Empty if the name says it all."""


def all_keys() -> list[Key]:
    """Returns all keys, in the order of the schema."""
    return list(_keys(RunConfig, ""))


def explain(wanted: str) -> list[Key]:
    """Returns the key of that name, or all keys of that section.

    Raises:
        ConfigError: neither exists; the error names the nearest.
    """
    known = all_keys()
    found = [key for key in known if key.key == wanted or key.key.startswith(f"{wanted}.")]
    if found:
        return found
    sections = {key.key.partition(".")[0] for key in known if "." in key.key}
    raise ConfigError(
        "no such key",
        where=wanted,
        expected=" or ".join(nearest_keys(wanted, [key.key for key in known], sections)) or None,
        remedy="`verl-slurm config` lists all keys",
    )


def _keys(kind: type[msgspec.Struct], prefix: str) -> Iterator[Key]:
    meanings = _meanings(kind)
    for field in msgspec.structs.fields(kind):
        key = prefix + field.name
        # A section has no value of its own: its keys are listed instead.
        if inner := _struct(field.type):
            yield from _keys(inner, f"{key}.")
            continue
        default = field.default
        # msgspec keeps mutable defaults and sections as factories.
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        shown = "required" if default is msgspec.NODEFAULT else _yaml(default)
        yield Key(key=key, type=_type(field.type), default=shown, meaning=meanings.get(field.name, ""))
        plain = field.type
        if typing.get_origin(plain) is typing.Annotated:
            plain = typing.get_args(plain)[0]
        for choice in typing.get_args(plain):  # a section that may be null, or the entries of a list or map
            if inner := _struct(choice):
                origin = typing.get_origin(plain)
                mark = "[]." if origin in (list, tuple) else ".NAME." if origin is dict else "."
                yield from _keys(inner, key + mark)


def _struct(annotation: object) -> type[msgspec.Struct] | None:
    # A bounded number, say, which is no section.
    if typing.get_origin(annotation) is typing.Annotated:
        return None
    return annotation if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) else None


def _meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Maps each field to the string below it, on one line."""
    # From the source: Python keeps no text of a string below a field.
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    # A field's text is the statement right below it, if that is a string.
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found[field.target.id] = " ".join(below.value.value.split())
    return found


def _type(annotation: object) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(inner[0]) + _bounds(inner[1:])
    if origin is typing.Literal:
        return " | ".join(map(str, inner))
    if origin in (list, tuple):
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return "map"
    if inner:
        return " | ".join(_type(one) for one in inner)
    names = {int: "whole number", float: "number", str: "text", bool: "true | false", type(None): "null"}
    if annotation in names:
        return names[annotation]
    return "section" if _struct(annotation) else str(getattr(annotation, "__name__", annotation))


def _bounds(metas: tuple[object, ...]) -> str:
    words = []
    for meta in metas:
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if (bound := getattr(meta, name, None)) is not None:
                words.append(f"{sign} {bound:g}")
    return f" {', '.join(words)}" if words else ""


def _yaml(value: object) -> str:
    plain = msgspec.to_builtins(value)
    # JSON is YAML, and short on one line.
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()
