"""Measured passes, and which coefficients each of them is charged, how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.costs.pass_price import scans_together
from kvsim.costs.profile import Attention, Coefficient, PassCosts, Regime
from kvsim.costs.records import Record
from kvsim.costs.tables import FloatArray, segments
from policies import Group, Kernel, MicroBatch


class Work(Record):
    """The work of a forward pass, as counts."""

    tokens: int
    scans: tuple[tuple[int, int], ...]
    """Pairs: number of tokens that scan the same cells together, and number of these cells."""
    chunks: int
    runs: int


class Sample(Work):
    """A measured forward pass: its work and its seconds."""

    kernel: Kernel
    further: tuple[Work, ...] = ()
    """Passes that were timed together with it, where an engine takes a step as a whole."""
    seconds: float
    origin: int
    """Number of the server run or trial that the pass was measured in; passes of one origin are held out together."""
    mixed: bool = False
    """Whether it was measured once, in a running server; otherwise it is the median of several passes run alone."""

    @property
    def works(self) -> tuple[Work, ...]:
        """The work of each pass that was timed."""
        return (self, *self.further)


REGIMES: tuple[Regime, ...] = ("decode", "mixed")
"""The regimes of passes."""
LEAST_STEPS = 20
"""Steps of a server of each kind without which nothing is fitted."""
SKIPPING: tuple[Kernel, ...] = ("tiled",)
"""Kernels of llama.cpp that skip masked cells: on a CPU, flash attention goes cell by cell."""


def regime_of(work: Work) -> Regime:
    """The regime of a pass: decode-only if each of its chunks is one token."""
    return "decode" if work.tokens == work.chunks else "mixed"


def kind_of(sample: Sample) -> Regime:
    """The regime of a step: that of a mixed pass if it has one."""
    return "mixed" if any(regime_of(work) == "mixed" for work in sample.works) else "decode"


def work_of(kernel: Kernel, batch: MicroBatch, group: Group, skips: bool = False) -> Work:
    """The work of a pass over a single cache group; ``skips`` as in ``Attention``."""
    reads = batch.reads
    together = ((batch.n_tokens, reads.span),)
    each = reads.useful if skips else reads.scanned
    apart = tuple(zip(reads.tokens.tolist(), each.tolist(), strict=True))
    return Work(
        tokens=batch.n_tokens,
        scans=together if scans_together(kernel, group) else apart,
        chunks=len(batch.chunks),
        runs=int(reads.runs.sum()),
    )


def sample_of(
    kernel: Kernel,
    batches: Sequence[MicroBatch],
    group: Group,
    seconds: float,
    origin: int,
    mixed: bool,
    skips: bool = False,
) -> Sample:
    """A measurement of one pass, or of several that were timed together, over one cache group."""
    first, *further = (work_of(kernel, batch, group, skips) for batch in batches)
    return Sample(**dict(first), kernel=kernel, further=tuple(further), seconds=seconds, origin=origin, mixed=mixed)


@dataclass(frozen=True)
class PassLayout:
    """Which coefficients a fit has, in which order: matrix work by segment, then each kernel's."""

    kernels: tuple[Kernel, ...]
    matmul_knots: tuple[int, ...]
    attention_knots: tuple[int, ...]
    skipping: frozenset[Kernel] = frozenset()
    causal: bool = False
    reads_blocks: bool = False
    """Whether cells are read block by block, as by vLLM, so that a run of them costs nothing."""
    tiles_from: int = 0
    """See ``Attention.tiles_from``."""

    @property
    def width(self) -> int:
        """Number of coefficients."""
        return len(self.matmul_knots) - 1 + len(self.kernels) * self._of_kernel

    @property
    def _of_kernel(self) -> int:
        """Coefficients of one kernel: base, cell, further tokens, tiles, chunk, run."""
        return len(self.attention_knots) + 3 + self._tiles

    @property
    def _tiles(self) -> int:
        return 2 if self.tiles_from else 0

    def design(self, samples: Sequence[Sample], regime: Regime | None = None) -> FloatArray:
        """How often each sample is charged each coefficient; shape (n_samples, n_coefficients).

        ``regime``: only by its passes of this regime.
        """
        works = [
            (i, self.kernels.index(s.kernel), work)
            for i, s in enumerate(samples)
            for work in (s, *s.further)
            if regime is None or regime_of(work) == regime
        ]
        row, kernel = np.array([(i, k) for i, k, _ in works]).T
        tokens, chunks, runs = np.array([(work.tokens, work.chunks, work.runs) for *_, work in works]).T
        matmul = np.zeros((len(samples), len(self.matmul_knots) - 1))
        np.add.at(matmul, row, segments(tokens, self.matmul_knots))
        attention = np.zeros((len(samples), len(self.kernels), self._of_kernel))
        np.add.at(attention[..., 0], (row, kernel), 1)
        np.add.at(attention[..., -2], (row, kernel), chunks)
        np.add.at(attention[..., -1], (row, kernel), runs)
        self._charge_scans(attention, works)
        chunks, runs = attention[..., -2], attention[..., -1]
        # Where each chunk is one run, the two cannot be told apart.
        runs[:, self.reads_blocks | (chunks == runs).all(axis=0)] = 0
        return np.hstack([matmul, attention.reshape(len(samples), -1)])

    def _charge_scans(self, attention: FloatArray, works: Sequence[tuple[int, int, Work]]) -> None:
        """Add the cells that are scanned to the columns of attention; shape (n_samples, n_kernels, coefficients)."""
        scans = np.array([(i, k, n, cells) for i, k, work in works for n, cells in work.scans])
        row, kernel, together = scans[:, :3].T
        cells = scans[:, 3].astype(float)
        if self.causal:
            cells -= (together - 1) / 2
        further = len(self.attention_knots) + 1
        if self.tiles_from:
            tiled = np.where(together >= self.tiles_from, cells, 0.0)
            np.add.at(attention[..., further], (row, kernel), tiled)
            np.add.at(attention[..., further + 1], (row, kernel), tiled * (together - 1))
            cells = cells - tiled
        np.add.at(attention[..., 1], (row, kernel), cells)
        np.add.at(attention[..., 2:further], (row, kernel), cells[:, None] * segments(together, self.attention_knots))

    def costs(self, coefficients: Sequence[Coefficient]) -> PassCosts:
        """The coefficients by name."""
        slopes, width, tiles = len(self.matmul_knots) - 1, self._of_kernel, len(self.attention_knots) - 1
        kernels = {}
        for i, kernel in enumerate(self.kernels):
            base, per_cell, *tables, per_chunk, per_run = coefficients[slopes + i * width : slopes + (i + 1) * width]
            kernels[kernel] = Attention(
                base_s=base,
                per_cell_s=per_cell,
                further_token_s=tuple(tables[:tiles]),
                **self._tiled(tables[tiles:]),
                per_chunk_s=per_chunk,
                per_run_s=per_run,
                skips=kernel in self.skipping,
                causal=self.causal,
            )
        return PassCosts(
            matmul_knots=self.matmul_knots,
            attention_knots=self.attention_knots,
            matmul_slopes_s=tuple(coefficients[:slopes]),
            kernels=kernels,
        )

    def _tiled(self, coefficients: Sequence[Coefficient]) -> dict[str, Any]:
        """The keys of a kernel that has another for large chunks."""
        if not self.tiles_from:
            return {}
        cell, token = coefficients
        return {"tiles_from": self.tiles_from, "tiled_cell_s": cell, "tiled_token_s": token}
