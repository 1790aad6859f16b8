"""Standard output and standard error, as every command uses them."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from kvsim.reports.report import Report, Table


def console() -> Console:
    """A console as wide as the terminal; for a file or a pipe, wide enough for whole tables."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=140)


def print_report(report: Report, details: bool = True) -> None:
    """Print a report: its basis, title and conclusions, and then text and tables."""
    draw_report(console(), report, details)


def draw_report(on: Console, report: Report, details: bool = True) -> None:
    """Draw a report on a console, with its details or without; figures and snapshots are left to pages."""
    said: set[str] = set()
    _print_lines(on, report.basis)
    _print_lines(on, filter(None, [report.title]), "bold")
    _print_lines(on, filter(None, [report.meaning]))
    _print_lines(on, report.conclusions, "bold")
    _print_lines(on, [*report.about, *(report.assumed if details else ())])
    for section in report.sections:
        if section.detail is not None and section.detail is not details:
            continue
        _print_lines(on, section.text)
        for table in _joined(section.tables):
            _print_table(on, table)
        _print_lines(on, section.notes, "dim")
        for heading, text in section.listings:
            _print_lines(on, [heading], "bold")
            # Several listings have options in common: what these do is said once.
            lines = [line for line in text.splitlines() if not (line.startswith("#   ") and line in said)]
            said.update(lines)
            _print_lines(on, (f"   {line}" for line in lines if line))
    _print_lines(on, report.warnings)


def _print_lines(on: Console, lines: Iterable[str], style: str | None = None) -> None:
    for line in lines:
        on.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def _joined(tables: Sequence[Table]) -> list[Table]:
    """Tables about the same rows, which a narrow page shows one below the other, side by side."""
    joined: list[Table] = []
    for table in tables:
        if joined and table.columns[0] == joined[-1].columns[0] and table.rows is joined[-1].rows:
            notes = "; ".join(filter(None, (joined[-1].note, table.note)))
            joined[-1] = replace(joined[-1], columns=(*joined[-1].columns, *table.columns[1:]), note=notes)
        else:
            joined.append(table)
    return joined


def _print_table(on: Console, table: Table) -> None:
    """Print a table; one too wide for the console is cut into pieces that each begin with what names the rows."""
    from rich.table import Table as Drawn
    from rich.text import Text

    rows = table.cells[: table.at_most]
    texts = [[cell.text for cell in row] for row in rows]
    if table.keys > 1:
        texts = [_without_repeats(row, before, table.keys) for row, before in zip(texts, [[], *texts], strict=False)]
    widths = [max((len(row[i]) for row in texts), default=0) for i in range(len(table.columns))]
    heads = [column.heading for column in table.columns]
    if sum(max(width, len(head)) + 2 for width, head in zip(widths, heads, strict=True)) > on.width:
        heads = [_folded(head, width) for head, width in zip(heads, widths, strict=True)]
    widths = [max(width, *map(len, head.split("\n"))) for width, head in zip(widths, heads, strict=True)]
    for columns in _pieces(widths, table.keys, on.width):
        drawn = Drawn(box=None, header_style="bold", pad_edge=False, show_header=any(heads))
        for i in columns:
            is_text = any(isinstance(row[i].value, str) for row in rows)
            drawn.add_column(heads[i], justify="left" if i == 0 or is_text else "right")
        for row, shown in zip(rows, texts, strict=True):
            drawn.add_row(*(Text.assemble(*row[i].pieces) if row[i].pieces else Text(shown[i]) for i in columns))
        on.print(drawn)
    more = len(table.cells) - len(rows)
    rest = [f"and {more:,} more rows, see {table.all_in}"] if more else []
    _print_lines(on, filter(None, [*rest, table.note]), "dim")
    on.print()


def _pieces(widths: Sequence[int], keys: int, width: int) -> Iterator[list[int]]:
    """The columns of each piece of a table that is cut to the width of a console."""
    named = list(range(keys))
    piece, room = list(named), width - sum(widths[:keys]) - 2 * (keys - 1)
    left = room
    for i in range(keys, len(widths)):
        if len(piece) > keys and left < widths[i] + 2:
            yield piece
            piece, left = list(named), room
        piece.append(i)
        left -= widths[i] + 2
    yield piece


def _without_repeats(row: list[str], before: list[str], keys: int) -> list[str]:
    """A row's texts; what names it is left out as far as it is the same in the row before."""
    same = next((i for i in range(min(keys, len(before))) if row[i] != before[i]), min(keys, len(before)))
    return [*[""] * same, *row[same:]]


def _folded(heading: str, width: int) -> str:
    """A heading in one or two lines, as narrow as its column allows."""
    from textwrap import wrap

    width = max(width, *map(len, heading.split()), 1)
    while len(lines := wrap(heading, width, break_on_hyphens=False)) > 2:
        width += 1
    return "\n".join(lines)


def answer(
    found: Any,
    as_json: bool,
    *told: Any,
    of: Callable[[Any], dict[str, Any]] | None = None,
    details: bool = True,
) -> None:
    """Print a result: its object (``to_dict``, or what ``of`` makes), or its report, whose maker is ``told`` more."""
    if as_json:
        print_json(found.to_dict() if of is None else of(found))
    else:
        from kvsim.reports.report import report_of

        print_report(report_of(found, *told), details)


def print_json(value: Any) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(value, indent=1, allow_nan=False))


def print_saved(files: Iterable[Path], folder: Path) -> None:
    """Name the files that a command wrote."""
    typer.echo(f"\nSaved {', '.join(path.name for path in files)} in {folder}/")


def warn(lines: Iterable[str]) -> None:
    """Print warnings to standard error, a line for each; a ``Remark`` of a workload is none."""
    for line in lines:
        typer.echo(f"{getattr(line, 'heading', 'warning')}: {line}", err=True)


def note(line: str) -> None:
    """Say to standard error what is being done."""
    typer.echo(line, err=True)


def point_to_questions(words: str) -> None:
    """Say which common questions have to do with what was printed."""
    typer.echo(f"See also: kvsim questions {words}")


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print the warnings of our packages that are meant for users in a line each; others as Python does."""
    with warnings.catch_warnings():
        as_usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if category.__module__.startswith(("kvsim.", "policies.")):
                warn([str(message)])
            else:
                as_usual(message, category, *where, **more)

        warnings.showwarning = show
        yield


def fail(message: str, code: int) -> int:
    """Print why the command fails to standard error, and return its exit code."""
    for line in message.splitlines():
        typer.echo(f"kvsim: {line}", err=True)
    return code
