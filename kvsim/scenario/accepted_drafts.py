"""What servers counted of the drafts that they checked: vLLM's metrics, and the timings of llama-server's answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvsim.errors import UserError
from kvsim.results import MEGABYTE, text_of

_VLLM = re.compile(
    r"^vllm:spec_decode_num_(drafts|accepted_tokens_per_pos)(?:_total)?(?:\{(.*)\})? ([0-9.eE+]+)$", re.M
)
_POSITION = re.compile(r'position="(\d+)"')
_MOST_BYTES = 64 * MEGABYTE


def measured_rates(path: Path, tokens: int) -> tuple[float, ...]:
    """Probability that each drafted token is accepted if those before it were, as a server counted it.

    vLLM counts by position. llama-server counts what was drafted and accepted in all: one probability for all
    positions, by which drafts of ``tokens`` tokens have that share accepted. Raises ``UserError``.
    """
    try:
        text = text_of(path, _MOST_BYTES)
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
    drafts, accepted = 0.0, dict[int, float]()
    for kind, labels, value in _VLLM.findall(text):
        if kind == "drafts":
            drafts += float(value)
        elif position := _POSITION.search(labels):
            accepted[int(position[1])] = accepted.get(int(position[1]), 0.0) + float(value)
    if drafts and accepted:
        counts = [drafts, *(accepted.get(at, 0.0) for at in range(max(accepted) + 1))]
        return tuple(min(now / before, 1.0) if before else 0.0 for before, now in pairwise(counts))
    timings = list(_timings(text))
    drafted = sum(timing["draft_n"] for timing in timings)
    if not drafted:
        raise UserError(
            f"{path}: no drafts are counted there; expected are vLLM's /metrics (vllm:spec_decode_num_drafts_total), "
            "or answers of llama-server (timings.draft_n)"
        )
    return (rate_of(sum(timing["draft_n_accepted"] for timing in timings) / drafted, tokens),)


def rate_of(share: float, tokens: int) -> float:
    """The probability, alike for all positions, by which ``share`` of drafts of ``tokens`` tokens is accepted.

    A token is accepted only if those before it were: the share is (a + a**2 + ... + a**tokens) / tokens.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**at for at in range(1, tokens + 1)) < share * tokens:
            low = middle
        else:
            high = middle
    return high if share > 0 else 0.0


def _timings(text: str) -> Iterator[dict[str, Any]]:
    """The timings with drafts in answers: one JSON value, or one on each line, of a stream also behind ``data:``."""
    try:
        values = [json.loads(text)]
    except (ValueError, RecursionError):
        values = []
        for line in text.splitlines():
            try:
                values.append(json.loads(line.strip().removeprefix("data:")))
            except (ValueError, RecursionError):
                continue
    pending: list[Any] = values
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            if all(isinstance(value.get(key), int) for key in ("draft_n", "draft_n_accepted")):
                yield value
            else:
                pending += value.values()
