"""Looks at this node before ranks use it: `python -P -m verl_slurm.checks.node_look ORDER`, a process that may hang
in place of an agent.

Prints one JSON line `{"begins": CHECK}` before each check, and at last one line with a list of `Finding`. An agent
that loses patience judges by the check that had begun. nvidia-smi's exit codes are those of nvidia-smi(1), RETURN
VALUE.
"""

import csv
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from verl_slurm.base.one_line import counted, printable
from verl_slurm.checks import Check, Finding, When, bad, good, run_checks, skipped
from verl_slurm.checks.probe_command import ProcessOutput, run_to_end

KERNEL_LOG = Path("/dev/kmsg")
# nvidia-smi takes 0.1 to 2 s, and some more where the driver has to be loaded first.
_SMI_S = 15.0
_COLUMNS = (
    "index",
    "uuid",
    "pci.bus_id",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "retired_pages.pending",
)
# nvidia-smi's exit codes that speak against the node. Others, such as no permission, do not.
_BROKEN: dict[int | None, str] = {
    8: "a GPU has no external power",
    9: "the driver is not loaded",
    10: "the kernel has an interrupt problem with a GPU",
    15: "a GPU has fallen off the bus",
    None: "the driver does not answer",
}
# A process that was killed a moment ago keeps its place on the GPU until the driver has freed its memory.
_LEAVES_S = 5.0
# Xids after which the GPU needs a reset or a repair (NVIDIA, "XID Errors"). The most frequent ones, 13, 31,
# 43 and 45, come from programs.
_XIDS = {
    48: "uncorrected memory error",
    64: "a memory row could not be remapped",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor failed",
    140: "unrecovered memory error",
}
# Older ones do not count: the GPU may have been reset since, and what is still wrong shows in its state.
_XID_AGE_S = 3600.0
# From its beginning: further on, a record may quote what any user has written, such as an option of a mount.
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): (\d+)")
_HEAD = re.compile(r"([0-9]{1,9}),[0-9]+,([0-9]{1,18}),")
# Priorities of facility 0, the kernel, are less (syslog(2)). What programs write into the log has another
# facility.
_FIRST_OF_USERS = 8
_MOST_RECORDS = 100_000


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the GPUs of this job by index or UUID, as Slurm gives them; none: it gives none."""
    said = environ.get("CUDA_VISIBLE_DEVICES", "")
    return tuple(word.strip() for word in said.split(",") if word.strip() not in ("", "NoDevFiles", "-1"))


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The checks that are wanted.

    Attributes:
        gpus_required: the run demands GPUs (`distributed.device: cuda`).
        foreign_processes: whether processes on the GPUs speak against the node.
        places: directories and files that the lead sees.
    """

    gpus: bool
    gpus_required: bool = False
    foreign_processes: bool = True
    min_free_mb: int = 0
    places: tuple[str, ...] = ()


class NodeProbes:
    """What the checks of a node ask it, each thing once. May take long, or never end, if the driver hangs.

    `environ` is the job's; `leaves_s`: how long a process that is on a GPU may take to leave.
    """

    def __init__(
        self,
        order: Order,
        environ: Mapping[str, str] = os.environ,
        kernel_log: Path = KERNEL_LOG,
        leaves_s: float = _LEAVES_S,
    ) -> None:
        self.order, self.kernel_log, self.leaves_s = order, kernel_log, leaves_s
        self.visible = visible_gpus(environ)
        # NVML as a process: a driver that hangs or crashes takes no process of ours along.
        self.program = shutil.which("nvidia-smi", path=environ.get("PATH"))

    @cached_property
    def gpus(self) -> list[dict[str, str]] | Finding:
        """All GPUs of the node by the columns of nvidia-smi; or why they are not known."""
        if not self.visible and not self.order.gpus_required:
            return skipped("GPUs", "the job has none")
        if self.program is None:
            return skipped("GPUs", "there is no nvidia-smi")
        asked = _ask(self.program, f"--query-gpu={','.join(_COLUMNS)}")
        if asked.exit_code == 0:
            return _rows(asked.out)
        said = printable((asked.err or asked.out).strip()[:200])
        if broken := _BROKEN.get(asked.exit_code):
            return bad("GPUs", f"nvidia-smi: {broken}: {said}")
        return skipped("GPUs", f"nvidia-smi ended with {asked.exit_code}: {said}")

    def mine(self, column: str) -> list[str] | None:
        """Returns a column of the job's GPUs; None: they are not known."""
        if isinstance(self.gpus, Finding):
            return None
        return [row[column] for row in _mine(self.gpus, self.visible)]


