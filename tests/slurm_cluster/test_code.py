"""A PyTorch loop of the user's own on a real Slurm: preempted, edited, and bit for bit what nobody disturbed."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import LiveRun, same_weights
from tests.loops.served import CONFIG, PROGRAM, STEPS, by_hand
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

# The program's parts: a module beside it, and a file of settings that it reads by a relative name.
TRAIN = """
import json, sys
from parts import loop
sys.argv += json.load(open("settings.json"))
loop.main()
"""
EDITED = 'raise SystemExit("this is not what was submitted")\n'


def git(repo: Path, *words: str) -> str:
    identity = ("-c", "user.name=Me", "-c", "user.email=me@example.org")
    done = subprocess.run(
        ["git", "-C", str(repo), *identity, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    repo = tmp_path / "repo"
    (repo / "parts").mkdir(parents=True)
    (repo / "train.py").write_text(TRAIN)
    shutil.copy(PROGRAM, repo / "parts/loop.py")
    (repo / "settings.json").write_text(f'["--steps", "{STEPS}", "--pause", "0.5"]')
    git(repo, "init", "-q")
    git(repo, "add", ".")
    git(repo, "commit", "-q", "-m", "first")
    return repo


@pytest.fixture
def run(
    cluster: DevCluster, tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LiveRun]:
    monkeypatch.chdir(repo)
    words = ("trainer.command=[train.py]", "daemon.requeue_delay_s=2", "daemon.backoff_s=0.2")
    live = LiveRun(cluster, tmp_path / "run", *words, "slurm.time_limit_min=20", config=str(CONFIG))
    yield live
    live.cancel()


@pytest.mark.scenario("L17")
def test_a_preempted_loop_resumes_at_its_steps_end_and_an_edit_in_between_changes_nothing(
    run: LiveRun, repo: Path, tmp_path: Path
) -> None:
    run.submit()
    run.wait(lambda: run.status().get("state") == "running" and run.status()["step"] >= 5)
    preempt(run.cluster, int(run.job_id), hold_s=1)
    assert run.wait_event("cause")["cause"] == "preemption", run.story()
    saved = run.wait_event("saved", emergency=True)
    run.wait_event("verified", name=saved["name"])
    run.wait_event("ended", exit_code=25)
    for name in ("train.py", "parts/loop.py", "settings.json"):
        (repo / name).write_text(EDITED)
    run.wait_event("restart", number=1, attempt=2, resume=saved["name"])
    assert run.facts().restarts == 1
    manifest = read_manifest(run.paths.checkpoints / saved["name"])
    assert (manifest.guest, manifest.phase, manifest.world_size) == ("loop", "step_end", 2)
    assert 5 <= manifest.step < STEPS
    run.wait_end()
    assert run.status()["step"] == STEPS
    same, said = same_weights(by_hand(tmp_path / "straight"), run.paths.root)
    assert same, said
    [told] = [event["text"] for event in run.events("notice") if event["topic"] == "code"]
    assert told.startswith(
        f"copied into the run from {repo}, commit {git(repo, 'rev-parse', 'HEAD')[:12]}, 3 files"
    )
    assert run.events("warning") == []


@pytest.mark.long  # the check itself: tests/daemon/test_code.py
@pytest.mark.scenario("L17")
def test_a_copy_that_was_changed_ends_the_run_before_its_ranks_start(run: LiveRun) -> None:
    run.submit()
    run.wait(lambda: run.status().get("state") == "running" and run.status()["step"] >= 3)
    preempt(run.cluster, int(run.job_id), hold_s=1)
    run.wait_event("ended", exit_code=25)
    [copy] = [place for place in run.paths.code.iterdir() if place.is_dir()]
    (copy / "parts/loop.py").chmod(0o600)
    (copy / "parts/loop.py").write_text(EDITED)
    ended = run.wait(lambda: [event for event in run.events("ended") if event["attempt"] == 2])[0]
    assert ended["exit"] == "DATA"
    assert "1 changed (parts/loop.py)" in ended["reason"]
    assert [event["attempt"] for event in run.events("restart")] == [1]
