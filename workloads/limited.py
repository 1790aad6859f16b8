"""A workload whose clients limit how much may be generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workloads.request import Prefixes, Request, Workload


@dataclass(frozen=True, slots=True)
class LimitedOutputs:
    """Requests of another workload, each with a limit of output tokens; longer outputs are cut to it.

    Prompts stay as they are, also those that quote a longer answer of an earlier turn.
    """

    workload: Workload
    limit: int

    @property
    def n_requests(self) -> int:
        """The number of requests, which the limit does not change."""
        return self.workload.n_requests

    @property
    def users(self) -> int | None:
        """The number of users of a closed loop, or None."""
        return self.workload.users

    @property
    def notes(self) -> Sequence[str]:
        """Notes of the workload that is limited."""
        return self.workload.notes

    @property
    def prefixes(self) -> Prefixes:
        """What that workload says about which prompts begin alike."""
        return self.workload.prefixes

    def __iter__(self) -> Iterator[Request]:
        for request in self.workload:
            stated = request.max_output_tokens
            limit = self.limit if stated is None else min(stated, self.limit)
            yield request._replace(output_tokens=min(request.output_tokens, limit), max_output_tokens=limit)
