"""Checks what a run says of its image. Pure."""

import re
from collections.abc import Iterator

from verl_slurm.config.checks import Complaint
from verl_slurm.config.container_section import ContainerConfig
from verl_slurm.config.schema import RunConfig

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# The options that the daemon sets itself; a second value would contradict it.
_OURS = {
    "apptainer": {"--bind", "-B", "--pwd", "--cwd", "--env-file", "--pid", "-p", "--containall", "-C"},
    "podman": {"--entrypoint", "--pid", "--name", "--detach", "-d", "--cgroups"},
    "pyxis": {
        "--container-image",
        "--container-mounts",
        "--container-workdir",
        "--ntasks",
        "-n",
        "--nodes",
        "-N",
    },
}


def container_complaints(config: RunConfig) -> Iterator[Complaint]:
    """Yields what is wrong with `slurm.container`."""
    container = config.slurm.container
    if container is None:
        return
    yield from _image(container)
    if not container.python.strip() or not container.python.isprintable() or container.python.startswith("-"):
        yield Complaint("slurm.container.python", repr(container.python), "a program", "e.g. python3")
    # Runtimes read `,` and `:` as separators, and mount something else.
    for place in container.binds:
        if not place.startswith("/") or not place.isprintable() or set(place) & set(",:"):
            yield Complaint(
                "slurm.container.binds",
                repr(place),
                "an absolute path without `,` and `:`",
                "runtimes read those as separators: choose another path",
            )
    if not container.workdir.startswith("/") or not container.workdir.isprintable():
        yield Complaint(
            "slurm.container.workdir",
            repr(container.workdir),
            "an absolute path in the image",
            "e.g. /workspace",
        )
    # The run's directory is mounted, too.
    if set(config.run_dir) & set(",:"):
        yield Complaint(
            "run_dir",
            repr(config.run_dir),
            "a path without `,` and `:` where there is a container",
            "runtimes read those as separators: choose another path",
        )
    for number, word in enumerate(container.extra_args):
        yield from _extra_arg(container, number, word)


def _image(container: ContainerConfig) -> Iterator[Complaint]:
    image, runtime = container.image, container.runtime
    # A leading dash would be an option of the container's runtime.
    if not image.strip() or not image.isprintable() or image.startswith("-"):
        yield Complaint(
            "slurm.container.image", repr(image), "a path or a name", "e.g. /images/verl-slurm.sif"
        )
        return
    if runtime == "podman" and container.is_file:
        yield Complaint(
            "slurm.container.image",
            image,
            "a name with its digest: podman runs no file",
            "`podman load -i FILE`, then NAME@sha256:... as `podman images --digests` shows it",
        )
    # A registry may give another image of this name tomorrow, and the run would go on with it.
    elif not container.is_file and not _DIGEST.fullmatch(image.rpartition("@")[2]):
        yield Complaint(
            "slurm.container.image",
            image,
            "a file, or a name with its digest: NAME@sha256:...",
            "`skopeo inspect --format {{.Digest}} docker://NAME` tells it",
        )
    if container.digest is not None and not _DIGEST.fullmatch(container.digest):
        yield Complaint(
            "slurm.container.digest",
            repr(container.digest),
            "sha256: and 64 hexadecimal digits",
            "leave it out",
        )
    elif container.digest is not None and not container.is_file:
        yield Complaint(
            "slurm.container.digest",
            container.digest,
            "none: the digest of an image that is no file is a part of its name",
            "write it behind the name: NAME@sha256:...",
        )


def _extra_arg(container: ContainerConfig, number: int, word: str) -> Iterator[Complaint]:
    key = f"slurm.container.extra_args[{number}]"
    # A word without a dash would be taken for the image, or for the command.
    if not word.startswith("-") or word == "--" or not word.isprintable():
        yield Complaint(
            key, repr(word), "an option with its value in one word", "e.g. --fakeroot or --shm-size=8g"
        )
    elif word.partition("=")[0] in _OURS[container.runtime]:
        yield Complaint(
            key, word, "an option that the daemon does not set itself", "remove it, or use the key for it"
        )
    elif word.partition("=")[0] in ("--env", "-e", "--container-env"):
        yield Complaint(
            key,
            word.partition("=")[0],
            "no variable: a command line is visible to all users",
            "use env, or env_from_files",
        )