def _look_at_room(node: NodeProbes) -> list[Finding]:
    # The node's own temporary directory. A full run directory is no fault of a node.
    place = tempfile.gettempdir()
    try:
        free_mb = shutil.disk_usage(place).free >> 20
    except OSError as error:
        return [bad("room", f"{place}: {error.strerror}")]
    said = f"{free_mb} MiB free in {place}"
    if free_mb < node.order.min_free_mb:
        # Any user of the node can fill it, and remove the files a moment later.
        return [bad("room", f"{said}, at least {node.order.min_free_mb}", passing=True)]
    return [good("room", said)]


def _look_at_mounts(node: NodeProbes) -> list[Finding]:
    # RUN is not among them: an agent that found its lead has read the lead's token there.
    missing = []
    for place in node.order.places:
        try:
            os.stat(place)
        except OSError as error:
            missing.append(f"{place}: {error.strerror}")
    return [bad("mounts", "; ".join(missing)) if missing else good("mounts", ", ".join(node.order.places))]


def _look_at_gpus(node: NodeProbes) -> list[Finding]:
    return [node.gpus if isinstance(node.gpus, Finding) else judge_gpus(node.gpus, node.visible)]


def _look_at_log(node: NodeProbes) -> list[Finding]:
    if (bus_ids := node.mine("pci.bus_id")) is None:
        return []
    try:
        records = _read_log(node.kernel_log)
    except OSError as error:
        # Many sites close it to users (`kernel.dmesg_restrict`).
        return [skipped("kernel log", f"{node.kernel_log}: {error.strerror}")]
    return [judge_kernel_log(records, bus_ids, time.clock_gettime(time.CLOCK_MONOTONIC))]


def _look_at_processes(node: NodeProbes) -> list[Finding]:
    uuids = node.mine("uuid")
    # Without the job's own GPUs any process there may be a neighbour's.
    if uuids is None or not node.visible or node.program is None:
        return []
    until = time.monotonic() + node.leaves_s
    while True:
        asked = _ask(node.program, "--query-compute-apps=gpu_uuid,pid")
        if asked.exit_code != 0:
            return [skipped("GPU processes", f"nvidia-smi ended with {asked.exit_code}")]
        found = judge_processes(asked.out, uuids, _owner)
        if found.verdict != "bad" or time.monotonic() > until:
            return [found]
        time.sleep(0.5)  # nothing tells when the driver has freed the memory


_NODE: tuple[When, ...] = ("node",)
_DRILL: tuple[When, ...] = ("node", "doctor")
CHECKS: tuple[Check[NodeProbes], ...] = (
    Check("room", _NODE, _look_at_room, concerns=lambda node: node.order.min_free_mb > 0),
    Check("mounts", _NODE, _look_at_mounts, concerns=lambda node: bool(node.order.places)),
    Check("GPUs", _DRILL, _look_at_gpus, concerns=lambda node: node.order.gpus),
    Check("kernel log", _DRILL, _look_at_log, concerns=lambda node: node.order.gpus),
    Check(
        "GPU processes",
        _DRILL,
        _look_at_processes,
        concerns=lambda node: node.order.gpus and node.order.foreign_processes,
    ),
)
"""The looks at a node. Its agent judges the clock besides (`judge_clock`)."""
OF_DRIVER = ("GPUs", "GPU processes")
"""Those that wait for a GPU's driver: one that does not end is bad."""


def _ask(program: str, query: str) -> ProcessOutput:
    try:
        return run_to_end([program, query, "--format=csv,noheader,nounits"], _SMI_S)
    except OSError as error:
        return ProcessOutput(127, "", str(error))


def _rows(text: str) -> list[dict[str, str]]:
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [dict(zip(_COLUMNS, row, strict=True)) for row in rows if len(row) == len(_COLUMNS)]


def _mine(rows: Sequence[Mapping[str, str]], visible: Sequence[str]) -> list[Mapping[str, str]]:
    return [row for row in rows if not visible or any(_is(row, name) for name in visible)]


def _is(row: Mapping[str, str], name: str) -> bool:
    # A UUID may be shortened as long as it is unique.
    return row["index"] == name or (name.startswith("GPU-") and row["uuid"].startswith(name))


