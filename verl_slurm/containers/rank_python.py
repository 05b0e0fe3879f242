"""Starts one program of ours in the ranks' Python, beside the ranks: with their modules, or in the run's image.

It serves work that needs the ranks' torch and is no rank's, as dividing a checkpoint among another number of ranks.
"""

import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from sys import executable

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.files import write_file
from verl_slurm.base.search_path import clean_environment
from verl_slurm.config.schema import RunConfig
from verl_slurm.containers.inside import ENVIRONMENT, LIFELINE, pack_environment
from verl_slurm.containers.runtimes import agents_inside, contained_ranks_argv
from verl_slurm.slurm.rank_setup import python_of, setup_script
from verl_slurm.verl.reshard.dividing import Command

_END_S = 5.0
"""Seconds for the processes in a container to be gone; killed ones are within milliseconds."""
# What the set-up prints must not come between the program's lines.
_AFTER_SETUP = """\
_verl_slurm_argv=("$@")
exec {{_verl_slurm_output}}>&1 1>&2
{script}exec "${{_verl_slurm_argv[@]}}" >&"$_verl_slurm_output"
"""


@contextmanager
def ranks_python(
    config: RunConfig, module: Sequence[str], places: Sequence[Path], *, on_node: bool
) -> Iterator[Command]:
    """Returns the command of a module of ours; what runs in an image is ended at the exit.

    Args:
        config: paths absolute.
        module: its name and its arguments.
        places: that it reads and writes below.
        on_node: this is a node of the job: the user's own commands (`slurm.setup`) are run, and their variables set.

    Raises:
        ConfigError: the image is one that srun alone starts, or a path cannot be mounted.
    """
    container = config.slurm.container
    python = (python_of(config.slurm) or executable) if container is None else container.python
    argv, environ = [python, "-P", "-m", *module], dict(os.environ)
    if container is None:
        if on_node:
            environ |= {name: str(value) for name, value in config.env.items()}
        if script := setup_script(config.slurm, commands=on_node):
            bash = ("/bin/bash", "--noprofile", "--norc", "-c", _AFTER_SETUP.format(script=script))
            argv = [*bash, "verl-slurm", *argv]
        yield Command(argv, clean_environment(environ), python)
        return
    if agents_inside(config):
        raise ConfigError(
            "a checkpoint cannot be divided in this image",
            where=f"slurm.container.runtime: {container.runtime}",
            found="an image that srun alone starts, for agents and their ranks",
            remedy="divide it by `verl-slurm reshard CKPT --ranks N --out DIR`, run by a Python with the image's "
            "torch, and go on from there: checkpoint.resume_from; or keep the number of ranks",
        )
    with tempfile.TemporaryDirectory(prefix="verl-slurm-") as control, socket.socket(socket.AF_UNIX) as line:
        line.bind(f"{control}/{LIFELINE}")
        line.listen()
        line.setblocking(False)
        write_file(Path(control, ENVIRONMENT), pack_environment({}), durable=False)
        # No GPU: all is done on the CPU.
        words = contained_ranks_argv(config, "", control, argv, *map(str, places))
        try:
            yield Command(words, environ, f"{container.python} in {container.image}")
        finally:
            # It may outlive the runtime's own process. It ends when it loses its line, and takes all below with it.
            with suppress(OSError):
                held, _ = line.accept()
                with held:
                    held.settimeout(_END_S)
                    held.shutdown(socket.SHUT_WR)
                    held.recv(1)
