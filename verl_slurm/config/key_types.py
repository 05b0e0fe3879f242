"""Walks over the types of a configuration: which keys there are, what may stand at each, and what does not fit."""

import typing
from collections.abc import Iterator

import msgspec
from msgspec.structs import FieldInfo

StructType = type[msgspec.Struct]
_MARKS: dict[object, str] = {list: "[].", tuple: "[].", dict: ".NAME."}


def fields_of(kind: StructType, prefix: str = "") -> Iterator[tuple[str, StructType, FieldInfo]]:
    """Yields each key, the struct that declares it, and its field, in the order of the schema.

    A section's keys stand for it. Keys of entries are `tiers[].name` and `services.NAME.port`.
    """
    for field in msgspec.structs.fields(kind):
        key = prefix + field.name
        if inner := struct_of(field.type):
            yield from fields_of(inner, f"{key}.")
            continue
        yield key, kind, field
        plain = _plain(field.type)
        mark = _MARKS.get(typing.get_origin(plain), ".")
        for choice in typing.get_args(plain):  # a section that may be null, or the entries of a list or map
            if inner := struct_of(choice):
                yield from fields_of(inner, key + mark)


def struct_of(annotation: object) -> StructType | None:
    """Returns the annotation if it is a section, else None."""
    # `list[int]` counts as a class, and is none for `issubclass`.
    if typing.get_origin(annotation) is None and isinstance(annotation, type):
        return annotation if issubclass(annotation, msgspec.Struct) else None
    return None


def type_words(annotation: object) -> str:
    """Describes what may stand at a key: `whole number >= 1`, `text | null`."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_words(inner[0]) + _bounds(inner[1:])
    if origin is typing.Literal:
        return " | ".join(map(str, inner))
    if origin in (list, tuple):
        return f"list of {type_words(inner[0])}"
    if origin is dict:
        return "map"
    if inner:
        return " | ".join(type_words(one) for one in inner)
    names = {int: "whole number", float: "number", str: "text", bool: "true | false", type(None): "null"}
    if annotation in names:
        return names[annotation]
    return "section" if struct_of(annotation) else str(getattr(annotation, "__name__", annotation))


def _bounds(metas: tuple[object, ...]) -> str:
    words = []
    for meta in metas:
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            bound = getattr(meta, name, None)
            # The bounds of JSON's own integers say nothing to a person.
            if bound is not None and abs(bound) < 1 << 53:
                words.append(f"{sign} {bound:g}")
    return f" {', '.join(words)}" if words else ""


def misfits(kind: object, value: object, key: str = "") -> list[tuple[str, object, str]]:
    """Returns each place that does not fit its type: its key, what stands there, and what fits, in words."""
    plain, found = _plain(kind), list[tuple[str, object, str]]()
    origin, inner = typing.get_origin(plain), typing.get_args(plain)
    # A section that may be null is a union.
    choices = (plain,) if origin in (list, tuple, dict) else (plain, *inner)
    struct = next((one for choice in choices if (one := struct_of(choice))), None)
    if isinstance(value, dict) and origin is dict:
        for name, one in value.items():
            found += misfits(inner[1], one, f"{key}.{name}")
    elif isinstance(value, dict) and struct is not None:
        fields = {field.name: field for field in msgspec.structs.fields(struct)}
        found += [(key, value, f"no `{name}` in it") for name in value if name not in fields]
        for name, field in fields.items():
            if name in value:
                found += misfits(field.type, value[name], f"{key}.{name}" if key else name)
            elif field.required:
                found.append((key, value, f"`{name}` in it"))
    elif isinstance(value, list) and origin in (list, tuple):
        for number, one in enumerate(value):
            found += misfits(inner[0], one, f"{key}[{number}]")
    # msgspec judges; the walk finds the place, which msgspec tells in prose alone.
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        words = type_words(kind).replace(" | ", " or ")
        # A limit of length or form has no words of its own.
        is_limit = " of length " in str(error) or "matching regex" in str(error)
        return found or [
            (key, value, str(error).removeprefix("Expected ").replace("`", "") if is_limit else words)
        ]
    return found


def _plain(annotation: object) -> typing.Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation
