"""Finds which checks name a key, and what they ask for, in the source of the checks themselves.

A check refuses or warns by a call: `Complaint(key, found, expected, remedy)`, a class of `base.errors`, or a finding
of the doctor. The keys in the texts of that call, and in the condition right above it, are those that it compares. So
a new check is explained without a second text about it. The source is parsed and not imported: those of `submit` lie
above this package.
"""

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import msgspec

from verl_slurm.base import errors
from verl_slurm.base.bounded import SOURCE, read_regular
from verl_slurm.base.exit_codes import ExitCode

__all__ = ["Rule", "rules"]

_PACKAGE = Path(__file__).resolve().parents[1]
_SOURCES = (
    "config/checks/*.py",
    "config/elastic.py",
    "config/families.py",
    "submit/checks/*.py",
    "doctor/cluster_rules.py",
)
_FINDINGS = {"warn", "bad"}
_REFUSALS: dict[str, ExitCode] = {
    "Complaint": ExitCode.CONFIG,
    **{
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.VerlSlurmError)
    },
}
_ENTRIES = {"tiers": "tiers[]", "services": "services.NAME", "containers": "slurm.container"}
"""What `key` stands for in `f"{key}.path"`, by the module of the check."""
_DOTTED = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")
_HOLE = "\N{HORIZONTAL ELLIPSIS}"
"""Stands for a value that is known when the check runs."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which a check refuses a configuration, or warns of it."""

    check: str
    """Its file below `verl_slurm/`."""
    keys: tuple[str, ...]
    """All keys that it names; the first is the one that it would have changed."""
    asks: str
    """The expected value or what is wrong, with an ellipsis for each value that only a configuration has."""
    expects: bool
    """It is the expected value."""
    remedy: str = ""
    exit_code: int | None = None
    """None: it warns, and refuses nothing."""


def rules(known: Collection[str]) -> list[Rule]:
    """Returns the rules of all checks that name one of the `known` keys, in the order of their files."""
    return _rules(frozenset(known))


@cache
def _rules(known: frozenset[str]) -> list[Rule]:
    found: list[Rule] = []
    for path in sorted(path for pattern in _SOURCES for path in _PACKAGE.glob(pattern)):
        tree = ast.parse(read_regular(path, SOURCE))
        reader = _Reader(str(path.relative_to(_PACKAGE)), _constants(tree), _ENTRIES.get(path.stem), known)
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                found += reader.of_function(function)
    return list(dict.fromkeys(found))


def _constants(tree: ast.Module) -> dict[str, str]:
    """Maps the module's own names of texts to the texts: `_TP = "rollout.tensor_parallel_size"`."""
    return {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


class _Reader:
    """Reads the rules of one module."""

    def __init__(
        self, check: str, constants: dict[str, str], entries: str | None, known: frozenset[str]
    ) -> None:
        self._check, self._constants, self._entries, self._known = check, constants, entries, known

    def of_function(self, function: ast.FunctionDef) -> Iterator[Rule]:
        sections = _aliases(function)
        for call, around in _calls(function.body, {}):
            texts = [self._text(word) for word in [*call.args, *(word.value for word in call.keywords)]]
            # The first text of a complaint is a key by itself, such as `name`; elsewhere a key has a dot.
            named = [texts[0]] if texts and texts[0] in self._known else []
            for text in texts:
                named += self._keys(text)
            for code in around.values():
                named += self._keys_of_code(code, sections)
            if named:
                yield self._rule(call, texts, tuple(dict.fromkeys(named)))

    def _rule(self, call: ast.Call, texts: list[str], keys: tuple[str, ...]) -> Rule:
        by_name = {word.arg: self._text(word.value) for word in call.keywords}
        kind, (what, second, third, fourth, *_) = _name(call), [*texts, "", "", "", ""]
        # Positions: Complaint(key, found, expected, remedy), Error(what, *, ...), warn(topic, found, remedy).
        if kind == "Complaint":
            asks, remedy = third, fourth
        elif kind in _FINDINGS:
            asks, remedy = second, third
        else:
            asks, remedy = what, by_name.get("remedy", "")
            if expected := by_name.get("expected", "").strip(_HOLE):
                asks = f"{asks}, expected {expected}"
        # A text that only the check itself knows tells nothing here; its remedy may.
        if not asks.strip(_HOLE):
            asks = remedy
        return Rule(
            check=self._check,
            keys=keys,
            asks=asks,
            expects=kind == "Complaint",
            remedy=remedy,
            exit_code=_REFUSALS.get(kind),
        )

    def _keys_of_code(self, code: ast.expr, sections: dict[str, str]) -> list[str]:
        found = []
        for node in ast.walk(code):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += self._keys(node.value)
            elif isinstance(node, ast.Attribute) and re.fullmatch(r"\w+(\.\w+)+", text := ast.unparse(node)):
                first, _, rest = text.partition(".")
                if first in sections:
                    key = f"{sections[first]}.{rest}".lstrip(".")
                    found += [key] if key in self._known else []
        return found

    def _keys(self, text: str) -> list[str]:
        if self._entries and text.startswith(f"{_HOLE}."):
            text = text.replace(_HOLE, self._entries, 1)
        words = [text] if "." in text else []
        return [word for word in [*words, *_DOTTED.findall(text)] if word in self._known]

    def _text(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.Name):
            return self._constants.get(node.id, _HOLE)
        if isinstance(node, ast.JoinedStr):
            return (
                "".join(self._text(part) for part in node.values)
                .replace(f"={_HOLE} s", f"={_HOLE}")
                .replace(f"={_HOLE}", "")
            )
        if isinstance(node, ast.FormattedValue):
            return self._text(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._text(node.left) + self._text(node.right)
        return _HOLE


def _calls(
    body: list[ast.stmt], around: dict[str, ast.expr]
) -> Iterator[tuple[ast.Call, dict[str, ast.expr]]]:
    """Yields each refusal with the condition and the loop right above it."""
    for statement in body:
        inner = [part for field in ("body", "orelse", "finalbody") for part in getattr(statement, field, [])]
        inner += [part for each in getattr(statement, "handlers", []) for part in each.body]
        if isinstance(statement, ast.If):
            yield from _calls(inner, around | {"if": statement.test})
        elif isinstance(statement, ast.For):
            yield from _calls(inner, around | {"for": statement.iter})
        elif inner:
            yield from _calls(inner, around)
        else:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and (_name(node) in _REFUSALS or _name(node) in _FINDINGS):
                    yield node, around


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _aliases(function: ast.FunctionDef) -> dict[str, str]:
    """Maps a local name to the section that it holds: `train = config.train`, also in a tuple."""
    found = {"config": ""}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        names, values = _parts(node.targets[0]), _parts(node.value)
        if len(names) == len(values):
            for name, value in zip(names, values, strict=True):
                text = ast.unparse(value)
                if isinstance(name, ast.Name) and re.fullmatch(r"config(\.\w+)+", text):
                    found[name.id] = text.removeprefix("config.")
    return found


def _parts(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]
