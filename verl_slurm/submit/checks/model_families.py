"""Checks before queueing that the trainer supports this model's family, and that the configuration fits it."""

from pathlib import Path
from typing import Any

from verl_slurm.base.bounded import read_model_config
from verl_slurm.base.errors import ConfigError, DataError, VerlSlurmError
from verl_slurm.config.families import family_complaints, family_notes
from verl_slurm.config.schema import RunConfig
from verl_slurm.submit.checks.inputs import BUILTIN_MODELS

__all__ = ["check_family", "said_of"]


def said_of(path: str) -> dict[str, Any]:
    """Returns the content of the config.json of `model.path`, now or once a `builtin:` is built."""
    if path.startswith("builtin:"):
        return BUILTIN_MODELS[path.removeprefix("builtin:")]
    return read_model_config(Path(path))


def check_family(config: RunConfig) -> list[str]:
    """Refuses a model that cannot be trained as configured; otherwise returns notes for the user.

    Args:
        config: paths absolute; the model directory has been checked.

    Raises:
        DataError: the first complaint, about the model itself.
        ConfigError: the first complaint, about another key that does not go with it.
    """
    said = said_of(config.model.path)
    for found in family_complaints(config, said):
        by_itself = found.key == "model.path"
        refusal: type[VerlSlurmError] = DataError if by_itself else ConfigError
        raise refusal(
            "this model cannot be trained here" if by_itself else "the model cannot be trained as configured",
            where=config.model.path if by_itself else f"{found.key}, {config.model.path}",
            found=found.found,
            expected=found.expected,
            remedy=found.remedy,
        )
    return family_notes(config, said)
