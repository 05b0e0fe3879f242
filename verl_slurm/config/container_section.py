"""Declares the section `slurm.container` of a configuration, in the manner of `schema.py`."""

from typing import Literal

from verl_slurm.config.section import Section

_FILES = (".sif", ".sqsh", ".squashfs", ".simg")

Runtime = Literal["apptainer", "podman", "pyxis"]


class ContainerConfig(Section, frozen=True):
    """Names the image that ranks run in (docs/containers.md).

    Lead and agents stay outside, where Slurm's commands are; with pyxis, the agents are inside. The image needs this
    version of verl-slurm and what the ranks import, and nothing of the daemon. The run's directory and its inputs are
    mounted under their own names, inputs read-only.
    """

    image: str
    """A file (.sif for apptainer, .sqsh for pyxis), or a name that ends with its digest: NAME@sha256:..."""
    digest: str | None = None
    """`sha256:` and the digest of the image's file. Each attempt checks it. null: submit records that of the file."""
    runtime: Runtime = "apptainer"
    """apptainer, podman: each agent starts one for its ranks. pyxis: srun does."""
    python: str = "python3"
    """The interpreter in the image."""
    binds: tuple[str, ...] = ()
    """Further directories that ranks need, as absolute paths. They may be written to."""
    mount_home: bool = False
    """Mounts the home directory."""
    workdir: str = "/tmp"  # noqa: S108 - in the image, where it is private or the node's own
    """The directory in the image that the ranks start in."""
    extra_args: tuple[str, ...] = ()
    """Further options for the runtime: `apptainer exec`, `podman run`; for pyxis, `srun`."""

    @property
    def is_file(self) -> bool:
        """Returns whether the image is a file, and not a name in a registry or a store."""
        return "://" not in self.image and (
            self.image.startswith(("/", "./", "../", "~")) or self.image.endswith(_FILES)
        )
