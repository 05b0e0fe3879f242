"""A file system that fails, mounted over a directory: a FUSE mount without a file system behind it.

It stands for network storage that is gone, silent or broken. No disk here fails on demand, and no driver is needed: the
kernel's side of FUSE is enough. Needs root.
"""

import ctypes
import errno
import os
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

Fault = Literal["dead", "silent", "EIO"]
"""dead: ENOTCONN, as of a mount whose server has died. silent: no call returns. EIO: each call fails with it."""

_INIT = 26
_IN, _OUT = struct.Struct("<IIQ"), struct.Struct("<IiQ")
_INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def faulty_mount(place: Path, fault: Fault) -> Iterator[None]:
    """What lies at `place` is hidden meanwhile. Calls that wait are ended with an error at the end.

    Raises:
        OSError: nothing can be mounted here.
    """
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if _libc.mount(b"faulty", os.fsencode(place), b"fuse", 6, options):
        number = ctypes.get_errno()
        os.close(fd)
        raise OSError(number, os.strerror(number), str(place))
    answers = None
    if fault == "dead":
        os.close(fd)
    elif fault == "EIO":
        answers = threading.Thread(target=_answer, args=(fd,), daemon=True)
        answers.start()
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        if fault == "silent":
            os.close(fd)
        if answers is not None:
            answers.join(timeout=10)


def _answer(fd: int) -> None:
    while True:
        try:
            _, opcode, unique = _IN.unpack_from(os.read(fd, 1 << 20))
            if opcode == _INIT:
                body = _INIT_OUT.pack(7, 31, 65536, 0, 12, 9, 65536, 1, 1, 0, 0)
                os.write(fd, _OUT.pack(_OUT.size + len(body), 0, unique) + body)
            else:
                os.write(fd, _OUT.pack(_OUT.size, -errno.EIO, unique))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):  # a call that was given up, or wants no answer
                continue
            os.close(fd)  # ENODEV: it is unmounted
            return
