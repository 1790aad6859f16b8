"""Steps of a server as its clients saw them: from the times at which tokens came.

A step gives every request that generates a token, at about the same time. Where the same requests got tokens twice in
a row, and nothing else was waiting, the time between is that of a step whose work is known. Where a prompt came to an
idle server, so is the work of its passes. Of all other steps the clients do not see what they did, and they are left
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvsim.costs.pass_layout import Work
from kvsim.engines.recordings.steps import MeasuredStep
from kvsim.scenario.scenario import Scenario

_NEAR = 0.5
"""Tokens that come within this share of the usual gap belong to one step."""


class SeenRequest(NamedTuple):
    """A request as its client saw it; times in seconds."""

    prompt_tokens: int
    cached: int
    """Tokens of the prompt that were found in a cache."""
    sent_s: float
    token_s: Sequence[float]
    slot: int | None = None
    """The number of its slot, where the server says it."""
    prompt_s: float | None = None
    """How long the prompt took by the server's own clock; None if it does not say."""


class _Token(NamedTuple):
    at_s: float
    request: int
    number: int


def seen_steps(requests: Sequence[SeenRequest], scenario: Scenario) -> tuple[MeasuredStep, ...]:
    """The steps of which times and work are known, in order of time."""
    answered = [request for request in requests if len(request.token_s)]
    decodes = _decodes(answered, scenario)
    prompts = [_prompt(request, scenario) for request in answered if _is_alone(request, answered)]
    return tuple(sorted([*decodes, *(step for step in prompts if step is not None)], key=lambda step: step.start_s))


def _decodes(requests: Sequence[SeenRequest], scenario: Scenario) -> list[MeasuredStep]:
    gaps = [b - a for request in requests for a, b in pairwise(request.token_s) if b > a]
    if not gaps:
        return []
    near = _NEAR * float(np.median(gaps))
    found = []
    for before, after in pairwise(_steps(requests, near)):
        if {token.request for token in before} != {token.request for token in after}:
            continue
        start_s, end_s = (float(np.median([token.at_s for token in step])) for step in (before, after))
        running = {token.request for token in after}
        others = (r for i, r in enumerate(requests) if i not in running)
        # A request that waits or generates meanwhile may have had a part in the step.
        if any(r.sent_s < end_s and r.token_s[-1] > start_s for r in others):
            continue
        works = _works_of_tokens([(requests[token.request], token.number) for token in after], scenario)
        found.append(MeasuredStep(start_s, end_s - start_s, end_s, works))
    return found


def _steps(requests: Sequence[SeenRequest], near: float) -> list[list[_Token]]:
    """The tokens that came together."""
    tokens = sorted(
        _Token(at, i, number) for i, request in enumerate(requests) for number, at in enumerate(request.token_s)
    )
    found: list[list[_Token]] = []
    for token in tokens:
        together = found and token.at_s - found[-1][0].at_s <= near
        if together and token.request not in {other.request for other in found[-1]}:
            found[-1].append(token)
        else:
            found.append([token])
    return found


def _works_of_tokens(tokens: Sequence[tuple[SeenRequest, int]], scenario: Scenario) -> tuple[Work, ...]:
    """The passes of a step of a token for each request. llama.cpp computes slots side by side that are neighbours."""
    ordered = sorted(tokens, key=lambda token: -1 if token[0].slot is None else token[0].slot)
    passes: list[list[tuple[SeenRequest, int]]] = []
    divided = scenario.server.scheduler == "llama-server" and not scenario.unified
    for token in ordered:
        last = passes[-1][-1][0].slot if passes else None
        slot = token[0].slot
        if not passes or (divided and slot is not None and last is not None and slot > last + 1):
            passes.append([])
        passes[-1].append(token)
    return tuple(_work([(1, request.prompt_tokens + number) for request, number in each]) for each in passes)


def _is_alone(request: SeenRequest, requests: Sequence[SeenRequest]) -> bool:
    """Whether no other request was there from before it was sent until its first token."""
    return not any(
        other is not request and other.sent_s < request.token_s[0] and other.token_s[-1] > request.sent_s
        for other in requests
    )


def _prompt(request: SeenRequest, scenario: Scenario) -> MeasuredStep | None:
    """The step of a prompt that came to an idle server; None if it is more than one step."""
    tokens, start = request.prompt_tokens - request.cached, request.cached
    if not 1 < tokens <= scenario.n_batch:
        return None
    most = scenario.n_ubatch if scenario.server.scheduler == "llama-server" else tokens
    ends = [min(at + most, tokens) for at in range(0, tokens, most)]
    works = [_work([(end - at, start + end)]) for at, end in zip([0, *ends], ends, strict=False)]
    end_s = request.token_s[0]
    waited = end_s - request.sent_s if request.prompt_s is None else request.prompt_s
    return MeasuredStep(request.sent_s, waited, end_s, tuple(works), by_client=request.prompt_s is None)


def _work(scans: list[tuple[int, int]]) -> Work:
    return Work(tokens=sum(n for n, _ in scans), scans=tuple(scans), chunks=len(scans), runs=len(scans))
