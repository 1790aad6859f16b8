"""Small worlds in which each scheduler is told step by step.

A log has a list for each pass: (request, first token, tokens) for each chunk. Every pass takes one second.
"""

from dataclasses import dataclass
from functools import partial

import pytest

from kvsim.errors import Livelock, UserError
from policies.layouts.paged import PagedOptions, PagedPolicy
from policies.paging.eviction import free_blocks
from tests.worlds import Diary, Given, Listed, serve
from workloads import Request, Segment


@dataclass
class Story:
    """What happened in a world."""

    steps: list
    jobs: dict
    recorder: object
    passes: list


def tell(world, requests, policy=None):
    """Serve requests, or rows of (arrival, prompt tokens, output tokens)."""
    workload = Given(requests) if isinstance(requests[0], Request) else Listed(requests)
    diary = Diary()
    recorder, jobs = serve(world, workload, diary, policy)
    return Story(diary.steps, jobs, recorder, diary.passes)


def each(story, field):
    """A field of all jobs, in order of their numbers."""
    return [getattr(job, field) for _, job in sorted(story.jobs.items())]


def says(number, at, *pieces, output=1):
    """A request by what its prompt says: (source, first token, tokens)."""
    content = tuple(Segment(*piece) for piece in pieces)
    return Request(number, at, sum(piece.n for piece in content), output, content=content)


class Closed(PagedPolicy):
    """A plug-in that admits no request."""

    def admits(self, plan):
        return False


def closed(config):
    return Closed("closed", config, block_size=config.read(PagedOptions).block_size, free=partial(free_blocks, "lru"))


def livelock(world, rows, policy=None):
    """The error that ends a run."""
    with pytest.raises(Livelock) as stuck:
        tell(world, rows, policy)
    assert isinstance(stuck.value, UserError)
    assert len(str(stuck.value).splitlines()) == 1
    return stuck.value
