"""Turns bytes into messages and back, between lead and agent. No sockets here.

Handshake (32-byte nonces; `token` from the 0600 file `RUN/control/lead.json`; `ctx` = run attempt as 8 bytes):

```
lead  → agent   b"VSLURM01" ‖ nonce_lead
agent → lead    nonce_agent ‖ HMAC(token, b"agent" ‖ ctx ‖ nonce_lead ‖ nonce_agent)
lead  → agent   HMAC(token, b"lead" ‖ ctx ‖ nonce_agent ‖ nonce_lead)
```

Session key = HMAC(token, b"key" ‖ ctx ‖ nonce_lead ‖ nonce_agent). Then frames, in each direction:

```
u32 length of payload ‖ u64 sequence number (0, 1, 2, ...) ‖ 32 bytes MAC ‖ payload (msgpack)
MAC = HMAC-SHA256(session key, direction byte ‖ sequence ‖ payload)
```

A frame too large, out of sequence (replayed, reordered, dropped) or with a wrong MAC ends the connection.
"""

import hashlib
import hmac
import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from verl_slurm.base.errors import UNREADABLE, WireError

HELLO = b"VSLURM01"
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_FRAME = 9 * 1024 * 1024
"""Bytes of one payload. The largest valid one sets a value in the ranks' store (`messages.MAX_VALUE`)."""

_HEAD = struct.Struct(">IQ32s")
_SEQUENCE = struct.Struct(">Q")

M = TypeVar("M")


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def proof(token: bytes, role: bytes, attempt: int, first: bytes, second: bytes) -> bytes:
    """Computes the proof that `role` (b"agent" or b"lead") knows the token, for these two nonces."""
    return _mac(token, role, _SEQUENCE.pack(attempt), first, second)


def session_key(token: bytes, attempt: int, nonce_lead: bytes, nonce_agent: bytes) -> bytes:
    """Derives the key of one connection's frames."""
    return _mac(token, b"key", _SEQUENCE.pack(attempt), nonce_lead, nonce_agent)


def ranks_key(token: bytes, attempt: int, restart: int) -> bytes:
    """Derives the key by which the ranks of one restart prove themselves to each other; it is never sent."""
    return _mac(token, b"ranks", _SEQUENCE.pack(attempt), _SEQUENCE.pack(restart))


def services_token(token: bytes, attempt: int) -> str:
    """Derives what the ranks and services of one attempt have in common. Each node derives it; it is never sent."""
    return _mac(token, b"services", _SEQUENCE.pack(attempt)).hex()


def relay_key(token: bytes, attempt: int) -> bytes:
    """Derives the key by which agents and hosts of services prove themselves to each other."""
    # Not the token that services have: a service may run what a model wrote.
    return _mac(token, b"relay", _SEQUENCE.pack(attempt))


class Framer(Generic[M]):
    """Frames both directions of one connection. Refuses what is not of `message_type`.

    `direction`: b"L" on the lead's side, b"A" on the agent's.
    """

    def __init__(self, key: bytes, direction: bytes, message_type: Any) -> None:
        self._key = key
        # Two directions, one key: with the direction in the MAC, a frame that is sent back to its sender is refused.
        self._out, self._in = (b"L", b"A") if direction == b"L" else (b"A", b"L")
        self._sent = self._received = 0
        self._buffer = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)

    def encode(self, message: M) -> bytes:
        """Returns one message as a frame."""
        payload = self._encoder.encode(message)
        if len(payload) > MAX_FRAME:
            raise WireError("a message is too large", found=len(payload), expected=f"at most {MAX_FRAME}")
        sequence = _SEQUENCE.pack(self._sent)
        mac = _mac(self._key, self._out, sequence, payload)
        frame = _HEAD.pack(len(payload), self._sent, mac) + payload
        # After the frame is whole: a message that is refused above uses no number.
        self._sent += 1
        return frame

    def feed(self, data: bytes) -> Iterator[M]:
        """Takes bytes as they arrive; yields the complete messages, also those before a frame that is
        refused.

        Raises WireError: the connection cannot be used any more.
        """
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            length, sequence, mac = _HEAD.unpack_from(self._buffer)
            # From the head alone: a length that no message has is refused before its bytes are waited for.
            if length > MAX_FRAME:
                raise WireError("a frame is too large", found=length, expected=f"at most {MAX_FRAME}")
            # A frame that was recorded, doubled or left out; TCP itself neither loses nor reorders.
            if sequence != self._received:
                raise WireError("a frame is out of order", found=sequence, expected=self._received)
            end = _HEAD.size + length
            if len(self._buffer) < end:
                break
            payload = bytes(self._buffer[_HEAD.size : end])
            # Nothing of the payload is decoded before its MAC is known to be good.
            if not hmac.compare_digest(mac, _mac(self._key, self._in, _SEQUENCE.pack(sequence), payload)):
                raise WireError("a frame does not carry our MAC", where=f"frame {sequence}")
            del self._buffer[:end]
            self._received += 1
            try:
                message = self._decoder.decode(payload)
            except UNREADABLE as error:
                raise WireError("a message is not of our vocabulary", where=str(error)) from error
            # One by one: messages before a frame that is refused, in the same bytes, are whole and count.
            yield message
