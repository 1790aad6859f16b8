"""The Mooncake traces: JSONL with ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``.

Qin et al., "Mooncake: Trading more storage for less computation - a KVCache-centric architecture for serving LLM
chatbot" (FAST 2025); public at github.com/kvcache-ai/Mooncake, folder FAST25-release, under Apache-2.0. Timestamps
are in milliseconds, but quantised to 3 s: burstiness at shorter times cannot be measured. ``hash_ids`` name the
blocks of 512 tokens of a prompt; the last one may be partial. An id stands for all text up to the end of its block.
"""

from __future__ import annotations

from functools import partial
from itertools import repeat
from typing import Any, ClassVar

from workloads.request import Prefixes, Segment
from workloads.traces.bad_rows import FlawError
from workloads.traces.columns import ANY, TOKENS, Schema, whole
from workloads.traces.jsonl import check_chain, ids
from workloads.traces.row_trace import Make, RowTrace

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for."""

_MAX_MS = 2**53 - 1
"""The largest number of milliseconds that a float holds exactly."""

_block = partial(tuple.__new__, Segment)
"""A segment from its fields, without the cost of ``Segment()``: a request may have hundreds."""


class MooncakeTrace(RowTrace):
    """A trace of Mooncake; equal ids are equal blocks of content.

    While the file is checked, at the start, all ids are held with their predecessors (about 100 bytes each), to find
    an id with two predecessors. Nothing of it is kept for later readings.
    """

    __slots__ = ()

    format = "jsonl"
    ticks = 1e3
    columns: ClassVar[Schema] = {
        "timestamp": whole(0, _MAX_MS),
        "input_length": TOKENS,
        "output_length": TOKENS,
        "hash_ids": ANY,
    }

    @property
    def prefixes(self) -> Prefixes:
        """The blocks of prompts; nothing of what answers say."""
        return "blocks"

    def start(self, *, check_all: bool) -> Make:
        """Make blocks of ids; no content while the order of blocks is checked."""
        parents: dict[int, int | None] = {}

        def make(number: int, values: list[Any]) -> tuple[Any, ...]:
            prompt, output, found = values
            _check_ids(found, prompt)
            if check_all:
                check_chain(found, parents)
                return prompt, output
            return prompt, output, tuple(map(_block, zip(found, repeat(0), repeat(BLOCK_TOKENS))))

        return make


def _check_ids(found: Any, prompt: int) -> None:
    blocks = -(-prompt // BLOCK_TOKENS)
    if isinstance(found, list) and len(found) != blocks:
        raise FlawError(
            f"{len(found)} hash_ids for input_length {prompt}; expected {blocks}, one for every {BLOCK_TOKENS} tokens"
        )
    ids("hash_ids", found)
