"""``kvsim calibrate``: measure an engine on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import completion
from kvsim.cli.console import console, fail, print_json
from kvsim.cli.options import EngineName, Json, LibraryFolder, LlamaThreads, storage_type_or_none
from kvsim.cli.progress import RunProgress
from kvsim.errors import UserError
from kvsim.model.engine_shapes import STORAGES, Storage
from kvsim.results import writable

if TYPE_CHECKING:
    from kvsim.calibration.run import Calibration
    from kvsim.costs.profile import Profile

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
    seconds: Annotated[float, typer.Option(help="Stop after this time, everything included.", min=1, max=86400)] = 60.0,
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
    force: Annotated[
        bool,
        typer.Option(help="Save whatever the error is; what was refused before is taken as it is, not measured anew."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure the NumPy engine, or llama.cpp, on this machine and write a machine profile.

    Measures until the intervals are tight or the time is over. An interrupted calibration goes on when called again.
    """
    from kvsim.calibration.run import HELD_OUT_BOUND
    from kvsim.costs.profile import USUAL_MODEL, is_llamacpp

    llama = is_llamacpp(engine)
    model = model or USUAL_MODEL[engine]
    # Profiles of one model under two engines, and their journals, must not overwrite each other.
    target = out or Path(f"{Path(model).stem}{'.llamacpp' if llama else ''}.profile.json")
    files = _Files(writable(target.parent) / target.name)
    types = storage_type_or_none("--cache-type-k", cache_type_k), storage_type_or_none("--cache-type-v", cache_type_v)
    use = f"kvsim {'validate SCENARIO --engine llamacpp' if llama else 'compare'} --profile {target}"
    if force and (taken := files.take_refused(engine, model, types, threads)) is not None:
        _tell(taken, as_json, f"Saved {target}, as it was measured before. Use it with: {use}")
        return
    done = _measured(
        files,
        model,
        engine=engine,
        seconds=seconds,
        type_k=types[0],
        type_v=types[1],
        threads=threads,
        library=library,
    )
    refusal = None if force else done.refusal(HELD_OUT_BOUND if bound is None else bound)
    if refusal is not None:
        files.save_refused(done, refusal)
        raise typer.Exit(fail(f"not saved as {target}: {refusal}. {files.ways_on}", 1))
    files.save(done)
    if not as_json:
        from kvsim.cli.tables.calibration import show_calibration

        show_calibration(console(), done)
    _tell(done.profile, as_json, f"\nSaved {target} and {files.picture.name}. Use it with: {use}")


def _measured(files: _Files, model: str, **options: Any) -> Calibration:
    """Measure, with progress; an interrupt ends the command."""
    from kvsim.calibration.run import calibrate as measure

    try:
        with RunProgress(f"measuring {model}", 100, lines=True) as progress:
            return measure(model, name=files.name, report=progress.share, journal=files.journal, **options)
    except KeyboardInterrupt:
        kept = f"; called again, it goes on from what is in {files.journal}" if files.journal.exists() else ""
        raise typer.Exit(fail(f"stopped{kept}", 130)) from None


@dataclass(frozen=True)
class _Files:
    """The files of a calibration: the profile, and beside it its picture, its journal and what was refused."""

    target: Path

    @property
    def name(self) -> str:
        """Name of the profile."""
        return self.target.name.split(".")[0]

    @property
    def picture(self) -> Path:
        return self.target.with_name(f"{self.name}.calibration.png")

    @property
    def journal(self) -> Path:
        return self.target.with_name(f"{self.target.name}.part")

    @property
    def refused(self) -> Path:
        return self.target.with_name(f"{self.target.name.removesuffix('.json')}.refused.json")

    def save(self, done: Calibration) -> None:
        """Write profile and picture, and remove what is no longer of use."""
        self._write(done.profile, self.target, done)
        self.journal.unlink(missing_ok=True)
        self.refused.unlink(missing_ok=True)

    def save_refused(self, done: Calibration, refusal: str) -> None:
        """Write profile and picture, with the reason in the profile."""
        self._write(done.profile.model_copy(update={"refused": refusal}), self.refused, done)

    @property
    def ways_on(self) -> str:
        """What can be done after a refusal."""
        return (
            f"It is in {self.refused} and may be used from there; the same command measures on, and with --force "
            "it saves what was refused"
        )

    def take_refused(
        self, engine: str, model: str, types: tuple[Storage | None, Storage | None], threads: int
    ) -> Profile | None:
        """Save a profile that was refused for the same engine, model and machine; None if there is none."""
        from kvsim import machine
        from kvsim.costs.profile import is_llamacpp, load_profile, same_model

        if not self.refused.exists():
            return None
        found = load_profile(str(self.refused))
        usual: Storage = "f16" if is_llamacpp(engine) else "f32"
        wanted = (is_llamacpp(engine), types[0] or usual, types[1] or usual, threads, machine.processor())
        measured = (
            found.engine != "numpy",
            found.type_k,
            found.type_v,
            found.measured_on.threads,
            found.measured_on.processor,
        )
        if found.refused is None or wanted != measured or not same_model(found.model, model):
            return None
        taken = found.model_copy(update={"refused": None})
        self._write(taken, self.target, None)
        self.journal.unlink(missing_ok=True)
        self.refused.unlink()
        return taken

    def _write(self, profile: Profile, path: Path, done: Calibration | None) -> None:
        try:
            profile.save(path)
            if done is not None:
                done.plot().savefig(self.picture, dpi=120)
        except OSError as e:
            raise UserError(f"{path}: cannot write: {e.strerror}") from None


def _tell(profile: Profile, as_json: bool, saved: str) -> None:
    if as_json:
        print_json(profile.model_dump(mode="json"))
    else:
        typer.echo(saved)
