"""Checks the section `observability`: ports that cannot be opened, and ports that others could read. Pure."""

from collections.abc import Iterator

from verl_slurm.config.checks.complaint import Complaint
from verl_slurm.config.observability import ObservabilityConfig

__all__ = ["observability_complaints"]

_FIRST_FREE_PORT = 1024
"""Ports below it are reserved for root."""


def observability_complaints(wanted: ObservabilityConfig) -> Iterator[Complaint]:
    """Yields every complaint about the section."""
    if wanted.metrics_port and wanted.metrics_port < _FIRST_FREE_PORT:
        yield Complaint(
            "observability.metrics_port",
            str(wanted.metrics_port),
            "0 (any free one), or 1024 to 65534",
            "take e.g. 9464",
        )
    if wanted.metrics_host != "127.0.0.1" and wanted.token_file is None:
        yield Complaint(
            "observability.metrics_host",
            f"{wanted.metrics_host}, which the whole network reaches, and no token_file",
            "observability.token_file, that not everybody reads how the run is doing",
            "umask 077; openssl rand -hex 32 > FILE, on storage that all nodes see",
        )
    for key, path in (("token_file", wanted.token_file), ("targets_dir", wanted.targets_dir)):
        if path is not None and not (path.startswith("/") and path.isprintable()):
            yield Complaint(f"observability.{key}", repr(path), "an absolute path", "give the whole path")
