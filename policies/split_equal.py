"""Micro-batches in which every sequence gives equally many tokens, as llama.cpp cuts steps for streams."""

from __future__ import annotations

from collections.abc import Sequence

from policies.vocabulary import Chunk


def split_equal(step: Sequence[Chunk], n_ubatch: int, *, sequential: bool) -> list[tuple[Chunk, ...]]:
    """Micro-batches in which every sequence gives equally many tokens (``llama_batch_allocr::split_equal``).

    ``sequential``: only runs of consecutive sequence ids go together.
    """
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


def _append(batch: list[Chunk], chunk: Chunk) -> None:
    """Add a chunk, as part of the last one where it continues that."""
    if batch and batch[-1].seqs == chunk.seqs and batch[-1].start + batch[-1].n == chunk.start:
        chunk = Chunk(chunk.seq, batch[-1].start, batch[-1].n + chunk.n, chunk.also)
        batch.pop()
    batch.append(chunk)
