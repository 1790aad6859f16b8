"""A report as HTML: one self-contained file in which all text is escaped, or its body alone for a notebook."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2
    import markupsafe

    from kvsim.reports.report import Report


def html(report: Report) -> str:
    """The complete file."""
    body = _safe(fragment(report))
    parts = {"style": _safe(_asset("page.css")), "script": _safe(_asset("page.js"))}
    return _template("page.html").render(report=report, body=body, **parts)


def fragment(report: Report) -> str:
    """The body of the page, without styles and scripts."""
    return _template("page.body.html").render(report=report)


@cache
def _asset(name: str) -> str:
    return (resources.files("kvsim.reports") / name).read_text(encoding="utf-8")


def _safe(text: str) -> markupsafe.Markup:
    """Text that needs no escaping."""
    import markupsafe

    return markupsafe.Markup(text)


@cache
def _template(name: str) -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_asset(name))
