"""What nvidia-smi, the kernel, the clock and the file system say of a node, and what is made of it."""

import tempfile
from pathlib import Path

import pytest
from verl_slurm_daemon.agent.node_check import order_for

from tests.fakes.nvidia_smi import install_nvidia_smi
from verl_slurm.checks import Finding, run_checks
from verl_slurm.checks.node_look import (
    CHECKS,
    NodeProbes,
    Order,
    judge_clock,
    judge_gpus,
    judge_kernel_log,
    judge_processes,
    visible_gpus,
)
from verl_slurm.config.schema import RunConfig, ServiceConfig


def row(index: int = 0, **values: str) -> dict[str, str]:
    """A GPU without a fault, as nvidia-smi of driver 580 tells of an H100."""
    return {
        "index": str(index),
        "uuid": f"GPU-{index}000-abcd",
        "pci.bus_id": f"00000000:{index + 1:02X}:00.0",
        "ecc.errors.uncorrected.volatile.total": "0",
        "remapped_rows.pending": "No",
        "remapped_rows.failure": "No",
        "retired_pages.pending": "[N/A]",
        **values,
    }


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"ecc.errors.uncorrected.volatile.total": "2"}, "GPU 1 had 2 uncorrected memory errors"),
        ({"remapped_rows.failure": "Yes"}, "GPU 1 could not remap a row of its memory"),
        ({"remapped_rows.pending": "1"}, "GPU 1 has to be reset before its memory is whole"),
        ({"retired_pages.pending": "Yes"}, "GPU 1 has to be reset before its memory is whole"),
    ],
)
def test_a_gpu_with_damaged_memory_is_bad_where_the_job_has_it(values: dict[str, str], told: str) -> None:
    rows = [row(0), row(1) | values]
    assert judge_gpus(rows, ("0", "1")) == Finding("GPUs", "bad", told)
    assert judge_gpus(rows, ("GPU-1000",)).found == told
    assert judge_gpus(rows, ()).found == told
    assert judge_gpus(rows, ("0",)) == Finding("GPUs", "good", "1 GPU without memory errors")


def test_a_gpu_that_is_missing_is_named_and_values_that_it_does_not_have_say_nothing() -> None:
    names = ("ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure")
    assert judge_gpus([row() | dict.fromkeys(names, "[N/A]")], ("0",)).verdict == "good"
    assert judge_gpus([row(0)], ("0", "1")) == Finding("GPUs", "bad", "1 of 2 is not there")
    assert judge_gpus([row(0)], ("MIG-aaaa",)).verdict == "not checked"


def test_only_processes_on_the_jobs_gpus_are_foreign() -> None:
    text = "GPU-a, 41\nGPU-b, 42\nGPU-a, 41\nno table\nGPU-a, [N/A]\n"
    found = judge_processes(text, ["GPU-a"], lambda pid: f" of uid {pid}0")
    assert found == Finding(
        "GPU processes", "bad", "1 process on the job's GPUs: 41 of uid 410", passing=True
    )
    assert judge_processes(text, ["GPU-c"], str).verdict == "good"


def xid(number: int, place: str = "0000:3b:00", at_s: int = 990) -> str:
    return f"3,1,{at_s}000000,-;NVRM: Xid (PCI:{place}): {number}, pid=12, name=python, it says more"


@pytest.mark.parametrize("number", [48, 64, 79, 95, 119, 120, 140])
def test_a_recent_xid_that_needs_a_reset_is_bad_and_may_pass(number: int) -> None:
    found = judge_kernel_log([xid(number), xid(number)], ["00000000:3B:00.0"], 1000.0)
    assert (found.verdict, found.passing) == ("bad", True)
    assert found.found.count(f"Xid {number} of 0000:3b:00") == 1
    assert not judge_gpus([row(**{"remapped_rows.pending": "1"})], ()).passing, "what lasts"


@pytest.mark.parametrize(
    ("record", "now_s"),
    [
        (xid(13), 1000.0),  # a program's fault
        (xid(31), 1000.0),
        (xid(79, "0000:5e:00"), 1000.0),  # a GPU of another job
        (xid(79), 5000.0),
        ("6,2,4990000000,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module", 5000.0),
        (" SUBSYSTEM=pci", 1000.0),
        ("no record; NVRM: Xid (PCI:0000:3b:00): 79", 1000.0),
        ("", 1000.0),
        # Quoted: `mount -t tmpfs -o 'NVRM: Xid (PCI:0000:3b:00): 79'` in a user namespace, by any user.
        ("3,1,990000000,-;tmpfs: Unknown parameter 'NVRM: Xid (PCI:0000:3b:00): 79'", 1000.0),
        ("11,1,990000000,-;NVRM: Xid (PCI:0000:3b:00): 79, written into /dev/kmsg by a program", 1000.0),
        (" KEY=0,1,990000000,-;NVRM: Xid (PCI:0000:3b:00): 79", 1000.0),
    ],
)
def test_other_records_and_an_xid_that_the_kernel_only_quotes_say_nothing(record: str, now_s: float) -> None:
    assert judge_kernel_log([record], ["00000000:3B:00.0"], now_s).verdict == "good"


