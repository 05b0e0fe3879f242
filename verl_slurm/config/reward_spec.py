"""Specifies `model.reward`, and checks it as far as possible without running code. Torch-free.

```
rule:NAME                    a rule of ours, e.g. rule:arithmetic
classifier:DIR               a Hugging Face sequence classifier with one label
python:MODULE:FUNCTION       a function of a module that the job can import
python:FILE.py:FUNCTION      a function of a file
```

A function is called with three lists of texts (prompts, responses, answers) and returns one float a response. It must
return the same floats for the same texts, whatever it scored before.
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal, NamedTuple

from verl_slurm.base.bounded import SOURCE, read_regular
from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.base.one_line import counted

FORMS = "rule:NAME, classifier:DIR, python:MODULE:FUNCTION or python:FILE.py:FUNCTION"

_KINDS = re.compile(r"(rule|classifier|python):(.+)", re.DOTALL)
_MODULE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_ARGUMENTS = ("prompts", "responses", "answers")
_PLACES = {
    "prompt": 0,
    "response": 1,
    "completion": 1,
    "solution_str": 1,
    "ground_truth": 2,
    "data_source": 3,
}
"""Usual names of parameters, without the s of a plural, to their places; verl's `data_source` is not given."""


class RewardSpec(NamedTuple):
    """Holds the parts of a reward's name."""

    kind: Literal["rule", "classifier", "python"]
    name: str
    """The rule, the directory, the module or the file."""
    function: str = ""

    @property
    def is_file(self) -> bool:
        """Returns whether the function is in a file instead of a module."""
        return self.kind == "python" and self.name.endswith(".py")

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" + (f":{self.function}" if self.function else "")


def parse_reward(text: str) -> RewardSpec | None:
    """Splits `text` into its parts; None if it has none of the forms above."""
    match = _KINDS.fullmatch(text)
    # The text stands in lines of the journal and of the log; a line break in it would begin a line of its own.
    if match is None or not text.isprintable():
        return None
    kind, rest = match[1], match[2]
    if kind == "rule":
        return RewardSpec("rule", rest)
    if kind == "classifier":
        return RewardSpec("classifier", rest)
    # From the right: a file's path may have a colon.
    name, _, function = rest.rpartition(":")
    good = name.endswith(".py") or _MODULE.fullmatch(name) is not None
    return RewardSpec("python", name, function) if good and function.isidentifier() else None


def nearest_form(text: str) -> str:
    """Returns how to write what is none of the forms, where that can be told; otherwise an empty text."""
    named = text.removeprefix("python:")
    spec = parse_reward(f"python:{named}:FUNCTION" if named.endswith(".py") else f"python:{named}")
    # A word without a dot before the colon may be a misspelled `rule` or `classifier`.
    return f"write {spec}" if spec is not None and "." in spec.name else ""


def source_file(spec: RewardSpec, path: Sequence[str] | None = None) -> Path:
    """Returns the source file of a `python:` reward; imports nothing. No `path`: modules are looked for in sys.path.

    Raises:
        ConfigError: no such file, no such module, or a module without a source file.
    """
    if spec.is_file:
        file = Path(spec.name)
        if file.is_file():
            return file
        raise _refusal(spec, "no such file", "a Python file")
    entries: Sequence[str] | None = list(sys.path if path is None else path)
    origin = None
    for part in spec.name.split("."):
        # One name at a time: `importlib.util.find_spec("a.b")` would import `a`, and that runs code.
        found = PathFinder.find_spec(part, entries) if entries is not None else None
        if found is None:
            raise _refusal(spec, f"no module {spec.name!r}", "a module that the job can import, or a FILE.py")
        origin, entries = found.origin, found.submodule_search_locations
    # Only source can be hashed and run from the bytes that were hashed.
    if origin is None or not origin.endswith(".py"):
        raise _refusal(spec, f"a module without Python source: {origin}", "a Python module")
    return Path(origin)


