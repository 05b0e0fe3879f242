from datetime import UTC, datetime
from pathlib import Path

import pytest

from verl_slurm.errors import NotFound, SlurmMissing
from verl_slurm.slurm.parse import (
    parse_config,
    parse_config_time,
    parse_hostnames,
    parse_job,
    parse_lost_nodes,
    parse_node,
    parse_partition,
    parse_seconds,
    parse_time,
)

GOLDEN = Path(__file__).parent / "golden"
RUNNING = (GOLDEN / "running.txt").read_text()


def test_a_running_job_is_read_whole() -> None:
    facts = parse_job(RUNNING, 1)
    assert facts.state == "RUNNING"
    assert facts.reason is None
    assert (facts.restarts, facts.requeue) == (0, True)
    assert facts.preempt_time is None
    assert facts.start_time == datetime.fromtimestamp(1795222231, UTC)
    assert facts.time_limit_s == 600
    assert (facts.node_list, facts.num_nodes, facts.batch_host) == ("node[1-2]", 2, "node1")
    assert facts.partition == "preemptible"
    assert facts.user_id == 0
    assert facts.std_out == "/home/ada/run/o"
    assert not facts.is_over


def test_the_honest_start_of_a_requeued_job_is_its_eligible_time() -> None:
    facts = parse_job((GOLDEN / "requeue_with_start_time.txt").read_text(), 1)
    assert facts.eligible_time == datetime.fromtimestamp(1795222286, UTC)
    assert facts.start_time == datetime.fromtimestamp(1795222276, UTC)  # a lie: it is completing


@pytest.mark.parametrize(
    "name", ["x JobState=COMPLETED Restarts=9", "x  Requeue=0", "=", "a=b", "PreemptTime=1795222231"]
)
def test_a_job_name_cannot_forge_a_field(name: str) -> None:
    facts = parse_job(RUNNING.replace("JobName=job.py", f"JobName={name}"), 1)
    assert facts.name == name.strip()
    assert (facts.state, facts.restarts, facts.requeue, facts.preempt_time) == ("RUNNING", 0, True, None)


@pytest.mark.parametrize("key", ["JobName", "Command", "WorkDir", "StdOut", "StdErr"])
def test_a_line_break_in_a_free_text_is_refused(key: str) -> None:
    lines = [line + "\n   Restarts=7" if f"{key}=" in line else line for line in RUNNING.splitlines()]
    with pytest.raises(SlurmMissing, match="twice"):
        parse_job("\n".join(lines), 1)


def test_of_an_array_the_one_task_asked_for_is_read() -> None:
    task = RUNNING.replace("JobId=1 ", "JobId=3 ArrayJobId=1 ArrayTaskId=1 ").replace(
        "Restarts=0", "Restarts=4"
    )
    assert parse_job(RUNNING + "\n" + task, 3).restarts == 4
    assert parse_job(RUNNING + "\n" + task, 1).restarts == 0


@pytest.mark.parametrize("text", ["", "\n\n", "No jobs in the system\n", "garbage " * 1000])
def test_no_record_is_not_found(text: str) -> None:
    with pytest.raises(NotFound):
        parse_job(text, 1)


@pytest.mark.parametrize("missing", ["JobState", "Restarts", "UserId", "Requeue"])
def test_a_record_that_lacks_a_field_is_refused(missing: str) -> None:
    with pytest.raises(SlurmMissing, match=missing):
        parse_job(RUNNING.replace(f"{missing}=", f"No{missing}="), 1)


def test_times() -> None:
    assert parse_time("1795222231") == datetime.fromtimestamp(1795222231, UTC)
    local = parse_time("2026-11-21T00:42:58")
    assert local is not None
    assert local == datetime(2026, 11, 21, 0, 42, 58).astimezone()
    for nothing in ("Unknown", "None", "N/A", ""):
        assert parse_time(nothing) is None
    for wrong in ("1e9", "-5", "now", "9" * 30, "٣"):
        with pytest.raises(ValueError):
            parse_time(wrong)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:10:00", 600),
        ("1-00:00:00", 86400),
        ("02:30", 150),
        ("45", 45),
        ("UNLIMITED", None),
        ("365-01:02:03", 31539723),
    ],
)
def test_durations(text: str, seconds: int | None) -> None:
    assert parse_seconds(text) == seconds


def test_a_node() -> None:
    text = (
        "NodeName=node1 Arch=x86_64 CoresPerSocket=1 \n   CPUAlloc=2 CPUEfctv=2 CPUTot=2 CPULoad=0.37\n"
        "   NodeAddr=127.0.0.1 NodeHostName=localhost Port=18540 Version=22.05.8\n"
        "   OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0 \n   State=DOWN*+DRAIN ThreadsPerCore=1 TmpDisk=0\n"
        "   Reason=Not responding [slurm@2026-11-21T00:50:00] State=IDLE\n"
    )
    node = parse_node(text, "node1")
    assert (node.addr, node.hostname, node.cpus) == ("127.0.0.1", "localhost", 2)
    assert node.state == {"DOWN", "DRAIN", "NOT_RESPONDING"}
    with pytest.raises(NotFound):
        parse_node(text, "node2")


def test_a_partition() -> None:
    text = (
        "PartitionName=urgent\n   AllocNodes=ALL Default=NO QoS=N/A\n"
        "   DefaultTime=00:10:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO\n"
        "   MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED\n"
        "   OverTimeLimit=NONE PreemptMode=OFF\n"
        "   State=UP TotalCPUs=8 TotalNodes=4 SelectTypeParameters=NONE\n"
    )
    partition = parse_partition(text, "urgent")
    assert (partition.state, partition.total_nodes, partition.total_cpus) == ("UP", 4, 8)
    assert (partition.max_nodes, partition.max_time_s, partition.is_default) == (None, 86400, False)


def test_the_config_and_host_names() -> None:
    config = parse_config(
        "Configuration data as of now\nKillWait                = 15 sec\nAuthInfo = socket=/x\n"
    )
    assert config == {"KillWait": "15 sec", "AuthInfo": "socket=/x"}
    assert parse_hostnames("node1\nnode2\n") == ["node1", "node2"]
    with pytest.raises(SlurmMissing):
        parse_hostnames("node1\n--help\n")


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("Configuration data as of 1795283330\nKillWait = 15 sec\n", datetime.fromtimestamp(1795283330, UTC)),
        ("KillWait = 15 sec\n", None),
        ("Configuration data as of now\n", None),
        ("", None),
    ],
)
def test_what_time_it_is_for_slurmctld(text: str, date: datetime | None) -> None:
    assert parse_config_time(text) == date


def test_of_several_nodes_the_lost_ones_are_named() -> None:
    text = (
        "NodeName=n1 NodeAddr=a State=IDLE\n\nNodeName=n2 NodeAddr=b State=DOWN*\n\n"
        "NodeName=n3 NodeAddr=c State=ALLOCATED*+DRAIN\n"
    )
    assert parse_lost_nodes(text) == ("n2", "n3")
