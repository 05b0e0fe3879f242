"""Reads the YAML 1.2 of a configuration without surprises.

ruamel.yaml parses it; this module decides what a plain word means, more strictly than YAML 1.2's core schema. `true`
and `false` are the booleans, integers are decimal, and floats are finite with a point or an exponent. Everything else
is text (`no`, `010`, `1:30`, `1_000`, `0x1f`, `.inf`, `2026-11-24`); the schema then says whether text was wanted.
ruamel.yaml's own table reads 010 as ten, 1_000 as a thousand and a date as a date.

Anchors, aliases and merge keys (`<<`) are expanded: each use is a copy of its own. Refused are tags, a second document,
a doubled key or anchor, a key that is no word, more than 8 levels, files over 1 MiB, and content that expands to more
than 20,000 values or 1 MiB of text.

Core schema: https://yaml.org/spec/1.2.2/#103-core-schema. Merge keys: https://yaml.org/type/merge.html.
"""

import io
import math
import re
from functools import partial
from typing import Any, NamedTuple, Union

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, MaxDepthExceededError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

from verl_slurm.base import bounded
from verl_slurm.base.errors import ConfigError

MAX_BYTES = bounded.CONFIG.num_bytes
# Limits lines, commas and brackets of the file, and values after expanding. A run has some 300; 20,000 take 2
# s.
_MAX_VALUES = 20_000
_MAX_DEPTH = 8
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN_KEY = re.compile(r"\+{0,2}[A-Za-z_][A-Za-z0-9_@/.-]*")
_NULL = re.compile(r"(?:|~|null)")
_BOOL = re.compile(r"true|false")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})")
# A float needs a point or an exponent, so that `010` stays text and is then refused where a number is wanted.
_TOO_LARGE = 2**63
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?")

# Recursive, so `X | Y` with a quoted name would not evaluate.
Value = Union[None, bool, int, float, str, list["Value"], dict[str, "Value"]]  # noqa: UP007


class Document(NamedTuple):
    """Holds a parsed file: its top mapping, and the line of each dotted key (from 1)."""

    data: dict[str, Value]
    lines: dict[str, int]


def parse(raw: bytes, source: str) -> Document:
    """Reads one YAML mapping; `source`: its name in errors. ConfigError, with line and column: it is none of the
    subset.
    """
    if len(raw) > MAX_BYTES:
        raise _too_large(source, f"{len(raw)} bytes", MAX_BYTES)
    # Counted in the bytes, before anything is parsed: each of them may become a value, and parsing is what takes time.
    if (values := sum(map(raw.count, (b"\n", b"\r", b",", b"[", b"{")))) > _MAX_VALUES:
        raise _too_large(source, f"{values} lines, commas and brackets", _MAX_VALUES)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where, remedy = f"{source}, byte {error.start}", "check that this is the right file"
        raise ConfigError("the configuration is not UTF-8 text", where=where, remedy=remedy) from None
    builder = _Builder(source)
    data = builder.read(text)
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
    return Document(data, builder.lines)


def parse_value(text: str, source: str) -> Value:
    """Reads the right side of `key=value`: a scalar, or a list or mapping in YAML's flow style. Raises as `parse`."""
    return _Builder(source).read(text)


