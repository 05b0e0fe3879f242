from datetime import UTC, datetime
from pathlib import Path

import pytest

from verl_slurm.base.errors import NotFound, SlurmMissing
from verl_slurm.slurm import parse

GOLDEN = Path(__file__).parent / "golden"
RUNNING = (GOLDEN / "running.txt").read_text()


def test_a_running_job_is_read_whole_and_a_requeued_one_with_its_eligible_time() -> None:
    facts = parse.parse_job(RUNNING, 1)
    assert facts.state == "RUNNING"
    assert facts.reason is None
    assert (facts.restarts, facts.requeue) == (0, True)
    assert facts.preempt_time is None
    assert facts.start_time == datetime.fromtimestamp(1795222231, UTC)
    assert (facts.node_list, facts.num_nodes, facts.batch_host) == ("node[1-2]", 2, "node1")
    assert facts.partition == "preemptible"
    assert facts.user_id == 0
    assert not facts.is_over
    facts = parse.parse_job((GOLDEN / "requeue_with_start_time.txt").read_text(), 1)
    assert facts.eligible_time == datetime.fromtimestamp(1795222286, UTC)
    assert facts.start_time == datetime.fromtimestamp(1795222276, UTC)  # a lie: it is completing


@pytest.mark.parametrize(
    "name", ["x JobState=COMPLETED Restarts=9", "x  Requeue=0", "=", "a=b", "PreemptTime=1795222231"]
)
def test_a_job_name_cannot_forge_a_field(name: str) -> None:
    facts = parse.parse_job(RUNNING.replace("JobName=job.py", f"JobName={name}"), 1)
    assert facts.name == name.strip()
    assert (facts.state, facts.restarts, facts.requeue, facts.preempt_time) == ("RUNNING", 0, True, None)


@pytest.mark.parametrize("key", ["JobName", "Command", "WorkDir", "StdOut", "StdErr"])
def test_a_line_break_in_a_free_text_is_refused(key: str) -> None:
    lines = [line + "\n   Restarts=7" if f"{key}=" in line else line for line in RUNNING.splitlines()]
    with pytest.raises(SlurmMissing, match="twice"):
        parse.parse_job("\n".join(lines), 1)


def test_tasks_of_an_array_and_components_have_records_of_their_own() -> None:
    task = RUNNING.replace("JobId=1 ", "JobId=3 ArrayJobId=1 ArrayTaskId=1 ").replace(
        "Restarts=0", "Restarts=4"
    )
    assert parse.parse_job(RUNNING + "\n" + task, 3).restarts == 4
    assert parse.parse_job(RUNNING + "\n" + task, 1).restarts == 0
    task = (GOLDEN / "newer" / "25.05_array_task_running.txt").read_text()
    assert parse.parse_job(task, 1).state == "RUNNING"
    with pytest.raises(NotFound):
        parse.parse_job(task, 9)  # the array's own number is another task's record, or nobody's
    first = (GOLDEN / "newer" / "25.11_het_component_running.txt").read_text()
    second = first.replace("JobId=1 ", "JobId=2 ").replace("HetJobOffset=0", "HetJobOffset=1")
    second = second.replace("Restarts=0", "Restarts=3")
    assert [parse.parse_job(first + second, number).restarts for number in (1, 2)] == [0, 3]


@pytest.mark.parametrize("text", ["", "\n\n", "No jobs in the system\n", "garbage " * 1000])
def test_no_record_is_not_found(text: str) -> None:
    with pytest.raises(NotFound):
        parse.parse_job(text, 1)


@pytest.mark.parametrize("missing", ["JobState", "Restarts", "UserId", "Requeue"])
def test_a_record_that_lacks_a_field_is_refused(missing: str) -> None:
    with pytest.raises(SlurmMissing, match=missing):
        parse.parse_job(RUNNING.replace(f"{missing}=", f"No{missing}="), 1)


def test_times() -> None:
    assert parse.parse_time("1795222231") == datetime.fromtimestamp(1795222231, UTC)
    local = parse.parse_time("2026-11-21T00:42:58")
    assert local is not None
    assert local == datetime(2026, 11, 21, 0, 42, 58).astimezone()
    for nothing in ("Unknown", "None", "N/A", ""):
        assert parse.parse_time(nothing) is None
    for wrong in ("1e9", "-5", "now", "9" * 30, "٣"):
        with pytest.raises(ValueError):
            parse.parse_time(wrong)


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
    assert parse.parse_seconds(text) == seconds


