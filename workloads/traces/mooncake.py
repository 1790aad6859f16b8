"""The Mooncake traces: JSONL with ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``.

Qin et al., "Mooncake: Trading more storage for less computation - a KVCache-centric architecture for serving LLM
chatbot" (FAST 2025); public at github.com/kvcache-ai/Mooncake, folder FAST25-release, under Apache-2.0. Timestamps
are in milliseconds, but quantised to 3 s: burstiness below that cannot be read off. ``hash_ids`` name the prompt's
blocks of 512 tokens, the last one perhaps not full; an id speaks for all that precedes it as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Any

from workloads.request import Segment
from workloads.traces.bad_rows import FlawError
from workloads.traces.clock import Clock
from workloads.traces.files import open_text
from workloads.traces.jsonl import check_chain, ids, json_lines, parse, tokens, whole
from workloads.traces.trace import Page, Row, Trace, paged

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for."""

_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_MAX_MS = 2**53 - 1
"""The last millisecond that a float still tells from the next one."""

_block = partial(tuple.__new__, Segment)
"""A segment from its fields; a trace has hundreds for each request."""


class MooncakeTrace(Trace):
    """The requests of one of these files; equal ids are equal blocks of content.

    While the file is checked, at the start, every id that was seen is held with the one before it (about 100 bytes
    for each): only so is an id found that follows another one elsewhere. Nothing of it is kept for the reading.
    """

    __slots__ = ()

    def _pages(self, *, check_all: bool) -> Iterator[Page]:
        return paged(self._rows(check_all=check_all))

    def _rows(self, *, check_all: bool) -> Iterator[Row]:
        """The rows; where the order of the blocks is checked, without their content."""
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
            yield from self._ledger.sift(json_lines(self.path, text), read)


def _hash_ids(value: Any, prompt: int) -> list[int]:
    blocks = -(-prompt // BLOCK_TOKENS)
    if isinstance(value, list) and len(value) != blocks:
        raise FlawError(
            f"{len(value)} hash_ids for input_length {prompt}; expected {blocks}, one for {BLOCK_TOKENS} tokens"
        )
    return ids("hash_ids", value)
