"""Nodes that differ, clocks that are apart, ports that are closed; and what a fire drill has shown."""

import re
import socket
from pathlib import Path

import msgspec
import pytest

from verl_slurm.base.errors import SlurmRefused
from verl_slurm.checks import Finding, drill_job
from verl_slurm.checks.drill_job import ClockServer, NodeReport, ask_clock, look_at_node
from verl_slurm.checks.fire_drill import DrillRecord, judge_drill, judge_nodes, rival_argv
from verl_slurm.config.schema import RunConfig

FIRST = NodeReport(
    node="n1",
    python="3.11.7",
    packages={"torch": "2.13.0"},
    driver="NVRM 580",
    num_gpus=8,
    open_files=65536,
    shm_free_bytes=1 << 34,
)
SECOND = msgspec.structs.replace(FIRST, node="n2", clock_offset_s=0.002, round_trip_s=0.001)
DRILL = DrillRecord(
    how="requeue",
    kill_wait_s=30,
    warning_to_batch_s=0.1,
    warning_to_steps=False,
    signals_to_batch=("SIGCONT", "SIGTERM"),
    signals_to_steps=("SIGCONT", "SIGTERM"),
    kill_after_s=30.2,
    again_after_s=12.0,
)


def not_good(findings: list[Finding]) -> dict[str, str]:
    return {finding.topic: finding.verdict for finding in findings if finding.verdict != "good"}


@pytest.mark.parametrize(
    ("change", "topic", "verdict"),
    [
        ({"python": "3.12.1"}, "python", "bad"),
        ({"packages": {"torch": "2.12.0"}}, "packages", "bad"),
        ({"driver": ""}, "driver", "bad"),
        ({"num_gpus": 7}, "GPUs", "bad"),
        ({"problem": "timed out"}, "ports", "bad"),
        ({"clock_offset_s": -4.5}, "clocks", "warning"),
        ({"open_files": 1024}, "open files", "warning"),
        ({"shm_free_bytes": 64 << 20}, "shared memory", "warning"),
        ({"gpus": (Finding("kernel log", "bad", "Xid 79"),)}, "kernel log", "bad"),
    ],
)
def test_a_node_that_differs_is_named_and_others_are_good(
    change: dict[str, object], topic: str, verdict: str
) -> None:
    assert not_good(judge_nodes([FIRST, SECOND])) == not_good(judge_nodes([FIRST])) == {}
    findings = judge_nodes([FIRST, SECOND, msgspec.structs.replace(SECOND, node="n3", **change)])
    assert not_good(findings) == {topic: verdict}
    (finding,) = [f for f in findings if f.verdict != "good"]
    assert "n3" in finding.found
    assert finding.remedy


def test_this_machine_can_be_looked_at() -> None:
    report = look_at_node("here", "")
    assert report.packages["torch"]
    assert report.open_files > 0
    assert report.local is None


def test_the_clock_of_another_node_is_told_over_a_port_that_nobody_knew_before(tmp_path: Path) -> None:
    server = ClockServer(tmp_path / "clock", "127.0.0.1")
    try:
        offset, took = ask_clock((tmp_path / "clock").read_text())
    finally:
        server.close()
    assert abs(offset) <= took  # one clock, asked about itself
    assert (tmp_path / "clock").stat().st_mode & 0o777 == 0o600
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(OSError, match="refused"):
        ask_clock(f"127.0.0.1 {port}")


@pytest.mark.parametrize(
    ("change", "topic", "verdict"),
    [
        ({"warning_to_batch_s": None}, "warning", "bad"),
        ({"warning_to_steps": True}, "warning", "warning"),
        ({"kill_after_s": 4.0}, "KILL", "warning"),
        ({"again_after_s": None}, "again", "bad"),
    ],
)
def test_what_a_drill_lacked_is_said(change: dict[str, object], topic: str, verdict: str) -> None:
    assert not_good(judge_drill(msgspec.structs.replace(DRILL, **change))) == {topic: verdict}
    assert not_good(judge_drill(DRILL)) == {}
    # The two minutes of Slurm's own requeue are explained.
    again = judge_drill(msgspec.structs.replace(DRILL, again_after_s=144.0))[-1]
    assert (again.topic, again.verdict) == ("again", "good")
    assert "cred_expire" in again.remedy


def test_a_name_that_means_loopback_on_the_node_itself_is_not_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"n1": "127.0.1.1", "10.0.0.7": "10.0.0.7"}

    def resolve(name: str, *_: object, **__: object) -> list[object]:
        if name not in known:
            raise socket.gaierror
        return [(2, 1, 6, "", (known[name], 0))]

    monkeypatch.setattr(drill_job.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(drill_job.socket, "gethostname", lambda: "elsewhere")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR", raising=False)
    assert drill_job.own_address() == "127.0.1.1"
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.7")
    assert drill_job.own_address() == "10.0.0.7"


def test_the_job_that_preempts_wants_the_drills_own_nodes_and_no_one_elses(tmp_path: Path) -> None:
    assert "--nodelist=n[1-2]" in rival_argv(RunConfig(), tmp_path, "urgent", "n[1-2]")
    for nowhere in (None, "n1 --uid=0"):
        with pytest.raises(SlurmRefused, match=re.escape("--preempt-by")):
            rival_argv(RunConfig(), tmp_path, "urgent", nowhere)
