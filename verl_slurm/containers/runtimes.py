"""Builds the command lines of container runtimes as values, and lists what is mounted. Pure but for the user's home.

One row of `RUNTIMES` is one runtime. `apptainer` and `podman` stand around the launcher of one node's ranks,
which the agent starts. Pyxis is a plugin of srun, so it stands around the agents: an srun of the agent's own would not
survive Slurm's TERM (docs/decisions/0019-containers.md).

What the runtimes have in common: no namespace for network and IPC, as ranks use the job's network and shared memory; a
read-only image; no home directory; no variable on the command line. The ranks' environment goes by a file
(`inside`). Paths are the same inside. Before anything of ours is imported there, a few lines of Python on the command
line look whether the image fits the run, as it may have nothing of ours that could look.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import verl_slurm
from verl_slurm.base.errors import ConfigError
from verl_slurm.config.checks.options import asks_for_gpus
from verl_slurm.config.reward_spec import parse_reward
from verl_slurm.config.schema import ContainerConfig, RunConfig
from verl_slurm.verl.overrides import user_settings
from verl_slurm.verl.verl_inputs import inputs_of, is_remote, said_settings

Gpus = Literal["", "nvidia", "amd"]
"""The maker of the GPUs that a node has; empty: none, or the run uses none."""

_NVIDIA = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
"""Enroot's hook mounts the driver for these. "all": those that Slurm has granted (its cgroup); ranks choose by
CUDA_VISIBLE_DEVICES."""
RANK_PACKAGES = (
    *("torch", "numpy", "msgspec", "ruamel.yaml"),
    *("zstandard", "msgpack", "stringzilla", "cryptography"),
)
"""What ranks import with each training loop, by the names of modules."""
OWN_PACKAGES = ("transformers", "safetensors", "tensorboard")
"""What our own trainer's ranks import besides."""
AGENT_PACKAGES = ("psutil",)
"""What an agent inside an image imports besides."""

