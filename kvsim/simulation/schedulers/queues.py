"""The order in which requests wait: as they came, by priority, or by what their prompts say."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol

from kvsim.scenario.serving_sections import ServerSection
from kvsim.simulation.job import Job
from policies import Content, Policy
from policies.content import NOTHING, TextSegment


class Queue(Protocol):
    """Waiting requests."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Job]: ...

    def add(self, job: Job) -> None:
        """Queue a new request."""
        ...

    def put_back(self, job: Job) -> None:
        """Queue a request that was preempted."""
        ...

    def arrange(self) -> None:
        """Put the requests in order, before the scheduler asks for the first ones."""
        ...

    def first(self) -> Job:
        """The request to be admitted next; the queue must not be empty."""
        ...

    def remove(self, job: Job) -> None:
        """Take a request out of the queue."""
        ...


class FcfsQueue(deque[Job]):
    """First come, first served; preempted requests come before all others."""

    def add(self, job: Job) -> None:
        """Queue at the back."""
        self.append(job)

    def put_back(self, job: Job) -> None:
        """Queue at the front."""
        self.appendleft(job)

    def arrange(self) -> None:
        """No effect: they always are in order."""

    def first(self) -> Job:
        """The request at the front."""
        return self[0]

    def remove(self, job: Job) -> None:
        """Take a request out of the queue, nearly always the first."""
        if self[0] is job:
            self.popleft()
        else:
            super().remove(job)


