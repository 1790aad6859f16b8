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
    str,
    typer.Argument(metavar="SCENARIO", help="A built-in scenario or a TOML file.", autocompletion=completion.scenarios),
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
TensorParallel = Annotated[
    int | None, typer.Option("--tp", help="Devices that share the model (tensor parallelism).", min=1, max=64)
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
DeviceCacheType = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help=f"Storage type of K and V: {', '.join(STORED)}.",
        autocompletion=completion.scenario_storages,
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

    for group in GROUPS:
        if group == name:
            return group
    raise UserError(f"--group: {no_such('group of policies', name, GROUPS)}")


def storage_type(option: str, name: str) -> Storage:
    """The storage type that an option names. Raises ``UserError``."""
    if name not in STORAGES:
        raise UserError(f"{option}: {no_such('type', name, STORAGES)}")
    return name


def storage_type_or_none(option: str, name: str | None) -> Storage | None:
    """The storage type that an option names, if it was given. Raises ``UserError``."""
    return None if name is None else storage_type(option, name)
