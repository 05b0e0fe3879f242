"""Replaces `submitit.core._submit` in the batch script: it unpickles our job, and no other.

submitit finds its pickle by a path. In a directory that other users may write, one of them can put another file there
while the job is queued. So the folder is opened once and must be ours; submitit gets the open one, `/proc/self/fd/N`.
"""

import os
import sys
from pathlib import Path

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.files import require_own

__all__ = ["main"]


def main(folder: Path) -> int:
    """Becomes the submitted job; returns the exit code of a refusal."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        require_own(os.fstat(fd), folder)
        for name in os.listdir(fd):
            if name.endswith("_submitted.pkl"):
                require_own(os.stat(name, dir_fd=fd), folder / name)
    except VerlSlurmError as error:
        sys.stderr.write(f"verl-slurm: {error.one_line()}\n")
        return int(error.exit_code)
    from submitit.core.submission import process_job

    process_job(f"/proc/self/fd/{fd}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
