"""What the channel between lead and agents refuses."""

import contextlib

import msgspec
import pytest
from hypothesis import given, strategies as st

from verl_slurm.base.errors import WireError
from verl_slurm.wire.framing import MAX_FRAME, Framer, proof, session_key
from verl_slurm.wire.messages import FromAgent, NodeExited, SaveRequest, Shutdown, ToAgent

TOKEN = b"t" * 32
KEY = session_key(TOKEN, 3, b"l" * 32, b"a" * 32)


def pair() -> tuple[Framer, Framer]:
    return Framer(KEY, b"L", FromAgent), Framer(KEY, b"A", ToAgent)


@pytest.mark.scenario("N02")
@given(st.integers(1, 60))
def test_messages_arrive_whole_and_in_order_however_the_bytes_are_cut(size: int) -> None:
    lead, agent = pair()
    sent = [SaveRequest(request_id=n, stop=True, seconds_left=1.5) for n in range(4)] + [Shutdown()]
    data = b"".join(lead.encode(m) for m in sent)
    got = [m for i in range(0, len(data), size) for m in agent.feed(data[i : i + size])]
    assert got == sent


def test_a_lead_that_is_older_than_its_agents_is_understood() -> None:
    """A package is upgraded under a running job: the lead starts its next agents from the new one."""
    sent = {"type": "StopRequest", "request_id": 3, "stop": True, "deadline_s": 0.0}
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=ToAgent)
    assert read == SaveRequest(request_id=3, stop=True, seconds_left=0.0)


@pytest.mark.scenario("N03", "M07")
def test_a_replayed_frame_is_refused() -> None:
    lead, agent = pair()
    frame = lead.encode(Shutdown())
    assert list(agent.feed(frame)) == [Shutdown()]
    with pytest.raises(WireError, match="out of order"):
        list(agent.feed(frame))


def test_what_came_whole_before_a_frame_that_is_refused_counts() -> None:
    lead, agent = pair()
    sent = [SaveRequest(request_id=n, stop=True, seconds_left=1.5) for n in (1, 2)]
    frames = [lead.encode(message) for message in sent]
    got = []
    with pytest.raises(WireError, match="out of order"):
        got.extend(agent.feed(b"".join([*frames, frames[0]])))
    assert got == sent


@pytest.mark.scenario("N03", "M07")
def test_a_reflected_frame_a_large_one_and_a_message_of_the_other_direction_are_refused() -> None:
    lead, _ = pair()
    with pytest.raises(WireError, match="MAC"):
        list(Framer(KEY, b"L", ToAgent).feed(lead.encode(Shutdown())))
    _, agent = pair()
    with pytest.raises(WireError, match="too large"):
        list(agent.feed((MAX_FRAME + 1).to_bytes(4, "big") + bytes(40)))
    forger = Framer(KEY, b"L", FromAgent)
    with pytest.raises(WireError, match="vocabulary"):
        list(Framer(KEY, b"A", ToAgent).feed(forger.encode(NodeExited(node="n", exit_code=0, detail=""))))


@pytest.mark.scenario("M07")
@given(st.integers(0, 200), st.integers(0, 7))
def test_a_flipped_bit_never_becomes_a_message(position: int, bit: int) -> None:
    lead, agent = pair()
    frame = bytearray(lead.encode(SaveRequest(request_id=1, stop=False, seconds_left=0.0)))
    frame[position % len(frame)] ^= 1 << bit
    with contextlib.suppress(WireError):
        assert list(agent.feed(bytes(frame))) == []  # a longer length only waits for more


@pytest.mark.scenario("M07")
def test_proofs_differ_by_role_attempt_and_nonce() -> None:
    a, b = b"a" * 32, b"b" * 32
    proofs = {proof(TOKEN, b"agent", 1, a, b), proof(TOKEN, b"lead", 1, a, b)}
    proofs |= {proof(TOKEN, b"agent", 2, a, b), proof(TOKEN, b"agent", 1, b, a)}
    assert len(proofs) == 4
