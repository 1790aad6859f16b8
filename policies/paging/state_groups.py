"""Cache groups that have a state for each sequence instead of a cell for each token: vLLM 0.33.0's ``MambaManager``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policies.cells.arena import FOREVER
from policies.content import Key
from policies.paging.block_table import blocks_for
from policies.paging.blocks import NULL, BlockPool
from policies.paging.cache_groups import Boundaries, GroupBlocks, GroupSpec, GroupTable


def checkpoint_before(tokens: int, grid: int) -> int:
    """The last multiple of ``grid`` that leaves a token to compute."""
    return (tokens - 1) // grid * grid


def keeps_checkpoint(spec: GroupSpec, hashed: int, start: int, stop: int, checkpoint: int) -> bool:
    """Whether a pass over these tokens can keep the state that it has at ``checkpoint``, besides its last one."""
    grid, size = spec.checkpoint_grid, spec.block_size
    return (
        grid > 0
        and start % hashed == 0
        and blocks_for(stop, size) - 2 > (start - 1) // size
        and start + hashed <= checkpoint < stop
        and (checkpoint - start) % grid == 0
    )


class OneState(GroupBlocks):
    """A state for each sequence, which is never found again, and one for each drafted token: mode ``none``."""

    def need(
        self, table: GroupTable, found: Sequence[int], start: int, stop: int, prefill_end: int, whole: bool
    ) -> int:
        """Blocks for a sequence that has none."""
        return 0 if table.blocks else 1 + self.draft_tokens

    def calm_until(self, table: GroupTable, position: int) -> int:
        """It keeps its block."""
        return FOREVER

    def extend(self, table: GroupTable, stop: int) -> None:
        """Take the blocks."""
        if not table.blocks:
            table.blocks += self._pool.take(1 + self.draft_tokens)

    def cache(self, table: GroupTable, keys: Sequence[Key], tokens: int, boundaries: Boundaries) -> None:
        """Nothing is cached."""


class AlignedStates(GroupBlocks):
    """States that can be found again where a block of tokens ends, which is where passes end: mode ``align``.

    A sequence holds the state that a step begins with and the one that it ends with, and behind that one for each token
    that is drafted. Between them in its table, and before them, there is ``NULL``.
    """

    def __init__(self, pool: BlockPool, number: int, spec: GroupSpec, hashed: int, aligned: int, retention: int):
        super().__init__(pool, number, spec, hashed, aligned, retention)
        self._new_keys: set[Key] = set()
        """Keys of the states that the step at hand will compute, and that no other can begin with in it."""

    def new_step(self) -> None:
        """What was new has been computed."""
        self._new_keys.clear()

    def need(
        self, table: GroupTable, found: Sequence[int], start: int, stop: int, prefill_end: int, whole: bool
    ) -> int:
        """One block for the state at the end, and one for a checkpoint."""
        if found and self._pool.keys[found[-1]] in self._new_keys:
            return self._pool.n + 1  # More than there are: it must wait for the next step.
        more = blocks_for(stop, self.size) + self.draft_tokens - len(found) - len(table.blocks)
        checkpoint = self._checkpoint(table, start, stop, prefill_end)
        if not whole:
            table.checkpoint = checkpoint
        most = 1 + (checkpoint is not None) + (0 if table.has_taken else self.draft_tokens)
        return min(more, most) + self.free_among(found)

    def _checkpoint(self, table: GroupTable, start: int, stop: int, prefill_end: int) -> tuple[int, int] | None:
        """Where in these tokens one more state is kept, and the index of its block."""
        at, tokens = blocks_for(stop, self.size) - 2, checkpoint_before(stop, self._aligned)
        if stop < prefill_end or not keeps_checkpoint(self.spec, self._hashed, start, stop, tokens):
            return None
        held = len(table.blocks) - (self.draft_tokens if table.has_taken else 0)
        if at < 0 or (at < held and table.blocks[at] != NULL):
            return None
        return tokens, at

    def behind(self, position: int) -> int:
        """All blocks before that of the last token."""
        return (position - 1) // self.size

    def calm_until(self, table: GroupTable, position: int) -> int:
        """Until the block of the last token ends; never with a checkpoint to be cached."""
        until = min(super().calm_until(table, position), (self.behind(position) + 1) * self.size)
        return until if table.checkpoint is None else -1

    def extend(self, table: GroupTable, stop: int) -> None:
        """Take the blocks, with ``NULL`` for all that the step passes over."""
        blocks, kept, drafts = table.blocks, int(table.checkpoint is not None), self.draft_tokens
        n, before, has_taken = blocks_for(stop, self.size) + drafts, len(blocks), table.has_taken
        table.has_taken = True
        if n <= before and not kept:
            return
        if before:
            table.last_state = before - 1 - (drafts if has_taken else 0)
        passed = n - 1 - drafts - kept
        """Blocks that are passed over."""
        blocks += [NULL] * (passed - before)
        for at in range(before - drafts, min(before, passed)) if has_taken else ():
            blocks.append(blocks[at])  # Those for drafts go along.
            blocks[at] = NULL
        blocks += self._pool.take(max(n - len(blocks), 0))

    def skip(self, table: GroupTable, position: int) -> None:
        """Give up all states but the last that has been computed."""
        if position <= 1:
            return
        blocks, gone = table.blocks, []
        stop = min(self.behind(position), len(blocks))
        for at in range(stop - 1, table.retired - 1, -1):
            if blocks[at] != NULL:
                gone.append(blocks[at])
                blocks[at] = NULL
        self.give_back(gone)
        table.retired = max(table.retired, stop)
        last = table.last_state
        if last is not None and last < self.behind(position) and blocks[last] != NULL:
            self.give_back([blocks[last]])
            blocks[last] = NULL

    def cache(self, table: GroupTable, keys: Sequence[Key], tokens: int, boundaries: Boundaries) -> None:
        """Cache the states at the ends of blocks, and the checkpoint, as far as they are worth it."""
        before, pool = table.n_keyed, self._pool
        super().cache(table, keys, tokens, boundaries)
        if table.checkpoint is not None:
            self._cache_checkpoint(table, keys, *table.checkpoint, boundaries)
        for block in table.blocks[before : table.n_keyed]:
            key = pool.keys[block] if block != NULL else None
            if key is not None:
                self._new_keys.add(key)

    def _cache_checkpoint(
        self, table: GroupTable, keys: Sequence[Key], tokens: int, at: int, boundaries: Boundaries
    ) -> None:
        """Cache the state that a pass keeps besides its last one, or see to it that it is not found."""
        block, pool = table.blocks[at], self._pool
        worth = tokens in (checkpoint_before(boundaries.prompt, self._aligned), boundaries.junction)
        if tokens % self.size == 0:
            ends = tokens // self.size - 1
            worth = worth or ends in self.worth_caching(ends, ends + 1, Boundaries(1))
        if not worth or tokens > len(keys) * self._hashed:  # Among drafts it has no key.
            pool.forget(block)
            return
        key = self.key_at(keys, tokens)
        if pool.keys[block] != key:
            pool.forget(block)
            pool.store(block, key)
            self._new_keys.add(key)

    def worth_caching(self, first: int, stop: int, boundaries: Boundaries) -> Iterator[int]:
        """The states at boundaries, and those at regular intervals."""
        if self._retention < 0:
            return iter(range(first, stop))
        every = self._retention // self.size
        if every == 1:
            return iter(range(first, stop))
        worth = {at for at in range(first, stop) if every and (at + 1) % every == 0}
        ends = [tokens // self._aligned * self._aligned // self.size - 1 for tokens in boundaries.all()]
        worth.update(at for at in ends if first <= at < stop)
        return iter(sorted(worth))

    def look_up(self, keys: Sequence[Key], tokens: int) -> list[int]:
        """The last state that is cached."""
        for at in range(tokens // self.size - 1, -1, -1):
            if (at + 1) * self.size % self._aligned == 0:
                block = self.find(keys, at)
                if block is not None:
                    return [NULL] * at + [block]
        return []


def aligned_tokens(
    spec: GroupSpec, hashed: int, aligned: int, start: int, n: int, prompt: int, tokens: int, most: int, junction: int
) -> int:
    """How many of ``n`` tokens from ``start`` on one step may take, so that states are kept where they should be.

    ``prompt``, ``tokens``: tokens of the sequence's prompt, and those that are known; ``most``: those that a step ever
    takes of one sequence. vLLM 0.33.0's ``Scheduler._mamba_block_aligned_split``.
    """
    prefill_end, size, end = max(prompt, tokens - 1), spec.block_size, start + n
    if start >= prefill_end:
        return n
    inside = end >= prefill_end and keeps_checkpoint(spec, hashed, start, end, checkpoint_before(prefill_end, aligned))
    if end < prefill_end and (end // size * size > start or size <= most):
        end = end // size * size
    stops = []
    if not inside:
        stops.append(checkpoint_before(tokens, size))
        if start % size:
            stops.append((start // size + 1) * size)
    if start < junction < end:
        stops.append(start + (junction - start) // size * size)
    return max(min([stop for stop in stops if start < stop < end], default=end) - start, 0)
