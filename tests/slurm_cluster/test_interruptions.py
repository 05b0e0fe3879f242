"""The table of causes on a real Slurm: what was done, read back from Slurm, and weights equal bit for bit after it."""

import signal

import psutil
import pytest

from tests.harness import ONE_RANK, LiveRun, ends_like
from tests.lanes import with_variants
from tests.ledger_stats import ledger_stats
from tests.processes import held, tell
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import fail_node, preempt, restore_node

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


@pytest.mark.scenario("L01")
@pytest.mark.parametrize("phase", with_variants("generate", "update"))
def test_a_preemption_in_mid_phase_is_saved_requeued_and_resumed(
    run: LiveRun, twin: LiveRun, cluster: DevCluster, phase: str
) -> None:
    run.submit()
    for restarts in range(
        1, 4
    ):  # a phase lasts a second, and may be over before the ranks stand still: once more
        run.wait_phase(phase)
        seen = len(run.events())
        with held(run.ranks()):
            preempt(cluster, int(run.job_id), hold_s=1)
            cause = run.wait_event("cause", after=seen)
        assert cause["cause"] == "preemption", run.story()
        saved = run.wait_event("saved", after=seen, emergency=True)
        run.wait_event("verified", after=seen, name=saved["name"])
        run.wait_event("ended", after=seen, exit_code=25)
        run.wait_event("restart", after=seen, resume=saved["name"])
        assert run.facts().restarts == restarts
        if read_manifest(run.paths.checkpoints / saved["name"]).phase == phase:
            break
    else:
        raise AssertionError(f"never struck in mid-{phase}:\n{run.story()}")
    ends_like(run, twin)


@pytest.mark.long
@pytest.mark.scenario("L03")
@pytest.mark.usefixtures("ranks_without_torch")
def test_the_time_limit_is_warned_of_saved_requeued_and_resumed(run: LiveRun) -> None:
    # Slurm looks for limits every 30 s and warns of all that end before its next look: of a limit of one minute at
    # once, before there is anything to save. So the limit comes nearer only when the run trains.
    run.argv += [*ONE_RANK, "slurm.signal_lead_s=35", "train.steps=30"]
    run.submit()
    run.wait_phase("generate")
    run.slurm("scontrol", "update", f"jobid={run.job_id}", "EndTime=now+66seconds")
    cause = run.wait_event("cause")
    assert cause["cause"] == "time_limit", run.story()
    saved = run.wait_event("saved", emergency=True)
    run.wait_event("verified", name=saved["name"])
    run.wait_event("ended", exit_code=25)
    assert run.facts().restarts == 1, run.story()
    run.slurm("scontrol", "update", f"jobid={run.job_id}", "TimeLimit=20")
    seen = len(run.events())
    run.wait_event("restart", resume=saved["name"])
    # How a resumed run ends is for other tests to show; this one has as many steps as the limit is long.
    run.wait_event("training", after=seen)
    assert ledger_stats(run.paths).duplicates == ()


@pytest.mark.usefixtures("ranks_without_torch")
def test_a_cancelled_job_is_saved_and_stays_cancelled(run: LiveRun) -> None:
    run.argv += ONE_RANK
    run.submit()
    run.wait_phase("generate")
    run.slurm("scancel", run.job_id)
    ended = run.wait_event("ended", exit_code=23)
    assert ended["exit"] == "CANCELLED"
    assert run.events("cause")[-1]["cause"] == "cancel"
    assert not run.events("requeue")
    assert run.events("verified"), "there was time for a save"
    run.slurm("scontrol", "ping")
    facts = run.facts()
    assert facts.state in {"COMPLETING", "CANCELLED"}
    assert facts.restarts == 0


@pytest.mark.long
@pytest.mark.soak  # the cause alone: test_moments.py
def test_an_operators_requeue_saves_and_is_not_requeued_twice(run: LiveRun, twin: LiveRun) -> None:
    run.submit()
    run.wait_phase("update")
    run.slurm("scontrol", "requeue", run.job_id)
    cause = run.wait_event("cause")
    assert cause["cause"] == "requeued", run.story()
    run.wait_event("ended", exit_code=25)
    assert not run.events("requeue")
    assert run.facts().restarts == 1
    ends_like(run, twin)


@pytest.mark.long
@pytest.mark.variant  # test_operators.py wishes for one, too
def test_a_requeue_that_is_wished_for_is_verified_first_and_the_step_survives_it(
    run: LiveRun, twin: LiveRun
) -> None:
    run.submit()
    run.wait_phase("generate", step=1)
    assert run.cli("requeue", str(run.paths.root)).returncode == 0
    cause = run.wait_event("cause")
    assert cause["cause"] == "operator_requeue", run.story()
    assert cause["seconds_left"] is None
    assert run.wait_event("requeue")["accepted"]
    saved = run.wait_event("ended", exit_code=25)["checkpoint"]
    assert len([event for event in run.events("saved") if event["emergency"]]) == 2, "first without a stop"
    run.wait_event("verified", name=saved)
    run.wait_event("restart", resume=saved)
    assert run.status()["step"] >= 1
    ends_like(run, twin)
    status = run.status()
    assert (status["interruptions"], status["last_interruption"]["cause"]) == (1, "operator_requeue")
    assert status["last_interruption"]["resumed"] == saved


@pytest.mark.soak  # test_observability.py has an alert do it
@pytest.mark.long
def test_an_operators_usr1_saves_and_training_goes_on(run: LiveRun, twin: LiveRun) -> None:
    run.submit()
    run.wait_phase("generate")
    run.slurm("scancel", "-b", "-s", "USR1", run.job_id)
    assert run.wait_event("cause")["cause"] == "operator"
    saved = run.wait_event("saved", emergency=True)
    run.wait_event("verified", name=saved["name"])
    ends_like(run, twin)
    assert len(run.events("restart")) == 1
    assert run.facts().restarts == 0


