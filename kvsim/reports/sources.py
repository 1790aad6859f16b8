"""Pages from what commands have saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kvsim.errors import UserError
from kvsim.experiments.store import written_names
from kvsim.reports.comparison_page import comparison_page
from kvsim.reports.page import Page
from kvsim.reports.parts import read_json
from kvsim.reports.recommendation_page import recommendation_page
from kvsim.reports.sweep_page import sweep_page

if TYPE_CHECKING:
    from kvsim.experiments.comparison import Comparison
    from kvsim.experiments.sweep_result import SweepResult

_STORE = b"SQLite format 3\0"

_KINDS: dict[str, tuple[str, Callable[[Path, dict[str, Any]], Page]]] = {
    "comparison.json": ("kvsim compare", comparison_page),
    "sweep.json": ("kvsim sweep", sweep_page),
    "recommendation.json": ("kvsim recommend", recommendation_page),
}
"""By the file that is in the folder: who wrote it, and what makes a page of it."""


def report(results: str | Path | Comparison | SweepResult, out: str | Path | None = None) -> Path:
    """Write a page about results; the file written, by default ``report.html`` beside what was saved.

    ``results``: the folder that ``kvsim compare``, ``sweep`` or ``recommend`` wrote, or a file in it; of a sweep whose
    store is not called ``sweep.sqlite`` the store, and the default is then ``STORE-report.html``. What ``compare`` and
    ``sweep`` returned is accepted too, with ``out``, which ends in .html or .htm. Raises ``UserError``.
    """
    if out is not None and Path(out).suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{out}: a page is written to a file that ends in .html or .htm")
    if isinstance(results, str | Path):
        page, target = _page_of(Path(results))
    elif out is None or not hasattr(results, "save"):
        raise UserError(
            f"report of a {type(results).__name__}: the folder it was saved to is expected, or a Comparison or "
            "SweepResult and out, the page to write"
        )
    else:
        with TemporaryDirectory() as folder:
            results.save(folder)
            page, target = _page_of(Path(folder))
    target = target if out is None else Path(out)
    try:
        # Written beside and put in its place, so that a page is whole or not there.
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        part.write_text(page.html(), encoding="utf-8")
        part.replace(target)
    except (OSError, ValueError) as e:
        raise UserError(f"{target}: cannot write the report: {getattr(e, 'strerror', None) or e}") from None
    return target


def _page_of(given: Path) -> tuple[Page, Path]:
    """The page, and where it goes by default."""
    folder = given.parent if given.is_file() else given
    writers = ", ".join(f"{who} ({name})" for name, (who, _) in _KINDS.items())
    if not folder.is_dir():
        raise UserError(f"{folder}: no such results; a folder is expected that one of these wrote: {writers}")
    if given.is_file() and (own := _own_sweep(given)) is not None:
        return _named(own)
    for name, (who, make) in _KINDS.items():
        if (folder / name).is_file():
            return _made(folder / name, who, make), folder / "report.html"
    others = [path for path in sorted(folder.glob("*.json")) if path.with_suffix(".csv").is_file()]
    if len(others) > 1:
        names = ", ".join(path.name for path in others)
        raise UserError(f"{folder}: several sweeps in it; name one of {names}")
    if others:
        return _named(others[0])
    raise UserError(f"{folder}: no results in it; a folder is expected that one of these wrote: {writers}")


def _own_sweep(given: Path) -> Path | None:
    """The object that a sweep wrote beside a file of its own, where it does not have the default name."""
    try:
        with given.open("rb") as file:
            is_store = file.read(len(_STORE)) == _STORE
    except OSError as e:
        raise UserError(f"{given}: cannot be read: {e.strerror}") from None
    if is_store:
        mixed_step = given.with_name(written_names(given)["json"])
        if not mixed_step.is_file():
            raise UserError(f"{mixed_step}: not there; run kvsim sweep with --out {given} again")
        return mixed_step
    stem = given.stem
    for end in ("-runs", "-best", "-failures"):
        stem = stem.removesuffix(end)
    mixed_step = given.with_name(f"{stem}.json")
    return mixed_step if mixed_step.name not in _KINDS and mixed_step.is_file() else None


def _named(path: Path) -> tuple[Page, Path]:
    """The page of a sweep by its object, and where it goes."""
    page = _made(path, "kvsim sweep", lambda folder, told: sweep_page(folder, told, f"{path.stem}.png"))
    return page, path.with_name("report.html" if path.stem == "sweep" else f"{path.stem}-report.html")


def _made(path: Path, who: str, make: Callable[[Path, dict[str, Any]], Page]) -> Page:
    told = read_json(path)
    try:
        return make(path.parent, told)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as e:
        if isinstance(e, UserError):
            raise
        raise UserError(f"{path}: not what {who} wrote ({type(e).__name__}: {e}); run it again") from None
