"""Why the requests of a run failed: counts, sizes and limits for each kind of failure, and the reason in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsim.simulation.job import FailureKind, Job


@dataclass(slots=True)
class FailureGroup:
    """The requests of a run that failed in one way."""

    kind: FailureKind
    count: int
    shortest: int
    """Prompt tokens of the request with the shortest prompt."""
    longest: int
    """Prompt tokens of the request with the longest prompt."""
    limit: int
    """Largest limit that one of them exceeded, in tokens; 0 if the kind has none."""
    example: str
    """What the policy said of the one with the longest prompt, with its sizes; empty if the kind has a limit."""

    @property
    def reason(self) -> str:
        """The reason in words, with its numbers."""
        longest = f"longest {self.longest:,}" if self.count > 1 else f"{self.longest:,}"
        example = f": {self.example}" if self.example else ""
        match self.kind:
            case FailureKind.CONTEXT:
                return f"the prompt is too long for a slot ({longest} tokens; a slot has {self.limit:,})"
            case FailureKind.BATCH:
                sizes = f"{longest} tokens; n_batch is {self.limit:,}"
                return f"the prompt is longer than a step, and prefill is not chunked ({sizes})"
            case FailureKind.CACHE:
                return f"the whole cache is too small for the request{example}"
            case FailureKind.NO_SLOT:
                return f"a step found no room in the cache{example}"
        return "the client has gone"

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``failures`` in ``--json``."""
        return {
            "kind": self.kind.value,
            "count": self.count,
            "reason": self.reason,
            "shortest_prompt": self.shortest,
            "longest_prompt": self.longest,
            "limit": self.limit or None,
        }


class FailureCounts:
    """Counts failed requests as they end, by kind, in bounded memory."""

    def __init__(self) -> None:
        self._groups: dict[FailureKind, FailureGroup] = {}

    def add(self, job: Job) -> None:
        """Count a request that has failed."""
        tokens, kind = job.request.prompt_tokens, job.failure
        group = self._groups.get(kind)
        if group is None:
            self._groups[kind] = FailureGroup(kind, 1, tokens, tokens, job.exceeded, job.refusal)
            return
        if tokens > group.longest:
            group.longest, group.example = tokens, job.refusal
        group.count += 1
        group.shortest = min(group.shortest, tokens)
        group.limit = max(group.limit, job.exceeded)

    def summary(self) -> list[dict[str, Any]]:
        """The groups, most frequent first, ready for JSON."""
        return [group.to_dict() for group in sorted(self._groups.values(), key=lambda group: -group.count)]


def failure_lines(failures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say in a line for each kind how many requests failed and why; ``failures`` are those of a run's summary."""
    return [f"{group['count']:,} failed: {group['reason']}" for group in failures]
