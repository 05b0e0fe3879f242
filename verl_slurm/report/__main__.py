"""`python -m verl_slurm.report`: writes the live page of one run to standard output. The server starts it as a child.

So a run that takes too long, or breaks the reader, ends no more than this process.
"""

import os
import sys
from pathlib import Path

import msgspec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.paths import RunPaths
from verl_slurm.report.gather import gather
from verl_slurm.report.page import render_page
from verl_slurm.report.serve import Task
from verl_slurm.runs.run_record import require_traces


def main() -> int:
    """Reads the task from standard input; returns the exit code."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    # A path of any bytes, which JSON cannot hold.
    root = Path(os.fsdecode(task.root))
    try:
        run = require_traces(RunPaths(root))
        facts = gather([run], known={root: (task.state, task.alive)})
    except VerlSlurmError as error:
        # One line alone is handed on to the browser.
        sys.stderr.write(f"{error.one_line()}\n")
        return int(error.exit_code)
    sys.stdout.buffer.write(render_page(facts, events=task.events).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
