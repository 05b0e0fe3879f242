"""One entry of the section `tiers` of a configuration, in the manner of `schema.py`."""

from typing import Annotated, Literal

import msgspec

__all__ = ["TierConfig"]


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One more place for verified checkpoints, behind the run's own `checkpoints/` (`verl_slurm.tiers.layout`).

    Credentials never stand here: an S3 tier takes them where every AWS tool does (environment, `~/.aws`, the
    instance's role).
    """

    name: str
    kind: str
    """`posix`, `s3`, `archive` (either of the two, by `path` or `bucket`; never pruned) or `plugin:NAME`."""
    path: str | None = None
    """Of a directory tier, seen by the job's first node. Must exist, so that a place that is not mounted is noticed;
    what is made below it is 0700."""
    bucket: str | None = None
    prefix: str = "verl-slurm"
    """What all of this tier's names begin with, below `path` or in `bucket`."""
    endpoint: str | None = None
    """Of an S3 server that is not Amazon's: https://HOST[:PORT]."""
    region: str | None = None
    storage_class: str | None = None
    """An S3 storage class, e.g. STANDARD_IA or DEEP_ARCHIVE."""
    keep_days: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Older ones go, where the next tier has them (`verl_slurm.tiers.plan`). null: for ever."""
    verify: Literal["reread", "checksum"] = "reread"
    """reread: every object is fetched again and hashed. checksum: the server's own checksum (its ETag, an MD5) is
    compared; needs no second transfer, and believes the server that it stored what it hashed."""
    insecure: bool = False
    """Allow an http:// endpoint that is not on this machine. TLS certificates are always checked."""
    options: dict[str, str] = {}
    """What a plug-in wants to know."""
