"""Two attempts of one run at the same time, whole: leads, agents and ranks that train."""

import os
import select
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.harness import same_weights, wait_until_gone
from tests.journals import read_events
from tests.ledger_stats import ledger_stats
from tests.local_runs import finish, lead, prepared, undisturbed, until
from tests.processes import held, tell
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import read_owner
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.runs.run_record import read_status

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return undisturbed(tmp_path_factory)


@pytest.mark.long
@pytest.mark.scenario("C01")
def test_of_two_leads_at_once_one_trains_and_ranks_that_outlive_their_lead_harm_nothing_of_the_next(
    straight: RunPaths, tmp_path: Path
) -> None:
    paths = prepared(tmp_path / "run")
    rivals = [lead(paths), lead(paths)]
    loser = _first_to_end(rivals)
    said, _ = loser.communicate()
    assert loser.returncode == ExitCode.FENCED, said
    assert "another job" in said
    (winner,) = [rival for rival in rivals if rival is not loser]
    until(winner, "first_rollout")

    # A node that Slurm takes for dead: its ranks live, and nobody above them says anything.
    old = psutil.Process(winner.pid).children(recursive=True)
    ranks = [process for process in old if "verl_slurm.trainer" in process.cmdline()]
    agents = [process for process in old if "verl_slurm_daemon" in process.cmdline()]
    below = [process for process in old if process not in agents]
    assert len(ranks) >= 2
    assert len(agents) == 2
    with held(old):
        winner.kill()
        winner.wait()
        assert winner.stdout is not None
        winner.stdout.close()  # its agents keep the other end open
        successor = lead(paths)
        until(successor, "] restart ")
        tell(below, signal.SIGCONT)  # their agents stay as they are, and kill nobody
        assert finish(successor) == 0
        for rank in ranks:
            _wait_for([rank.pid])  # they come to an end of their own
    # the agents go on now, see that their lead is gone, and leave
    wait_until_gone(str(paths.root))

    owner = read_owner(paths)
    assert owner is not None
    assert owner.attempt == 2
    found = list_checkpoints(paths)
    assert {(info.kind, info.attempt) for info in found} == {("committed", 2)}
    assert all(verify(info.path).ok for info in found)
    assert ledger_stats(paths).problems == ()
    status = read_status(paths)
    assert (status["attempt"], status["state"]) == (2, "ended")
    assert {event["attempt"] for event in read_events(paths) if event["event"] == "ended"} == {2}
    assert "no longer owns the run" in paths.rank_log(1, 1, 0).read_text()
    same, said = same_weights(paths.root, straight.root)
    assert same, said


def _first_to_end(processes: "list[subprocess.Popen[str]]") -> "subprocess.Popen[str]":
    """The other one trains for seconds yet."""
    first = _wait_for([process.pid for process in processes])
    return next(process for process in processes if process.pid == first)


def _wait_for(pids: list[int]) -> int:
    """The first of them that ends. It may stay a zombie: its parent is stopped."""
    ends = {os.pidfd_open(pid): pid for pid in pids if psutil.pid_exists(pid)}
    if len(ends) < len(pids):
        return next(pid for pid in pids if pid not in ends.values())
    try:
        ready, _, _ = select.select(list(ends), [], [], 300)
        assert ready, f"none of {pids} ends"
        return ends[ready[0]]
    finally:
        for end in ends:
            os.close(end)
