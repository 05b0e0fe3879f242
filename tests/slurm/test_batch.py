"""What is asked of sbatch for a run; that Slurm takes it: tests/slurm_cluster/test_templates.py."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.builders import run_config
from tests.harness import ROOT
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import ContainerConfig
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
echo >> "$0.times"
[ "$(wc -l < "$0.times")" -gt "$SILENT" ] || { echo "Unable to contact slurm controller" >&2; exit 1; }
case "$1 $2" in
"-o show") if [ -e "$0.asked" ]; then echo "JobId=7 JobState=${THEN:-$STATE} Reason=None "
    else echo "JobId=7 JobState=$STATE Reason=None "; fi;;
*) echo "$@" >> "$0.asked"; [ "$1" = update ] || [ -z "$SAYS" ] || { echo "$SAYS" >&2; exit 1; };;
esac
"""


def run_waiting(
    place: Path,
    late: int,
    restarts: int = 0,
    state: str = "RUNNING",
    *,
    missing: str = "python",
    silent: int = 0,
    says: str = "",
    then: str = "",
) -> tuple[int, str, str]:
    """Runs a script for which Python's directory, the run's, or srun comes with the `late`-th second.

    Slurm is silent the first `silent` times, `says` an error of each requeue, and shows the state `then` after one.

    Returns:
        Exit code, words, and what Slurm heard.
    """
    bin_, program, run = place / "bin", place / "away dir" / "python", RunPaths(place / "a run")
    bin_.mkdir()
    run.root.mkdir()
    run.run_yaml.touch()
    (place / "there").mkdir()
    there = {"python": program.parent, "run": run.root}
    # This machine may have a Slurm of its own.
    for tool in ("bash", "date", "ln", "mkdir", "sh", "touch", "wc"):
        (bin_ / tool).symlink_to(str(shutil.which(tool)))
    (bin_ / "srun").symlink_to(bin_ / "sh")
    there["srun"] = bin_ / "srun"
    if missing != "python":
        program.parent.symlink_to(place / "there")
        there[missing].rename(place / "unmounted")
    source = "there" if missing == "python" else "unmounted"
    tick = f"""#!/bin/sh
echo >> "$0.ticks"
[ "$(wc -l < "$0.ticks")" -lt {late} ] || ln -sfn {place}/{source} "{there[missing]}"
"""
    for path, text in (
        (bin_ / "scontrol", _SCONTROL),
        (bin_ / "sleep", tick),
        (place / "there/python", "#!/bin/sh\necho trains\n"),
    ):
        path.write_text(text)
        path.chmod(0o755)
    script = "\n".join(["set -euo pipefail", *awaiting(str(program), run), f"exec '{program}'"])
    environ = {"PATH": str(bin_), "SLURM_JOB_ID": "7", "STATE": state}
    environ |= {"SILENT": str(silent), "SAYS": says, "THEN": then}
    environ |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    words = [str(bin_ / "bash"), "-c", script]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    asked, log = bin_ / "scontrol.asked", run.logs / "7_0_log.out"
    said = log.read_text() if log.exists() else done.stdout
    return done.returncode, said + done.stderr, asked.read_text() if asked.exists() else ""


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("python", "away dir/python: No such file or directory"),
        ("run", ""),
        ("srun", "type: srun: not found"),
    ],
)
def test_a_script_waits_for_what_comes_late_and_writes_into_the_runs_log(
    tmp_path: Path, missing: str, words: str
) -> None:
    code, said, asked = run_waiting(tmp_path, late=3, missing=missing)
    assert (code, asked) == (0, "")
    assert words in said
    assert said.endswith("trains\n")


@pytest.mark.parametrize(
    ("restarts", "state", "code", "asked"),
    [
        (0, "RUNNING", 25, "requeue 7\nupdate JobId=7 StartTime=now+600 Comment=verl-slurm: "),
        (30, "RUNNING", 25, "requeue 7\nupdate JobId=7 StartTime=now+600 Comment=verl-slurm: "),
        (23, "RUNNING", 25, "requeuehold 7\nupdate JobId=7 Comment=verl-slurm: "),
        (0, "CANCELLED", 127, ""),
    ],
)
def test_a_python_that_stays_away_costs_a_requeue_and_not_the_job(
    tmp_path: Path, restarts: int, state: str, code: int, asked: str
) -> None:
    found, said, told = run_waiting(tmp_path, 1000, restarts, state)
    assert (found, told[: len(asked)]) == (code, asked), said
    assert not told or told.endswith("away dir/python: No such file or directory\n")
    assert ("scontrol release 7" if code == 25 else "verl-slurm submit RUN") in said


_LOST = "Unable to contact slurm controller (connect failure)"
_DISABLED = "Requested operation is presently disabled for job 7"


@pytest.mark.parametrize(
    ("state", "silent", "says", "then", "code", "requeues"),
    [
        ("RUNNING", 2, "", "", 25, 1),
        ("SIGNALING", 0, "", "", 25, 1),
        ("RUNNING", 0, _LOST, "COMPLETING", 25, 1),
        ("RUNNING", 0, _LOST, "", 127, 60),
        ("RUNNING", 0, _DISABLED, "", 127, 1),
        ("COMPLETING", 2, "", "", 127, 0),
        ("RUNNING", 1000, "", "", 127, 0),
    ],
    ids=["silent", "a signal", "answer lost", "no answer", "refused", "cancelled meanwhile", "away"],
)
def test_a_slurm_that_is_silent_for_a_while_costs_no_job_whose_python_stays_away(
    tmp_path: Path, state: str, silent: int, says: str, then: str, code: int, requeues: int
) -> None:
    found, said, told = run_waiting(tmp_path, 1000, state=state, silent=silent, says=says, then=then)
    assert (found, told.count("requeue 7\n")) == (code, requeues), said
    assert ("Comment=verl-slurm: " in told) is (code == 25)
    assert code == 25 or f"takes no requeue{f' ({says})' if says else ''}" in said


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "sbatch").iterdir()))
def test_each_template_waits_as_submitted_scripts_do(script: str) -> None:
    assert f"\n{AWAIT}\n" in (ROOT / "sbatch" / script).read_text()