def test_the_gpus_of_a_job_are_those_that_slurm_names() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0, 3"}) == ("0", "3")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == visible_gpus({}) == ()


def look(tmp_path: Path, words: str, log: str = "kmsg", *, foreign: bool = True) -> dict[str, Finding]:
    install_nvidia_smi(tmp_path / "bin", {"n1": words})
    environ = {"PATH": f"{tmp_path / 'bin'}:/bin:/usr/bin", "CUDA_VISIBLE_DEVICES": "0"}
    (tmp_path / "kmsg").write_text("")
    node = NodeProbes(Order(gpus=True, foreign_processes=foreign), environ, tmp_path / log, leaves_s=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURMD_NODENAME", "n1")
        return {one.topic: one for one in run_checks(CHECKS, "node", node).findings}


def test_a_good_node_passes_all_checks_of_its_gpus_and_a_closed_log_is_not_checked(tmp_path: Path) -> None:
    found = look(tmp_path, ":")
    checks = ("GPUs", "kernel log", "GPU processes")
    assert {check: one.verdict for check, one in found.items()} == dict.fromkeys(checks, "good")
    assert look(tmp_path, ":", log="none")["kernel log"].verdict == "not checked"


def test_a_process_on_a_gpu_before_the_ranks_start_is_foreign_unless_gpus_are_shared(tmp_path: Path) -> None:
    assert look(tmp_path, "users=1")["GPU processes"] == Finding(
        "GPU processes", "bad", "1 process on the job's GPUs: 1 of uid 0", passing=True
    )
    assert "GPU processes" not in look(tmp_path, "users=1", foreign=False)


def test_a_gpu_that_has_fallen_off_the_bus_is_bad_and_a_refused_question_is_not(tmp_path: Path) -> None:
    assert look(tmp_path, "code=15")["GPUs"].found.startswith("nvidia-smi: a GPU has fallen off the bus")
    assert look(tmp_path, "code=4")["GPUs"].verdict == "not checked"
    without = NodeProbes(Order(gpus=True, gpus_required=True), {"PATH": str(tmp_path)})
    assert run_checks(CHECKS, "node", without).findings == [
        Finding("GPUs", "not checked", "there is no nvidia-smi")
    ]


def test_a_full_temporary_directory_and_a_place_that_only_the_lead_sees_are_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def judged(least_mb: int, *places: Path) -> list[Finding]:
        order = Order(gpus=False, min_free_mb=least_mb, places=tuple(map(str, places)))
        return run_checks(CHECKS, "node", NodeProbes(order)).findings

    (found,) = judged(1 << 40)
    assert (found.verdict, found.passing) == ("bad", True)
    assert found.found.endswith(f"MiB free in {tmp_path}, at least {1 << 40}")
    assert judged(0) == []
    assert [one.verdict for one in judged(1, tmp_path)] == ["good", "good"]
    (found,) = judged(0, tmp_path, tmp_path / "data")
    assert (found.verdict, found.found) == ("bad", f"{tmp_path / 'data'}: No such file or directory")


@pytest.mark.parametrize(
    ("ahead_s", "verdict"),
    [(0.2, "good"), (-59.0, "good"), (61.0, "bad"), (-61.0, "bad"), (None, "not checked")],
)
def test_a_clock_that_is_far_from_slurms_is_bad(ahead_s: float | None, verdict: str) -> None:
    (found,) = judge_clock(ahead_s, 60.0)
    assert found.verdict == verdict
    assert judge_clock(ahead_s, 0.0) == []


@pytest.mark.parametrize(("nodes", "looked_for"), [(0, False), (1, True)])
def test_a_service_beside_the_ranks_is_no_foreign_process_on_their_gpus(nodes: int, looked_for: bool) -> None:
    judge = ServiceConfig(command=("judge.py",), nodes=nodes, gpus=1)
    assert order_for(RunConfig(services={"judge": judge}), ()).foreign_processes is looked_for
