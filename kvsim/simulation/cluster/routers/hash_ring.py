"""A ring of hashes: a key belongs to the server whose next mark follows its hash."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np

from kvsim.simulation.cluster.routers.base import Prompt, Router

_MASK = (1 << 64) - 1
_MULTIPLIER = 0xC6A4A7935BD1E995
_SEED = 4193360111
_MOST_TRIES = 32
_BITS = 23
_VALUES = (1 << _BITS) - 1
"""Values of the hash are below this."""


class HashRing:
    """Servers on a ring, each with many marks, as in vllm-router 0.1.17 (``src/policies/consistent_hash.rs``)."""

    def __init__(self, names: Sequence[str], marks: int):
        """``names``: of the servers, as the router knows them, which decide where their marks are."""
        ring = {fbi_hash(f"{name}:{mark}"): server for server, name in enumerate(names) for mark in range(marks)}
        self._marks = sorted(ring)
        self._servers = [ring[mark] for mark in self._marks]

    def server(self, key: str) -> int:
        """The server that a key belongs to."""
        return self._servers[bisect_left(self._marks, fbi_hash(key)) % len(self._servers)]


def server_names(servers: int) -> list[str]:
    """The names that servers have where none are given."""
    return [f"http://server-{number}:8000" for number in range(servers)]


def fbi_hash(key: str) -> int:
    """The hash of 64 bits that vllm-router takes from mcrouter's ``lib/fbi/hash.c``: furc, then MurmurHash64A."""
    return _murmur(_furc(key.encode()).to_bytes(4, "little"))


def _furc(key: bytes) -> int:
    """A number below ``_VALUES``, made of the bits of the key's hash, of the hash's hash, and so on."""
    word = _murmur(key)
    bits, known = word, 64
    depth = at = _BITS
    for _ in range(_MOST_TRIES):
        while True:
            while known < at + _BITS * _BITS + 1:
                word = _murmur(word.to_bytes(8, "little"))
                bits |= word << known
                known += 64
            if bits >> at & 1:
                break
            if depth == 0:
                return 0
            depth -= 1
            at = depth
        at += _BITS
        number = 1
        for _ in range(depth - 1):
            number = number << 1 | (bits >> at & 1)
            at += _BITS
        if number < _VALUES:
            return number
    return 0


def _murmur(key: bytes) -> int:
    """MurmurHash64A with mcrouter's seed."""
    value = _SEED ^ len(key) * _MULTIPLIER & _MASK
    whole = len(key) & ~7
    for at in range(0, whole, 8):
        word = int.from_bytes(key[at : at + 8], "little") * _MULTIPLIER & _MASK
        word = (word ^ word >> 47) * _MULTIPLIER & _MASK
        value = (value ^ word) * _MULTIPLIER & _MASK
    if whole < len(key):
        value = (value ^ int.from_bytes(key[whole:], "little")) * _MULTIPLIER & _MASK
    value = (value ^ value >> 47) * _MULTIPLIER & _MASK
    return value ^ value >> 47


_MARKS = 160
_REMEMBERED = 1 << 16
"""Keys whose servers are kept, so that they are not hashed again."""


class ConsistentHash(Router):
    """The server that the hash of a session belongs to, on a ring with 160 marks for each server.

    As ``consistent_hash`` of vllm-router 0.1.17 (``src/policies/consistent_hash.rs``, ``hash_key.rs``) by the header
    ``x-session-id``. Requests without a session go by the hash of their text, as there, though not to the same server.
    """

    sees_ends: ClassVar[bool] = False

    def __init__(self, servers: int, rng: np.random.Generator, *, names: Sequence[str] | None = None):
        """``names``: of the servers as the router knows them, such as ``http://10.0.0.1:8000``."""
        super().__init__(servers, rng)
        self._server = lru_cache(_REMEMBERED)(HashRing(names or server_names(servers), _MARKS).server)

    def route(self, prompt: Prompt, now: float) -> int:
        text = f"request:{prompt.text}" if prompt.session is None else f"header:x-session-id:{prompt.session}"
        return self._server(text)
