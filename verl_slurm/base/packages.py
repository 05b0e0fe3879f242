"""Tells which extra of verl-slurm installs a missing package: the core installs without torch."""

import json
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import verl_slurm
from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode

_EXTRAS = {
    "trainer": "torch transformers numpy msgpack zstandard huggingface_hub safetensors tensorboard",
    "verl": "verl hydra ray transfer_queue",
    "vllm": "vllm",
    "s3": "boto3 botocore",
    "data": "pyarrow",
}
_EXTRA_OF = {package: extra for extra, packages in _EXTRAS.items() for package in packages.split()}


def install_command(extra: str, python: str = sys.executable) -> str:
    """Returns the command that installs verl-slurm with an extra from where this one came."""
    source = _local_source()
    what = f"{source}[{extra}]" if source else f"verl-slurm[{extra}]=={verl_slurm.__version__}"
    return pip_install(what, python=python)


def pip_install(*what: str, python: str = sys.executable) -> str:
    """Returns the command that installs packages for a Python: a bare `pip` may be that of another one."""
    return shlex.join([python, "-m", "pip", "install", *what])


def _local_source() -> str:
    """Returns the checkout or the wheel that this was installed from; empty: the index, or it is gone."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return str(checkout)
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    try:
        # PEP 610: pip writes it for whatever did not come from an index.
        record = json.loads(metadata.distribution("verl-slurm").read_text("direct_url.json") or "{}")
        url = urlsplit(record.get("url", ""))
    except (metadata.PackageNotFoundError, OSError, ValueError, AttributeError):
        return ""
    path = unquote(url.path)
    return path if url.scheme == "file" and os.path.exists(path) else ""


class PackageMissing(VerlSlurmError):
    """An extra of verl-slurm is not installed in this environment."""

    exit_code = ExitCode.CONFIG

    def __init__(self, package: str, wanted_by: str = "this command") -> None:
        super().__init__(
            f"{wanted_by} needs the package {package}, which is not installed",
            where=sys.executable,
            remedy=install_command(_EXTRA_OF.get(package, "all")),
        )

    @classmethod
    def for_module(cls, name: str) -> "PackageMissing | None":
        """Returns the error for a module that could not be imported; None if no extra installs it."""
        package = name.partition(".")[0]
        return cls(package) if package in _EXTRA_OF else None


def require_packages(*names: str, wanted_by: str) -> None:
    """Raises PackageMissing for the first that is not installed; imports nothing. `wanted_by`: for its sentence."""
    for name in names:
        if find_spec(name) is None:
            raise PackageMissing(name, wanted_by)
