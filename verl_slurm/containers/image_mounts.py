"""Lists what a container must see of the file system. Pure but for the user's home. Paths are the same inside."""

from pathlib import Path
from typing import NamedTuple

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.reward_spec import parse_reward
from verl_slurm.config.schema import RunConfig
from verl_slurm.verl.overrides import user_settings
from verl_slurm.verl.verl_inputs import inputs_of, is_remote, said_settings


class Mount(NamedTuple):
    """One directory or file."""

    path: str
    writable: bool = False


def mounts(config: RunConfig, *more: str) -> list[Mount]:
    """Returns what is mounted, sorted: the run's and the second copy's directory, `binds`, and inputs read-only.

    Args:
        config: paths absolute, with a container.
        more: further places to write to, e.g. the agent's control directory.

    Raises:
        ConfigError: a path that runtimes would take apart.
    """
    container = config.slurm.container
    assert container is not None
    written = [config.run_dir, config.checkpoint.local_dir or "", *container.binds, *more]
    read = inputs(config)
    # Ranks seal what they save, and read what they resume from.
    if (keys := config.checkpoint.encryption) is not None:
        read += [keys.key_file or "", *keys.old_key_files]
    read.append(config.checkpoint.resume_from or "")
    if (
        container.runtime == "pyxis"
    ):  # its agents and the hosts of services are inside, and read these themselves
        read += [*config.env_from_files.values(), config.observability.token_file or ""]
        read += [str(Path(service.command[0]).parent) for service in config.services.values()]
    found = {place: Mount(place) for place in read if place.startswith("/")}
    found |= {place: Mount(place, writable=True) for place in written if place.startswith("/")}
    for place in found:
        # `+` and blanks: the separators of Pyxis' flags and of Enroot's lines.
        if set(place) & set(",: \t\n") or not place.isprintable():
            raise ConfigError(
                "a path cannot be mounted into a container",
                where=place,
                expected="no `,`, `:` and blanks, which runtimes read as separators",
                remedy="choose another path, or a symbolic link to it",
            )
    return [found[place] for place in sorted(found)]


def inputs(config: RunConfig) -> list[str]:
    """Returns the files and directories that the ranks read, as the configuration names them; some are no paths."""
    return _of_guest(config) if config.trainer.is_guest else _of_trainer(config)


def _of_trainer(config: RunConfig) -> list[str]:
    reward = parse_reward(config.model.reward)
    places = [config.model.path, config.data.root, config.data.eval_root or "", config.data.chat_template]
    if reward is not None and reward.kind == "classifier":
        places.append(reward.name)
    elif reward is not None and reward.is_file:
        places.append(str(Path(reward.name).parent))  # it may import its neighbours
    return places


def _of_guest(config: RunConfig) -> list[str]:
    if config.trainer.backend == "verl":
        said = user_settings(config.verl)
        inputs = inputs_of(config.trainer.entry, said_settings(said), said)
        return [str(Path(one.place).expanduser()) for one in inputs if not is_remote(one.place)]
    program = config.trainer.command[:1]
    return [config.data.root, *(str(Path(word).parent) for word in program if word.startswith("/"))]
