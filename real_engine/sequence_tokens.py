"""What sequences say: the tokens that a real backend computes, prompts and answers."""

from __future__ import annotations

import zlib

import numpy as np

from policies import Chunk
from real_engine.arrays import IntArray
from workloads import Request, named_rng


class SequenceTokens:
    """The tokens of every sequence and of every request; a real backend builds on it."""

    predictor = None
    """A real backend measures steps, and cannot price them ahead of time."""

    def __init__(self, vocabulary: int, seed: int):
        self.tokens: dict[int, list[int]] = {}
        """Of each sequence: the tokens at its positions, prompt and what it has generated so far."""
        self.texts: dict[int, list[int]] = {}
        """Of each request number: prompt and output of whoever began last; kept after the end."""
        self.best: dict[int, list[int]] = {}
        """Of each request number: the likeliest token wherever it has said one."""
        self._request_of: dict[int, Request] = {}
        self._vocabulary = vocabulary
        self._seed = seed

    def prompt(self, request: Request) -> list[int]:
        """The request's prompt: random token ids, the same in every run with this seed; equal where segments are."""
        if request.content:
            tokens = [self._text(*segment) for segment in request.content]
            return [int(t) for t in np.concatenate(tokens)[: request.prompt_tokens]]
        rng = named_rng(self._seed, f"prompt {request.id}")
        return [int(t) for t in rng.integers(0, self._vocabulary, request.prompt_tokens)]

    def begin(self, seq: int, request: Request, *, again: bool = False) -> None:
        """The sequence starts with the request's prompt; ``again``: and with what it has said so far."""
        if not again:
            self.texts[request.id] = self.prompt(request)
            self.best[request.id] = []
        self.tokens[seq] = list(self.texts[request.id])
        self._request_of[seq] = request

    def discard(self, seq: int, start: int, stop: int) -> None:
        """Forget the tokens at positions ``[start, stop)``; those behind move up (context shift)."""
        del self.tokens[seq][start:stop]

    def chunk_tokens(self, chunk: Chunk) -> list[int]:
        """The tokens that a chunk runs."""
        return self.tokens[chunk.seq][chunk.start : chunk.start + chunk.n]

    def reaches_end(self, chunk: Chunk) -> bool:
        """Whether a token follows a chunk: it reaches the end of what its sequence has said."""
        return chunk.start + chunk.n == len(self.tokens[chunk.seq])

    def append_token(self, chunk: Chunk, best: int) -> None:
        """Where a chunk ends its sequence, append a token to it.

        It is ``best``, the likeliest one, unless others may quote the answer, as the next turn of a session does: then
        its text is given by the request, so that what is shared does not depend on rounding.
        """
        if not self.reaches_end(chunk):
            return
        request = self._request_of[chunk.seq]
        said = self.best[request.id]
        token = int(self._text(request.answer.source, len(said), 1)[0]) if request.content else best
        said.append(best)
        self.tokens[chunk.seq].append(token)
        self.texts[request.id].append(token)

    def _text(self, source: int, start: int, n: int) -> IntArray:
        """Tokens of a text by its number: a mixing function (splitmix64) of the text, the place and the seed."""
        x = np.arange(start, start + n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(zlib.crc32(f"{self._seed} {source}".encode()) << 32)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((x ^ (x >> np.uint64(31))) % np.uint64(self._vocabulary)).astype(np.int64)
