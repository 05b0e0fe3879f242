"""A run on fewer nodes than it may have: when it is requeued onto more of them, without a cluster."""

import asyncio
from pathlib import Path

import pytest
from verl_slurm_daemon.allocation.contract import StepPlacement
from verl_slurm_daemon.decide import actions as act, inputs
from verl_slurm_daemon.decide.lead_model import Limits, Model, State
from verl_slurm_daemon.decide.policy import decide
from verl_slurm_daemon.lead import standby_agents
from verl_slurm_daemon.lead.agents_step import Step
from verl_slurm_daemon.lead.standby_agents import watch_growth, worth

from tests.builders import run_config
from tests.fakes.allocation import ScriptedAllocation, first_attempt
from tests.journals import make_event
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.history import History
from verl_slurm.wire.messages import AgentReady, Progress


@pytest.mark.parametrize(
    ("nodes", "more", "left_s", "gains"),
    [
        (1, 2, 481.0, True),
        (1, 2, 479.0, False),
        (2, 2, 1e6, False),
        (3, 4, 961.0, True),
        (3, 4, 959.0, False),
    ],
)
def test_a_requeue_has_to_gain_twice_what_it_costs(nodes: int, more: int, left_s: float, gains: bool) -> None:
    assert worth(nodes, more, left_s, cost_s=120.0) is gains


def test_growths_that_brought_no_node_are_counted_until_one_does() -> None:
    def chosen(*train: str):  # type: ignore[no-untyped-def]
        return make_event("nodes_chosen", train=list(train), spare=[])

    asked = make_event("cause", cause="growth", evidence="")
    assert History([chosen("n1")]).fruitless_growths == 0
    assert History([chosen("n1"), asked, chosen("n2"), asked, chosen("n1")]).fruitless_growths == 2
    assert History([chosen("n1"), asked, chosen("n1"), asked, chosen("n1", "n2")]).fruitless_growths == 0
    assert History([chosen("n1", "n2"), chosen("n1")]).fruitless_growths == 0, "a node was lost: no growth"


class Link:
    def send(self, message: object) -> None:
        pass


def watched(root: Path, monkeypatch: pytest.MonkeyPatch, idle: int, looks: int = 3) -> list[inputs.Input]:
    """What a look at idle nodes leads to: one of two nodes trains, and a step takes 100 s, of 40."""
    paths, said, now, steps = RunPaths(root), list[inputs.Input](), 1000.0, 4
    private_dir(paths.root)
    allocation = ScriptedAllocation()
    allocation.idle = idle

    async def pause(seconds: float) -> None:
        nonlocal now, steps, looks
        now, steps, looks = now + 100.0, steps + 1, looks - 1
        paths.status.write_text(f'{{"step": {steps}}}')
        if looks < 0:
            step.processes = []  # it is over: the watch ends with it

    async def story() -> None:
        nonlocal step
        step = Step(1, 1, StepPlacement(("n1",)))
        step.processes = await allocation.start_step([])
        step.join(Link(), AgentReady(node="n1", node_id=0, address="", free_port=1))  # type: ignore[arg-type]
        step.training.set()
        running = step.processes[0]
        config = run_config(nodes=2, dp_size=2, min_nodes=1, steps=40)
        monkeypatch.setattr(standby_agents.asyncio, "sleep", pause)
        try:
            attempt = first_attempt(paths, config, allocation, said.append)
            await watch_growth(attempt, step, lambda: now)
        finally:
            running.kill()
            await running.wait()

    step = Step(0, 1)
    paths.status.write_text('{"step": 4}')
    asyncio.run(story())
    return said


def test_idle_nodes_make_the_run_grow_and_too_few_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (asked,) = watched(tmp_path / "one", monkeypatch, idle=1)
    assert isinstance(asked, inputs.CauseKnown)
    assert (asked.kind, asked.seconds_left) == ("growth", None)
    assert asked.evidence == "1 more nodes are idle: from 1 to 2, with 3500 s to go on 1"
    assert watched(tmp_path / "none", monkeypatch, idle=0) == []


def test_growing_saves_without_a_deadline_and_only_what_trains() -> None:
    model = decide(Model(Limits(1, 1.0, 3)), inputs.Ready(1)).model
    asked = inputs.CauseKnown("growth", "1 more nodes are idle", None)
    assert decide(model, asked).actions == (), "nothing trains yet"
    progress = Progress(rank=0, step=3, phase="generate", index=1, safe_points=1, new_rollouts=16)
    model = decide(model, inputs.RankSaid(progress)).model
    after = decide(model, asked)
    assert act.SaveRequest(request_id=1, stop=False, seconds_left=None) in after.actions
    assert after.model.state is State.RUNNING
