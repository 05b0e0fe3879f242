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


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_machine_that_stays_hears_nothing(service: MetadataService, cloud: str) -> None:
    assert look(cloud) is None


@pytest.mark.parametrize(
    ("cloud", "evidence"), [("aws", "terminate"), ("gcp", "preempts"), ("azure", "Preempt")]
)
def test_a_machine_that_is_taken_back_hears_how_long_it_has(
    service: MetadataService, cloud: str, evidence: str
) -> None:
    service.ends_in_s = 30
    notice = look(cloud)
    assert notice is not None
    assert evidence in notice.evidence
    assert notice.seconds_left == pytest.approx(30, abs=2)


@pytest.mark.parametrize("cloud", ["aws", "azure"])
def test_the_services_own_clock_counts(service: MetadataService, cloud: str) -> None:
    service.clock, service.ends_in_s = datetime(2031, 1, 1, tzinfo=UTC), 45
    notice = look(cloud)
    assert notice is not None
    assert notice.seconds_left == 45


def test_no_clock_gives_a_node_of_aws_more_than_two_minutes(service: MetadataService) -> None:
    service.ends_in_s = 7200
    notice = look("aws")
    assert notice is not None
    assert notice.seconds_left == 120


def test_an_event_of_another_machine_of_the_set_is_not_ours(service: MetadataService) -> None:
    service.ends_in_s, service.resources = 30, ["pool_4"]
    assert look("azure") is None


def test_a_pause_of_seconds_is_no_end(service: MetadataService) -> None:
    service.ends_in_s, service.event = 30, "Freeze"
    assert look("azure") is None


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
