"""Which profile a recorded server is predicted with: a given one, a device's, or one fitted to recorded steps."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from kvsim.costs.device_profiles import find_profile
from kvsim.costs.devices import recorded_device
from kvsim.costs.load_profile import load_profile
from kvsim.costs.pass_layout import LEAST_STEPS, Sample
from kvsim.costs.profile import Coefficient, Profile, same_model
from kvsim.costs.shipped import is_shipped
from kvsim.costs.step_fit import server_profile
from kvsim.engines.recordings.recorded_server import RecordedServer
from kvsim.engines.recordings.steps import SAMPLES_OF_ORIGIN, MeasuredStep, SteppedServer, fitting_half
from kvsim.engines.recordings.vllm_scenario import vllm_behaviour
from kvsim.errors import UserError
from kvsim.model.engine_shapes import file_name
from kvsim.model.recorded_names import recorded_model

_SEED = 21
_SIXTEEN_BITS = ("bfloat16", "float16", "half", "auto")
"""Types of weights and activations that the profiles of devices have, unless they say otherwise."""


class ChosenProfile(NamedTuple):
    """The profile for a recording."""

    profile: Profile
    name: str | None = None
    """What loads it, if anything does."""
    fitted_to: str | None = None
    """What it is fitted to, in words; None for one that was given or found."""


def given_profile(profile: Profile | str | None) -> ChosenProfile | None:
    """A profile that the user names, by an absolute path if it is a file."""
    if not isinstance(profile, str):
        return None if profile is None else ChosenProfile(profile)
    name = profile if is_shipped(profile) else str(Path(profile).expanduser().absolute())
    return ChosenProfile(load_profile(profile), name)


def profile_for(
    recording: RecordedServer, given: ChosenProfile | None, others: Sequence[SteppedServer]
) -> ChosenProfile:
    """The profile to predict a recording with, which never saw all of it.

    One that was given; else, of requests alone, that of the model on its device. What the host adds is that of the
    recorded version. With steps one that is fitted to other recordings of the same server with settings that cost the
    same, or with other ones; else to every other step of its own. Raises ``UserError``: what is missing.
    """
    if isinstance(recording, SteppedServer):
        return _fitted(recording, others) if given is None else _of_same_model(given, recording)
    chosen = _of_device(recording) if given is None else _of_same_device(given, recording)
    ahead = vllm_behaviour(recording.meta.version).async_scheduling
    return chosen._replace(profile=chosen.profile.composing(ahead=ahead))


def is_of(profile: Profile, model: str, known: str | None) -> bool:
    """Whether a profile is of a model: of the same file or, where a name is all there is, of that name; or made of a
    server that calls it so.

    ``model``: the file or name that a server or a recording says; ``known``: what it is called here, if it is known.
    """
    measured, recorded = file_name(profile.model), Path(model).name
    if recorded and recorded in map(file_name, profile.served_as):
        return True
    if measured.endswith(".gguf") and recorded.endswith(".gguf"):
        return measured == recorded
    return profile.model in (model, known)


def _of_same_model(given: ChosenProfile, recording: SteppedServer) -> ChosenProfile:
    profile, model = given.profile, recording.meta.model
    if not is_of(profile, model, recording.model):
        raise UserError(f"{recording.path}: no times for {model}: profile {profile.name} is of {profile.model}")
    return given


def _of_same_device(given: ChosenProfile, recording: RecordedServer) -> ChosenProfile:
    meta, profile = recording.meta, given.profile
    model = recorded_model(meta.model)
    if not same_model(profile.model, model):
        raise UserError(f"{recording.path}: no times for {model}: profile {profile.name} is of {profile.model}")
    if profile.device is not None:
        recorded = recorded_device(meta.device).name, meta.tensor_parallel_size, recording.expert_parallel
        measured = profile.device, profile.tensor_parallel, profile.expert_parallel
        if recorded != measured:
            of, not_of = (
                f"{tp} x {device}" + (f", the experts divided over {ep}" if ep > 1 else "")
                for device, tp, ep in (measured, recorded)
            )
            raise UserError(f"{recording.path}: profile {profile.name} is of {of}, not of {not_of}")
    return given


def _of_device(recording: RecordedServer) -> ChosenProfile:
    meta = recording.meta
    if meta.dtype is not None and meta.dtype.lower().removeprefix("torch.") not in _SIXTEEN_BITS:
        raise UserError(
            f"{recording.path}: dtype {meta.dtype!r:.40}; there are times of {', '.join(_SIXTEEN_BITS)} only"
        )
    try:
        device = recorded_device(meta.device)
        name = find_profile(
            recorded_model(meta.model), device.name, tp=meta.tensor_parallel_size, ep=recording.expert_parallel
        )
        return ChosenProfile(load_profile(name), name)
    except UserError as e:
        raise UserError(f"{recording.path}: {e}") from None


def _fitted(recording: SteppedServer, others: Sequence[SteppedServer]) -> ChosenProfile:
    apart = [other for other in others if other.path != recording.path and other.steps]
    for key, note in (("same_costs", ""), ("same_server", ", whose attention or scheduling is set otherwise")):
        alike = [other for other in apart if getattr(other, key) == getattr(recording, key)]
        if _are_enough([step for each in alike for step in each.steps]):
            names = ", ".join(other.name for other in alike)
            return ChosenProfile(_fit(alike, [each.samples for each in alike]), fitted_to=f"the steps of {names}{note}")
    half = fitting_half(recording.steps)
    if not _are_enough(list(compress(recording.steps, half))):
        raise UserError(
            f"{recording.path}: shows too few steps to tell what its server's cost; name other recordings of the same "
            "server beside it, or give --profile (kvsim calibrate --url measures one)"
        )
    profile = _fit([recording], [list(compress(recording.samples, half))])
    return ChosenProfile(profile, fitted_to="every other of its own steps")


def _are_enough(steps: Sequence[MeasuredStep]) -> bool:
    mixed = sum(step.regime == "mixed" for step in steps)
    return LEAST_STEPS <= mixed <= len(steps) - LEAST_STEPS


def _fit(recordings: Sequence[SteppedServer], samples: Sequence[Sequence[Sample]]) -> Profile:
    """The profile of a server by steps of recordings of it, with origins of their own for each recording."""
    of_all, first_origin = [], 0
    for recording, own in zip(recordings, samples, strict=True):
        of_all += [sample.model_copy(update={"origin": first_origin + sample.origin}) for sample in own]
        first_origin += len(recording.steps) // SAMPLES_OF_ORIGIN + 1
    first = recordings[0]
    try:
        return server_profile(
            of_all,
            np.random.default_rng(_SEED),
            name="recorded",
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


def _front_end(recordings: Sequence[SteppedServer]) -> Coefficient | None:
    """What the network and the front end add, by the recordings that show it: their median and range."""
    known = sorted(seconds for each in recordings if (seconds := each.clients.front_end.both_s) > 0)
    return Coefficient(value=median(known), low=known[0], high=known[-1]) if known else None
