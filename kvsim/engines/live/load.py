"""A designed load: requests that begin one after another, so that every step of the server is known in advance.

A *staircase* asks for one request, waits until that has generated some tokens, asks for the next, and so on, until all
generate together. Between two requests all steps are decode-only and of known contexts; the prompt of each further
request is computed in a step beside those that generate: a mixed one. Only the first prompt is alone. Where there is
room, some more requests pass by at the end, one after another, each for a single token. Where the server can be made to
find them in its cache, each goes on from the one before, so that prompts behind a long context are seen too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kvsim.engines.live.client import Answer, Api, Client, CompletionRequest
from kvsim.engines.live.prompts import Vocabulary

HOLD = 6
"""Decode-only steps before the next request is sent."""
_LATE = 5
"""Steps that may pass until the server begins with a request that was sent."""
_TAIL = 12
"""Tokens that the last request generates."""
_BATCHES = (1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Requests that stay, of the staircases of a round."""
PASSING = 3
"""Requests that pass by."""
_SHARE = 0.9
"""Share of a cache that a staircase may fill."""


@dataclass(frozen=True)
class Limits:
    """What a server can be asked for at once."""

    requests: int
    """The most requests that generate together."""
    prompt: int
    """The most tokens of a prompt."""
    context: int
    """The most tokens of a sequence."""
    cells: int
    """The most tokens of all sequences together."""
    batch: int
    """The most tokens in a step."""
    finds: bool = False
    """Whether a request can be made to go on from what another left in its slot."""


@dataclass(frozen=True)
class Staircase:
    """Requests in the order in which they begin; ``prompts``: tokens of each."""

    prompts: tuple[int, ...]
    batch: int
    """The most tokens in a step."""
    passing: int = 0
    """How many of them, the last, only pass by."""
    goes_on: bool = False
    """Whether each that passes by goes on from the prompt of the one before, which then only counts its own tokens."""

    @property
    def staying(self) -> int:
        """Requests that generate until the end."""
        return len(self.prompts) - self.passing

    @property
    def slots(self) -> tuple[int, ...]:
        """Which of its sequences each request is; those that pass by have one after another the same."""
        return tuple(min(i, self.staying) for i in range(len(self.prompts)))

    @property
    def output_tokens(self) -> tuple[int, ...]:
        """A token for those that pass by; for each other request as many as it takes until the last of all is done."""
        left, found = _TAIL, []
        for i, n in reversed(list(enumerate(self.prompts))):
            found.append(left if i < self.staying else 1)
            left += HOLD + _LATE + steps_of_prompt(n, self.batch, self.staying)
        return tuple(reversed(found))


