"""Turns and tools of verl's sessions: durable before they are used, answered from the record, continued or repeated."""

import asyncio
import importlib
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state.token_log import Call, TokenLog, call_of

pytestmark = [pytest.mark.verl, pytest.mark.torch]


@pytest.fixture(scope="module", autouse=True)
def _verl() -> None:
    # What verl imports uses deprecated names of its own and of Ray's.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("verl_slurm.loops.verl.verl_turns")


PROMPT = [5, 6, 7]
SETTINGS = {"temperature": 1.0, "logprobs": True}


class Engine:
    """In the place of verl's servers: notes what it is asked, and answers with tokens that count up from the prompt's
    length. `repeats`: whether its tokens do not depend on what it does at the same time."""

    def __init__(self, *, repeats: bool = True) -> None:
        self.asked: list[tuple[Call | None, list[int], dict[str, Any]]] = []
        self.repeats, self.stop_reason, self.at_once = repeats, "completed", 0
        # Raised, or taken for the reason of the end, by the next calls.
        self.fails: list[Exception | str] = []

    async def answer(self, request_id: str, prompt_ids: list[int], params: dict[str, Any]) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.asked.append((call_of(request_id), prompt_ids, dict(params)))
        self.at_once += 1
        await asyncio.sleep(0)
        fails = self.fails.pop(0) if self.fails and call_of(request_id) else self.stop_reason
        if isinstance(fails, Exception):
            raise fails
        shift = 0 if self.repeats else self.at_once
        self.at_once -= 1
        ids = [len(prompt_ids) + shift + n for n in range(min(4, params.pop("max_tokens", 4)))]
        return TokenOutput(
            token_ids=ids,
            log_probs=[-1.0] * len(ids),
            stop_reason=fails,
            extra_fields={"global_steps": 9, "min_global_steps": 9, "max_global_steps": 9},
        )

    @property
    def calls(self) -> list[tuple[Call | None, list[int], dict[str, Any]]]:
        """Without those that only ask whether it repeats itself."""
        return [one for one in self.asked if one[0] is not None]


class Client:
    """As much of verl's client as ours builds on."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def _vllm_request_id(self, request_id: str) -> str:
        return request_id

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        return await self.engine.answer(self._vllm_request_id(request_id), prompt_ids, sampling_params)


def attempt(
    run: Path,
    number: int,
    body: Callable[[Any, Any], Awaitable[Any]],
    engine: Engine,
    *,
    seeded: bool = False,
    tools: Any = (),
) -> Any:
    """Runs one session of an attempt: `body` is given the client, and may call the tools."""
    from verl_slurm.loops.verl.verl_turns import SESSION, PromptSession, Turns, continuing, record_tools

    turns = Turns(RunPaths(run), number, 0, seeded=seeded, response_length=8, prompt_length=16)
    record_tools(tools, turns)

    async def session() -> Any:
        SESSION.set(PromptSession(7, 2, "whole"))
        return await body(continuing(Client(engine), turns), turns)

    try:
        return asyncio.run(session())
    finally:
        turns.records.close()


def log(run: Path, call: Call, ids: list[int], *, ended: bool = False) -> None:
    tokens = TokenLog(RunPaths(run), 1, 0)
    tokens.add(call, 0, ids, [-0.5] * len(ids), version=3, ended=ended)
    tokens.close()


async def one_turn(client: Any, turns: Any) -> Any:
    return await client.generate("r", prompt_ids=PROMPT, sampling_params=dict(SETTINGS))


def first_call(run: Path) -> Call:
    """The call of a session's first turn, as a process that was killed before its end would have made it."""
    engine = Engine()
    engine.stop_reason = "aborted"
    attempt(private_dir(run / "elsewhere"), 1, one_turn, engine)
    [(call, _, _)] = engine.calls
    assert call is not None
    return call


def test_a_finished_turn_is_answered_from_the_record(tmp_path: Path) -> None:
    first = attempt(tmp_path, 1, one_turn, Engine())
    engine = Engine()
    assert attempt(tmp_path, 2, one_turn, engine) == first
    assert not engine.asked


def test_a_turn_that_was_broken_off_is_not_finished(tmp_path: Path) -> None:
    engine = Engine()
    engine.stop_reason = "aborted"
    attempt(tmp_path, 1, one_turn, engine)
    engine = Engine()
    attempt(tmp_path, 2, one_turn, engine)
    assert len(engine.calls) == 1


def test_an_unfinished_response_goes_on_with_the_rest_of_its_tokens(tmp_path: Path) -> None:
    log(tmp_path, first_call(tmp_path), [50, 51, 52, 53, 54])
    engine = Engine()
    output = attempt(tmp_path, 2, one_turn, engine)
    [(call, prompt, params)] = engine.calls
    assert prompt == [*PROMPT, 50, 51, 52, 53, 54]
    assert call == first_call(tmp_path), "what is sampled now is logged as more of the same response"
    assert params["max_tokens"] == 3, "verl's response_length of 8 counts the logged ones"
    assert output.token_ids == [50, 51, 52, 53, 54, 8, 9, 10]
    assert output.log_probs == [-0.5] * 5 + [-1.0] * 3, "those of the weights that sampled each"
    assert output.extra_fields["min_global_steps"] == 3
    assert output.extra_fields["max_global_steps"] == 9


