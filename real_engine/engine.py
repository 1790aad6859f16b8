"""The real engine: a backend that does each step's work on a real cache, and times it."""

from __future__ import annotations

import time

import numpy as np

from policies import Kernel, MicroBatch, Moves
from real_engine import kernels
from real_engine.model import Floats, Ints, Transformer
from workloads import Request, stream


class Engine:
    """A transformer over K and V arrays that are indexed by cell.

    Placements and moves are applied as the policy gave them; what is computed is right only if they are.
    """

    wants_views = True

    def __init__(self, model: Transformer, n_cells: int, kernel: Kernel, seed: int):
        self.model = model
        self.kernel = kernel
        self.tokens: dict[int, list[int]] = {}
        """Of each sequence: its prompt and what it has generated so far."""
        self.texts: dict[int, list[int]] = {}
        """Of each request number: prompt and output of whoever began last; kept after the end."""
        self._seed = seed
        s = model.shape
        shape = (s.n_layers, s.n_kv_heads, n_cells, s.d_head)
        self.keys: Floats = np.zeros(shape, dtype=np.float32)
        """Shape (n_layers, n_kv_heads, n_cells, d_head), rotated by the positions of their tokens."""
        self.values: Floats = np.zeros(shape, dtype=np.float32)

    def prompt(self, request: Request) -> list[int]:
        """The request's prompt: random token ids, the same in every run with this seed."""
        rng = stream(self._seed, f"prompt {request.id}")
        return [int(t) for t in rng.integers(0, self.model.shape.vocabulary, request.prompt_tokens)]

    def begin(self, seq: int, request: Request) -> None:
        """The sequence starts with the request's prompt."""
        self.tokens[seq] = self.texts[request.id] = self.prompt(request)

    def forward(self, batch: MicroBatch) -> float:
        """Run the pass and return its seconds; where a chunk ends its sequence, greedily append a token."""
        began = time.perf_counter()
        self._apply(batch.moves)
        tokens = np.array(
            [t for seq, start, n in batch.chunks for t in self.tokens[seq][start : start + n]], dtype=np.int64
        )
        logits = self.run(tokens, batch)
        for (seq, start, n), best in zip(batch.chunks, logits.argmax(axis=1).tolist(), strict=True):
            if start + n == len(self.tokens[seq]):
                self.tokens[seq].append(best)
        return time.perf_counter() - began

    def move(self, moves: Moves) -> float:
        """Carry out the moves and return their seconds."""
        began = time.perf_counter()
        self._apply(moves)
        return time.perf_counter() - began

    def run(self, tokens: Ints, batch: MicroBatch) -> Floats:
        """Logits after the last token of each chunk; shape (n_chunks, vocabulary)."""
        positions = np.concatenate([v.positions[-c.n :] for c, v in zip(batch.chunks, batch.views, strict=True)])
        outputs = np.cumsum([chunk.n for chunk in batch.chunks]) - 1
        if self.kernel == "masked":
            mask = kernels.causal_mask(batch.chunks, batch.views, batch.reads.span)

        def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
            keys, values = self.keys[layer], self.values[layer]
            keys[:, batch.cells] = k.transpose(1, 0, 2)
            values[:, batch.cells] = v.transpose(1, 0, 2)
            if self.kernel == "masked":
                return kernels.masked(q, keys, values, mask)
            return kernels.gather(q, keys, values, batch.chunks, batch.views)

        return self.model.forward(tokens, positions, outputs, attend)

    def _apply(self, moves: Moves) -> None:
        if moves.n_runs:
            moves.apply(self.keys, axis=2)
            moves.apply(self.values, axis=2)


def generate_without_cache(model: Transformer, prompt: list[int], n: int) -> list[int]:
    """``n`` greedy tokens, everything recomputed from scratch for each: what every policy must agree with."""
    text = list(prompt)
    for _ in range(n):
        tokens = np.array(text, dtype=np.int64)
        everything = np.arange(len(text))
        hidden = np.triu(np.full((len(text), len(text)), -np.inf, dtype=np.float32), k=1)

        def attend(layer: int, q: Floats, k: Floats, v: Floats, mask: Floats = hidden) -> Floats:
            return kernels.masked(q, k.transpose(1, 0, 2), v.transpose(1, 0, 2), mask)

        logits = model.forward(tokens, everything, everything[-1:], attend)
        text.append(int(logits[0].argmax()))
    return text[len(prompt) :]
