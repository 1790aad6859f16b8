"""Where the command line's words go."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console


def console() -> Console:
    """As wide as the terminal; a file or a pipe gets room for whole tables."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def print_json(value: Any) -> None:
    """One JSON object."""
    typer.echo(json.dumps(value, indent=1, allow_nan=False))


def warn(lines: Iterable[str]) -> None:
    """On the error stream, a line each."""
    for line in lines:
        typer.echo(f"warning: {line}", err=True)
