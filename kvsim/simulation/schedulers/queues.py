"""The order in which requests wait: first come first served, or by priority.

Orders that look at what prompts say are in ``prefix_orders.py``.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from kvsim.simulation.job import Job


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
