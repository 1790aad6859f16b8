"""Staircases as they were seen, and what each of their steps did: samples for a fit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from kvsim.calibration.journal import Journal, Line
from kvsim.costs.pass_layout import SKIPPING, Sample, sample_of
from kvsim.engines.live.load import steps_of_prompt
from kvsim.engines.live.steps_seen import CommonSteps, common_steps, windows
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.set_up import build_policy
from policies import Chunk, MicroBatch, OutOfCells, Policy

_WINDOW, _SHORTEST_WINDOW = 8, 3
"""Decode steps in a row whose median is one sample: at most and at least."""
_NEAR = 0.5
"""Share of a step's seconds within which the first token of a request must come when the step ends that made it."""
_LONG = 2.0
"""How many times as long as the usual decode step one before a mixed step must be to have been part of the prompt."""


class LoadHeader(Line):
    """Conditions under which runs belong to the same calibration."""

    format: int = 2
    address: str
    engine: str
    model: str
    server: str
    """The settings of the server, as a digest."""
    processor: str


class LoadRequest(Line):
    """A request of a staircase; times in seconds since the staircase began."""

    prompt_tokens: PositiveInt
    sent_s: float
    token_s: Annotated[tuple[float, ...], Field(min_length=1)]
    prompt_s: float | None
    """How long the prompt took by the server's own clock; None if it does not say."""
    cached: int = 0
    """Tokens of the prompt that were found in its slot."""

    @property
    def computed(self) -> int:
        """Tokens of the prompt that were computed."""
        return self.prompt_tokens - self.cached

    @property
    def stays(self) -> bool:
        """Whether it generates until the end, and does not pass by."""
        return len(self.token_s) > 1


class LoadRun(Line):
    """A staircase that was climbed."""

    origin: int
    """Its number."""
    requests: Annotated[tuple[LoadRequest, ...], Field(min_length=1)]
    probe: bool
    """Whether it was one of the first, which find out how fast the server is."""
    shared: bool
    """Whether others used the server meanwhile, by its counters; its times then mean nothing."""
    busy: bool = False
    """Whether no processor of the server's machine was free meanwhile, so that other work may have slowed it down."""


def pace_of(run: LoadRun) -> tuple[float, int]:
    """Seconds of the median step of the first request while it was alone, 0 if not known; and its prompt's tokens."""
    first = run.requests[0]
    until_s = run.requests[1].sent_s if len(run.requests) > 1 else float("inf")
    gaps = np.diff([t for t in first.token_s if t < until_s])
    return (float(np.median(gaps)) if len(gaps) >= _SHORTEST_WINDOW else 0.0), first.prompt_tokens


LoadJournal = Journal[LoadHeader, LoadRun]
"""The journal of a calibration of a server."""


class PromptAlone(NamedTuple):
    """A prompt that was computed while no other request was there."""

    batches: list[MicroBatch]
    """Its passes."""
    waited_s: float
    """How long the client waited for the first token."""
    prompt_s: float | None
    """How long the prompt took by the server's own clock; None if it does not say."""


@dataclass
class RunSamples:
    """What a staircase tells."""

    samples: list[Sample] = field(default_factory=list)
    alone: PromptAlone | None = None
    """The first prompt; None if the run was shared."""
    prompt: Sample | None = None
    """What the client waited for the first prompt, if the server does not say how long it took."""
    left_out: int = 0
    """Steps whose time is not certain."""
    at_once: int = 0
    """Steps whose tokens came at once with those of the next."""


def samples_of(run: LoadRun, scenario: Scenario) -> RunSamples:
    """The steps of a staircase with their work, on a server that places tokens as the scenario's policy does."""
    found = RunSamples()
    if not run.shared:
        # A server whose tokens are not those that were asked for may hold more than it has room for.
        with suppress(OutOfCells):
            _follow(_Replay(run, build_policy(scenario), scenario.n_batch), found)
    return found


def _follow(replay: _Replay, found: RunSamples) -> None:
    """Add all steps of a staircase that can be followed. Raises ``OutOfCells``."""
    first, alone = replay.run.requests[0], replay.prompt(0)
    passes = [batch for step in alone for batch in step]
    found.alone = PromptAlone(passes, first.token_s[0] - first.sent_s, first.prompt_s)
    if first.prompt_s is not None:
        found.samples.append(replay.sample(alone, first.prompt_s))
    else:
        found.prompt = replay.sample(alone, found.alone.waited_s)
    for begun in range(1, len(replay.run.requests) + 1):
        if not _take_stair(replay, begun, found):
            break
    steps = len(first.token_s)
    if found.at_once > steps / 2:  # So are the beginnings and ends of the rest.
        found.samples, found.left_out = [], steps


