"""Makes the profile of a model on a device with the package that prices passes, and keeps it by its inputs."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import numpy as np
from platformdirs import user_cache_path

from kvsim.calibration.published.device_fit import DeviceFit, Subject, device_fit
from kvsim.calibration.published.imports import given_host
from kvsim.calibration.published.package import PackageModel, ask, package_parts, package_passes
from kvsim.calibration.published.sampling import PASSES
from kvsim.calibration.published.table_making import TestedParts
from kvsim.costs.load_profile import load_profile
from kvsim.costs.under_load import Host
from kvsim.errors import UserError
from kvsim.experiments.fingerprint import code_version, digest_of

SEED = 19
"""Seed of the passes that are drawn: they are the same for every device and model of the same reach."""


def make_profile(
    device: str,
    model: str,
    *,
    engine: str = "vllm",
    engine_version: str | None = None,
    tp: int = 1,
    weights: str | None = None,
    host_ms: float | None = None,
    passes: int = PASSES,
    cache: Path | None = None,
) -> DeviceFit:
    """The profile of a model on a device, and the passes that were held out of its fit.

    ``host_ms``: what the host adds to each step, where it is not what is known of the engine's version; the others are
    as for ``ask``, and ``passes`` is how many are priced. The result is kept in the folder ``cache`` (without it, in
    the platform's folder for this user's caches) and taken from there where nothing that it depends on has changed:
    neither the code, nor the package, nor what is asked. Raises ``UserError`` for what the package does not know, and
    if it is missing.
    """
    host = given_host(host_ms)
    question = ask(device, model, engine=engine, engine_version=engine_version, tp=tp, weights=weights)
    source = question.source
    folder = user_cache_path("kvsim", appauthor=False) / "device-profiles" if cache is None else cache
    kept = folder / _key(question, host, passes)
    found = _read(kept)
    if found is not None:
        return found
    parts = package_parts(question)
    tested = TestedParts(parts, package_passes(question, np.random.default_rng(SEED), passes))
    subject = Subject(
        question.device,
        question.shape,
        f"{question.engine} {question.engine_version}",
        question.tp,
        question.chosen_weights,
    )
    made = device_fit(subject, parts, tested, source, host)
    _write(kept, made)
    return made


def _key(question: PackageModel, host: Host | None, passes: int) -> str:
    """A name for all that a profile depends on."""
    asked = (question.device.name, question.engine, question.engine_version, question.tp, question.chosen_weights)
    shape = [str(value) for value in astuple(question.shape)]
    source, given = question.source.model_dump(), None if host is None else host.model_dump()
    return digest_of(code_version(), asked, shape, dict(question.config), given, source, passes, SEED)


def _read(kept: Path) -> DeviceFit | None:
    """What was kept under a name; None if there is nothing that can be read."""
    import pandas as pd

    try:
        table = pd.read_csv(kept.with_suffix(".csv"))
        return DeviceFit(load_profile(str(kept.with_suffix(".json"))), table)
    except (OSError, ValueError, UserError):
        return None


def _write(kept: Path, made: DeviceFit) -> None:
    """Keep a profile. Where that is not possible, it is made anew the next time."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        made.held_out.to_csv(kept.with_suffix(".csv"), index=False)
        # The profile is written last: without it, the table is not looked at.
        made.profile.save(kept.with_suffix(".json"))
    except OSError:
        return
