"""The tokens that a real backend computes: prompts and generated answers."""

from __future__ import annotations

import zlib

import numpy as np

from policies import Chunk
from policies.placement.rule import PassReads
from real_engine.arrays import IntArray
from workloads import Request, named_rng


class SequenceTokens:
    """Base of the real backends: the tokens of every sequence and every request."""

    price = None
    """None: a real backend measures passes, and prices none."""

    def __init__(self, vocabulary: int, seed: int):
        self.tokens: dict[int, list[int]] = {}
        """By sequence: the tokens at its positions, prompt and output so far."""
        self.texts: dict[int, list[int]] = {}
        """By request number: prompt and output, kept after the request has ended."""
        self.best: dict[int, list[int]] = {}
        """By request number: the most likely token at each output position."""
        self._request_of: dict[int, Request] = {}
        self._vocabulary = vocabulary
        self._seed = seed

    def prompt(self, request: Request) -> list[int]:
        """The request's prompt: random token ids that depend on the seed; equal segments have equal tokens."""
        if request.content:
            tokens = [self._text(*segment) for segment in request.content]
            return [int(t) for t in np.concatenate(tokens)[: request.prompt_tokens]]
        rng = named_rng(self._seed, f"prompt {request.id}")
        return [int(t) for t in rng.integers(0, self._vocabulary, request.prompt_tokens)]

    def begin(self, seq: int, request: Request, *, again: bool = False) -> None:
        """Start a sequence with the request's prompt and, if it runs ``again``, with its output so far."""
        if not again:
            self.texts[request.id] = self.prompt(request)
            self.best[request.id] = []
        self.tokens[seq] = list(self.texts[request.id])
        self._request_of[seq] = request

    def discard(self, seq: int, start: int, stop: int) -> None:
        """Remove the tokens at positions ``[start, stop)`` and move later ones down (context shift)."""
        del self.tokens[seq][start:stop]

    def before_pass(self, work: PassReads) -> float:
        """Nothing: what is done before a pass is measured with it."""
        return 0.0

    def chunk_tokens(self, chunk: Chunk) -> list[int]:
        """Tokens of a chunk."""
        return self.tokens[chunk.seq][chunk.start : chunk.start + chunk.n]

    def reaches_end(self, chunk: Chunk) -> bool:
        """Whether a chunk reaches the end of its sequence, so that a token is generated after it."""
        return chunk.start + chunk.n == len(self.tokens[chunk.seq])

    def append_token(self, chunk: Chunk, best: int) -> None:
        """Append a token to a chunk's sequence if the chunk reaches its end.

        The token is ``best``, the most likely one, unless later requests may quote the answer, as the next turn of a
        session does. The request then prescribes the answer, so that shared text does not depend on rounding.
        """
        if not self.reaches_end(chunk):
            return
        request = self._request_of[chunk.seq]
        likeliest = self.best[request.id]
        token = int(self._text(request.answer.source, len(likeliest), 1)[0]) if request.content else best
        likeliest.append(best)
        self.tokens[chunk.seq].append(token)
        self.texts[request.id].append(token)

    def _text(self, source: int, start: int, n: int) -> IntArray:
        """Tokens of a text by its number: a hash (splitmix64) of the number, the position and the seed."""
        x = np.arange(start, start + n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(zlib.crc32(f"{self._seed} {source}".encode()) << 32)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((x ^ (x >> np.uint64(31))) % np.uint64(self._vocabulary)).astype(np.int64)
