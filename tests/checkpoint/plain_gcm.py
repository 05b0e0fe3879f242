"""AES-256-GCM and HKDF written from FIPS 197, NIST SP 800-38D and RFC 5869, to check ours against. Slow."""

import hashlib
import hmac


def _sbox() -> list[int]:
    box = [0] * 256
    p = q = 1
    while True:
        p = p ^ ((p << 1) & 0xFF) ^ (0x1B if p & 0x80 else 0)
        q ^= q << 1
        q ^= q << 2
        q ^= q << 4
        q &= 0xFF
        q ^= 0x09 if q & 0x80 else 0
        x = q ^ (q << 1 | q >> 7) ^ (q << 2 | q >> 6) ^ (q << 3 | q >> 5) ^ (q << 4 | q >> 4)
        box[p] = (x ^ 0x63) & 0xFF
        if p == 1:
            break
    box[0] = 0x63
    return box


SBOX = _sbox()


def _double(x: int) -> int:
    return ((x << 1) ^ (0x1B if x & 0x80 else 0)) & 0xFF


def _round_keys(key: bytes) -> list[bytes]:
    words = [key[i : i + 4] for i in range(0, 32, 4)]
    rcon = 1
    while len(words) < 60:
        word = words[-1]
        if len(words) % 8 == 0:
            word = bytes(SBOX[b] for b in word[1:] + word[:1])
            word = bytes([word[0] ^ rcon]) + word[1:]
            rcon = _double(rcon)
        elif len(words) % 8 == 4:
            word = bytes(SBOX[b] for b in word)
        words.append(bytes(a ^ b for a, b in zip(words[-8], word, strict=True)))
    return [b"".join(words[i : i + 4]) for i in range(0, 60, 4)]


def aes256(key: bytes, block: bytes) -> bytes:
    keys = _round_keys(key)
    state = [a ^ b for a, b in zip(block, keys[0], strict=True)]
    for number, round_key in enumerate(keys[1:], 1):
        state = [SBOX[state[(i + 4 * (i % 4)) % 16]] for i in range(16)]
        if number < 14:
            mixed = []
            for c in range(0, 16, 4):
                a = state[c : c + 4]
                mixed += [
                    _double(a[i]) ^ _double(a[(i + 1) % 4]) ^ a[(i + 1) % 4] ^ a[(i + 2) % 4] ^ a[(i + 3) % 4]
                    for i in range(4)
                ]
            state = mixed
        state = [a ^ b for a, b in zip(state, round_key, strict=True)]
    return bytes(state)


def _times(x: int, y: int) -> int:
    z = 0
    for i in range(127, -1, -1):
        if (x >> i) & 1:
            z ^= y
        y = (y >> 1) ^ (0xE1 << 120 if y & 1 else 0)
    return z


def _ghash(h: int, aad: bytes, data: bytes) -> int:
    y = 0
    for part in (aad, data):
        for i in range(0, len(part), 16):
            y = _times(y ^ int.from_bytes(part[i : i + 16].ljust(16, b"\0"), "big"), h)
    return _times(y ^ (len(aad) * 8 << 64 | len(data) * 8), h)


def seal(key: bytes, nonce: bytes, plain: bytes, aad: bytes) -> tuple[bytes, bytes]:
    """Ciphertext and tag."""
    cipher = bytearray()
    for number, i in enumerate(range(0, len(plain), 16), 2):
        stream = aes256(key, nonce + number.to_bytes(4, "big"))
        cipher += bytes(a ^ b for a, b in zip(plain[i : i + 16], stream, strict=False))
    mask = int.from_bytes(aes256(key, nonce + b"\0\0\0\1"), "big")
    tag = _ghash(int.from_bytes(aes256(key, bytes(16)), "big"), aad, bytes(cipher)) ^ mask
    return bytes(cipher), tag.to_bytes(16, "big")


def hkdf32(key: bytes, salt: bytes, info: bytes) -> bytes:
    extracted = hmac.digest(salt or bytes(32), key, hashlib.sha256)
    return hmac.digest(extracted, info + b"\1", hashlib.sha256)
