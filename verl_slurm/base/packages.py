"""Tells which extra of verl-slurm installs a missing package: the core installs without torch.

Pure, except that it looks for a package without importing it.
"""

import sys
from importlib.util import find_spec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode

__all__ = ["PackageMissing", "require_packages"]

_EXTRAS = {
    "trainer": "torch transformers numpy msgpack zstandard huggingface_hub safetensors tensorboard",
    "verl": "verl hydra ray transfer_queue",
    "vllm": "vllm",
    "s3": "boto3 botocore",
    "data": "pyarrow",
}
_EXTRA_OF = {package: extra for extra, packages in _EXTRAS.items() for package in packages.split()}


class PackageMissing(VerlSlurmError):
    """An extra of verl-slurm is not installed in this environment."""

    exit_code = ExitCode.CONFIG

    def __init__(self, package: str, wanted_by: str = "this command") -> None:
        super().__init__(
            f"{wanted_by} needs the package {package}, which is not installed",
            where=sys.executable,
            remedy=f"{sys.executable} -m pip install 'verl-slurm[{_EXTRA_OF.get(package, 'all')}]'",
        )

    @classmethod
    def for_module(cls, name: str) -> "PackageMissing | None":
        """Returns the error for a module that could not be imported; None if no extra installs it, which is a bug of
        ours."""
        package = name.partition(".")[0]
        return cls(package) if package in _EXTRA_OF else None


def require_packages(*names: str, wanted_by: str) -> None:
    """Refuses work that this environment cannot do. Imports nothing.

    Args:
        wanted_by: what needs them, the subject of the error's sentence.

    Raises:
        PackageMissing: the first that is missing.
    """
    for name in names:
        if find_spec(name) is None:
            raise PackageMissing(name, wanted_by)
