"""The part of YAML a configuration needs, read without surprises.

What YAML 1.1 would do to a value is a classic trap: `no` becomes false, `010` eight, `1:30` ninety and
`1e-3` a string. Here only `true` and `false` are booleans, integers are decimal, floats are what Python
reads as floats, and everything else is text; the schema then says if text was wanted. Tags, anchors,
aliases, merge keys, a second document, a duplicate key, deep nesting and files over 1 MiB are refused, so a
reader of the file sees what we see.

Core schema this follows, minus octal and hexadecimal: https://yaml.org/spec/1.2.2/#103-core-schema
"""

import math
import re
from typing import NamedTuple, Union

import yaml

from verl_slurm.base import bounded
from verl_slurm.base.errors import ConfigError

__all__ = ["MAX_BYTES", "Document", "dump", "parse", "parse_value"]

MAX_BYTES = bounded.CONFIG.num_bytes
_MAX_VALUES = 20_000
"""Lines, commas and brackets: PyYAML takes 60 microseconds and 600 bytes for each; a run has some 300."""
_MAX_DEPTH = 8
_NULL = re.compile(r"(?:|~|null)")
_BOOL = re.compile(r"true|false")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})")
# A float needs a point or an exponent, so that `010` stays text and is then refused where a number is wanted.
_TOO_LARGE = 2**63
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?")

# Recursive, so `X | Y` with a quoted name would not evaluate.
Value = Union[None, bool, int, float, str, list["Value"], dict[str, "Value"]]  # noqa: UP007


class Document(NamedTuple):
    """A parsed file: its top mapping, and the line on which each dotted key stands (from 1)."""

    data: dict[str, Value]
    lines: dict[str, int]


class _Loader(yaml.SafeLoader):
    """Composes nodes only; no constructor of PyYAML ever runs."""


# Plain scalars get no implicit tag from PyYAML: `_scalar` decides.
_Loader.yaml_implicit_resolvers = {}


def parse(raw: bytes, source: str) -> Document:
    """Read one YAML mapping.

    Args:
        raw: the file's bytes, UTF-8.
        source: how errors name it.

    Raises:
        ConfigError: anything outside the subset, with line and column.
    """
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            "the configuration is too large",
            where=source,
            found=f"{len(raw)} bytes",
            expected=f"at most {MAX_BYTES}",
            remedy="check that this is the right file",
        )
    if (values := sum(map(raw.count, (b"\n", b"\r", b",", b"[", b"{")))) > _MAX_VALUES:
        raise ConfigError(
            "the configuration is too large",
            where=source,
            found=f"{values} lines, commas and brackets",
            expected=f"at most {_MAX_VALUES}",
            remedy="check that this is the right file",
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            "the configuration is not UTF-8 text",
            where=f"{source}, byte {error.start}",
            remedy="check that this is the right file",
        ) from None
    lines: dict[str, int] = {}
    node = _compose(text, source)
    data: Value = {} if node is None else _build(node, "", source, lines)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(
            "the configuration is not a mapping",
            where=source,
            found=type(data).__name__,
            expected="`key: value` lines",
            remedy="`verl-slurm init FILE` writes one to start from",
        )
    return Document(data, lines)


def parse_value(text: str, source: str) -> Value:
    """Read the right side of `key=value`: a scalar, or a list or mapping in YAML's flow style.

    Raises:
        ConfigError: as `parse`.
    """
    node = _compose(text, source)
    return None if node is None else _build(node, "", source, {})


def dump(data: dict[str, Value]) -> bytes:
    """Write a mapping so that this module, and any other YAML reader, reads the same back. Text is quoted."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 16)
    return text.encode()


class _Quoted(str):
    """Text that is to be written in double quotes."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    """Quotes text values: what counts as a plain string differs between YAML 1.1, 1.2 and us."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_mapping(
        self, tag: str, mapping: object, flow_style: bool | None = None
    ) -> yaml.MappingNode:
        assert isinstance(mapping, dict)
        pairs = {key: _quote(value) for key, value in mapping.items()}
        return super().represent_mapping(tag, pairs, flow_style)


def _quote(value: object) -> object:
    if isinstance(value, str):
        return _Quoted(value)
    if isinstance(value, list):
        return [_quote(item) for item in value]
    return value


def _represent_quoted(dumper: yaml.SafeDumper, text: _Quoted) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"')


_Dumper.add_representer(_Quoted, _represent_quoted)


def _compose(text: str, source: str) -> yaml.Node | None:
    try:
        # The events are looked at first: composing recurses, and a file of brackets would overflow the stack.
        _check_events(text, source)
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise ConfigError(
            "the configuration is not valid YAML",
            where=place,
            found=(error.problem or error.context or "").removeprefix("found "),
            remedy="mend that line",
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(
            "the configuration is not valid YAML", where=source, found=error, remedy="mend the file"
        ) from None


def _check_events(text: str, source: str) -> None:
    depth = documents = 0
    for event in yaml.parse(text, Loader=_Loader):
        mark = event.start_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ConfigError(
                "anchors and aliases are not allowed", where=place, remedy="write the value out"
            )
        if (tag := getattr(event, "tag", None)) is not None:
            raise ConfigError(
                "tags are not allowed", where=place, found=tag, remedy="write the value without its tag"
            )
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise ConfigError(
                    "more than one document in the file", where=place, remedy="keep one file for each run"
                )
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                at_most = f"at most {_MAX_DEPTH} levels"
                raise ConfigError("nested too deeply", where=place, expected=at_most, remedy="mend the file")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _build(node: yaml.Node, path: str, source: str, lines: dict[str, int]) -> Value:
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Value] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.value:
                raise ConfigError("a key must be a word", where=f"{source}:{line}", remedy="mend that line")
            key = str(key_node.value)
            dotted = f"{path}.{key}" if path else key
            if key in result:
                raise ConfigError(
                    "the same key twice",
                    where=f"{source}:{line}: {dotted}",
                    found=f"first in line {lines[dotted]}",
                    remedy="keep one of them",
                )
            lines[dotted] = line
            result[key] = _build(value_node, dotted, source, lines)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, path, source, lines) for item in node.value]
    return _scalar(node, path, source)


def _scalar(node: yaml.Node, path: str, source: str) -> Value:
    text = str(node.value)
    if getattr(node, "style", None) is not None:
        return text  # quoted or a block: text, whatever it looks like
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text == "true"
    where = f"{source}:{node.start_mark.line + 1}: {path}"
    if _INT.fullmatch(text):
        if not -_TOO_LARGE <= int(text) < _TOO_LARGE:  # other programs would wrap it around
            raise ConfigError("a number too large", where=where, found=text, remedy="write one below 2^63")
        return int(text)
    if _FLOAT.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise ConfigError(
                "a number too large for a float",
                where=where,
                found=text,
                remedy="write a finite number",
            )
        return number
    return text
