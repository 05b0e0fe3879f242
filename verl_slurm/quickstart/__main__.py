"""`python -m verl_slurm.quickstart model|data SPEC CACHE`: makes a built-in and prints its directory.

A separate process, because the command line that needs it must not import torch.
"""

import sys
from pathlib import Path

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.quickstart.builtin import resolve_data, resolve_model

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """"""
    if len(argv) != 3 or argv[0] not in ("model", "data"):
        sys.stderr.write("usage: python -m verl_slurm.quickstart model|data SPEC CACHE\n")
        return ExitCode.USAGE
    kind, spec, cache = argv
    resolve = resolve_model if kind == "model" else resolve_data
    try:
        sys.stdout.write(f"{resolve(spec, Path(cache))}\n")
    except VerlSlurmError as error:
        sys.stderr.write(f"{error.one_line()}\n")
        return int(error.exit_code)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
