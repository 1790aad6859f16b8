"""The BurstGPT traces: CSV with ``Timestamp``, ``Request tokens``, ``Response tokens`` and ``Total tokens``.

Wang et al., "BurstGPT: A real-world workload dataset to optimize LLM serving systems" (KDD 2025); public at
github.com/HPMLL/BurstGPT under CC-BY-4.0. Timestamps are seconds from the first day's midnight, whole in what is
published. The later release inserts ``Session ID`` and ``Elapsed time`` among the others: columns are found by name.
Sessions are ignored: their turns are scattered, and only some rows name one. A failed call has no response tokens,
and mostly no request tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from workloads.generators.lengths import MAX_TOKENS
from workloads.traces.bad_rows import FlawError, quoted
from workloads.traces.clock import Clock, parse_seconds
from workloads.traces.csv_rows import CsvRows, parse_tokens, parse_whole
from workloads.traces.files import open_text
from workloads.traces.trace import Row, RowBatch, Trace, in_batches

Failed = Literal["refuse", "drop"]
"""Failed calls are bad rows (``refuse``), or are left out and counted (``drop``)."""

_ADVICE = 'a failed call, which failed = "drop" (--drop-failed) would leave out'
_COLUMNS = ("Timestamp", "Request tokens", "Response tokens", "Total tokens")


@dataclass(frozen=True, slots=True)
class BurstGptTrace(Trace):
    """A trace of BurstGPT; ``Total tokens`` must be the sum of the two others."""

    failed: Failed = "refuse"
    """What to do with failed calls."""

    def _has_header(self) -> bool:
        return True

    def _batches(self, *, check_all: bool) -> Iterator[RowBatch]:
        return in_batches(self._rows())

    def _rows(self) -> Iterator[Row]:
        clock = Clock("Timestamp")
        with open_text(self.path) as text:
            table = CsvRows(self.path, text, _COLUMNS)

            def read(numbered: tuple[int, list[str]]) -> Row | None:
                number, row = numbered
                table.check(row)
                time, request, response, total = (row[i] for i in table.columns)
                now = clock.check(parse_seconds("Timestamp", time), quoted(time))
                lengths = self._lengths(request, response, total)
                if lengths is None:
                    self._bad_rows.drop(number, "failed call")
                    return None
                return Row(clock.move(now) / 1e9, *lengths)

            rows = ((number, (number, row)) for number, row in table.numbered())
            yield from (row for row in self._bad_rows.sift(rows, read) if row is not None)

    def _lengths(self, request: str, response: str, total: str) -> tuple[int, int] | None:
        """Tokens of a prompt and its answer; None for a failed call that is dropped. Raises ``FlawError``."""
        prompt = parse_whole("Request tokens", request, 0, MAX_TOKENS, " of tokens")
        output = parse_whole("Response tokens", response, 0, MAX_TOKENS, " of tokens")
        both = parse_whole("Total tokens", total, 0, 2 * MAX_TOKENS, " of tokens")
        if both != prompt + output:
            raise FlawError(
                f"Total tokens {both} is not the sum of {prompt} Request tokens and {output} Response tokens"
            )
        if output == 0 and self.failed == "drop":
            return None
        try:
            return parse_tokens("Request tokens", request), parse_tokens("Response tokens", response)
        except FlawError as flaw:
            raise FlawError(f"{flaw}{self._bad_rows.hint(_ADVICE) if output == 0 else ''}") from None
