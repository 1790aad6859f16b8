"""What a designed load asks: prompts of given lengths that no cache can know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsim.engines.live.client import Answer, Api, Question
from kvsim.engines.live.load import Staircase
from kvsim.engines.live.prompts import Vocabulary


def questions_of(stairs: Staircase, vocabulary: Vocabulary, api: Api, rng: np.random.Generator) -> list[Question]:
    """A question for each request of a staircase, of random tokens or, for servers that take none, of random words."""
    found: list[Question] = []
    asked = zip(stairs.prompts, stairs.output_tokens, stairs.slots, strict=True)
    for i, (tokens, output, slot) in enumerate(asked):
        prompt = _prompt(tokens, vocabulary, rng)
        again = stairs.goes_on and i > stairs.staying and not vocabulary.is_text
        if again:
            before = found[-1].prompt
            assert not isinstance(before, str)
            assert not isinstance(prompt, str)
            prompt = (*before, *prompt)
        answer = vocabulary.answers[i % len(vocabulary.answers)] if vocabulary.answers else None
        # A slot that is asked for by number is not saved to host memory first.
        own = {"cache_prompt": again, "id_slot": slot} if api == "llama-server" else {}
        found.append(Question(prompt, output, answer, own))
    return found


def _prompt(tokens: int, vocabulary: Vocabulary, rng: np.random.Generator) -> tuple[int, ...] | str:
    units = vocabulary.units
    if not vocabulary.is_text:
        return tuple(int(units[i]) for i in rng.integers(0, len(units), tokens).tolist())
    words = max(1, round((tokens - vocabulary.extra_tokens) / vocabulary.tokens_per_word))
    return "".join(str(units[i]) for i in rng.integers(0, len(units), words).tolist())


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
    return None if len(answers) == len(stairs.prompts) else "a request was not answered"
