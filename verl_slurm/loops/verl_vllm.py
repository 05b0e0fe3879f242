"""verl's vLLM server, logging the tokens of unfinished responses; verl loads it through its registry of engines.

The server of a replica reads vLLM's output as it is sampled, and gives verl the last one. Here each is noted on its way
(`token_log`). No request is cut or asked again for that, so the engine's own scheduling stays as it is.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state.token_log import Call, TokenLog, call_of
from verl_slurm.wire.environment import ATTEMPT_VARIABLE, RUN_VARIABLE


class _LoggedEngine:
    """vLLM's engine, whose output is noted where the request is one of a recorded session."""

    def __init__(self, engine: Any, rank: int, version: Callable[[], int | None]) -> None:
        self._engine, self._rank, self._version = engine, rank, version
        self._log: TokenLog | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *args: Any, **named: Any) -> AsyncIterator[Any]:
        call = call_of(str(named.get("request_id", "")))
        seen, start = 0, 0
        if call is not None:
            start = len(named["prompt"]["prompt_token_ids"]) - call.prompt_tokens
        # Closed with this one: vLLM then ends the request.
        async with aclosing(self._engine.generate(*args, **named)) as outputs:
            async for output in outputs:
                if call is not None and output.outputs:
                    seen = self._note(call, start, seen, output)
                yield output

    def _note(self, call: Call, start: int, seen: int, output: Any) -> int:
        one = output.outputs[0]  # all tokens so far
        ids = list(one.token_ids[seen:])
        log_probs = None
        if one.logprobs is not None:
            log_probs = [place[token].logprob for token, place in zip(ids, one.logprobs[seen:], strict=True)]
        if self._log is None:
            # Not earlier: a reward model's or a teacher's engine has nothing to log.
            self._log = TokenLog(
                RunPaths(Path(os.environ[RUN_VARIABLE])), int(os.environ[ATTEMPT_VARIABLE]), self._rank
            )
        ended = one.finish_reason not in (None, "abort")
        if ids or ended:
            self._log.add(call, start + seen, ids, log_probs, version=self._version(), ended=ended)
        return seen + len(ids)


class LoggedServer(vLLMHttpServer):  # type: ignore[misc]
    """One replica's server, a Ray actor."""

    _logged: Any = None

    @property
    def engine(self) -> Any:
        return self._logged

    @engine.setter
    def engine(self, engine: Any) -> None:
        # verl sets it when it has made the engine.
        self._logged = engine and _LoggedEngine(engine, self.replica_rank, lambda: self.global_steps)

    async def stay(self) -> None:
        """Ends with the engine, whose processes are others; with this process Ray ends it."""
        # vLLM tells only those that wait for an answer.
        while not getattr(self._logged, "errored", False):  # noqa: ASYNC110
            await asyncio.sleep(0.5)


class LoggedReplica(vLLMReplica):  # type: ignore[misc]
    """verl's replica, with our server."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # After verl's constructor, which sets its own.
        self.server_class = ray.remote(LoggedServer)

    def watch(self) -> list[Any]:
        """Returns what ends when one of the replica's servers or its engine does."""
        return [server.stay.remote() for server in self.servers]


def register() -> None:
    """Puts our replica in the place of verl's own; one that somebody else has registered stays."""
    if RolloutReplicaRegistry.get("vllm") is vLLMReplica:
        RolloutReplicaRegistry.register("vllm", lambda: LoggedReplica)
