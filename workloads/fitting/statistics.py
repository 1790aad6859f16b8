"""What a request stream is like: how bursty, how long, how much is said again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from workloads.generators.lengths import FloatArray, IntArray
from workloads.request import Segment, Workload, WorkloadError

WINDOWS_S = (1.0, 60.0)
"""Seconds over which arrivals are counted to tell how bursty they are."""
_FEW_WINDOWS = 10
"""With fewer windows their variance says nothing."""
_TICKING = 0.05
"""Share of gaps of no length from which on a clock is held to tick coarsely."""
_FINE_S = 1e-6
"""Steps below this are no clock's, but of the arithmetic that made the times."""
_MOST = 10**8
"""Requests that can be described: a hundred million take 2.4 GB."""


class StreamColumns(NamedTuple):
    """A request stream by column; shape (requests,) each."""

    arrivals_s: FloatArray
    """In order, from the first one on."""
    prompt_tokens: IntArray
    output_tokens: IntArray

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrivals_s[-1])


class Spread(NamedTuple):
    """How a length is distributed, in tokens."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: int
    mu: float
    """Mean of the logarithms: the likeliest lognormal's."""
    sigma: float
    """Their deviation."""

    @classmethod
    def of(cls, tokens: IntArray) -> Spread:
        """Of lengths, shape (n,)."""
        logs = np.log(tokens)
        p50, p95, p99 = np.quantile(tokens, (0.5, 0.95, 0.99)).tolist()
        return cls(float(tokens.mean()), p50, p95, p99, int(tokens.max()), float(logs.mean()), float(logs.std()))


class Reuse(NamedTuple):
    """What an unbounded prefix cache would find, in order of arrival."""

    segments: int
    """Pieces of text (a trace's blocks) that the prompts are made of."""
    found: int
    """Pieces that were there whole, with all before them."""
    found_tokens: float
    """Share of the prompts' tokens in them."""

    @property
    def distinct(self) -> int:
        """Pieces that were new, or longer than before, each with all that precedes it."""
        return self.segments - self.found

    @property
    def share(self) -> float:
        """Of all pieces, those found."""
        return self.found / self.segments if self.segments else 0.0


class Statistics(NamedTuple):
    """What ``kvsim workload describe`` says."""

    requests: int
    duration_s: float
    """From the first arrival to the last."""
    rate: float | None
    """Requests/s; None where all arrive at once."""
    gap_cv: float | None
    """Coefficient of variation of the gaps between arrivals: 1 is Poisson, above is bursty."""
    dispersion: dict[float, float | None]
    """Variance over mean of the arrivals in windows of so many seconds; None where there are too few windows."""
    tick_s: float | None
    """The clock's step, where many requests have the same time: burstiness below it cannot be read off."""
    prompt: Spread
    output: Spread
    correlation: float | None
    """Spearman's rank correlation of prompt and output; None where one of them never changes."""
    sessions: int
    """Conversations; 0: the stream tells of none."""
    reuse: Reuse | None
    """None: the stream does not say what its prompts say."""


def describe(workload: Workload) -> Statistics:
    """Reads the whole stream. Raises ``WorkloadError`` for a closed loop, whose arrivals are made by the server."""
    columns, sessions, reuse = read_columns(workload)
    tick = tick_of(columns.arrivals_s)
    gaps = np.diff(columns.arrivals_s)
    spans = len(gaps) > 0 and columns.duration_s > 0
    return Statistics(
        requests=len(columns.arrivals_s),
        duration_s=columns.duration_s,
        rate=len(columns.arrivals_s) / columns.duration_s if spans else None,
        gap_cv=float(gaps.std() / gaps.mean()) if spans else None,
        dispersion={w: dispersion(columns.arrivals_s, w) for w in WINDOWS_S},
        tick_s=tick,
        prompt=Spread.of(columns.prompt_tokens),
        output=Spread.of(columns.output_tokens),
        correlation=rank_correlation(columns.prompt_tokens, columns.output_tokens),
        sessions=sessions,
        reuse=reuse,
    )


