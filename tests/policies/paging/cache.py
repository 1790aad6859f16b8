"""Small paged caches, and helpers that run steps in them."""

from functools import partial

import numpy as np

from policies import CacheConfig, Chunk, Content, SequencePlan
from policies.layouts.paged import PagedPolicy
from policies.paging.eviction import free_blocks

UNBOUNDED = 400
"""Tokens; more than any sequence here has."""
SAME = Content([(0, 0, UNBOUNDED)])
OTHER = Content([(1, 0, UNBOUNDED)])
OUT, BACK = True, False
"""The direction of a transfer."""


def cache(blocks, *, prefix_cache=True, window=None, tail_only=False, eviction="lru", order="0.33.0", **config):
    """A cache of that many blocks of 4 cells besides block 0: block b is cells 4b to 4b + 3."""
    config = CacheConfig(**{"n_ubatch": 64, "max_tokens": UNBOUNDED} | config, cells=4 * (blocks + 1), block_size=4)
    return PagedPolicy(
        "mine",
        config,
        block_size=4,
        free=partial(free_blocks, eviction, order=order),
        prefix_cache=prefix_cache,
        window=window,
        tail_only=tail_only,
    )


def says(source, n, *more):
    """A content of ``n`` tokens of a text, then other segments."""
    return Content([(source, 0, n), *more])


def tell(policy, seq, content):
    """Open a sequence whose prompt is its whole text."""
    policy.open(seq, SequencePlan(content.n, UNBOUNDED, content.n, content))


def run(policy, *chunks):
    """Run a step; its micro-batches."""
    return policy.allocate([Chunk(*chunk) for chunk in chunks], views=True)


def begin(policy, seq, content, n=None):
    """Start a sequence as a scheduler does and run its prompt of ``n`` tokens; the tokens found in the cache."""
    n = content.n if n is None else n
    hit = policy.match(seq, content, n)
    tell(policy, seq, content)
    assert policy.reserve(Chunk(seq, hit, n - hit))
    run(policy, (seq, hit, n - hit))
    return hit


def table(policy, seq):
    return policy.tables[seq].blocks


def order(policy):
    return policy.pool.free.order()


def refs(policy):
    return list(policy.pool.refs)


def runs(moves):
    return list(zip(moves.src.tolist(), moves.dst.tolist(), moves.length.tolist(), strict=True))


def moves_of(batches):
    assert all(batch.places[0].moves.n_runs == 0 for batch in batches[1:])
    return runs(batches[0].places[0].moves)


def transfers_of(batches):
    assert all(batch.places[0].transfers == () for batch in batches[1:])
    return batches[0].places[0].transfers


def counted(policy):
    """Cells with a token, as ``usage`` and as the cell map has them."""
    return policy.usage().stored, sum(1 for owners in policy.occupancy().owners if owners)


class Engine:
    """Cells and host cells, which hold 100 * sequence + position of the token that was written."""

    def __init__(self, policy):
        self.policy = policy
        self.cells, self.host = (np.full(n, -1) for n in (policy.groups[0].cells, policy.groups[0].host_cells))

    def run(self, *chunks):
        """Run a step; what the last sequence sees after it."""
        for batch in run(self.policy, *chunks):
            [place] = batch.places
            self.transfer(place.transfers)
            place.moves.apply(self.cells)
            ends = np.cumsum([chunk.n for chunk in batch.chunks])[:-1]
            for chunk, own in zip(batch.chunks, np.split(place.cells, ends), strict=True):
                self.cells[own] = 100 * chunk.seq + np.arange(chunk.start, chunk.start + chunk.n)
        return self.cells[place.views[-1].cells].tolist()

    def transfer(self, transfers):
        for to_host, cell, host, n in transfers:
            if to_host:
                self.host[host : host + n] = self.cells[cell : cell + n]
            else:
                self.cells[cell : cell + n] = self.host[host : host + n]
