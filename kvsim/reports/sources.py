"""Pages of saved results: the report of what a command saved, its pictures, and how to get the same again."""

from __future__ import annotations

import csv
import io
import json
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import kvsim
from kvsim.errors import UserError
from kvsim.experiments.store import written_names
from kvsim.experiments.sweep_result import MOST_DRAWN
from kvsim.experiments.sweep_task import one_line
from kvsim.reports.comparison_report import comparison_of
from kvsim.reports.page import html
from kvsim.reports.recommendation_report import recommendation_of
from kvsim.reports.repeated import ShareDone, draw_again
from kvsim.reports.report import Column, Figure, Report, Section, SnapshotStrip, Table
from kvsim.reports.sweep_report import sweep_of
from kvsim.simulation.snapshots import FILE, load_snapshots
from workloads import WorkloadError

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from kvsim.experiments.comparison import Comparison
    from kvsim.experiments.sweep_result import SweepResult

_STORE = b"SQLite format 3\0"

_KINDS = {
    "comparison.json": "kvsim compare",
    "sweep.json": "kvsim sweep",
    "recommendation.json": "kvsim recommend",
}
"""The command that writes each file."""
_VERSIONS = ("numpy", "scipy", "simpy", "pandas")
_SNAPSHOT_FILES = (FILE, "films.npz")
"""Names of the saved snapshots, now and in earlier versions."""
_PICTURES = {
    "pareto.png": "Latency against memory",
    "comparison.png": "Latency and cache over time",
    "why.png": "What requests spend their time on",
}
"""Saved figures of a comparison and their titles; those that exist are shown."""


def report(
    results: str | Path | Comparison | SweepResult, out: str | Path | None = None, *, progress: ShareDone | None = None
) -> Path:
    """Write an HTML page about results and return its path, by default ``report.html`` beside them.

    ``results``: a folder that ``kvsim compare``, ``sweep`` or ``recommend`` wrote, or a file in it. For a sweep whose
    store is not called ``sweep.sqlite``, give the store; the page is then ``STORE-report.html``. The objects that
    ``compare`` and ``sweep`` return are accepted too, together with ``out``. ``out`` must end in .html or .htm.

    Pictures that were not saved are drawn; for the cache over time the runs of a comparison are repeated, if that gives
    the same results, and ``progress`` is called with the share done. Raises ``UserError``.
    """
    if out is not None and Path(out).suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{out}: a page is written to a file that ends in .html or .htm")
    if isinstance(results, str | Path):
        page, target = _page_of(Path(results), progress)
        return _write(page, target if out is None else Path(out))
    if out is None or not hasattr(results, "save"):
        raise UserError(
            f"report of a {type(results).__name__}: the folder it was saved to is expected, or a Comparison or "
            "SweepResult and out, the page to write"
        )
    with TemporaryDirectory() as folder:
        results.save(folder)
        # Pictures are read when the page is written.
        return _write(_page_of(Path(folder), progress)[0], Path(out))


