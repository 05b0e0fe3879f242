"""Lists every key of a configuration with its type, default and meaning, read from the schema itself.

The meaning is the string below a field. Python drops such strings at run time, so this module parses the schema's
source.
"""

import ast
import inspect
import re
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

from verl_slurm.base.bounded import CONFIG, read_regular
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.shipped import examples, shipped
from verl_slurm.config import strict_yaml
from verl_slurm.config.changes import change_rule
from verl_slurm.config.hints import nearest_keys
from verl_slurm.config.schema import RunConfig

_UNITS = {
    # The longer ends first. Slurm's MB are MiB.
    "_mb_per_s": "MB/s",
    "_mb_per_node": "MiB",
    "_free_mb": "MiB",
    ".max_mb": "MB",
    "_s": "seconds",
    "_min": "minutes",
    "_h": "hours",
    "_days": "days",
}
"""The unit that the end of a key's name stands for."""
_LONGEST = 80
"""Characters of an example's value: a longer one explains nothing."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One key as a user writes it."""

    key: str
    type: str
    default: str
    """As in YAML; `required` for a key of a list's entry that has no default."""
    meaning: str
    """Empty if the name says it all."""

    unit: str = ""
    """Of a time or a size; empty: the key is neither."""


class Explained(Key, frozen=True, kw_only=True):
    """One key with all that the code tells of it."""

    may_change: str
    """Whether it may differ between two submissions of a run that has begun."""
    example: str
    """A word for `submit`, or YAML for an entry of a list or map; empty: none is known."""
    related: list[str]
    """Keys that its meaning names, and keys whose meanings name it."""


def all_keys() -> list[Key]:
    """Returns all keys, in the order of the schema."""
    return list(_all_keys())


@cache
def _all_keys() -> tuple[Key, ...]:
    return tuple(keys_of(RunConfig))


def explain(wanted: str) -> list[Key]:
    """Returns the key of that name, or all keys of that section, list or map.

    Raises:
        ConfigError: neither exists; the error names the nearest.
    """
    known = all_keys()
    found = [key for key in known if key.key == wanted or key.key.startswith((f"{wanted}.", f"{wanted}[]."))]
    if found:
        return found
    sections = {key.key.partition(".")[0] for key in known if "." in key.key}
    raise ConfigError(
        "no such key",
        where=wanted,
        expected=" or ".join(nearest_keys(wanted, [key.key for key in known], sections)) or None,
        remedy="`verl-slurm config` lists all keys",
    )


def explain_fully(wanted: str) -> list[Explained]:
    """Returns the same as `explain`, with all that shipped configurations and other keys say of each.

    Raises:
        ConfigError: as `explain`.
    """
    named = _named()
    return [
        Explained(
            **msgspec.structs.asdict(key),
            may_change=change_rule(key.key.replace(".NAME.", ".x.")),
            example=_example(key),
            related=[one for one in named if one in named[key.key] or key.key in named[one]],
        )
        for key in explain(wanted)
    ]


@cache
def _named() -> dict[str, set[str]]:
    """Maps each key to the others that its meaning names in backticks: whole, or without the section of both."""
    found = {}
    names = {key.key for key in _all_keys()}
    for key in _all_keys():
        section = key.key.rpartition(".")[0]
        words = re.findall(r"`([a-z_.]+)(?:=[^`]*)?`", key.meaning)
        found[key.key] = ({*words, *(f"{section}.{word}" for word in words)} & names) - {key.key}
    return found


def _example(key: Key) -> str:
    """Returns a value that the meaning recommends, one of a shipped configuration, or another choice."""
    last = key.key.rpartition(".")[2]
    values = re.findall(r"e\.g\. (`[^`]+`|\[[^]]*\]|\{[^}]*\})", key.meaning)
    values += [_yaml(value) for value in _shipped().get(key.key, ())]
    if not {"number", "text", "list", "map", "section"} & set(re.findall(r"\w+", key.type)):
        values += key.type.split(" | ")
    values = [value.strip("`") for value in [*values, key.default] if len(value) <= _LONGEST]
    # A brace that no other opens ends the map around the value.
    values = [value if "{" in value else value.rstrip("}") for value in values]
    values = [value for value in values if value not in ("null", "required", "[]", "{}")]
    # One that changes something, if there is one.
    value = next((value for value in values if value != key.default), next(iter(values), None))
    if value is None:
        return ""
    return f"{last}: {value}" if "[]." in key.key or ".NAME." in key.key else f"{key.key}={value}"


@cache
def _shipped() -> dict[str, list[object]]:
    """Maps each dotted key of the shipped configurations to its values."""
    found: dict[str, list[object]] = {}

    def take(prefix: str, value: object) -> None:
        found.setdefault(prefix, []).append(value)
        if isinstance(value, dict):
            for name, inner in value.items():
                take(f"{prefix}.{name}", inner)

    for name in examples():
        raw = read_regular(Path(shipped(f"configs/{name}.yaml")), CONFIG, follow=True)
        for key, value in strict_yaml.parse(raw, name)[0].items():
            take(key, value)
    return found


def keys_of(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[Key]:
    """Yields the fields of a struct as keys, those of structs in it included."""
    told = meanings(kind)
    for field in msgspec.structs.fields(kind):
        key = prefix + field.name
        # A section has no value of its own: its keys are listed instead.
        if inner := _struct(field.type):
            yield from keys_of(inner, f"{key}.")
            continue
        default = field.default
        # msgspec keeps mutable defaults and sections as factories.
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        shown = "required" if default is msgspec.NODEFAULT else _yaml(default)
        words = _type(field.type)
        unit = _unit(key) if "number" in words else ""
        yield Key(key=key, type=words, default=shown, meaning=told.get(field.name, ""), unit=unit)
        plain = field.type
        if typing.get_origin(plain) is typing.Annotated:
            plain = typing.get_args(plain)[0]
        for choice in typing.get_args(plain):  # a section that may be null, or the entries of a list or map
            if inner := _struct(choice):
                origin = typing.get_origin(plain)
                mark = "[]." if origin in (list, tuple) else ".NAME." if origin is dict else "."
                yield from keys_of(inner, key + mark)


def _struct(annotation: object) -> type[msgspec.Struct] | None:
    # A bounded number, say, which is no section.
    if typing.get_origin(annotation) is typing.Annotated:
        return None
    return annotation if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) else None


def meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Maps each field to the string below it, on one line."""
    found: dict[str, str] = {}
    # Bases first: a field that is declared again has the text that stands there.
    for owner in reversed(kind.__mro__):
        if issubclass(owner, msgspec.Struct) and owner is not msgspec.Struct:
            found |= _meanings_in(owner)
    return found


def _meanings_in(kind: type[msgspec.Struct]) -> dict[str, str]:
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


def _unit(key: str) -> str:
    return next((unit for end, unit in _UNITS.items() if key.endswith(end)), "")


def _bounds(metas: tuple[object, ...]) -> str:
    words = []
    for meta in metas:
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            bound = getattr(meta, name, None)
            # The bounds of JSON's own integers say nothing to a person.
            if bound is not None and abs(bound) < 1 << 53:
                words.append(f"{sign} {bound:g}")
    return f" {', '.join(words)}" if words else ""


def _yaml(value: object) -> str:
    plain = msgspec.to_builtins(value)
    # JSON is YAML, and short on one line.
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()
