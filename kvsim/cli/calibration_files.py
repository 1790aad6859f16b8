"""What ``kvsim calibrate`` does for engines and servers alike: measure, save or refuse, and say so; and its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import typer

from kvsim.cli.console import answer, fail, print_json, warn
from kvsim.cli.progress import RunProgress
from kvsim.errors import UserError

if TYPE_CHECKING:
    from kvsim.calibration.outcome import Outcome
    from kvsim.costs.profile import Profile

OutcomeT = TypeVar("OutcomeT", bound="Outcome")


@dataclass
class CalibrationFiles:
    """The files of a calibration: the profile, and beside it its picture, its journal and what was refused."""

    target: Path
    draws: bool = True
    """Whether there is time for the picture."""

    @property
    def saved(self) -> str:
        """The files that ``save`` writes, in words."""
        return f"{self.target} and {self.picture.name}" if self.draws else f"{self.target}, without a picture"

    @property
    def name(self) -> str:
        """Name of the profile."""
        return self.target.name.split(".")[0]

    @property
    def picture(self) -> Path:
        """Predicted against measured."""
        return self.target.with_name(f"{self.name}.calibration.png")

    @property
    def journal(self) -> Path:
        """What was measured so far."""
        return self.target.with_name(f"{self.target.name}.part")

    @property
    def refused(self) -> Path:
        """The profile, if its fit is poor."""
        return self.target.with_name(f"{self.target.name.removesuffix('.json')}.refused.json")

    def save(self, done: Outcome) -> None:
        """Write profile and picture, and remove what is no longer of use."""
        self._write(done.profile, self.target, done)
        self.journal.unlink(missing_ok=True)
        self.refused.unlink(missing_ok=True)

    def save_refused(self, done: Outcome, refusal: str) -> None:
        """Write profile and picture, with the reason in the profile."""
        self._write(done.profile.model_copy(update={"refused": refusal}), self.refused, done)

    @property
    def ways_on(self) -> str:
        """What can be done after a refusal."""
        return (
            f"It is in {self.refused} and may be used from there; the same command measures on, and with --force "
            "it saves what was refused"
        )

    def take_refused(self, wanted: Callable[[Profile], bool]) -> Profile | None:
        """Save a profile that was refused, if it is the one that is wanted; None if there is none."""
        from kvsim.costs.load_profile import load_profile

        if not self.refused.exists():
            return None
        found = load_profile(str(self.refused))
        if found.refused is None or not wanted(found):
            return None
        taken = found.model_copy(update={"refused": None})
        self._write(taken, self.target, None)
        self.journal.unlink(missing_ok=True)
        self.refused.unlink()
        return taken

    def _write(self, profile: Profile, path: Path, done: Outcome | None) -> None:
        try:
            profile.save(path)
            if done is not None and self.draws:
                done.plot().savefig(self.picture, dpi=120)
        except OSError as e:
            raise UserError(f"{path}: cannot write: {e.strerror}") from None


@dataclass(frozen=True)
class Measuring(Generic[OutcomeT]):
    """A calibration that is asked for."""

    files: CalibrationFiles
    of: str
    """What is measured, for the bar of progress."""
    measure: Callable[[RunProgress], OutcomeT]
    wanted: Callable[[Profile], bool]
    """Whether a profile is of the same, so that one that was refused can be taken."""
    use: str
    """A command that uses the profile."""

    def run(self, bound: float | None, *, force: bool, as_json: bool) -> None:
        """Measure and save the profile, or say why not; with ``force``, whatever its error is."""
        files, use = self.files, f"Use it with: {self.use}"
        if force and (taken := files.take_refused(self.wanted)) is not None:
            _tell(taken, as_json, f"Saved {files.target}, as it was measured before. {use}")
            return
        done = self._measured()
        from kvsim.calibration.outcome import HELD_OUT_BOUND

        warn(done.warnings)
        refusal = None if force else done.refusal(HELD_OUT_BOUND if bound is None else bound)
        if refusal is not None:
            files.save_refused(done, refusal)
            raise typer.Exit(fail(f"not saved as {files.target}: {refusal}. {files.ways_on}", 1))
        files.save(done)
        if not as_json:
            answer(done, as_json)
        _tell(done.profile, as_json, f"\nSaved {files.saved}. {use}")

    def _measured(self) -> OutcomeT:
        """Measure, with progress; an interrupt ends the command."""
        try:
            with RunProgress(f"measuring {self.of}", 100) as progress:
                return self.measure(progress)
        except KeyboardInterrupt:
            raise typer.Exit(fail(f"stopped{self._kept()}", 130)) from None
        except UserError as e:
            raise UserError(f"{e}{self._kept()}") from None

    def _kept(self) -> str:
        journal = self.files.journal
        return f"; called again, it goes on from what is in {journal}" if journal.exists() else ""


def _tell(profile: Profile, as_json: bool, saved: str) -> None:
    if as_json:
        print_json(profile.model_dump(mode="json"))
    else:
        typer.echo(saved)
