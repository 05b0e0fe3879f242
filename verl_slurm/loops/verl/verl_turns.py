"""Makes each turn of a session and each tool's result durable before verl uses it, and continues responses that were
being sampled; in verl's worker.

`continuing` derives from the class of verl's client for the engines, whose `generate` all agent loops call. A turn that
an earlier attempt has finished is answered from the record. Of one that was unfinished, the logged tokens are put
behind the prompt (`token_log`), and keep the log probabilities with which they were sampled. If the engine is shown to
give the same tokens again, a response is sampled anew with its own seed instead: then it is the same response.

The same is done within an attempt, when an engine dies and the driver replaces it (`verl_engines`): another engine goes
on from the tokens that the dead one has logged.

A tool says with `verl_slurm_replay`, an attribute of its class or function, what becomes of a recorded result:

* `"stateless"`, the default: it is used, and the tool is not called.
* `"restart_only"`: the tool is called again, with the same arguments, and so comes to the same state.
* `"restorable"`: it is used, and the tool's `restore(instance_id, parameters, result)` is awaited.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from ray.exceptions import RayActorError
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import ToolResponse
from verl.workers.rollout.replica import TokenOutput

from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state import rollout_records
from verl_slurm.runtime_state.token_log import Call, Prefix, Prefixes

_PROBES = 64
_PROBE_TOKENS = 32
_MEDIA = ("image_data", "video_data", "audio_data")
_NEXT_ENGINE_S = 0.5
"""Until an engine is asked for again after one has died. Also longer than its server takes to log the last tokens."""


class PromptSession:
    """One session of a prompt while it is sampled, by the names that outlast an attempt."""

    def __init__(self, position: int, session: int, digest: str) -> None:
        self.position, self.number, self.digest = position, session, digest
        self.turn, self._calls = -1, 0

    def next_turn(self) -> int:
        self.turn, self._calls = self.turn + 1, 0
        return self.turn

    def next_tool(self) -> int:
        """Returns the number of a tool's call within its turn, from 1."""
        self._calls += 1
        return self._calls

    def key(self, call: int) -> tuple[int, int]:
        """Returns the ledger's key of this turn's tokens (0) or of the result of a tool's call.

        Raises:
            NotRecordable: there are more sessions, turns or calls than 32 bits can tell apart.
        """
        if self.number >= 1 << 12 or self.turn >= 1 << 12 or call >= 1 << 8:
            raise rollout_records.NotRecordable(
                "a session has more than 4,095 turns or a turn more than 255 calls of tools"
            )
        return self.position, (self.number << 20) | (max(self.turn, 0) << 8) | call


SESSION: ContextVar[PromptSession | None] = ContextVar("session", default=None)
"""The session that this task samples. None: nothing of it is recorded."""
_CALL: ContextVar[Call | None] = ContextVar("call", default=None)


class Turns:
    """What one worker knows of turns: those recorded, those logged in part, and how the latter go on.

    Args:
        seeded: sessions have seeds of their own, so that the engine may be able to repeat a response.
        response_length, prompt_length: verl's, in tokens.
    """

    def __init__(
        self,
        paths: RunPaths,
        attempt: int,
        rank: int,
        *,
        seeded: bool,
        response_length: int,
        prompt_length: int,
    ) -> None:
        self.records = rollout_records.RolloutLedger(rollout_records.turn_paths(paths), attempt, rank)
        self._paths, self._read_at = paths, time.monotonic()
        self._prefixes = Prefixes(paths, report=self.records.tell)
        self.seeded, self.continued = seeded, 0
        self._most, self._prompt = response_length, prompt_length
        self._exact: asyncio.Task[bool] | None = None
        self.mode = ""
        """How unfinished responses go on after an interruption, and why; empty before the first one is asked for."""
        self.engines_return = False
        """Whether the driver replaces engines, and breaks off requests for no other reason."""

    async def exact(self, probe: Callable[[], Awaitable[str | None]]) -> bool:
        """Returns whether an unfinished response is sampled anew, as it comes out the same. Asks the engine once."""
        if self._exact is None:
            self._exact = asyncio.create_task(self._ask(probe))
        return await asyncio.shield(self._exact)

    async def _ask(self, probe: Callable[[], Awaitable[str | None]]) -> bool:
        SESSION.set(None)  # of this task alone
        doubt = "rollout.full_determinism is off" if not self.seeded else await probe()
        self.mode = (
            f"unfinished responses go on from their logged tokens after an interruption: {doubt}"
            if doubt is not None
            else "unfinished responses are sampled anew after an interruption, with the same seeds: the engine gave "
            f"the same tokens for a prompt alone and among {_PROBES}, twice"
        )
        return doubt is None

    def prefix(self, call: Call) -> Prefix | None:
        return self._prefixes.find(call)

    async def next_engine(self, error: Exception) -> None:
        """Returns when an engine may be asked again whose death this error tells, and its tokens can be found.

        Raises:
            Exception: the error, if it tells something else or engines are not replaced.
        """
        died = _tells_a_death(error)
        if not self.engines_return or not (died or _tells_that_none_is_left(error)):
            raise error
        since = time.monotonic()
        # No event: the driver tells verl's load balancer alone.
        await asyncio.sleep(_NEXT_ENGINE_S)
        # Many requests fail at the same time.
        if died and self._read_at < since:
            self._read_at = time.monotonic()
            self._prefixes = Prefixes(self._paths, report=self.records.tell)

    def budget(self, params: Mapping[str, Any], prompt_tokens: int) -> int:
        """Returns the most tokens of a response, as verl's servers reckon where the request does not say it."""
        said = params.get("max_tokens", params.get("max_new_tokens"))
        if said is not None:
            return int(said)
        return max(1, min(self._most, self._prompt + self._most - prompt_tokens))


