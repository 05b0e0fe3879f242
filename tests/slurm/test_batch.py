"""What is asked of sbatch for a run; that Slurm takes it: tests/slurm_cluster/test_templates.py."""

import subprocess
from pathlib import Path

import pytest

from tests.builders import run_config
from tests.harness import ROOT
from verl_slurm.config.container import ContainerConfig
from verl_slurm.slurm.batch import AWAIT, awaiting, batch_script


@pytest.mark.parametrize(
    ("nodes", "container", "script"),
    [
        (1, None, "single_node.sbatch"),
        (2, None, "multi_node.sbatch"),
        (1, ContainerConfig(image="/images/a.sif"), "single_node.sbatch"),
        (2, ContainerConfig(image="/a+b.sqsh", runtime="pyxis"), "pyxis.sbatch"),
    ],
)
def test_each_run_has_the_script_that_can_start_it(
    nodes: int, container: ContainerConfig | None, script: str
) -> None:
    config = run_config(nodes=nodes, container=container)
    assert batch_script(config) == script
    assert (ROOT / "sbatch" / script).is_file()


_SCONTROL = """#!/bin/sh
case "$1 $2" in
"-o show") echo "JobId=7 JobState=$STATE Reason=None ";;
*) echo "$@" >> "$0.asked";;
esac
"""


def run_waiting(place: Path, late: int, restarts: int = 0, state: str = "RUNNING") -> tuple[int, str, str]:
    """Runs a script whose program comes with the `late`-th second; returns exit code, words, and what Slurm heard."""
    bin_, program = place / "bin", place / "away dir" / "python"
    bin_.mkdir()
    tick = f"""#!/bin/sh
echo >> "$0.ticks"
[ "$(wc -l < "$0.ticks")" -lt {late} ] || ln -sfn {place}/there "{program.parent}"
"""
    (place / "there").mkdir()
    for path, text in (
        (bin_ / "scontrol", _SCONTROL),
        (bin_ / "sleep", tick),
        (place / "there/python", "#!/bin/sh\necho trains\n"),
    ):
        path.write_text(text)
        path.chmod(0o755)
    script = "\n".join(["set -euo pipefail", *awaiting(str(program), "/"), f"exec '{program}'"])
    environ = {"PATH": f"{bin_}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "STATE": state}
    environ |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=False)
    asked = bin_ / "scontrol.asked"
    return done.returncode, done.stdout + done.stderr, asked.read_text() if asked.exists() else ""


def test_a_script_waits_for_a_python_that_comes_late(tmp_path: Path) -> None:
    code, said, asked = run_waiting(tmp_path, late=3)
    assert (code, asked) == (0, "")
    assert "away dir/python: No such file or directory" in said
    assert said.endswith("trains\n")


@pytest.mark.parametrize(
    ("restarts", "state", "code", "asked"),
    [
        (0, "RUNNING", 25, "requeue 7\nupdate JobId=7 StartTime=now+600\n"),
        (30, "RUNNING", 25, "requeue 7\nupdate JobId=7 StartTime=now+600\n"),
        (23, "RUNNING", 25, "requeuehold 7\n"),
        (0, "CANCELLED", 127, ""),
    ],
)
def test_a_python_that_stays_away_costs_a_requeue_and_not_the_job(
    tmp_path: Path, restarts: int, state: str, code: int, asked: str
) -> None:
    found, said, told = run_waiting(tmp_path, 1000, restarts, state)
    assert (found, told) == (code, asked), said
    assert ("scontrol release 7" if code == 25 else "verl-slurm submit RUN") in said


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "sbatch").iterdir()))
def test_each_template_waits_as_submitted_scripts_do(script: str) -> None:
    assert f"\n{AWAIT}\n" in (ROOT / "sbatch" / script).read_text()
