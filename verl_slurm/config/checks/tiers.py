"""Checks the section `tiers`. Pure.

Refused before anything is queued: a tier that cannot work, a tier that sends checkpoints unencrypted over a network,
and credentials in a URL (they would end up in run.yaml and in logs).
"""

import ipaddress
import re
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from verl_slurm.config.checks import Complaint
from verl_slurm.config.tiers_section import TierConfig

LOCAL_TIER = "checkpoints"
"""Tier 0: the run's own directory. No other tier may have this name."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_KIND = re.compile(r"posix|s3|archive|plugin:[A-Za-z0-9_.-]{1,64}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9_.=+@-]*(?:/[A-Za-z0-9_=+@-][A-Za-z0-9_.=+@-]*)*")
_CLASS = re.compile(r"[A-Z][A-Z0-9_]{1,31}")
# Objects of these classes need a restore of several hours before they can be read.
_FROZEN_CLASSES = frozenset({"GLACIER", "DEEP_ARCHIVE"})
_MAX_PREFIX = 200
"""S3 keys have at most 1024 bytes; a checkpoint's own paths are checked when they are made."""


def is_s3(tier: TierConfig) -> bool:
    """Returns whether this tier is an S3 bucket."""
    return tier.kind == "s3" or (tier.kind == "archive" and tier.bucket is not None)


def tier_complaints(tiers: Sequence[TierConfig]) -> Iterator[Complaint]:
    """Yields every complaint about `tiers`."""
    seen = {LOCAL_TIER}
    for number, tier in enumerate(tiers):
        key = f"tiers[{number}]"
        if not _NAME.fullmatch(tier.name) or tier.name in seen:
            yield Complaint(
                f"{key}.name",
                repr(tier.name),
                f"a name of its own, [a-z0-9_-], not {LOCAL_TIER}",
                "choose another name",
            )
        seen.add(tier.name)
        if not _KIND.fullmatch(tier.kind):
            yield Complaint(
                f"{key}.kind", repr(tier.kind), "posix, s3, archive or plugin:NAME", "choose one of these"
            )
        if not _PREFIX.fullmatch(tier.prefix) or len(tier.prefix) > _MAX_PREFIX:
            yield Complaint(
                f"{key}.prefix",
                repr(tier.prefix),
                "names of [A-Za-z0-9_.=+@-] with / between, none beginning with a dot",
                "e.g. prefix: verl-slurm",
            )
        yield from _place(key, tier)
        yield from _manner(key, tier)


def _place(key: str, tier: TierConfig) -> Iterator[Complaint]:
    """Yields complaints about the tier's place: a directory or a bucket, never both."""
    # A plugin has a place of its own kind.
    if tier.kind.startswith("plugin:"):
        return
    wanted = ("path",) if tier.kind == "posix" else ("bucket",) if tier.kind == "s3" else ("path", "bucket")
    given = tuple(name for name in ("path", "bucket") if getattr(tier, name) is not None)
    if len(given) != 1 or given[0] not in wanted:
        yield Complaint(
            key, " and ".join(given) or "neither path nor bucket", " or ".join(wanted), "name one place"
        )
    if tier.path is not None and not (tier.path.startswith("/") and tier.path.isprintable()):
        yield Complaint(f"{key}.path", repr(tier.path), "an absolute path", "begin it with /")
    if tier.bucket is not None and not _BUCKET.fullmatch(tier.bucket):
        yield Complaint(f"{key}.bucket", repr(tier.bucket), "a bucket's name", "e.g. bucket: my-checkpoints")
    if tier.endpoint is not None:
        problem = endpoint_problem(tier.endpoint, insecure=tier.insecure)
        if problem is not None:
            # The URL is not shown: it may be refused for the password in it.
            yield Complaint(f"{key}.endpoint", problem, "https://HOST[:PORT]", "mend the URL")


def _manner(key: str, tier: TierConfig) -> Iterator[Complaint]:
    """Yields complaints about how long the tier keeps checkpoints and how it checks them."""
    if tier.kind == "archive" and tier.keep_days is not None:
        yield Complaint(
            f"{key}.keep_days",
            str(tier.keep_days),
            "null: an archive is for ever",
            "remove it, or use kind: s3 or posix",
        )
    if tier.storage_class is not None:
        if not is_s3(tier) or not _CLASS.fullmatch(tier.storage_class):
            yield Complaint(
                f"{key}.storage_class",
                repr(tier.storage_class),
                "a storage class of S3, for a bucket",
                "remove it",
            )
        # A copy counts once it has been read back, which there takes hours.
        if tier.storage_class in _FROZEN_CLASSES and tier.verify != "checksum":
            yield Complaint(
                f"{key}.verify",
                tier.verify,
                f"checksum: objects of class {tier.storage_class} cannot be read back at once",
                f"set verify: checksum, or a class that can be read, for {tier.name}",
            )


def endpoint_problem(endpoint: str, *, insecure: bool) -> str | None:
    """Returns why objects may not be sent to `endpoint`, or None. Never repeats the URL."""
    try:
        url = urlsplit(endpoint)
        # `port` raises for one that is no number.
        host, port = url.hostname, url.port
    except ValueError:
        return "no URL"
    # The configuration is copied into run.yaml and shown in logs. Credentials come from boto3's own chain.
    if url.username is not None or url.password is not None:
        return "a URL with credentials in it"
    if not endpoint.isprintable() or url.scheme not in ("http", "https") or not host or port == 0:
        return "no http(s) URL"
    if url.path not in ("", "/") or url.query or url.fragment:
        return "a URL with a path"
    # Within one machine nobody else is on the line.
    if url.scheme == "http" and not insecure and not _is_loopback(host):
        return "http to another machine without insecure: true"
    return None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
