"""What every answer of ``kvsim recommend`` says: what was asked (traffic, service level, memory, model, machine)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.advice.recommend.slo import Bound, Slo
from kvsim.costs.devices import devices
from kvsim.costs.profile import Profile
from kvsim.experiments.traffic import Traffic
from kvsim.results import results_folder
from kvsim.scenario.scenario import Scenario

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Advice(ABC):
    """An answer, with what was asked."""

    scenario: Scenario
    """The workload at the load asked about, and all keys that are not searched."""
    slo: Slo
    engine: str
    load: float
    """Multiple of the workload's own load."""
    memory: int | None
    """Bytes available to the engine; None if not given."""
    model: str
    """The model that is served."""
    named_model: bool
    """Whether the user or the scenario named the model; a trace names none, so the profile's is assumed."""
    profile: Profile | None
    """Whose times are predicted; None where a device has none for the model."""
    traffic: Traffic
    command: str
    """The command that asks the same again."""
    device: str | None = None
    """Name of the device; None for a machine."""
    tensor_parallel: int = 1
    """Devices that share the model."""

    @property
    def basis(self) -> str:
        """What the times rest on: whose model, engine and machine, and how well the profile fits."""
        if self.profile is None:
            return ""
        assumed = "" if self.named_model else f"A trace names no model, so {self.model} is assumed (--model). "
        return f"{assumed}{self.profile.basis} The intervals do not include this error."

    def to_dict(self) -> dict[str, Any]:
        """The keys of the JSON object that say what was asked; sizes in bytes, lengths in tokens."""
        summary = self.traffic.summary
        return {
            "command": self.command,
            "scenario": self.scenario.name,
            "seed": self.scenario.seed,
            "engine": self.engine,
            "load": self.load,
            "slo": {"text": self.slo.text, "bounds": [_bound(bound) for bound in self.slo.bounds]},
            "memory_bytes": self.memory,
            "model": self.model,
            "device": self.device,
            "tensor_parallel": self.tensor_parallel,
            "profile": None if self.profile is None else _profile(self.profile),
            "traffic": {
                "requests": self.traffic.requests,
                "replications": self.traffic.replications,
                "note": self.traffic.note,
                "longest": summary.longest,
                "p99": summary.p99,
                "p95": summary.p95,
                "mean": summary.mean,
                "reuse": summary.reuse,
                "scalable": self.traffic.scalable,
            },
        }

    @property
    @abstractmethod
    def table(self) -> pd.DataFrame:
        """The answer, one row for each setting, engine or device."""

    @property
    def candidates(self) -> pd.DataFrame | None:
        """All settings that were searched, and what became of each; None if none were."""
        return None

    @property
    def scenarios(self) -> dict[str, Scenario]:
        """The scenarios of the best settings, by the names of their files."""
        return {}

    def plot(self) -> Figure | None:
        """Draw the answer; None if there is nothing to draw."""
        return None

    def save(self, folder: str | Path, *, plots: bool = True) -> list[Path]:
        """Write all results to a folder and return the files.

        They are ``recommendation.json``, ``recommendation.csv`` (``table``) and, where settings were searched,
        ``candidates.csv``, ``recommendation.png`` with ``plots``, and ``scenarios``. Raises ``UserError``.
        """
        answer, searched = self.to_dict(), self.candidates
        with results_folder(folder) as out:
            # Nothing there may be of another answer.
            if (out.path / "recommendation.json").is_file():
                for file in (out.path / "candidates.csv", *_best(out.path)):
                    file.unlink(missing_ok=True)
            out.json("recommendation.json", answer)
            out.table("recommendation.csv", self.table)
            if searched is not None:
                out.table("candidates.csv", searched)
            out.picture("recommendation.png", self.plot if plots else None)
            for name, scenario in self.scenarios.items():
                out.text(name, scenario.to_toml())
        return out.written


def _profile(profile: Profile) -> dict[str, str]:
    return {"name": profile.name, "model": profile.model, "described": profile.describe()}


def _bound(bound: Bound) -> dict[str, Any]:
    return {
        "measure": bound.measure,
        "limit": bound.limit,
        "strict": bound.strict,
        "text": bound.text or None,
        "asked": bool(bound.text),
    }


def _best(folder: Path) -> list[Path]:
    """The scenarios of settings by place, or by device."""
    of_devices = [path for device in devices() for path in folder.glob(f"best-{device}*.toml")]
    return [*folder.glob("best-[0-9]*.toml"), *of_devices]
