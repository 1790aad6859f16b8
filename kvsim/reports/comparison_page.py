"""The page of a comparison that ``kvsim compare`` saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.experiments.shared_warnings import share_warnings
from kvsim.reports.page import (
    Cell,
    Figure,
    Page,
    Section,
    SnapshotStrip,
    Table,
    interval,
    milliseconds,
    number,
    share,
    words,
)
from kvsim.reports.parts import footer, plugin_options, plugins, read, reproduce
from kvsim.simulation.failures import failure_lines
from kvsim.simulation.inferred_text import inferred_lines
from kvsim.simulation.snapshots import FILE, load_snapshots

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}
_QUANTILES = ("p50", "p95", "p99")
_FIGURES = {
    "pareto.png": "Latency against memory",
    "comparison.png": "Latency and cache over time",
    "why.png": "What requests spend their time on",
}
"""Saved figures and their titles; those that exist are shown."""
_SNAPSHOT_FILES = (FILE, "films.npz")
"""Names of the saved snapshots, now and in earlier versions."""


def comparison_page(folder: Path, saved: dict[str, Any], pictures: Path | None = None, missing: str = "") -> Page:
    """Make the page of a folder; ``saved`` is the content of its ``comparison.json``.

    ``pictures``: another folder with pictures of it; ``missing``: why there are no more of them.
    """
    scenario = read(folder / "scenario.toml")
    runs: list[dict[str, Any]] = saved["policies"]
    first = runs[0]
    asked = [
        f"Which KV-cache policy serves {first['requests']:,} requests of the scenario “{saved['scenario']}” best?",
        f"{len(runs)} policies on the same requests and arrivals, seed {saved['seed']}, with step times predicted by "
        f"the machine profile “{saved['profile']}”.",
        *dict.fromkeys(line for run in runs for line in run.get("assumed", ())),
        *inferred_lines(runs),
    ]
    asked += plugins(saved)
    figures = [Figure.of("Latency", latency_ranges(runs), "P50, P95 and P99 of TTFT, TPOT and end-to-end latency")]
    folders = [folder] if pictures is None else [folder, pictures]
    for name, title in _FIGURES.items():
        path = next((path / name for path in folders if (path / name).is_file()), None)
        if path is not None:
            figures.append(Figure.of_png(title, path.read_bytes(), title, wide=True))
    tables = [_request_table(runs), *(_latency_table(saved, runs, key) for key in _LATENCIES)]
    if saved.get("intervals"):
        tables.append(_interval_table(saved))
    sections = [
        Section("Latency and throughput", tables=tables, figures=figures),
        Section("The cache", [f"Not drawn over time: {missing}."] if missing else [], _cache_tables(runs)),
    ]
    path = next((path / name for path in folders for name in _SNAPSHOT_FILES if (path / name).is_file()), None)
    if path is not None:
        strips = [SnapshotStrip(snapshots) for snapshots in load_snapshots(path)]
        sections.append(Section("The cells over time", snapshots=strips))
    sections.append(reproduce(f"kvsim compare scenario.toml{_flags(saved, runs)}", [("Scenario", scenario)]))
    return Page(f"KV-cache policies on {saved['scenario']}", asked, _conclusion(saved, runs), sections, footer())


def _conclusion(saved: dict[str, Any], runs: list[dict[str, Any]]) -> list[str]:
    lines = [str(saved["basis"])] if saved.get("basis") else []
    lines += [str(saved["conclusion"])] if saved.get("conclusion") else []
    failed = [run["policy"] for run in runs if run["failed"]]
    if failed:
        lines.append(f"Requests failed under {', '.join(failed)}; latencies are those of completed requests only.")
        told = [(run["policy"], failure_lines(run.get("failures", ()))) for run in runs]
        lines += [f"{shared.line()}." for shared in share_warnings(told)]
    unstable = [run["policy"] for run in runs if (run.get("queue") or {}).get("unstable")]
    if unstable:
        lines.append(
            f"Arrivals outpaced service under {', '.join(unstable)}; latencies depend on how long the run was."
        )
    if not failed and not unstable:
        lines.append("No request failed, and no queue kept growing.")
    return lines


def _request_table(runs: list[dict[str, Any]]) -> Table:
    heads = ["policy", "completed", "failed", "tokens/s"]
    rows = [
        [
            words(run["policy"]),
            number(run["completed"]),
            number(run["failed"]),
            number(run["throughput_tokens_per_s"]),
        ]
        for run in runs
    ]
    return Table("Requests by policy", heads, rows, narrow=True)


def _latency_table(saved: dict[str, Any], runs: list[dict[str, Any]], key: str) -> Table:
    """A table of one latency: all of them in one would be wider than most screens."""
    heads = ["policy", *(x.upper() for x in _QUANTILES)]
    rows = [[words(run["policy"]), *(milliseconds(run[key][x]) for x in _QUANTILES)] for run in runs]
    note = "Milliseconds, of completed requests."
    bound = saved.get("e2e_mean_over_oracle")
    if key == "e2e_s" and bound:
        heads.append("× oracle")
        rows = [[*row, number(bound.get(run["policy"]))] for row, run in zip(rows, runs, strict=True)]
        note += " × oracle: the mean divided by the oracle's."
    return Table(f"{_LATENCIES[key][:1].upper()}{_LATENCIES[key][1:]} by policy", heads, rows, note, narrow=True)


def _interval_table(saved: dict[str, Any]) -> Table:
    measures = [
        m for m in ("e2e_mean", "e2e_p95", "ttft_p95", "tpot_p95") if m in next(iter(saved["intervals"].values()))
    ]
    heads = ["policy", *(m.replace("_", " ") for m in measures)]
    rows = [
        [
            words(policy),
            *(interval(each[m]["value"], each[m]["low"], each[m]["high"], 1e3) for m in measures),
        ]
        for policy, each in saved["intervals"].items()
    ]
    note = f"Milliseconds; means over {saved['replications']} replications, with their 95 % intervals."
    return Table("Over replications", heads, rows, note)


def _cache_tables(runs: list[dict[str, Any]]) -> list[Table]:
    full: dict[str, Callable[[dict[str, Any]], Cell]] = {
        "policy": lambda run: words(run["policy"]),
        "cells used": lambda run: share(run["cache"]["utilization_mean"]),
        "external fragmentation": lambda run: share(run["cache"]["external_fragmentation_mean"]),
        "internal fragmentation": lambda run: share(run["cache"]["internal_fragmentation_mean"]),
        "useful attention": lambda run: share(run["cache"]["scored_useful"]),
        "prefix hits": lambda run: _hit_rate(run["prefix"]["hit_rate"]),
    }
    done: dict[str, Callable[[dict[str, Any]], Cell]] = {
        "policy": lambda run: words(run["policy"]),
        "failed allocations": lambda run: number(run["cache"]["failed_allocations"]),
        "batch splits": lambda run: number(run["cache"]["batch_splits"]),
        "compactions": lambda run: number(run["cache"]["compactions"]),
        "MB moved": lambda run: number(run["cache"]["moved_bytes"] / 1e6),
        "preemptions": lambda run: number(run["preemptions"]),
    }
    if any(run.get("host", {}).get("saves") for run in runs):
        done |= {
            "host saves": lambda run: number(_host(run, "saves")),
            "host loads": lambda run: number(_host(run, "loads")),
            "MB to the host": lambda run: number(_host(run, "bytes_out") / 1e6),
            "MB back": lambda run: number(_host(run, "bytes_in") / 1e6),
            "host cache, MB at most": lambda run: number(_host(run, "most_bytes") / 1e6),
            "s of copying": lambda run: number(_host(run, "copy_s")),
        }
    tables = {"How the cache was used": (full, "Shares are means over time."), "What the policies did": (done, "")}
    return [
        Table(title, list(columns), [[column(run) for column in columns.values()] for run in runs], note)
        for title, (columns, note) in tables.items()
    ]


def _host(run: dict[str, Any], key: str) -> float:
    """A figure of a run's host cache; 0 where there was none."""
    return float(run["host"].get(key) or 0)


