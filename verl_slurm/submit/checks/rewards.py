"""Makes a user's reward absolute, and checks it without torch."""

import os
from pathlib import Path

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.reward_spec import FORMS, check_function, parse_reward, source_file
from verl_slurm.submit.checks.model_files import check_model

__all__ = ["RULES", "absolute_reward", "check_reward"]

# The rules that the trainer offers; it imports torch, so the names are repeated here, and a test compares them.
RULES = ("arithmetic",)


def absolute_reward(text: str, base: Path) -> str:
    """Makes the path in `text`, if it has one, absolute against `base`. A text that is no reward stays as it is."""
    spec = parse_reward(text)
    if spec is None or not (spec.kind == "classifier" or spec.is_file):
        return text
    return str(spec._replace(name=os.path.abspath(base / Path(spec.name).expanduser())))


def check_reward(text: str) -> None:
    """Refuses a reward that does not exist, as far as can be seen without running it.

    Args:
        text: paths absolute.

    Raises:
        ConfigError: none of the forms, no such rule, module or function.
        DataError: not a model directory, or a source that cannot be parsed.
    """
    spec = parse_reward(text)
    if spec is None:
        raise ConfigError(
            "no such reward", where="model.reward", found=text, expected=FORMS, remedy="set model.reward"
        )
    if spec.kind == "rule" and spec.name not in RULES:
        raise ConfigError(
            "no such built-in",
            where="model.reward",
            found=text,
            expected=" or ".join(f"rule:{name}" for name in RULES),
            remedy="set model.reward",
        )
    if spec.kind == "classifier":
        check_model("model.reward", Path(spec.name))
    if spec.kind == "python":
        check_function(spec, source_file(spec))
