"""The BurstGPT traces: CSV with ``Timestamp``, ``Request tokens``, ``Response tokens`` and ``Total tokens``.

Wang et al., "BurstGPT: A real-world workload dataset to optimize LLM serving systems" (KDD 2025); public at
github.com/HPMLL/BurstGPT under CC-BY-4.0. Timestamps are seconds from the first day's midnight, whole in what is
published. The later release inserts ``Session ID`` and ``Elapsed time`` among the others: columns are found by name.
Sessions are ignored: their turns are scattered, and only some rows name one. A failed call has no response tokens,
and mostly no request tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from workloads.generators.lengths import MAX_TOKENS
from workloads.traces.bad_rows import FlawError
from workloads.traces.columns import Schema, time_in, whole
from workloads.traces.row_trace import Make, RowTrace

_ADVICE = 'a failed call, which failed = "drop" (--drop-failed) would leave out'
_LENGTH = whole(0, MAX_TOKENS, " of tokens")


@dataclass(frozen=True, slots=True)
class BurstGptTrace(RowTrace):
    """A trace of BurstGPT; ``Total tokens`` must be the sum of the two others."""

    columns: ClassVar[Schema] = {
        "Timestamp": time_in("s"),
        "Request tokens": _LENGTH,
        "Response tokens": _LENGTH,
        "Total tokens": whole(0, 2 * MAX_TOKENS, " of tokens"),
    }

    failed: Literal["refuse", "drop"] = "refuse"
    """Failed calls are bad rows (``refuse``), or are left out and counted (``drop``)."""

    def start(self, *, check_all: bool) -> Make:
        """Check the sum of each row, and tell failed calls."""
        return self._lengths

    def _lengths(self, number: int, values: list[Any]) -> tuple[int, int] | None:
        prompt, output, both = values
        if both != prompt + output:
            raise FlawError(
                f"Total tokens {both} is not the sum of {prompt} Request tokens and {output} Response tokens"
            )
        if output == 0 and self.failed == "drop":
            self.drop(number, "failed call")
            return None
        for name, tokens in (("Request", prompt), ("Response", output)):
            if tokens == 0:
                advice = self._bad_rows.hint(_ADVICE) if output == 0 else ""
                raise FlawError(f"{name} tokens 0 is out of range; expected 1 to {MAX_TOKENS}{advice}")
        return prompt, output
