"""The real engine: a backend that computes each step on a real KV cache and times it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from kvsim.model.engine_shapes import Storage
from policies import Chunk, Group, HostCopy, Kernel, MicroBatch, Moves, Shift, Transfer
from policies.cells.reads import TILE
from real_engine import kernels
from real_engine.arrays import FloatArray, IntArray
from real_engine.measured_attention import MeasuredAttention
from real_engine.model import Transformer, rotary_table, rotate
from real_engine.sequence_tokens import SequenceTokens
from real_engine.storage import carry_out, store
from workloads import named_rng


class Engine(SequenceTokens):
    """A transformer over K and V arrays that are indexed by cell.

    Placements, moves and rotations are applied as the policy planned them; the logits are right only if the plan is.
    """

    wants_views = True

    def __init__(
        self,
        model: Transformer,
        groups: Sequence[Group],
        kernel: Kernel,
        seed: int,
        *,
        type_k: Storage = "f32",
        type_v: Storage = "f32",
        attention: MeasuredAttention | None = None,
    ):
        """``attention``: told after each pass what attention each token received; None: nothing is collected."""
        super().__init__(model.shape.vocabulary, seed)
        self.model = model
        self.kernel = kernel
        self.groups = tuple(groups)
        self._types = (type_k, type_v)
        self._attention = attention
        s = model.shape
        self.group_of = layer_groups(s.n_layers, groups)
        """Cache group of each layer."""
        sizes = [-(-groups[g].cells // TILE) * TILE for g in self.group_of]
        hosts = [groups[g].host_cells for g in self.group_of]
        self.keys = [store(type_k, s, n) for n in sizes]
        """Keys of each layer, rotated by their positions, in the cells of its group rounded up to whole tiles."""
        self.values = [store(type_v, s, n) for n in sizes]
        self.host_keys = [store(type_k, s, n) for n in hosts]
        """Keys of each layer in the host tier."""
        self.host_values = [store(type_v, s, n) for n in hosts]

    def fill(self) -> None:
        """Write random numbers into every cell, as in a server that has run for a while.

        Reading memory that was never written to would be faster: Linux maps all of it to one page of zeros.
        """
        rng = named_rng(self._seed, "cells")
        for kept in (*self.keys, *self.values):
            s = self.model.shape
            kept.write(slice(0, kept.cells), rng.standard_normal((s.n_kv_heads, kept.cells, s.d_head), np.float32))

    def forward(self, batch: MicroBatch) -> float:
        """Run the pass and return its seconds; a chunk that reaches its sequence's end gets the next token appended."""
        began = time.perf_counter()
        self.prepare(batch)
        tokens = np.array([token for chunk in batch.chunks for token in self.chunk_tokens(chunk)], dtype=np.int64)
        logits = self.run(tokens, batch)
        for chunk, best in zip(batch.chunks, logits.argmax(axis=1).tolist(), strict=True):
            self.append_token(chunk, best)
        return time.perf_counter() - began

    def prepare(self, batch: MicroBatch) -> None:
        """Do what the policy asks for before a pass: copies to and from the host tier, moves and rotations."""
        for group, place in enumerate(batch.places):
            self._transfer(place.transfers, group)
            self._apply(place.moves, group)
            self._rotate(place.shift, group)

    def step(self, step: Sequence[Chunk], batches: Sequence[MicroBatch]) -> Sequence[float]:
        """Run the passes in order and return the seconds of each."""
        return [self.forward(batch) for batch in batches]

    def move(self, moves: Moves) -> float:
        """Carry out moves in the first group and return their seconds."""
        began = time.perf_counter()
        self._apply(moves, 0)
        return time.perf_counter() - began

    def transfer(self, transfers: Sequence[Transfer]) -> float:
        """Copy between the first group and its host tier, and return the seconds."""
        began = time.perf_counter()
        self._transfer(transfers, 0)
        return time.perf_counter() - began

    def copy(self, copies: Sequence[HostCopy]) -> float:
        """Copy a whole sequence between its cells and the host tier, which grows as needed; return the seconds."""
        began = time.perf_counter()
        for group, copy in enumerate(copies):
            self._apply(copy.moves, group)
            self._rotate(copy.shift, group)
            self._extend_host(group, max((host + n for _, _, host, n in copy.transfers), default=0))
            self._transfer(copy.transfers, group)
        return time.perf_counter() - began

    def rotate(self, shift: Shift) -> float:
        """Rotate keys in the first group and return the seconds."""
        began = time.perf_counter()
        self._rotate(shift, 0)
        return time.perf_counter() - began

    def run(self, tokens: IntArray, batch: MicroBatch) -> FloatArray:
        """Logits after the last token of each chunk; shape (n_chunks, vocabulary)."""
        views = batch.views
        positions = np.concatenate([v.positions[-c.n :] for c, v in zip(batch.chunks, views, strict=True)])
        outputs = np.cumsum([chunk.n for chunk in batch.chunks]) - 1
        selections = [
            kernels.select(self.kernel, batch.chunks, place.views, int(place.reads.scanned.max()), group)
            for place, group in zip(batch.places, self.groups, strict=True)
        ]
        received: list[FloatArray] | None = None
        if self._attention is not None:
            tiles = [-(-group.cells // TILE) * TILE for group in self.groups]
            received = [np.zeros((len(tokens), cells), dtype=np.float32) for cells in tiles]

        def attend(layer: int, q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
            group = self.group_of[layer]
            keys, values, cells = self.keys[layer], self.values[layer], batch.places[group].cells
            keys.write(cells, k.transpose(1, 0, 2))
            values.write(cells, v.transpose(1, 0, 2))
            collected = None if received is None else received[group]
            return kernels.attend(q, keys.read, values.read, k.shape[1], selections[group], collected)

        logits = self.model.forward(tokens, positions, outputs, attend)
        if self._attention is not None and received is not None:
            self._attention.note(batch, received)
        return logits

    def _layers(self, group: int) -> list[int]:
        """The layers of a cache group."""
        return [layer for layer, own in enumerate(self.group_of) if own == group]

    def _extend_host(self, group: int, cells: int) -> None:
        """Give a group's host tier room for at least that many cells."""
        for kept, kind in zip((self.host_keys, self.host_values), self._types, strict=True):
            for layer in self._layers(group):
                old = kept[layer]
                if old.cells < cells:
                    kept[layer] = store(kind, self.model.shape, max(cells, 2 * old.cells))
                    for before, after in zip(old.arrays, kept[layer].arrays, strict=True):
                        after[:, : old.cells] = before

    def _transfer(self, transfers: Sequence[Transfer], group: int) -> None:
        if not transfers:
            return
        stores = ((self.keys, self.host_keys), (self.values, self.host_values))
        pairs = [(here[layer], there[layer]) for layer in self._layers(group) for here, there in stores]
        for to_host, cell, host, n in transfers:
            for here, there in pairs:
                for near, far in zip(here.arrays, there.arrays, strict=True):
                    if to_host:
                        far[:, host : host + n] = near[:, cell : cell + n]
                    else:
                        near[:, cell : cell + n] = far[:, host : host + n]

    def _apply(self, moves: Moves, group: int) -> None:
        if moves.n_runs:
            kept = [kept[layer] for layer in self._layers(group) for kept in (self.keys, self.values)]
            carry_out([array for one in kept for array in one.arrays], moves)

    def _rotate(self, shift: Shift, group: int) -> None:
        """Rotate keys of tokens whose position has changed (llama.cpp's K-shift)."""
        if len(shift.cells):
            shape = self.model.shape
            cos, sin = rotary_table(shift.deltas, shape.d_head, shape.rope_base)
            for layer in self._layers(group):
                keys = self.keys[layer].read(shift.cells).transpose(1, 0, 2)
                self.keys[layer].write(shift.cells, rotate(keys, cos, sin).transpose(1, 0, 2))


def layer_groups(n_layers: int, groups: Sequence[Group]) -> tuple[int, ...]:
    """Cache group of each layer: the groups' shares of the layers, spread evenly."""
    given = [0] * len(groups)
    chosen = []
    for layer in range(n_layers):
        owed = [group.share * (layer + 1) - given[i] for i, group in enumerate(groups)]
        chosen.append(max(range(len(groups)), key=lambda i: owed[i]))
        given[chosen[-1]] += 1
    return tuple(chosen)
