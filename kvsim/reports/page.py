"""A page and its HTML: one self-contained file in which all text is escaped."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from kvsim.errors import counted
from kvsim.experiments.estimates import Interval
from kvsim.experiments.interval_text import with_ends
from kvsim.simulation.snapshots import Snapshots

if TYPE_CHECKING:
    import jinja2
    import markupsafe
    from matplotlib.figure import Figure as Drawing

_GRID = 64
"""Cells per row of a snapshot."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table: the text shown, and the value to sort by."""

    text: str
    value: float | str | None = None
    """None for an unknown value, which is sorted last."""


@dataclass(frozen=True)
class Table:
    """A table that the reader can sort by any column."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    narrow: bool = False
    """Whether it needs only half of a wide page."""


@dataclass(frozen=True)
class Figure:
    """An image with a title."""

    title: str
    source: str
    """A ``data:`` URL."""
    alt: str
    wide: bool = False
    """Whether small screens scroll the image instead of shrinking it."""

    @classmethod
    def of(cls, title: str, drawing: Drawing, alt: str, *, wide: bool = False) -> Figure:
        """Make one from a matplotlib figure."""
        data = io.BytesIO()
        drawing.savefig(data, format="png", dpi=120)
        return cls.of_png(title, data.getvalue(), alt, wide=wide)

    @classmethod
    def of_png(cls, title: str, data: bytes, alt: str, *, wide: bool = False) -> Figure:
        """Make one from the bytes of a PNG file."""
        return cls(title, "data:image/png;base64," + base64.b64encode(data).decode(), alt, wide)


@dataclass(frozen=True)
class SnapshotStrip:
    """Snapshots of the cells over time, with a slider."""

    snapshots: Snapshots

    @property
    def caption(self) -> str:
        """How to read the snapshots."""
        every = self.snapshots.every
        square = "each square is one cell" if every == 1 else f"each square is one of {every} cells"
        return f"{square}, in reading order; each sequence has a colour, free cells are empty"

    @property
    def data(self) -> dict[str, Any]:
        """The data that the page's script draws and says."""
        held = self.snapshots.host
        return {
            "columns": _GRID,
            "cells": int(self.snapshots.cells.shape[1]),
            "times": [round(float(t), 6) for t in self.snapshots.times_s],
            "frames": base64.b64encode(self.snapshots.cells.tobytes()).decode(),
            "said": [] if held is None else [_held(prompts, size) for prompts, size in held.tolist()],
        }


@dataclass(frozen=True)
class Section:
    """A section of a page; its parts are shown in the order of the fields."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    snapshots: Sequence[SnapshotStrip] = ()
    listings: Sequence[tuple[str, str]] = ()
    """Pairs of a heading and preformatted text."""


@dataclass(frozen=True)
class Page:
    """A report as one HTML page."""

    title: str
    asked: Sequence[str]
    """The question, as paragraphs."""
    conclusion: Sequence[str]
    """The answer, as sentences."""
    sections: Sequence[Section] = field(default_factory=tuple)
    footer: str = ""

    def html(self) -> str:
        """Return the complete file."""
        return _template().render(page=self, style=_asset("page.css"), script=_asset("page.js"))


def number(value: float | None, digits: int = 3, unit: str = "") -> Cell:
    """Make a cell of a number, shown with the given number of significant digits."""
    if value is None or value != value:
        return Cell("–", None)
    whole = abs(value) >= 10**digits or value == int(value)
    text = f"{value:,.0f}" if whole else f"{value:.{digits}g}"
    return Cell(f"{text}{unit}", float(value))


def share(value: float | None) -> Cell:
    """Make a cell of a share, shown in percent."""
    return Cell("–", None) if value is None or value != value else Cell(f"{value:.1%}", float(value))


def milliseconds(seconds: float | None) -> Cell:
    """Make a cell of a time in seconds, shown in milliseconds."""
    return number(None if seconds is None else 1e3 * seconds)


def interval(value: float | None, low: float | None, high: float | None, scale: float = 1.0, unit: str = "") -> Cell:
    """Make one cell of an estimate and its interval, sorted by the estimate; ``scale`` multiplies all three."""
    if value is None or low is None or high is None:
        return number(None if value is None else scale * value, unit=unit)
    return Cell(with_ends(Interval(value, low, high), scale, unit), float(value))


def words(text: str) -> Cell:
    """Make a cell of a text, sorted without regard to case."""
    return Cell(text, text.lower())


def _held(prompts: int, size: int) -> str:
    """What the host cache holds, in words."""
    return f"host cache: {counted(prompts, 'prompt')}, {size / 1e6:,.1f} MB"


@cache
def _asset(name: str) -> markupsafe.Markup:
    """A file of this package, which needs no escaping."""
    import markupsafe

    text = (resources.files("kvsim.reports") / name).read_text(encoding="utf-8")
    return markupsafe.Markup(text)


@cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(str(_asset("page.html")))
