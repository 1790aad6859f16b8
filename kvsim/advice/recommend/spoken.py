"""Predicted measures, and how many servers meet a service level, in words."""

from __future__ import annotations

from kvsim.advice.recommend.apart import Apart
from kvsim.advice.recommend.finalists import Finalist
from kvsim.advice.recommend.fleet import Fleet
from kvsim.errors import counted
from kvsim.experiments.estimates import Interval
from kvsim.experiments.interval_text import with_ends


def figures(found: Finalist) -> str:
    """The bounded measures of a setting, with intervals."""
    return ", ".join(
        f"{title(bound.measure)} {spoken(found.measures.get(bound.measure), bound.is_share)}"
        for bound in found.slo.asked
    )


def spoken(interval: Interval | None, share: bool = False) -> str:
    """Format a time in seconds, or a share, with its interval."""
    if interval is None:
        return "unknown"
    if share:
        return f"{interval.value:.1%}"
    unit, scale = ("s", 1.0) if interval.value >= 1 else ("ms", 1000.0)
    return with_ends(interval, scale, f" {unit}")


def spoken_load(interval: Interval) -> str:
    """Format a multiple of the load with its interval."""
    return with_ends(interval, unit=" ×")


def title(measure: str) -> str:
    """The name of a measure."""
    if measure.endswith("_share"):
        return measure.removesuffix("_share")
    latency, statistic = measure.split("_")
    return f"{latency.upper()} {statistic if statistic == 'mean' else statistic.upper()}"


def fleet_in_words(fleet: Fleet) -> str:
    """How many servers it takes, what the router is worth, and whether they are better apart."""
    return f"{_together(fleet)}.{'' if fleet.apart is None else _apart(fleet, fleet.apart)}"


def _together(fleet: Fleet) -> str:
    (router, best), *others = fleet.behind
    servers = "such servers" if fleet.place == 1 else f"servers with the settings of place {fleet.place}"
    if not fleet.met:
        return f"Not even {fleet.replicas} {servers} meet it behind any of {counted(1 + len(others), 'router')}"
    worst = others[-1]
    said = f"{fleet.replicas} {servers} behind {router} meet it: predicted {figures(best)}"
    said += f"; behind {worst[0]} {figures(worst[1])}"
    if fleet.one_less is not None:
        said += f"; with {counted(fleet.replicas - 1, 'server')} behind {router} {figures(fleet.one_less)}"
    return said


def _apart(fleet: Fleet, apart: Apart) -> str:
    """How servers fare that prefill or decode, and which is better."""
    meet = "meet it" if apart.meets else "do not meet it"
    divided = f"{counted(apart.prefill, 'server')} to prefill behind {apart.router} and {apart.decode} to decode"
    said = (
        f" With prefill and decode apart, {divided} {meet}: predicted {figures(apart.found)}. {_better(fleet, apart)}"
    )
    ratios = [f"{spoken_load(ratio)} the {title(measure)}" for measure, ratio in apart.ratios.items()]
    if ratios:
        beside = f"{apart.replicas} servers apart have {' and '.join(ratios)} of {apart.replicas} together"
        said += f": {beside}{', paired' if len(apart.found.outcomes) > 1 else ''}"
    return f"{said}."


def _better(fleet: Fleet, apart: Apart) -> str:
    """Which is better."""
    if apart.better == "apart":
        fewer = f", with {apart.replicas} servers instead of {fleet.replicas}"
        return f"Apart is better{fewer if apart.meets and apart.replicas < fleet.replicas else ''}"
    if apart.better == "together":
        return "Together is better"
    if all(apart.shorter):
        one, other = (" and ".join(map(title, each)) for each in apart.shorter)
        return f"Neither is better in all: {one} is shorter apart, {other} together"
    n = len(apart.found.outcomes)
    return f"{f'{n} replications' if n > 1 else 'One replication'} cannot tell which is better"
