"""A page, and how it becomes HTML: all text is escaped, all that is needed lies within the file."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2
import markupsafe

from kvsim.simulation.snapshots import Snapshots

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_GRID = 64
"""Cells in a row of a snapshots."""


@dataclass(frozen=True)
class Cell:
    """What a table shows, and by what it is sorted."""

    text: str
    value: float | str | None = None
    """None: what cannot be said, sorted behind everything else."""


@dataclass(frozen=True)
class Table:
    """Rows that a reader can sort by any column."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A picture."""

    title: str
    source: str
    """A data address."""
    alt: str
    wide: bool = False
    """Whether a small screen shows it by scrolling rather than by shrinking."""

    @classmethod
    def of(cls, title: str, drawing: Drawing, alt: str) -> Figure:
        """A drawing of matplotlib's, as PNG."""
        data = io.BytesIO()
        drawing.savefig(data, format="png", dpi=120)
        return cls.of_png(title, data.getvalue(), alt)

    @classmethod
    def of_png(cls, title: str, data: bytes, alt: str, *, wide: bool = False) -> Figure:
        """A picture that is there already."""
        return cls(title, "data:image/png;base64," + base64.b64encode(data).decode(), alt, wide)


@dataclass(frozen=True)
class SnapshotStrip:
    """The cells over time, with a slider."""

    snapshots: Snapshots

    @property
    def caption(self) -> str:
        """What is shown."""
        shown = (
            "each square is a cell"
            if self.snapshots.every == 1
            else f"each square is one of {self.snapshots.every} cells"
        )
        return f"{shown}, read like a page; a colour for each sequence, empty where it is free"

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script draws."""
        return {
            "columns": _GRID,
            "cells": int(self.snapshots.cells.shape[1]),
            "times": [round(float(t), 6) for t in self.snapshots.times_s],
            "frames": base64.b64encode(self.snapshots.cells.tobytes()).decode(),
        }


@dataclass(frozen=True)
class Section:
    """A part of a page; whatever it has is shown in this order."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    snapshots: Sequence[SnapshotStrip] = ()
    listings: Sequence[tuple[str, str]] = ()
    """A heading and a text that is shown as it is."""


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    asked: Sequence[str]
    """What the question was, a paragraph each."""
    conclusion: Sequence[str]
    """What the figures support, a sentence each."""
    sections: Sequence[Section] = field(default_factory=tuple)
    footer: str = ""

    def html(self) -> str:
        """The whole file."""
        return _template().render(page=self, style=_asset("page.css"), script=_asset("page.js"))


def number(value: float | None, digits: int = 3, unit: str = "") -> Cell:
    """A number as a cell, with so many digits that count."""
    if value is None or value != value:
        return Cell("–", None)
    whole = abs(value) >= 10**digits or value == int(value)
    text = f"{value:,.0f}" if whole else f"{value:.{digits}g}"
    return Cell(f"{text}{unit}", float(value))


def share(value: float | None) -> Cell:
    """A share as a cell, in percent."""
    return Cell("–", None) if value is None or value != value else Cell(f"{value:.1%}", float(value))


def milliseconds(seconds: float | None) -> Cell:
    """Seconds as a cell, in milliseconds."""
    return number(None if seconds is None else 1e3 * seconds)


def words(text: str) -> Cell:
    """A text as a cell."""
    return Cell(text, text.lower())


@cache
def _asset(name: str) -> markupsafe.Markup:
    """Part of the page that is ours, and so needs no escaping."""
    text = (resources.files("kvsim.reports") / name).read_text(encoding="utf-8")
    return markupsafe.Markup(text)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(str(_asset("page.html")))
