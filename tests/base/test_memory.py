"""How much memory is left: of the machine, and of the control groups."""

from pathlib import Path

import pytest

from verl_slurm.base.kernel_facts import available_memory, oom_kills


def test_memory_is_the_least_that_machine_and_control_groups_leave(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    (tmp_path / "own").write_text("0::/job/step\n")
    (tmp_path / "job/step").mkdir(parents=True)
    (tmp_path / "job/step/memory.max").write_text("max\n")
    (tmp_path / "job/memory.max").write_text("30000\n")
    (tmp_path / "job/memory.current").write_text("10000\n")
    asked = {"meminfo": tmp_path / "meminfo", "cgroups": tmp_path, "own": tmp_path / "own"}
    assert available_memory(**asked) == 20000
    (tmp_path / "job/memory.max").write_text("max\n")
    assert available_memory(**asked) == 50 * 1024


@pytest.mark.parametrize(
    ("own", "file", "text"),
    [
        (
            "0::/slurmstepd.scope/job_7/step_0/task_0\n",
            "slurmstepd.scope/job_7/step_0/task_0/memory.events",
            "oom 3\n",
        ),
        ("0::/../../job_7\n", "memory.events", "oom 3\n"),
        ("3:cpu:/a\n4:memory:/slurm/job_7\n", "memory/slurm/job_7/memory.oom_control", "under_oom 0\n"),
        ("4:cpu,memory:/slurm/job_7\n", "cpu,memory/slurm/job_7/memory.oom_control", "under_oom 0\n"),
    ],
    ids=["version 2, Slurm's group", "a container", "version 1", "controllers in one hierarchy"],
)
def test_the_kernel_s_count_of_kills_for_memory_is_read(
    tmp_path: Path, own: str, file: str, text: str
) -> None:
    (tmp_path / "own").write_text(own)
    groups = tmp_path / "cgroup"
    (groups / file).parent.mkdir(parents=True)
    asked = {"cgroups": groups, "own": tmp_path / "own"}
    assert oom_kills(**asked) is None
    (groups / file).write_text(text + "oom_kill 2\n")
    assert oom_kills(**asked) == 2