# Python 3.6 can read it. In the order of what a user has to do first.
_LOOK = """\
import sys
from importlib import util
image, version, packages = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
def refuse(what, found, expected, remedy):
    line = "ConfigError: %s: %s (found %s, expected %s); in the image: %s" % (what, image, found, expected, remedy)
    sys.exit(line)
if sys.version_info < (3, 11):
    found, remedy = "Python %d.%d" % sys.version_info[:2], "install one, and name it by slurm.container.python"
    refuse("the image's Python is too old", found, "3.11 or later", remedy)
from importlib import metadata
try: found = metadata.version("verl-slurm")
except metadata.PackageNotFoundError: found = "none"
pip = sys.executable + " -m pip install "
if found != version:
    refuse("the image has another version of verl-slurm", found, version, pip + "--no-deps verl-slurm==" + version)
def there(name):
    try: return util.find_spec(name) is not None
    except ModuleNotFoundError: return False
missing = [name for name in packages if not there(name)]
if missing:
    refuse("the image lacks what ranks import", "no " + ", no ".join(missing), "them", pip + " ".join(missing))
import runpy
sys.argv = sys.argv[4:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class Mount(NamedTuple):
    """One directory or file."""

    path: str
    writable: bool = False


class RuntimeRequest(NamedTuple):
    """What a runtime has to provide."""

    container: ContainerConfig
    mounts: Sequence[Mount]
    gpus: Gpus


class Runtime(NamedTuple):
    """One runtime: what it stands around, and its words up to and with the image."""

    around: Literal["ranks", "agents"]
    words: Callable[[RuntimeRequest], list[str]]


def _apptainer(wanted: RuntimeRequest) -> list[str]:
    gpus = {"": [], "nvidia": ["--nv"], "amd": ["--rocm"]}[wanted.gpus]
    binds = [f"--bind={path}:{path}:{'rw' if writable else 'ro'}" for path, writable in wanted.mounts]
    # cleanenv: else all variables of the node's, LD_LIBRARY_PATH included, would be in the image.
    own = ["apptainer", "exec", "--cleanenv", "--no-home", *gpus, *binds]
    return [*own, *wanted.container.extra_args, wanted.container.image]


def _podman(wanted: RuntimeRequest) -> list[str]:
    gpus = {
        "": [],
        "nvidia": ["--device=nvidia.com/gpu=all"],
        "amd": ["--device=/dev/kfd", "--device=/dev/dri"],
    }[wanted.gpus]
    binds = [f"--volume={path}:{path}:{'rw' if writable else 'ro'}" for path, writable in wanted.mounts]
    # Ranks stay in Slurm's cgroup, under its limits.
    own = ["podman", "run", "--rm", "--cgroups=disabled", "--network=host", "--ipc=host", "--read-only"]
    own += ["--security-opt=label=disable", "--entrypoint="]
    # The user's own number inside, by which ranks know their agent's socket. root has it without a word.
    own += ["--userns=keep-id"] if os.geteuid() != 0 else []
    return [*own, *gpus, *binds, *wanted.container.extra_args, wanted.container.image]


def _pyxis(wanted: RuntimeRequest) -> list[str]:
    binds = ",".join(f"{path}:{path}:{'rw' if writable else 'ro'}" for path, writable in wanted.mounts)
    own = [f"--container-image={wanted.container.image}", f"--container-mounts={binds}"]
    own += [f"--container-workdir={wanted.container.workdir}", "--no-container-mount-home"]
    return [*own, *wanted.container.extra_args]


RUNTIMES = {
    "apptainer": Runtime("ranks", _apptainer),
    "podman": Runtime("ranks", _podman),
    "pyxis": Runtime("agents", _pyxis),
}


def ranks_inside(config: RunConfig) -> bool:
    """Returns whether an agent outside starts a container for its ranks."""
    container = config.slurm.container
    return container is not None and RUNTIMES[container.runtime].around == "ranks"


def agents_inside(config: RunConfig) -> bool:
    """Returns whether agents run inside, with their ranks."""
    return config.slurm.container is not None and not ranks_inside(config)


def contained_ranks_argv(config: RunConfig, gpus: Gpus, control: str, launcher: Sequence[str]) -> list[str]:
    """Returns the command of an agent outside. `launcher`: as outside of a container. Errors as `mounts`."""
    container = config.slurm.container
    assert container is not None
    inside = ["verl_slurm.containers.inside", control, container.workdir, container.python, *launcher[1:]]
    return contained_argv(config, inside, control, gpus=gpus)


def contained_argv(config: RunConfig, module: Sequence[str], *places: str, gpus: Gpus = "") -> list[str]:
    """Returns the command of a module of ours inside; for agents the words of srun, and their command. It may write to
    `places` besides those of the run. Errors as `mounts`.
    """
    container = config.slurm.container
    assert container is not None
    words = RUNTIMES[container.runtime].words(RuntimeRequest(container, mounts(config, *places), gpus))
    return [*words, *probe_argv(config, module)]


def in_image(config: RunConfig) -> dict[str, str]:
    """Returns the variables with which srun has to be started, so that Pyxis mounts the driver."""
    wanted = config.distributed.device == "cuda" or (
        config.distributed.device == "auto"
        and (config.slurm.gpus_per_node > 0 or asks_for_gpus(config.slurm.extra))
    )
    return dict(_NVIDIA) if agents_inside(config) and wanted else {}


def mounts(config: RunConfig, *more: str) -> list[Mount]:
    """Returns what is mounted, sorted: the run's and the second copy's directory, `binds`, and inputs read-only.

    Args:
        config: paths absolute.
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
        return [str(Path(os.path.expanduser(one.place))) for one in inputs if not is_remote(one.place)]
    program = config.trainer.command[:1]
    return [config.data.root, *(str(Path(word).parent) for word in program if word.startswith("/"))]


def probe_argv(config: RunConfig, inside: Sequence[str]) -> list[str]:
    """Returns a command that looks, and then becomes a module of ours: `inside`, with its arguments."""
    container = config.slurm.container
    assert container is not None
    packages = [*RANK_PACKAGES, *(() if config.trainer.is_guest else OWN_PACKAGES)]
    packages += AGENT_PACKAGES if container.runtime == "pyxis" else ()
    words = [container.image, verl_slurm.__version__, ",".join(packages)]
    return [container.python, "-P", "-c", _LOOK, *words, *inside]