def test_the_nodes_that_a_job_asks_for() -> None:
    job = parse.parse_job(RUNNING, 1)
    assert (job.required, job.reservation) == (None, None)
    asks = RUNNING.replace("ReqNodeList=(null)", "ReqNodeList=n[1-2]").rstrip() + "\n   Reservation=R\n"
    job = parse.parse_job(asks, 1)
    assert (job.required, job.reservation) == ("n[1-2]", "R")
    text = "ReservationName=R StartTime=1 EndTime=2\n   Nodes=n[1-2] NodeCnt=2 CoreCnt=4 Features=(null)\n"
    assert parse.parse_reservation(text, "R") == "n[1-2]"
    assert parse.parse_reservation(text.replace("n[1-2]", "(null)"), "R") is None
    with pytest.raises(NotFound):
        parse.parse_reservation(text, "S")
    nodes = "n1|resv|a100\nn2|mix|a100\nn3|drain|a100"
    assert list(parse.parse_usable_nodes(nodes, parse.USABLE_RESERVED)) == ["n1", "n2"]


def test_a_node_and_a_partition() -> None:
    text = (
        "NodeName=node1 Arch=x86_64 CoresPerSocket=1 \n   CPUAlloc=2 CPUEfctv=2 CPUTot=2 CPULoad=0.37\n"
        "   NodeAddr=127.0.0.1 NodeHostName=localhost Port=18540 Version=22.05.8\n"
        "   OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0 \n   State=DOWN*+DRAIN ThreadsPerCore=1 TmpDisk=0\n"
        "   Reason=Not responding [slurm@2026-11-21T00:50:00] State=IDLE\n"
    )
    node = parse.parse_node(text, "node1")
    assert (node.addr, node.hostname, node.cpus) == ("127.0.0.1", "localhost", 2)
    assert node.state == {"DOWN", "DRAIN", "NOT_RESPONDING"}
    with pytest.raises(NotFound):
        parse.parse_node(text, "node2")
    text = (
        "PartitionName=urgent\n   AllocNodes=ALL Default=NO QoS=N/A\n"
        "   DefaultTime=00:10:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO\n"
        "   MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED\n"
        "   OverTimeLimit=NONE PreemptMode=OFF\n"
        "   State=UP TotalCPUs=8 TotalNodes=4 SelectTypeParameters=NONE\n"
    )
    partition = parse.parse_partition(text, "urgent")
    assert (partition.state, partition.total_nodes, partition.total_cpus) == ("UP", 4, 8)
    assert (partition.max_nodes, partition.max_time_s, partition.is_default) == (None, 86400, False)
    other = text.replace("urgent", "gpu").replace("Default=NO", "Default=YES")
    assert [one.name for one in parse.parse_partitions(f"{text}\n{other}")] == ["urgent", "gpu"]
    assert parse.parse_default_partition(f"{text}\n{other}").name == "gpu"


@pytest.mark.parametrize(
    ("kind", "gpus"),
    [
        ("a100|gpu:8", 8),
        ("(null)|gpu:a100:8(S:0-1)", 8),
        ("x|gpu:a100:2,gpu:h100:4(S:0),shard:16", 6),
        ("gpu:4|(null)", 0),
        ("", 0),
    ],
)
def test_the_gpus_of_a_node_are_counted_in_its_resources(kind: str, gpus: int) -> None:
    assert parse.parse_gpus(kind) == gpus


def test_the_config_and_host_names() -> None:
    config = parse.parse_config(
        "Configuration data as of now\nKillWait                = 15 sec\nAuthInfo = socket=/x\n"
    )
    assert config == {"KillWait": "15 sec", "AuthInfo": "socket=/x"}
    assert parse.parse_hostnames("node1\nnode2\n") == ["node1", "node2"]
    with pytest.raises(SlurmMissing):
        parse.parse_hostnames("node1\n--help\n")


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
    assert parse.parse_config_time(text) == date


def test_several_nodes_and_many_jobs_are_read_from_one_answer() -> None:
    text = (
        "NodeName=n1 NodeAddr=a State=IDLE\n\nNodeName=n2 NodeAddr=b State=DOWN*\n\n"
        "NodeName=n3 NodeAddr=c State=ALLOCATED*+DRAIN\n"
    )
    assert parse.parse_lost_nodes(text) == ("n2", "n3")
    text = "12|RUNNING|None\n13|PENDING|Resources\n14_[1-9]|PENDING|x\n15\n\n|RUNNING|\n16|PENDING|a|b\n"
    text += "17|RUNNING|None|/a|b.sh x|//|/w|z\n18|RUNNING|None|(null)|//|/w|//|(null)\n"
    text += (
        "19|PENDING|BeginTime|/a.sh|//|/w|//|verl-slurm: n1: a|//|b fails\n20|PENDING|x|/a|//|/w|//|mine\n"
    )
    assert parse.parse_states(text) == {
        12: ("RUNNING", "", "", "", ""),
        13: ("PENDING", "Resources", "", "", ""),
        16: ("PENDING", "a|b", "", "", ""),
        17: ("RUNNING", "", "/a|b.sh x", "/w|z", ""),
        18: ("RUNNING", "", "(null)", "/w", ""),
        19: ("PENDING", "BeginTime", "/a.sh", "/w", "verl-slurm: n1: a|//|b fails"),
        20: ("PENDING", "x", "/a", "/w", ""),
    }