def steps_of_prompt(tokens: int, batch: int, generating: int) -> int:
    """Steps that compute a prompt of so many tokens beside so many requests that generate."""
    return -(-tokens // max(1, batch - generating))


def probes(limits: Limits) -> list[Staircase]:
    """Prompts alone, each twice as long as the one before, up to the longest that is possible."""
    lengths = sorted({*(1 << i for i in range(limits.prompt.bit_length())), limits.prompt})
    return [fitted(Staircase((n,), limits.batch), limits) for n in lengths]


def round_of(limits: Limits, longest: int, rng: np.random.Generator) -> list[Staircase]:
    """A round of staircases in random order, with prompts of all lengths up to ``longest`` tokens.

    Lengths are evenly spread by their logarithm over the whole round.
    """
    sizes = [(n, PASSING) for n in _BATCHES if n < limits.requests] + [(limits.requests, 0)]
    ends = np.cumsum([staying + passing for staying, passing in sizes]).tolist()
    spread = (rng.permutation(ends[-1]) + rng.random(ends[-1])) / ends[-1]
    lengths = [math.floor(2**x) for x in (spread * math.log2(longest + 1)).tolist()]
    drawn = []
    for (staying, passing), end in zip(sizes, ends, strict=True):
        stairs = Staircase(tuple(lengths[end - staying - passing : end]), limits.batch, passing, limits.finds)
        drawn.append(fitted(stairs, limits))
    return [drawn[i] for i in rng.permutation(len(drawn)).tolist()]


def fitted(stairs: Staircase, limits: Limits) -> Staircase:
    """The staircase with prompts shortened until every sequence, and all together, have room."""
    share = int(_SHARE * limits.cells) // len(set(stairs.slots))
    most = [min(limits.context - 1, share) - n for n in stairs.output_tokens]
    if stairs.goes_on:
        most[stairs.staying :] = [room // stairs.passing for room in most[stairs.staying :]]
    prompts = (max(1, min(n, room)) for n, room in zip(stairs.prompts, most, strict=True))
    return replace(stairs, prompts=tuple(prompts))


def completion_requests(
    stairs: Staircase, vocabulary: Vocabulary, api: Api, rng: np.random.Generator
) -> list[CompletionRequest]:
    """The requests of a staircase, of random tokens or, for servers that take none, of random words."""
    found: list[CompletionRequest] = []
    asked = zip(stairs.prompts, stairs.output_tokens, stairs.slots, strict=True)
    for i, (tokens, output, slot) in enumerate(asked):
        prompt = vocabulary.draw(tokens, rng)
        again = stairs.goes_on and i > stairs.staying and not vocabulary.is_text
        if again:
            before = found[-1].prompt
            assert not isinstance(before, str)
            assert not isinstance(prompt, str)
            prompt = (*before, *prompt)
        answer = vocabulary.answers[i % len(vocabulary.answers)] if vocabulary.answers else None
        # A slot that is asked for by number is not saved to host memory first.
        own = {"cache_prompt": again, "id_slot": slot} if api == "llama-server" else {}
        found.append(CompletionRequest(prompt, output, answer, own))
    return found


def fault_of(answers: Sequence[Answer], stairs: Staircase) -> str | None:
    """Why the answers to a staircase are of no use, in words; None if they are."""
    for i, (answer, asked) in enumerate(zip(answers, stairs.output_tokens, strict=False)):
        if answer.error is not None:
            return answer.error
        if answer.output_tokens != asked or not answer.token_s:
            return f"answered with {answer.output_tokens} tokens where {asked} were asked for"
        if answer.prompt_tokens is None:
            return "does not say how many tokens a prompt has"
        if answer.cached_tokens and not (stairs.goes_on and i > stairs.staying):
            return "answered from a cache what was never asked before"
    return None if len(answers) == len(stairs.prompts) else "answered the first request before the others could come"


def begun(answers: Sequence[Answer], requests: Sequence[CompletionRequest]) -> list[Answer]:
    """What is certain of a staircase that was cut: the requests that had begun to generate, up to when the next one
    came, whose prompt may have been under way.
    """
    seen, until_s = list[Answer](), math.inf
    for answer, request in zip(answers, requests, strict=False):
        prompt = len(request.prompt) if not isinstance(request.prompt, str) else 0
        answer = replace(answer, prompt_tokens=answer.prompt_tokens or prompt)
        if len(answer.token_s) < min(2, request.output_tokens) or not answer.prompt_tokens:
            until_s = answer.sent_s
            break
        seen.append(answer)
    return [replace(answer, token_s=[t for t in answer.token_s if t <= until_s]) for answer in seen]


class _Hold:
    """Knows when the first request has generated for ``HOLD`` steps since the latest one began."""

    def __init__(self) -> None:
        self.due = asyncio.Event()
        self._latest = self._first = 0
        self._since: int | None = None
        """Tokens of the first request when the latest began; None before."""

    def watch(self, number: int) -> Callable[[Answer], None]:
        """What to call when a request that is now sent, and is then the latest, gets a token."""
        self.due.clear()
        self._latest, self._since = number, None
        return partial(self._came, number)

    def _came(self, number: int, answer: Answer) -> None:
        if number == 0:
            self._first = len(answer.token_s)
        if number == self._latest and self._since is None:
            self._since = self._first
        if self._since is not None and self._first >= self._since + HOLD:
            self.due.set()


async def climb(client: Client, requests: Sequence[CompletionRequest], clock: float) -> list[Answer]:
    """Send each request when there were ``HOLD`` steps since the one before began; wait for all answers.

    Later requests are not sent if one fails. Raises ``ServerFault`` as ``Client.ask`` does.
    """
    asked: list[asyncio.Task[Answer]] = []
    hold = _Hold()
    try:
        for i, request in enumerate(requests):
            task = asyncio.create_task(client.ask(request, clock, hold.watch(i)))
            task.add_done_callback(lambda done: hold.due.set() if _failed(done) or done is asked[0] else None)
            asked.append(task)
            if i + 1 < len(requests):
                await hold.due.wait()
            if any(_failed(task) for task in asked) or asked[0].done():
                break
        return [await task for task in asked]
    finally:
        for task in asked:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


def _failed(task: asyncio.Task[Answer]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None or task.result().error is not None)