class _Replay:
    """Places the steps of a staircase as the server did, one after another."""

    def __init__(self, run: LoadRun, policy: Policy, batch: int):
        self.run, self.policy, self.batch = run, policy, batch
        self.contexts: list[int] = []
        """Tokens that each request holds which stays, in order."""
        self.generated: list[int] = []
        """Tokens of its answer."""
        self.passed = 0
        """Tokens that the last request which passed by has left in its slot."""

    def prompt(self, number: int) -> list[tuple[MicroBatch, ...]]:
        """Compute the prompt of a request beside those that generate; the micro-batches of each step."""
        request, seq = self.run.requests[number], len(self.contexts)
        if self.passed != request.cached:  # What passed by before is not gone on from.
            self.policy.free(seq)
        steps, done = [], request.cached
        while done < request.prompt_tokens:
            part = min(request.prompt_tokens - done, max(1, self.batch - seq))
            steps.append(self.step(Chunk(seq, done, part)))
            done += part
        if request.stays:
            self.contexts.append(request.prompt_tokens)
            self.generated.append(1)
            self.passed = 0
        else:
            self.passed = request.prompt_tokens
        return steps

    def step(self, *more: Chunk) -> tuple[MicroBatch, ...]:
        """A step of one token for each request that generates, and perhaps of a part of a prompt."""
        decodes = [Chunk(seq, held, 1) for seq, held in enumerate(self.contexts)]
        self.contexts = [held + 1 for held in self.contexts]
        self.generated = [n + 1 for n in self.generated]
        return self.policy.allocate([*decodes, *more])

    def catch_up(self, first: Sequence[int]) -> bool:
        """Take the steps that lead to each request's token of number ``first``; False if there are none."""
        missing = {number + 1 - n for number, n in zip(first, self.generated, strict=True)}
        steps = missing.pop()
        if missing or steps < 0:
            return False
        for _ in range(steps):
            self.step()
        return True

    def sample(self, steps: Sequence[tuple[MicroBatch, ...]], seconds: float) -> Sample:
        """A sample of steps that took so long together."""
        kernel = self.policy.kernel
        batches = [batch for step in steps for batch in step]
        skips = kernel in SKIPPING
        return sample_of(kernel, batches, self.policy.groups[0], seconds, self.run.origin, mixed=True, skips=skips)


def _take_stair(replay: _Replay, begun: int, found: RunSamples) -> bool:
    """Add the steps from when the last of ``begun`` requests began until the next one has, or the first ends.

    Returns whether they could be followed, so that it is known what the server did next.
    """
    requests = replay.run.requests
    streams = [request.token_s for request in requests[:begun] if request.stays]
    following = requests[begun] if begun < len(requests) else None
    if not streams:
        return False
    until_s = float("inf") if following is None else following.token_s[0]
    seen = common_steps(streams, requests[begun - 1].token_s[0], until_s)
    if len(seen.at_s) < 2 or not replay.catch_up(seen.first):
        return False
    clean = seen.clean
    decodes = len(clean) if following is None else _before_prompt(seen, clean, following, replay)
    # Steps that ended at one time can only be spread evenly if they are alike.
    ends = np.flatnonzero(~seen.late[: decodes + 1])
    clean[ends[-1] if len(ends) else 0 : decodes] = False
    clean[decodes:] &= ~(seen.late[1:] | seen.late[:-1])[decodes:]
    placed = [replay.step() for _ in range(decodes)]
    for begin, end in windows(clean[:decodes], _WINDOW, _SHORTEST_WINDOW):
        middle = placed[(begin + end - 1) // 2]
        found.samples.append(replay.sample([middle], float(np.median(seen.gaps_s[begin:end]))))
    if following is not None and following.cached not in (0, replay.passed):
        return False
    if following is not None:
        for gap, step in enumerate(replay.prompt(begun), decodes):
            if gap < len(clean) and clean[gap]:
                found.samples.append(replay.sample([step], float(seen.gaps_s[gap])))
    found.left_out += int((~clean).sum())
    found.at_once += int(seen.late.sum())
    return True


def _before_prompt(seen: CommonSteps, clean: NDArray[np.bool_], following: LoadRequest, replay: _Replay) -> int:
    """How many of the steps are decode-only, before those of the prompt of the following request.

    What is not certain of the steps is marked in ``clean``.
    """
    # The step in which the request came may have waited for it to be taken in.
    arrived = max(int(np.searchsorted(seen.at_s, following.sent_s)) - 1, 0)
    decodes = len(clean) - steps_of_prompt(following.computed, replay.batch, len(replay.contexts))
    if decodes < arrived or abs(seen.at_s[-1] - following.token_s[0]) > _NEAR * seen.gaps_s[-1]:
        # More or fewer steps than assumed.
        clean[arrived:] = False
        return min(arrived, max(decodes, 0))
    if arrived < decodes:
        clean[arrived] = False
    if not _as_planned(seen, decodes):
        clean[decodes:] = False
    return decodes


def _as_planned(seen: CommonSteps, decodes: int) -> bool:
    """Whether the prompt behind ``decodes`` decode steps was computed in as many steps as assumed, not in more."""
    if decodes < 2:
        return True
    gaps = seen.gaps_s[:decodes]
    return bool(gaps[-1] < _LONG * np.median(gaps[:-1]) or gaps[-1] < seen.gaps_s[decodes] / _LONG)
