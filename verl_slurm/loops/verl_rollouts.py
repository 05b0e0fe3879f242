"""Keeps verl's finished responses in the run's ledger, through verl's own extension point; verl itself loads it.

`actor_rollout_ref.rollout.agent.agent_loop_manager_class` names `LedgerManager`. Its workers are verl's own with two
methods around: a session whose response is in the ledger is answered from there, and a response that was sampled is
durable before TransferQueue gets it, with its reward where verl scores while it samples. Validation is left alone.

The driver (`verl_ppo`) gives each prompt its position in the data's order, and saves the next one with a checkpoint.
verl's own names do not last: its `uid` is random, and `colocate_async` puts the number of the present step on prompts
of earlier ones.

A restart goes back to a checkpoint, so the weights of a recorded response may be computed anew. It is used all the
same: verl computes the log probabilities that it trains with itself, unless it is told to take the engine's.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import ray
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_slurm.base.paths import RunPaths
from verl_slurm.loops.verl_ppo_rollouts import Account, Recording
from verl_slurm.loops.verl_turns import SESSION, PromptSession, Turns, continuing, record_tools
from verl_slurm.runtime_state.rollout_records import NotRecordable, RolloutLedger, digest_of, session_seed
from verl_slurm.verl.positions import POSITION
from verl_slurm.wire.environment import ATTEMPT_VARIABLE, RUN_VARIABLE

# verl has made an actor of its worker, and Ray allows no subclass of an actor: this is the class that was given to it.
_Worker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__

_NAMED = ("raw_prompt", "agent_name", "tools_kwargs", "interaction_kwargs", "extra_info")
"""Fields of a prompt that decide about its responses, as far as verl's own loops read them."""


class LedgerWorker(_Worker):  # type: ignore[misc]
    """verl's worker, one of `agent.num_workers` Ray actors; see the module."""

    llm_client: Any

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._rollouts: RolloutLedger | None = None
        # A run of verl's alone has no ledger.
        if run := os.environ.get(RUN_VARIABLE):
            number = int(ray.get_runtime_context().get_actor_name().split("_")[3])
            paths, attempt = RunPaths(Path(run)), int(os.environ[ATTEMPT_VARIABLE])
            self._rollouts = RolloutLedger(paths, attempt, number)
            rollout = self.rollout_config
            self._turns = Turns(
                paths,
                attempt,
                number,
                # SGLang has another name for the seed, and refuses this one.
                seeded=rollout.full_determinism and rollout.name != "sglang",
                response_length=rollout.response_length,
                prompt_length=rollout.prompt_length,
            )
            self.llm_client = continuing(self.llm_client, self._turns)
            record_tools(self.tools, self._turns)

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, agent_name: str, **named: Any
    ) -> Any:
        SESSION.set(None)
        rollouts, place = self._rollouts, named.get(POSITION)
        if rollouts is not None and place is not None and not trajectory["validate"]:
            try:
                if self._turns.seeded:
                    # verl's own seed is one for all: a response that is sampled again would be another one.
                    seed = session_seed(self.rollout_config.seed, int(place), named["session_id"])
                    sampling_params = {**sampling_params, "seed": seed}
                asked = {name: named[name] for name in _NAMED if name in named}
                digest = digest_of(agent_name, sampling_params, asked)
            except NotRecordable as error:
                rollouts.not_recorded(error)
            else:
                stored = rollouts.find(int(place), named["session_id"], digest, _output)
                if stored is not None:
                    return await self._agent_loop_postprocess(stored, trajectory["validate"], **named)
                # Sessions are tasks of their own, so each has a context of its own.
                SESSION.set(PromptSession(int(place), named["session_id"], digest))
        return await super()._run_agent_loop(sampling_params, trajectory, agent_name=agent_name, **named)

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict[str, Any]) -> None:
        await super()._compute_score(outputs, kwargs)  # asks nobody if the output has a score
        session = SESSION.get()
        if session is not None and self._rollouts is not None:
            fields = [_fields(output) for output in outputs]
            await self._rollouts.record(session.position, session.number, fields, session.digest)

    def account(self) -> Account:
        """Returns what was answered, continued and recorded so far, and what is new to tell people."""
        if self._rollouts is None:
            return Account()
        news = [*self._rollouts.news(), *self._turns.records.news()]
        turns = self._turns
        return Account(
            self._rollouts.replayed, turns.continued, self._rollouts.recorded, news, {turns.mode} - {""}
        )

    def wait_for_engines(self) -> None:
        """Waits from here on where an engine has died, since the driver replaces it."""
        if self._rollouts is not None:
            self._turns.engines_return = True

    def stop(self) -> None:
        """Records nothing from here on."""
        if self._rollouts is not None:
            self._turns.engines_return = False
        self._rollouts = None

    async def stay(self) -> None:
        """Ends with this process."""
        await asyncio.Event().wait()

    def forget(self, before: int) -> None:
        """Drops the records of prompts before this position: every checkpoint that is kept comes after them."""
        if self._rollouts is not None:
            self._rollouts.forget(before)
            self._turns.records.forget(before)


def _output(fields: dict[str, Any]) -> AgentLoopOutput:
    return AgentLoopOutput(**fields)


def _fields(output: AgentLoopOutput) -> dict[str, Any]:
    fields: dict[str, Any] = output.model_dump(exclude_unset=True)
    # verl fills the default map in place, which pydantic does not count as setting it.
    fields["extra_fields"] = output.extra_fields
    return fields


class LedgerManager(Recording, AgentLoopManagerTQ):  # type: ignore[misc]
    """verl's manager, in its driver, with our workers."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # After verl's constructor, which sets its own.
        self.agent_loop_workers_class = ray.remote(LedgerWorker)
        self.alive = []

    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()
        self.alive = [worker.stay.remote() for worker in self.agent_loop_workers]
