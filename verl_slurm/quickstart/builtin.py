"""What `builtin:...` in a configuration stands for. Torch is imported only where a model must be built."""

from pathlib import Path

from verl_slurm.errors import ConfigError

__all__ = ["resolve_data", "resolve_model"]

_PREFIX = "builtin:"


def resolve_model(spec: str, cache: Path) -> Path:
    """The directory that `model.path` names; `builtin:tiny` is built under `cache` once.

    Raises:
        ConfigError: no such built-in model.
        DataError: something else lies at its place.
    """
    if not spec.startswith(_PREFIX):
        return Path(spec)
    if spec != "builtin:tiny":
        raise ConfigError(
            "no such built-in model",
            where="model.path",
            found=spec,
            expected="builtin:tiny",
            remedy="set model.path",
        )
    from verl_slurm.quickstart.model import build_model

    return build_model(cache / "tiny")


def resolve_data(spec: str, cache: Path) -> Path:
    """The data root that `data.root` names; `builtin:arithmetic` is written under `cache` once.

    Raises:
        ConfigError: no such built-in data set.
        DataError: something else lies at its place.
    """
    if not spec.startswith(_PREFIX):
        return Path(spec)
    if spec != "builtin:arithmetic":
        raise ConfigError(
            "no such built-in data set",
            where="data.root",
            found=spec,
            expected="builtin:arithmetic",
            remedy="set data.root",
        )
    from verl_slurm.quickstart.data import build_data

    return build_data(cache / "arithmetic")
