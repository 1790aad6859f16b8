"""Calibration of a server that runs: a designed load over HTTP, and the profile that is fitted to its steps."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvsim import machine
from kvsim.calibration.llamacpp import SKIPPING
from kvsim.calibration.outcome import TIGHT, Outcome, machine_info
from kvsim.calibration.server_fit import server_profile
from kvsim.costs.fitting import FittedRegimes
from kvsim.costs.pass_layout import REGIMES, Sample
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.profile import Coefficient, Profile
from kvsim.costs.step_fit import LEAST_STEPS, fit_steps, kind_of
from kvsim.engines.live.address import is_loopback
from kvsim.engines.live.load_measurement import LoadMeasurement, Report
from kvsim.engines.live.load_runs import LoadHeader, LoadJournal, LoadRun
from kvsim.engines.live.served import LiveServer
from kvsim.errors import UserError, counted
from kvsim.simulation.run import build_policy
from policies.placement.rule import PassReads
from workloads import named_rng

_ENOUGH = 2 * LEAST_STEPS
"""Steps of each kind before anything is fitted."""
_PATIENCE = 4
"""How many times the given time may pass until there are so many."""
_ALIKE = 3
"""Held-out steps of one kind from which their scatter is told."""
_RESAMPLES = 200


@dataclass(frozen=True)
class ServerCalibration(Outcome):
    """A profile of a server, and how well it fits the steps that were seen; a round is one of staircases."""

    LEAST_ROUNDS = 2

    shared: int
    """Staircases that were left out because others used the server."""
    busy: int
    """Staircases during which other work had the processors of the server's machine."""
    quiet: bool
    """Whether there were enough others, so that those were left out."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was wrong with the measurement, one line each."""
        found = []
        if self.shared:
            found.append(f"others used the server meanwhile: {counted(self.shared, 'staircase')} left out of the fit")
        if self.busy:
            taken = "left out of the fit" if self.quiet else "not left out, since the rest is not enough"
            found.append(f"other work had the processors meanwhile: {counted(self.busy, 'staircase')} {taken}")
        return tuple(found)

    def plot(self) -> Figure:
        """Predicted against measured seconds of the held-out steps, by regime."""
        from kvsim.reports.profile_plots import device_figure

        return device_figure(self.profile, self.held_out)


def calibrate_server(
    server: LiveServer,
    *,
    seconds: float = 120.0,
    name: str = "calibrated",
    report: Report | None = None,
    journal: Path | None = None,
) -> ServerCalibration:
    """Put a designed load on a server, and fit a profile to its steps.

    Staircases of requests (``load``) in random order, round after round, until intervals are narrow or ``seconds`` are
    over, but not before there is enough for a fit. With a ``journal``, what an interrupted calibration measured counts
    too, and a server that is gone leaves in it all that was measured. Raises ``UserError``.
    """
    log = LoadJournal(journal, LoadHeader, LoadRun)
    load_before = machine.system_load()
    measurement = LoadMeasurement(server, log, log.go_on(_header(server)), seconds, report)
    measurement.measure(_Ending())
    return _built(name, server, measurement, load_before)


class _Ending:
    """Says when to stop: at the end of the time, or when all is known well enough."""

    def __init__(self) -> None:
        self._looked_at = 1
        """Rounds when intervals were looked at last."""

    def __call__(self, measurement: LoadMeasurement, elapsed_s: float) -> bool:
        seen = _kinds(_samples(measurement))
        if min(seen.values()) < _ENOUGH:
            if elapsed_s > _PATIENCE * measurement.seconds:
                raise UserError(f"{measurement.server.address}: {_too_few(seen, measurement, elapsed_s)}")
            return False
        if elapsed_s >= measurement.seconds:
            return True
        rounds = int(measurement.rounds)
        if rounds <= self._looked_at:
            return False
        self._looked_at = rounds
        return _spread(_fit(measurement).held_out)[0] <= TIGHT


def _too_few(seen: Mapping[str, int], measurement: LoadMeasurement, elapsed_s: float) -> str:
    """What to say where there is not enough for a fit."""
    few = " and ".join(f"{n} {kind} steps" for kind, n in seen.items())
    shared = sum(run.shared for run in measurement.runs)
    if shared > len(measurement.runs) // 2:
        why = f"others used the server during {shared} of {len(measurement.runs)} staircases, which were left out"
    else:
        why = "give it more --seconds"
    return f"{few} in {elapsed_s:.0f} s, and {_ENOUGH} of each are needed: {why}"


def _samples(measurement: LoadMeasurement) -> list[Sample]:
    """All samples; only those of quiet staircases, if they are enough."""
    quiet = _quiet(measurement)
    if min(_kinds(quiet).values()) >= _ENOUGH:
        return quiet
    return [sample for found in measurement.found for sample in found.samples]