def read_columns(workload: Workload) -> tuple[StreamColumns, int, Reuse | None]:
    """The stream by column, its sessions, and what a prefix cache would find. Raises ``WorkloadError``.

    A turn of a session counts as arriving with its session and the pauses before it: what the server adds to that is
    not known without one.
    """
    if workload.users is not None:
        raise WorkloadError("a closed loop has no arrivals of its own: its users wait for the server's answers")
    if workload.n_requests > _MOST:
        raise WorkloadError(f"{workload.n_requests:,} requests are too many to describe; {_MOST:,} are accepted")
    texts = _Texts()
    arrivals, prompts, outputs = array("d"), array("q"), array("q")
    session, sessions, now = None, 0, 0.0
    for request in workload:
        if request.session is None or request.session != session:
            now = request.arrival_s
            sessions += request.session is not None
        else:
            now += request.think_s
        session = request.session
        arrivals.append(now)
        prompts.append(request.prompt_tokens)
        outputs.append(request.output_tokens)
        if request.content:
            texts.read(request.content, request.prompt_tokens, request.answer)
    at = np.array(arrivals)
    order = np.argsort(at, kind="stable")
    columns = StreamColumns(at[order] - at[order[0]], np.array(prompts)[order], np.array(outputs)[order])
    return columns, sessions, texts.reuse(int(columns.prompt_tokens.sum()))


def dispersion(arrivals_s: FloatArray, window_s: float) -> float | None:
    """Variance over mean of the arrivals in successive windows; what lies behind the last full one is left out."""
    since = arrivals_s - arrivals_s[0]
    windows = int(since[-1] / window_s)
    if windows < _FEW_WINDOWS:
        return None
    inside = since[since <= windows * window_s]
    which = np.minimum((inside / window_s).astype(np.int64), windows - 1)
    # Windows in which nothing comes are not held: a trace may have any number of them.
    counts = np.unique(which, return_counts=True)[1].astype(np.float64)
    mean = len(inside) / windows
    return float((counts @ counts) / windows - mean**2) / mean


def tick_of(arrivals_s: FloatArray) -> float | None:
    """The smallest step of a clock that gives many requests the same time, in seconds; None for a fine one."""
    gaps = np.diff(arrivals_s)
    moved = gaps[gaps > 0]
    if len(moved) == 0 or len(moved) > (1 - _TICKING) * len(gaps):
        return None
    tick = float(moved.min())
    return tick if tick >= _FINE_S else None


def unticked(arrivals_s: FloatArray, tick_s: float, rng: np.random.Generator) -> FloatArray:
    """The same arrivals, each at any moment of the tick that it fell into, so that no two come at once; shape (n,).

    That is what a Poisson process does within a tick: of all that are consistent with the clock, the least told.
    """
    return np.sort(arrivals_s + tick_s * rng.random(len(arrivals_s)))


def rank_correlation(prompts: IntArray, outputs: IntArray) -> float | None:
    """Spearman's, between -1 and 1."""
    if len(prompts) < 2 or prompts.min() == prompts.max() or outputs.min() == outputs.max():
        return None
    return float(stats.spearmanr(prompts, outputs).statistic)


class _Texts:
    """Every beginning that was said so far, as a tree: of each place in it, what may come next and how much of it."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int, int, int], tuple[int, int]] = {}
        """By the number of the piece before and how much of it there was, source and start: a number, and the most
        tokens of it so far."""
        self._asked = self._found = self._tokens = 0

    def read(self, content: Sequence[Segment], prompt_tokens: int, answer: Segment) -> None:
        """A prompt, and the answer behind it, which a later prompt may quote."""
        place, left, known = (0, 0), prompt_tokens, True
        for piece in content:
            if left <= 0:
                break
            self._asked += 1
            place, before = self._enter(place, piece)
            if known:
                self._tokens += min(piece.n, left, before)
            known = known and before >= piece.n
            self._found += known
            left -= piece.n
        self._enter(place, answer)

    def _enter(self, place: tuple[int, int], piece: Segment) -> tuple[tuple[int, int], int]:
        """The place behind a piece, and how many tokens of it had been there."""
        source, start, n = piece
        key = (*place, source, start)
        number, before = self._next.get(key, (len(self._next) + 1, 0))
        if n > before:
            self._next[key] = (number, n)
        return (number, n), before

    def reuse(self, prompt_tokens: int) -> Reuse | None:
        if not self._asked:
            return None
        return Reuse(self._asked, self._found, self._tokens / prompt_tokens)
