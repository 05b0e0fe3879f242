from pathlib import Path
from typing import Literal

import msgspec
import pytest

from verl_slurm.slurm.devcluster.conf import ClusterLayout, ClusterOptions, cgroup_conf, slurm_conf


def layout(version: tuple[int, int] = (22, 5)) -> ClusterLayout:
    return ClusterLayout(
        directory=Path("/home/ada/dc"),
        user="ada",
        name="dev0",
        version=version,
        memory_mb=1000,
        ports=(10000, 10001, 10002, 10003, 10004),
    )


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ((22, 5), "SlurmctldParameters=preempt_send_user_signal"),
        ((23, 2), "PreemptParameters=send_user_signal"),
        ((24, 11), "PreemptParameters=send_user_signal"),
    ],
)
def test_the_early_warning_is_spelled_as_the_version_wants_it(version: tuple[int, int], line: str) -> None:
    with_signal = slurm_conf(ClusterOptions(), layout(version), {}).splitlines()
    without = slurm_conf(ClusterOptions(send_user_signal=False), layout(version), {})
    assert line in with_signal
    assert "user_signal" not in without


def test_nobody_but_this_machine_can_connect_and_each_version_has_its_words() -> None:
    assert cgroup_conf((22, 5)) == cgroup_conf((23, 11)) == "CgroupPlugin=cgroup/v1\n"
    assert cgroup_conf((24, 5)) == "CgroupPlugin=disabled\n"
    asked = slurm_conf(ClusterOptions(cred_expire_s=10), layout(), {})
    assert "AuthInfo=socket=/home/ada/dc/munge/socket,cred_expire=10\n" in asked
    text = slurm_conf(ClusterOptions(), layout(), {})
    assert "cred_expire" not in text
    assert "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny\n" in text
    assert text.count("NodeAddr=127.0.0.1") == 4
    elsewhere = slurm_conf(ClusterOptions(), msgspec.structs.replace(layout(), by_loopback=False), {})
    assert "InAddrAny" not in elsewhere


@pytest.mark.parametrize(
    ("mode", "everywhere", "of_the_partition"),
    [
        ("REQUEUE", "PreemptMode=REQUEUE", "PreemptMode=REQUEUE GraceTime=0"),
        ("CANCEL", "PreemptMode=CANCEL", "PreemptMode=CANCEL GraceTime=0"),
        ("SUSPEND", "PreemptMode=SUSPEND,GANG", "PreemptMode=SUSPEND GraceTime=0"),
    ],
)
def test_what_becomes_of_a_preempted_job_is_as_asked(
    mode: Literal["REQUEUE", "CANCEL", "SUSPEND"], everywhere: str, of_the_partition: str
) -> None:
    lines = slurm_conf(ClusterOptions(preempt_mode=mode, grace_s=0), layout(), {"KillWait": "1"}).splitlines()
    assert everywhere in lines
    assert [line for line in lines if line.startswith("KillWait")] == ["KillWait=1"]
    (preemptible,) = (line for line in lines if line.startswith("PartitionName=preemptible"))
    (urgent,) = (line for line in lines if line.startswith("PartitionName=urgent"))
    assert of_the_partition in preemptible
    assert "PreemptMode=OFF" in urgent


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 0},
        {"nodes": 17},
        {"grace_s": -1},
        {"cred_expire_s": 0},
        {"preempt_mode": "cancel"},
        {"nodez": 1},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, ClusterOptions)