class PriorityQueue:
    """By priority, and by arrival among equals, as in vLLM's priority scheduling."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Job]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Job]:
        return (entry[-1] for entry in sorted(self._heap))

    def add(self, job: Job) -> None:
        """Queue at its place."""
        heapq.heappush(self._heap, (*urgency(job), job.request.id, job))

    def put_back(self, job: Job) -> None:
        """Queue at its place."""
        self.add(job)

    def arrange(self) -> None:
        """No effect: they always are in order."""

    def first(self) -> Job:
        """The most urgent request."""
        return self._heap[0][-1]

    def remove(self, job: Job) -> None:
        """Take a request out of the queue, nearly always the first."""
        if self._heap[0][-1] is job:
            heapq.heappop(self._heap)
        else:
            self._heap = [entry for entry in self._heap if entry[-1] is not job]
            heapq.heapify(self._heap)


def urgency(job: Job) -> tuple[int, float]:
    """Sort key of a request: the smaller, the more urgent."""
    return job.request.priority, job.arrival_s


FEW_CACHED = 32
"""A request of which more tokens are cached never waits for another one that begins alike
(``IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD``)."""
SAME_BEGINNING = 32
"""Requests that share so many first tokens begin alike (``IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD``)."""


def queue_for(server: ServerSection, policy: Policy) -> Queue:
    """An empty queue in the order that a scenario asks for."""
    builders: dict[str, Callable[[], Queue]] = {
        "fcfs": FcfsQueue,
        "priority": PriorityQueue,
        "longest-prefix": lambda: LongestPrefixQueue(policy, server.longest_prefix_limit),
        "depth-first": DepthFirstQueue,
    }
    return builders[server.order]()


class PrefixQueue:
    """What queues have in common that are put in order before each step which may admit requests.

    Preempted requests take part like all others, as SGLang's retracted ones do; among equals they come first. What came
    after the last ``arrange`` stands at the end.
    """

    def __init__(self) -> None:
        self._arrived: dict[Job, None] = {}
        """In order of arrival."""
        self._preempted: dict[Job, None] = {}
        """In order of preemption."""
        self._ordered: dict[Job, None] = {}
        """In order of admission."""

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._ordered)

    def add(self, job: Job) -> None:
        """Queue a new request."""
        self._arrived[job] = self._ordered[job] = None

    def put_back(self, job: Job) -> None:
        """Queue a request that was preempted."""
        self._preempted[job] = self._ordered[job] = None

    def first(self) -> Job:
        """The request to be admitted next."""
        return next(iter(self._ordered))

    def remove(self, job: Job) -> None:
        """Take a request out of the queue."""
        del self._ordered[job]
        if job in self._arrived:
            del self._arrived[job]
        else:
            del self._preempted[job]

    def _as_they_came(self) -> list[Job]:
        """All of them: the one preempted last, those preempted before, then by arrival."""
        return [*reversed(self._preempted), *self._arrived]


class LongestPrefixQueue(PrefixQueue):
    """SGLang's longest-prefix match: the more tokens of a request are cached, the sooner it is admitted.

    Of requests that begin alike, and of which hardly anything is cached, the first goes ahead and the others go to the
    end: by then they will find what it has computed. Among equals the order is that of arrival, and so it is while more
    than ``limit`` requests wait (0: no limit).
    """

    def __init__(self, policy: Policy, limit: int):
        super().__init__()
        self._policy = policy
        self._limit = limit

    def arrange(self) -> None:
        """Look up what is cached of each request, and sort them."""
        jobs = self._as_they_came()
        if not self._limit or len(jobs) <= self._limit:
            places = self._places(jobs)
            jobs.sort(key=places.__getitem__)
        self._ordered = dict.fromkeys(jobs)

    def _places(self, jobs: Sequence[Job]) -> dict[Job, int]:
        """Sort keys: minus the cached tokens, or 1 for those that wait for one that begins alike."""
        places: dict[Job, int] = {}
        beginnings: set[tuple[TextSegment, ...]] = set()
        for job in jobs:
            # What was swapped out comes back without being computed.
            cached = job.tokens if job.exported is not None else self._policy.cached_tokens(job.content, job.tokens)
            places[job] = -cached
            if cached <= FEW_CACHED and job.tokens >= SAME_BEGINNING:
                beginning = tuple(job.content.head(SAME_BEGINNING))
                if beginning in beginnings:
                    places[job] = 1
                beginnings.add(beginning)
        return places


class DepthFirstQueue(PrefixQueue):
    """Down one branch after the other of the radix tree of all that wait.

    A branch that has been begun is finished first; of others, the one with the most requests comes first, as with
    SGLang's ``dfs-weight``, which only looks at branches that are cached. For requests that all wait from the beginning
    no order finds more in a cache that holds the longest of them (theorem 3.1), if they are served one by one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest = NOTHING
        """Text of the request that left last."""
        self._in_order = True
        """Whether nothing has come since they were put in order."""

    def add(self, job: Job) -> None:
        """Queue a new request."""
        super().add(job)
        self._in_order = False

    def put_back(self, job: Job) -> None:
        """Queue a request that was preempted."""
        super().put_back(job)
        self._in_order = False

    def remove(self, job: Job) -> None:
        """Take a request out of the queue; the rest of its branch comes next."""
        if job is not self.first():
            self._in_order = False
        self._latest = job.content.head(job.tokens)
        super().remove(job)

    def arrange(self) -> None:
        """Visit the tree, unless the last visit only has to go on."""
        if not self._in_order:
            jobs = self._as_they_came()
            texts = [job.content.head(job.tokens) for job in jobs]
            self._ordered = dict.fromkeys(jobs[at] for at in depth_first(texts, self._latest))
            self._in_order = True


def depth_first(texts: Sequence[Content], latest: Content) -> list[int]:
    """Indices of texts in depth-first order of their radix tree.

    At each node the branch of ``latest`` comes first, then the one with the most texts, then the one whose first text
    comes first.
    """
    # Sorted by their segments, texts that share a beginning stand side by side.
    by_text = sorted(range(len(texts)), key=lambda at: tuple(texts[at]))
    shared = [texts[one].common_prefix(texts[other]) for one, other in pairwise(by_text)]
    on_path = [texts[at].common_prefix(latest) for at in by_text]
    visited: list[int] = []
    pending = [(0, len(texts))] if texts else []
    while pending:
        first, stop = pending.pop()
        if stop - first == 1:
            visited.append(by_text[first])
            continue
        depth = min(shared[first : stop - 1])
        cuts = [first, *(at + 1 for at in range(first, stop - 1) if shared[at] == depth), stop]

        def rank(branch: tuple[int, int], depth: int = depth) -> tuple[bool, int, int]:
            begin, end = branch
            return on_path[begin] <= depth, begin - end, min(by_text[begin:end])

        pending += sorted(pairwise(cuts), key=rank, reverse=True)
    return visited
