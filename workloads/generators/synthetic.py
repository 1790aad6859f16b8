"""Generated workloads of single requests: arrivals from a process, or users in a closed loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workloads.generators.gaps import Gaps, moments
from workloads.generators.joint import GivenPrompt, draw_pairs
from workloads.generators.lengths import Lengths
from workloads.request import Prefixes, Request, Segment
from workloads.rng import named_rng

_BATCH = 4096
"""Requests drawn at a time. Another value would change the requests of a seed."""


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Single requests, drawn in batches as they are needed; the lengths do not depend on the gaps.

    Raises ``ValueError`` for a ``correlation`` if outputs are a ``GivenPrompt``, which already depends on prompts.
    """

    seed: int
    n_requests: int
    gaps: Gaps
    prompt_tokens: Lengths
    output_tokens: Lengths | GivenPrompt
    users: int | None = None
    """The number of users of a closed loop, in which the gaps are think times; None: the gaps are between arrivals."""
    correlation: float = 0.0
    """Spearman's rank correlation of prompt and output lengths; -1 to 1."""
    shared_tokens: int = 0
    """Tokens with which every prompt begins, the same in all; of shorter prompts all but the last."""

    def __post_init__(self) -> None:
        if self.correlation and isinstance(self.output_tokens, GivenPrompt):
            raise ValueError("how outputs depend on prompts is said twice: by a correlation and by a table")

    @property
    def notes(self) -> tuple[str, ...]:
        """Empty: a generator reads no file from which rows could be left out."""
        return ()

    @property
    def prefixes(self) -> Prefixes:
        """What prompts share is known: the same beginning, if any."""
        return "tokens"

    def __iter__(self) -> Iterator[Request]:
        draw = self.gaps(named_rng(self.seed, "arrivals"))
        prompts = named_rng(self.seed, "prompt-lengths")
        outputs = named_rng(self.seed, "output-lengths")
        now = 0.0
        for first in range(0, self.n_requests, _BATCH):
            n = min(_BATCH, self.n_requests - first)
            gaps = draw(n)
            both = draw_pairs(self.prompt_tokens, self.output_tokens, self.correlation, prompts, outputs, n)
            rows = zip(
                range(first, first + n),
                both[0].tolist(),
                both[1].tolist(),
                gaps.tolist() if self.users is not None else moments(now, gaps).tolist(),
                strict=True,
            )
            if self.users is not None:
                for i, prompt, output, gap in rows:
                    yield Request(i, 0.0, prompt, output, gap, self._content(i, prompt))
            else:
                for i, prompt, output, now in rows:
                    yield Request(i, now, prompt, output, 0.0, self._content(i, prompt))

    def _content(self, number: int, prompt: int) -> tuple[Segment, ...]:
        shared = min(self.shared_tokens, prompt - 1)
        return (Segment(0, 0, shared), Segment(number + 1, 0, prompt - shared)) if shared > 0 else ()
