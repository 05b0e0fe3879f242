"""`python -m verl_slurm.trainer.quickstart model|data SPEC CACHE`: makes a built-in and prints its directory.

A separate process, because the command line that needs it must not import torch.
"""

import os
import sys
from pathlib import Path

from verl_slurm.base.errors import ConfigError, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.config.schema import BUILTIN
from verl_slurm.export.exporting import torch_environment

_HEAD_DIMS = {"tiny": 16, "tiny32": 32}
"""Built-in model -> the width of its attention heads."""


def resolve_model(spec: str, cache: Path) -> Path:
    """Returns the directory that `model.path` names; a built-in one is built under `cache` once.

    Raises:
        ConfigError: no such built-in model.
    """
    if not spec.startswith(BUILTIN):
        return Path(spec)
    name = spec.removeprefix(BUILTIN)
    if name not in _HEAD_DIMS:
        raise ConfigError(
            "no such built-in model",
            where="model.path",
            found=spec,
            expected=" or ".join(BUILTIN + known for known in _HEAD_DIMS),
            remedy="set model.path",
        )
    # Here, as it imports torch, and a path or a mistake needs none.
    from verl_slurm.trainer.quickstart.tiny_model import build_model

    return build_model(cache / name, head_dim=_HEAD_DIMS[name])


def resolve_data(spec: str, cache: Path) -> Path:
    """Returns the data root that `data.root` names; `builtin:arithmetic` is written under `cache` once.

    Raises:
        ConfigError: no such built-in data set.
    """
    if not spec.startswith(BUILTIN):
        return Path(spec)
    if spec != "builtin:arithmetic":
        raise ConfigError(
            "no such built-in data set",
            where="data.root",
            found=spec,
            expected="builtin:arithmetic",
            remedy="set data.root",
        )
    from verl_slurm.trainer.quickstart.arithmetic_data import build_data

    return build_data(cache / "arithmetic")


def main(argv: list[str]) -> int:
    """Prints the directory; returns the exit code."""
    if len(argv) != 3 or argv[0] not in ("model", "data"):
        sys.stderr.write("usage: python -m verl_slurm.trainer.quickstart model|data SPEC CACHE\n")
        return ExitCode.USAGE
    kind, spec, cache = argv
    resolve = resolve_model if kind == "model" else resolve_data
    try:
        # Before torch is imported, and however this process was started.
        with torch_environment() as environment:
            os.environ.update(environment)
            sys.stdout.write(f"{resolve(spec, Path(cache))}\n")
    except VerlSlurmError as error:
        sys.stderr.write(f"{error.one_line()}\n")
        return int(error.exit_code)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