@pytest.mark.parametrize(("ids", "ended"), [([50, 51], True), (list(range(8)), False)])
def test_a_response_that_is_whole_in_the_log_is_not_asked_for(
    tmp_path: Path, ids: list[int], ended: bool
) -> None:
    log(tmp_path, first_call(tmp_path), ids, ended=ended)
    engine = Engine()
    output = attempt(tmp_path, 2, one_turn, engine)
    assert not engine.calls
    assert (output.token_ids, output.stop_reason) == (ids, "completed")


def test_another_prompt_is_not_continued_with_these_tokens(tmp_path: Path) -> None:
    log(tmp_path, first_call(tmp_path)._replace(digest="0" * 16), [50, 51])
    engine = Engine()
    attempt(tmp_path, 2, one_turn, engine)
    assert engine.calls[0][1] == PROMPT


async def seeded_turn(client: Any, turns: Any) -> Any:
    output = await client.generate("r", prompt_ids=PROMPT, sampling_params={**SETTINGS, "seed": 11})
    return output, turns.mode


def test_an_engine_that_repeats_itself_samples_an_unfinished_response_anew(tmp_path: Path) -> None:
    log(tmp_path, first_call(tmp_path), [50, 51])
    engine = Engine()
    _, mode = attempt(tmp_path, 2, seeded_turn, engine, seeded=True)
    [(_, prompt, params)] = engine.calls
    assert (prompt, params["seed"]) == (PROMPT, 11)
    assert "alone and among 64, twice" in mode
    assert len(engine.asked) == 1 + 1 + 2 * 64


def test_an_engine_that_does_not_is_continued_with_another_noise(tmp_path: Path) -> None:
    log(tmp_path, first_call(tmp_path), [50, 51])
    engine = Engine(repeats=False)
    _, mode = attempt(tmp_path, 2, seeded_turn, engine, seeded=True)
    [(_, prompt, params)] = engine.calls
    assert prompt == [*PROMPT, 50, 51]
    assert params["seed"] != 11
    assert "other tokens for a prompt among 64 than alone" in mode


class EngineDeadError(Exception):
    """vLLM's, by its name alone: a worker does not import vLLM."""


def deaths() -> list[Exception]:
    from ray.exceptions import RayActorError, RayTaskError

    return [
        RayActorError(error_msg="its process is gone"),
        RayTaskError("generate", "", EngineDeadError()),
        RayTaskError("acquire_server", "", RuntimeError("No available servers in load balancer")),
    ]


async def turn_of_a_replaced_engine(client: Any, turns: Any) -> Any:
    turns.engines_return = True
    return await one_turn(client, turns)


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_slurm.loops.verl import verl_turns

    monkeypatch.setattr(verl_turns, "_NEXT_ENGINE_S", 0.0)


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("fails", [[0], [1], [0, 0, 2, 2]], ids=["server", "engine", "none_left"])
def test_a_response_goes_on_from_what_a_dead_engine_has_logged(tmp_path: Path, fails: list[int]) -> None:
    call = first_call(tmp_path)
    engine = Engine()
    engine.fails = [deaths()[number] for number in fails]

    async def body(client: Any, turns: Any) -> Any:
        # After the worker has begun, which reads the log of earlier attempts then.
        log(tmp_path, call, [50, 51, 52])
        output = await turn_of_a_replaced_engine(client, turns)
        assert turns.continued == 1
        return output

    output = attempt(tmp_path, 1, body, engine)
    prompts = [prompt for _, prompt, _ in engine.calls]
    assert prompts == [PROMPT, *([[*PROMPT, 50, 51, 52]] * len(fails))]
    assert output.token_ids == [50, 51, 52, 6, 7, 8, 9]
    assert attempt(tmp_path, 2, one_turn, Engine()).token_ids == output.token_ids, (
        "and is recorded as one turn"
    )


@pytest.mark.usefixtures("_soon")
def test_a_response_that_is_broken_off_for_a_new_engine_goes_on_at_once(tmp_path: Path) -> None:
    engine = Engine()
    engine.fails = ["aborted"]
    output = attempt(tmp_path, 1, turn_of_a_replaced_engine, engine)
    assert [prompt for _, prompt, _ in engine.calls] == [PROMPT, [*PROMPT, 3, 4, 5, 6]]
    assert (output.token_ids, output.stop_reason) == ([3, 4, 5, 6, 7, 8, 9, 10], "completed")
    assert output.extra_fields["min_global_steps"] == 9


@pytest.mark.usefixtures("_soon")
def test_an_engine_that_repeats_itself_samples_anew_what_is_broken_off(tmp_path: Path) -> None:
    async def body(client: Any, turns: Any) -> Any:
        turns.engines_return = True
        return await seeded_turn(client, turns)

    engine = Engine()
    engine.fails = ["aborted", deaths()[0]]
    output, _ = attempt(tmp_path, 1, body, engine, seeded=True)
    assert [(prompt, params["seed"]) for _, prompt, params in engine.calls] == [(PROMPT, 11)] * 3
    assert output.token_ids == [3, 4, 5, 6]


