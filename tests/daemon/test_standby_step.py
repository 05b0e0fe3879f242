"""The lead's step that stands by: whom it is for, and when it is dropped. Without agents."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from verl_slurm_daemon.allocation.launcher import may_stand_by
from verl_slurm_daemon.lead import agents_step as step_module
from verl_slurm_daemon.lead.agents_step import Step
from verl_slurm_daemon.lead.standby_agents import Standby

from tests.builders import run_config, write_config
from tests.fakes.allocation import ScriptedAllocation, first_attempt
from tests.journals import read_events
from verl_slurm.base.errors import DataError
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import GuestConfig
from verl_slurm.wire.messages import AgentReady


class Stage:
    """A step that trains, and what stands by for the one after it."""

    def __init__(self, root: Path, **values: Any) -> None:
        self.paths = RunPaths(root)
        config = write_config(self.paths, **({"standby_after_s": 0.0, "nodes": 1, "dp_size": 1} | values))
        self.allocation = ScriptedAllocation()
        self.standby = Standby(first_attempt(self.paths, config, self.allocation))
        self.training = Step(1, 1)

    async def started(self) -> None:
        """The agents of the next restart are there."""
        self.training.processes = await self.allocation.start_step([])
        self.allocation.step_started.clear()
        self.training.training.set()
        starting = asyncio.create_task(self.standby.start_after(self.training))
        await self.allocation.step_started.wait()
        ready = AgentReady(node="n1", node_id=0, address="127.0.0.1", free_port=1)
        self.standby.joined_by(2).join(Link(), ready)  # type: ignore[arg-type]
        await starting


class Link:
    def send(self, message: object) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # What stands for agents here hears nothing: it is ended by TERM.
    monkeypatch.setattr(step_module, "GOODBYE_S", 0.05)


def played(root: Path, story: Callable[[Stage], Awaitable[None]], **values: Any) -> list[str]:
    """What the journal says of it."""

    async def play() -> None:
        stage = Stage(root, **values)
        try:
            await story(stage)
        finally:
            await stage.standby.drop()
            await stage.training.end()

    asyncio.run(play())
    return [event["text"] for event in read_events(RunPaths(root)) if event["event"] == "notice"]


def test_the_next_restart_takes_it_and_no_other_does(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.started()
        step = await stage.standby.take(2, 1)
        assert step is not None
        assert (step.restart, step.stands) == (2, True)
        assert stage.allocation.kept is step.processes, "its agents outlive this node"
        assert await stage.standby.take(2, 1) is None
        await step.end()

    assert played(tmp_path, story) == []


def test_one_for_another_restart_is_ended(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.started()
        step = stage.standby.joined_by(2)
        assert await stage.standby.take(3, 1) is None
        assert step.is_over

    assert played(tmp_path, story) == []


def test_an_edited_configuration_is_started_with_anew(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.started()
        write_config(stage.paths, standby_after_s=0.0, nodes=1, dp_size=1, env={"NEW": "1"})
        assert await stage.standby.take(2, 1) is None

    assert played(tmp_path, story) == ["the run's configuration or code was changed"]


def test_a_record_of_the_code_that_cannot_be_read_keeps_agents_from_standing_by_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(paths: RunPaths) -> None:
        raise DataError("the record of the code is damaged")

    async def story(stage: Stage) -> None:
        monkeypatch.setattr("verl_slurm_daemon.lead.standby_agents.read_record", damaged)
        stage.training.processes = await stage.allocation.start_step([])
        stage.training.training.set()
        await stage.standby.start_after(stage.training)
        assert stage.allocation.steps == 1, "that of the ranks"

    assert played(tmp_path, story) == []


def test_agents_of_the_other_nodes_go_on_standing_by_without_one_that_is_gone(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.allocation.nodes = ("n1", "n2")
        starting = asyncio.create_task(stage.standby.start_after(stage.training))
        stage.training.processes = await stage.allocation.start_step([])
        stage.allocation.step_started.clear()
        stage.training.training.set()
        await stage.allocation.step_started.wait()
        step = stage.standby.joined_by(2)
        for number, node in enumerate(stage.allocation.nodes):
            ready = AgentReady(node=node, node_id=number, address="127.0.0.1", free_port=1)
            step.join(Link(), ready)  # type: ignore[arg-type]
        await starting
        await stage.standby.lose("n1", "node n1: its agent is gone")
        assert await stage.standby.take(2, 1, ["n1"]) is step
        assert [one.node for one in step.settle()] == ["n2"]
        await step.end()

    assert played(tmp_path, story) == ["node n1: its agent is gone; those of the other nodes stand by"]


def test_an_agent_that_nobody_waits_for_any_more_is_told_to_go(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        assert stage.standby.joined_by(2).leaving.is_set()
        await stage.started()
        assert not stage.standby.joined_by(2).leaving.is_set()
        assert stage.standby.joined_by(9).leaving.is_set()

    assert played(tmp_path, story) == []


def test_before_training_and_behind_its_end_nothing_is_started(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        starting = asyncio.create_task(stage.standby.start_after(stage.training))
        await asyncio.sleep(0.05)
        assert stage.allocation.steps == 0
        stage.training.training.set()  # it has no process any more
        await starting
        assert stage.allocation.steps == 0

    assert played(tmp_path, story) == []


def test_who_may_stand_by() -> None:
    assert may_stand_by(run_config())
    assert not may_stand_by(run_config(standby_after_s=None))
    ray = GuestConfig(backend="ray", command=("driver.py",))
    assert not may_stand_by(run_config(trainer=ray)), "Ray starts its workers itself"
