"""``kvsim calibrate``: measure an engine on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import console, fail, print_json
from kvsim.cli.options import EngineName, Json, LibraryFolder, LlamaThreads, storage_type_or_none
from kvsim.cli.progress import RunProgress
from kvsim.errors import UserError
from kvsim.model.engine_shapes import STORAGES
from kvsim.results import writable

if TYPE_CHECKING:
    from kvsim.calibration.run import Calibration

app = typer.Typer(add_completion=False)


@app.command()
def calibrate(
    model: Annotated[
        str | None,
        typer.Option(
            help="The model to measure: tiny (the default), small, smollm2 (llama.cpp's), or a GGUF file.",
            autocompletion=completion.engine_models,
        ),
    ] = None,
    engine: EngineName = "numpy",
    seconds: Annotated[float, typer.Option(help="Stop measuring after this time.", min=1, max=86400)] = 60.0,
    out: Annotated[Path | None, typer.Option(help="The profile file to write; by default MODEL.profile.json.")] = None,
    cache_type_k: Annotated[
        str | None,
        typer.Option(
            help=f"Storage type of keys: {', '.join(STORAGES)}; by default f32, under llama.cpp f16.",
            autocompletion=completion.storages,
        ),
    ] = None,
    cache_type_v: Annotated[
        str | None, typer.Option(help="Storage type of values.", autocompletion=completion.storages)
    ] = None,
    threads: LlamaThreads = 1,
    library: LibraryFolder = None,
    bound: Annotated[
        float | None, typer.Option(help="Save only if the median held-out error is at most this.", min=0)
    ] = None,
    force: Annotated[bool, typer.Option(help="Save whatever the error is, and on a busy machine too.")] = False,
    as_json: Json = False,
) -> None:
    """Measure the NumPy engine, or llama.cpp, on this machine and write a machine profile.

    Measures until the intervals are tight or the time is over. An interrupted calibration continues when called again.
    """
    from kvsim.calibration.run import calibrate as measure
    from kvsim.costs.profile import USUAL_MODEL, is_llamacpp

    llama = is_llamacpp(engine)
    model = model or USUAL_MODEL[engine]
    # Profiles of one model under two engines, and their journals, must not overwrite each other.
    target = out or Path(f"{Path(model).stem}{'.llamacpp' if llama else ''}.profile.json")
    journal = writable(target.parent) / f"{target.name}.part"
    name = target.name.split(".")[0]
    try:
        with RunProgress(f"measuring {model}", 100) as progress:
            done = measure(
                model,
                engine=engine,
                seconds=seconds,
                name=name,
                type_k=storage_type_or_none("--cache-type-k", cache_type_k),
                type_v=storage_type_or_none("--cache-type-v", cache_type_v),
                threads=threads,
                library=library,
                report=progress.share,
                journal=journal,
            )
    except KeyboardInterrupt:
        raise typer.Exit(fail(f"stopped; the next calibration continues with what is in {journal}", 130)) from None
    if not force:
        _refuse_poor(done, bound, journal)
    picture = target.with_name(f"{name}.calibration.png")
    _save(done, target, picture)
    journal.unlink(missing_ok=True)
    if as_json:
        print_json(done.profile.model_dump(mode="json"))
    else:
        use = "validate SCENARIO --engine llamacpp" if llama else "compare"
        _show(done, f"Saved {target} and {picture.name}. Use it with: kvsim {use} --profile {target}")


def _show(done: Calibration, saved: str) -> None:
    from kvsim.cli.tables.calibration import show_calibration

    show_calibration(console(), done)
    typer.echo(f"\n{saved}")


def _refuse_poor(done: Calibration, bound: float | None, journal: Path) -> None:
    """End with exit code 1 if the calibration cannot be trusted."""
    from kvsim.calibration.run import HELD_OUT_BOUND

    refusal = done.refusal(HELD_OUT_BOUND if bound is None else bound)
    if refusal is None:
        return
    if done.busy:
        journal.unlink(missing_ok=True)  # What was measured on a busy machine is of no use.
    else:
        refusal += f"; measure longer (it continues with what is in {journal}), or give --force"
    raise typer.Exit(fail(f"not saved: {refusal}", 1))


def _save(done: Calibration, target: Path, picture: Path) -> None:
    try:
        done.profile.save(target)
        done.plot().savefig(picture, dpi=120)
    except OSError as e:
        raise UserError(f"{target}: cannot write: {e.strerror}") from None
