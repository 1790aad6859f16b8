"""What a recommendation was asked: the traffic, the service level, the memory, the model and the machine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvsim.advice.recommend.slo import Bound, Slo
from kvsim.costs.devices import devices
from kvsim.costs.profile import Profile
from kvsim.errors import UserError
from kvsim.experiments.traffic import Traffic
from kvsim.results import save_picture, writable
from kvsim.scenario.scenario import Scenario

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question that a recommendation answers."""

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


class Searched(Protocol):
    """An answer for which settings were searched."""

    @property
    def table(self) -> pd.DataFrame:
        """The answer, one row for each setting or device."""
        ...

    @property
    def candidates(self) -> pd.DataFrame:
        """All settings, and what became of each."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        ...

    def plot(self) -> Figure:
        """Draw the answer."""
        ...


def write_answer(
    answer: Searched, folder: str | Path, scenarios: Iterable[tuple[str, Scenario]], *, plots: bool
) -> list[Path]:
    """Write an answer, with ``plots`` drawn too, and its best scenarios by name to a folder; return the files.

    Raises ``UserError`` if they cannot be written.
    """
    target = writable(folder)
    names = ["recommendation.json", "recommendation.csv", "candidates.csv"]
    written = [target / name for name in names]
    try:
        text = json.dumps(answer.to_dict(), indent=1, allow_nan=False)
        remove_earlier(target)
        written[0].write_text(text + "\n", encoding="utf-8")
        answer.table.to_csv(written[1], index=False)
        answer.candidates.to_csv(written[2], index=False)
        written += save_picture(target / "recommendation.png", answer.plot if plots else None)
        for name, scenario in scenarios:
            written.append(target / name)
            written[-1].write_text(scenario.to_toml(), encoding="utf-8")
    except OSError as e:
        raise UserError(f"{target}: cannot write results: {e.strerror}") from None
    return written


def remove_earlier(folder: Path) -> None:
    """Remove what an earlier recommendation left in its folder, so that nothing there is of another answer.

    Raises ``OSError``.
    """
    if (folder / "recommendation.json").is_file():
        for file in (folder / "candidates.csv", folder / "recommendation.png", *_best(folder)):
            file.unlink(missing_ok=True)


def _best(folder: Path) -> list[Path]:
    """The scenarios of settings by place, or by device."""
    of_devices = [folder / f"best-{device}.toml" for device in devices()]
    return [*folder.glob("best-[0-9]*.toml"), *of_devices]
