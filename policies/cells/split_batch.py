"""Cut a step into micro-batches as llama.cpp does for streams: equally many tokens of every sequence."""

from __future__ import annotations

from collections.abc import Sequence

from policies.vocabulary import Chunk


def split_by_stream(step: Sequence[Chunk], n_ubatch: int, *, sequential: bool) -> list[tuple[Chunk, ...]]:
    """Cut a step into micro-batches in which every sequence has equally many tokens.

    ``llama_batch_allocr::split_equal``. ``sequential``: a micro-batch has consecutive sequence ids only.
    """
    if len({chunk.seq for chunk in step}) == len(step) and all(chunk.n and not chunk.also for chunk in step):
        return _split_single(step, n_ubatch, sequential)
    left = [(chunk, 0) for chunk in step]
    batches: list[tuple[Chunk, ...]] = []
    while left:
        chosen: list[tuple[int, ...]] = []
        taken: set[int] = set()
        have: dict[tuple[int, ...], list[int]] = {}
        for i, (chunk, _) in enumerate(left):
            seqs = chunk.seqs
            have.setdefault(seqs, []).append(i)
            follows = not sequential or not chosen or chunk.seq == chosen[-1][0] + 1
            if len(chosen) <= n_ubatch and follows and taken.isdisjoint(seqs):
                chosen.append(seqs)
                taken.update(seqs)
        fewest = min(sum(left[i][0].n - left[i][1] for i in have[seqs]) for seqs in chosen)
        give = min(fewest, max(1, n_ubatch // len(chosen)))
        batch: list[Chunk] = []
        for seqs in chosen:
            need = give
            for i in have[seqs]:
                chunk, done = left[i]
                if need > 0 and done < chunk.n:
                    n = min(need, chunk.n - done)
                    _append(batch, Chunk(chunk.seq, chunk.start + done, n, chunk.also))
                    left[i] = (chunk, done + n)
                    need -= n
        left = [(chunk, done) for chunk, done in left if done < chunk.n]
        batches.append(tuple(batch))
    return batches


def split_keeping_tails(
    step: Sequence[Chunk], n_ubatch: int, tail: int, *, sequential: bool
) -> list[tuple[Chunk, ...]]:
    """``split_by_stream`` that never cuts within the last ``tail`` tokens of a sequence, fewer than ``n_ubatch``.

    So these are in one micro-batch, and the states after each of them can be kept (``n_keep_tail``). Each sequence has
    one chunk.
    """
    left = list(step)
    batches: list[tuple[Chunk, ...]] = []
    while left:
        chosen: list[Chunk] = []
        taken: set[int] = set()
        for chunk in left:
            follows = not sequential or not chosen or chunk.seq == chosen[-1].seq + 1
            if len(chosen) <= n_ubatch and follows and taken.isdisjoint(chunk.seqs):
                chosen.append(chunk)
                taken.update(chunk.seqs)
        give = min(min([chunk.n for chunk in chosen]), max(1, n_ubatch // len(chosen)))
        cut_short = [i for i, chunk in enumerate(chosen) if 0 < chunk.n - give < tail]
        if cut_short[:1] == [0]:
            n = chosen[0].n
            give, chosen = n if n <= n_ubatch else n - tail, chosen[:1]
        elif cut_short:
            chosen = chosen[: cut_short[0]]
        batches.append(tuple([chunk._replace(n=give) for chunk in chosen]))
        left = [
            chunk._replace(start=chunk.start + give, n=chunk.n - give) if chunk in chosen else chunk
            for chunk in left
            if chunk not in chosen or chunk.n > give
        ]
    return batches


def consecutive(seqs: Sequence[int], most: int) -> list[list[int]]:
    """Different sequences in lists of consecutive ones, at most ``most`` in each, that keep their order.

    Each list begins with the first that is left.
    """
    places = {seq: i for i, seq in enumerate(seqs)}
    found = list[list[int]]()
    for first in seqs:
        if first not in places:
            continue
        chosen, place, seq = [first], places.pop(first), first + 1
        while len(chosen) < most and places.get(seq, -1) > place:
            chosen.append(seq)
            place = places.pop(seq)
            seq += 1
        found.append(chosen)
    return found


def _split_single(step: Sequence[Chunk], n_ubatch: int, sequential: bool) -> list[tuple[Chunk, ...]]:
    """``split_by_stream`` for steps in which each sequence has one chunk, and no chunk has two sequences."""
    left = {chunk.seq: chunk for chunk in step}
    places = {chunk.seq: i for i, chunk in enumerate(step)}
    batches: list[tuple[Chunk, ...]] = []
    for first in step:
        # A micro-batch begins with the first chunk of which something is left.
        while first.seq in left:
            chosen, seq = [left[first.seq]], first.seq + 1
            if sequential:
                while len(chosen) <= n_ubatch and seq in left and places[seq] > places[seq - 1]:
                    chosen.append(left[seq])
                    seq += 1
            else:
                chosen = list(left.values())[: n_ubatch + 1]
            give = min(min([chunk.n for chunk in chosen]), max(1, n_ubatch // len(chosen)))
            batches.append(tuple([c if c.n == give else Chunk(c.seq, c.start, give) for c in chosen]))
            for seq, start, n, _ in chosen:
                if n == give:
                    del left[seq]
                else:
                    left[seq] = Chunk(seq, start + give, n - give)
    return batches


def _append(batch: list[Chunk], chunk: Chunk) -> None:
    """Add a chunk; if it continues the last one, make that longer instead."""
    if batch and batch[-1].seqs == chunk.seqs and batch[-1].start + batch[-1].n == chunk.start:
        chunk = Chunk(chunk.seq, batch[-1].start, batch[-1].n + chunk.n, chunk.also)
        batch.pop()
    batch.append(chunk)
