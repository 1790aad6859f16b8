"""Calibration of a server that runs: a designed load over HTTP, and the profile that is fitted to its steps."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvsim.calibration.outcome import TIGHT, Outcome, machine_info
from kvsim.costs.fitting import FittedRegimes
from kvsim.costs.pass_layout import SKIPPING
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.profile import Coefficient, Profile
from kvsim.costs.step_fit import fit_steps, server_profile
from kvsim.engines.live.address import is_loopback
from kvsim.engines.live.bounded import Deadline
from kvsim.engines.live.load_measurement import LoadMeasurement, Report
from kvsim.engines.live.load_runs import LoadRun
from kvsim.engines.live.measuring import are_enough, measure_server, quiet_in, samples_in
from kvsim.engines.live.served import LiveServer
from kvsim.simulation.set_up import build_policy
from policies.placement.rule import PassReads
from workloads import named_rng

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    few: str = ""
    """What there is too little of, in words; empty if nothing is missing."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was wrong with the measurement, one line each."""
        found = []
        if self.shared:
            found.append(f"others used the server during {self.shared} of the measurements, which are left out")
        if self.busy:
            use = "which are left out"
            if not self.quiet:
                use = (
                    "which are used all the same, since the rest are too few: the profile is of a busy machine; end the"
                    " other programs and calibrate again for that of a quiet one"
                )
            found.append(f"other programs had the processors during {self.busy} of the measurements, {use}")
        return (*found, *filter(None, [self.few]))

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
    notice: Callable[[str], object] | None = None,
    journal: Path | None = None,
) -> ServerCalibration:
    """Put a designed load on a server, as ``measuring.measure_server`` does, and fit a profile to its steps. Raises
    ``UserError``.
    """
    measured = measure_server(server, Deadline(seconds), is_known, report=report, notice=notice, journal=journal)
    return calibration_of(measured, name)


def is_known(measurement: LoadMeasurement) -> bool:
    """Whether the costs are known well enough."""
    return _spread(_fit(measurement).held_out)[0] <= TIGHT


def _fit(measurement: LoadMeasurement) -> FittedRegimes:
    return fit_steps(samples_in(measurement), named_rng(0, "server calibration fit"), SKIPPING)


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


def calibration_of(measurement: LoadMeasurement, name: str = "calibrated") -> ServerCalibration:
    """The calibration of what was measured."""
    server = measurement.server
    scenario = server.served.scenario
    fitted = server_profile(
        samples_in(measurement),
        named_rng(0, "server calibration fit"),
        name=name,
        engine=server.engine,
        model=server.model,
        served_as=server.served_as,
        type_k=scenario.cache.type_k,
        type_v=scenario.cache.type_v,
        machine=machine_info(server.served.threads, measurement.load_before),
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
        quiet=are_enough(quiet_in(measurement)),
        few=measurement.few,
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
    if measurement.limits.requests == 1:
        lines.append(
            "that a further request in a step costs as much as a further token of a prompt: one was served at once"
        )
        if server.settings.api != "llama-server":
            lines.append(
                "that a prompt takes as long as its first token, less what one token of a prompt takes beyond a step"
            )
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
