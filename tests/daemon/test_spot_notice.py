"""What a cloud's metadata service says, and what the agent makes of it. The service is a stand-in with a real port."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from verl_slurm_daemon.agent import spot_notice
from verl_slurm_daemon.agent.spot_notice import find_cloud, look, wait_for_notice

from tests.fakes.metadata_service import MetadataService

CLOUDS = ("aws", "gcp", "azure")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataService]:
    with MetadataService() as running:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", running.url)
        monkeypatch.setenv("GCE_METADATA_HOST", running.url.removeprefix("http://"))
        monkeypatch.setattr(spot_notice, "_METADATA", running.url)
        yield running


NOTHING, IN_2031 = None, datetime(2031, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("cloud", "said", "evidence", "left_s"),
    [
        *((cloud, {}, "", NOTHING) for cloud in CLOUDS),
        ("aws", {"ends_in_s": 30}, "terminate", 30),
        ("gcp", {"ends_in_s": 30}, "preempts", 30),
        ("azure", {"ends_in_s": 30}, "Preempt", 30),
        # The service's own clock counts, and none gives a node of AWS more than two minutes.
        ("aws", {"ends_in_s": 45, "clock": IN_2031}, "", 45),
        ("azure", {"ends_in_s": 45, "clock": IN_2031}, "", 45),
        ("aws", {"ends_in_s": 7200}, "", 120),
        # An event of another machine of the set, and a pause of seconds.
        ("azure", {"ends_in_s": 30, "resources": ["pool_4"]}, "", NOTHING),
        ("azure", {"ends_in_s": 30, "event": "Freeze"}, "", NOTHING),
    ],
)
def test_a_machine_that_is_taken_back_hears_how_long_it_has_and_no_other_hears_anything(
    service: MetadataService, cloud: str, said: dict[str, object], evidence: str, left_s: int | None
) -> None:
    for name, value in said.items():
        setattr(service, name, value)
    notice = look(cloud)
    assert (notice is None) == (left_s is NOTHING)
    if notice is not None:
        assert evidence in notice.evidence
        assert notice.seconds_left == pytest.approx(left_s, abs=0 if "clock" in said else 2)


def test_a_reboot_in_a_quarter_of_an_hour_is_acted_upon_two_minutes_before(
    service: MetadataService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.ends_in_s, service.event = 900, "Reboot"
    monkeypatch.setattr(spot_notice, "_EVERY_S", 0.0)

    asked = 0

    def pass_time(cloud: str) -> object:
        nonlocal asked
        asked += 1
        service.ends_in_s = 900 if asked < 4 else 110
        return look(cloud)

    monkeypatch.setattr(spot_notice, "look", pass_time)
    notice = asyncio.run(wait_for_notice("azure", pytest.fail))
    assert (asked, notice.seconds_left) == (4, pytest.approx(110, abs=2))


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_service_that_fails_is_told_of_once_and_asked_again(
    service: MetadataService, monkeypatch: pytest.MonkeyPatch, cloud: str
) -> None:
    service.broken, service.ends_in_s = 503, 20
    monkeypatch.setattr(spot_notice, "_EVERY_S", 0.0)
    troubles: list[str] = []
    asked = 0

    def recover(cloud: str) -> object:
        nonlocal asked
        asked += 1
        service.broken = 503 if asked < 4 else 0
        return look(cloud)

    monkeypatch.setattr(spot_notice, "look", recover)
    assert asyncio.run(wait_for_notice(cloud, troubles.append)).seconds_left == pytest.approx(20, abs=10)
    (trouble,) = troubles
    assert "503" in trouble


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_service_that_answers_nonsense_announces_nothing(
    service: MetadataService, monkeypatch: pytest.MonkeyPatch, cloud: str
) -> None:
    service.ends_in_s = 20
    monkeypatch.setattr(service, "RequestHandlerClass", _Nonsense)
    with pytest.raises((OSError, ValueError)):
        look(cloud)


class _Nonsense:
    def __init__(self, request: object, *_: object) -> None:
        request.sendall(b"HTTP/1.0 200 OK\r\n\r\n\x1b[31m<html>")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2\n"}, "aws"),
        ({"sys_vendor": "Google\n", "product_name": "Google Compute Engine\n"}, "gcp"),
        (
            {
                "sys_vendor": "Microsoft Corporation",
                "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n",
            },
            "azure",
        ),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "1234"}, ""),
        ({"sys_vendor": "Dell Inc.", "product_name": "PowerEdge XE9680"}, ""),
        ({}, ""),
    ],
)
def test_the_firmware_names_the_cloud(tmp_path: Path, files: dict[str, str], cloud: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert find_cloud(tmp_path) == cloud
