"""Fit a workload generator to a request stream, and compare the two."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import workloads
from kvsim.errors import UserError
from kvsim.results import results_folder
from kvsim.scenario.prefixes import InfiniteCache
from kvsim.scenario.workload_sections import workload_adapter
from workloads.fitting.fits import Candidate, fit_gaps, fit_lengths, quantiles_of
from workloads.fitting.statistics import (
    WINDOWS_S,
    RequestColumns,
    Statistics,
    describe,
    dispersion,
    read_columns,
    spread_within_ticks,
)
from workloads.generators.lengths import FloatArray, IntArray

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_LARGEST_DISTANCE = 0.05
"""Kolmogorov distance above which the empirical quantiles of lengths are used instead of a fitted law."""
_SEEDS = 5
_MOST_DRAWN = 50_000
_FEWEST_REQUESTS = 20
_MOST_SHARE = 0.5
"""Share of the requests that must have found a beginning for it to be one of all."""
_DIGITS = 5
_TENTHS = 10
_QUANTILES = 41
"""Number of quantiles of the outputs in each tenth of the prompts."""
_FEWEST_PER_TENTH = 5 * _QUANTILES
"""Minimum number of requests in a tenth, so that its quantiles summarise them."""
_LARGEST_COPULA_DISTANCE = 0.1
"""Mean Kolmogorov distance, over tenths of the prompts, between the outputs and those that a rank correlation gives;
above it, outputs are drawn from a table for each tenth."""


class Burstiness(NamedTuple):
    """What queues depend on of a stream's arrivals: how many there are, and how unevenly they come."""

    gap_mean_s: float
    gap_cv: float
    dispersion: dict[float, float | None]

    @classmethod
    def of(cls, arrivals_s: FloatArray, windows: Iterable[float]) -> Burstiness:
        """Measure increasing arrival times, shape (n,), in windows of so many seconds."""
        gaps = np.diff(arrivals_s)
        mean = float(gaps.mean())
        return cls(mean, float(gaps.std()) / mean, {w: dispersion(arrivals_s, w) for w in windows})

    @property
    def figures(self) -> dict[str, float | None]:
        """All of them by name."""
        of_windows = {f"dispersion at {w:g} s": value for w, value in self.dispersion.items()}
        return {"mean gap": self.gap_mean_s, "gaps' CV": self.gap_cv, **of_windows}


class ArrivalFit(NamedTuple):
    """A candidate process for the arrivals, and streams drawn from it with several seeds."""

    candidate: Candidate
    drawn: Burstiness
    """Medians over the drawn streams."""
    misfit: float
    """The largest factor, at least 1, by which a figure of the fitted stream is outside those of the drawn ones."""
    most_off: str
    """The name of that figure."""

    @property
    def dispersion(self) -> dict[float, float | None]:
        """Variance over mean of the drawn streams' arrivals, by the seconds of the windows; medians."""
        return self.drawn.dispersion

    @property
    def label(self) -> str:
        """Name for people."""
        c = self.candidate
        return f"{c.kind} of {c.parameters // 2} states" if c.kind == "mmpp" else c.kind + ", by moments" * c.by_moments


class LengthFit(NamedTuple):
    """Candidate laws for a length, best first, and the one that is used."""

    candidates: Sequence[Candidate]
    used: dict[str, Any]
    """The law as a table of a scenario."""
    why: str


