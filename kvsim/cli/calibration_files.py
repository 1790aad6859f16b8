"""The files that ``kvsim calibrate`` writes, and what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvsim.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvsim.costs.profile import Profile


@dataclass(frozen=True)
class ServerAsked:
    """The server that is to be measured, as it was typed."""

    url: str
    model: str | None
    flags: str
    key_env: str | None
    """The environment variable that has its key."""
    allow_remote: bool


class Measured(Protocol):
    """A calibration that is done: of an engine on this machine, or of a server."""

    @property
    def profile(self) -> Profile:
        """What was fitted."""
        ...

    def plot(self) -> Figure:
        """How well it fits."""
        ...


@dataclass(frozen=True)
class CalibrationFiles:
    """The files of a calibration: the profile, and beside it its picture, its journal and what was refused."""

    target: Path

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

    def save(self, done: Measured) -> None:
        """Write profile and picture, and remove what is no longer of use."""
        self._write(done.profile, self.target, done)
        self.journal.unlink(missing_ok=True)
        self.refused.unlink(missing_ok=True)

    def save_refused(self, done: Measured, refusal: str) -> None:
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
        from kvsim.costs.profile import load_profile

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

    def _write(self, profile: Profile, path: Path, done: Measured | None) -> None:
        try:
            profile.save(path)
            if done is not None:
                done.plot().savefig(self.picture, dpi=120)
        except OSError as e:
            raise UserError(f"{path}: cannot write: {e.strerror}") from None
