"""Run the scenarios of docs/reproduced.md and print its figures: ``python -m benchmarks.reproduced [IDEA ...]``."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

IDEAS: dict[str, str] = {
    "admission": "admission",
    "virtual-memory": "virtual_memory",
    "two-level-pages": "two_level_pages",
    "radix-tree": "radix_tree",
    "eviction-cost": "eviction_cost",
    "token-eviction": "token_eviction",
    "workload-aware": "workload_aware",
    "searches": "searches",
}
"""The ideas by name, and the module here whose function ``find`` gives their findings."""


def main(ideas: Annotated[list[str] | None, typer.Argument(help="Only these; by default all.")] = None) -> None:
    """Print each published figure, and ours."""
    console = Console(width=120)
    for name in ideas or IDEAS:
        if name not in IDEAS:
            console.print(f"no idea called {name!r}; there are {', '.join(IDEAS)}", markup=False)
            raise typer.Exit(2)
        for finding in import_module(f"benchmarks.reproduced.{IDEAS[name]}").find():
            console.print(f"[bold]{escape(finding.idea)}[/]: {escape(finding.claim)}")
            console.print(f"  source   {escape(finding.source)}", highlight=False)
            console.print(f"  here     {escape(finding.figure())}", highlight=False)
            console.print(f"  differs  {escape(finding.differs)}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