NEWER = sorted((GOLDEN / "newer").glob("*.txt"))


@pytest.mark.parametrize("path", NEWER, ids=[path.stem for path in NEWER])
def test_what_newer_versions_print_is_read_whole(path: Path) -> None:
    facts = parse.parse_job(path.read_text(), 1)
    assert (facts.name, facts.partition, facts.num_nodes >= 1) == ("job.py", "preemptible", True)
    assert facts.expedited == ("ExpeditedRequeue" in path.read_text())
    assert facts.failed_node == ("node2" if "FailedNode" in path.read_text() else None)


def test_the_line_that_submitted_a_job_cannot_forge_a_field() -> None:
    text = (GOLDEN / "newer" / "25.11_running_expedited.txt").read_text()
    assert "SubmitLine=sbatch --requeue=expedite --comment=Restarts=9 /" in text
    assert parse.parse_job(text, 1).restarts == 0


def test_a_partition_and_a_node_of_a_newer_slurm() -> None:
    """Composed from src/api/partition_info.c and node_info.c of 25.11 (fdcff640a9)."""
    partition = parse.parse_partition(
        "PartitionName=p\n   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL\n   AllocNodes=ALL Default=YES QoS=N/A\n"
        "   DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime=30 Hidden=NO\n"
        "   MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED "
        "MaxCPUsPerSocket=UNLIMITED\n   Nodes=n[1-2]\n   PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO "
        "OverSubscribe=NO\n   OverTimeLimit=NONE PreemptMode=PRIORITY,REQUEUE\n   State=UP TotalCPUs=4 TotalNodes=2 "
        "SelectTypeParameters=NONE\n   JobDefaults=(null)\n   DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED\n"
        "   TRES=cpu=4,mem=2M,node=2,billing=4\n   Topology=flat\n",
        "p",
    )
    assert (partition.grace_s, partition.preempt_mode, partition.max_time_s) == (30, "PRIORITY,REQUEUE", None)
    node = parse.parse_node(
        "NodeName=n1 Arch=x86_64 CoresPerSocket=2 \n   CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=0.00\n"
        "   AvailableFeatures=(null)\n   ActiveFeatures=(null)\n   Parameters=a=b,c=d\n   Gres=gpu:8(S:0-1)\n"
        "   NodeAddr=n1 NodeHostName=n1 Port=6818 Version=25.11.7\n   OS=Linux 6.1.0 #1 SMP \n"
        "   RealMemory=1 AllocMem=0 FreeMem=1 Sockets=1 Boards=1\n"
        "   State=IDLE+DRAIN+NOT_RESPONDING ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A\n"
        "   Partitions=p \n   BootTime=1 SlurmdStartTime=1\n   LastBusyTime=1 ResumeAfterTime=None\n"
        "   CfgTRES=cpu=2,mem=1M,billing=2\n   AllocTRES=\n   CurrentWatts=0 AveWatts=0\n   \n",
        "n1",
    )
    assert (node.addr, node.cpus, node.state) == ("n1", 2, {"IDLE", "DRAIN", "NOT_RESPONDING"})


@pytest.mark.parametrize(
    ("moment", "waiting", "over"),
    [
        ("pending", True, False),
        ("requeue_pending", True, False),
        ("newer/25.11_expediting", True, False),
        ("newer/25.11_requeue_hold_expedited", True, False),
        ("requeue_completing", False, False),
        ("running", False, False),
        ("cancel_mode_preempted_over", False, True),
    ],
)
def test_a_job_that_is_queued_again_is_not_one_that_is_over(moment: str, waiting: bool, over: bool) -> None:
    """`submit` asks: a run has a job already where one waits, by whatever name."""
    facts = parse.parse_job((GOLDEN / f"{moment}.txt").read_text(), 1)
    assert (facts.is_waiting, facts.is_over) == (waiting, over)
