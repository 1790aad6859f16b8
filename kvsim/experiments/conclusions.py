"""The conclusions of comparisons and of sweeps, in one line of words each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvsim.errors import counted
from kvsim.experiments.interval_text import from_to
from kvsim.experiments.measures import MORE_IS_BETTER, Measures, failed_requests, is_latency
from kvsim.experiments.ranking import BOUND, NotRanked, Ranking, fails_too_many, limit_that_includes

if TYPE_CHECKING:
    import pandas as pd

    from kvsim.experiments.estimates import Interval
    from kvsim.experiments.sweep_result import SweepResult
    from kvsim.experiments.verdict import Verdict

FEWEST_REQUESTS = 50
"""Runs of fewer requests support no conclusion about latency."""

_MOST_NAMED = 4
"""Policies whose distance from the best is said."""


def conclude(verdict: Verdict) -> str:
    """What a comparison of policies supports."""
    parts = [*_main_parts(verdict), *_left_out(verdict.not_ranked)]
    ranking = verdict.ranking
    if ranking is not None and ranking.runner_up is not None and not _too_short(verdict.runs, ranking):
        if ranking.replications == 1:
            parts.append("this is one run: ask for --replications 5 to see whether the differences hold")
        elif not ranking.varies:
            parts.append("all replications are identical: this workload does not depend on the seed")
    return "; ".join(parts)


def _main_parts(v: Verdict) -> Iterator[str]:
    """Which policy is best, or why none is."""
    ranking = v.ranking
    if ranking is None:
        yield _none_ranked(v)
    elif too_short := _too_short(v.runs, ranking):
        yield too_short
    elif ranking.runner_up is not None:
        yield _best_of(v, ranking, _among(v))
        if ranking.best in v.from_bound:
            yield f"{v.from_bound[ranking.best].value:.2f} × {BOUND}"
        if v.same_answers is not None and ranking.best in v.forgetful:
            yield f"of those that drop none, {_best_of(v, v.same_answers)}"
    elif len(alike := _alike(v, ranking.best)) > 1:
        yield f"no difference: {_and(alike)} are identical in every request"
    else:
        yield f"{ranking.best} has no competitor: there is nothing to compare it with"


def _none_ranked(v: Verdict) -> str:
    unstable = any(reason.unstable for reason in v.not_ranked.values())
    if unstable and set(v.not_ranked) | {BOUND} >= set(v.runs):
        return (
            "unstable: arrivals outpace service under every policy without failed requests, so latencies depend on how "
            "long the run is; lower the rate"
        )
    return "no conclusion: every policy failed requests or completed none"


def _too_short(runs: Mapping[str, Sequence[Measures]], ranking: Ranking) -> str:
    """Why the runs are too short for a conclusion; empty if they are not."""
    fewest = min(int(run["requests"] or 0) for policy in ranking.names for run in runs[policy])
    if fewest < FEWEST_REQUESTS:
        return f"too short: {counted(fewest, 'request')} say little about latency; ask for at least {FEWEST_REQUESTS}"
    best = runs[ranking.best]
    if 2 * sum(bool(run["too_short"]) for run in best) > len(best):
        unsettled = f"under {ranking.best} latencies do not settle within the first half of the run"
        return f"too short: {unsettled}; ask for more requests"
    return ""


def _best_of(v: Verdict, ranking: Ranking, among: str = "") -> str:
    """Which policies of a ranking have the lowest latency, and by how much; ``among``: of which they are it."""
    second, best = ranking.runner_up, _alike(v, ranking.best)
    verb = "are identical in every request and have" if len(best) > 1 else "has"
    lowest = f"{_and([_labelled(v, policy) for policy in best])} {verb} the lowest mean end-to-end latency {among}"
    lowest = lowest.rstrip()
    if second is None:
        return lowest
    others = [ranking.names[i] for i in ranking.order[1:]]
    if ranking.replications == 1 or not ranking.varies:
        return f"{lowest}: {_listed(v, ranking, others)}"
    ties = [p for p in others if p in ranking.ties]
    slower = _listed(v, ranking, [p for p in others if p not in ties])
    if not ties:
        return f"{lowest}: {slower}"
    same = f"no difference that {ranking.replications} replications can show: {_listed(v, ranking, ties)}"
    return f"no clear best: {'; '.join(filter(None, (lowest, same, slower and f'clearly {slower}')))}"


def _listed(v: Verdict, ranking: Ranking, policies: Sequence[str]) -> str:
    """How far the best is below these policies, with the interval of the difference that the table has."""
    said = []
    for policy in policies[:_MOST_NAMED]:
        below = 1 - 1 / _ratio(ranking, policy).value
        share = _percent(below) if below <= 0.99 else "more than 99 %"  # A percentage would be rounded to 100.
        difference = ranking.comparison.differences[ranking.names.index(policy)]
        known = 0 < difference.half_width < math.inf
        said.append(f"{share}{f' ({from_to(difference, 1e3)} ms)' if known else ''} below {_and(_alike(v, policy))}")
    more = len(policies) - _MOST_NAMED
    return _and([*said, counted(more, "other")] if more > 0 else said) if said else ""


def _ratio(ranking: Ranking, policy: str) -> Interval:
    """A policy's mean latency divided by the best's."""
    return ranking.comparison.ratios[ranking.names.index(policy)]


def _alike(v: Verdict, policy: str) -> tuple[str, ...]:
    """The policy and those that are identical to it."""
    return next((group for group in v.identical if policy in group), (policy,))


def _among(v: Verdict) -> str:
    """Among which policies the best is looked for."""
    if v.max_failed and v.failing:
        return f"among policies that failed at most {100 * v.max_failed:g} % of the requests"
    if any(fails_too_many(each, v.max_failed) for each in v.runs.values()):
        return "among policies without failed requests"
    return "of all policies"


def _labelled(v: Verdict, policy: str) -> str:
    """The name of a policy, with what must be known to choose it."""
    failed, requests = failed_requests(v.runs[policy])
    labels = ["drops tokens"] if policy in v.forgetful else []
    labels += [f"failed {100 * failed / requests:.1f} %"] if failed else []
    return f"{policy} (which {' and '.join(labels)})" if labels else policy


def _left_out(not_ranked: Mapping[str, NotRanked]) -> Iterator[str]:
    """Which policies are left out, why, and what would include them."""
    policies: dict[str, list[str]] = {}
    for policy, reason in not_ranked.items():
        policies.setdefault(reason.why, []).append(policy)
    said = [
        f"{_and(each)} {why.replace('is ', 'are ', 1) if len(each) > 1 and why.startswith('is ') else why}"
        for why, each in policies.items()
    ]
    if said:
        yield "left out: " + ", ".join(said)
    limit, included = limit_that_includes(not_ranked)
    if included:
        it = "it" if len(included) == 1 else "them"
        yield f"--max-failed {limit} would include {it if len(included) == len(not_ranked) else ', '.join(included)}"


def conclude_sweep(sweep: SweepResult, measure: str) -> str:
    """Which policy is best at how many points of a sweep, and how often that is more than chance."""
    best, level = sweep.best(measure), f"{100 * sweep.level:g} %"
    points = counted(len({point.number for point in sweep.plan.points}), "point")
    if not len(best):
        return f"no conclusion: no policy served all requests and kept up with arrivals ({points})"
    won = best[best["rivals"] > 0]
    if len({policy for policy in sweep.plan.policies if policy != BOUND}) == 1:
        only = _with_alike(sweep, best["best"].iloc[0], "")
        alone = [f"{only} has no competitor; name several policies to compare them"]
        return "; ".join([*(_best_settings(sweep, best, measure, only) or alone), *_imprecise_points(sweep)])
    if len(won):
        wins = won[["best", "identical"]].value_counts()
        names = [_with_alike(sweep, str(policy), str(alike)) for policy, alike in wins.index.tolist()]
        found = ", ".join(f"{name} at {n}" for name, n in zip(names, wins, strict=True))
    else:
        found = "no conclusion, since no policy had a competitor"
    parts = [f"{'highest' if measure in MORE_IS_BETTER else 'lowest'} {measure} of {points}: {found}"]
    if limit := sweep.plan.file.max_failed:
        parts.append(f"policies are ranked if they failed at most {100 * limit:g} % of the requests")
    parts += _left_out_of_points(sweep, best)
    if len(won) and sweep.runs["replication"].max() == 0:
        parts.append("from one run each: ask for replications to see whether the differences hold")
    elif len(won):
        parts.append(f"the lead is more than chance at {int(won['holds'].sum())} of them ({level}, paired differences)")
    return "; ".join([*parts, *_imprecise_points(sweep)])


def _best_settings(sweep: SweepResult, best: pd.DataFrame, measure: str, policy: str) -> list[str]:
    """Which of the settings that were varied are best under the only policy, for each traffic; none if none were."""
    traffic = [axis for axis in sweep.plan.axes if axis.startswith("workload.")]
    varied = [axis for axis in sweep.plan.axes if axis not in traffic]
    if not varied or len(best) < 2:
        return []
    most = measure in MORE_IS_BETTER
    groups = [rows for _, rows in best.groupby(traffic, sort=False)] if traffic else [best]
    table = sweep.table.set_index("number")
    found = []
    for rows in groups[:_MOST_NAMED]:
        first = rows.sort_values("value", ascending=not most, kind="stable").iloc[0]
        low, high = (float(table.loc[first["number"], f"{measure}_{end}"]) for end in ("low", "high"))
        near = int(((rows["value"] >= low) & (rows["value"] <= high)).sum()) - 1
        flags, at = (", ".join(f"{axis} = {first[axis]}" for axis in axes) for axes in (varied, traffic))
        value = f"{1e3 * first['value']:,.4g} ms" if is_latency(measure) else f"{first['value']:,.4g}"
        alike = f", as good within its interval: {counted(near, 'other')}" if near and math.isfinite(high) else ""
        found.append(f"{f'at {at}: ' if at else ''}{flags} ({value}{alike})")
    more = [f"and {counted(len(groups) - _MOST_NAMED, 'other')} in the table"] if len(groups) > _MOST_NAMED else []
    if out := [reasons for number, reasons in sweep.left_out.items() if number not in set(best["number"])]:
        more.append(f"{counted(len(out), 'point')} left out ({_reasons(out)})")
    if sweep.runs["replication"].max() == 0:
        more.append("from one run each: ask for replications to see whether the differences hold")
    points = counted(len({point.number for point in sweep.plan.points}), "point")
    begin = f"{'highest' if most else 'lowest'} {measure} of {points} under {policy}: "
    return [begin + found[0], *found[1:], *more]


def _with_alike(sweep: SweepResult, policy: str, alike: str, known: bool = False) -> str:
    """The name of a policy with what must be known of it; ``known``: that it drops tokens has been said."""
    labels = ["which drops tokens"] if policy in sweep.forgetful and not known else []
    labels += [f"identical to {alike}"] if alike else []
    return f"{policy} ({', '.join(labels)})" if labels else policy


def _left_out_of_points(sweep: SweepResult, best: pd.DataFrame) -> Iterator[str]:
    """At how many points policies were left out, and why."""
    left_out, single = sweep.left_out, best[best["rivals"] == 0]
    for (policy, alike), rows in single.groupby(["best", "identical"], sort=False):
        why = _reasons([left_out.get(number, {}) for number in rows["number"]])
        winner = bool((best[best["rivals"] > 0]["best"] == policy).any())
        name = _with_alike(sweep, str(policy), str(alike), known=winner)
        yield f"at {counted(len(rows), 'point')} {name} has no competitor{f' ({why})' if why else ''}"
    ranked = set(best["number"])
    compared = ranked - set(single["number"])
    if none := [reasons for number, reasons in left_out.items() if number not in ranked]:
        yield f"at {counted(len(none), 'point')} every policy is left out ({_reasons(none)})"
    if some := [reasons for number, reasons in left_out.items() if number in compared]:
        yield f"at {counted(len(some), 'point')} some policies are left out ({_reasons(some)})"
    everywhere = {(number, policy): why for number, each in left_out.items() for policy, why in each.items()}
    limit, included = limit_that_includes(everywhere)
    if included:
        yield f"--max-failed {limit} would include {len(included):,} of the {len(everywhere):,} left out"


def _reasons(left_out: Iterable[Mapping[str, NotRanked]]) -> str:
    """Policies by reason, such as ``paged, contiguous failed 2.0 to 5.0 % of the requests; ring is unstable``."""
    by_reason: dict[str, list[tuple[str, float]]] = {}
    for reasons in left_out:
        for policy, reason in reasons.items():
            why = "failed" if reason.failed_share else reason.why
            by_reason.setdefault(why, []).append((policy, 100 * reason.failed_share))
    parts = []
    for why, found in by_reason.items():
        low, high = (f"{pick(share for _, share in found):.1f}" for pick in (min, max))
        shares = f" {low if low == high else f'{low} to {high}'} % of the requests" if found[0][1] else ""
        parts.append(f"{', '.join(dict.fromkeys(policy for policy, _ in found))} {why}{shares}")
    return "; ".join(parts)


def _imprecise_points(sweep: SweepResult) -> list[str]:
    """Where the stopping rule was not met, if anywhere."""
    rule, missed = sweep.plan.file.stop, sweep.imprecise
    if rule is None or not missed:
        return []
    groups = sweep.runs.groupby(["number", "policy"]).ngroups
    pairs = f"{missed} of {groups} pairs of point and policy"
    return [f"{pairs} are not within {100 * rule.within:g} % after {rule.most} runs"]


def _percent(share: float) -> str:
    if abs(share) < 0.0005:
        return "less than 0.1 %"
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
