"""``kvsim report``: one page about saved results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.progress import RunProgress

app = typer.Typer(add_completion=False)


@app.command()
def report(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS", help="What kvsim compare, sweep or recommend wrote: its folder, or a file in it."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write; by default report.html beside the results (for NAME.sqlite: NAME-report.html)."
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page about saved results; it needs no network and opens from disk.

    Pictures that were not saved are drawn; for those of the cache over time the runs of a comparison are repeated.
    """
    from kvsim.reports.sources import report as write

    with RunProgress("running it again for its pictures", 100) as bar:
        written = write(results, out, progress=bar.share)
    typer.echo(f"Wrote {written} ({written.stat().st_size / 1e6:.1f} MB)")