class _Continuing:
    """Methods placed before those of verl's client."""

    turns: Turns

    def _vllm_request_id(self, request_id: str) -> str:
        # By this the engine's process knows whose tokens it logs.
        call = _CALL.get()
        return call.request_id if call is not None else super()._vllm_request_id(request_id)  # type: ignore[misc]

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: dict[str, Any], **named: Any
    ) -> TokenOutput:
        session, ask = SESSION.get(), self._whole
        if session is None or any(named.get(kind) for kind in _MEDIA):
            return await ask(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **named)
        prompt_ids, turn, records = list(prompt_ids), session.next_turn(), self.turns.records
        settings = {name: value for name, value in sampling_params.items() if name != "seed"}
        try:
            key, digest = session.key(0), rollout_records.digest_of(prompt_ids, settings)[:16]
        except rollout_records.NotRecordable as error:
            records.not_recorded(error)
            return await ask(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **named)
        if found := records.find(*key, digest, lambda fields: TokenOutput(**fields)):
            return found[0]
        call = Call(session.position, session.number, turn, len(prompt_ids), digest)

        async def probe() -> str | None:
            return await _doubt(ask, prompt_ids, sampling_params)

        exact = await self.turns.exact(probe)
        prefix = logged = None if exact else self.turns.prefix(call)
        while True:
            try:
                output = await self._go_on(call, prefix, request_id, prompt_ids, dict(sampling_params), named)
            except Exception as error:  # noqa: BLE001 - raised again there
                await self.turns.next_engine(error)
                prefix = logged = None if exact else self.turns.prefix(call)
                continue
            self.turns.continued += logged is not None
            if output.stop_reason != "aborted":
                await records.record(*key, [output.model_dump()], digest)
                return output
            # What was broken off is no turn; it goes on from its logged tokens after a restart, or from these at once.
            if not self.turns.engines_return:
                return output
            version = output.extra_fields.get("min_global_steps")
            if not exact and output.token_ids:
                prefix = Prefix(list(output.token_ids), output.log_probs, version, ended=False)
            logged = None

    async def _whole(self, request_id: str, **asked: Any) -> TokenOutput:
        """Asks as verl does, and again from the first token where an engine dies or breaks off for one that died."""
        while True:
            try:
                output: TokenOutput = await super().generate(request_id, **asked)  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - raised again there
                await self.turns.next_engine(error)
                continue
            if output.stop_reason != "aborted" or not self.turns.engines_return:
                return output

    async def _go_on(
        self,
        call: Call,
        prefix: Prefix | None,
        request_id: str,
        prompt_ids: list[int],
        params: dict[str, Any],
        named: dict[str, Any],
    ) -> TokenOutput:
        start = 0 if prefix is None else len(prefix.ids)
        budget = self.turns.budget(params, len(prompt_ids))
        if "seed" in params and (call.turn or start):
            # The noise of one place in a session is used once.
            params["seed"] = rollout_records.session_seed(params["seed"], call.turn, start)
        if prefix is None:
            return await self._ask(call, request_id, prompt_ids, params, named)
        if prefix.ended or start >= budget:
            output = TokenOutput(token_ids=[], log_probs=[], stop_reason="completed")
            output.extra_fields.update(min_global_steps=prefix.version, max_global_steps=prefix.version)
            output.extra_fields["global_steps"] = prefix.version
        else:
            params.pop("max_new_tokens", None)
            params["max_tokens"] = budget - start
            output = await self._ask(call, request_id, prompt_ids + prefix.ids, params, named)
            if prefix.version is not None:
                output.extra_fields["min_global_steps"] = prefix.version
        kept = prefix.log_probs
        output.log_probs = None if kept is None or output.log_probs is None else kept + list(output.log_probs)
        output.token_ids = prefix.ids + list(output.token_ids)
        return output

    async def _ask(
        self,
        call: Call,
        request_id: str,
        prompt_ids: list[int],
        params: dict[str, Any],
        named: dict[str, Any],
    ) -> TokenOutput:
        told = _CALL.set(call)
        try:
            return await super().generate(  # type: ignore[misc]
                request_id, prompt_ids=prompt_ids, sampling_params=params, **named
            )
        finally:
            _CALL.reset(told)


