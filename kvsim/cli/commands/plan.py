"""``kvsim plan``: how much memory a model takes, and what fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import completion
from kvsim.cli.console import answer, print_json, print_report
from kvsim.cli.option_groups import UsersOptions, refuse, takes_groups
from kvsim.cli.options import GpuLayers, Json
from kvsim.errors import UserError
from kvsim.model.engine_versions import PRESENT
from kvsim.model.storage_types import CACHE_TYPES, MAMBA_CACHE_TYPES

if TYPE_CHECKING:
    from kvsim.advice.memory.command_line import ServerLine

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
        str | None,
        typer.Option(
            help="llamacpp, vllm or ollama; by default the first two.", autocompletion=completion.planned_engines
        ),
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
    reserve: Annotated[
        str | None,
        typer.Option(help="What driver, desktop and chance keep of the memory, such as 2GiB; by default as is usual."),
    ] = None
    tensor_parallel: Annotated[int, typer.Option("--tp", help="vLLM: GPUs over which each layer is divided.")] = 1
    expert_parallel: Annotated[
        int, typer.Option("--ep", help="vLLM: servers that divide the experts, of which this is one.")
    ] = 1
    ngl: GpuLayers = None
    n_cpu_moe: Annotated[int, typer.Option(help="llama.cpp: layers whose experts the CPU has.")] = 0
    vllm_version: Annotated[str, typer.Option(help="The version of vLLM whose profile of memory is followed.")] = (
        PRESENT["vLLM"].version
    )
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching", help="vLLM: a sequence keeps a state more for others."
        ),
    ] = True
    mamba_cache_dtype: Annotated[
        str, typer.Option(help=f"vLLM: storage type of states: {', '.join(MAMBA_CACHE_TYPES)}.")
    ] = "auto"
    mamba_ssm_cache_dtype: Annotated[str, typer.Option(help="vLLM: storage type of recurrent states.")] = "auto"
    drafter: Annotated[
        str,
        typer.Option(
            help="What drafts beside it: a model, or head for one layer more, as EAGLE and MTP have.",
            autocompletion=completion.models,
        ),
    ] = ""
    first_start: Annotated[
        bool,
        typer.Option("--first-start", help="vLLM: nothing is compiled yet; compiling takes memory from the blocks."),
    ] = False


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@takes_groups
def plan(
    context: typer.Context,
    of: PlanOptions,
    users: UsersOptions,
    list_models: Annotated[bool, typer.Option("--list", help="List the well-known models.")] = False,
    as_json: Json = False,
) -> None:
    """Show how much memory a model takes under llama.cpp and vLLM, part by part, and what fits.

    An engine's own flags are taken too: -c 65536 -np 12 -ctk q8_0, where -c is the total of all slots as in
    llama-server, --max-model-len, --max-num-seqs and others of vLLM, and Ollama's variables (OLLAMA_NUM_PARALLEL=4).
    kvsim check reads a whole command line.

    With --users, for as many sequences, each as long as the longest request that is drawn for them.
    """
    from kvsim.costs.memory_plan import plan as make_plan

    said = ""
    if list_models:
        _list_models(as_json)
        return
    if of.model is None:
        raise UserError("--model: a name (kvsim plan --list), a config.json or FILE.gguf is expected")
    if users.traffic:
        from kvsim.scenario.users import longest_request

        refuse(of, "with --users, as many and as long as their requests", "ctx", "parallel")
        longest, said = longest_request(users.traffic["workload"])
        of = replace(of, parallel=users.users or 1, ctx=longest)
    options = vars(of) | {"n_gpu_layers": of.ngl}
    del options["ngl"]
    line = _typed_flags(context.args, of)
    made = make_plan(**(options | (_arguments(line, of) if line else {})))
    if said:
        made = replace(made, notes=(said, *made.notes))
    total = line.flags.get("--ctx-size") if line else None
    if total is not None and made.settings.parallel > 1 and not made.settings.kv_unified:
        each = f"{made.settings.ctx:,} tokens for each, rounded up to 256; --ctx is for each"
        made = replace(made, notes=(f"-c {total} is the total of {made.settings.parallel} slots: {each}", *made.notes))
    answer(made, as_json)


def _typed_flags(tokens: list[str], of: PlanOptions) -> ServerLine | None:
    """The flags of an engine, and variables of Ollama, that were typed; None without any. Raises ``UserError``."""
    if not tokens and of.engine != "ollama":
        return None
    from kvsim.advice.memory.command_line import read_flags

    line = read_flags(tokens, of.engine)
    if of.ctx != PlanOptions.ctx and "ctx" in line.sets:
        raise UserError("--ctx: tokens of each sequence, which the engine's own flags say too; give one of them")
    return line


def _arguments(line: ServerLine, of: PlanOptions) -> dict[str, Any]:
    """What flags set of what is planned; all else is as for ``kvsim plan`` without them. Raises ``UserError``."""
    from kvsim.costs.devices import device_named
    from kvsim.model.memory_shapes import memory_shape
    from kvsim.model.storage_types import parse_size

    memory = device_named(of.device).memory_bytes if of.device else of.memory and parse_size(of.memory)
    slots = -1 if of.parallel == PlanOptions.parallel else of.parallel
    found = line.plan_arguments(memory_shape(of.model or "").context, memory or None, of.device, slots)
    return {key: value for key, value in found.items() if key in line.sets or key == "engine"}


def _list_models(as_json: bool) -> None:
    from kvsim.model.memory_shapes import memory_shape, model_names
    from kvsim.reports.memory_report import models_report

    shapes = {name: memory_shape(name) for name in model_names()}
    if as_json:
        print_json({name: {"parameters": s.n_parameters, "source": s.source} for name, s in shapes.items()})
    else:
        print_report(models_report(shapes))