@pytest.mark.long
@pytest.mark.scenario("P02")
@pytest.mark.variant
def test_everything_killed_on_the_leads_node_is_requeued_by_the_other_agent(
    run: LiveRun, twin: LiveRun
) -> None:
    run.submit()
    run.wait_phase("generate")
    batch_host = run.facts().batch_host
    assert batch_host is not None
    run.kill(run.processes(batch_host))
    orphaned = run.wait_event("orphaned")
    assert orphaned["accepted"], run.story()
    ends_like(run, twin)
    assert run.facts().restarts == 1


@pytest.mark.long
@pytest.mark.scenario("P02")
@pytest.mark.soak  # much like the test before it
def test_a_lead_that_dies_after_its_ranks_is_requeued_by_the_other_agent(run: LiveRun, twin: LiveRun) -> None:
    """A process that waits for a busy disk dies late: long after the ranks of both nodes have ended."""
    run.submit()
    run.wait_phase("generate")
    batch_host = run.facts().batch_host
    assert batch_host is not None
    (other,) = run.other_nodes()
    there = run.processes(batch_host)
    leads = [process for process in there if "lead" in process.cmdline()]
    tell(leads, signal.SIGSTOP)
    # The other node's agent has no rank left and has said so; a lead that does not run cannot have heard it.
    launchers = [p for p in run.processes(other) if "verl_slurm_daemon.agent.ranks" in p.cmdline()]
    run.kill([process for process in there if process not in leads])
    _, alive = psutil.wait_procs(launchers, timeout=60)
    assert not alive, run.story()
    # One that takes sending for being heard leaves now, and then nobody is left to ask.
    psutil.wait_procs([p for p in run.processes(other) if "agent" in p.cmdline()], timeout=2)
    run.kill(leads)
    orphaned = run.wait_event("orphaned", timeout_s=60)
    assert orphaned["accepted"], run.story()
    ends_like(run, twin)
    assert run.facts().restarts == 1


@pytest.mark.long
@pytest.mark.variant
def test_an_srun_that_is_killed_before_the_lead_takes_no_agent_with_it(run: LiveRun, twin: LiveRun) -> None:
    """Its shepherd would have Slurm KILL the agents of all nodes, and nobody would be left to ask."""
    run.submit()
    run.wait_phase("generate")
    batch_host = run.facts().batch_host
    assert batch_host is not None
    agents = [p for p in run.processes(run.other_nodes()[0]) if "agent" in p.cmdline()]
    there = run.processes(batch_host)
    leads = [process for process in there if "lead" in process.cmdline()]
    tell(leads, signal.SIGSTOP)  # it cannot start anew
    sruns = [process for process in there if process.name() == "srun"]
    run.kill([process for process in sruns if process.parent() not in sruns])
    gone, _ = psutil.wait_procs(agents, timeout=5)
    run.kill([process for process in there if process not in sruns])
    assert not gone, run.story()
    orphaned = run.wait_event("orphaned", timeout_s=60)
    assert orphaned["accepted"], run.story()
    ends_like(run, twin)


@pytest.mark.scenario("L09", "L10")
@pytest.mark.parametrize("which", ["the lead's", pytest.param("another", marks=pytest.mark.soak)])
def test_a_dead_node_is_left_to_slurm_and_the_run_goes_on_elsewhere(
    run: LiveRun, twin: LiveRun, cluster: DevCluster, which: str, request: pytest.FixtureRequest
) -> None:
    if which == "another":  # that the run ends like its twin: the other one shows it
        request.getfixturevalue("ranks_without_torch")
        run.argv.append("train.steps=1000")  # Slurm takes its time to miss a node
    run.submit()
    run.wait_phase("generate")
    lost = run.facts().batch_host if which == "the lead's" else run.other_nodes()[0]
    assert lost is not None
    fail_node(cluster, lost)
    try:
        run.wait_event("started", requeues=1)
        assert lost not in run.events("started")[-1]["nodes"].split(",")
        if which == "another":
            run.wait_event("training", attempt=2)
        else:
            ends_like(run, twin)
    finally:
        restore_node(cluster, lost)


@pytest.mark.long
@pytest.mark.variant
# The other kinds of damage are found by the same lines, which tests/checkpoint proves without a cluster.
@pytest.mark.parametrize(
    "damage", ["flip", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("truncate", "remove"))]
)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_is_used(
    run: LiveRun, twin: LiveRun, damage: str
) -> None:
    run.submit()
    run.wait_phase("generate", step=1)
    run.slurm("scancel", "-b", "-s", "USR1", run.job_id)
    run.wait_event("saved", emergency=True)
    run.wait_phase("update", step=2)
    run.slurm("scancel", run.job_id)
    run.wait_event("ended", exit_code=23)
    before, newest = (event["name"] for event in run.events("verified")[-2:])
    victim = next(
        path for path in (run.paths.checkpoints / newest / "actor").iterdir() if path.stat().st_size > 99
    )
    if damage == "remove":
        victim.unlink()
    else:
        data = bytearray(victim.read_bytes())
        data = (
            data[: len(data) // 2] if damage == "truncate" else data[:50] + bytes([data[50] ^ 1]) + data[51:]
        )
        victim.write_bytes(data)
    run.submit()
    resumed = run.wait_event("restart", after=len(run.events()) - 1)
    assert resumed["resume"] == before, run.story()
    said = " ".join(event["reason"] for event in run.events("resume"))
    assert f"actor/{victim.name}" in said
    assert newest in said
    ends_like(run, twin)
