"""Declares one entry of the section `tiers` of a configuration, in the manner of `schema.py`."""

from typing import Annotated, Literal

import msgspec


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Declares one more place for verified checkpoints, after the run's own `checkpoints/` (`tiers.run_copies`).

    Credentials never stand here. An S3 tier takes them from where every AWS tool does: the environment, `~/.aws`, or
    the instance's role.
    """

    name: str
    """Names the tier in messages, metrics and `verl-slurm tiers`."""
    kind: str
    """`posix`, `s3`, `archive` (either of the two, by `path` or `bucket`; never pruned) or `plugin:NAME`."""
    path: str | None = None
    """The directory of a directory tier, as the job's first node sees it. It must exist, so that a missing mount is
    noticed; directories below it are made 0700."""
    bucket: str | None = None
    """Of S3."""
    prefix: str = "verl-slurm"
    """Prefix of all of this tier's names, below `path` or in `bucket`."""
    endpoint: str | None = None
    """URL of an S3 server other than Amazon's: https://HOST[:PORT]."""
    region: str | None = None
    """Region of the bucket. null: that of the environment or of `~/.aws/config`."""
    storage_class: str | None = None
    """An S3 storage class, e.g. STANDARD_IA or DEEP_ARCHIVE."""
    keep_days: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Days after which a checkpoint is removed, provided that the next tier has it (`tiers.tier_plan`). null: keep
    permanently."""
    verify: Literal["reread", "checksum"] = "reread"
    """reread: fetch every object again and hash it. checksum: compare the server's own checksum (its ETag, an MD5),
    which needs no second transfer and trusts that the server stored what it hashed."""
    insecure: bool = False
    """Allow an http:// endpoint that is not on this machine. TLS certificates are always checked."""
    options: dict[str, str] = {}
    """Options for a plug-in."""
