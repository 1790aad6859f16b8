"""Several workloads at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice

from workloads.request import SOURCES, Request, Segment, Workload, WorkloadError, answer_of
from workloads.rng import named_rng


def part_seed(seed: int, place: int) -> int:
    """The seed of the part at that place, from 0: the first number below 2**63 of the stream ``mix-part-PLACE``."""
    return int(named_rng(seed, f"mix-part-{place}").integers(2**63))


@dataclass(frozen=True, slots=True)
class Mix:
    """The requests of several workloads, in order of arrival; of equal times, the earlier part's first.

    All turns of a session stay together, where its first one comes. Requests and sessions are numbered anew. Texts of
    different parts are different, also where each part counts its own from 0: source s of part k becomes
    ``s * len(parts) + k``. Answers are numbered by requests, so that a text may quote those of its own session only.

    Of each part, one request or session and what its own reading holds are kept, and one request ahead. Raises
    ``ValueError`` for fewer than two parts or a closed loop; reading raises ``WorkloadError`` for a source that
    becomes too large or an answer quoted from elsewhere.
    """

    parts: Sequence[Workload]
    limit: int | None = None
    """Keep this many requests at most, which may cut a session short."""
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
        """Those of all parts."""
        return tuple(f"part {k}: {note}" for k, part in enumerate(self.parts) for note in part.notes)

    def __iter__(self) -> Iterator[Request]:
        groups = merge(*map(_groups, range(len(self.parts)), self.parts), key=_arrival)
        return islice(self._renumbered(groups), self.n_requests)

    def _renumbered(self, groups: Iterator[_Group]) -> Iterator[Request]:
        number = session = 0
        for place, requests in groups:
            # Of this session, by what its own part calls them; a prompt repeats all texts of the one before.
            texts: dict[Segment, Segment] = {}
            answers: dict[int, int] = {}
            together = None if requests[0].session is None else session
            for request in requests:
                for segment in request.content:
                    if segment not in texts:
                        texts[segment] = self._own(place, segment, answers)
                content = tuple([texts[segment] for segment in request.content])
                yield request._replace(id=number, content=content, session=together)
                answers[request.answer.source] = answer_of(number, 1).source
                number += 1
            session += together is not None

    def _own(self, place: int, segment: Segment, answers: Mapping[int, int]) -> Segment:
        """A text of one part, as no other part has it; ``answers``: new sources of those that its session gave."""
        if segment.source in answers:
            return segment._replace(source=answers[segment.source])
        if segment.source >= SOURCES:
            raise WorkloadError(f"part {place} quotes an answer from outside of its session, which cannot be mixed")
        source = segment.source * len(self.parts) + place
        if source >= SOURCES:
            most = (SOURCES - 1 - place) // len(self.parts)
            raise WorkloadError(
                f"part {place}: text {segment.source} is numbered too high to be mixed; expected 0 to {most}"
            )
        return segment._replace(source=source)


_Group = tuple[int, Sequence[Request]]
"""The place of a part; a request of its own, or all of one session."""


def _arrival(group: _Group) -> float:
    return group[1][0].arrival_s


def _groups(place: int, part: Workload) -> Iterator[_Group]:
    group: list[Request] = []
    for request in part:
        if group and (request.session is None or request.session != group[0].session):
            yield place, group
            group = []
        group.append(request)
    if group:
        yield place, group