def judge_gpus(rows: Sequence[Mapping[str, str]], visible: Sequence[str]) -> Finding:
    """Judges the rows of `nvidia-smi --query-gpu` of the job's GPUs; without `visible` ones, of all."""
    if any(name.startswith("MIG-") for name in visible):
        return skipped("GPUs", "the job has parts of GPUs (MIG)")
    if missing := [name for name in visible if not any(_is(row, name) for row in rows)]:
        return bad("GPUs", f"{', '.join(missing)} of {len(visible)} is not there")
    wrong = []
    for row in _mine(rows, visible):
        # Values that a GPU does not have are "[N/A]".
        errors = row["ecc.errors.uncorrected.volatile.total"]
        if errors.isdigit() and int(errors):
            wrong.append(f"GPU {row['index']} had {counted(int(errors), 'uncorrected memory error')}")
        if row["remapped_rows.failure"] in ("1", "Yes"):
            wrong.append(f"GPU {row['index']} could not remap a row of its memory")
        if row["remapped_rows.pending"] in ("1", "Yes") or row["retired_pages.pending"] == "Yes":
            wrong.append(f"GPU {row['index']} has to be reset before its memory is whole")
    if wrong:
        return bad("GPUs", "; ".join(wrong))
    return good("GPUs", f"{counted(len(_mine(rows, visible)), 'GPU')} without memory errors")


def judge_processes(text: str, uuids: Sequence[str], owner: Callable[[int], str]) -> Finding:
    """Judges `nvidia-smi --query-compute-apps=gpu_uuid,pid` for the job's GPUs (`uuids`), while no rank runs."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    pids = sorted({int(row[1]) for row in rows if len(row) == 2 and row[0] in uuids and row[1].isdigit()})
    if pids:
        shown = ", ".join(f"{pid}{owner(pid)}" for pid in pids[:4])
        told = f"{counted(len(pids), 'process')} on the job's GPUs: {shown}"
        return bad("GPU processes", told, passing=True)
    return good("GPU processes", "none")


def _owner(pid: int) -> str:
    try:
        return f" of uid {os.stat(f'/proc/{pid}').st_uid}"
    except OSError:  # of another container, or gone
        return ""


def _read_log(path: Path) -> list[str]:
    # One record a read; at its end a read would wait (Documentation/ABI/testing/dev-kmsg).
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    records: list[str] = []
    try:
        while len(records) < _MOST_RECORDS:
            try:
                record = os.read(fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # it was overwritten meanwhile: the next read goes on with the oldest
                continue
            if not record:  # a regular file in its place
                break
            records += record.decode(errors="replace").splitlines()
    finally:
        os.close(fd)
    return records


def judge_kernel_log(records: Iterable[str], bus_ids: Sequence[str], now_s: float) -> Finding:
    """Judges the records of /dev/kmsg, `PRIORITY,NUMBER,MICROSECONDS,FLAGS;TEXT`; `now_s` counts from the boot.

    `bus_ids`: of the job's GPUs, as nvidia-smi writes them (`00000000:3B:00.0`).
    """
    places = {_place(bus_id) for bus_id in bus_ids}
    wrong: dict[str, None] = {}
    for record in records:
        head, _, text = record.partition(";")
        written, found = _HEAD.match(head), _XID.match(text)
        if written is None or found is None or now_s - int(written[2]) / 1e6 > _XID_AGE_S:
            continue
        if int(written[1]) >= _FIRST_OF_USERS:
            continue
        number = int(found[2])
        if number in _XIDS and _place(found[1]) in places:
            wrong[f"Xid {number} of {found[1]}: {_XIDS[number]}"] = None
    if wrong:
        # What lasts shows in the GPU's own state, too: that is nvidia-smi's to say.
        return bad("kernel log", "; ".join(wrong), passing=True)
    return good("kernel log", "no Xid that needs a reset in the last hour")


def _place(bus_id: str) -> str:
    """Returns bus and device."""
    # The domain has four digits here and eight there, and the function may be missing.
    return ":".join(bus_id.lower().partition(".")[0].split(":")[-2:])


def judge_clock(ahead_s: float | None, most_s: float) -> list[Finding]:
    """Judges a node's clock, which is `ahead_s` ahead of Slurm's; None: not known."""
    if not most_s:
        return []
    if ahead_s is None:
        return [skipped("clock", "the lead did not tell the time")]
    said = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} Slurm's"
    return [bad("clock", said) if abs(ahead_s) > most_s else good("clock", said)]


def main(order: Order) -> int:
    found = run_checks(CHECKS, "node", NodeProbes(order), begins=lambda check: _print({"begins": check}))
    _print(found.findings)
    return 0


def _print(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Order)))
