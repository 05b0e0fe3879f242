"""Planted secrets on a real Slurm: submitted, run, preempted, ended; and looked for in all that Slurm shows of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import SMALL, LiveRun
from tests.hostile.planted import KEY, PLANTED, Watcher, found_in, leaks, modes
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long]


@pytest.fixture
def run(cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveRun]:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(private_dir(tmp_path / "tmp")))
    key = private_dir(tmp_path / "keys") / "run.key"
    write_file(key, KEY.hex().encode() + b"\n")
    more = (
        f"checkpoint.encryption.key_file={key}",
        f"checkpoint.local_dir={tmp_path / 'nvme'}",
        "train.steps=4",
    )
    live = LiveRun(cluster, tmp_path / "run", *SMALL, *more)
    yield live
    live.cancel()


def shown(run: LiveRun) -> dict[str, bytes]:
    """Everything that Slurm tells anybody, or the owner, of the job."""
    asked = (
        ("scontrol", "show", "job", "-dd", run.job_id),
        ("scontrol", "show", "steps"),
        ("squeue", "--all", "-o", "%all"),
        ("squeue", "--all", "-s", "-o", "%all"),
        ("scontrol", "write", "batch_script", run.job_id, "-"),
    )
    return {" ".join(argv): run.slurm(*argv, check=False).encode() for argv in asked}


@pytest.mark.scenario("M08")
@pytest.mark.variant
def test_no_secret_shows_in_what_slurm_tells_of_a_job_or_in_what_the_job_leaves(
    run: LiveRun, cluster: DevCluster, tmp_path: Path
) -> None:
    told: list[dict[str, bytes]] = []
    with Watcher(run.paths.root) as watcher:
        run.submit()
        run.wait_phase("generate")
        watcher.look()
        told.append(shown(run))
        preempt(cluster, int(run.job_id), hold_s=1)
        run.wait_event("ended", exit_code=25)
        seen = len(run.events())
        told.append(shown(run))
        run.wait_event("first_rollout", after=seen)
        watcher.look()
        told.append(shown(run))
        run.wait_end()
        told.append(shown(run))
    secrets: dict[str, bytes | str] = {**PLANTED, "key": KEY, **watcher.secrets}
    assert len(watcher.tokens) >= 2
    assert b"verl_slurm_daemon lead" in told[0][f"scontrol write batch_script {run.job_id} -"]
    assert run.job_id.encode() in told[0]["squeue --all -o %all"]
    for number, answers in enumerate(told):
        for command, said in answers.items():
            assert found_in(said, secrets) == [], (number, command)
    assert any(b"srun" in line for line in watcher.cmdlines), "srun's own words were looked at"
    assert found_in(b"\n".join(sorted(watcher.cmdlines)), secrets) == []
    ours = {name: value for name, value in secrets.items() if name not in PLANTED}
    for cmdline, seen in watcher.processes.items():
        assert found_in(seen.environ, ours) == [], cmdline
    # What Slurm keeps for itself (the submitter's environment, 0600) is Slurm's: its logs are read by operators.
    assert leaks([run.paths.root, tmp_path / "nvme", cluster.directory / "log"], secrets) == []
    assert modes([run.paths.root, tmp_path / "nvme"]) == []
    # An empty directory of torch's, where submit has to build the model first, in a process that imports it.
    left = [path.name for path in (tmp_path / "tmp").iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []
