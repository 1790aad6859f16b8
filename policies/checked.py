"""A policy of others, held to its word as it runs: on its first steps, and then by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from policies import checking
from policies.checking import BrokenPromise
from policies.content import Content
from policies.delegating import DelegatingPolicy
from policies.policy import Policy
from policies.vocabulary import Chunk, Exported, HostCopy, MicroBatch, OutOfCells, SequencePlan

if TYPE_CHECKING:
    from policies.placement.rule import PlacementRule

_FIRST = 64
"""Steps at the beginning of a run that are looked at, and sequences that are given up."""
_CELLS_AT_FIRST = 1 << 18
"""Cells that all of these read, so that a large cache is not read so often."""
_FEWEST_AT_FIRST = 8
_CELLS_PER_STEP = 4
"""Cells that later looks read for each step between them; and the fewest steps between two."""
_FEWEST_BETWEEN = 1024
_UNKNOWN = -1
"""Tokens of a sequence of which some in the middle were given up, or which is a copy."""


def is_of_others(policy: Policy) -> bool:
    """Whether the policy's class is none of ours."""
    return type(policy).__module__.split(".")[0] != "policies"


class CheckedPolicy(DelegatingPolicy):
    """Leaves every method to the policy within, and looks at what it does. Raises ``BrokenPromise``, which says where.

    Where the policy has a placement rule its cells are looked at whenever a sequence is given up.
    """

    def __init__(self, inner: Policy, n_ubatch: int, *, n_batch: int = 0, scheduler: str = "", always: bool = False):
        """``n_ubatch``: the most tokens of a micro-batch. ``scheduler``: the name of one that is to be held to its word
        too, or alone, if the policy is ours; ``n_batch``: the most tokens of a step. ``always``: look at all steps."""
        super().__init__(inner)
        self.step = 0
        """Steps that were placed, or refused, by ``allocate``."""
        self._n_ubatch, self._n_batch, self._scheduler, self._always = n_ubatch, n_batch, scheduler, always
        self._lengths: dict[int, int] = {}
        """Tokens that each open sequence holds; those of rows are lower bounds."""
        self._contents: dict[int, Content] = {}
        """What each sequence says, as far as it is known that this has not been changed."""
        self._rule: PlacementRule | None = None
        cells = sum([group.cells for group in inner.groups])
        self._looks = always or is_of_others(inner)
        self._first = min(_FIRST, max(_CELLS_AT_FIRST // max(cells, 1), _FEWEST_AT_FIRST))
        self._between = max(_FEWEST_BETWEEN, cells // _CELLS_PER_STEP)
        self._frees = 0
        self._check(checking.declares_possible_sizes, inner)

    # What is asked of the policy

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Begin to follow a sequence."""
        self.inner.open(seq, plan)
        self._lengths.setdefault(seq, 0)
        self._contents[seq] = plan.content

    def match(self, seq: int, content: Content, tokens: int) -> int:
        """At most what was asked for is found."""
        found = self.inner.match(seq, content, tokens)
        if not 0 <= found <= tokens:
            self._fail(f"match found {found} tokens of {tokens}")
        return found

    def reserve(
        self, chunk: Chunk, *, whole: int = 0, waits: bool = False, in_flight: int = 0, known: int | None = None
    ) -> bool:
        """What was found of a prompt belongs to its sequence from now on."""
        reserved = self.inner.reserve(chunk, whole=whole, waits=waits, in_flight=in_flight, known=known)
        if reserved and not self._lengths.get(chunk.seq):
            self._lengths[chunk.seq] = chunk.start
        return reserved

    def reserve_with_drafts(self, chunk: Chunk, lookahead: int, **options: Any) -> bool:
        """What was found of a prompt belongs to its sequence from now on."""
        reserved = self.inner.reserve_with_drafts(chunk, lookahead, **options)
        if reserved and not self._lengths.get(chunk.seq):
            self._lengths[chunk.seq] = chunk.start
        return reserved

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Place the step, and look at what was placed."""
        self.step += 1
        if self._scheduler:
            self._check_step(step)
        due = self._is_due(self.step)
        try:
            batches = self.inner.allocate(step, views=views)
        except OutOfCells as refused:
            if due:
                self._check(
                    checking.places_what_was_asked, self.inner, step, refused.done, self._n_ubatch, refused=True
                )
            self._count(chunk for batch in refused.done for chunk in batch.chunks)
            raise
        if due:
            self._check(checking.places_what_was_asked, self.inner, step, batches, self._n_ubatch)
        self._count(step)
        if due:
            self._check_cells()
        return batches

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """What was given up is gone."""
        self.inner.free(seq, start, stop)
        length = self._lengths.get(seq, 0)
        if stop is not None and (stop < length or length == _UNKNOWN):
            self._lengths[seq] = _UNKNOWN
            self._contents.pop(seq, None)
        elif start > 0:
            self._lengths[seq] = min(length, start)  # Still unknown, if it was.
        else:
            self._lengths.pop(seq, None)
            self._contents.pop(seq, None)
            self._frees += 1
            if self._is_due(self._frees):
                self._check_cells()

    def take_back(self, seq: int, start: int) -> None:
        """What was taken back is gone."""
        self.inner.take_back(seq, start)
        self._lengths[seq] = min(self._lengths.get(seq, 0), start)

    def keep(self, seq: int) -> None:
        """All others are gone; with streams, those of other streams are not."""
        self.inner.keep(seq)
        for other in self._lengths.keys() - {seq} if self.groups[0].streams == 1 else ():
            del self._lengths[other]

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Another sequence holds the same."""
        self.inner.copy(src, dst, start, stop)
        self._lengths[dst] = _UNKNOWN
        self._contents.pop(dst, None)

    def import_(self, seq: int, exported: Exported, *, upto: int = 0, waits: bool = False) -> tuple[HostCopy, ...]:
        """The sequence is what was exported."""
        self._lengths.pop(seq, None)
        copies = self.inner.import_(seq, exported, upto=upto, waits=waits)
        self._lengths[seq] = exported.tokens
        return copies

    def expect(self, chunk: Chunk, *, whole: int = 0, waits: bool = False, besides: int = 0) -> bool:
        """What was found of a prompt belongs to its sequence from now on."""
        given = self.inner.expect(chunk, whole=whole, waits=waits, besides=besides)
        if given:
            self._lengths[chunk.seq] = chunk.start
        return given

    def arrive(self, seq: int, tokens: int) -> None:
        """The sequence holds these tokens, of which the last may be computed once more."""
        self.inner.arrive(seq, tokens)
        self._lengths[seq] = _UNKNOWN

    def rename(self, seq: int, new: int) -> None:
        """Another number has what the sequence had."""
        self.inner.rename(seq, new)
        self._lengths[new] = self._lengths.pop(seq)
        self._contents[new] = self._contents.pop(seq)

    def placement_rule(self) -> PlacementRule | None:
        """The policy's own; None where each step is to be looked at."""
        self._rule = None if self._always else self.inner.placement_rule()
        return self._rule

    def check_end(self) -> None:
        """The run has ended: what the policy still holds is what was not given up, and it gives that up too."""
        if not self._looks:
            return
        self._check_cells()
        for seq in list(self._lengths):
            self.inner.free(seq)
        self._check(checking.holds_nothing, self.inner)

    # Looking

    def _is_due(self, n: int) -> bool:
        """Whether to look at the cells now, at the ``n``-th step or sequence that is given up."""
        return self._always or (self._looks and (n <= self._first or n % self._between == 0))

    def _count(self, chunks: Any) -> None:
        lengths = self._lengths
        for chunk in chunks:
            for seq in chunk.seqs:
                if lengths.get(seq) != _UNKNOWN:
                    lengths[seq] = chunk.start + chunk.n

    def _check_cells(self) -> None:
        rows = {} if self._rule is None else {row.seq: int(row.length) for row in self._rule.rows}
        lengths = {**self._lengths, **rows}
        ruled = self._rule is not None
        self._check(checking.keeps_its_word, self.inner, lengths, self._contents, at_least=ruled)

    def _check(self, check: Callable[..., None], *of: Any, **how: Any) -> None:
        try:
            check(*of, **how)
        except BrokenPromise as broken:
            self._fail(str(broken))

    def _fail(self, what: str) -> None:
        raise BrokenPromise(f"policy {self.name!r}, step {self.step}: {what}")

    def _check_step(self, step: Sequence[Chunk]) -> None:
        """The scheduler composes what a step can hold, of requests that it has begun."""
        where = f"scheduler {self._scheduler!r}, step {self.step}"
        if (tokens := sum([chunk.n for chunk in step])) > self._n_batch:
            raise BrokenPromise(f"{where}: {tokens} tokens are composed; {self._n_batch} are the most (server.n_batch)")
        if len({chunk.seq for chunk in step}) < len(step):
            raise BrokenPromise(f"{where}: a slot is in the step twice")
        for seq, start, n, _ in step:
            if n < 1:
                raise BrokenPromise(f"{where}: {n} tokens are composed for slot {seq}")
            held = self._lengths.get(seq)
            if held is None:
                raise BrokenPromise(f"{where}: slot {seq} is in the step, and no request runs in it")
            behind = held < start and self._rule is None and not self.can_skip_positions
            if held != _UNKNOWN and (held > start or behind):
                raise BrokenPromise(f"{where}: slot {seq} is to go on at position {start}, and holds {held} tokens")
