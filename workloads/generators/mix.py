"""Mixes of several workloads."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice, repeat

from workloads.request import SOURCES, Prefixes, Request, Segment, Workload, WorkloadError, answer_of, conversations
from workloads.rng import named_rng


def part_seed(seed: int, place: int) -> int:
    """The seed of part ``place`` of a mix, from 0: the first draw below 2**63 of the generator ``mix-part-PLACE``."""
    return int(named_rng(seed, f"mix-part-{place}").integers(2**63))


@dataclass(frozen=True, slots=True)
class Mix:
    """The requests of several workloads in order of arrival; on a tie, the earlier part comes first.

    All turns of a session stay together, at the arrival of the session. Requests and sessions are renumbered. Texts
    of different parts never coincide: source s of part k becomes ``s * len(parts) + k``, and a kind of request the
    number after that. Answers are renumbered with their requests.

    In memory are, for each part, one session (or request), the request after it, and what the part itself holds; and
    the number of each request, in 8 bytes. Raises ``ValueError`` for fewer than two parts or a closed loop; iteration
    raises ``WorkloadError`` for a source number that becomes too large, or for an answer to a later request.
    """

    parts: Sequence[Workload]
    limit: int | None = None
    """The most requests to keep; this may cut a session short."""
    users: None = field(default=None, init=False)
    n_requests: int = field(init=False)

    def __post_init__(self) -> None:
        if len(self.parts) < 2:
            raise ValueError(f"{len(self.parts)} parts; at least 2 are needed")
        if any(part.users is not None for part in self.parts):
            raise ValueError("a closed loop has no arrival times and cannot be part of a mix")
        total = sum(part.n_requests for part in self.parts)
        object.__setattr__(self, "n_requests", total if self.limit is None else min(total, self.limit))

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of all parts, each with the number of its part."""
        return tuple(type(note)(f"part {k}: {note}") for k, part in enumerate(self.parts) for note in part.notes)

    @property
    def prefixes(self) -> Prefixes:
        """Unknown if a part does not say; texts token by token unless all parts name blocks only."""
        parts: set[Prefixes] = {part.prefixes for part in self.parts}
        if "unknown" in parts:
            return "unknown"
        return "blocks" if parts == {"blocks"} else "tokens"

    def __iter__(self) -> Iterator[Request]:
        groups = merge(*map(zip, map(repeat, range(len(self.parts))), map(conversations, self.parts)), key=_arrival)
        return islice(self._renumbered(groups), self.n_requests)

    def _renumbered(self, groups: Iterator[_Group]) -> Iterator[Request]:
        number = session = 0
        numbers = [array("q") for _ in self.parts]
        for place, requests in groups:
            # The texts of this session, by their segments in the part: each prompt repeats those of the previous one.
            texts: dict[Segment, Segment] = {}
            together = None if requests[0].session is None else session
            for request in requests:
                for segment in request.content:
                    if segment not in texts:
                        texts[segment] = self._own(place, segment, numbers[place])
                content = tuple([texts[segment] for segment in request.content])
                kind = request.kind * len(self.parts) + place + 1
                yield request._replace(id=number, content=content, session=together, kind=kind)
                numbers[place].append(number)
                number += 1
            session += together is not None

    def _own(self, place: int, segment: Segment, numbers: Sequence[int]) -> Segment:
        """The renumbered segment; ``numbers``: the new ones of the part's requests so far."""
        if segment.source >= SOURCES:
            request = segment.source - SOURCES
            if request >= len(numbers):
                raise WorkloadError(f"part {place} quotes the answer to a later request, which cannot be mixed")
            return segment._replace(source=answer_of(numbers[request], 1).source)
        source = segment.source * len(self.parts) + place
        if source >= SOURCES:
            most = (SOURCES - 1 - place) // len(self.parts)
            raise WorkloadError(
                f"part {place}: text {segment.source} is numbered too high to be mixed; expected 0 to {most}"
            )
        return segment._replace(source=source)


_Group = tuple[int, Sequence[Request]]
"""The index of a part, and either one request or all requests of one session."""


def _arrival(group: _Group) -> float:
    return group[1][0].arrival_s
