"""Runs a program for which setgroups(2) succeeds and changes nothing: `python fixed_groups.py PROGRAM ARGUMENT...`.

In a user namespace of one user, and in a container without CAP_SETGID, root may not change its groups, and Slurm's
daemons end (docs/decisions/0020-fixed-groups.md).

The filter is a seccomp program (seccomp(2), linux/seccomp.h), which all children inherit. It looks at the number of
the system call alone. It cannot be taken away again.
"""

import ctypes
import os
import platform
import struct
import sys

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
# BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K (linux/bpf_common.h).
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
# Offsets in struct seccomp_data.
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4
# SECCOMP_RET_ALLOW, and SECCOMP_RET_ERRNO with errno 0: the call returns 0 and does nothing.
_ALLOW, _ERRNO_0 = 0x7FFF0000, 0x00050000
# AUDIT_ARCH_* (linux/audit.h) and the number of setgroups, by machine.
_SETGROUPS = {"x86_64": (0xC000003E, 116), "aarch64": (0xC00000B7, 159)}


class _SockFprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def prefix() -> list[str]:
    """Returns the words that go before a daemon's command line: none where the daemon may set its groups."""
    if os.geteuid() != 0 or platform.machine() not in _SETGROUPS:
        return []
    try:
        # The same groups again: nothing changes, and the kernel asks for permission before it looks at them.
        os.setgroups(os.getgroups())
    except PermissionError:
        # By its file: this package need not be on the path of a new interpreter, and nothing of it is imported.
        return [sys.executable, "-I", "-S", __file__]
    except OSError:
        # Permitted, but a group has no number in this namespace.
        return []
    return []


def _filter(architecture: int, setgroups: int) -> bytes:
    """Returns the program: struct sock_filter of 8 bytes each, (code, jump if true, jump if false, operand)."""
    lines = (
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        # Numbers differ between architectures, and a 32-bit program may run on a 64-bit kernel.
        (_EQUAL, 0, 3, architecture),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_EQUAL, 0, 1, setgroups),
        (_RETURN, 0, 0, _ERRNO_0),
        (_RETURN, 0, 0, _ALLOW),
    )
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _main(argv: list[str]) -> None:
    program = _filter(*_SETGROUPS[platform.machine()])
    held = ctypes.create_string_buffer(program, len(program))
    loaded = _SockFprog(len(program) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        # Without it the kernel takes a filter from nobody but an administrator; a setuid program in a job
        # then gains nothing.
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(loaded), 0, 0),
    ):
        if libc.prctl(*call):
            # `error`: the words by which the start finds the line in its log.
            why = os.strerror(ctypes.get_errno())
            sys.exit(f"error: root may not change its groups here, and a seccomp filter is refused: {why}")
    os.execv(argv[0], argv)  # noqa: S606 - there is no shell to need


if __name__ == "__main__":
    _main(sys.argv[1:])
