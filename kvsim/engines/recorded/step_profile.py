"""Profiles fitted to the steps of recorded servers."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from statistics import median

import numpy as np

from kvsim.calibration.server_fit import server_profile
from kvsim.costs.profile import Coefficient, Profile
from kvsim.costs.step_fit import LEAST_STEPS
from kvsim.engines.recorded.steps import SAMPLES_OF_ORIGIN, SteppedServer
from kvsim.errors import UserError

_SEED = 21


def fitted_to(recordings: Sequence[SteppedServer], name: str, every: int = 1) -> Profile:
    """The profile of a server by its steps in recordings, which are of the same server; ``every``-th step alone.

    Raises ``UserError`` if there are too few.
    """
    samples, origin = [], 0
    for recording in recordings:
        own = recording.samples(origin)
        samples += own[::every]
        origin += len(own) // SAMPLES_OF_ORIGIN + 1
    first = recordings[0]
    try:
        return server_profile(
            samples,
            np.random.default_rng(_SEED),
            name=name,
            engine=f"{first.meta.engine} {first.meta.version}",
            model=first.scenario.model.name,
            type_k=first.scenario.cache.type_k,
            type_v=first.scenario.cache.type_v,
            machine=first.machine,
            measured=datetime.date.today().isoformat(),
            skipping=(first.kernel,) if first.skips else (),
            front_end_s=_front_end(recordings),
        ).profile
    except ValueError as e:
        files = ", ".join(recording.path.name for recording in recordings)
        raise UserError(f"{files}: {e}") from None


def _front_end(recordings: Sequence[SteppedServer]) -> Coefficient | None:
    """What the network and the front end add, by the recordings that show it: their median and range."""
    known = sorted(seconds for each in recordings if (seconds := each.clients.front_end.both_s) > 0)
    return Coefficient(value=median(known), low=known[0], high=known[-1]) if known else None


def has_steps_enough(recordings: Sequence[SteppedServer], every: int = 1) -> bool:
    """Whether a profile can be fitted to the steps of recordings, or to every ``every``-th of them."""
    mixed = [step.regime == "mixed" for recording in recordings for step in recording.steps[::every]]
    return LEAST_STEPS <= sum(mixed) <= len(mixed) - LEAST_STEPS
