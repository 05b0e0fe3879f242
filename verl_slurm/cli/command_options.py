"""Options and parameter types that several commands share."""

import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from verl_slurm.base.errors import NotFound, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths, is_circle
from verl_slurm.base.shipped import example, examples

_MOST_OFFERED = 200
# No shell takes a part of it for anything else.
_PLAIN_NAME = re.compile(r"[\w./+@%,][\w./+@%,-]*")
_KINDS = frozenset({"text", "number", "map", "section"})

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    ParamType = click.ParamType
else:

    class ParamType(click.ParamType):
        """The base of our types of parameters."""

        # click's own is generic at run time in newer releases alone.
        def __class_getitem__(cls, _: object) -> type:
            return cls


def refuse_circle(path: "str | os.PathLike[str]") -> None:
    """Raises NotFound for links that lead in a circle."""
    if is_circle(path):
        remedy = "remove one of them: ls -l shows where each leads"
        raise NotFound("links that lead in a circle", where=path, remedy=remedy)


class _RunType(ParamType[RunPaths]):
    """A run directory. With `damaged`, one without run.yaml will do, if another file of a run is left."""

    name = "run"

    def __init__(self, *, damaged: bool = False) -> None:
        self._damaged = damaged

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> RunPaths:
        if isinstance(value, RunPaths):
            return value
        if not value:  # an unset variable of a script would be the working directory
            self.fail("an empty word is no run.", param, ctx)
        from verl_slurm.runs.run_record import require_run, require_traces

        refuse_circle(value)
        require, paths = require_traces if self._damaged else require_run, RunPaths(Path(value).resolve())
        try:
            return require(paths)
        except NotFound as error:
            # Its run was moved or removed: the job goes on, and Slurm alone still knows of it.
            with suppress(VerlSlurmError):
                from verl_slurm.runs.liveness import queued_jobs

                if not paths.root.exists() and (jobs := queued_jobs(paths)):
                    error.found = f"job {jobs[-1]} of a run that was here"
                    error.remedy = f"move the run back, or end its job: scancel {jobs[-1]}"
            raise

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        # A run directory is looked for where the word points, and in runs/, where submit makes them.
        places = [f"{incomplete}*", *([] if "/" in incomplete else [f"runs/{incomplete}*"])]
        found = sorted(os.path.dirname(at) for pattern in places for at in glob(f"{pattern}/run.yaml"))
        # click's script for bash puts a name on the command line as it is, and another user may have made it. Other
        # names are left to the shell's own completion, which quotes them.
        offered = [name for name in found if _PLAIN_NAME.fullmatch(name)][:_MOST_OFFERED]
        return [CompletionItem(name) for name in offered] or [CompletionItem(incomplete, type="dir")]


class _ConfigType(ParamType[Path]):
    """A YAML file, a run's directory, or the bare name of a shipped example, which takes precedence over a path."""

    name = "config"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if isinstance(value, Path):
            return value
        if not value:
            self.fail("an empty word is no configuration.", param, ctx)
        refuse_circle(value)
        shipped = example(value)
        if shipped is not None and os.path.lexists(value) and not (ctx and ctx.resilient_parsing):
            # Without this line, a user who has a run of that name would be surprised.
            click.echo(f"verl-slurm: {value} is the shipped example; what lies here is ./{value}", err=True)
        return shipped or Path(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        names = [CompletionItem(name) for name in examples() if incomplete and name.startswith(incomplete)]
        return names or [CompletionItem(incomplete, type="file")]


class _KeyType(ParamType[str]):
    """A key of a configuration, e.g. `train.steps`; or with its value, `train.steps=50`."""

    name = "key"

    def __init__(self, *, with_value: bool) -> None:
        self._with_value = with_value

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from verl_slurm.config.explain import all_keys

        name, equals, begun = incomplete.partition("=")
        prefix = f"{name}="
        before = ctx.params.get(param.name or "")
        # bash takes `=` for a word of its own, and asks for what follows it alone.
        if isinstance(before, tuple) and (incomplete == "=" or before[-1:] == ("=",)):
            equals, begun, prefix = "=", incomplete.removeprefix("="), ""
            name = before[-1] if incomplete == "=" else before[-2]
        if not equals:
            ending = "=" if self._with_value else ""
            return [
                CompletionItem(key.key + ending, help=key.type)
                for key in all_keys()
                if key.key.startswith(name) and "[]" not in key.key
            ]
        # Only words that stand for themselves: `text` and `whole number` name a kind of value.
        words = [word for key in all_keys() if key.key == name for word in key.type.split(" | ")]
        return [
            CompletionItem(prefix + word)
            for word in words
            if word.startswith(begun) and " " not in word and word not in _KINDS
        ]


@add_completion_class
class Bash(BashComplete):
    """click's own, but for the blank behind `KEY=`, where a value has to follow."""

    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)", "COMPREPLY+=($value)\n            [[ $value == *= ]] && compopt -o nospace"
    )


