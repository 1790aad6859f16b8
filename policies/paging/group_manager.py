"""Block tables for groups of layers over one pool: vLLM 0.33.0's ``KVCacheManager`` with its hybrid coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

from policies.content import Content, Key
from policies.paging.blocks import NULL, BlockPool
from policies.paging.cache_groups import Boundaries, ChunkedBlocks, GroupBlocks, GroupSpec, GroupTable, WindowBlocks
from policies.paging.prefix_agreement import Agreed, PrefixAgreement
from policies.paging.state_groups import AlignedStates, OneState, aligned_tokens
from policies.vocabulary import Chunk, OutOfCells, SequencePlan

_UNKNOWN = SequencePlan(0, 0, 0)
"""The plan of a sequence that was not announced."""


@dataclass(slots=True)
class GroupedSequence:
    """What is known of a sequence, and what it holds."""

    tables: tuple[GroupTable, ...]
    boundaries: Boundaries
    plan: SequencePlan = _UNKNOWN
    length: int = 0
    """Tokens that have been placed, or were found."""
    reserved: int = 0
    """Tokens for which there is room although their chunk is still to be placed; 0 if there is none."""
    calm_until: int = -1
    """The last position up to which single tokens change no table, where the last chunk was one; -1: none."""
    keyed: int = -1
    """Tokens whose blocks have got their keys since blocks were last taken; -1: none."""

    @property
    def is_empty(self) -> bool:
        """Whether it holds no block."""
        return not any(table.blocks for table in self.tables)


class GroupManager:
    """Looks prefixes up that all groups have, and takes blocks of all groups for chunks that fit."""

    def __init__(
        self,
        pool: BlockPool,
        specs: Sequence[GroupSpec],
        *,
        prefix_cache: bool,
        retention: int,
        watermark: int,
        max_tokens: int,
        draft_tokens: int = 0,
        key_lookahead: int = 0,
    ):
        """``watermark``: blocks that a waiting sequence must leave free. Others as in ``HybridOptions``."""
        self.pool = pool
        sizes = [spec.block_size for spec in specs if prefix_cache or spec.holds_cells]
        self.aligned, self.hashed = lcm(*sizes), gcd(*sizes)
        """What is found of a text is a multiple of the first; it has a key every so many tokens."""
        kinds = {"window": WindowBlocks, "chunked": ChunkedBlocks, "state": AlignedStates if prefix_cache else OneState}
        self.parts: tuple[GroupBlocks, ...] = tuple(
            kinds.get(spec.kind, GroupBlocks)(pool, number, spec, self.hashed, self.aligned, retention)
            for number, spec in enumerate(specs)
        )
        self._with_cells = [at for at, spec in enumerate(specs) if spec.holds_cells]
        self.sequences: dict[int, GroupedSequence] = {}
        """Each sequence that was opened or holds blocks."""
        self.forgets_uncomputed = True
        """Whether blocks that are given up before they were written are no longer cached; in vLLM they still are."""
        self.state = next((spec for spec in specs if not spec.holds_cells), None) if prefix_cache else None
        """The first group of states that can be found again."""
        for part in self.parts:
            part.draft_tokens = draft_tokens
        self.key_lookahead = key_lookahead
        self._agreement = PrefixAgreement(self.parts)
        self.prefix_cache, self._retention = prefix_cache, retention
        self._watermark, self._max_tokens = watermark, max_tokens
        self._found: dict[int, Agreed] = {}
        """What ``match`` found for a sequence that has not reserved yet."""
        self._nothing = Agreed(0, tuple([] for _ in self.parts))

    def open(self, seq: int, plan: SequencePlan) -> GroupedSequence:
        """Note what the sequence will say."""
        held = self.sequences.get(seq)
        if held is None:
            held = self.sequences[seq] = GroupedSequence(tuple(GroupTable() for _ in self.parts), Boundaries(0))
        held.plan, held.boundaries.prompt = plan, plan.prompt_tokens
        return held

    def begin_step(self) -> None:
        """Be told that another step is composed: what the last one has computed can be gone on from."""
        for part in self.parts:
            part.new_step()

    # Looking up

    def match(self, seq: int, content: Content, tokens: int) -> int:
        """Tokens of the longest prefix that all groups have; always fewer than ``tokens``."""
        self._found[seq] = found = self.look_up(content, tokens)
        return found.tokens

    def look_up(self, content: Content, tokens: int) -> Agreed:
        """What all groups have of a text's first tokens."""
        if not self.prefix_cache:
            return self._nothing
        return self._agreement.find(self._keys(content, tokens), tokens - 1)

    def _keys(self, content: Content, tokens: int) -> list[Key]:
        """The keys of a text's first tokens."""
        return content.keys(self.hashed, tokens // self.hashed, self.key_lookahead)

    def found(self, seq: int) -> Agreed:
        """What ``match`` found last for a sequence that has not reserved yet."""
        return self._found.get(seq, self._nothing)

    def cut_chunk(self, seq: int, start: int, n: int, prompt: int, tokens: int, most: int) -> int:
        """Cut a chunk where states are kept; arguments as in ``Policy.cut_chunk``."""
        if self.state is None:
            return n
        held = self.sequences.get(seq)
        junction = self.found(seq).junction if held is None or held.is_empty else held.boundaries.junction
        return aligned_tokens(self.state, self.hashed, self.aligned, start, n, prompt, tokens, most, junction)

    # Taking blocks

    def reserve(
        self,
        chunk: Chunk,
        whole: int,
        waits: bool,
        lookahead: int,
        in_flight: int,
        known: int | None = None,
        rejected: int = 0,
    ) -> bool:
        """Take the blocks that a chunk needs, and cache those that it fills: ``allocate_slots``.

        Arguments as in ``Admission.reserve``; ``rejected``: drafts before the chunk of which it is not known yet that
        they are not accepted. False where there are too few.
        """
        seq, start, n, _ = chunk
        held = self.sequences.get(seq) or self.open(seq, _UNKNOWN)
        if n == 1 and start <= held.calm_until and not (waits or whole or lookahead):
            held.reserved = start + n
            return True
        found = self._found_for(held, chunk)
        if found is None:
            return False
        start += rejected
        kept = self._watermark if waits else 0
        prefill_end = self._prefill_end(held, known)
        if whole:
            need = self._need(held, found, start, min(whole, self._max_tokens), 0, prefill_end, whole=True)
            if need + kept > len(self.pool.free):
                return False
        self._skip(held, chunk.start - in_flight)
        stop = min(start + n, self._max_tokens)
        lookahead = min(lookahead, self._max_tokens - stop)
        if self._need(held, found, start, stop, lookahead, prefill_end, whole=False) + kept > len(self.pool.free):
            return False
        self._attach(held, seq, found)
        for part, table in zip(self.parts, held.tables, strict=True):
            part.extend(table, stop + lookahead * part.spec.holds_cells)
        tokens, held.keyed = start + n if known is None else min(start + n, known), -1
        self.cache(held, tokens, known)
        held.reserved = chunk.start + n
        held.calm_until = self._calm_until(held, start, in_flight, tokens) if n == 1 else -1
        return True

    def _calm_until(self, held: GroupedSequence, position: int, in_flight: int, tokens: int) -> int:
        """The last position up to which single tokens change no table; ``tokens``: those whose keys are cached."""
        until = (tokens // self.aligned + 1) * self.aligned - 2
        for part, table in zip(self.parts, held.tables, strict=True):
            if part.behind(position) != part.behind(max(position - in_flight, 0)):
                return -1  # What is not seen any more goes when steps in flight have ended.
            until = min(until, part.calm_until(table, position))
        return until

    def reserve_step(self, step: Sequence[Chunk]) -> None:
        """Take blocks for all chunks of a step that have not got theirs yet, or raise ``OutOfCells`` and take none."""
        step = [chunk for chunk in step if not self._is_reserved(chunk)]
        need = 0
        for chunk in step:
            held = self.sequences.get(chunk.seq) or self.open(chunk.seq, _UNKNOWN)
            found = self._found_for(held, chunk)
            if found is None:
                raise OutOfCells(f"what sequence {chunk.seq} had found has been handed out since")
            self._skip(held, chunk.start)
            stop = min(chunk.start + chunk.n, self._max_tokens)
            need += self._need(held, found, chunk.start, stop, 0, self._prefill_end(held, None), whole=False)
        if need > len(self.pool.free):
            blocks = f"{need} block{'s' * (need > 1)}"
            raise OutOfCells(f"the step needs {blocks} of all groups, {len(self.pool.free)} are free")
        for chunk in step:  # What was found must not be handed out to others.
            self._attach(self.sequences[chunk.seq], chunk.seq, self.found(chunk.seq))
        for chunk in step:
            if not self.reserve(chunk, 0, False, 0, 0):
                raise AssertionError("blocks that were counted are not there")

    def _is_reserved(self, chunk: Chunk) -> bool:
        """Whether a chunk has got its blocks, and is still to be placed."""
        held = self.sequences.get(chunk.seq)
        return held is not None and held.reserved == chunk.start + chunk.n > held.length

    def _found_for(self, held: GroupedSequence, chunk: Chunk) -> Agreed | None:
        """What was found of a sequence that begins with this chunk; None if that has been handed out since.

        Raises ``ValueError`` if the sequence has no token before the chunk.
        """
        if not held.is_empty or held.length:
            return self._nothing
        found = self.found(chunk.seq)
        if found.tokens and not self._still_cached(held.plan.content, found):
            del self._found[chunk.seq]
            return None
        if chunk.start != found.tokens:
            raise ValueError(f"sequence {chunk.seq} holds {found.tokens} tokens, and is to go on at {chunk.start}")
        return found

    def _still_cached(self, content: Content, found: Agreed) -> bool:
        """Whether what was found is still there: others may have taken blocks since."""
        keys, cached = self._keys(content, found.tokens), self.pool.keys
        return all(
            block == NULL or cached[block] == part.key_at(keys, (at + 1) * part.size)
            for part, blocks in zip(self.parts, found.blocks, strict=True)
            for at, block in enumerate(blocks)
        )

    def _prefill_end(self, held: GroupedSequence, known: int | None) -> int:
        """Up to where a sequence's text is computed before it goes on, if only the last state of it is kept."""
        if self._retention != 0:
            return 0
        return max(held.plan.prompt_tokens, (held.plan.start_tokens if known is None else known) - 1)

    def _need(
        self,
        held: GroupedSequence,
        found: Agreed,
        start: int,
        stop: int,
        lookahead: int,
        prefill_end: int,
        *,
        whole: bool,
    ) -> int:
        """Free blocks that tokens up to ``stop`` take in all groups, and in those with cells ``lookahead`` more; other
        arguments as in ``GroupBlocks.need``."""
        return sum(
            part.need(table, blocks, start, stop + lookahead * part.spec.holds_cells, prefill_end, whole)
            for part, table, blocks in zip(self.parts, held.tables, found.blocks, strict=True)
        )

    def _attach(self, held: GroupedSequence, seq: int, found: Agreed) -> None:
        """Let a sequence begin with what was found."""
        if seq not in self._found or not held.is_empty or held.length:
            return
        held.boundaries.junction = found.junction
        if found.tokens:
            for part, table, blocks in zip(self.parts, held.tables, found.blocks, strict=True):
                part.attach(table, blocks, found.tokens)
        held.length = found.tokens
        del self._found[seq]

    def _skip(self, held: GroupedSequence, position: int) -> None:
        """Give up what no token from ``position`` on needs."""
        for part, table in zip(self.parts, held.tables, strict=True):
            part.skip(table, max(position, 0))

    # Caching, writing and giving up

    def cache(self, held: GroupedSequence, tokens: int, known: int | None = None) -> None:
        """Cache what the first tokens of a sequence fill, as far as a prefix can be found again.

        ``known``: those of which it is known what they say; None: one more than these at least.
        """
        if not self.prefix_cache:
            return
        content = held.plan.content
        aligned = min(tokens, content.n) // self.aligned * self.aligned
        aligned = min(aligned, (content.n if known is None else min(known, content.n)) - self.key_lookahead)
        if aligned == held.keyed:
            return
        held.keyed = aligned
        keys = self._keys(content, aligned)
        for part, table in zip(self.parts, held.tables, strict=True):
            part.cache(table, keys, aligned, held.boundaries)

    def write(self, chunk: Chunk) -> None:
        """Count tokens that are placed in blocks that their tables have."""
        held, end = self.sequences[chunk.seq], chunk.start + chunk.n
        held.length = end
        if held.reserved <= end:
            held.reserved = 0
        for at in self._with_cells:
            self.parts[at].write(held.tables[at], chunk.start, end)

    def take_back(self, seq: int, n: int) -> None:
        """Keep the first ``n`` tokens of a sequence, and all of its blocks."""
        held = self.sequences[seq]
        for at in self._with_cells:
            self.parts[at].take_back(held.tables[at], n, held.length)
        held.length, held.reserved, held.calm_until = n, 0, -1

    def release(self, seq: int) -> None:
        """Give up all blocks of a sequence, those of the first group first."""
        held = self.sequences.pop(seq)
        for part, table in zip(self.parts, held.tables, strict=True):
            part.release(table, held.length, forget=self.forgets_uncomputed)
