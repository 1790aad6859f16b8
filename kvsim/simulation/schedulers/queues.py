"""In which order requests wait."""

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
        """A new one."""
        ...

    def put_back(self, job: Job) -> None:
        """One that was preempted."""
        ...

    def first(self) -> Job:
        """Whose turn it is."""
        ...

    def remove(self, job: Job) -> None:
        """It waits no longer."""
        ...


class FcfsQueue(deque[Job]):
    """In order of arrival; who was preempted goes first."""

    def add(self, job: Job) -> None:
        """To the back."""
        self.append(job)

    def put_back(self, job: Job) -> None:
        """To the front."""
        self.appendleft(job)

    def first(self) -> Job:
        """The front."""
        return self[0]

    def remove(self, job: Job) -> None:
        """Nearly always the first."""
        if self[0] is job:
            self.popleft()
        else:
            super().remove(job)


class PriorityQueue:
    """By priority, and by arrival among equals."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Job]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Job]:
        return (entry[-1] for entry in sorted(self._heap))

    def add(self, job: Job) -> None:
        """To its place."""
        heapq.heappush(self._heap, (*urgency(job), job.request.id, job))

    def put_back(self, job: Job) -> None:
        """To its place."""
        self.add(job)

    def first(self) -> Job:
        """The most urgent."""
        return self._heap[0][-1]

    def remove(self, job: Job) -> None:
        """Nearly always the first."""
        if self._heap[0][-1] is job:
            heapq.heappop(self._heap)
        else:
            self._heap = [entry for entry in self._heap if entry[-1] is not job]
            heapq.heapify(self._heap)


def urgency(job: Job) -> tuple[int, float]:
    """The smaller, the more urgent."""
    return job.request.priority, job.arrival_s
