"""What nvidia-smi and the kernel say of a job's GPUs, and what is made of it."""

from pathlib import Path

import pytest

from tests.fakes.nvidia_smi import install_nvidia_smi
from verl_slurm.health import Finding, gpus as module
from verl_slurm.health.gpus import (
    judge_gpus,
    judge_kernel_log,
    judge_processes,
    look_at_gpus,
    visible_gpus,
)


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


def test_whole_gpus_are_good() -> None:
    assert judge_gpus([row(0), row(1)], ("0", "1")) == Finding("GPUs", "good", "2 GPUs without memory errors")


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
    assert judge_gpus(rows, ("0",)).verdict == "good"


def test_values_that_a_gpu_does_not_have_say_nothing_against_it() -> None:
    names = ("ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure")
    assert judge_gpus([row() | dict.fromkeys(names, "[N/A]")], ("0",)).verdict == "good"


def test_a_gpu_of_the_job_that_is_missing_is_named() -> None:
    assert judge_gpus([row(0)], ("0", "1")) == Finding("GPUs", "bad", "1 of 2 is not there")


def test_parts_of_gpus_are_not_checked() -> None:
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
def test_a_recent_xid_that_needs_a_reset_is_bad(number: int) -> None:
    found = judge_kernel_log([xid(number), xid(number)], ["00000000:3B:00.0"], 1000.0)
    assert found.verdict == "bad"
    assert found.found.count(f"Xid {number} of 0000:3b:00") == 1


@pytest.mark.parametrize(
    "record",
    [
        xid(13),  # a program's fault
        xid(31),
        xid(79, "0000:5e:00"),  # a GPU of another job
        xid(79, at_s=1000),
        "6,2,4990000000,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
        " SUBSYSTEM=pci",
        "no record; NVRM: Xid (PCI:0000:3b:00): 79",
        "",
    ],
)
def test_other_records_of_the_kernel_say_nothing_against_a_node(record: str) -> None:
    assert judge_kernel_log([record], ["00000000:3B:00.0"], 5000.0).verdict == "good"


@pytest.mark.parametrize(
    "record",
    [
        # `mount -t tmpfs -o 'NVRM: Xid (PCI:0000:3b:00): 79'` in a user namespace, by any user.
        "3,1,990000000,-;tmpfs: Unknown parameter 'NVRM: Xid (PCI:0000:3b:00): 79'",
        "11,1,990000000,-;NVRM: Xid (PCI:0000:3b:00): 79, written into /dev/kmsg by a program",
        " KEY=0,1,990000000,-;NVRM: Xid (PCI:0000:3b:00): 79",
    ],
)
def test_an_xid_that_the_kernel_only_quotes_says_nothing_against_a_node(record: str) -> None:
    assert judge_kernel_log([record], ["00000000:3B:00.0"], 1000.0).verdict == "good"


def test_what_another_user_can_cause_and_take_back_is_told_from_what_lasts() -> None:
    row = dict.fromkeys(("index", "uuid", "pci.bus_id"), "0") | {
        "ecc.errors.uncorrected.volatile.total": "1",
        "remapped_rows.pending": "0",
        "remapped_rows.failure": "0",
        "retired_pages.pending": "No",
    }
    foreign = judge_processes("GPU-a, 41\n", ["GPU-a"], str)
    logged = judge_kernel_log([xid(79)], ["00000000:3B:00.0"], 1000.0)
    assert [one.passing for one in (judge_gpus([row], ()), foreign, logged)] == [False, True, True]


def test_the_gpus_of_a_job_are_those_that_slurm_names() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0, 3"}) == ("0", "3")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == visible_gpus({}) == ()


def look(tmp_path: Path, words: str, **options: bool) -> dict[str, Finding]:
    install_nvidia_smi(tmp_path / "bin", {"n1": words})
    environ = {"PATH": f"{tmp_path / 'bin'}:/bin:/usr/bin", "CUDA_VISIBLE_DEVICES": "0"}
    log = tmp_path / "kmsg"
    log.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURMD_NODENAME", "n1")
        patch.setattr(module, "_LEAVES_S", 0.0)
        wanted = {"required": False, "foreign": True, **options}
        found = look_at_gpus(lambda _: None, environ, kernel_log=log, **wanted)
    return {one.topic: one for one in found}


def test_a_good_node_passes_all_checks_of_its_gpus(tmp_path: Path) -> None:
    found = look(tmp_path, ":")
    assert {check: one.verdict for check, one in found.items()} == dict.fromkeys(
        ("GPUs", "kernel log", "GPU processes"), "good"
    )


def test_a_process_on_a_gpu_before_the_ranks_start_is_foreign_unless_gpus_are_shared(tmp_path: Path) -> None:
    assert look(tmp_path, "users=1")["GPU processes"] == Finding(
        "GPU processes", "bad", "1 process on the job's GPUs: 1 of uid 0", passing=True
    )
    assert "GPU processes" not in look(tmp_path, "users=1", foreign=False)


def test_a_gpu_that_has_fallen_off_the_bus_is_bad_and_a_refused_question_is_not(tmp_path: Path) -> None:
    assert look(tmp_path, "code=15")["GPUs"].found.startswith("nvidia-smi: a GPU has fallen off the bus")
    assert look(tmp_path, "code=4")["GPUs"].verdict == "not checked"


def test_a_log_that_cannot_be_read_and_a_node_without_nvidia_smi_are_not_checked(tmp_path: Path) -> None:
    (found,) = look_at_gpus(
        lambda _: None, {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}, required=True, foreign=True
    )
    assert found == Finding("GPUs", "not checked", "there is no nvidia-smi")
    assert module._look_at_log(tmp_path / "none", []).verdict == "not checked"
