"""What several commands have in common."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from verl_slurm.exit_codes import ExitCode
from verl_slurm.paths import RunPaths

__all__ = ["PLACE", "RUN", "exits", "json_option", "key_option"]

F = TypeVar("F", bound=Callable[..., Any])


class _RunType(click.ParamType[RunPaths]):
    """A run directory: what `submit` printed. Turned into its absolute `RunPaths`."""

    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> RunPaths:
        from verl_slurm.submit.record import require_run

        if isinstance(value, RunPaths):
            return value
        return require_run(RunPaths(Path(value).resolve()))


RUN = _RunType()
# click's own look at permissions would end with a usage error; ours says whose fault it is, with its own code.
PLACE = click.Path(path_type=Path, readable=False)


def json_option(command: F) -> F:
    """`--json`: one JSON value on standard output, for scripts."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")(command)


def key_option(text: str) -> Callable[[F], F]:
    """`--key-file`: a key by hand, e.g. for a checkpoint that was copied away from its run."""
    return click.option("--key-file", type=PLACE, help=text)


def exits(*codes: ExitCode) -> str:
    """The epilog that lists a command's exit codes."""
    listed = {ExitCode.OK, ExitCode.USAGE, *codes}
    if ExitCode.NOT_FOUND in listed:
        listed.add(ExitCode.PERMISSION)  # what can be missing can be another user's, too
    lines = [f"{int(code):>4}  {code.description}" for code in sorted(listed)]
    return "\b\nExit codes:\n" + "\n".join(lines)