@dataclass(frozen=True)
class WorkloadFit:
    """A generator and the stream that it was fitted to."""

    name: str
    stream: RequestColumns
    statistics: Statistics
    """Statistics of the stream."""
    arrivals: Sequence[ArrivalFit]
    """Candidates for the arrivals, best AIC first."""
    used: ArrivalFit
    """The candidate that the generator uses."""
    why: str
    """Why it was chosen."""
    prompt: LengthFit
    output: LengthFit
    section: dict[str, Any]
    """The generator as a ``[workload]`` section."""
    model: RequestColumns
    """A stream drawn from the generator, with as many requests as the original (at most 50,000)."""
    drawn: Statistics
    """Statistics of that stream."""
    notes: tuple[str, ...]
    """What the generator does not reproduce."""

    @property
    def table(self) -> pd.DataFrame:
        """One row per candidate: what it models, its AIC, its distance, and the burstiness that it gives."""
        import pandas as pd

        rows = [
            {
                "of": "arrivals",
                "kind": fit.candidate.kind,
                "parameters": fit.candidate.parameters,
                "aic": fit.candidate.aic,
                "distance": fit.candidate.distance,
                "by_moments": fit.candidate.by_moments,
                "gap_mean_s": fit.drawn.gap_mean_s,
                "gap_cv": fit.drawn.gap_cv,
                **{f"dispersion_{w:g}s": value for w, value in fit.dispersion.items()},
                "misfit": fit.misfit,
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
        """Return the generator as a section of a scenario, ready to paste."""
        return _section_toml(self.section)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
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
        """Draw the stream beside one drawn from the generator."""
        from kvsim.reports.workload_plots import fit_figure

        return fit_figure(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the section, the candidates and the figure to a folder and return the files. Raises ``UserError``."""
        with results_folder(folder) as out:
            out.text("workload.toml", self.to_toml())
            out.table("candidates.csv", self.table)
            out.picture("workload.png", self.plot, dpi=120)
        return out.written


def describe_stream(workload: workloads.Workload, block_size: int) -> Statistics:
    """Compute the statistics of a stream, and what its prompts share, in blocks of ``block_size`` tokens."""
    logged = getattr(workload, "logged_hits", None)
    if workload.prefixes == "unknown":
        return describe(workload)._replace(logged=logged)
    cache = InfiniteCache(block_size, workload.prefixes)
    statistics = describe(workload, cache.serve)
    return statistics._replace(reuse=cache.reuse, logged=logged)


def fit(
    workload: workloads.Workload,
    name: str,
    *,
    block_size: int = 16,
    seed: int = 1,
    report: Callable[[float], None] = lambda share: None,
) -> WorkloadFit:
    """Fit a generator of single requests to a stream: its arrivals, its lengths, and their correlation.

    The arrivals use the candidate whose own streams come closest in mean gap, variation of the gaps, and dispersion in
    windows of 1 s and 60 s, and of several as close the one with the best AIC: the likelihood only sees single gaps,
    but queues depend on bursts. ``block_size``: of the prefix cache that tells what prompts share. ``report`` is called
    with the share done.
    Raises ``UserError`` for a stream that is too short.
    """
    statistics = describe_stream(workload, block_size)
    stream, sessions = read_columns(workload)
    requests = len(stream.arrivals_s)
    if requests < _FEWEST_REQUESTS:
        raise UserError(f"{name}: {requests} requests are too few to fit; at least {_FEWEST_REQUESTS} are needed")
    report(0.1)
    prompt, output = _fit_length(stream.prompt_tokens), _fit_length(stream.output_tokens)
    by_prompt = _fit_by_prompt(stream, statistics.correlation or 0.0, output)
    output = by_prompt or output
    lengths: dict[str, Any] = {"prompt_tokens": prompt.used, "output_tokens": output.used}
    if by_prompt is None and statistics.correlation is not None:
        lengths["correlation"] = round(statistics.correlation, 3)
    fitted, used, why, notes = _fit_arrivals(stream, statistics, seed, report)
    if sessions:
        notes.append(f"{sessions:,} sessions became single requests; the model does not repeat earlier turns")
    reuse = statistics.reuse
    if reuse is not None and reuse.found:
        notes.append(f"prompts share prefixes ({reuse.hit_rate:.0%} of their tokens); those of the model do not")
    keys = {key: _rounded(value) for key, value in used.candidate.keys.items()}
    section = {"kind": used.candidate.kind, **keys, "requests": requests, **_shared(statistics, notes), **lengths}
    generator = _build({**section, "requests": min(requests, _MOST_DRAWN)}, seed)
    model = read_columns(generator)[0]
    report(1.0)
    drawn = describe_stream(generator, block_size)
    return WorkloadFit(name, stream, statistics, fitted, used, why, prompt, output, section, model, drawn, tuple(notes))


def _shared(statistics: Statistics, notes: list[str]) -> dict[str, int]:
    """The beginning that all prompts of the model share, if most that were logged found one; says so in ``notes``."""
    logged = statistics.logged
    if logged is None or not logged.found:
        return {}
    if logged.sharing < _MOST_SHARE:
        notes.append(
            f"prefix hits: {logged.hit_rate:.0%} of the prompts' tokens, but no beginning that most requests found"
        )
        return {}
    model = min(logged.shared * statistics.requests / logged.tokens, 1.0)
    notes.append(
        f"prefix hits beyond the first {logged.shared:,} tokens, which {logged.sharing:.0%} of the requests found and "
        f"all prompts of the model share: {model:.0%} of the tokens, where the server found {logged.hit_rate:.0%}"
    )
    return {"shared_tokens": logged.shared}


def _section_toml(section: dict[str, Any]) -> str:
    """Format a ``[workload]`` section as TOML, with tables and long lists over several lines."""
    lines = ["[workload]"]
    lines += [f"{key} = {_value(value)}" for key, value in section.items() if not isinstance(value, dict)]
    for key, value in section.items():
        if isinstance(value, dict):
            lines += ["", f"[workload.{key}]", *(f"{k} = {_value(v)}" for k, v in value.items())]
    return "\n".join(lines) + "\n"


def statistics_dict(statistics: Statistics) -> dict[str, Any]:
    """Return the object that ``kvsim workload describe --json`` prints."""
    keys = statistics._asdict()
    keys["dispersion"] = {f"{w:g}": value for w, value in statistics.dispersion.items()}
    keys["prompt"], keys["output"] = statistics.prompt._asdict(), statistics.output._asdict()
    reuse = statistics.reuse
    keys["reuse"] = None if reuse is None else reuse._asdict()
    logged = statistics.logged
    keys["logged"] = None if logged is None else {**logged._asdict(), "hit_rate": logged.hit_rate}
    return keys


def _fit_arrivals(
    stream: RequestColumns, statistics: Statistics, seed: int, report: Callable[[float], None]
) -> tuple[list[ArrivalFit], ArrivalFit, str, list[str]]:
    """All candidates for the arrivals, the one to use and why, and notes on what it leaves out."""
    if stream.duration_s == 0:
        batch = ArrivalFit(Candidate("batch", {}, 0, 0.0), Burstiness(0.0, 0.0, statistics.dispersion), 1.0, "none")
        return [batch], batch, "all requests arrive at once", []
    arrivals, requests, notes = stream.arrivals_s, len(stream.arrivals_s), []
    tick = statistics.tick_s
    if tick is not None:
        arrivals = spread_within_ticks(arrivals, tick, workloads.named_rng(seed, "ticks"))
        notes.append(
            f"the clock ticks every {tick:.3g} s, and the requests of a tick share a time stamp; they were spread over "
            "the tick, so the model does not reproduce shorter bursts"
        )
    candidates, gaps = fit_gaps(arrivals, coarse=tick is not None)
    if gaps < requests - 1:
        notes.append(f"arrivals were fitted to the first {gaps:,} gaps only")
    # A clock says nothing about bursts that are shorter than its tick.
    target = Burstiness.of(arrivals, [w for w in statistics.dispersion if tick is None or w >= 2 * tick])
    fitted = []
    for done, candidate in enumerate(candidates):
        fitted.append(_drawn(candidate, requests, seed, target))
        report(0.5 + 0.4 * (done + 1) / len(candidates))
    return fitted, *_choose(fitted), notes


def _fit_length(tokens: IntArray) -> LengthFit:
    candidates = fit_lengths(tokens)
    best = candidates[0]
    if best.distance is not None and best.distance <= _LARGEST_DISTANCE:
        keys = {key: _rounded(value) for key, value in best.keys.items()}
        return LengthFit(candidates, {"kind": best.kind, **keys}, f"{best.kind}: distance {best.distance:.3f}")
    why = (
        f"quantiles: the best law by AIC, {best.kind}, has a distance of {best.distance:.3f}, above {_LARGEST_DISTANCE}"
    )
    quantiles, shares = quantiles_of(tokens)
    return LengthFit(candidates, {"kind": "empirical", "quantiles": quantiles, "shares": shares}, why)


def _fit_by_prompt(stream: RequestColumns, correlation: float, output: LengthFit) -> LengthFit | None:
    """Tables of outputs for each tenth of the prompts; None if a rank correlation describes them well enough."""
    from scipy import stats

    edges = np.unique(np.quantile(stream.prompt_tokens, np.arange(1, _TENTHS) / _TENTHS, method="higher"))
    edges = edges[edges > stream.prompt_tokens.min()].astype(np.int64)
    which = np.searchsorted(edges, stream.prompt_tokens, side="right")
    parts = [stream.output_tokens[which == k] for k in range(len(edges) + 1)]
    if len(edges) == 0 or min(map(len, parts)) < _FEWEST_PER_TENTH or len(np.unique(stream.output_tokens)) == 1:
        return None
    # Outputs of each tenth under a Gaussian copula, from as many draws as there are requests.
    rng = workloads.named_rng(0, "copula")
    r = 2 * np.sin(np.pi * correlation / 6)
    first, second = rng.standard_normal((2, len(which)))
    order = np.argsort(np.argsort(first))
    prompts = np.sort(stream.prompt_tokens)[order]
    outputs = np.sort(stream.output_tokens)[np.argsort(np.argsort(r * first + np.sqrt(1 - r**2) * second))]
    drawn = np.searchsorted(edges, prompts, side="right")
    distance = float(np.mean([stats.ks_2samp(parts[k], outputs[drawn == k]).statistic for k in range(len(parts))]))
    if distance <= _LARGEST_COPULA_DISTANCE:
        return None
    tables = []
    for part in parts:
        low, high = int(part.min()), int(part.max())
        quantiles = np.rint(np.quantile(part, np.linspace(0, 1, _QUANTILES))).astype(np.int64).tolist()
        tables.append({"kind": "fixed", "value": low} if low == high else {"kind": "empirical", "quantiles": quantiles})
    why = (
        f"a table for each tenth of the prompts: with a rank correlation alone the distance is {distance:.2f}, above "
        f"{_LARGEST_COPULA_DISTANCE}"
    )
    return LengthFit(output.candidates, {"kind": "given-prompt", "edges": edges.tolist(), "tables": tables}, why)


def _choose(fitted: Sequence[ArrivalFit]) -> tuple[ArrivalFit, str]:
    """The candidate to use among those given in order of AIC, and why."""
    if len(fitted) == 1:
        return fitted[0], f"{fitted[0].label}: all gaps are the same"
    used = min(fitted, key=lambda one: one.misfit)
    off = (
        f"all figures of the stream are among those of {_SEEDS} streams drawn from it"
        if used.misfit == 1
        else f"the stream's {used.most_off} is outside those of {_SEEDS} streams drawn from it by a factor of "
        f"{used.misfit:.3g}"
    )
    better = "" if used is fitted[0] else f"closer to the stream than {fitted[0].label}, which has a better AIC; "
    return used, f"{used.label}: {better or 'the best AIC, and none comes closer; '}{off}"


def _drawn(candidate: Candidate, requests: int, seed: int, target: Burstiness) -> ArrivalFit:
    """Draw streams from a candidate, and compare them with the one that was fitted."""
    n = min(requests, _MOST_DRAWN)
    one = {"kind": "fixed", "value": 1}
    section = {"kind": candidate.kind, **candidate.keys, "requests": n, "prompt_tokens": one, "output_tokens": one}
    streams = [read_columns(_build(section, seed + i))[0].arrivals_s for i in range(_SEEDS)]
    drawn = [Burstiness.of(arrivals, WINDOWS_S) for arrivals in streams]
    off, middle = {"none": 1.0}, {}
    for name in drawn[0].figures:
        values = [value for one in drawn if (value := one.figures[name]) is not None]
        middle[name] = float(np.median(values)) if values else None
        wanted = target.figures.get(name)
        if wanted and values and min(values) > 0:
            off[name] = max(wanted / max(values), min(values) / wanted, 1.0)
    most_off = max(off, key=lambda name: off[name])
    mean, cv, *of_windows = middle.values()
    medians = Burstiness(mean or 0.0, cv or 0.0, dict(zip(WINDOWS_S, of_windows, strict=True)))
    return ArrivalFit(candidate, medians, off[most_off], most_off)


def _build(section: dict[str, Any], seed: int) -> workloads.Workload:
    built: workloads.Workload = workload_adapter().validate_python(section).build(seed, Path())
    return built


def _rounded(value: Any) -> Any:
    """Round numbers to the precision of a fit."""
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
