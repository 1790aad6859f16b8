"""``kvsim conform``: recorded runs of a real engine, replayed on our policies."""

from __future__ import annotations

from typing import Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import print_json, print_report
from kvsim.cli.options import Json
from kvsim.errors import UserError, no_such

app = typer.Typer(add_completion=False)


@app.command()
def conform(
    engine: Annotated[
        str,
        typer.Argument(
            help="What was recorded: llamacpp (its cache), llama-server, vllm or router.",
            autocompletion=completion.conforming_engines,
        ),
    ],
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Recordings, JSONL, plain or gzip.")],
    as_json: Json = False,
) -> None:
    """Replay recorded runs of a real engine on our policies, comparing the state after every operation."""
    from kvsim.engines.recordings.conformance import ENGINES

    if engine not in ENGINES:
        raise UserError(no_such("recorded engine", engine, ENGINES))
    found, refused = [], []
    for file in files:
        try:
            found.append(ENGINES[engine](file))
        except UserError as e:
            refused.append(str(e))
    agreed = all(a.first is None for a in found)
    if refused and not found:
        raise UserError("\n".join(refused))
    if as_json:
        print_json({"engine": engine, "agree": agreed, "files": [a.to_dict() for a in found]})
    else:
        from kvsim.reports.conformance_report import conformance_report

        print_report(conformance_report(found))
    if refused:  # What the others say is not lost.
        raise UserError("\n".join(refused))
    if not agreed:
        raise typer.Exit(1)
