"""Measuring a server for a given time, and whether what was seen is enough for a fit; without what the fit takes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from kvsim import machine
from kvsim.costs.pass_layout import LEAST_STEPS, REGIMES, Sample, kind_of
from kvsim.engines.live.bounded import Deadline
from kvsim.engines.live.load_measurement import LoadMeasurement, Report
from kvsim.engines.live.load_runs import LoadHeader, LoadJournal, LoadRun, RunSamples
from kvsim.engines.live.served import LiveServer
from kvsim.errors import UserError, counted

_ENOUGH = 2 * LEAST_STEPS
"""Steps of each kind that are wanted; with fewer, down to ``LEAST_STEPS``, a fit is doubtful."""
AT_ONCE = (
    "so that steps cannot be told apart: this program or the server's front end has no processor of its own, or the"
    " server puts several into one event"
)
_FIT_SHARE, _FIT_S = 0.02, 0.3
"""What is kept of the time for the fit: a share of it, and at least so many seconds if they are not a quarter."""


def measure_server(
    server: LiveServer,
    deadline: Deadline,
    is_known: Callable[[LoadMeasurement], bool],
    *,
    report: Report | None = None,
    notice: Callable[[str], object] | None = None,
    journal: Path | None = None,
    fit_s: float = 0.0,
) -> LoadMeasurement:
    """Put a designed load on a server until all ``is_known``, or until the deadline whatever the server does.

    The load is of staircases of requests (``load``) in random order, round after round. ``notice`` is told at once of
    what disturbs; ``fit_s``: what the fit takes, so that measuring ends so much earlier. With a ``journal``, what an
    interrupted calibration measured counts too, and one that ended with too little for a fit. Raises ``UserError``, in
    one line that says what is missing.
    """
    fit_s = max(fit_s, min(max(_FIT_S, _FIT_SHARE * deadline.seconds), deadline.seconds / 4))
    log = LoadJournal(journal, LoadHeader, LoadRun)
    until = Deadline(max(0.0, deadline.seconds - fit_s), deadline.began)
    measurement = LoadMeasurement(server, log, log.go_on(_header(server)), until, report, notice)
    measurement.measure(_ending(is_known))
    if min(_kinds(samples_in(measurement)).values()) < LEAST_STEPS:
        # There may be nothing to fit, so that its time is better spent on measuring.
        longer_s = max(0.0, fit_s - deadline.seconds / 5)
        measurement.deadline = Deadline(deadline.seconds - longer_s, deadline.began)
        if measurement.deadline.left_s > 0:
            measurement.measure(_ending(is_known))
    seen = _kinds(samples_in(measurement))
    if min(seen.values()) < _ENOUGH:
        measurement.few = _too_few(seen, measurement, deadline)
    if min(seen.values()) < LEAST_STEPS:
        raise UserError(f"{server.address}: {measurement.few}")
    return measurement


def _ending(is_known: Callable[[LoadMeasurement], bool]) -> Callable[[LoadMeasurement], bool]:
    """Says when to stop before the end of the time: after a round, when all is known well enough."""
    looked_at = 1

    def ended(measurement: LoadMeasurement) -> bool:
        nonlocal looked_at
        if measurement.rounds < looked_at + 1 or not are_enough(samples_in(measurement)):
            return False
        looked_at = int(measurement.rounds)
        return is_known(measurement)

    return ended


def _too_few(seen: Mapping[str, int], measurement: LoadMeasurement, whole: Deadline) -> str:
    """What to say where there is not enough for a fit, or for a good one."""
    few = " and ".join(counted(n, f"{kind} step") for kind, n in seen.items())
    said = f"{few} in {whole.elapsed_s:.0f} s, where {_ENOUGH} of each are wanted"
    shared, runs = sum(run.shared for run in measurement.runs), len(measurement.runs)
    if shared:
        said += f"; others used the server during {shared} of {counted(runs, 'measurement')}, which were left out"
    if shared > runs // 2:
        return f"{said}: measure when it is idle"
    if measurement.fault is not None:
        return f"{said}: {measurement.fault}"
    if measurement.silent_s > max(1.0, whole.seconds / 4):
        return f"{said}: it has said nothing for the last {measurement.silent_s:.0f} s"
    if measurement.at_once > 1 / 2:
        return f"{said}: {measurement.at_once:.0%} of the tokens came at once with the next, {AT_ONCE}"
    if not min(seen.values()):
        return f"{said}: give it many more --seconds, or a quieter machine"
    times = 1.3 * _ENOUGH / min(seen.values())
    return f"{said}: --seconds {math.ceil(whole.seconds * times / 10) * 10} should do"


def samples_in(measurement: LoadMeasurement) -> list[Sample]:
    """All samples; only those of quiet staircases, if they are enough."""
    quiet = quiet_in(measurement)
    return quiet if are_enough(quiet) else _samples(measurement, measurement.found)


def quiet_in(measurement: LoadMeasurement) -> list[Sample]:
    """Samples of staircases during which other work left a processor free."""
    both = zip(measurement.runs, measurement.found, strict=True)
    return _samples(measurement, [found for run, found in both if not run.busy])


def _samples(measurement: LoadMeasurement, found: Sequence[RunSamples]) -> list[Sample]:
    samples = [sample for each in found for sample in each.samples]
    if measurement.limits.requests == 1:
        samples += prompts_alone(found)
    return samples


def prompts_alone(found: Sequence[RunSamples]) -> list[Sample]:
    """The mixed steps of a server that serves one request at a time, where no prompt is computed beside others.

    How long a prompt took is what the client waited for its first token, less what it waits at the median for that of
    a prompt of one token beyond the decode step that this is.
    """
    alone = [(each.prompt, each.samples[0].seconds) for each in found if each.prompt is not None and each.samples]
    more = [prompt.seconds - step_s for prompt, step_s in alone if kind_of(prompt) == "decode"]
    if not more:
        return []
    front_end_s = max(0.0, median(more))
    mixed = [prompt for prompt, _ in alone if kind_of(prompt) == "mixed" and prompt.seconds > front_end_s]
    return [prompt.model_copy(update={"seconds": prompt.seconds - front_end_s}) for prompt in mixed]


def are_enough(samples: Sequence[Sample]) -> bool:
    """Whether there are enough steps of each kind for a fit."""
    return min(_kinds(samples).values()) >= _ENOUGH


def _kinds(samples: Sequence[Sample]) -> dict[str, int]:
    """Steps by regime."""
    counts: dict[str, int] = dict.fromkeys(REGIMES, 0)
    for sample in samples:
        counts[kind_of(sample)] += 1
    return counts


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
