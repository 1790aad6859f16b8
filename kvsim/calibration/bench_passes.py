"""The forward passes behind what a benchmark timed, and what each part of them takes by a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import ArrayLike

from kvsim.calibration.bench_files.points import BenchPoint
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.physics import Need, PassPhysics
from kvsim.costs.profile import Profile
from kvsim.costs.tables import FloatArray
from policies import Group
from policies.placement.rule import PassReads

_CHUNKS = 128
"""Passes of one prompt by which many more of them are priced."""
_STEPS = 8
"""Steps by which many that decode, over ever more cells, are priced."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine puts into a pass at most."""

    tokens: int
    sequences: int
    cells: int
    """Cells of all sequences together."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Forward passes that are alike."""

    weight: float
    """How many of them there are."""
    prompts: tuple[tuple[int, int], ...] = ()
    """Tokens of each chunk of a prompt, and the cells behind its last token."""
    singles: int = 0
    """Sequences that decode."""
    cells: float = 0.0
    """Cells of each of them on the mean."""

    @property
    def tokens(self) -> int:
        """Tokens of the pass."""
        return sum(n for n, _ in self.prompts) + self.singles

    @property
    def chunks(self) -> int:
        """Sequences in the pass."""
        return len(self.prompts) + self.singles


def passes_of(point: BenchPoint, limits: Limits) -> list[Pass]:
    """The passes that a point has timed; of a server, those of a mean step."""
    tokens = point.ubatch or limits.tokens
    many = max(round(point.sequences), 1)
    if point.kind == "serve":
        return _step(point, tokens)
    if point.kind == "prompt":
        return list(_prompts(many, point.prompt, point.depth, tokens))
    if point.kind == "decode":
        return list(_decodes(many, point.depth, point.new))
    # Requests that find no room wait for those before them.
    room = min(limits.sequences, max(limits.cells // (point.prompt + point.new), 1))
    at_once = min(many, room) if point.set_up.engine == "vllm" else many
    # vLLM's prompts bring the first token.
    new = point.new - (point.set_up.engine == "vllm")
    once = [*_prompts(at_once, point.prompt, point.depth, tokens)]
    once += _decodes(at_once, point.depth + point.prompt, new) if new else []
    return [Pass(each.weight * many / at_once, each.prompts, each.singles, each.cells) for each in once]


def _prompts(sequences: int, n: int, depth: int, most: int) -> Iterator[Pass]:
    """Prompts one after the other, or several in a pass where these are short."""
    if n > _CHUNKS * most:
        for i in range(_CHUNKS):
            seen = depth + round((i + 0.5) * n / _CHUNKS) + most // 2
            yield Pass(sequences * n / most / _CHUNKS, ((most, seen),))
        return
    if n > most:
        for start in range(0, n, most):
            tokens = min(most, n - start)
            yield Pass(sequences, ((tokens, depth + start + tokens),))
        return
    together = min(most // n, sequences)
    whole, rest = divmod(sequences, together)
    yield Pass(whole, ((n, depth + n),) * together)
    if rest:
        yield Pass(1, ((n, depth + n),) * rest)


def _decodes(sequences: int, depth: int, steps: int) -> Iterator[Pass]:
    """Steps, each of which sees a cell more than the one before."""
    parts = min(steps, _STEPS)
    for i in range(parts):
        yield Pass(steps / parts, singles=sequences, cells=depth + 1 + (i + 0.5) * steps / parts - 0.5)


def _step(point: BenchPoint, most: int) -> list[Pass]:
    """A step of a server: with the part of a prompt in as many as prompts begin, and without in the others."""
    cells = point.prompt + point.new / 2
    parts = ceil(point.prompt / most)
    share = min(point.prompts_per_step * parts, 1.0)
    tokens = min(point.prompt, most)
    low = int(point.sequences)
    found = []
    for singles, part in ((low, 1 - (point.sequences - low)), (low + 1, point.sequences - low)):
        if part > 0:
            found.append(Pass(part * (1 - share), singles=singles, cells=cells))
            if share:
                seen = tokens + (point.prompt - tokens) // 2
                found.append(Pass(part * share, ((tokens, seen),), singles, cells))
    return found


@dataclass(frozen=True)
class Parts:
    """What the passes of a point take, part by part; arrays over the passes, in seconds, times how many there are."""

    tokens: FloatArray
    chunks: FloatArray
    work: FloatArray
    """All but attention and head."""
    head: FloatArray
    decode: FloatArray
    """Attention of sequences that decode."""
    prompt: FloatArray
    """Attention of prompts."""
    fixed: FloatArray
    """What the host adds."""
    floor: FloatArray
    """What passes take at least, while the host prepares the next one."""
    least_s: float
    """What physics allows."""
    evenly_s: float
    """What it allows if tokens choose their experts evenly."""


def least_work(physics: PassPhysics, tokens: ArrayLike) -> Need:
    """What all but attention and head need at least: if all tokens choose the same experts, those of one are read."""
    n = np.asarray(tokens, dtype=float)
    matrices, experts = physics.matrices(n), physics.experts(n)
    one = physics.experts(np.ones_like(n))
    return Need(matrices.reading_s + one.reading_s, matrices.computing_s + experts.computing_s)


class PartPrices:
    """Prices the parts of passes by a profile of a device."""

    def __init__(self, profile: Profile, physics: PassPhysics):
        self._profile, self._physics = profile, physics
        caching = sum(group.layers for group in physics.shape.cells)
        self._groups = [Group(0, group.window, group.layers / caching) for group in physics.shape.cells]
        if physics.engine == "vllm":
            self._groups = [Group(0)]
        elif len({group.window for group in self._groups}) == 1:
            self._groups = [Group(0, self._groups[0].window)]
        self._price = PassPrice(profile, profile.own_kernel, self._groups)

    def parts(self, passes: Sequence[Pass]) -> Parts:
        """What the parts of these passes take."""
        rows = np.array([[*self._of(each)] for each in passes])
        weight = np.array([each.weight for each in passes])
        tokens, chunks, *seconds = rows.T
        work, head, decode, prompt, fixed, floor, least, evenly = (weight * each for each in seconds)
        parts = (tokens, chunks, work, head, decode, prompt, fixed, floor)
        return Parts(*parts, float(least.sum()), float(evenly.sum()))

    def seconds(self, passes: Sequence[Pass]) -> float:
        """What these passes take together."""
        return sum(each.weight * self._price.seconds(self._reads(each)) for each in passes)

    def _of(self, one: Pass) -> tuple[float, ...]:
        """The columns of ``Parts``, for one of such passes."""
        price, host = self._price.regime(one.tokens, one.chunks), self._profile.host_share
        sequences_s = 0.0 if host is None else host.sequence_s * one.chunks
        hosts, floor = (0.0, 0.0) if host is None else (host.seconds + sequences_s, host.least_s)
        head = price.chunks_s(one.chunks) - sequences_s
        decode = self._attention(one, Pass(1, singles=one.singles, cells=one.cells)) if one.singles else 0.0
        prompt = self._attention(one, Pass(1, one.prompts)) if one.prompts else 0.0
        if decode and prompt:
            scale = self._attention(one, one) / (decode + prompt)
            decode, prompt = scale * decode, scale * prompt
        return (
            *(one.tokens, one.chunks, price.matrix_s(one.tokens), head, decode, prompt, hosts, floor),
            self._least_s(one, least_work(self._physics, one.tokens)),
            self._least_s(one, self._physics.matrices(one.tokens), self._physics.experts(one.tokens)),
        )

    def _attention(self, of: Pass, only: Pass) -> float:
        """Attention of a part of a pass, as in all of it."""
        price, reads = self._price.regime(of.tokens, of.chunks), self._reads(only)
        return sum(
            group.share * price.attention(only.tokens, only.chunks, read, False)
            for group, read in zip(self._groups, reads.groups, strict=True)
        )

    def _reads(self, one: Pass) -> PassReads:
        reads = PassReads(len(self._groups))
        reads.tokens, reads.chunks = one.tokens, one.chunks
        for group, read in zip(self._groups, reads.groups, strict=True):
            for n, cells in one.prompts:
                seen = min(cells, group.window + n - 1) if group.window else cells
                read.add_chunk(n, seen, seen, 0)
            if one.singles:
                # One scan stands for those of all of them together.
                cells = round(one.singles * (min(one.cells, group.window) if group.window else one.cells))
                read.add_chunk(1, cells, cells, 0)
        return reads

    def _least_s(self, one: Pass, *work: Need) -> float:
        """The longer of all that is read and all that is computed; attention behind windows is left out."""
        physics = self._physics
        needs = [*work, physics.head(one.chunks)]
        if not any(group.window for group in self._groups):
            needs += [physics.decode(one.singles, one.cells)] if one.singles else []
            needs += [physics.prompt(n, cells - (n - 1) / 2) for n, cells in one.prompts]
        return max(
            sum(float(need.reading_s) for need in needs),
            sum(float(need.computing_s) for need in needs),
        )
