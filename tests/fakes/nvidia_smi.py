"""An `nvidia-smi` that tells what a test says, for each node of the embedded cluster.

It stands for the program of NVIDIA's driver, since no GPU is here. It knows the two questions that are asked, answers
in their format, and leaves out everything else; a real driver's words may differ from those of its manual.
"""

from collections.abc import Mapping
from pathlib import Path

_SCRIPT = """#!/bin/sh
errors=0; users=""; code=0
case "$SLURMD_NODENAME" in
{cases}
esac
case "$1" in
--query-gpu=*) echo "0, GPU-aaaa, 00000000:3B:00.0, $errors, No, No, [N/A]";;
--query-compute-apps=*) [ -z "$users" ] || echo "GPU-aaaa, $users";;
esac
exit "$code"
"""


def install_nvidia_smi(folder: Path, nodes: Mapping[str, str]) -> None:
    """Writes the program.

    Args:
        folder: comes first in PATH.
        nodes: what the shell runs on a node: `errors=3` (uncorrected memory errors), `users=PID`, `code=15`,
            `exec sleep 600`.
    """
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    cases = "\n".join(f"{node}) {words};;" for node, words in nodes.items())
    program.write_text(_SCRIPT.format(cases=cases))
    program.chmod(0o755)
