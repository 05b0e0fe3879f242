"""Spare nodes without a cluster: which nodes the ranks get, and what the lead decides when one is lost."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from verl_slurm_daemon.allocation.contract import StepPlacement, TooFewNodes
from verl_slurm_daemon.allocation.launcher import choose_places, step_argv
from verl_slurm_daemon.decide import actions as act, inputs
from verl_slurm_daemon.decide.lead_model import Limits, Model, State
from verl_slurm_daemon.decide.policy import decide
from verl_slurm_daemon.journal import log_line
from verl_slurm_daemon.lead import agents_step as step_module
from verl_slurm_daemon.lead.agents_step import Step

from tests.builders import run_config
from tests.journals import make_event
from verl_slurm.base.errors import NOT_SET_UP, ConfigError
from verl_slurm.config.elastic import allowed_nodes, on_ranks
from verl_slurm.config.load import parse_config
from verl_slurm.journal.events import Crash
from verl_slurm.journal.history import History
from verl_slurm.slurm.batch import sbatch_options, sbatch_parameters
from verl_slurm.wire.messages import AgentReady, Progress, RankRefused, Shutdown

NAMES = ("n1", "n2", "n3", "n4")


# ---- which nodes


@pytest.mark.parametrize(
    ("avoid", "with_spares", "places"),
    [
        ((), False, StepPlacement(("n1", "n2"), ("n3", "n4"))),
        (("n2",), False, StepPlacement(("n1", "n3"), ("n4",))),
        (("n2", "n3"), False, StepPlacement(("n1", "n4"), ())),
        (("n2", "n3", "n4"), False, StepPlacement(("n1", "n2"), ())),
        ((), True, StepPlacement(("n1", "n2", "n3", "n4"), ())),
        (("n2",), True, StepPlacement(("n1", "n3", "n4"), ())),
        (("n2", "n3", "n4"), True, StepPlacement(("n1", "n2"), ())),
    ],
)
def test_ranks_get_the_first_nodes_that_are_fit_and_lost_ones_last_of_all(
    avoid: tuple[str, ...], with_spares: bool, places: StepPlacement
) -> None:
    assert choose_places(NAMES, avoid, (2,), with_spares=with_spares) == places


@pytest.mark.parametrize(
    ("names", "avoid", "places"),
    [
        (NAMES, (), StepPlacement(("n1", "n2", "n3", "n4"), ())),
        (NAMES, ("n2",), StepPlacement(("n1", "n3"), ("n4",))),
        (("n1", "n3"), (), StepPlacement(("n1", "n3"), ())),
        (NAMES, ("n2", "n3", "n4"), StepPlacement(("n1", "n2"), ())),
    ],
)
def test_ranks_get_as_many_nodes_as_a_step_can_be_divided_among(
    names: tuple[str, ...], avoid: tuple[str, ...], places: StepPlacement
) -> None:
    assert choose_places(names, avoid, (4, 2), with_spares=False) == places


def test_a_run_on_fewer_nodes_has_the_same_step() -> None:
    config = run_config(
        nodes=4, min_nodes=1, dp_size=8, sizes=(24, 12, 4), sampled_at_once=8, samples_per_prompt=1
    )
    # Three nodes have six ranks: 24 x 8 responses are 32 for each; two have four: 48. One has two: 96.
    assert allowed_nodes(config) == (4, 3, 2, 1)
    two = on_ranks(config, 4)
    assert (two.distributed.nodes, two.distributed.dp_size, two.distributed.ranks_per_node) == (2, 4, 2)
    assert (two.train.batch_size_per_device, two.train.mini_batch_size_per_device) == (48, 24)
    assert on_ranks(config, 8) == config
    assert on_ranks(run_config(nodes=4, dp_size=8), 4).distributed.dp_size == 8, "it may lose no nodes"


def test_the_job_asks_for_a_range_of_nodes_spare_ones_included_and_outlives_a_loss() -> None:
    asked = sbatch_options(run_config(nodes=4, min_nodes=2, spare_nodes=1))
    assert {"--nodes=2-5", "--no-kill"} <= set(asked)
    assert "--nodes=4" in sbatch_options(run_config(nodes=4))
    plain, spare = run_config(nodes=2), run_config(nodes=2, spare_nodes=2)
    assert {"--nodes=2-4", "--no-kill"} <= set(sbatch_options(spare)), "no start waits for spare nodes"
    assert "no-kill" not in sbatch_parameters(plain)["additional_parameters"]  # type: ignore[operator]
    argv = step_argv("srun", spare, ["agent"], names=["n1", "n3"])
    assert {"--nodes=2", "--ntasks=2", "--nodelist=n1,n3", "--no-kill"} <= set(argv)
    assert "--no-kill" not in step_argv("srun", plain, ["agent"])


def test_a_job_can_do_without_its_spare_nodes_and_says_so_when_it_has_lost_too_many() -> None:
    with pytest.raises(TooFewNodes, match="1 nodes left, n1; its ranks need 2"):
        choose_places(("n1",), (), (2,), with_spares=False)
    assert Limits.of(run_config(nodes=4, min_nodes=2, spare_nodes=1)).spare_nodes == 3
    assert Limits.of(run_config(nodes=2)).spare_nodes == 0


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ("distributed: {nodes: 1}\n", "beside a single node"),
        ("distributed: {nodes: 2, dp_size: 2}\nservices: {judge: {command: [j], nodes: 1}}\n", "judge"),
    ],
)
def test_spare_nodes_that_could_not_help_are_refused(settings: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"slurm: {{spare_nodes: 1}}\n{settings}".encode(), "run.yaml")
    assert found in caught.value.found
    assert "slurm.spare_nodes" in str(caught.value.where)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("distributed: {nodes: 2, dp_size: 2, min_nodes: 3}\n", "none"),
        ("distributed: {nodes: 4, dp_size: 4, min_nodes: 3}\n", ": 4"),
    ],
)
def test_fewer_nodes_that_no_step_can_be_divided_among_are_refused(settings: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(settings.encode(), "run.yaml")
    assert "distributed.min_nodes" in str(caught.value.where)
    assert expected in caught.value.expected


# ---- what the lead decides


class Story:
    """A lead with ranks that train, on a job with spare nodes."""

    def __init__(self, spare_nodes: int = 2) -> None:
        limits = Limits(1, 1.0, 3, node_budget=0, spare_nodes=spare_nodes)
        self.model = Model(limits)
        self.then(inputs.Ready(2))
        self.trains()

    def trains(self) -> None:
        said = Progress(rank=0, step=3, phase="generate", index=1, safe_points=1, new_rollouts=16)
        self.then(inputs.RankSaid(said))

    def then(self, event: inputs.Input) -> list[act.Action]:
        decision = decide(self.model, event)
        self.model = decision.model
        return list(decision.actions)

    def crash(self) -> tuple[Crash, list[act.Action]]:
        """The end of the step."""
        note, *more = self.then(inputs.RanksEnded(1))
        assert isinstance(note, act.Note)
        assert isinstance(note.event, Crash)
        return note.event, more


LOST = inputs.NodeFailed("n2", "the agent is gone without a word", lost=True)


def test_lost_nodes_are_replaced_at_once_and_without_a_requeue() -> None:
    story = Story()
    assert story.then(LOST) == [act.TakeDown()]
    crash, more = story.crash()
    assert (crash.kind, crash.node, crash.replaced) == ("node", "n2", True)
    assert more == [act.Pause(0.0)]
    assert story.then(inputs.BackoffOver(0)) == [act.StartRanks(2, ("n2",))]
    story = Story()
    story.then(LOST)
    story.then(inputs.NodeFailed("n1", "the agent is gone without a word", lost=True))
    story.crash()
    assert story.then(inputs.BackoffOver(0)) == [act.StartRanks(2, ("n2", "n1"))]


def test_the_loss_of_a_node_explains_what_its_peers_said_before() -> None:
    story = Story()
    raised = RankRefused(rank=0, exit_code=22, reason="connection reset", place="train.py:3", worked=True)
    story.then(inputs.RankSaid(raised))
    story.then(inputs.NodeFailed("n1", "rank 0 ended with 1"))
    assert story.then(LOST) == [], "it is taken down already"
    crash, _ = story.crash()
    assert (crash.kind, crash.node, crash.replaced) == ("node", "n2", True)


def test_without_a_spare_node_left_the_loss_of_one_is_what_it_was() -> None:
    story = Story(spare_nodes=1)
    story.then(LOST)
    story.crash()
    story.then(inputs.BackoffOver(0))
    story.trains()
    story.then(inputs.NodeFailed("n3", "the agent is gone without a word", lost=True))
    crash, more = story.crash()
    assert not crash.replaced
    assert act.AskRequeue(()) in more


def test_a_node_that_fails_its_check_is_replaced_and_a_job_with_too_few_is_requeued() -> None:
    story = Story()
    story.then(LOST)
    story.crash()
    story.then(inputs.BackoffOver(0))
    assert story.then(inputs.LeaveNode("n3", "bad_node", "clock: 90 s ahead")) == [act.TakeDown()]
    crash, _ = story.crash()
    assert (crash.node, crash.replaced) == ("n3", True)
    assert story.then(inputs.BackoffOver(0)) == [act.StartRanks(3, ("n2", "n3"))]
    story = Story()
    story.then(LOST)
    story.crash()
    story.then(inputs.BackoffOver(0))
    # As `effects` says it: no step was started.
    asked = story.then(inputs.CauseKnown("failed", "the job has 1 nodes left", None))
    assert [type(action) for action in asked] == [act.Note, act.AskRequeue, act.TakeDown]
    story.then(inputs.RanksEnded(1))
    assert story.model.state is State.LEAVING


def test_a_node_that_was_replaced_is_no_fault_of_the_program() -> None:
    restart = make_event("restart", number=1, progress="a")
    lost = make_event("crash", kind="node", node="n2", replaced=True)
    assert History([restart, lost, restart, lost, restart, lost]).stuck == 0
    assert History([restart, lost, restart, make_event("crash")]).stuck == 1


# ---- the step of the ranks, of more agents than they need


class Link:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def send(self, message: object) -> None:
        self.heard.append(message)

    def close(self) -> None:
        pass


def joined(step: Step, *names: str) -> dict[str, Link]:
    links = {name: Link() for name in names}
    for name, link in links.items():
        ready = AgentReady(node=name, node_id=NAMES.index(name), address="127.0.0.1", free_port=1)
        step.join(link, ready)  # type: ignore[arg-type]
    return links


def test_ranks_take_up_a_step_without_its_lost_node_and_the_others_are_spare() -> None:
    async def story() -> None:
        step = Step(2, 2, StepPlacement(NAMES))
        links = joined(step, *NAMES)
        assert step.take_up(["n2"], 2)
        assert [ready.node for ready in step.settle()] == ["n1", "n3"]
        assert step.train_nodes == ["n1", "n3"]
        assert step.places.idle == ("n4",)
        assert {name: link.heard for name, link in links.items() if link.heard} == {"n4": [Shutdown()]}

    asyncio.run(story())


def test_agents_that_come_when_others_have_the_ranks_are_let_go() -> None:
    async def story() -> None:
        step = Step(2, 2, StepPlacement(NAMES))
        joined(step, "n1", "n3")
        assert not step.all_ready.is_set()
        assert step.take_up(["n2"], 2)
        assert step.all_ready.is_set()
        step.settle()
        assert joined(step, "n4")["n4"].heard == [Shutdown()]
        assert set(step.links) == {"n1", "n3"}

    asyncio.run(story())


def test_a_step_with_too_few_agents_is_not_taken_up() -> None:
    async def story() -> None:
        step = Step(2, 2, StepPlacement(NAMES))
        joined(step, "n1", "n2")
        assert not step.take_up(["n2"], 2)

    asyncio.run(story())


@pytest.mark.parametrize("chosen", [True, False])
def test_srun_is_not_waited_for_when_only_lost_nodes_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: bool
) -> None:
    """What stands for srun here never ends by itself."""
    monkeypatch.setattr(step_module, "_SRUN_ENDS_S", 0.0)

    async def story() -> None:
        step = Step(1, 2, StepPlacement(("n1", "n2")) if chosen else None)
        step.processes = [await asyncio.create_subprocess_exec("sleep", "600")]
        for link in joined(step, "n1", "n2").values():
            step.part(link)  # type: ignore[arg-type]
        ended = asyncio.create_task(step.wait())
        if chosen:
            assert await ended == -9
            return
        await asyncio.wait([ended], timeout=0.2)
        assert not ended.done(), "Slurm ends such a job itself"
        step.processes[0].kill()
        await ended

    asyncio.run(story())


@pytest.mark.parametrize(
    ("words", "failed"),
    [
        ("", inputs.NodeFailed("n1", "the agent is gone without a word", lost=True)),
        (
            "srun: error: n1: task 0: Killed\n",
            inputs.NodeFailed("n1", "the agent is gone: n1: task 0: Killed", lost=True),
        ),
        (
            "slurmstepd: error: StepId=15.2 exceeded memory limit (790 > 734), being killed\nrank: error: own\n",
            inputs.NodeFailed(
                "n1",
                "its agent was killed for lack of memory: StepId=15.2 exceeded memory limit (790 > 734), being killed; "
                "give it more memory (slurm.mem_mb_per_node), or let the ranks need less",
            ),
        ),
    ],
)
def test_an_agent_that_is_gone_is_told_with_slurms_own_words(
    tmp_path: Path, words: str, failed: inputs.NodeFailed
) -> None:
    """slurmstepd kills what is above its memory, where no kernel does (`OverMemoryKill`): the node is well."""

    async def story() -> inputs.NodeFailed | inputs.CauseKnown:
        step = Step(1, 1, StepPlacement())
        joined(step, "n1")
        return await step.why_lost("n1", ())

    with log_of_the_job(tmp_path, words):
        assert asyncio.run(story()) == failed


@contextmanager
def log_of_the_job(place: Path, words: str) -> Iterator[None]:
    """Our stderr, in which Slurm has written `words` since the restart began."""
    log, kept = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), os.dup(2)
    os.dup2(log, 2)
    try:
        os.write(2, b"srun: error: of an earlier step\n" + log_line("1", "restart", {"number": 2}).encode())
        os.write(2, words.encode())
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(log)


LAUNCH = "Task launch for StepId=2.0 failed on node n2: Communication connection failure"


@pytest.mark.parametrize("srun", ["exit 1", "exec sleep 600"], ids=["srun has ended", "srun still waits"])
def test_a_slurmd_that_is_away_as_agents_start_is_the_environments_fault_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, srun: str
) -> None:
    """Slurm 22.05: srun ends the agents that run, and may wait half a minute for their nodes."""
    if srun != "exit 1":
        monkeypatch.setattr(step_module, "_STEP_ENDS_S", 0.1)

    async def story() -> inputs.NodeFailed | inputs.CauseKnown:
        step = Step(1, 2)
        step.processes = [await asyncio.create_subprocess_exec("sh", "-c", srun)]
        joined(step, "n1")
        try:
            return await step.why_lost("n1", ())
        finally:
            await step_module.end_step(step.processes, 0.1)
            await step.wait()

    others = "Application launch failed: Communication connection failure", "n1: task 0: Killed", "x", "y"
    with log_of_the_job(tmp_path, "".join(f"[Slurm] srun: error: {line}\n" for line in (LAUNCH, *others))):
        failed = asyncio.run(story())
    ended = "the step ended while " * (srun == "exit 1")
    detail = f"{ended}1 of 2 agents had not come: {LAUNCH}"
    assert failed == inputs.NodeFailed("n2", detail, lost=True, environment=True)


BUSY = "Unable to create step for job 2: Requested nodes are busy"
EXIT = "n2: task 1: Exited with exit code 1"


@pytest.mark.parametrize(
    ("lines", "came", "absent", "node", "environment"),
    [
        ([], [], [], "", True),
        ([BUSY], [], ["n1", "n2"], "", True),
        (["Job/step already completing or completed"], [], [], "", True),
        (["*** STEP 2.0 ON n1 CANCELLED AT 2026-11-29 DUE TO PROLOG FAILURE ***"], ["n1"], [], "", True),
        (["timed out"], ["n1"], ["n2", "n3"], "n2", True),
        ([LAUNCH, EXIT], ["n1"], ["n3", "n2"], "n2", True),
        ([EXIT], ["n1"], [], "n2", True),
        (["n1: task 0: Exited with exit code 1"], ["n1"], [], "", True),
        ([EXIT], [], [], "", False),
        (["n[1-2]: tasks 0-1: Exited with exit code 127"], [], [], "", False),
    ],
)
def test_agents_that_have_not_come_are_the_environments_fault_unless_all_ended_by_themselves(
    lines: list[str], came: list[str], absent: list[str], node: str, environment: bool
) -> None:
    failed = step_module.why_absent("no agent", lines, came, absent)
    assert (failed.node, failed.environment, failed.lost) == (node, environment, environment)
    assert (NOT_SET_UP in failed.detail) is not environment
    assert all(line in failed.detail for line in lines[:1])
