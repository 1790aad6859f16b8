"""Profiles fitted to the steps of recorded servers."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from itertools import compress
from statistics import median
from typing import TypeVar

import numpy as np

from kvsim.calibration.server_fit import server_profile
from kvsim.costs.profile import Coefficient, Profile
from kvsim.costs.step_fit import LEAST_STEPS
from kvsim.engines.recordings.steps import SAMPLES_OF_ORIGIN, SteppedServer, that_tell
from kvsim.errors import UserError

_SEED = 21
T = TypeVar("T")


def fitted_to(recordings: Sequence[SteppedServer], name: str, *, half: bool = False) -> Profile:
    """The profile of a server by its steps in recordings, which are of the same server.

    ``half``: by the steps alone that tell the pace too, so that those between can be compared.

    Raises ``UserError`` if there are too few.
    """
    samples, origin = [], 0
    for recording in recordings:
        own = recording.samples(origin)
        samples += _told(recording, own) if half else own
        origin += len(own) // SAMPLES_OF_ORIGIN + 1
    first = recordings[0]
    try:
        return server_profile(
            samples,
            np.random.default_rng(_SEED),
            name=name,
            engine=f"{first.meta.engine} {first.meta.version}",
            model=first.model,
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


def _told(recording: SteppedServer, each: Sequence[T]) -> list[T]:
    """From values of all steps, the values of the steps that tell the pace."""
    return list(compress(each, that_tell(recording.steps)))


def _front_end(recordings: Sequence[SteppedServer]) -> Coefficient | None:
    """What the network and the front end add, by the recordings that show it: their median and range."""
    known = sorted(seconds for each in recordings if (seconds := each.clients.front_end.both_s) > 0)
    return Coefficient(value=median(known), low=known[0], high=known[-1]) if known else None


def has_steps_enough(recordings: Sequence[SteppedServer], *, half: bool = False) -> bool:
    """Whether ``fitted_to`` can fit a profile to the steps of recordings."""
    steps = [step for each in recordings for step in (_told(each, each.steps) if half else each.steps)]
    mixed = [step.regime == "mixed" for step in steps]
    return LEAST_STEPS <= sum(mixed) <= len(mixed) - LEAST_STEPS