CONFIG = _ConfigType()
KEY = _KeyType(with_value=False)
KEY_VALUE = _KeyType(with_value=True)
RUN = _RunType()
DAMAGED_RUN = _RunType(damaged=True)


class _PlaceType(click.Path):
    """A file or directory, which need not exist."""

    def __init__(self) -> None:
        # click's own check of permissions would end with a usage error; ours names the cause, with its own exit code.
        super().__init__(path_type=Path, readable=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        refuse_circle(value)
        return super().convert(value, param, ctx)


PLACE = _PlaceType()


class Whole(click.IntRange):
    """A whole number in ASCII digits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        # int() would take `1_000`, blanks and the digits of all scripts, too.
        if isinstance(value, str) and not re.fullmatch(r"-?[0-9]{1,18}", value):
            self.fail(f"{value[:40]!r} is not a whole number.", param, ctx)
        return super().convert(value, param, ctx)


class Number(click.FloatRange):
    """A finite number in ASCII digits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = isinstance(value, str)
        if text and not re.fullmatch(r"-?[0-9]{1,18}(\.[0-9]{1,18})?(e-?[0-9]{1,3})?", value):
            self.fail(f"{value[:40]!r} is not a number.", param, ctx)
        found: float = super().convert(value, param, ctx)
        # NaN is in no range and outside of none.
        if not math.isfinite(found):
            self.fail(f"{value[:40]!r} is too large.", param, ctx)
        return found


def option(name: str, kind: Any, text: str, *more: str, **settings: Any) -> Callable[[F], F]:
    """Adds an option with a value; `more`: the parameter's name, where it is another one."""
    return click.option(name, *more, type=kind, help=text, show_default="default" in settings, **settings)


def flag(name: str, text: str, *more: str) -> Callable[[F], F]:
    """Adds a switch; `more` as of `option`."""
    return click.option(name, *more, is_flag=True, help=text)


def key_option(text: str) -> Callable[[F], F]:
    """Adds `--key-file`: a key by hand, e.g. for a checkpoint that was copied away from its run."""
    return click.option("--key-file", type=PLACE, help=text)


def exits(names: str) -> str:
    """Returns the epilog that lists a command's exit codes, by their names with blanks between them."""
    listed = {ExitCode.OK, ExitCode.USAGE, *(ExitCode[name] for name in names.split())}
    if ExitCode.NOT_FOUND in listed:
        listed.add(ExitCode.PERMISSION)  # a file that can be missing can also be another user's
    lines = [f"{int(code):>4}  {code.description}" for code in sorted(listed)]
    return "\b\nExit codes:\n" + "\n".join(lines)


def command(
    exit_names: str, name: str | None = None, *, note: str = "", cls: type[click.Command] = click.Command
) -> Callable[[Callable[..., Any]], click.Command]:
    """Makes a command that lists its exit codes, with a note below them, and has `--json`."""
    epilog = exits(exit_names) + note
    return lambda function: with_json(click.command(name, cls, epilog=epilog)(function))


def with_json(made: click.Command) -> click.Command:
    """Adds `--json`, as the last option: one JSON value on standard output, for scripts."""
    made.params.append(click.Option(["--json", "as_json"], is_flag=True, help="Print JSON, for scripts."))
    return made
