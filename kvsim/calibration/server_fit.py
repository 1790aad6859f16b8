"""The profile of a server, fitted to the steps that it was seen to take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvsim.costs.fitting import ranges_of
from kvsim.costs.pass_layout import Sample
from kvsim.costs.profile import NOTHING_S, Profile
from kvsim.costs.step_fit import fit_steps
from policies import Kernel


class ServerFit(NamedTuple):
    """A fitted profile, and the steps that were held out of the fit."""

    profile: Profile
    held_out: pd.DataFrame
    """Columns regime, tokens, chunks, cells, measured_s, predicted_s, among others."""


def server_profile(
    samples: Sequence[Sample], rng: np.random.Generator, *, skipping: Collection[Kernel] = (), **about: Any
) -> ServerFit:
    """Fit a profile to steps, all under one kernel.

    ``skipping``: the kernel, if it skips masked cells; ``about``: the profile's other fields, such as ``name``.
    A server's steps do not show what moves and rotations of cells cost: the profile has none. Raises ``ValueError`` if
    there are too few steps.
    """
    fitted = fit_steps(samples, rng, skipping)
    about |= {"moves": None, "shift_per_cell_s": NOTHING_S}
    return ServerFit(fitted.profile(samples, **ranges_of(samples), **about), fitted.held_out)
