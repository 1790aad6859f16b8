"""Which sequences may start: how much room is kept free for those that run, and may still grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.paging.admission import Admission
from policies.paging.block_manager import BlockManager
from policies.paging.block_table import BlockTable, blocks_for
from policies.policy import AdmissionRuleName
from policies.vocabulary import SequencePlan

if TYPE_CHECKING:
    from policies.placement.blocks import BlockRule

MOST_EXPECTED = 4096
"""A limit of more output tokens than these counts as this many (SGLang's ``CLIP_MAX_NEW_TOKENS``)."""
FIRST_RATIO = 0.7
"""Share of its limit that a sequence is expected to use, at first (``SGLANG_INIT_NEW_TOKEN_RATIO``)."""
LEAST_RATIO = 0.14
"""What that share falls to, as a share of the first one (``SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR``)."""
STEPS_TO_LEAST = 600
"""Steps without a preemption in which it falls so far (``SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS``)."""
STEPS_AFTER_PREEMPTION = 20
"""Steps for which those that go on after a preemption should have room (``SGLANG_RETRACT_DECODE_STEPS``)."""


class AdmissionRule:
    """Every sequence may start: whether what it has fits is up to ``Admission``. Other rules are subclasses."""

    admits_while_decoding = False
    """Whether it may say yes after decode steps where it said no before."""

    def __init__(self, blocks: BlockManager, admission: Admission):
        self._blocks = blocks
        self._admission = admission

    def admits(self, plan: SequencePlan) -> bool:
        """Whether the sequence may start beside those that have been opened."""
        return True

    def preempted(self) -> None:
        """A sequence has just been preempted, and is gone."""

    def emptied(self) -> None:
        """The last sequence has gone."""

    def _most_blocks(self, plan: SequencePlan) -> int:
        """The most blocks that the sequence can ever hold."""
        return min(blocks_for(plan.max_tokens, self._blocks.block_size), self._admission.most_blocks)

    def _blocks_left(self, table: BlockTable) -> int:
        """Blocks that an opened sequence may still need; one that was never announced needs no more."""
        return max(self._most_blocks(table.plan) - (len(table.blocks) - table.skipped), 0)


class NoEvictRule(AdmissionRule):
    """A sequence starts only if the blocks that it and all others may still need are free: none is ever preempted.

    As TensorRT-LLM's ``GuaranteedNoEvictScheduler``: blocks of a prefix that is in use count for the new sequence too.
    """

    def admits(self, plan: SequencePlan) -> bool:
        """Whether the free blocks suffice for all of it, beside what those that run may still need."""
        left = len(self._blocks.pool.free) - self._most_blocks(plan)
        for table in self._blocks.tables.values():
            if left < 0:
                return False
            left -= self._blocks_left(table)
        return left >= 0


class ExpectedRule(AdmissionRule):
    """A sequence starts only if its whole limit fits, beside a share of what those that run may still generate.

    The share falls with every step to a least one. A preemption sets it to what those that go on have generated of
    their limits by then, and some steps more; an empty cache sets it back to the first one. As SGLang's
    ``PrefillAdder`` and ``NewTokenRatioTracker`` (0.5), where only steps that decode count, and a sequence whose prompt
    is being computed in chunks sets no room aside for its answer.
    """

    admits_while_decoding = True

    def __init__(
        self,
        blocks: BlockManager,
        admission: Admission,
        placement: BlockRule,
        conservativeness: float,
    ):
        """``placement``: counts steps. ``conservativeness``: multiplies the first share."""
        super().__init__(blocks, admission)
        self._placement = placement
        self._first = min(FIRST_RATIO * conservativeness, 1.0)
        self._least = self._first * LEAST_RATIO
        self._set, self._set_at = self._first, 0
        """The share that was set last, and after how many steps."""

    @property
    def ratio(self) -> float:
        """The share of its limit that a sequence is expected to use now."""
        fallen = (self._first - self._least) / STEPS_TO_LEAST * (self._placement.steps - self._set_at)
        return max(self._set - fallen, self._least)

    def admits(self, plan: SequencePlan) -> bool:
        """Whether more tokens are free than it may need and those that run are expected to."""
        size, ratio = self._blocks.block_size, self.ratio
        rest = plan.start_tokens - self._blocks_in_use(plan) * size
        expected = float(rest + min(plan.max_tokens - plan.start_tokens, MOST_EXPECTED) + size)
        left = len(self._blocks.pool.free) * size - min(expected, self._admission.most_blocks * size)
        for table in self._blocks.tables.values():
            if left <= 0:
                return False
            left -= self._expected(table, ratio)
        return left > 0

    def preempted(self) -> None:
        """Expect that those that go on will generate as large a share of their limits as they have by now."""
        generated = limits = count = 0
        for table in self._blocks.tables.values():
            plan = table.plan
            generated += max(int(table.length) - plan.prompt_tokens, 0)
            limits += max(plan.max_tokens - plan.prompt_tokens, 0)
            count += 1
        share = (generated + STEPS_AFTER_PREEMPTION * count) / (limits + 1) if count else self._first
        self._set, self._set_at = min(share, 1.0), self._placement.steps

    def emptied(self) -> None:
        """Expect what was expected at first."""
        self._set, self._set_at = self._first, self._placement.steps

    def _blocks_in_use(self, plan: SequencePlan) -> int:
        """Blocks at the beginning of a text that other sequences hold, so that it takes no room to share them."""
        blocks = self._blocks
        if not blocks.prefix_cache or blocks.window is not None or plan.content.private:
            return 0
        self._placement.cache_all_full_blocks()
        found = blocks.pool.leading(blocks.keys(plan.content, (plan.start_tokens - 1) // blocks.block_size))
        return sum(1 for block in found if blocks.pool.refs[block] > 0)

    def _expected(self, table: BlockTable, ratio: float) -> float:
        """Tokens that an opened sequence is expected to need beyond its blocks; all of them before it decodes."""
        size, start = self._blocks.block_size, table.plan.start_tokens
        held = max(len(table.blocks) * size, int(table.length))
        rest, limit = max(start - held, 0), max(table.plan.max_tokens - max(start, held), 0)
        share = ratio if table.length >= start else 1.0
        return min(rest + min(limit, MOST_EXPECTED) * share, self._blocks_left(table) * size)


def admission_rule(
    name: AdmissionRuleName,
    conservativeness: float,
    blocks: BlockManager,
    admission: Admission,
    placement: BlockRule,
) -> AdmissionRule:
    """The rule of a name; the arguments are those of ``ExpectedRule``."""
    if name == "no-evict":
        return NoEvictRule(blocks, admission)
    if name == "expected":
        return ExpectedRule(blocks, admission, placement, conservativeness)
    return AdmissionRule(blocks, admission)