def _hit_rate(rate: float | None) -> Cell:
    return words("unknown") if rate is None else share(rate)


def latency_ranges(runs: list[dict[str, Any]]) -> Drawing:
    """P50, P95 and P99 of each latency, with a row per policy; tall rather than wide, for small screens."""
    import matplotlib as mpl
    import pandas as pd
    import seaborn as sns
    from matplotlib.figure import Figure as Canvas

    from kvsim.reports.sweep_plots import plain_log

    rows = [
        {"policy": run["policy"], "measure": name, "quantile": x.upper(), "ms": 1e3 * run[key][x]}
        for run in runs
        for key, name in _LATENCIES.items()
        for x in _QUANTILES
        if run[key][x] is not None
    ]
    table = pd.DataFrame(rows, columns=["policy", "measure", "quantile", "ms"])
    names = [run["policy"] for run in runs]
    with mpl.rc_context({**sns.axes_style("whitegrid"), **sns.plotting_context("notebook")}):
        figure = Canvas(figsize=(7.5, 3 * (0.9 + 0.27 * len(names))), layout="constrained")
        for axis, name in zip(figure.subplots(3), _LATENCIES.values(), strict=True):
            part = table[table["measure"] == name]
            sns.lineplot(part, x="ms", y="policy", units="policy", estimator=None, color="0.75", sort=False, ax=axis)
            sns.scatterplot(
                part,
                x="ms",
                y="policy",
                hue="quantile",
                style="quantile",
                palette="colorblind",
                s=55,
                zorder=3,
                ax=axis,
            )
            axis.set(title=name, xlabel="milliseconds" if name == "end to end" else "", ylabel="", xscale="log")
            plain_log(axis.xaxis, part["ms"])
            axis.set_ylim(len(names) - 0.5, -0.5)
            if axis.get_legend() is not None:
                handles, labels = axis.get_legend_handles_labels()
                axis.get_legend().remove()
        # Above the axes: in them it would cover the line of a policy.
        if len(table):
            figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


def _flags(saved: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    several = f" --replications {saved['replications']}" if saved.get("replications", 1) > 1 else ""
    tolerant = f" --max-failed {100 * saved['max_failed']:g}%" if saved.get("max_failed") else ""
    return "".join(f" --policy {run['policy']}" for run in runs) + several + tolerant + plugin_options(saved)