def check_function(spec: RewardSpec, file: Path) -> bool:
    """Checks a reward's function; returns whether it reads its third argument, the answers, as far as can be seen.

    Raises:
        DataError: the file cannot be read or parsed.
        ConfigError: there is no such function, or it cannot be called with three lists.
    """
    try:
        # Parsed, not run: a submission on a login node must not run the code of a reward.
        tree = ast.parse(read_regular(file, SOURCE, follow=True), str(file))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        remedy = "fix it, or set model.reward"
        raise DataError(
            "the reward's source cannot be read", where=file, found=error, remedy=remedy
        ) from None
    found = [node for node in bindings(tree.body) if spec.function in names_of(node)]
    if not found:
        raise _refusal(
            spec, f"nothing named {spec.function!r} in {file}", "a function at the module's top level"
        )
    # A later binding of the same name wins when the module runs.
    last = found[-1]
    # Its call would give a coroutine, an object or an iterator, and no scores.
    if kind := _no_plain_function(last):
        raise _refusal(spec, f"{kind} at {file}:{last.lineno}", "a plain function")
    # A name that is bound by an assignment or an import is not followed.
    if not isinstance(last, ast.FunctionDef):
        return False
    if complaint := _complaint(last.args):
        raise _refusal(spec, f"{complaint} at {file}:{last.lineno}", f"({', '.join(_ARGUMENTS)})")
    answers = [argument.arg for argument in (*last.args.posonlyargs, *last.args.args)][2:3]
    names = (node for node in ast.walk(last) if isinstance(node, ast.Name) and node.id in answers)
    return any(isinstance(node.ctx, ast.Load) for node in names)


def _no_plain_function(node: ast.stmt) -> str:
    match node:
        case ast.AsyncFunctionDef():
            return "an async function"
        case ast.ClassDef() if any("__call__" in names_of(part) for part in node.body):
            return "a class, not an object of it"
        # A decorator may make a list of what is yielded; functions within it are others.
        case ast.FunctionDef(decorator_list=[]):
            rest: list[ast.AST] = [*node.body]
            while rest:
                if isinstance(part := rest.pop(), ast.Yield | ast.YieldFrom):
                    return "a function with `yield`"
                if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                    rest += ast.iter_child_nodes(part)
    return ""


def bindings(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements at the top level, including those inside `if`, `try` and `with`."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from bindings(getattr(node, inner, []))
        if isinstance(node, ast.Try):
            # `try: import x` with a fallback in the handler is common.
            for handler in node.handlers:
                yield from bindings(handler.body)


def names_of(node: ast.stmt) -> set[str]:
    """Returns the names that a statement binds."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Import() | ast.ImportFrom():
            return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        case ast.Assign():
            return {
                name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)
            }
        case ast.AnnAssign() if isinstance(node.target, ast.Name):
            return {node.target.id}
        case _:
            return set()


def _complaint(args: ast.arguments) -> str:
    """Returns why a function with these parameters cannot take three positional arguments; empty if it can."""
    names = [argument.arg for argument in (*args.posonlyargs, *args.args)]
    positional = len(names)
    # More parameters are fine as long as they have defaults.
    needed = positional - len(args.defaults)
    if needed > len(_ARGUMENTS) or (positional < len(_ARGUMENTS) and args.vararg is None):
        return f"a function of {counted(positional, 'argument')}"
    # They are given by their places: by other names each would be taken for another list, in silence.
    if any(_PLACES.get(name.rstrip("s"), place) != place for place, name in enumerate(names[:3])):
        return f"a function of ({', '.join(names[:3])})"
    missing = [
        arg.arg for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None
    ]
    return f"a function that needs the keyword {missing[0]!r}" if missing else ""


def _refusal(spec: RewardSpec, found: str, expected: str) -> ConfigError:
    return ConfigError(
        "no such reward function",
        where=f"model.reward: {spec}",
        found=found,
        expected=expected,
        remedy="set model.reward to python:FILE.py:FUNCTION of a file that all nodes see"
        if spec.is_file
        else f"see `python -c 'import {spec.name}'` in the job's environment, or set model.reward",
    )
