"""What requests look up in a prefix cache, what they leave there, and what share is found: the hit rate, defined.

As in vLLM, full blocks are cached, those of a prompt and those of what was generated, and a prompt looks up its full
blocks. Its last token is always computed, and the last token of an answer never is. The hit rate is the prompt tokens
found over the prompt tokens of all requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from kvsim.scenario.content import content_of
from policies.content import Content, Key
from workloads import Prefixes, Request
from workloads.reuse import Reuse

UNKNOWN_PREFIXES = "unknown: this trace does not say which prompts share a beginning"
"""Stands where a hit rate would, for people."""


class Lookup(NamedTuple):
    """What a request looks up in a prefix cache, and what is cached once it has been served."""

    tokens: int
    """Prompt tokens that are looked up."""
    keys: Sequence[Key]
    """The keys of all blocks that are cached in the end, in order."""
    asked: int
    """Number of keys, from the first, that are looked up."""
    kind: int = 0
    """What kind of request it is (``Request.kind``)."""


def lookup_of(request: Request, block_size: int, prefixes: Prefixes) -> Lookup:
    """Return what a request looks up and leaves.

    Where a trace names the blocks of prompts, as Mooncake's does, these are counted as its publishers do: the last one
    as a whole, even if it is partial, and nothing of the answer.
    """
    if prefixes == "blocks":
        keys = Content(request.content).keys(block_size, -(-request.prompt_tokens // block_size))
        return Lookup(len(keys) * block_size, keys, len(keys), request.kind)
    content = content_of(request)
    asked = (request.prompt_tokens - 1) // block_size
    return Lookup(request.prompt_tokens, content.lookup_keys(block_size, content.n), asked, request.kind)


def hit_rate(found: int, looked_up: int, prefixes: Prefixes) -> float | None:
    """Return the share of the tokens looked up that were found; None if there were none, or if it is not known."""
    return found / looked_up if looked_up and prefixes != "unknown" else None


class InfiniteCache:
    """A prefix cache that never evicts. Memory grows with the different blocks of texts that may be shared."""

    def __init__(self, block_size: int, prefixes: Prefixes):
        self._block_size, self._prefixes = block_size, prefixes
        self._asked_for: dict[Key, bool] = {}
        """Each cached block, and whether it has been looked up."""
        self._tokens = self._blocks = self._distinct = self._found = 0
        self.capacity = 0
        """Number of blocks that a real cache needs to find as much: a prompt's last block, if full, is stored anew."""

    def serve(self, request: Request) -> Lookup:
        """Look a request up, then cache what it leaves."""
        lookup = lookup_of(request, self._block_size, self._prefixes)
        known, keys, asked, found, old = self._asked_for, lookup.keys, lookup.asked, 0, 0
        if request.content:  # A block is known, or was looked up, only where all blocks before it are and were.
            found = bisect_left(keys, True, hi=asked, key=lambda key: key not in known)
            old = bisect_left(keys, True, hi=found, key=lambda key: not known[key])
            known.update(dict.fromkeys(keys[old:asked], True))
            for key in keys[asked:]:
                known.setdefault(key, False)
        self._tokens += lookup.tokens
        self._blocks += asked
        self._distinct += asked - old
        self._found += found
        self.capacity += len(keys) - found
        return lookup

    @property
    def reuse(self) -> Reuse:
        """What has been found so far."""
        found = self._found * self._block_size
        rate = hit_rate(found, self._tokens, self._prefixes)
        return Reuse(self._block_size, self._blocks, self._distinct, self._tokens, found, rate)
