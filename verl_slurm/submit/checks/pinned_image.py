"""Checks the image of a run on the machine that submits. A runtime is looked for on the nodes, where it is started."""

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.schema import RunConfig
from verl_slurm.containers.image import pin_image
from verl_slurm.containers.image_mounts import mounts
from verl_slurm.containers.runtimes import agents_inside
from verl_slurm.submit.submission_plan import Cluster


def check_container(config: RunConfig, cluster: Cluster) -> tuple[RunConfig, list[str]]:
    """Returns the configuration with the image's digest in it, and what was checked.

    Args:
        config: paths absolute.

    Raises:
        ConfigError: no such image, another one than the recorded, a path that cannot be mounted, or no Slurm for Pyxis.
    """
    if config.slurm.container is None:
        return config, []
    if agents_inside(config) and cluster != "slurm":
        raise ConfigError(
            "Pyxis is a plugin of Slurm's srun, and this run has no Slurm",
            where="slurm.container.runtime",
            found="pyxis, on this machine alone",
            expected="apptainer or podman",
            remedy="set slurm.container.runtime, or leave out --cluster local",
        )
    places = mounts(config)
    config = pin_image(config)
    container = config.slurm.container
    assert container is not None
    name = f"image {container.image}" + (f", {container.digest}" if container.digest else "")
    return config, [f"{name}, {len(places)} places to mount"]
