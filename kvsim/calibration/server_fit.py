"""The profile of a server, fitted to the steps that it was seen to take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvsim.costs.fitting import digest
from kvsim.costs.pass_layout import Sample
from kvsim.costs.profile import NOTHING_S, Coefficient, MachineInfo, Profile, Range
from kvsim.costs.step_fit import fit_steps
from kvsim.model.engine_shapes import Storage
from policies import Kernel


@dataclass(frozen=True)
class ServerFit:
    """A fitted profile, and the steps that were held out of the fit."""

    profile: Profile
    held_out: pd.DataFrame
    """Columns regime, tokens, chunks, cells, measured_s, predicted_s, among others."""


def server_profile(
    samples: Sequence[Sample],
    rng: np.random.Generator,
    *,
    name: str,
    engine: str,
    model: str,
    type_k: Storage,
    type_v: Storage,
    machine: MachineInfo,
    measured: str,
    skipping: Collection[Kernel] = (),
    shifts_all: bool = False,
    front_end_s: Coefficient | None = None,
    assumed: tuple[str, ...] = (),
) -> ServerFit:
    """Fit a profile to steps, all under one kernel.

    ``engine``: with its version; ``measured``: the date, ISO 8601; ``skipping``: the kernel, if it skips masked cells;
    ``shifts_all``: see ``Profile``.
    A server's steps do not show what moves and rotations of cells cost: the profile has none. Raises ``ValueError`` if
    there are too few steps.
    """
    fitted = fit_steps(samples, rng, skipping)
    off = (fitted.held_out["predicted_s"] / fitted.held_out["measured_s"] - 1).abs()
    works = [work for sample in samples for work in (sample, *sample.further)]
    cells = [each for work in works for _, each in work.scans]
    profile = Profile(
        **dict(fitted.costs["decode"]),
        mixed=fitted.costs["mixed"],
        moves=None,
        shift_per_cell_s=NOTHING_S,
        held_out_samples=len(off),
        held_out_error_median=float(off.median()),
        held_out_error_p95=float(off.quantile(0.95)),
        held_out=fitted.errors,
        name=name,
        engine=engine,
        shifts_all=shifts_all,
        model=model,
        type_k=type_k,
        type_v=type_v,
        measured=measured,
        machine=machine,
        tokens=Range(low=min(work.tokens for work in works), high=max(work.tokens for work in works)),
        cells=Range(low=min(cells), high=max(cells)),
        samples=len(samples),
        digest=digest(samples),
        front_end_s=front_end_s,
        assumed=assumed,
    )
    return ServerFit(profile, fitted.held_out)
