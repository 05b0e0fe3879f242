"""Lead and agent over a real socket."""

import asyncio

import pytest
from verl_slurm_daemon.link.channel import AgentLink, connect, serve

from verl_slurm.base.errors import WireError
from verl_slurm.wire.messages import FromAgent, Shutdown, SignalSeen, ToAgent

TOKEN = b"k" * 32


async def _talk(agent_token: bytes, agent_attempt: int) -> tuple[list[FromAgent], list[ToAgent]]:
    heard_by_lead: list[FromAgent] = []
    heard_by_agent: list[ToAgent] = []
    done = asyncio.Event()

    async def on_link(link: AgentLink) -> None:
        link.send(Shutdown())
        await link.messages(heard_by_lead.append)
        done.set()

    server, port = await serve("127.0.0.1", TOKEN, 7, 4, on_link)
    async with server:
        link = await connect("127.0.0.1", port, agent_token, agent_attempt)
        link.send(SignalSeen(node="n1", signal=15))
        listening = asyncio.create_task(link.messages(heard_by_agent.append))
        await asyncio.sleep(0)
        await link.close()
        await done.wait()
        listening.cancel()
    return heard_by_lead, heard_by_agent


def test_an_agent_that_knows_the_token_is_heard() -> None:
    heard, _ = asyncio.run(_talk(TOKEN, 7))
    assert heard == [SignalSeen(node="n1", signal=15)]


@pytest.mark.scenario("M07")
@pytest.mark.parametrize(("token", "attempt"), [(b"x" * 32, 7), (TOKEN, 6)])
def test_a_wrong_token_or_a_closed_attempt_is_sent_away(token: bytes, attempt: int) -> None:
    with pytest.raises((WireError, asyncio.IncompleteReadError)):
        asyncio.run(_talk(token, attempt))
