"""``kvsim check``: what a command line of a server will do."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import answer
from kvsim.cli.option_groups import UsersOptions, takes_groups
from kvsim.cli.options import Json
from kvsim.errors import UserError

app = typer.Typer(add_completion=False)


@app.command()
@takes_groups
def check(
    users: UsersOptions,
    command: Annotated[
        str, typer.Argument(help='In quotation marks: "llama-server -m x.gguf -c 65536 -np 12", "vllm serve ...".')
    ],
    model: Annotated[
        str | None,
        typer.Option(help="The model, unless the command names one.", autocompletion=completion.models),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Storage type of the weights, unless it names that.", autocompletion=completion.weight_types),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="The GPU, such as rtx4090.", autocompletion=completion.devices)
    ] = None,
    memory: Annotated[str | None, typer.Option(help="In place of --device: 24GiB.")] = None,
    reserve: Annotated[str | None, typer.Option(help="What others keep of it, such as 2GiB.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Prompt and answer of the users' longest request, in place of --prompt.", min=1)
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a server's command line will do: what fits, what each user gets, what misleads, what to change."""
    from kvsim.advice.memory.check import check as check_line

    asked = {"model": model, "weights": weights, "device": device, "memory": memory, "reserve": reserve}
    said = ""
    if replace(users, users=None).typed:
        if tokens is not None:
            raise UserError("--tokens: of the longest request, which --prompt and --output draw; give one of them")
        from kvsim.scenario.users import longest_request

        tokens, said = longest_request(users.traffic["workload"])
    found = check_line(command, users=users.users, tokens=tokens, **asked)
    answer(replace(found, assumed=(said, *found.assumed)) if said else found, as_json)
