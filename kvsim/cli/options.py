"""Options that several commands have, and what is made of their values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli import completion
from kvsim.errors import UserError, no_such
from kvsim.model.engine_shapes import STORAGES, STORED, Storage

if TYPE_CHECKING:
    from policies import PresetGroup

ScenarioName = Annotated[
    str | None,
    typer.Argument(
        metavar="SCENARIO",
        help="A built-in scenario, a TOML file or, with --model and --device, a trace or a log.",
        show_default="chat",
        autocompletion=completion.scenarios,
    ),
]
_USERS = "Traffic in its users' words, in place of the scenario's"
Users = Annotated[
    int | None,
    typer.Option(help="So many people or agents, who wait for each answer.", min=1, rich_help_panel=_USERS),
]
PromptTokens = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Mean of their prompts, such as 6000; 6000:0.8 with its spread (by default 0.5), 6000:0 always the same.",
        rich_help_panel=_USERS,
    ),
]
SharedTokens = Annotated[
    int | None,
    typer.Option(metavar="TOKENS", help="How many of these are a shared system prompt.", min=0, rich_help_panel=_USERS),
]
OutputTokens = Annotated[
    str | None, typer.Option(metavar="TOKENS", help="Mean of their answers, like --prompt.", rich_help_panel=_USERS)
]
Think = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="Mean time from an answer to the next prompt, such as 30s.", rich_help_panel=_USERS
    ),
]
Turns = Annotated[
    int | None,
    typer.Option(help="Requests of a conversation (1); each repeats those before.", min=1, rich_help_panel=_USERS),
]
Growth = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="How much longer each further prompt is, with the answer that it repeats.",
        rich_help_panel=_USERS,
    ),
]
ToolShare = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Of agents: the share of further turns that bring a tool's result, such as 0.9.",
        min=0,
        max=1,
        rich_help_panel=_USERS,
    ),
]
ToolTime = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Mean time that a tool takes (1s).", rich_help_panel=_USERS),
]
Seed = Annotated[int | None, typer.Option(help="Replace the scenario's seed.")]
Requests = Annotated[
    int | None,
    typer.Option(help="Run this many requests (conversations, where the workload has sessions); of a trace, at most."),
]
ProfileName = Annotated[
    str | None,
    typer.Option("--profile", help="A shipped machine profile or a profile file.", autocompletion=completion.profiles),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The model that is served: one of kvsim plan --list, a config.json, or FILE.gguf.",
        autocompletion=completion.models,
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", help="The GPU that serves it, such as rtx4090.", autocompletion=completion.devices),
]
Replicas = Annotated[int | None, typer.Option(help="Servers like this one, behind a router.", min=1, max=1024)]
RouterName = Annotated[
    str | None,
    typer.Option("--router", help="Which of the servers gets a request.", autocompletion=completion.routers),
]
TensorParallel = Annotated[
    int | None, typer.Option("--tp", help="Devices that share the model (tensor parallelism).", min=1, max=64)
]
ExpertParallel = Annotated[
    int | None,
    typer.Option(
        "--ep", help="vLLM: servers of --replicas that divide the experts (expert parallelism).", min=1, max=64
    ),
]
DeviceWeights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help="Storage type of the weights on the device, unless it is the model's own.",
        autocompletion=completion.weight_types,
    ),
]
DeviceEngine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="The engine on the device: vllm or llamacpp; by default that of scheduler, policy and weights.",
        autocompletion=completion.planned_engines,
    ),
]
GpuLayers = Annotated[
    int | None,
    typer.Option("--ngl", "--n-gpu-layers", help="llama.cpp: layers on the device; the CPU has the others.", min=0),
]
CpuExperts = Annotated[
    int | None, typer.Option("--n-cpu-moe", help="llama.cpp: layers whose experts the CPU has.", min=0)
]
CpuBandwidth = Annotated[
    float | None,
    typer.Option(
        "--cpu-gb-s", help="Bandwidth of the computer's memory for layers on the CPU, GB/s; by default 89.6.", min=0.1
    ),
]
FlashAttention = Annotated[
    bool | None, typer.Option("--flash-attn/--no-flash-attn", help="llama.cpp on a device: flash attention.")
]
DeviceCacheType = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help=f"Storage type of K and V: {', '.join(STORED)}.",
        autocompletion=completion.scenario_storages,
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Hold policies to their word at every step; their placement rules, which would take steps unseen, are not "
        "used. Plug-ins are always held to theirs, at first and by sample.",
    ),
]
Plots = Annotated[bool, typer.Option("--plots", help="Draw pictures too, and save them beside the tables.")]
Policy = Annotated[
    str | None,
    typer.Option("--policy", "-p", help="Replace the scenario's policy.", autocompletion=completion.policies),
]
Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", "-p", help="Can be given several times.", autocompletion=completion.policies),
]
Scheduler = Annotated[
    str | None,
    typer.Option("--scheduler", help="Replace the scenario's scheduler.", autocompletion=completion.schedulers),
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE.py",
        help="A file with policies, schedulers or orders of eviction of your own; can be given several times.",
    ),
]
SkipBadRows = Annotated[bool, typer.Option("--skip-bad-rows", help="Leave out bad rows of a trace, and list them.")]
DropFailed = Annotated[bool, typer.Option("--drop-failed", help="BurstGPT: leave out calls that failed (0 tokens).")]
ContinueClock = Annotated[
    bool, typer.Option("--continue-clock", help="RAGPulse: where the clock jumps back by days, continue a week later.")
]
_MAX_FAILED = typer.Option(
    metavar="SHARE", help="Also rank policies that failed at most this share of their requests, such as 5%."
)
MaxFailed = Annotated[str, _MAX_FAILED]
MaxFailedOrOwn = Annotated[str | None, _MAX_FAILED]
Columns = Annotated[
    str | None,
    typer.Option(
        metavar="FIELD=NAME,...",
        help="Columns of a table of your own: arrival, prompt, output, and perhaps session and priority.",
    ),
]
TimeUnit = Annotated[
    str | None,
    typer.Option("--time", help="The unit of its arrivals: s, ms, us or ns, or datetime; detected by default."),
]
Out = Annotated[Path, typer.Option(help="The folder for pictures and tables.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
EngineName = Annotated[
    str,
    typer.Option(
        help="numpy (our own engine) or llamacpp (the real llama.cpp).", autocompletion=completion.measured_engines
    ),
]
KeyEnv = Annotated[
    str | None,
    typer.Option("--key-env", metavar="NAME", help="With --url: the environment variable that has the server's key."),
]
AllowRemote = Annotated[bool, typer.Option("--allow-remote", help="With --url: allow a server on another machine.")]
Silence = Annotated[
    float, typer.Option("--timeout", help="With --url: the longest silence of the server, s.", min=0.01)
]
LibraryFolder = Annotated[
    Path | None,
    typer.Option(
        envvar="KVSIM_LLAMA_CPP",
        help="llama.cpp: a folder with a llama-cpp-python other than the installed one (pip install --target).",
    ),
]
LlamaThreads = Annotated[int, typer.Option(help="llama.cpp: threads that it computes with.", min=1, max=512)]
NumpyThreads = Annotated[int, typer.Option(help="Threads for matrix products.", min=1)]
KeyType = Annotated[
    str,
    typer.Option(
        "--cache-type-k", help=f"Storage type of keys: {', '.join(STORAGES)}.", autocompletion=completion.storages
    ),
]
ValueType = Annotated[
    str, typer.Option("--cache-type-v", help="Storage type of values.", autocompletion=completion.storages)
]
WeightType = Annotated[
    str,
    typer.Option(
        "--weights", help="Storage type of weights: f32, f16, int8, mapped.", autocompletion=completion.weight_forms
    ),
]


def load_plugins(files: list[Path] | None) -> None:
    """Make what single files have of others' available. Raises ``UserError``."""
    if files:
        from policies import PluginError, load_plugin

        try:
            for file in files:
                load_plugin(file)
        except PluginError as e:
            raise UserError(str(e)) from e


def preset_group(name: str) -> PresetGroup:
    """The group of policies that a user names. Raises ``UserError``."""
    from policies import GROUPS

    if name not in GROUPS:
        raise UserError(f"--group: {no_such('group of policies', name, GROUPS)}")
    return name


def storage_type(option: str, name: str) -> Storage:
    """The storage type that an option names. Raises ``UserError``."""
    if name not in STORAGES:
        raise UserError(f"{option}: {no_such('type', name, STORAGES)}")
    return name


def storage_type_or_none(option: str, name: str | None) -> Storage | None:
    """The storage type that an option names, if it was given. Raises ``UserError``."""
    return None if name is None else storage_type(option, name)
