"""Checks the section `tiers`. Pure."""

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from verl_slurm.config.checks import Complaints
from verl_slurm.config.schema import TierConfig

LOCAL_TIER = "checkpoints"
"""Tier 0: the run's own directory. No other tier may have this name."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_KIND = re.compile(r"posix|s3|archive|plugin:[A-Za-z0-9_.-]{1,64}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9_.=+@-]*(?:/[A-Za-z0-9_=+@-][A-Za-z0-9_.=+@-]*)*")
_CLASS = re.compile(r"[A-Z][A-Z0-9_]{1,31}")
# Objects of these classes need a restore of several hours before they can be read.
_FROZEN_CLASSES = frozenset({"GLACIER", "DEEP_ARCHIVE"})
# S3 keys have at most 1024 bytes; a checkpoint's own paths are checked when they are made.
_MAX_PREFIX = 200


def is_s3(tier: TierConfig) -> bool:
    """Returns whether this tier is an S3 bucket."""
    return tier.kind == "s3" or (tier.kind == "archive" and tier.bucket is not None)


def check_tiers(tiers: Sequence[TierConfig], found: Complaints) -> None:
    """Refuses what is wrong with `tiers`."""
    refuse_if, names = found.refuse_if, {LOCAL_TIER}
    for number, tier in enumerate(tiers):
        key, storage_class = f"tiers[{number}]", tier.storage_class
        wrong = not _NAME.fullmatch(tier.name) or tier.name in names
        own = f"a name of its own, [a-z0-9_-], not {LOCAL_TIER}"
        refuse_if(wrong, f"{key}.name", own, "choose another name")
        names.add(tier.name)
        one_of = "posix, s3, archive or plugin:NAME"
        refuse_if(not _KIND.fullmatch(tier.kind), f"{key}.kind", one_of, "choose one of these")
        wrong = not _PREFIX.fullmatch(tier.prefix) or len(tier.prefix) > _MAX_PREFIX
        form = "names of [A-Za-z0-9_.=+@-] with / between, none beginning with a dot"
        refuse_if(wrong, f"{key}.prefix", form, "e.g. prefix: verl-slurm")
        # A plugin has a place of its own kind.
        if not tier.kind.startswith("plugin:"):
            _check_place(key, tier, found)
        wrong = tier.kind == "archive" and tier.keep_days is not None
        refuse_if(
            wrong, f"{key}.keep_days", "null: an archive is permanent", "remove it, or use kind: s3 or posix"
        )
        wrong = storage_class is not None and not (is_s3(tier) and _CLASS.fullmatch(storage_class))
        refuse_if(wrong, f"{key}.storage_class", "a storage class of S3, for a bucket", "remove it")
        # A copy counts once it has been read back, which there takes hours.
        wrong = storage_class in _FROZEN_CLASSES and tier.verify != "checksum"
        cannot = f"checksum: objects of class {storage_class} cannot be read back at once"
        remedy = f"set verify: checksum, or a class that can be read, for {tier.name}"
        refuse_if(wrong, f"{key}.verify", cannot, remedy)


def _check_place(key: str, tier: TierConfig, found: Complaints) -> None:
    places = {"posix": ("path",), "s3": ("bucket",)}.get(tier.kind, ("path", "bucket"))
    given = [name for name in ("path", "bucket") if getattr(tier, name) is not None]
    there = " and ".join(given) or "neither path nor bucket"
    # A tier is a directory or a bucket, and not both.
    wrong = len(given) != 1 or given[0] not in places
    found.refuse_if(wrong, key, " or ".join(places), "name one place", there)
    wrong = tier.path is not None and not (tier.path.startswith("/") and tier.path.isprintable())
    found.refuse_if(wrong, f"{key}.path", "an absolute path", "begin it with /")
    wrong = tier.bucket is not None and not _BUCKET.fullmatch(tier.bucket)
    found.refuse_if(wrong, f"{key}.bucket", "a bucket's name", "e.g. bucket: my-checkpoints")
    problem = None if tier.endpoint is None else endpoint_problem(tier.endpoint, insecure=tier.insecure)
    # The URL is not shown: it may be refused for the password in it.
    found.refuse_if(problem, f"{key}.endpoint", "https://HOST[:PORT]", "fix the URL", problem or "")


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
