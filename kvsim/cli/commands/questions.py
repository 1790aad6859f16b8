"""``kvsim questions``: answers to common questions."""

from __future__ import annotations

from typing import Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import print_json
from kvsim.cli.options import Json

app = typer.Typer(add_completion=False)


@app.command(context_settings={"ignore_unknown_options": True})
def questions(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NUMBER|WORD...]",
            help="Print the question with this number, or those that contain all of these words.",
            autocompletion=completion.question_words,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer common questions, each with a command to try."""
    from kvsim.advice.questions import find_questions
    from kvsim.advice.questions import questions as all_questions

    found = find_questions(words) if words else all_questions()
    if as_json:
        print_json({"questions": [question.to_dict() for question in found]})
    elif words:
        for question in found:
            typer.secho(f"{question.title}\n", bold=True)
            typer.echo(f"{question.plain}\n")
    else:
        for question in found:
            typer.echo(f"{question.number:>2}  {question.title}")
        typer.echo("\nFor the answer: kvsim questions NUMBER, or a word of the question, such as --cache-ram.")
