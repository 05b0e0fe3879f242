"""How much memory is left: of the machine, and of the control groups."""

from pathlib import Path

from verl_slurm.base.memory import available_memory


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
