"""`verl-slurm`: the one place where an error becomes a line and an exit code."""

import sys

import click

from verl_slurm.errors import PermissionRefused, VerlSlurmError
from verl_slurm.exit_codes import ExitCode

__all__ = ["main"]

_INTERRUPTED = 130


def main(args: list[str] | None = None) -> int:
    """Run the command line and return its exit code. Bugs of ours keep their traceback.

    Args:
        args: without the program's name; default: `sys.argv`.
    """
    from verl_slurm.cli.main import cli

    words = sys.argv[1:] if args is None else args
    try:
        result = cli.main(words, prog_name="verl-slurm", standalone_mode=False)
        return int(result) if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show(sys.stdout)
        return int(ExitCode.OK)
    except click.ClickException as error:
        if "--json" in words:
            from verl_slurm.cli import render

            render.json_value({"error": error.format_message(), "exit_code": int(ExitCode.USAGE)})
        error.show()
        return int(ExitCode.USAGE)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except VerlSlurmError as error:
        return _report(error, words)
    except PermissionError as error:
        refused = PermissionRefused(
            "permission denied", where=error.filename, remedy="check the owner and the mode of that path"
        )
        return _report(refused, words)


def _report(error: VerlSlurmError, words: list[str]) -> int:
    from verl_slurm.cli import render

    render.error(error, as_json="--json" in words)
    return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
