"""The profile of a model on a device, fitted to passes that others have measured or priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvsim.costs.device_profiles import profile_name
from kvsim.costs.devices import Device
from kvsim.costs.fitting import fit_regimes
from kvsim.costs.pass_layout import Sample
from kvsim.costs.profile import Coefficient, CopyCost, Host, Profile, Range, Source
from kvsim.errors import UserError
from kvsim.model.attention_groups import MemoryShape
from kvsim.results import writable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MEDIAN_AIM, P95_AIM = 0.02, 0.10
"""Errors on held-out passes, in each regime, above which a profile says so."""

_SEED = 19


@dataclass(frozen=True)
class Subject:
    """What a profile of a device is of."""

    device: Device
    shape: MemoryShape
    engine: str
    """With its version, such as "vllm 0.19.0"."""
    tp: int = 1
    weights: str | None = None
    """Storage type of the weights, unless it is the model's own."""


def profile_file(path: str | Path) -> Path:
    """The path of a profile to be written. Raises ``UserError`` unless it can name one."""
    path = Path(path)
    if path.suffix != ".json" or path.is_dir():
        raise UserError(f"{path}: a file whose name ends in .json is expected")
    return path


@dataclass(frozen=True)
class DeviceFit:
    """A fitted profile, and the passes that were held out of the fit."""

    profile: Profile
    held_out: pd.DataFrame
    """Columns regime, tokens, chunks, cells, measured_s, predicted_s, among others."""

    def plot(self) -> Figure:
        """Draw predicted against tabled seconds, by regime."""
        from kvsim.reports.profile_plots import device_figure

        return device_figure(self.profile, self.held_out)

    def save(self, path: str | Path) -> list[Path]:
        """Write the profile and, beside it, its picture; return the files. Raises ``UserError``."""
        path = profile_file(path)
        writable(path.parent)
        picture = path.with_suffix(".png")
        try:
            self.plot().savefig(picture, dpi=120)
            self.profile.save(path)
        except OSError as e:
            raise UserError(f"{path}: cannot be written: {e.strerror or e}") from None
        return [path, picture]


def fit_device(subject: Subject, samples: Sequence[Sample], source: Source, host: Host) -> DeviceFit:
    """Fit a profile to passes, which are the same as often as it is done. Raises ``UserError`` if they are too few."""
    try:
        fitted = fit_regimes(samples, np.random.default_rng(_SEED))
    except ValueError as e:
        raise UserError(f"{source.title}: {e}") from None
    moves, shift = _copies(subject)
    notes = [
        f"In {regime} passes the held-out error is {e.error_median:.1%} in the median and {e.error_p95:.1%} at P95, "
        f"above the aim of {MEDIAN_AIM:.0%} and {P95_AIM:.0%}."
        for regime, e in fitted.errors.items()
        if e.error_median > MEDIAN_AIM or e.error_p95 > P95_AIM
    ]
    profile = fitted.profile(
        samples,
        moves=moves,
        shift_per_cell_s=shift,
        name=profile_name(subject.shape, subject.device.name, tp=subject.tp, weights=subject.weights),
        engine=subject.engine,
        model=subject.shape.name,
        type_k="f16",
        type_v="f16",
        measured=datetime.now(UTC).date().isoformat(),
        tokens=Range(low=min(s.tokens for s in samples), high=max(s.tokens for s in samples)),
        cells=_cells(samples),
        device=subject.device.name,
        tensor_parallel=subject.tp,
        weights=subject.weights or subject.shape.default_type or None,
        source=source.model_copy(update={"notes": (*source.notes, *notes)}),
        host=host,
    )
    return DeviceFit(profile, fitted.held_out)


def _cells(samples: Sequence[Sample]) -> Range:
    """Least and most cells that one token is scored against; decodes are counted together, with equal contexts."""
    seen = []
    for s in samples:
        prompts = [cells for n, cells in s.scans if n > 1]
        decodes = [cells for n, cells in s.scans if n == 1]
        seen += prompts
        if decodes:
            seen.append(sum(decodes) // max(s.chunks - len(prompts), 1))
    return Range(low=min(seen), high=max(seen))


def _copies(subject: Subject) -> tuple[CopyCost, Coefficient]:
    """A compaction and a rotation of keys: each byte is read and written once, on all devices at the same time."""
    bandwidth, groups = subject.device.bandwidth_gb_s * 1e9 * subject.tp, subject.shape.groups
    cell = sum(2 * group.layers * (group.k_row + group.v_row) for group in groups)  # bytes in 16 bits
    key = sum(2 * group.layers * group.k_row for group in groups)
    return CopyCost(per_run_s=_exactly(0.0), per_cell_s=_exactly(2 * cell / bandwidth)), _exactly(2 * key / bandwidth)


def _exactly(seconds: float) -> Coefficient:
    return Coefficient(value=seconds, low=seconds, high=seconds)