def test_other_errors_and_engines_that_nobody_replaces_end_the_session(tmp_path: Path) -> None:
    from ray.exceptions import RayActorError

    engine = Engine()
    engine.fails = deaths()[:1]
    with pytest.raises(RayActorError):
        attempt(tmp_path, 1, one_turn, engine)
    engine.fails = [ValueError("a prompt that is too long")]
    with pytest.raises(ValueError, match="too long"):
        attempt(tmp_path, 2, turn_of_a_replaced_engine, engine)


def test_images_and_validation_are_passed_on(tmp_path: Path) -> None:
    from verl_slurm.loops.verl.verl_turns import SESSION

    async def body(client: Any, turns: Any) -> None:
        await client.generate("r", prompt_ids=PROMPT, sampling_params={}, image_data=[object()])
        SESSION.set(None)
        await client.generate("r", prompt_ids=PROMPT, sampling_params={})

    engine = Engine()
    attempt(tmp_path, 1, body, engine)
    assert [one[0] for one in engine.asked] == [None, None]


class Counter:
    """A tool with verl's methods, counting its calls."""

    name = "count"

    def __init__(self, kind: str | None = None) -> None:
        self.called, self.restored = 0, list[Any]()
        if kind is not None:
            self.verl_slurm_replay = kind

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        from verl.tools.schemas import ToolResponse

        self.called += 1
        return ToolResponse(text=f"{parameters['a']}!"), 0.5, {"calls": 1}

    async def restore(self, instance_id: str, parameters: dict[str, Any], result: Any) -> None:
        self.restored.append((parameters, result[0].text))


async def two_turns(tool: Any, client: Any) -> list[Any]:
    """Two turns, the first of which calls the tool twice at once."""
    await client.generate("r", prompt_ids=PROMPT, sampling_params=dict(SETTINGS))
    results = await asyncio.gather(*(tool.execute("i", {"a": a}) for a in (1, 2)))
    await client.generate("r", prompt_ids=[*PROMPT, 9], sampling_params=dict(SETTINGS))
    return [(response.text, reward, metrics) for response, reward, metrics in results]


@pytest.mark.parametrize(
    ("kind", "called", "restored"), [(None, 0, 0), ("restart_only", 2, 0), ("restorable", 0, 2)]
)
def test_a_tool_is_called_once_a_turn_unless_it_says_otherwise(
    tmp_path: Path, kind: str | None, called: int, restored: int
) -> None:
    engine, first = Engine(), Counter(kind)
    results = attempt(tmp_path, 1, lambda client, _: two_turns(first, client), engine, tools=[first])
    assert (first.called, len(engine.calls)) == (2, 2)
    engine, second = Engine(), Counter(kind)
    again = attempt(tmp_path, 2, lambda client, _: two_turns(second, client), engine, tools=[second])
    assert again == results == [("1!", 0.5, {"calls": 1}), ("2!", 0.5, {"calls": 1})]
    assert (second.called, len(second.restored)) == (called, restored)
    assert not engine.calls


def test_a_counting_tool_is_called_once_a_turn_over_25_kills(tmp_path: Path) -> None:
    """Each attempt ends at a later await of the session, whatever is awaited there."""
    engine, tool = Engine(), Counter()
    execute = tool.execute
    reached = 0

    class Killed(BaseException):
        pass

    async def turns_of(client: Any, most: int) -> int:
        for turn in range(20):
            if turn == most:
                raise Killed
            await client.generate("r", prompt_ids=[*PROMPT, turn], sampling_params=dict(SETTINGS))
            if turn + 0.5 == most:
                raise Killed
            await tool.execute("i", {"a": turn})
        return 20

    for kill in range(26):
        tool.execute = execute  # type: ignore[method-assign]
        most = kill * 0.75 if kill < 25 else 99
        try:
            reached = attempt(
                tmp_path, 1 + kill, lambda client, _, most=most: turns_of(client, most), engine, tools=[tool]
            )
        except Killed:
            continue
    assert (reached, tool.called, len(engine.calls)) == (20, 20, 20)


def test_a_function_is_recorded_in_the_form_that_verl_makes_of_it(tmp_path: Path) -> None:
    from verl.tools.function_tool import FunctionTool

    def tool() -> Any:
        calls: list[int] = []
        return calls, FunctionTool(
            name="f", fn=lambda a: calls.append(a) or (f"{a}", 1, None), tool_schema=SimpleNamespace()
        )

    async def body(one: Any, client: Any) -> Any:
        await client.generate("r", prompt_ids=PROMPT, sampling_params=dict(SETTINGS))
        response, reward, metrics = await one.call({"a": 3})
        return response.text, reward, metrics

    for number, expected in ((1, [3]), (2, [])):
        calls, one = tool()
        found = attempt(tmp_path, number, lambda client, _, one=one: body(one, client), Engine(), tools=[one])
        assert found == ("3", 1.0, {})
        assert calls == expected
