"""Pages from what commands have saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsim.errors import UserError
from kvsim.report.comparison_page import comparison_page
from kvsim.report.page import Page
from kvsim.report.parts import read_json
from kvsim.report.recommendation_page import recommendation_page
from kvsim.report.sweep_page import sweep_page

_KINDS: dict[str, tuple[str, Callable[[Path, dict[str, Any]], Page]]] = {
    "comparison.json": ("kvsim compare", comparison_page),
    "sweep.json": ("kvsim sweep", sweep_page),
    "recommendation.json": ("kvsim recommend", recommendation_page),
}
"""By the file that is in the folder: who wrote it, and what makes a page of it."""


def report(results: str | Path, out: str | Path | None = None) -> Path:
    """Write a page about saved results; the file written, by default ``report.html`` beside them.

    ``results``: the folder that ``kvsim compare``, ``sweep`` or ``recommend`` wrote, or a file in it. Raises
    ``UserError``.
    """
    given = Path(results)
    folder = given.parent if given.is_file() else given
    page = _page_of(folder)
    target = Path(out) if out is not None else folder / "report.html"
    try:
        # Written beside and put in its place, so that a page is whole or not there.
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        part.write_text(page.html(), encoding="utf-8")
        part.replace(target)
    except (OSError, ValueError) as e:
        raise UserError(f"{target}: cannot write the report: {getattr(e, 'strerror', None) or e}") from None
    return target


def _page_of(folder: Path) -> Page:
    writers = ", ".join(f"{who} ({name})" for name, (who, _) in _KINDS.items())
    if not folder.is_dir():
        raise UserError(f"{folder}: no such results; a folder is expected that one of these wrote: {writers}")
    for name, (who, make) in _KINDS.items():
        path = folder / name
        if not path.is_file():
            continue
        told = read_json(path)
        try:
            return make(folder, told)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as e:
            if isinstance(e, UserError):
                raise
            raise UserError(f"{path}: not what {who} wrote ({type(e).__name__}: {e}); run it again") from None
    raise UserError(f"{folder}: no results in it; a folder is expected that one of these wrote: {writers}")