def continuing(client: Any, turns: Turns) -> Any:
    """Returns verl's client of the engines with our methods around its own."""
    made: Any = object.__new__(type(f"Continuing{type(client).__name__}", (_Continuing, type(client)), {}))
    made.__dict__.update(client.__dict__)
    made.turns = turns
    return made


def _cause(error: Exception) -> object:
    return getattr(error, "cause", error)  # Ray's errors of tasks carry what was raised there


def _tells_a_death(error: Exception) -> bool:
    # By name: a worker imports no vLLM.
    return isinstance(error, RayActorError) or type(_cause(error)).__name__ == "EngineDeadError"


def _tells_that_none_is_left(error: Exception) -> bool:
    return isinstance(_cause(error), RuntimeError) and "No available servers" in str(_cause(error))


async def _doubt(
    ask: Callable[..., Awaitable[TokenOutput]], prompt_ids: list[int], params: Any
) -> str | None:
    """Returns None if a prompt gives the same tokens alone and among others, twice; else what was found."""
    params = {name: value for name, value in params.items() if name not in ("max_tokens", "max_new_tokens")}

    async def tokens(number: int, prompt: list[int], seed: int) -> list[int]:
        output = await ask(
            f"probe-{id(params)}-{number}",
            prompt_ids=prompt,
            # A copy: verl's servers change it.
            sampling_params={**params, "max_tokens": _PROBE_TOKENS, "seed": seed},
        )
        return list(output.token_ids)

    alone = await tokens(0, prompt_ids, 1)
    for again in range(2):
        # Prompts of other lengths beside it, so that it lies elsewhere in the engine's batches.
        others = [
            tokens(1 + again * _PROBES + n, prompt_ids[: 1 + n % len(prompt_ids)], n + 2)
            for n in range(_PROBES - 1)
        ]
        among, *_ = await asyncio.gather(tokens(_PROBES * (2 + again), prompt_ids, 1), *others)
        if among != alone:
            return f"the engine gave other tokens for a prompt among {_PROBES} than alone"
    return None


def record_tools(tools: Sequence[Any], turns: Turns) -> None:
    """Has each of verl's tools answer from the record what an earlier attempt has called it for."""
    for tool in tools:
        if isinstance(tool, FunctionTool):
            tool.call = _recorded_function(tool, tool.call, turns)
        else:
            tool.execute = _recorded(tool, tool.execute, turns)


def _recorded_function(tool: Any, call: Callable[..., Awaitable[Any]], turns: Turns) -> Callable[..., Any]:
    kind = getattr(tool.fn, "verl_slurm_replay", "stateless")

    async def recorded(parameters: dict[str, Any]) -> Any:
        async def run() -> Any:
            return normalize_function_tool_return(await call(parameters))

        return await _once(turns, tool.name, parameters, run, None, kind)

    return recorded


def _recorded(tool: Any, execute: Callable[..., Awaitable[Any]], turns: Turns) -> Callable[..., Any]:
    kind = getattr(tool, "verl_slurm_replay", "stateless")

    async def recorded(instance_id: str, parameters: dict[str, Any], **named: Any) -> Any:
        async def run() -> Any:
            return await execute(instance_id, parameters, **named)

        async def restore(result: Any) -> None:
            await tool.restore(instance_id, parameters, result)

        return await _once(turns, tool.name, parameters, run, restore, kind)

    return recorded


def _tool_result(fields: dict[str, Any]) -> tuple[ToolResponse, Any, Any]:
    return ToolResponse(**fields["response"]), fields["reward"], fields["metrics"]


async def _once(
    turns: Turns,
    name: str,
    parameters: Any,
    run: Callable[[], Awaitable[Any]],
    restore: Callable[[Any], Awaitable[None]] | None,
    kind: str,
) -> tuple[ToolResponse, Any, Any]:
    session = SESSION.get()
    if session is None:
        return await run()  # type: ignore[no-any-return]
    try:
        key, digest = session.key(session.next_tool()), rollout_records.digest_of(name, parameters)
    except rollout_records.NotRecordable as error:
        turns.records.not_recorded(error)
        return await run()  # type: ignore[no-any-return]
    if kind != "restart_only" and (found := turns.records.find(*key, digest, _tool_result)):
        result: tuple[ToolResponse, Any, Any] = found[0]
        if kind == "restorable" and restore is not None:
            await restore(result)
        return result
    response, reward, metrics = await run()
    said = response.model_dump(exclude_none=True)  # its constructor refuses None
    fields = {"response": said, "reward": reward, "metrics": metrics}
    await turns.records.record(*key, [fields], digest)
    return response, reward, metrics
