"""Write a page from the results that a command has saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kvsim.errors import UserError
from kvsim.experiments.store import written_names
from kvsim.experiments.sweep_task import one_line
from kvsim.reports.comparison_page import comparison_page
from kvsim.reports.page import Page
from kvsim.reports.parts import read_json
from kvsim.reports.recommendation_page import recommendation_page
from kvsim.reports.repeated import ShareDone, draw_again
from kvsim.reports.sweep_page import sweep_page
from workloads import WorkloadError

if TYPE_CHECKING:
    from kvsim.experiments.comparison import Comparison
    from kvsim.experiments.sweep_result import SweepResult

_STORE = b"SQLite format 3\0"

_KINDS = {
    "comparison.json": "kvsim compare",
    "sweep.json": "kvsim sweep",
    "recommendation.json": "kvsim recommend",
}
"""The command that writes each file."""


def report(
    results: str | Path | Comparison | SweepResult, out: str | Path | None = None, *, progress: ShareDone | None = None
) -> Path:
    """Write an HTML page about results and return its path, by default ``report.html`` beside them.

    ``results``: a folder that ``kvsim compare``, ``sweep`` or ``recommend`` wrote, or a file in it. For a sweep whose
    store is not called ``sweep.sqlite``, give the store; the page is then ``STORE-report.html``. The objects that
    ``compare`` and ``sweep`` return are accepted too, together with ``out``. ``out`` must end in .html or .htm.

    Pictures that were not saved are drawn; for the cache over time the runs of a comparison are repeated, if that gives
    the same results, and ``progress`` hears which share of them is done. Raises ``UserError``.
    """
    if out is not None and Path(out).suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{out}: a page is written to a file that ends in .html or .htm")
    if isinstance(results, str | Path):
        page, target = _page_of(Path(results), progress)
    elif out is None or not hasattr(results, "save"):
        raise UserError(
            f"report of a {type(results).__name__}: the folder it was saved to is expected, or a Comparison or "
            "SweepResult and out, the page to write"
        )
    else:
        with TemporaryDirectory() as folder:
            results.save(folder)
            page, target = _page_of(Path(folder), progress)
    target = target if out is None else Path(out)
    try:
        # Written to a temporary name first, so that the page is never incomplete.
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        part.write_text(page.html(), encoding="utf-8")
        part.replace(target)
    except (OSError, ValueError) as e:
        raise UserError(f"{target}: cannot write the report: {getattr(e, 'strerror', None) or e}") from None
    return target


def _page_of(given: Path, progress: ShareDone | None) -> tuple[Page, Path]:
    """The page, and its default path."""
    folder = given.parent if given.is_file() else given
    writers = ", ".join(f"{command} ({name})" for name, command in _KINDS.items())
    if not folder.is_dir():
        raise UserError(f"{folder}: no such results; a folder written by one of these is expected: {writers}")
    if given.is_file() and (named := _named_sweep(given)) is not None:
        return _page_of_named_sweep(named)
    pages: dict[str, Callable[[Path, dict[str, Any]], Page]] = {
        "comparison.json": partial(_page_with_pictures, progress=progress),
        "sweep.json": sweep_page,
        "recommendation.json": recommendation_page,
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


def _page_with_pictures(folder: Path, saved: dict[str, Any], progress: ShareDone | None) -> Page:
    """The page of a comparison, whose runs are repeated if they were not drawn."""
    if (folder / "comparison.png").is_file():
        return comparison_page(folder, saved)
    with TemporaryDirectory() as pictures:
        missing = ""
        try:
            draw_again(folder, saved, Path(pictures), progress)
        except (UserError, WorkloadError) as e:
            missing = one_line(str(e))
        return comparison_page(folder, saved, Path(pictures), missing)


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


def _page_of_named_sweep(path: Path) -> tuple[Page, Path]:
    """The page of a sweep's JSON file, and its default path."""
    page = _make_page(path, "kvsim sweep", lambda folder, saved: sweep_page(folder, saved, f"{path.stem}.png"))
    return page, path.with_name("report.html" if path.stem == "sweep" else f"{path.stem}-report.html")


def _make_page(path: Path, command: str, make: Callable[[Path, dict[str, Any]], Page]) -> Page:
    saved = read_json(path)
    try:
        return make(path.parent, saved)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as e:
        if isinstance(e, UserError):
            raise
        raise UserError(f"{path}: not what {command} writes ({type(e).__name__}: {e}); run it again") from None
