"""What a recommendation does not say: its limits, a line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsim.advice.recommend.candidates import measured_engine, profile_target
from kvsim.advice.recommend.families import measured_range
from kvsim.advice.recommend.trials import LOWEST_LOAD, most_doublings
from kvsim.costs.memory_settings import ENGINE_TITLES
from kvsim.errors import counted
from kvsim.simulation.cluster.exchange import assumed_link

if TYPE_CHECKING:
    from kvsim.advice.recommend.recommendation import Recommendation

_EDGED = {"slots": "requests at once", "batch": "tokens in a batch"}
"""What is tried between two ends, by the name of its axis."""


def limits_of(found: Recommendation) -> list[str]:
    """Limits of these predictions, one line each."""
    lines = [] if found.traffic.summary.room is None else [f"context: {found.traffic.summary.room.said}"]
    if found.memory is None:
        lines.append("no memory was given, so no setting was ruled out by it")
    lines += [*_of_device(found), *_of_engine(found)]
    size = f"{found.traffic.requests:,} {found.scenario.workload.count_key.replace('limit', 'requests')}"
    lines.append(
        f"{found.traffic.note}; 95 % intervals are over the replications; runs of {size} start with an empty "
        "server, so a queue that builds up only in longer runs goes unnoticed"
    )
    lines += _edges(found)
    if found.interrupted and found.best:
        came = counted(len(found.best[0].outcomes), "replication")
        lines.append(f"interrupted {found.interrupted}: the figures come from {came}")
    if found.fleet is not None and found.fleet.apart is not None:
        assumed = assumed_link(found.fleet.apart.found.candidate.scenario)
        lines.append(f"prefill and decode apart: {assumed}")
    lines += found.traffic.remarks
    if found.traffic.largest_factor < 1 / LOWEST_LOAD:
        most, users = 2.0 ** most_doublings(found.traffic), found.traffic.users
        lines.append(
            f"loads above {most:g} × were not tried: these requests cannot make a load that is much higher, since "
            "think times stay as they are"
            if users is None
            else f"more than {users * most:,.0f} users were not tried: a run has {found.traffic.requests:,} requests, "
            "and each user needs one"
        )
    if not found.traffic.scalable:
        lines.append("all requests arrive at once, so there is no load to change")
    return lines


def _edges(found: Recommendation) -> list[str]:
    """Lines about ends of what is tried at which the best setting lies, so that one beyond might do better."""
    if not found.best:
        return []
    c = found.best[0].candidate
    axes = next(family.axes for family in found.space.families if family.name == c.family)
    lines = []
    for (axis, values), at in zip(axes.items(), c.grid_index, strict=True):
        if axis in _EDGED and len(values) > 1 and at in (0, len(values) - 1):
            value = "/".join(map(str, values[at])) if isinstance(values[at], tuple) else values[at]
            lines.append(f"{_EDGED[axis]}: {value} is the {'most' if at else 'least'} that is tried")
    return lines


def _of_device(found: Recommendation) -> list[str]:
    """What a device's profile and memory do not say."""
    profile = found.profile
    if profile is None or profile.device is None or found.device is None:
        return []
    target, lines = profile_target(profile), []
    if found.engine in ("both", "any"):
        other = ENGINE_TITLES["llamacpp" if target == "vllm" else "vllm"]
        own = ENGINE_TITLES.get(target, target)
        lines.append(f"{other} was not tried: the times are those of {own} alone")
    if target == "vllm":
        slots, tokens = measured_range(profile)
        lines.append(
            f"no more than {slots:,} sequences and {tokens:,} tokens in a step were tried: the profile goes no further"
        )
        lines.append("cells are what vLLM leaves for blocks; kvsim plan --device says how far that is sure")
    if profile.source is not None:
        lines += profile.source.notes
    return lines


def _of_engine(found: Recommendation) -> list[str]:
    """What of the engines was not searched, beside what the options say."""
    lines = []
    own = None if found.profile is None or found.device is not None else measured_engine(found.profile)
    if own is not None and own == found.engine:
        other = ENGINE_TITLES["llamacpp" if own == "vllm" else "vllm"]
        lines.append(
            f"{ENGINE_TITLES[own]} alone was searched, on which the profile was measured; --engine both adds "
            f"{other} at the same times"
        )
    if any(c.engine == "llamacpp" for c in found.space.candidates):
        if found.scenario.server.scheduler == "llama-server-fair":
            lines.append("no program has the scheduler llama-server-fair: llama.cpp was searched under llama-server")
        if found.traffic.summary.reuse is None:
            lines.append("whether prompts share text is unknown, so --cache-ram was left as it is")
    return lines
