"""Pages from what commands have saved."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import kvsim
from kvsim.errors import UserError
from kvsim.films import FILE as FILMS
from kvsim.films import load_films
from kvsim.report.page import Cell, Figure, FilmStrip, Page, Section, Table, number, share, words

_LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}
_VERSIONS = ("numpy", "scipy", "simpy", "pandas")


def report(results: str | Path, out: str | Path | None = None) -> Path:
    """Write a page about saved results; the file written, by default ``report.html`` beside them.

    ``results``: the folder that ``kvsim compare`` wrote. Raises ``UserError``.
    """
    source = Path(results)
    page = _page_of(source)
    target = Path(out) if out is not None else source / "report.html"
    try:
        # Written beside and put in its place, so that a page is whole or not there.
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        part.write_text(page.html(), encoding="utf-8")
        part.replace(target)
    except (OSError, ValueError) as e:
        raise UserError(f"{target}: cannot write the report: {getattr(e, 'strerror', None) or e}") from None
    return target


def _page_of(source: Path) -> Page:
    if (source / "comparison.json").is_file():
        return _comparison(source)
    if not source.exists():
        raise UserError(f"{source}: no such results; a folder that kvsim compare wrote is expected")
    raise UserError(f"{source}: no results in it; a folder that kvsim compare wrote (comparison.json) is expected")


def _comparison(folder: Path) -> Page:
    told = _read_json(folder / "comparison.json")
    scenario = _read(folder / "scenario.toml")
    try:
        return _comparison_page(folder, told, scenario)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as e:
        raise UserError(
            f"{folder / 'comparison.json'}: not what kvsim compare wrote ({type(e).__name__}: {e}); run it again"
        ) from None


def _comparison_page(folder: Path, told: dict[str, Any], scenario: str) -> Page:
    runs: list[dict[str, Any]] = told["policies"]
    first = runs[0]
    asked = [
        f"Which KV-cache policy serves {first['requests']:,} requests of the scenario “{told['scenario']}” best?",
        f"{len(runs)} policies on the same requests and arrivals, seed {told['seed']}, step times predicted by the "
        f"machine profile “{told['profile']}”.",
    ]
    figures = [Figure.of("Latency", _ranges(runs), "P50, P95 and P99 of TTFT, TPOT and end-to-end latency")]
    for name, title in (("pareto.png", "Latency against memory"), ("comparison.png", "Latency and cache over time")):
        if (folder / name).is_file():
            figures.append(Figure.of_png(title, (folder / name).read_bytes(), title, wide=True))
    sections = [
        Section("What users feel", tables=[_latency_table(told, runs)], figures=figures),
        Section("What the cache did", tables=[_cache_table(runs)]),
    ]
    if (folder / FILMS).is_file():
        strips = [FilmStrip(film) for film in load_films(folder / FILMS)]
        sections.append(Section("The cells over time", films=strips))
    sections.append(_reproduce(f"kvsim compare scenario.toml{_flags(runs)}", scenario))
    return Page(f"KV-cache policies on {told['scenario']}", asked, _conclusion(told, runs), sections, _footer())


def _conclusion(told: dict[str, Any], runs: list[dict[str, Any]]) -> list[str]:
    lines = [str(told["conclusion"])] if told.get("conclusion") else []
    failed = [run["policy"] for run in runs if run["failed"]]
    if failed:
        lines.append(
            f"Requests failed under {', '.join(failed)}: their latencies are those of the requests that were left."
        )
    unstable = [run["policy"] for run in runs if (run.get("queue") or {}).get("unstable")]
    if unstable:
        lines.append(f"Arrivals outpaced service under {', '.join(unstable)}: latencies tell how long the run was.")
    return lines or ["No request failed, and no queue grew without end."]


def _latency_table(told: dict[str, Any], runs: list[dict[str, Any]]) -> Table:
    bound = told.get("e2e_mean_over_oracle") or {}
    heads = ["policy", "completed", "failed", "tokens/s"]
    heads += [f"{name} {x.upper()}" for name in _LATENCIES.values() for x in ("p50", "p95", "p99")]
    rows = [
        [
            words(run["policy"]),
            number(run["completed"]),
            number(run["failed"]),
            number(run["throughput_tokens_per_s"]),
            *(_milliseconds(run[key][x]) for key in _LATENCIES for x in ("p50", "p95", "p99")),
            number(bound.get(run["policy"])),
        ]
        for run in runs
    ]
    note = "Latencies in milliseconds, of completed requests. Over oracle: mean end-to-end latency, over the oracle's."
    return Table("Latency by policy", [*heads, "over oracle"], rows, note)


def _cache_table(runs: list[dict[str, Any]]) -> Table:
    columns: dict[str, Callable[[dict[str, Any]], Cell]] = {
        "policy": lambda run: words(run["policy"]),
        "cells used": lambda run: share(run["cache"]["utilization_mean"]),
        "external fragmentation": lambda run: share(run["cache"]["external_fragmentation_mean"]),
        "internal fragmentation": lambda run: share(run["cache"]["internal_fragmentation_mean"]),
        "scores useful": lambda run: share(run["cache"]["scored_useful"]),
        "failed allocations": lambda run: number(run["cache"]["failed_allocations"]),
        "batch splits": lambda run: number(run["cache"]["batch_splits"]),
        "compactions": lambda run: number(run["cache"]["compactions"]),
        "MB moved": lambda run: number(run["cache"]["moved_bytes"] / 1e6),
        "prefix hits": lambda run: share(run["prefix"]["hit_rate"]),
        "preemptions": lambda run: number(run["preemptions"]),
    }
    rows = [[column(run) for column in columns.values()] for run in runs]
    return Table("The cache by policy", list(columns), rows, "Shares are means over time.")


def _ranges(runs: list[dict[str, Any]]) -> Any:
    """P50, P95 and P99 of each latency, a row for each policy; tall rather than wide, for small screens."""
    import matplotlib as mpl
    import matplotlib.ticker
    import pandas as pd
    import seaborn as sns
    from matplotlib.figure import Figure as Drawing

    rows = [
        {"policy": run["policy"], "measure": name, "quantile": x.upper(), "ms": 1e3 * run[key][x]}
        for run in runs
        for key, name in _LATENCIES.items()
        for x in ("p50", "p95", "p99")
        if run[key][x] is not None
    ]
    table = pd.DataFrame(rows, columns=["policy", "measure", "quantile", "ms"])
    names = [run["policy"] for run in runs]
    with mpl.rc_context({**sns.axes_style("whitegrid"), **sns.plotting_context("notebook")}):
        figure = Drawing(figsize=(7.5, 3 * (0.9 + 0.27 * len(names))), layout="constrained")
        for axis, name in zip(figure.subplots(3), _LATENCIES.values(), strict=True):
            part = table[table["measure"] == name]
            sns.lineplot(part, x="ms", y="policy", units="policy", estimator=None, color="0.75", sort=False, ax=axis)
            sns.scatterplot(
                part, x="ms", y="policy", hue="quantile", style="quantile", palette="colorblind", s=55, ax=axis
            )
            axis.set(title=name, xlabel="milliseconds" if name == "end to end" else "", ylabel="", xscale="log")
            axis.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())
            axis.set_ylim(len(names) - 0.5, -0.5)
            if axis.get_legend() is not None:
                axis.get_legend().set_title("")
                if name != "TTFT":
                    axis.get_legend().remove()
    return figure


def _reproduce(command: str, scenario: str) -> Section:
    versions = [f"kvsim {kvsim.__version__}", f"Python {platform.python_version()}"]
    versions += [f"{name} {metadata.version(name)}" for name in _VERSIONS]
    return Section(
        "To repeat it",
        ["The scenario whole, every default filled in: save it as scenario.toml. One seed gives one result."],
        listings=[("Scenario", scenario), ("Command and versions", "\n".join([command, "", *versions]))],
    )


def _flags(runs: list[dict[str, Any]]) -> str:
    return "".join(f" --policy {run['policy']}" for run in runs)


def _footer() -> str:
    return (
        f"Made by kvsim {kvsim.__version__}. Times are predictions; the machine profile says how far they may be off."
    )


def _milliseconds(seconds: float | None) -> Cell:
    return number(None if seconds is None else 1e3 * seconds)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(_read(path))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not JSON ({e})") from None
    if not isinstance(told, dict):
        raise UserError(f"{path}: a JSON object is expected, as kvsim compare writes it")
    return told
