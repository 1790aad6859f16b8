"""The profile of a model on a device, fitted to passes that others have measured or priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvsim.calibration.published.table_making import MeasuredParts, TestedParts
from kvsim.costs.device_profiles import profile_name
from kvsim.costs.devices import Device
from kvsim.costs.fitting import digest, held_out_error, held_out_table
from kvsim.costs.pass_layout import REGIMES, Sample, regime_of
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.pass_tables import PassTables
from kvsim.costs.physics import PassPhysics
from kvsim.costs.profile import CopyCost, Profile, Range, Source, exactly
from kvsim.costs.under_load import ALONE, Host
from kvsim.errors import UserError
from kvsim.model.cache_groups import MemoryShape
from kvsim.results import writable
from policies import Group
from policies.placement.rule import PassReads

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MEDIAN_AIM, P95_AIM = 0.02, 0.10
"""Errors on held-out passes, in each regime, above which a profile says so."""


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
    ep: int = 1
    """Devices that divide the experts."""


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


def device_fit(
    subject: Subject, parts: MeasuredParts, tested: TestedParts, source: Source, host: Host | None
) -> DeviceFit:
    """The profile whose tables are made of ``parts``, with its errors on whole passes."""
    weights = subject.weights or subject.shape.default_type
    physics = PassPhysics(subject.device, subject.shape, weights, tp=subject.tp, ep=subject.ep)
    moves, shift = physics.copies()
    profile = Profile(
        tables=parts.tables(physics),
        held_out_samples=len(tested.passes),
        held_out_error_median=0.0,
        held_out_error_p95=0.0,
        samples=len(parts.decode) + len(parts.prompt) + len(parts.work) + len(parts.head),
        digest=digest(tested.passes),
        moves=CopyCost(per_run_s=exactly(0.0), per_cell_s=exactly(moves)),
        shift_per_cell_s=exactly(shift),
        name=profile_name(subject.shape, subject.device.name, tp=subject.tp, ep=subject.ep, weights=subject.weights),
        engine=subject.engine,
        model=subject.shape.name,
        type_k="f16",
        type_v="f16",
        measured=datetime.now(UTC).date().isoformat(),
        tokens=Range(low=1, high=max(parts.prompt_work or parts.work)),
        cells=Range(low=1, high=max([*(c for _, c in parts.decode), *(n + c for n, c in parts.prompt)])),
        sequences=max(sequences for sequences, _ in parts.decode),
        device=subject.device.name,
        tensor_parallel=subject.tp,
        expert_parallel=subject.ep,
        weights=weights or None,
        source=source,
        host=host,
    )
    return _held_against(profile, tested.parts.tables(physics), tested.passes)


def _held_against(profile: Profile, tables: PassTables, passes: Sequence[Sample]) -> DeviceFit:
    """The profile with the errors of tables on whole passes, to whose seconds nothing is added."""
    tested = profile.model_copy(update={"host": ALONE, "source": None, "tables": tables})
    price = PassPrice(tested, profile.own_kernel, (Group(0),))
    seconds = np.array([each.seconds for each in passes])
    predicted = np.array([price.seconds(_reads(each)) for each in passes])
    table = held_out_table(passes, seconds, predicted, np.ones(len(passes), dtype=bool))
    table.insert(0, "regime", [regime_of(each) for each in passes])
    errors = {regime: held_out_error(own) for regime in REGIMES if len(own := table[table["regime"] == regime])}
    notes = [
        f"In {regime} passes the error is {e.error_median:.1%} in the median and {e.error_p95:.1%} at P95, above the "
        f"aim of {MEDIAN_AIM:.0%} and {P95_AIM:.0%}."
        for regime, e in errors.items()
        if e.error_median > MEDIAN_AIM or e.error_p95 > P95_AIM
    ]
    whole = held_out_error(table)
    assert profile.source is not None
    about = {
        "held_out": errors,
        "held_out_error_median": whole.error_median,
        "held_out_error_p95": whole.error_p95,
        "source": profile.source.model_copy(update={"notes": (*profile.source.notes, *notes)}),
    }
    return DeviceFit(profile.model_copy(update=about), table)


def _reads(sample: Sample) -> PassReads:
    """What attention reads in a pass of one cache group."""
    reads = PassReads(1)
    reads.tokens, reads.chunks = sample.tokens, sample.chunks
    for n, cells in sample.scans:
        # One scan stands for those of all decodes together.
        reads.groups[0].add_chunk(n, cells, cells, 0)
    return reads
