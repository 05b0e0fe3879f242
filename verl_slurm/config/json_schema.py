"""Makes the JSON Schema of a configuration, by which an editor completes and underlines keys.

It is looser than `load`: it knows keys, types, bounds and choices, and not what has to fit together. The keys of a
key's own map (`verl`, `slurm.extra`) are free. `configs/schema.json` is its text.
"""

import typing
from collections.abc import Iterator

import msgspec

from verl_slurm.config.explain import meanings
from verl_slurm.config.schema import RunConfig

_DIALECT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that editors know alike. It ignores what stands beside a `$ref`."""


def json_schema() -> dict[str, typing.Any]:
    """Returns the schema, with the text below each field as its description."""
    made = msgspec.json.schema(RunConfig)
    for kind in _structs(RunConfig):
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


def _structs(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """Yields the struct and all structs that its fields may hold, each once."""
    found, waiting = {kind: None}, [kind]
    while waiting:
        for field in msgspec.structs.fields(waiting.pop()):
            for inner in _structs_in(field.type):
                if inner not in found:
                    found[inner] = None
                    waiting.append(inner)
    yield from found


def _structs_in(annotation: object) -> Iterator[type[msgspec.Struct]]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _structs_in(inner)