def _quiet(measurement: LoadMeasurement) -> list[Sample]:
    """Samples of staircases during which other work left a processor free."""
    both = zip(measurement.runs, measurement.found, strict=True)
    return [sample for run, found in both if not run.busy for sample in found.samples]


def _kinds(samples: Sequence[Sample]) -> dict[str, int]:
    """Steps by regime."""
    counts: dict[str, int] = dict.fromkeys(REGIMES, 0)
    for sample in samples:
        counts[kind_of(sample)] += 1
    return counts


def _fit(measurement: LoadMeasurement) -> FittedRegimes:
    return fit_steps(_samples(measurement), named_rng(0, "server calibration fit"), SKIPPING)


def _spread(held_out: pd.DataFrame) -> tuple[float, float | None]:
    """``ServerCalibration.half_width`` and ``scatter``: steps of one kind have as many chunks, and twice as many
    tokens at most."""
    off = held_out["measured_s"] / held_out["predicted_s"]
    octave = np.floor(np.log2(held_out["tokens"]))
    groups = off.groupby([held_out["regime"], held_out["chunks"], octave])
    sizes, deviations = groups.size(), groups.std()
    known = sizes >= _ALIKE
    if not known.any():
        return 1.0, None
    return float((1.96 * deviations / np.sqrt(sizes))[known].median()), float(deviations[known].median())


def _header(server: LiveServer) -> LoadHeader:
    scenario = server.served.scenario
    settings = scenario.server.model_dump_json() + scenario.cache.model_dump_json()
    return LoadHeader(
        address=server.address.url,
        engine=server.engine,
        model=server.model,
        server=hashlib.sha256(settings.encode()).hexdigest(),
        processor=machine.processor(),
    )


def _built(name: str, server: LiveServer, measurement: LoadMeasurement, load_before: float) -> ServerCalibration:
    """The calibration of what was measured."""
    scenario = server.served.scenario
    fitted = server_profile(
        _samples(measurement),
        named_rng(0, "server calibration fit"),
        name=name,
        engine=server.engine,
        model=server.model,
        type_k=scenario.cache.type_k,
        type_v=scenario.cache.type_v,
        machine=machine_info(server.served.threads, load_before),
        measured=datetime.datetime.now(datetime.UTC).date().isoformat(),
        skipping=SKIPPING,
        shifts_all=scenario.server.scheduler == "llama-server",
        assumed=_assumed(server, measurement),
    )
    profile = fitted.profile
    profile = profile.model_copy(update={"front_end_s": _front_end(profile, measurement)})
    half_width, scatter = _spread(fitted.held_out)
    left_out = sum(found.left_out for found in measurement.found)
    return ServerCalibration(
        profile,
        fitted.held_out,
        rounds=round(measurement.rounds, 1),
        half_width=half_width,
        scatter=scatter,
        resumed=measurement.resumed,
        left_out=left_out / (left_out + sum(_seen_steps(run) for run in measurement.runs)),
        shared=sum(run.shared for run in measurement.runs),
        busy=sum(run.busy for run in measurement.runs),
        quiet=min(_kinds(_quiet(measurement)).values()) >= _ENOUGH,
    )


def _seen_steps(run: LoadRun) -> int:
    """About how many steps a staircase has: as many as its first request has tokens."""
    return len(run.requests[0].token_s)


def _assumed(server: LiveServer, measurement: LoadMeasurement) -> tuple[str, ...]:
    lines = [*server.served.assumed]
    host = server.address.url.split("://", 1)[1].rsplit(":", 1)[0]
    if not is_loopback(host):
        lines.append("the machine: that of the client, since the server's does not say what it is")
    if not measurement.counts:
        lines.append("that no others used the server: it does not count its tokens (llama-server: --metrics)")
    if server.settings.api == "llama-server":
        lines.append("that a context shift costs nothing: that was not measured")
    return tuple(lines)


def _front_end(profile: Profile, measurement: LoadMeasurement) -> Coefficient | None:
    """Seconds between a client's TTFT and the steps of a prompt: the median over prompts alone; None without any."""
    policy = build_policy(measurement.server.served.scenario)
    price = PassPrice(profile, policy.kernel, policy.groups)
    more = []
    for found in measurement.found:
        if found.alone is not None:
            batches, waited_s, prompt_s = found.alone
            if prompt_s is None:
                prompt_s = sum(price.seconds(PassReads.of(batch)) for batch in batches)
            more.append(waited_s - prompt_s)
    if not more:
        return None
    rng = named_rng(0, "front end")
    medians = np.median(rng.choice(more, (_RESAMPLES, len(more))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975]).tolist()
    value = max(0.0, float(np.median(more)))
    return Coefficient(value=value, low=min(value, max(0.0, low)), high=max(value, high))
