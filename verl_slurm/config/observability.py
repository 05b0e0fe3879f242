"""Declares the section `observability` of a configuration, in the manner of `schema.py`."""

from typing import Annotated, Literal

import msgspec

from verl_slurm.config.section import Section


class ObservabilityConfig(Section, frozen=True):
    """Sets what the daemon shows to Prometheus (docs/observability.md). Nothing here changes what is computed."""

    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65534)] | None = None
    """Port on which the lead answers `GET /metrics` and `/healthz`; each node's agent answers at this port + 1. If a
    port is taken, another one is used. 0: any free ports. `targets_dir` holds the ports in use. null: no port is open.
    """
    metrics_host: Literal["127.0.0.1", "0.0.0.0"] = "127.0.0.1"  # noqa: S104 - with a token
    """`0.0.0.0`: every interface of each node, for a Prometheus on another machine; requires a `token_file`."""
    token_file: str | None = None
    """An absolute path of a 0600 file. A request for /metrics must carry its content (`Authorization: Bearer`). Other
    users of a node can reach 127.0.0.1, too."""
    targets_dir: str | None = None
    """An absolute directory, made 0700, in which this run publishes its ports for Prometheus. Several runs may share
    it, because Prometheus takes no pattern for a directory. null: RUN/control/metrics."""
    learning_numbers: bool = False
    """Also export the newest step's reward, KL, losses and learning rate."""
