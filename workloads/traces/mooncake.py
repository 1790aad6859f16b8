"""The Mooncake traces: JSONL with ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``.

Qin et al., "Mooncake: Trading more storage for less computation - a KVCache-centric architecture for serving LLM
chatbot" (FAST 2025); public at github.com/kvcache-ai/Mooncake, folder FAST25-release, under Apache-2.0. Timestamps
are in milliseconds, but quantised to 3 s: burstiness at shorter times cannot be measured. ``hash_ids`` name the
blocks of 512 tokens of a prompt; the last one may be partial. An id stands for all text up to the end of its block.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Any

from workloads.request import Prefixes, Segment
from workloads.traces.bad_rows import FlawError
from workloads.traces.clock import Clock
from workloads.traces.files import open_text
from workloads.traces.jsonl import check_chain, ids, json_lines, parse, tokens, whole
from workloads.traces.trace import Row, RowBatch, Trace, in_batches

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for."""

_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_MAX_MS = 2**53 - 1
"""The largest number of milliseconds that a float holds exactly."""

_block = partial(tuple.__new__, Segment)
"""A segment from its fields, without the cost of ``Segment()``: a request may have hundreds."""


class MooncakeTrace(Trace):
    """A trace of Mooncake; equal ids are equal blocks of content.

    While the file is checked, at the start, all ids are held with their predecessors (about 100 bytes each), to find
    an id with two predecessors. Nothing of it is kept for later readings.
    """

    __slots__ = ()

    @property
    def prefixes(self) -> Prefixes:
        """The blocks of prompts; nothing of what answers say."""
        return "blocks"

    def _batches(self, *, check_all: bool) -> Iterator[RowBatch]:
        return in_batches(self._rows(check_all=check_all))

    def _rows(self, *, check_all: bool) -> Iterator[Row]:
        """The rows; without content while the order of blocks is checked."""
        clock = Clock("timestamp")
        parents: dict[int, int | None] | None = {} if check_all else None

        def read(line: str) -> Row:
            row = parse(line, _KEYS)
            now = clock.check(whole(row, "timestamp", 0, _MAX_MS))
            prompt, output = tokens(row, "input_length"), tokens(row, "output_length")
            found = _hash_ids(row["hash_ids"], prompt)
            if parents is not None:
                check_chain(found, parents)
                content: tuple[Segment, ...] = ()
            else:
                content = tuple(map(_block, zip(found, repeat(0), repeat(BLOCK_TOKENS))))
            return Row(clock.move(now) / 1e3, prompt, output, content)

        with open_text(self.path) as text:
            yield from self._bad_rows.sift(json_lines(self.path, text), read)


def _hash_ids(value: Any, prompt: int) -> list[int]:
    blocks = -(-prompt // BLOCK_TOKENS)
    if isinstance(value, list) and len(value) != blocks:
        raise FlawError(
            f"{len(value)} hash_ids for input_length {prompt}; expected {blocks}, one for every {BLOCK_TOKENS} tokens"
        )
    return ids("hash_ids", value)
