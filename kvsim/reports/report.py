"""What was found, ready to be shown: one ``Report``, from which the console, an HTML page and a notebook are drawn."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from numbers import Real
from typing import TYPE_CHECKING, Any

from kvsim.model.storage_types import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from kvsim.simulation.snapshots import Snapshots

UNKNOWN = "–"
_GRID = 64
"""Cells per row of a snapshot."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table: the text shown, and the value to sort by."""

    text: str
    value: float | str | None = None
    """None for an unknown value, which is sorted last."""
    pieces: Sequence[tuple[str, str]] = ()
    """The text in pieces, each with its style on a console."""


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, where a row has its value, and how that is written."""

    heading: str
    value: str | int | Callable[[Any], Any]
    """The key in a row, or a function of the row; None and NaN are unknown."""
    show: Callable[[Any], str] = str
    meaning: str = ""
    """What the value is, where the heading does not say it; a page shows it beside the pointer."""

    def cell(self, row: Any) -> Cell:
        """The cell of a row."""
        value = self.value(row) if callable(self.value) else row[self.value]
        if value is None or value != value:
            return Cell(UNKNOWN)
        if isinstance(value, Cell):
            return value
        text, known = self.show(value), getattr(value, "value", value)
        is_number = not isinstance(known, bool) and isinstance(known, Real)
        return Cell(text, float(known) if is_number else str(known).lower())


@dataclass(frozen=True)
class Table:
    """Rows under columns; on a page, a reader can sort them by any column."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    note: str = ""
    keys: int = 1
    """Columns that name a row: where the table is cut for a narrow console, each piece begins with them."""
    narrow: bool = False
    """Whether it needs only half of a wide page."""
    at_most: int | None = None
    """Rows on a console; the file ``all_in`` has all of them."""
    all_in: str = ""

    @cached_property
    def cells(self) -> list[list[Cell]]:
        """A list for each row."""
        return [[column.cell(row) for column in self.columns] for row in self.rows]


@dataclass(frozen=True)
class Figure:
    """A picture with a title; pages show it."""

    title: str
    draw: Callable[[], Drawing | bytes]
    """Draws it, or reads the PNG file that was saved."""
    alt: str = ""
    wide: bool = True
    """Whether small screens scroll the image instead of shrinking it."""

    @property
    def source(self) -> str:
        """The image as a ``data:`` URL."""
        from io import BytesIO

        drawn = self.draw()
        if not isinstance(drawn, bytes):
            data = BytesIO()
            drawn.savefig(data, format="png", dpi=120)
            drawn = data.getvalue()
        return "data:image/png;base64," + base64.b64encode(drawn).decode()


@dataclass(frozen=True)
class SnapshotStrip:
    """Snapshots of the cells over time; a page shows them with a slider."""

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
        held = [] if self.snapshots.host is None else self.snapshots.host.tolist()
        return {
            "columns": _GRID,
            "cells": int(self.snapshots.cells.shape[1]),
            "times": [round(float(t), 6) for t in self.snapshots.times_s],
            "frames": base64.b64encode(self.snapshots.cells.tobytes()).decode(),
            "said": [f"host cache: {n} prompt{'s' * (n != 1)}, {format_size(size)}" for n, size in held],
        }


@dataclass(frozen=True)
class Section:
    """A part of a report; what it has is shown in the order of the fields."""

    title: str = ""
    """Shown on pages."""
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    """What explains the tables, in smaller or paler letters."""
    figures: Sequence[Figure] = ()
    snapshots: Sequence[SnapshotStrip] = ()
    listings: Sequence[tuple[str, str]] = ()
    """Pairs of a heading and what to type, with comments (#)."""
    detail: bool | None = None
    """True: part of the details, which a console leaves out unless asked; False: there in their place."""


@dataclass(frozen=True)
class Report:
    """What was found, and what it rests on."""

    title: str = ""
    basis: Sequence[str] = ()
    """What predicted times rest on."""
    about: Sequence[str] = ()
    """What was asked or run."""
    conclusions: Sequence[str] = ()
    sections: Sequence[Section] = ()
    warnings: Sequence[str] = ()
    """What the reader must know before using the figures."""
    footer: str = ""
    meaning: str = ""
    """What is asked, and why it matters, for a reader who is new to it."""
    assumed: Sequence[str] = ()
    """What was assumed; a console that leaves out details leaves it out."""

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        from kvsim.reports.page import fragment

        return fragment(self)


_MAKERS = {
    "Accuracy": "accuracy_report.accuracy_report",
    "BenchCalibration": "calibration_report.bench_calibration_report",
    "Calibration": "calibration_report.calibration_report",
    "Comparison": "comparison_report.comparison_report",
    "DeviceComparison": "recommendation_report.advice_report",
    "DeviceFit": "profile_report.fit_report",
    "Diagnosis": "diagnosis_report.diagnosis_report",
    "DraftCounts": "comparison_report.draft_counts_report",
    "EvictionCost": "accuracy_report.eviction_report",
    "LiveValidation": "held_report.live_validation_report",
    "MemoryAnswer": "recommendation_report.advice_report",
    "MemoryReport": "memory_report.memory_report",
    "Plan": "memory_report.plan_report",
    "Check": "check_report.check_report",
    "PrefixStudy": "workload_report.prefix_report",
    "Profile": "profile_report.profile_report",
    "PublishedValidation": "published_report.published_report",
    "Recommendation": "recommendation_report.advice_report",
    "RecordedValidation": "validation_report.recorded_report",
    "Result": "run_report.run_report",
    "ServerCalibration": "calibration_report.server_calibration_report",
    "SweepResult": "sweep_report.sweep_report",
    "Tuned": "tuning_report.tuning_report",
    "Validation": "validation_report.validation_report",
    "Verification": "held_report.verification_report",
    "WorkloadFit": "workload_report.workload_fit_report",
}
"""What makes the report of each kind of result."""


def report_of(result: Any, *details: Any) -> Report:
    """The report of a result that a verb returned, such as a ``Comparison``."""
    module, _, name = _MAKERS[type(result).__name__].partition(".")
    made: Report = getattr(import_module(f"kvsim.reports.{module}"), name)(result, *details)
    return made
