"""A real S3 server: Ceph's RADOS gateway over one monitor and one OSD in memory, on the loopback. `make test-s3`."""

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import psutil
import pytest
from botocore.config import Config

from tests.processes import free_port

BUCKET = "checkpoints"
_TOOLS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "ceph")
_CONF = """[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{mon}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 2000
osd objectstore = memstore
memstore device bytes = 1073741824
osd max object name len = 256
osd max object namespace len = 64
run dir = {d}/run
admin socket = {d}/run/$name.asok
log file = {d}/log/$name.log
pid file = {d}/$name.pid
crash dir = {d}/run
mon data = {d}/mon
osd data = {d}/osd
[client.rgw.a]
rgw data = {d}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw dns name = 127.0.0.1
"""


@dataclass(frozen=True)
class Radosgw:
    """One that answers; `BUCKET` exists."""

    endpoint: str
    secret: str


@contextlib.contextmanager
def running() -> Iterator[Radosgw]:
    """Up in about 16 s, down and without a trace afterwards. Skips the test where it cannot be."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing or os.environ.get("VERL_SLURM_S3") != "1":
        why = f"{', '.join(missing)} not installed" if missing else "takes 20 s more"
        pytest.skip(f"NOT TRIED against a real S3 server: {why}; `make test-s3` does")
    # Short: names of Unix sockets have 108 characters.
    directory = Path(tempfile.mkdtemp(prefix="vs-rgw-"))
    try:
        yield _start(directory)
    finally:
        _stop(directory)


def _start(d: Path) -> Radosgw:
    conf, mon, port, secret = d / "ceph.conf", free_port(), free_port(), secrets.token_hex(16)
    for name in ("mon", "osd", "rgw", "run", "log"):
        (d / name).mkdir()
    fsid = Path("/proc/sys/kernel/random/uuid").read_text().strip()
    conf.write_text(_CONF.format(d=d, fsid=fsid, mon=mon, port=port))

    def call(*words: str, race: str = "") -> None:
        """`race`: words of an error after which nothing came of it, and it is tried again."""
        for left in reversed(range(10)):
            done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode == 0:
                return
            if not (left and race and race in done.stderr):
                raise AssertionError(f"{words}: {done.stderr}")
            time.sleep(0.5)  # another program's start: there is no event to wait for

    c = ("-c", str(conf))
    call(
        "monmaptool",
        "--create",
        "--clobber",
        "--addv",
        "a",
        f"[v1:127.0.0.1:{mon}]",
        "--fsid",
        fsid,
        f"{d}/map",
    )
    call("ceph-mon", *c, "-i", "a", "--mkfs", "--monmap", f"{d}/map")
    call("ceph-mon", *c, "-i", "a")
    osd = Path("/proc/sys/kernel/random/uuid").read_text().strip()
    # The monitor answers before it can.
    call("ceph", *c, "osd", "new", osd, "0", race="command descriptions from mon")
    call("ceph-osd", *c, "-i", "0", "--mkfs", "--osd-uuid", osd)
    # It speaks before it knows the cluster's id.
    call("ceph-osd", *c, "-i", "0", race="wrong fsid")
    call("radosgw", *c, "-n", "client.rgw.a")
    endpoint = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 60
    while True:  # another program's start: there is no event to wait for
        try:
            with urllib.request.urlopen(endpoint, timeout=5):
                break
        except urllib.error.HTTPError as answered:
            answered.close()
            break
        except OSError:
            assert time.monotonic() < until, (d / "log").as_posix()
            time.sleep(0.2)
    user = ("--uid", "t", "--display-name", "t", "--access-key", "testkey", "--secret", secret)
    call("radosgw-admin", *c, "user", "create", *user)
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="testkey",
        aws_secret_access_key=secret,
        config=Config(s3={"addressing_style": "path"}),
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()
    return Radosgw(endpoint, secret)


def _stop(d: Path) -> None:
    killed = []
    for file in d.glob("*.pid"):
        with contextlib.suppress(ValueError, psutil.NoSuchProcess):
            killed.append(psutil.Process(int(file.read_text())))
            killed[-1].kill()  # its data is in memory, it has nothing to say
    _, alive = psutil.wait_procs(killed, timeout=30)
    assert not alive
    shutil.rmtree(d, ignore_errors=True)
