"""The section `observability` of a configuration, in the manner of `schema.py`."""

from typing import Annotated, Literal

import msgspec

__all__ = ["ObservabilityConfig"]


class ObservabilityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whom the daemon lets look, by Prometheus (docs/observability.md). Nothing here changes what is computed."""

    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65534)] | None = None
    """Where the lead answers `GET /metrics` and `/healthz`; each node's agent does so at this port + 1. Where a port is
    taken, another one is. 0: any free ones. Where they are stands in `targets_dir`. null: no port is open."""
    metrics_host: Literal["127.0.0.1", "0.0.0.0"] = "127.0.0.1"  # noqa: S104 - with a token
    """`0.0.0.0`: every interface of each node, for a Prometheus elsewhere; wants a `token_file`."""
    token_file: str | None = None
    """An absolute path of a 0600 file: who asks for /metrics must bring its content (`Authorization: Bearer`). Other
    users of a node reach 127.0.0.1, too."""
    targets_dir: str | None = None
    """An absolute directory, made 0700, where this run tells Prometheus where its ports are. Several runs may have the
    same: Prometheus takes no pattern for a directory. null: RUN/control/metrics."""
    learning_numbers: bool = False
    """Also the newest step's reward, KL, losses and learning rate."""
