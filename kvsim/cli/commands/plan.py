"""``kvsim plan``: how much memory a model takes, and what fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import answer, print_json, print_report
from kvsim.cli.option_groups import takes_groups
from kvsim.cli.options import Json
from kvsim.errors import UserError
from kvsim.model.engine_versions import PRESENT
from kvsim.model.storage_types import CACHE_TYPES

_LLAMACPP = PRESENT["llama.cpp"]

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class PlanOptions:
    """What is planned; but for the model, the arguments of ``kvsim.plan``."""

    model: Annotated[
        str | None,
        typer.Option(help="A well-known model, a config.json, or FILE.gguf.", autocompletion=completion.models),
    ] = None
    ctx: Annotated[int, typer.Option(help="Tokens that each sequence may have.")] = 8192
    parallel: Annotated[int, typer.Option(help="Sequences of that length at once.")] = 1
    type_k: Annotated[
        str,
        typer.Option(
            "--cache-type-k",
            help=f"Storage type of keys: {', '.join(CACHE_TYPES)}.",
            autocompletion=completion.cache_types,
        ),
    ] = "f16"
    type_v: Annotated[
        str,
        typer.Option("--cache-type-v", help="Storage type of values.", autocompletion=completion.cache_types),
    ] = "f16"
    engine: Annotated[
        str | None, typer.Option(help="llamacpp or vllm; by default both.", autocompletion=completion.planned_engines)
    ] = None
    ubatch: Annotated[int, typer.Option(help="llama.cpp: tokens in a forward pass.")] = _LLAMACPP.n_ubatch
    batch: Annotated[
        int | None,
        typer.Option(help="Tokens in a batch; vLLM's --max-num-batched-tokens; by default 2048, or the device's."),
    ] = None
    kv_unified: Annotated[bool, typer.Option(help="llama.cpp: one stream of cells for all sequences.")] = (
        _LLAMACPP.unified
    )
    swa_full: Annotated[bool, typer.Option("--swa-full", help="llama.cpp: sliding windows keep every token.")] = False
    flash_attn: Annotated[bool, typer.Option(help="llama.cpp: flash attention.")] = _LLAMACPP.flash_attention
    block_size: Annotated[int, typer.Option(help="vLLM: tokens in a block.")] = PRESENT["vLLM"].block_size
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="vLLM: share of the memory that it may take; by default its own.")
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            help="Storage type of weights, such as q4_K_M; by default that of the config.json.",
            autocompletion=completion.weight_types,
        ),
    ] = None
    memory: Annotated[str | None, typer.Option(help="Memory of the device: 8GB, 8GiB, 512MiB or bytes.")] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="A GPU such as rtx4090 or h100_sxm, in place of --memory.", autocompletion=completion.devices
        ),
    ] = None
    tensor_parallel: Annotated[int, typer.Option("--tp", help="vLLM: GPUs over which each layer is divided.")] = 1
    vllm_version: Annotated[str, typer.Option(help="The version of vLLM whose profile of memory is followed.")] = (
        PRESENT["vLLM"].version
    )
    first_start: Annotated[
        bool,
        typer.Option("--first-start", help="vLLM: nothing is compiled yet; compiling takes memory from the blocks."),
    ] = False


@app.command()
@takes_groups
def plan(
    of: PlanOptions,
    list_models: Annotated[bool, typer.Option("--list", help="List the well-known models.")] = False,
    as_json: Json = False,
) -> None:
    """Show how much memory a model takes under llama.cpp and vLLM, part by part, and what fits."""
    from kvsim.costs.memory_plan import plan as make_plan

    if list_models:
        _list_models(as_json)
        return
    if of.model is None:
        raise UserError("--model: a name (kvsim plan --list), a config.json or FILE.gguf is expected")
    answer(make_plan(**vars(of)), as_json)


def _list_models(as_json: bool) -> None:
    from kvsim.model.memory_shapes import memory_shape, model_names
    from kvsim.reports.memory_report import models_report

    shapes = {name: memory_shape(name) for name in model_names()}
    if as_json:
        print_json({name: {"parameters": s.n_parameters, "source": s.source} for name, s in shapes.items()})
    else:
        print_report(models_report(shapes))
