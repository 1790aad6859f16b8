"""One self-contained HTML file from saved results: no network, opens from disk."""

from kvsim.report.page import Figure, FilmStrip, Page, Section, Table
from kvsim.report.sources import report

__all__ = ["Figure", "FilmStrip", "Page", "Section", "Table", "report"]
