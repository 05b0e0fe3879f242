"""Tells a process from a later one that was given the same number: by the boot and the tick it began in.

Not by dates: what psutil calls a process's creation time is counted from a boot time that moves whenever the clock is
set, and two machines, or one before and after its clock was set, disagree about it.
"""

from pathlib import Path

__all__ = ["birth_of"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_START_TIME = 19
"""Of the fields behind the command's name; proc(5) counts it as 22."""


def birth_of(pid: int) -> str:
    """`BOOT_ID:TICKS` of a living process; empty: there is none of that number, or it has ended and waits for its
    parent, or the system does not say.

    Called by: fence, submit.liveness, daemon.local_allocation.
    """
    try:
        boot = _BOOT_ID.read_text().strip()
        # The name may have spaces and brackets in it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{boot}:{fields[_START_TIME]}"
