"""Lists every key of a configuration with its type, default and meaning (the string below a field) from the schema."""

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
from verl_slurm.config.key_types import fields_of, type_words
from verl_slurm.config.schema import RunConfig

# The unit that the end of a key's name stands for.
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
# Characters of an example's value: a longer one explains nothing.
_LONGEST = 80


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
    """Returns the key of that name, or all keys of that section, list or map. ConfigError names the nearest."""
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
    """Returns the same as `explain`, with all that shipped configurations and other keys say of each."""
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


def keys_of(kind: type[msgspec.Struct]) -> Iterator[Key]:
    """Yields the fields of a struct as keys, those of structs in it included."""
    for key, owner, field in fields_of(kind):
        default = field.default
        # msgspec keeps mutable defaults and sections as factories.
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        shown = "required" if default is msgspec.NODEFAULT else _yaml(default)
        words, told = type_words(field.type), meanings(owner).get(field.name, "")
        unit = next((unit for end, unit in _UNITS.items() if key.endswith(end)), "")
        yield Key(key=key, type=words, default=shown, meaning=told, unit=unit if "number" in words else "")


@cache
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


def _yaml(value: object) -> str:
    plain = msgspec.to_builtins(value)
    # JSON is YAML, and short on one line.
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()


# The newest draft that editors know alike. It ignores what stands beside a `$ref`.
_DIALECT = "http://json-schema.org/draft-07/schema#"


def json_schema() -> dict[str, typing.Any]:
    """Returns the JSON Schema by which an editor completes and underlines keys; `configs/schema.json` is its text.

    It knows keys, types, bounds and choices, and not what has to fit together. The keys of a key's own map (`verl`,
    `slurm.extra`) are free.
    """
    made = msgspec.json.schema(RunConfig)
    kinds: set[type[msgspec.Struct]] = {RunConfig, *(owner for _, owner, _ in fields_of(RunConfig))}
    for kind in kinds:
        definition = made["$defs"][kind.__name__]
        # The rest of a docstring is for readers of the code.
        definition["description"] = " ".join(definition["description"].partition("\n\n")[0].split())
        definition.pop("title")  # the name of our class, which an editor would show above each meaning
        told = meanings(kind)
        for name, field in definition["properties"].items():
            if name in told:
                field["description"] = told[name]
            # Releases of msgspec have another order.
            field.get("anyOf", []).sort(key=lambda choice: choice == {"type": "null"})
            if "$ref" in field:
                field.pop("default")  # it stands at the keys of the section
                # A heading whose lines are all commented out is null in YAML, and `load` takes it for the defaults.
                made["$defs"][field["$ref"].rpartition("/")[2]]["type"] = ["object", "null"]
    whole = made["$defs"].pop(RunConfig.__name__)
    return {"$schema": _DIALECT, **whole, "title": "A run of verl-slurm", "$defs": made["$defs"]}
