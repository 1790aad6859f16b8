"""Standard output and standard error, as every command uses them."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console


def console() -> Console:
    """A console as wide as the terminal; for a file or a pipe, wide enough for whole tables."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=140)


def print_json(value: Any) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(value, indent=1, allow_nan=False))


def print_saved(files: Iterable[Path], folder: Path) -> None:
    """Name the files that a command wrote."""
    typer.echo(f"\nSaved {', '.join(path.name for path in files)} in {folder}/")


def warn(lines: Iterable[str]) -> None:
    """Print warnings to standard error, a line for each."""
    for line in lines:
        typer.echo(f"warning: {line}", err=True)


def point_to_questions(words: str) -> None:
    """Say which common questions have to do with what was printed."""
    typer.echo(f"See also: kvsim questions {words}")


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print the warnings of our packages that are meant for users in a line each; others as Python does."""
    with warnings.catch_warnings():
        as_usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if category.__module__.startswith("policies."):
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
