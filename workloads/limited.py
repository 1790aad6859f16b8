"""A workload whose clients limit how much may be generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workloads.request import Prefixes, Request, Workload


@dataclass(frozen=True, slots=True)
class LimitedOutputs:
    """The same requests, each with a limit of output tokens that its client states; longer outputs are cut to it.

    Prompts stay as they are, also those that quote a longer answer of an earlier turn.
    """

    workload: Workload
    limit: int

    @property
    def n_requests(self) -> int:
        """As many as without the limit."""
        return self.workload.n_requests

    @property
    def users(self) -> int | None:
        """As many as without the limit."""
        return self.workload.users

    @property
    def notes(self) -> Sequence[str]:
        """As without the limit."""
        return self.workload.notes

    @property
    def prefixes(self) -> Prefixes:
        """As without the limit."""
        return self.workload.prefixes

    def __iter__(self) -> Iterator[Request]:
        for request in self.workload:
            stated = request.max_output_tokens
            limit = self.limit if stated is None else min(stated, self.limit)
            yield request._replace(output_tokens=min(request.output_tokens, limit), max_output_tokens=limit)