def _write(page: Report, target: Path) -> Path:
    """Write a page under a temporary name first, so that it is never incomplete. Raises ``UserError``."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        part.write_text(html(page), encoding="utf-8")
        part.replace(target)
    except (OSError, ValueError) as e:
        raise UserError(f"{target}: cannot write the report: {getattr(e, 'strerror', None) or e}") from None
    return target


def _page_of(given: Path, progress: ShareDone | None) -> tuple[Report, Path]:
    """The page, and its default path."""
    folder = given.parent if given.is_file() else given
    writers = ", ".join(f"{command} ({name})" for name, command in _KINDS.items())
    if not folder.is_dir():
        raise UserError(f"{folder}: no such results; a folder written by one of these is expected: {writers}")
    if given.is_file() and (named := _named_sweep(given)) is not None:
        return _page_of_named_sweep(named)
    pages: dict[str, Callable[[Path, dict[str, Any]], Report]] = {
        "comparison.json": partial(_page_with_pictures, progress=progress),
        "sweep.json": _sweep_page,
        "recommendation.json": _recommendation_page,
    }
    for name, make in pages.items():
        if (folder / name).is_file():
            return _make_page(folder / name, _KINDS[name], make), folder / "report.html"
    others = [path for path in sorted(folder.glob("*.json")) if path.with_suffix(".csv").is_file()]
    if len(others) > 1:
        names = ", ".join(path.name for path in others)
        raise UserError(f"{folder}: contains several sweeps; name one of {names}")
    if others:
        return _page_of_named_sweep(others[0])
    raise UserError(f"{folder}: no results in it; a folder written by one of these is expected: {writers}")


def _page_with_pictures(folder: Path, saved: dict[str, Any], progress: ShareDone | None) -> Report:
    """The page of a comparison, whose runs are repeated if they were not drawn."""
    if (folder / "comparison.png").is_file():
        return _comparison_page(folder, saved)
    with TemporaryDirectory() as pictures:
        missing = ""
        try:
            draw_again(folder, saved, Path(pictures), progress)
        except (UserError, WorkloadError) as e:
            missing = one_line(str(e))
        return _comparison_page(folder, saved, Path(pictures), missing)


def _comparison_page(folder: Path, saved: dict[str, Any], pictures: Path | None = None, missing: str = "") -> Report:
    """``pictures``: another folder with pictures of it; ``missing``: why there are no more of them."""
    from kvsim.reports.comparison_plots import latency_ranges

    scenario = _read(folder / "scenario.toml")
    runs = saved["policies"]
    made = comparison_of(saved)
    folders = [folder] if pictures is None else [folder, pictures]
    figures = [
        Figure(
            "Latency", lambda: latency_ranges(runs), "P50, P95 and P99 of TTFT, TPOT and end-to-end latency", wide=False
        )
    ]
    figures += [
        Figure(title, path.read_bytes) for name, title in _PICTURES.items() if (path := _found(folders, [name]))
    ]
    # Read now: the pictures that were drawn again are gone when the page is written.
    figures = [
        replace(each, draw=partial(bytes, data)) if isinstance(data := each.draw(), bytes) else each for each in figures
    ]
    glance, latency, cache, *others = made.sections
    cache = replace(cache, text=[f"Not drawn over time: {missing}."] if missing else [])
    sections = [glance, replace(latency, figures=figures), cache, *others]
    if (path := _found(folders, _SNAPSHOT_FILES)) is not None:
        sections.append(
            Section("The cells over time", snapshots=[SnapshotStrip(each) for each in load_snapshots(path)])
        )
    several = f" --replications {saved['replications']}" if saved.get("replications", 1) > 1 else ""
    tolerant = f" --max-failed {100 * saved['max_failed']:g}%" if saved.get("max_failed") else ""
    policies = "".join(f" --policy {run['policy']}" for run in runs)
    command = f"kvsim compare scenario.toml{policies}{several}{tolerant}{_plugin_options(saved)}"
    return _finished(replace(made, sections=sections), command, [("Scenario", scenario)])


def _sweep_page(folder: Path, saved: dict[str, Any], picture: str = "sweep.png") -> Report:
    """``picture``: the name of the file with its figure."""
    import tomli_w

    sweep, points, made = saved["sweep"], saved["points"], sweep_of(saved)
    if points:
        drawn = sweep.get("show", [saved["measure"]])[:MOST_DRAWN]
        figure = _picture(folder / picture, f"{', '.join(drawn)} over the axes", lambda: _swept(sweep, points, drawn))
        best, *others = made.sections
        made = replace(made, sections=[replace(best, figures=[figure]), *others])
    return _finished(made, f"kvsim sweep sweep.toml{_plugin_options(saved)}", [("Sweep", tomli_w.dumps(sweep))])


def _swept(sweep: dict[str, Any], points: list[dict[str, Any]], measures: list[str]) -> Drawing:
    """The figure of a sweep, from the rows of its table."""
    import pandas as pd

    from kvsim.experiments.sweep_file import SweepFile
    from kvsim.reports.sweep_plots import sweep_figure

    return sweep_figure(pd.DataFrame(points), SweepFile.model_validate(sweep), measures)


def _recommendation_page(folder: Path, saved: dict[str, Any]) -> Report:
    """The page of the best settings, of what memory says, or of several devices."""
    made = recommendation_of(saved)
    if "fits" in saved:
        return _finished(made, str(saved["command"]), [])
    title = "Largest load of each device, and what a million output tokens cost"
    files = [(each["device"], each["scenario"]) for each in saved.get("devices", ()) if each["scenario"]]
    sections = list(made.sections)
    if "devices" not in saved:
        title = "Distance from the bounds, and largest loads"
        files = [(f"place {best['place']}", best["scenario"]) for best in saved["best"]]
        ruled_out = next(i for i, section in enumerate(sections) if section.title == "Settings that were ruled out")
        tables = [*sections[ruled_out].tables, _candidates(folder), _not_searched(saved)]
        sections[ruled_out] = replace(sections[ruled_out], tables=tables)
    figure = _picture(folder / "recommendation.png", title, lambda: _recommended(saved))
    sections[0] = replace(sections[0], figures=[figure])
    listings = [(f"Scenario for {name}", _read(folder / file)) for name, file in files]
    return _finished(replace(made, sections=sections), str(saved["command"]), listings)


def _recommended(saved: dict[str, Any]) -> Drawing:
    from kvsim.reports.recommendation_plots import device_comparison_figure, recommendation_figure

    return device_comparison_figure(saved) if "devices" in saved else recommendation_figure(saved)


_CANDIDATE_COLUMNS = (
    *("policy", "unified", "cells", "slots", "slot_context", "n_batch", "n_ubatch", "cache_ram", "type_k", "type_v"),
    *("reason", "detail"),
)


def _candidates(folder: Path) -> Table:
    """Every setting, and why it was ruled out."""
    columns = [Column(key, partial(_typed, key=key), str) for key in _CANDIDATE_COLUMNS]
    return Table("All settings", columns, list(csv.DictReader(io.StringIO(_read(folder / "candidates.csv")))))


def _typed(row: Mapping[str, str], key: str) -> float | str:
    """A value of a CSV file, as a number where it is one."""
    text = row.get(key) or ""
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _not_searched(saved: dict[str, Any]) -> Table:
    columns = [Column("policy", lambda item: item[0]), Column("why", lambda item: item[1]["detail"])]
    return Table("Policies that were not searched", columns, list(saved["searched"]["policies_left_out"].items()))


def _found(folders: Sequence[Path], names: Sequence[str]) -> Path | None:
    """The first file of one of these names."""
    return next((folder / name for folder in folders for name in names if (folder / name).is_file()), None)


def _picture(path: Path, title: str, draw: Callable[[], Drawing]) -> Figure:
    """The picture that was saved with the results; drawn from them if none was."""
    return Figure(title, path.read_bytes if path.is_file() else draw)


def _finished(report: Report, command: str, listings: Sequence[tuple[str, str]]) -> Report:
    """The report with a last section (the command, its input, the versions of the software) and a footer."""
    versions = [f"kvsim {kvsim.__version__}", f"Python {platform.python_version()}"]
    versions += [f"{name} {metadata.version(name)}" for name in _VERSIONS]
    last = Section(
        "How to reproduce this",
        ["All defaults are filled in. The same seed gives the same result."],
        listings=[*listings, ("Command and versions", "\n".join([command, "", *versions]))],
    )
    footer = f"Written by kvsim {kvsim.__version__}. Times are predictions; the machine profile states their error."
    return replace(report, sections=[*report.sections, last], footer=footer)


def _plugin_options(saved: dict[str, Any]) -> str:
    """The options that load again the single files whose policies were used."""
    packages = dict.fromkeys(each["package"] for each in saved.get("plugins", ()))
    return "".join(f" --plugin {shlex.quote(package)}" for package in packages if package.endswith(".py"))


def _named_sweep(given: Path) -> Path | None:
    """The JSON file of a sweep with a name of its own, found from any file that the sweep wrote; else None."""
    try:
        with given.open("rb") as file:
            is_store = file.read(len(_STORE)) == _STORE
    except OSError as e:
        raise UserError(f"{given}: cannot be read: {e.strerror}") from None
    if is_store:
        saved = given.with_name(written_names(given)["json"])
        if not saved.is_file():
            raise UserError(f"{saved}: no such file; run kvsim sweep with --out {given} again")
        return saved
    stem = given.stem
    for end in ("-runs", "-best", "-failures"):
        stem = stem.removesuffix(end)
    saved = given.with_name(f"{stem}.json")
    return saved if saved.name not in _KINDS and saved.is_file() else None


def _page_of_named_sweep(path: Path) -> tuple[Report, Path]:
    """The page of a sweep's JSON file, and its default path."""
    page = _make_page(path, "kvsim sweep", lambda folder, saved: _sweep_page(folder, saved, f"{path.stem}.png"))
    return page, path.with_name("report.html" if path.stem == "sweep" else f"{path.stem}-report.html")


def _make_page(path: Path, command: str, make: Callable[[Path, dict[str, Any]], Report]) -> Report:
    saved = _read_json(path)
    try:
        return make(path.parent, saved)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as e:
        if isinstance(e, UserError):
            raise
        raise UserError(f"{path}: not what {command} writes ({type(e).__name__}: {e}); run it again") from None


def _read(path: Path) -> str:
    """Read a text file. Raises ``UserError``."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None


def _read_json(path: Path) -> dict[str, Any]:
    """Read a file with one JSON object. Raises ``UserError``."""
    try:
        saved = json.loads(_read(path))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not JSON ({e})") from None
    if not isinstance(saved, dict):
        raise UserError(f"{path}: a JSON object is expected")
    return saved
