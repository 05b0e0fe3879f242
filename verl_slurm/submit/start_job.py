"""Replaces `submitit.core._submit` in the batch script: it unpickles our job, and no other.

submitit finds its pickle by a path. In a directory that other users may write, one of them can put another file there
while the job is queued. So the folder is opened once and must be ours; submitit gets the open one, `/proc/self/fd/N`.
"""

import os
import sys
from pathlib import Path

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.files import require_own
from verl_slurm.submit.entry import BecomeLead

__all__ = ["main"]


def main(folder: Path) -> int:
    """Becomes the submitted job; returns the exit code of a refusal."""
    # Opened once: the path may lead elsewhere a moment later, and the descriptor cannot.
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        require_own(os.fstat(fd), folder, within=folder.parent)
        for name in os.listdir(fd):
            # Each of them, since submitit chooses its own by the job's id.
            if name.endswith("_submitted.pkl"):
                require_own(os.stat(name, dir_fd=fd), folder / name, within=folder.parent)
    except VerlSlurmError as error:
        sys.stderr.write(f"verl-slurm: {error.one_line()}\n")
        return int(error.exit_code)
    # Its number was not understood when it was queued, so submitit's file has no name by which it is found.
    number = os.environ.get("SLURM_JOB_ID")
    if number and not (folder / f"{number}_submitted.pkl").exists():
        BecomeLead(str(folder.parent))()
    # After the checks, and here: nothing is unpickled, and no package of submitit's loaded, for a refusal.
    from submitit.core.submission import process_job

    # As a path, which is what submitit takes; it leads to the folder that was checked.
    process_job(f"/proc/self/fd/{fd}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
