"""The reports of ``kvsim validate``: predicted against measured, on an engine here or of recorded servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvsim.engines.recordings.error_tables import WITHIN
from kvsim.errors import counted
from kvsim.reports.formats import LATENCIES, error, seconds, share, whole
from kvsim.reports.report import UNKNOWN, Cell, Column, Report, Section, Table

if TYPE_CHECKING:
    from kvsim.engines.live.engine_validation import Validation
    from kvsim.engines.recordings.settings_ranking import Ranking
    from kvsim.engines.recordings.validation import RecordedValidation, ServerRun

_RATES = {"output_tokens_per_s": "output tokens/s", "requests_per_s": "requests/s"}


def validation_report(v: Validation) -> Report:
    """Prediction, measurement and error for each policy and measure, on a real engine here."""
    columns = [Column("policy", "policy"), Column("measure", _measure), _side("predicted"), _side("measured")]
    columns += [Column("± run to run", "spread", share)] if v.repeats > 1 else []
    columns.append(Column("error", "error", error))
    if v.repeats > 1:
        columns.append(Column("over the repeats", lambda row: f"{row['low']:+.1%} to {row['high']:+.1%}"))
    digests = ", ".join(f"{policy} {digest[:8]}" for policy, digest in v.schedules.items())
    lines = [f"Both runs placed the same cells: schedule {digests}"]
    if v.compared:
        counts = ", ".join(f"{policy} {n:,}" for policy, n in v.compared.items())
        lines.append(f"llama.cpp showed its cells, and they were the policy's every time (comparisons: {counts})")
    tau, wrong = v.ranking
    if tau is not None:
        lines.append(
            f"Ranking of the policies by mean end-to-end latency: Kendall's tau {tau:.2f}, {wrong} pairs ranked "
            "differently although they are further apart than they vary from run to run"
        )
    low, high = min(pace[0] for pace in v.pace.values()), max(pace[1] for pace in v.pace.values())
    lines.append(
        f"Largest error of end-to-end latency at P50 or P99: {v.worst:.1%}. Passes took {low:.3f} to {high:.3f} of the "
        f"time that they took in the calibration, and each step is scaled by the pace at its moment; without that: "
        f"{v.worst_unscaled:.1%}"
    )
    table = Table("Predicted and measured", columns, v.table.to_dict("records"), keys=2)
    sections = [Section(tables=[table]), Section(text=lines), Section(notes=[v.profile.describe()])]
    return Report(sections=sections, warnings=[_elsewhere(v)] if v.elsewhere else [])


def _elsewhere(v: Validation) -> str:
    decode, prompt = v.reference
    return (
        f"The profile was measured on a different processor ({v.profile.measured_on.processor}): here, a decode "
        f"{decode:.2f} times as long and a prompt {prompt:.2f} times. How other costs differ is not known; "
        f"a profile of this machine would say it: {v.profile.command} --model {v.scenario.model.name}, "
        "or validate without --profile"
    )


def _measure(row: Mapping[Any, Any]) -> str:
    """A latency and its statistic, or a rate."""
    measure = row["measure"]
    return (
        f"{LATENCIES[measure]} {row['statistic']}" if measure in LATENCIES else _RATES.get(measure, "output tokens/s")
    )


def _side(side: str) -> Column:
    """What was predicted or measured, a time or a rate."""

    def value(row: dict[str, Any]) -> Cell | None:
        number = row[side]
        if number is None or number != number:
            return None
        rate = f"{number:.3g}" if number < 100 else whole(number)
        return Cell(seconds(number) if row["measure"] in LATENCIES else rate, float(number))

    return Column(side, value)


def recorded_report(validation: RecordedValidation) -> Report:
    """A table for each recording of a server, what its prediction rests on, and the order of the settings."""
    sections = [section for run in validation.runs for section in _run(run)]
    return Report(sections=[*sections, *(ranking_section(ranking) for ranking in validation.rankings)])


def _run(run: ServerRun) -> list[Section]:
    meta = run.recording.meta
    devices = meta.tensor_parallel_size * meta.data_parallel_size
    cards = f"{devices} x " if devices > 1 else ""
    title = (
        f"{run.name}: {meta.engine} {meta.version}, {meta.model} on {cards}{meta.device}, "
        f"{counted(len(run.requests), 'request')}, times by the {meta.clock}"
    )
    lines = [*_counts(run)]
    if run.pace is not None and not run.steps.empty:
        low, high = run.pace
        lines.insert(
            0,
            f"Every other step tells the machine's pace: they take {low:.2f} to {high:.2f} times what the profile "
            "says. The steps between are compared, and requests are predicted at this pace",
        )
    if run.network_s is not None:
        lines.append(
            f"The network and the front end take {seconds(run.network_s) if run.network_s else '0 s'} of each TTFT and "
            "end-to-end latency: one constant, fitted to the shortest of each"
        )
    worst = UNKNOWN if run.worst != run.worst else share(run.worst)
    lines.append(f"Largest error of a latency at mean, P50 or P99: {worst}")
    lines += _verdict(run)
    basis = [run.profile.basis] if run.profile.basis else []
    fitted = [] if run.fitted_to is None else [f"The profile is fitted to {run.fitted_to}."]
    tables = [_latencies(run), *([] if run.steps.empty else [_steps(run)])]
    return [Section(title, [title], tables), Section("", [*lines, *run.assumed, *fitted, *basis, ""])]


def _latencies(run: ServerRun) -> Table:
    """Latencies and rates, measured beside predicted."""
    errors = {"unfitted": "error without the constant", "unpaced": "at the profile's pace"}
    columns = [Column("", _measure), _side("measured"), _side("predicted"), Column("error", "error", error)]
    columns += [Column(name, key, error) for key, name in errors.items() if run.table[key].notna().any()]
    if run.table["spread"].notna().any():
        columns.append(Column("run to run", "spread", "±{:.1%}".format))
    return Table("Predicted and measured", columns, run.table.to_dict("records"))


def _steps(run: ServerRun) -> Table:
    """How well single steps are predicted."""
    columns = [
        Column("steps", "kind"),
        Column("compared", "steps", whole),
        Column("median error", "at_pace", error),
        Column("at the profile's pace", "error", error),
        Column("median size of an error", "spread_at_pace", share),
    ]
    return Table("Steps", columns, run.steps.to_dict("records"))


def _verdict(run: ServerRun) -> list[str]:
    """Whether the errors are within their bounds."""
    if run.within is None:
        larger = "No verdict: its steps are much larger than those that the profile was fitted to"
        return [] if run.steps.empty else [larger]
    bounds = " and ".join(f"{bound:.0%} at {statistic.upper()}" for statistic, bound in WITHIN.items())
    if run.spread is None:
        wider = "no requests were sent twice, so how much the server itself strays is not known"
    else:
        wider = f"or within what {' and '.join(run.spread.runs)}, the same requests again, differ by"
    outside = run.table[run.table["within"].eq(False)]
    named = ", ".join(map(_measure, outside.to_dict("records")))
    return [f"Within {bounds} ({wider}): {'all are' if run.within else f'not {named}'}"]


def _counts(run: ServerRun) -> list[str]:
    """Requests running and waiting over time, and preemptions."""
    lines = [
        f"Requests {name}, mean: {load['measured']:.1f} measured, {load['predicted']:.1f} predicted; "
        f"second by second they differ by {load['difference']:.1f}"
        for name, load in run.loads.items()
    ]
    known = run.recording.preemptions
    measured = "not recorded" if known is None else f"{known:,} measured"
    return [*lines, f"Preemptions: {measured}, {run.preemptions:,} predicted"]


def ranking_section(ranking: Ranking) -> Section:
    """Settings in the measured order, with what was predicted."""
    columns = [
        Column("settings", "settings"),
        Column("runs", "runs", whole),
        Column(f"{LATENCIES[ranking.measure]} measured", "measured", seconds),
        Column("predicted", "predicted", seconds),
        Column("run to run", lambda row: row["spread"] if row["runs"] > 1 else None, "±{:.1%}".format),
    ]
    tau = "not defined" if ranking.tau is None else f"{ranking.tau:.2f}"
    wrong = ranking.wrong
    verdict = (
        f"{counted(wrong, 'pair')} ranked wrong"
        if wrong
        else "no two that differ by more than the runs do are ranked wrong"
    )
    order = f"Predicted and measured order: Kendall's tau {tau}; {verdict}"
    table = Table("Settings by measured latency", columns, ranking.table.to_dict("records"))
    return Section(f"Settings by {LATENCIES[ranking.measure]}", [], [table], [order])
