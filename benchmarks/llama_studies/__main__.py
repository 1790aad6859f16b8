"""Measure what holes, defragmentation or K-shifts cost in llama.cpp: ``python -m benchmarks.llama_studies holes``."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.llama_studies.studies import measure_defragmentation, measure_holes, measure_shift
from kvsim.errors import UserError

MEASURES = {"holes": measure_holes, "defragmentation": measure_defragmentation, "shift": measure_shift}
Study = StrEnum("Study", list(MEASURES))


def main(
    study: Study,
    model: Annotated[str, typer.Option(help="smollm2, or a GGUF file.")] = "smollm2",
    library: Annotated[Path | None, typer.Option(help="A folder with another llama-cpp-python.")] = None,
    threads: int = 1,
    rounds: Annotated[int, typer.Option(help="How often each case is measured.")] = 20,
    picture: Annotated[Path | None, typer.Option(help="Draw the result to this file.")] = None,
) -> None:
    """Print the table and the summary of one study."""
    try:
        found = MEASURES[study](model, library=library, threads=threads, rounds=rounds)
    except UserError as e:
        print(e, file=sys.stderr)
        raise typer.Exit(2) from None
    print(found.table.to_string(index=False))
    print(found.summary)
    if picture is not None:
        found.plot().savefig(picture)


if __name__ == "__main__":
    typer.run(main)
