"""``kvsim profile``: the profiles of machines and devices, and how to get more of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import answer, print_json, print_report, warn
from kvsim.cli.options import DeviceName, Json, ModelName
from kvsim.errors import UserError

if TYPE_CHECKING:
    from kvsim.calibration.published.device_fit import DeviceFit

app = typer.Typer(
    add_completion=False, help="List, show and make profiles: the times of a model on a device.", no_args_is_help=True
)

Out = Annotated[
    Path | None,
    typer.Option(help="The file to write; by default one in your own profiles, where scenarios look for it."),
]
HostMs = Annotated[
    float | None,
    typer.Option(help="What the host adds to each step, ms; by default as the version is known to.", min=0, max=1000),
]
TensorParallel = Annotated[int, typer.Option("--tp", help="Devices that share the model.", min=1, max=64)]


@app.command("list")
def list_profiles(as_json: Json = False) -> None:
    """List the profiles that ship with kvsim, and those of your own."""
    from kvsim.reports.profile_report import known_profiles, profiles_report

    found = known_profiles()
    if as_json:
        print_json({each.pop("name"): each for each in found})
    else:
        print_report(profiles_report(found))


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="The name of a profile, or a file.", autocompletion=completion.profiles)],
    as_json: Json = False,
) -> None:
    """Show whose times a profile has, where they come from, how well it fits and how far it reaches."""
    from kvsim.reports.profile_report import load_named

    answer(load_named(name), as_json, of=lambda profile: profile.model_dump(mode="json"))


@app.command("import")
def import_folder(
    folder: Annotated[Path, typer.Argument(help="attention.csv, dense.csv, per_sequence.csv, and perhaps moe.csv.")],
    model: ModelName = None,
    device: DeviceName = None,
    vllm_version: Annotated[str | None, typer.Option(help="The version of vLLM that was measured.")] = None,
    tp: TensorParallel = 1,
    ep: Annotated[
        int, typer.Option("--ep", help="Devices that divide the experts (expert parallelism).", min=1, max=64)
    ] = 1,
    link_gb_s: Annotated[
        float | None,
        typer.Option(help="With --tp or --ep: bandwidth between the devices, GB/s in each direction.", min=1e-3),
    ] = None,
    link_latency_us: Annotated[
        float | None, typer.Option(help="With --tp or --ep: latency of a message between them, µs.", min=0)
    ] = None,
    host_ms: HostMs = None,
    source: Annotated[str | None, typer.Option(help="Who measured the tables.")] = None,
    url: Annotated[str, typer.Option(help="Where they were published.")] = "",
    licence: Annotated[str, typer.Option(help="Under which licence.")] = "not stated",
    note: Annotated[
        list[str] | None, typer.Option(help="A sentence that goes with the profile; can be given several times.")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Fit a profile to published tables of the kernels of one layer, in the format of LLMServingSim's profiler."""
    from kvsim.calibration.published.imports import ImportOptions, import_tables

    _check(out)
    link = (link_gb_s, link_latency_us)
    options = ImportOptions(
        model, device, vllm_version, tp, ep, *link, host_ms, source, url, licence, tuple(note or ())
    )
    _save_and_show(import_tables(folder, options), out, as_json)


@app.command()
def make(
    device: Annotated[str, typer.Option(help="The device.", autocompletion=completion.devices)],
    model: Annotated[
        str,
        typer.Option(
            help="A model of kvsim plan --list, a config.json or FILE.gguf.", autocompletion=completion.models
        ),
    ],
    engine: Annotated[
        str, typer.Option(help="The engine whose kernels are priced.", autocompletion=completion.priced_engines)
    ] = "vllm",
    engine_version: Annotated[str | None, typer.Option(help="By default the newest that was measured in full.")] = None,
    tp: TensorParallel = 1,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Type of the weights; by default that of its config.json.", autocompletion=completion.priced_weights
        ),
    ] = None,
    host_ms: HostMs = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Fit a profile to passes that NVIDIA's aiconfigurator-core prices (extra gpu); nothing is downloaded."""
    from kvsim.calibration.published.make import make_profile

    if engine != "vllm" and out is None:
        raise UserError(
            f"--out: needed with --engine {engine}, since scenarios look for profiles of vllm by their name"
        )
    _check(out)
    fit = make_profile(
        device, model, engine=engine, engine_version=engine_version, tp=tp, weights=weights, host_ms=host_ms
    )
    _save_and_show(fit, out, as_json)


def _check(out: Path | None) -> None:
    """Refuse a name that no profile can have before any time is spent."""
    from kvsim.calibration.published.device_fit import profile_file

    if out is not None:
        profile_file(out)


def _save_and_show(fit: DeviceFit, out: Path | None, as_json: bool) -> None:
    from kvsim.costs.device_profiles import own_profiles

    path = out or own_profiles() / f"{fit.profile.name}.json"
    written = fit.save(path)
    files = [str(each) for each in written]
    answer(fit, as_json, of=lambda fit: {"files": files, "profile": fit.profile.model_dump(mode="json")})
    if not as_json:
        typer.echo(f"\nSaved {', '.join(files)}")
    assert fit.profile.source is not None
    warn(note for note in fit.profile.source.notes if "above the aim" in note)
