"""Tiers in a configuration: what is refused before anything is queued."""

from typing import Any

import pytest

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.checks.shared import complaints
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import RunConfig, TierConfig

GOOD = b"""
name: run
tiers:
  - {name: nvme, kind: posix, path: /local/scratch, keep_days: 7}
  - {name: store, kind: s3, bucket: my-checkpoints, endpoint: "https://s3.example.org", keep_days: 90}
  - {name: cold, kind: archive, bucket: my-archive, storage_class: DEEP_ARCHIVE, verify: checksum}
  - {name: own, kind: "plugin:tape", options: {robot: "2"}}
"""


def tier(**changes: Any) -> TierConfig:
    return TierConfig(**({"name": "store", "kind": "s3", "bucket": "my-bucket"} | changes))


def test_the_three_tiers_of_the_documentation_are_accepted() -> None:
    config = parse_config(GOOD, "my.yaml")
    assert [(t.name, t.keep_days) for t in config.tiers] == [
        ("nvme", 7),
        ("store", 90),
        ("cold", None),
        ("own", None),
    ]


@pytest.mark.scenario("M08")
@pytest.mark.parametrize(
    ("bad", "key"),
    [
        (tier(name="checkpoints"), "name"),
        (tier(name="Über"), "name"),
        (tier(kind="ftp"), "kind"),
        (tier(prefix="../x"), "prefix"),
        (tier(prefix="/x"), "prefix"),
        (tier(prefix=".hidden"), "prefix"),
        (tier(bucket=None), ""),
        (tier(path="/x"), ""),
        (tier(kind="posix", bucket=None, path="relative"), "path"),
        (tier(bucket="UPPER"), "bucket"),
        (tier(endpoint="http://s3.example.org"), "endpoint"),
        (tier(endpoint="https://me:canary@s3.example.org"), "endpoint"),
        (tier(endpoint="https://s3.example.org/canary?x"), "endpoint"),
        (tier(endpoint="file:///etc"), "endpoint"),
        (tier(kind="archive", keep_days=9), "keep_days"),
        (tier(kind="posix", bucket=None, path="/x", storage_class="STANDARD_IA"), "storage_class"),
        (tier(storage_class="DEEP_ARCHIVE"), "verify"),
    ],
)
def test_a_tier_that_could_not_work_is_refused_and_no_password_is_repeated(bad: TierConfig, key: str) -> None:
    found = complaints(RunConfig(tiers=(bad,)))
    assert [c.key for c in found] == ["tiers[0]" + (f".{key}" if key else "")]
    assert all(c.remedy and "canary" not in repr(c) for c in found)


def test_http_is_for_this_machine_or_for_who_says_so() -> None:
    for good in (tier(endpoint="http://127.0.0.1:9000"), tier(endpoint="http://far.example", insecure=True)):
        assert complaints(RunConfig(tiers=(good,))) == []


def test_two_tiers_of_one_name_are_refused_with_a_line() -> None:
    raw = b"tiers:\n- {name: a, kind: posix, path: /a}\n- {name: a, kind: posix, path: /b}\n"
    with pytest.raises(ConfigError, match=r"tiers\[1\].name"):
        parse_config(raw, "my.yaml")
