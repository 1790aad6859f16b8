"""A generator fitted to a request stream, beside the stream that it was fitted to."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from pydantic import TypeAdapter
from scipy import stats

import workloads
from kvsim.errors import UserError
from kvsim.results import writable
from kvsim.scenario.workload_sections import AnyWorkload
from workloads.fitting.fits import Candidate, fit_gaps, fit_lengths, quantiles_of
from workloads.fitting.statistics import (
    RequestColumns,
    Statistics,
    describe,
    dispersion,
    read_columns,
    spread_within_ticks,
)
from workloads.generators.lengths import IntArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAR = 0.05
"""Kolmogorov's distance from which on a fitted distribution of lengths is not used, but the lengths' own quantiles."""
_BURSTIER = 1.5
"""The factor by which a model's dispersion may differ from the stream's, at 1 s and at 60 s."""
_SEEDS = 5
_MOST_DRAWN = 50_000
_FEWEST = 20
_DIGITS = 5
_TENTHS = 10
_STEPS = 41
"""Quantiles of the outputs in each tenth of the prompts."""
_ENOUGH = 5 * _STEPS
"""Requests in a tenth, so that its table is a summary of them."""
_UNLIKE = 0.1
"""Mean Kolmogorov's distance, over tenths of the prompts, of the outputs from those that a rank correlation gives: from
here on there is a table for each tenth."""


class ArrivalFit(NamedTuple):
    """A candidate for the arrivals, and what streams drawn from it are like (medians over five seeds)."""

    candidate: Candidate
    gap_cv: float
    dispersion: dict[float, float | None]

    @property
    def label(self) -> str:
        """What it is, in words."""
        c = self.candidate
        return f"{c.kind} of {c.parameters // 2} states" if c.kind == "mmpp" else c.kind

    def off(self, wanted: dict[float, float | None]) -> float:
        """The largest factor by which a dispersion misses the one wanted; 1: none does."""
        both = [(self.dispersion[w], value) for w, value in wanted.items()]
        factors = [max(a / b, b / a) for a, b in both if a and b]
        return max(factors, default=1.0)


class LengthFit(NamedTuple):
    """Candidates for a length, the best first, and what is used."""

    candidates: Sequence[Candidate]
    used: dict[str, Any]
    """A table of a scenario."""
    why: str


@dataclass(frozen=True)
class WorkloadFit:
    """A generator and the stream that it was fitted to."""

    name: str
    stream: RequestColumns
    statistics: Statistics
    """The stream's."""
    arrivals: Sequence[ArrivalFit]
    """The best by AIC first."""
    used: ArrivalFit
    """The one that the generator has."""
    why: str
    """Why that one."""
    prompt: LengthFit
    output: LengthFit
    section: dict[str, Any]
    """The generator, as a ``[workload]`` section."""
    model: RequestColumns
    """A stream drawn from it, of as many requests (50,000 at most)."""
    drawn: Statistics
    """That stream's."""
    notes: tuple[str, ...]
    """What the fit leaves out."""

    @property
    def table(self) -> pd.DataFrame:
        """A row for each candidate: what it is for, its AIC, its distance, and what it makes of the burstiness."""
        rows = [
            {
                "of": "arrivals",
                "kind": fit.candidate.kind,
                "parameters": fit.candidate.parameters,
                "aic": fit.candidate.aic,
                "distance": fit.candidate.distance,
                "gap_cv": fit.gap_cv,
                **{f"dispersion_{w:g}s": value for w, value in fit.dispersion.items()},
                "used": fit is self.used,
            }
            for fit in self.arrivals
        ]
        for name, lengths in (("prompt", self.prompt), ("output", self.output)):
            rows += [
                {
                    "of": name,
                    "kind": c.kind,
                    "parameters": c.parameters,
                    "aic": c.aic,
                    "distance": c.distance,
                    "used": c.kind == lengths.used["kind"],
                }
                for c in lengths.candidates
            ]
        return pd.DataFrame(rows)

    def to_toml(self) -> str:
        """The generator as a section of a scenario, ready to paste."""
        return section_toml(self.section)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        rows = self.table.astype(object).where(self.table.notna(), None).to_dict("records")
        return {
            "name": self.name,
            "trace": statistics_dict(self.statistics),
            "model": statistics_dict(self.drawn),
            "candidates": rows,
            "why": {"arrivals": self.why, "prompt": self.prompt.why, "output": self.output.why},
            "notes": list(self.notes),
            "workload": self.section,
        }

    def plot(self) -> Figure:
        """The stream beside one drawn from the generator."""
        from kvsim.reports.workload_plots import fit_figure

        return fit_figure(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the section, the candidates and the picture; the files written. Raises ``UserError``."""
        target = writable(folder)
        written = [target / "workload.toml", target / "candidates.csv", target / "workload.png"]
        try:
            written[0].write_text(self.to_toml(), encoding="utf-8")
            self.table.to_csv(written[1], index=False)
            self.plot().savefig(written[2], dpi=120)
        except OSError as e:
            raise UserError(f"{target}: cannot write results: {e.strerror}") from None
        return written


def fit(
    workload: workloads.Workload, name: str, *, seed: int = 1, report: Callable[[float], None] = lambda share: None
) -> WorkloadFit:
    """A generator of single requests that is like a stream: its arrivals, its lengths, and how these go together.

    Of the candidates for the arrivals the best by AIC is used among those that are about as bursty as the stream, in
    windows of 1 s and of 60 s; where none is, the one that comes closest: likelihood looks at gaps one by one, queues
    look at crowds. ``report`` is told the share done. Raises ``UserError`` for a stream that is too short.
    """
    statistics = describe(workload)
    stream, sessions, reuse = read_columns(workload)
    if len(stream.arrivals_s) < _FEWEST:
        raise UserError(f"{name}: {len(stream.arrivals_s)} requests are too few to fit; at least {_FEWEST} are needed")
    report(0.1)
    notes = []
    prompt, output = _fit_length(stream.prompt_tokens), _fit_length(stream.output_tokens)
    by_prompt = _fit_by_prompt(stream, statistics.correlation or 0.0, output)
    output = by_prompt or output
    lengths: dict[str, Any] = {"prompt_tokens": prompt.used, "output_tokens": output.used}
    if by_prompt is None and statistics.correlation is not None:
        lengths["correlation"] = round(statistics.correlation, 3)
    requests = len(stream.arrivals_s)
    arrivals = stream.arrivals_s
    if stream.duration_s == 0:
        used = ArrivalFit(Candidate("batch", {}, 0, 0.0), 0.0, statistics.dispersion)
        fitted, why = [used], "all requests come at once"
    else:
        tick = statistics.tick_s
        if tick is not None:
            arrivals = spread_within_ticks(arrivals, tick, workloads.named_rng(seed, "ticks"))
            notes.append(
                f"the clock ticks every {tick:.3g} s, and the requests of a tick come at once: they were strewn over "
                "it, so that the model knows nothing of bursts below it"
            )
        candidates, gaps = fit_gaps(arrivals)
        if gaps < requests - 1:
            notes.append(f"arrivals were fitted to the first {gaps:,} gaps")
        fitted = []
        for done, candidate in enumerate(candidates):
            fitted.append(_drawn(candidate, requests, seed))
            report(0.5 + 0.4 * (done + 1) / len(candidates))
        # Below its tick a clock says nothing of bursts.
        wanted = {w: dispersion(arrivals, w) for w in statistics.dispersion if tick is None or w >= 2 * tick}
        used, why = _choose(fitted, wanted)
    if sessions:
        notes.append(f"{sessions:,} sessions became single requests: what a turn says again is not in the model")
    if reuse is not None and reuse.found:
        notes.append(f"prompts begin alike ({reuse.found_tokens:.0%} of their tokens), which the model does not know")
    keys = {key: _rounded(value) for key, value in used.candidate.keys.items()}
    section = {"kind": used.candidate.kind, **keys, "requests": requests, **lengths}
    model = read_columns(_build({**section, "requests": min(requests, _MOST_DRAWN)}, seed))[0]
    report(1.0)
    return WorkloadFit(
        name, stream, statistics, fitted, used, why, prompt, output, section, model, _of(model), tuple(notes)
    )


def section_toml(section: dict[str, Any], comment: str = "") -> str:
    """A ``[workload]`` section as TOML; tables and long lists broken into lines. ``comment``: lines above it."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()] + ["[workload]"]
    lines += [f"{key} = {_value(value)}" for key, value in section.items() if not isinstance(value, dict)]
    for key, value in section.items():
        if isinstance(value, dict):
            lines += ["", f"[workload.{key}]", *(f"{k} = {_value(v)}" for k, v in value.items())]
    return "\n".join(lines) + "\n"


def statistics_dict(statistics: Statistics) -> dict[str, Any]:
    """The object that ``kvsim workload describe --json`` prints."""
    told = statistics._asdict()
    told["dispersion"] = {f"{w:g}": value for w, value in statistics.dispersion.items()}
    told["prompt"], told["output"] = statistics.prompt._asdict(), statistics.output._asdict()
    reuse = statistics.reuse
    told["reuse"] = None if reuse is None else {**reuse._asdict(), "distinct": reuse.distinct, "share": reuse.share}
    return told


def _fit_length(tokens: IntArray) -> LengthFit:
    candidates = fit_lengths(tokens)
    best = candidates[0]
    if best.distance is not None and best.distance <= FAR:
        keys = {key: _rounded(value) for key, value in best.keys.items()}
        return LengthFit(candidates, {"kind": best.kind, **keys}, f"{best.kind}: distance {best.distance:.3f}")
    why = f"quantiles: the best law by AIC, {best.kind}, is {best.distance:.3f} away, more than {FAR}"
    quantiles, shares = quantiles_of(tokens)
    return LengthFit(candidates, {"kind": "empirical", "quantiles": quantiles, "shares": shares}, why)


def _fit_by_prompt(stream: RequestColumns, correlation: float, output: LengthFit) -> LengthFit | None:
    """Outputs in a table for each tenth of the prompts, where a rank correlation does not tell how they go together."""
    edges = np.unique(np.quantile(stream.prompt_tokens, np.arange(1, _TENTHS) / _TENTHS, method="higher"))
    edges = edges[edges > stream.prompt_tokens.min()].astype(np.int64)
    which = np.searchsorted(edges, stream.prompt_tokens, side="right")
    parts = [stream.output_tokens[which == k] for k in range(len(edges) + 1)]
    if len(edges) == 0 or min(map(len, parts)) < _ENOUGH or len(np.unique(stream.output_tokens)) == 1:
        return None
    # What a Gaussian copula makes of each tenth, from as many draws as there are requests.
    rng = workloads.named_rng(0, "copula")
    r = 2 * np.sin(np.pi * correlation / 6)
    first, second = rng.standard_normal((2, len(which)))
    order = np.argsort(np.argsort(first))
    prompts = np.sort(stream.prompt_tokens)[order]
    outputs = np.sort(stream.output_tokens)[np.argsort(np.argsort(r * first + np.sqrt(1 - r**2) * second))]
    drawn = np.searchsorted(edges, prompts, side="right")
    far = float(np.mean([stats.ks_2samp(parts[k], outputs[drawn == k]).statistic for k in range(len(parts))]))
    if far <= _UNLIKE:
        return None
    tables = []
    for part in parts:
        low, high = int(part.min()), int(part.max())
        quantiles = np.rint(np.quantile(part, np.linspace(0, 1, _STEPS))).astype(np.int64).tolist()
        tables.append({"kind": "fixed", "value": low} if low == high else {"kind": "empirical", "quantiles": quantiles})
    why = (
        f"a table for each tenth of the prompts: by rank correlation alone they are {far:.2f} away, more than {_UNLIKE}"
    )
    return LengthFit(output.candidates, {"kind": "given-prompt", "edges": edges.tolist(), "tables": tables}, why)


def _choose(fitted: Sequence[ArrivalFit], wanted: dict[float, float | None]) -> tuple[ArrivalFit, str]:
    """What is used of candidates in order of AIC, and why."""
    for rank, one in enumerate(fitted):
        if one.off(wanted) <= _BURSTIER:
            if rank == 0:
                return one, f"{one.label}: the best AIC, and about as bursty as the stream"
            return one, f"{one.label}: {fitted[0].label} has a better AIC, but not the stream's burstiness"
    nearest = min(fitted, key=lambda one: one.off(wanted))
    return nearest, f"{nearest.label}: none has the stream's burstiness; this comes closest"


def _drawn(candidate: Candidate, requests: int, seed: int) -> ArrivalFit:
    n = min(requests, _MOST_DRAWN)
    one = {"kind": "fixed", "value": 1}
    section = {"kind": candidate.kind, **candidate.keys, "requests": n, "prompt_tokens": one, "output_tokens": one}
    drawn = [_of(read_columns(_build(section, seed + i))[0]) for i in range(_SEEDS)]
    windows = drawn[0].dispersion
    spread: dict[float, float | None] = {}
    for window in windows:
        values = [value for s in drawn if (value := s.dispersion[window]) is not None]
        spread[window] = float(np.median(values)) if values else None
    return ArrivalFit(candidate, float(np.median([s.gap_cv or 0.0 for s in drawn])), spread)


def _of(columns: RequestColumns) -> Statistics:
    """The statistics of a stream that is there by column."""
    return describe(_Listed(columns))


class _Listed:
    """RequestColumns as a stream."""

    users = None
    notes = ()

    def __init__(self, columns: RequestColumns):
        self._columns = columns
        self.n_requests = len(columns.arrivals_s)

    def __iter__(self) -> Any:
        rows = zip(*(column.tolist() for column in self._columns), strict=True)
        return (workloads.Request(i, *row) for i, row in enumerate(rows))


_SECTION: TypeAdapter[Any] = TypeAdapter(AnyWorkload)


def _build(section: dict[str, Any], seed: int) -> workloads.Workload:
    built: workloads.Workload = _SECTION.validate_python(section).build(seed, Path())
    return built


def _rounded(value: Any) -> Any:
    """Numbers with as many digits as a fit is worth."""
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _value(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        text = ", ".join(_value(v) for v in value)
        if value and isinstance(value[0], dict):
            return "[\n" + "".join(f"  {_value(v)},\n" for v in value) + "]"
        if len(text) < 90:
            return f"[{text}]"
        return "[\n" + textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="  ") + ",\n]"
    return repr(value)
