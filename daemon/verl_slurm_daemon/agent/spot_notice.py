"""Asks a cloud's metadata service whether the cloud takes this node back: spot, preemptible and evicted machines.

* aws: `/latest/meta-data/spot/instance-action`, with IMDSv2's token. 404; two minutes before the end an action and
  its time.
* gcp: `/computeMetadata/v1/instance/preempted`. `TRUE` 30 s before the end.
* azure: `/metadata/scheduledevents`, of all machines of a set. 30 s or more before it, an event that names it.

Source: the pages of the three clouds on interruptions of spot machines (Azure: scheduled events), November 2026. Slurm
hears of none of them: its node only stops to answer.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import msgspec

from verl_slurm.base.one_line import printable

_EVERY_S = 2.0
_TIMEOUT_S = 3.0
_MAX_ANSWER = 1 << 18
_TOLD_CHARS = 200
# Azure announces a reboot a quarter of an hour before: until then the node trains.
_ACT_BEFORE_S = 120.0
_GCP_WARNING_S = 30.0
"""Google names no time. The machine is switched off this long after the announcement."""
_AZURE_ENDS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
"""Scheduled events after which nothing of this machine's memory is left. `Freeze` is a pause of seconds."""
_HTTP_NOT_FOUND = 404

_METADATA = "http://169.254.169.254"
_DMI = Path("/sys/class/dmi/id")
_AZURE_CHASSIS = "7783-7084-3265-9085-8269-3286-77"
"""Of all machines of Azure. Others of Microsoft's are virtual machines of one's own."""


class SpotNotice(NamedTuple):
    """The end of this node, as the cloud announces it."""

    evidence: str
    """The cloud's words, in one line."""
    seconds_left: float


class _Answer(NamedTuple):
    body: bytes
    now: datetime
    """By the service's clock: the node's own may be wrong."""


class _AwsAction(msgspec.Struct):
    action: str
    time: datetime | None = None


class _AzureEvent(msgspec.Struct, rename="pascal"):
    event_type: str
    resources: list[str] = []
    not_before: str = ""
    event_status: str = ""


class _AzureEvents(msgspec.Struct, rename="pascal"):
    events: Annotated[list[_AzureEvent], msgspec.Meta(max_length=10_000)] = []


def find_cloud(dmi: Path = _DMI) -> str:
    """Returns `aws`, `gcp`, `azure`, or nothing: whose virtual machine this is, by what its firmware says."""

    def says(name: str) -> str:
        try:
            return (dmi / name).read_text(errors="replace").strip()
        except OSError:
            return ""

    if says("sys_vendor") == "Amazon EC2":
        return "aws"
    if says("product_name") == "Google Compute Engine":
        return "gcp"
    return "azure" if says("chassis_asset_tag") == _AZURE_CHASSIS else ""


def look(cloud: str, base: str | None = None) -> SpotNotice | None:
    """Asks once the service of a cloud that `find_cloud` returns. Blocks for some seconds if it does not answer.

    Raises OSError: no answer, or one of an error. ValueError: an answer that is not as documented.
    """
    return _LOOK[cloud](base)


async def wait_for_notice(cloud: str, trouble: Callable[[str], None]) -> SpotNotice:
    """Returns the notice once the node has at most two minutes left. `trouble`: told once in a row of errors."""
    told = False
    while True:
        try:
            notice = await asyncio.to_thread(look, cloud)
            told = False
        except (OSError, ValueError, HTTPException) as error:
            notice = None
            if not told:
                trouble(printable(f"{type(error).__name__}: {error}")[:_TOLD_CHARS])
            told = True
        if notice is not None and notice.seconds_left <= _ACT_BEFORE_S:
            return notice
        await asyncio.sleep(_EVERY_S)  # the service offers nothing to wait for


def _aws(base: str | None) -> SpotNotice | None:
    base = base or os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", _METADATA).rstrip("/")
    # A token for each look: kept ones expire, and the machines' own clients ask for one as well.
    token = _ask(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    try:
        answer = _ask(
            f"{base}/latest/meta-data/spot/instance-action",
            {"X-aws-ec2-metadata-token": token.body.decode("ascii").strip()},
        )
    except HTTPError as error:
        if error.code == _HTTP_NOT_FOUND:
            return None
        raise
    action = msgspec.json.decode(answer.body, type=_AwsAction)
    # Hibernation begins at once.
    left = _seconds(answer.now, action.time) if action.time else 0.0
    # Two minutes at most, whatever a clock says.
    return SpotNotice(f"AWS will {printable(action.action)[:_TOLD_CHARS]} it", min(left, _ACT_BEFORE_S))


def _gcp(base: str | None) -> SpotNotice | None:
    base = base or f"http://{os.environ.get('GCE_METADATA_HOST', '169.254.169.254')}"
    answer = _ask(f"{base}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    if answer.body.strip() == b"TRUE":
        return SpotNotice("Google preempts it", _GCP_WARNING_S)
    if answer.body.strip() != b"FALSE":
        raise ValueError(f"preempted is {answer.body[:40]!r}")
    return None


def _azure(base: str | None) -> SpotNotice | None:
    base = base or _METADATA
    headers = {"Metadata": "true"}
    answer = _ask(f"{base}/metadata/scheduledevents?api-version=2020-07-01", headers)
    events = [
        event
        for event in msgspec.json.decode(answer.body, type=_AzureEvents).events
        if event.event_type in _AZURE_ENDS and event.event_status != "Completed"
    ]
    if not events:  # nearly always: so the name is not asked for each time
        return None
    name = _ask(f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
    machine = name.body.decode().strip()
    mine = [event for event in events if machine in event.resources]
    ends = [(_azure_left(event, answer.now), event.event_type) for event in mine]
    return SpotNotice(f"Azure: {min(ends)[1]}", min(ends)[0]) if ends else None


def _azure_left(event: _AzureEvent, now: datetime) -> float:
    # An event that has begun names no time.
    return _seconds(now, parsedate_to_datetime(event.not_before)) if event.not_before else 0.0


def _seconds(now: datetime, then: datetime) -> float:
    return max((then.astimezone(UTC) - now).total_seconds(), 0.0)


def _ask(url: str, headers: Mapping[str, str], method: str = "GET") -> _Answer:
    request = Request(url, headers=dict(headers), method=method)  # noqa: S310 - http, of the clouds' link-local address
    # No proxy: it would answer for its own machine.
    with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT_S) as response:
        said = response.headers.get("Date")
        return _Answer(response.read(_MAX_ANSWER), parsedate_to_datetime(said) if said else datetime.now(UTC))


_LOOK: dict[str, Callable[[str | None], SpotNotice | None]] = {"aws": _aws, "gcp": _gcp, "azure": _azure}