def dump(data: dict[str, Value]) -> bytes:
    """Writes a mapping so that this module, and any other YAML reader, reads the same values back."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Representer = _Quoting
    yaml.default_flow_style = False
    # No folding: a long value stays on its line, where an error finds it.
    yaml.width = 1 << 16
    # In the order of the schema.
    yaml.sort_base_mapping_type_on_output = False
    file = io.BytesIO()
    yaml.dump(data, file)
    return file.getvalue()


class _Quoting(SafeRepresenter):
    """Quotes text values, and writes each float with a point."""

    # Two keys with one Python object would become an anchor and an alias.
    # Readers of YAML 1.1, YAML 1.2 and this one differ about the rest.
    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_key(self, data: str) -> ScalarNode:
        # A key that begins with a digit is text here, and a number to another reader.
        plain = _PLAIN_KEY.fullmatch(data)
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if plain else '"')

    def represent_text(self, data: str) -> ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"')

    def represent_number(self, data: float) -> ScalarNode:
        # 1e-05 has no point: YAML 1.1 reads it as text, so it is written 1.0e-05. repr gives back the same float.
        text = repr(data)
        return self.represent_scalar(
            "tag:yaml.org,2002:float", text if "." in text else text.replace("e", ".0e")
        )


_Quoting.add_representer(str, _Quoting.represent_text)
_Quoting.add_representer(float, _Quoting.represent_number)


def _too_large(source: str, found: str, at_most: int) -> ConfigError:
    return ConfigError(
        "the configuration is too large",
        where=source,
        found=found,
        expected=f"at most {at_most}",
        remedy="check that this is the right file",
    )


class _Composer(Composer):
    def __init__(self, loader: Any, source: str) -> None:
        super().__init__(loader)
        self._source = source

    def compose_node(self, parent: object, index: object) -> Node:
        event = self.parser.peek_event()
        where = f"{self._source}:{event.start_mark.line + 1}:{event.start_mark.column + 1}"
        # Also `!!str` and the like: a tag decides what a value is, and here the schema does.
        if (tag := getattr(event, "ctag", None)) is not None:
            remedy = "write the value without its tag"
            raise ConfigError("tags are not allowed", where=where, found=tag, remedy=remedy)
        # YAML lets a later anchor replace an earlier one, so an alias would depend on its place in the file.
        if not isinstance(event, AliasEvent) and (first := self.anchors.get(event.anchor)):
            found, remedy = f"first in line {first.start_mark.line + 1}", "give one of them another name"
            where = f"{where}: &{event.anchor}"
            raise ConfigError("the same anchor twice", where=where, found=found, remedy=remedy)
        # YAML's escapes can give half a character, which nothing after this can encode.
        if _SURROGATE.search(getattr(event, "value", "")):
            found, remedy = "an escape of D800 to DFFF", "write the character itself"
            raise ConfigError("text that is no Unicode", where=where, found=found, remedy=remedy)
        node: Node = super().compose_node(parent, index)
        return node


def _compose(text: str, source: str) -> Node | None:
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Composer = partial(_Composer, source=source)
    # Counted while it composes: a deep file would otherwise end in Python's own recursion limit.
    yaml.max_depth = _MAX_DEPTH
    try:
        node: Node | None = yaml.compose(text)
        return node
    except MaxDepthExceededError as error:
        raise _too_deep(_at(source, error.problem_mark)) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            "the configuration is not valid YAML",
            where=_at(source, mark) if mark else source,
            found=(error.problem or error.context or "").removeprefix("but ").removeprefix("found "),
            remedy="fix this line",
        ) from None
    except YAMLError as error:
        raise ConfigError(
            "the configuration is not valid YAML", where=source, found=error, remedy="fix the file"
        ) from None


def _at(source: str, mark: Any) -> str:
    return f"{source}:{mark.line + 1}:{mark.column + 1}"


def _too_deep(where: str) -> ConfigError:
    return ConfigError(
        "nested too deeply", where=where, expected=f"at most {_MAX_DEPTH} levels", remedy="fix the file"
    )


class _Builder:
    """Makes values of nodes."""

    def __init__(self, source: str) -> None:
        self.lines: dict[str, int] = {}
        self._source = source
        # Counted on the way, with the text: an alias is built again at each use.
        self._values = 0
        self._text = 0

    def read(self, text: str) -> Value:
        node = _compose(text, self._source)
        return None if node is None else self._build(node, "", 0)

    def _build(self, node: Node, path: str, depth: int) -> Value:
        self._values += 1
        if self._values > _MAX_VALUES:
            raise _too_large(self._source, "aliases that expand to more values", _MAX_VALUES)
        # The path counts, too: an expanded alias has a dotted name of its own for each value.
        self._text += len(path) + len(node.value)
        if self._text > MAX_BYTES:
            raise _too_large(self._source, "aliases that expand to more text", MAX_BYTES)
        if isinstance(node, ScalarNode):
            return _scalar(node, path, self._source)
        if depth == _MAX_DEPTH:  # reached by aliases: the composer has counted what is written out
            raise _too_deep(_at(self._source, node.start_mark))
        if isinstance(node, SequenceNode):
            return [self._build(item, path, depth + 1) for item in node.value]
        assert isinstance(node, MappingNode)
        return self._mapping(node, path, depth + 1)

    def _mapping(self, node: MappingNode, path: str, depth: int) -> dict[str, Value]:
        pairs: dict[str, tuple[ScalarNode, Node]] = {}
        for key_node, value_node in node.value:
            where = f"{self._source}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, ScalarNode) or not key_node.value:
                raise ConfigError("a key must be a word", where=where, remedy="fix this line")
            key = str(key_node.value)
            # Readers differ: most take the last of two equal keys, and the user meant one of them.
            if key in pairs:
                where, first = f"{where}: {_dotted(path, key)}", pairs[key][0].start_mark.line + 1
                found = f"first in line {first}"
                raise ConfigError("the same key twice", where=where, found=found, remedy="keep one of them")
            pairs[key] = key_node, value_node
        result: dict[str, Value] = {}
        # A quoted "<<" is a key like any other. Merged before the keys, which win over it.
        if "<<" in pairs and pairs["<<"][0].style is None:
            result = self._merged(pairs.pop("<<")[1], path, depth)
        # After the merged ones: they replace values and lines of those.
        for key, (key_node, value_node) in pairs.items():
            self.lines[_dotted(path, key)] = key_node.start_mark.line + 1
            result[key] = self._build(value_node, _dotted(path, key), depth)
        return result

    def _merged(self, node: Node, path: str, depth: int) -> dict[str, Value]:
        result: dict[str, Value] = {}
        # The first mapping of a list wins.
        for mapping in reversed(node.value if isinstance(node, SequenceNode) else [node]):
            if not isinstance(mapping, MappingNode):
                where, remedy = _at(self._source, mapping.start_mark), "name the anchor of a mapping"
                raise ConfigError("`<<` merges mappings only", where=where, remedy=remedy)
            value = self._build(mapping, path, depth)
            assert isinstance(value, dict)
            result |= value
        return result


def _dotted(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _scalar(node: ScalarNode, path: str, source: str) -> Value:
    text = str(node.value)
    if node.style is not None:
        return text  # quoted or a block: text, whatever it looks like
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text == "true"
    where = f"{source}:{node.start_mark.line + 1}: {path}"
    # At most 19 digits, so this conversion is cheap whatever the file holds.
    if _INT.fullmatch(text):
        if not -_TOO_LARGE <= int(text) < _TOO_LARGE:  # other programs would overflow
            raise ConfigError("a number too large", where=where, found=text, remedy="write one below 2^63")
        return int(text)
    if not _FLOAT.fullmatch(text):
        return text
    # 1e999 has the form of a float and becomes infinite.
    if not math.isfinite(number := float(text)):
        what = "a number too large for a float"
        raise ConfigError(what, where=where, found=text, remedy="write a finite number")
    return number
