"""What every policy owes its engine, whatever is asked of it in whatever order.

A shadow of the cache, two arrays by cell, stands in for the engine: which token was written where, and by which
position its key is rotated. It is changed by what the policy reports and by nothing else; so a move, a rotation or a
copy to or from the host tier that was forgotten, or told in the wrong order, shows as a cell that does not hold what
the policy says it holds.

What sequences say is drawn from a few texts, so that they often begin alike. A token's number in the shadow stands for
the token and for all that came before it in its sequence, as its K and V do: a block found in the wrong place shows
too, even where its own tokens are the right ones.
"""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from policies import (
    EVICTIONS,
    CacheConfig,
    Chunk,
    Content,
    NoSlot,
    Policy,
    SequencePlan,
    Unsupported,
    available,
    presets,
)
from policies.compaction.compactors import pack
from policies.layouts.llamacpp import mid_2025, today
from policies.layouts.multi_stream import CacheSpec, Rejected
from policies.layouts.paged import PagedPolicy
from policies.layouts.unified import UnifiedPolicy
from policies.paging.blocks import NULL
from policies.paging.eviction import free_blocks

SETTINGS = settings(
    derandomize=True,
    deadline=None,
    stateful_step_count=30,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
KEEP_WHAT_WAS_PLACED = {"llama.cpp-2024"}
"""Where a step that finds no room keeps the micro-batches that had found theirs, as the original did."""
RESERVE_AHEAD = {"hf-reserved", "oracle", "ring"}
"""Whoever is let in ends well."""
TAKE_ANY_ROOM = {"contiguous", "llama.cpp-2024", "split-regions"}
"""One micro-batch finds room exactly where ``usage().placeable`` says so."""
PACK_EVERYTHING = {"full-compaction", "adaptive", "threshold-compaction", "idle-compaction"}


def mid_2025_with_defragmentation(config):
    cache = [CacheSpec(config.cells, 32)]
    return mid_2025("mid-2025", config, cache, threshold=config.threshold, max_nodes=1024)


def tight_sliding_window(config):
    """A window cache with hardly more cells than one window, so that they are used again and again."""
    streams = 1 if config.unified else config.sequences
    size = config.cells // streams
    window = min(size, config.window * (config.sequences if config.unified else 1) + config.n_ubatch)
    caches = [CacheSpec(size, 32, share=0.5), CacheSpec(window, 32, window=config.window, share=0.5)]
    return today("tight sliding-window", config, caches, n_streams=streams)


def window_with_tails_only(config):
    """A paged window of which only the end of each prompt is found again."""
    lru = partial(free_blocks, "lru")
    return PagedPolicy(
        "tails only", config, block_size=4, free=lru, prefix_cache=True, window=config.window, tail_only=True
    )


def paged_over_a_host_tier(config):
    """So few blocks that the tier is much in use."""
    config = replace(config, cells=min(config.cells, 48), host_cells=config.host_cells or 64, prefix_cache=True)
    return available()["paged"](config)


POLICIES = available() | {
    "mid-2025": mid_2025_with_defragmentation,
    "tight sliding-window": tight_sliding_window,
    "tails only": window_with_tails_only,
    "host tier": paged_over_a_host_tier,
}
_MANY = {"no room", "preempted before written"}
MUST_BE_SEEN = {name: _MANY | {"hit", "copied on write"} for name in ("paged", "vllm", "paged-window", "tails only")}
MUST_BE_SEEN["chunked"] = _MANY | {"copied on write"}
MUST_BE_SEEN["host tier"] = _MANY | {"hit", "hit in the host tier", "swapped in", "reserve refused"}
"""What the machine must have been through with a policy."""

TEXTS = (
    ((0, 0, 64),),
    ((0, 0, 12), (1, 0, 52)),
    ((0, 0, 12), (2, 0, 52)),
    ((0, 0, 10), (1, 0, 54)),
    ((0, 0, 24), (2, 12, 40)),
    ((1, 0, 64),),
    ((3, 0, 8), (0, 8, 56)),
)
"""What prompts say: pieces of texts 0 to 3. The last says the first one's tokens behind another beginning."""
PROMPTS = st.sampled_from([*TEXTS, ()])
PRIVATE = 1 << 20
"""Texts from here on are said by one sequence only."""


def expected_requests():
    """The future that a clairvoyant cache is told, which does not come true in every detail."""
    return [(Content(text), prompt) for prompt in (13, 34, 21) for text in TEXTS]


CONFIGS = st.builds(
    CacheConfig,
    cells=st.integers(32, 160),
    n_ubatch=st.integers(4, 32),
    sequences=st.integers(2, 6),
    max_tokens=st.integers(16, 64),
    block_size=st.just(4),
    chunk_size=st.just(8),
    pad=st.sampled_from([1, 8, 32]),
    kernel=st.sampled_from([None, "masked", "tiled", "gather", "sliced"]),
    threshold=st.sampled_from([0.0, 0.1, 0.5]),
    window=st.integers(8, 24),
    sinks=st.integers(0, 3),
    unified=st.booleans(),
    sort_batch=st.booleans(),
    prefix_cache=st.sampled_from([True, True, True, False]),
    eviction=st.sampled_from(EVICTIONS),
    free_order=st.sampled_from(["0.33.0", "0.22.1"]),
    watermark=st.sampled_from([0.0, 0.1]),
    host_cells=st.sampled_from([0, 16, 64]),
    future=st.just(expected_requests),
)
SEQUENCES = st.integers(0, 5)
SHARES = st.sampled_from([0.5, 0.0, 0.2, 0.8, 0.99])
"""Where in a sequence to cut, as a share of its length."""
TOKENS = st.sampled_from([13, 1, 2, 5, 8, 21, 34, 48])


def can(operation):
    """There is a sequence, and the policy has an operation of its own."""
    return lambda self: self.plans and getattr(type(self.policy), operation) is not getattr(Policy, operation)


class CacheMachine(RuleBasedStateMachine):
    """A policy, what its sequences should hold, and the shadow of the cache."""

    seen: ClassVar[set[str]] = set()
    """What has come to pass: a machine that never goes there shows nothing."""

    def __init__(self, factory):
        super().__init__()
        self.factory = factory
        self.fresh = count()
        self.sources = count(PRIVATE)
        self.requests = count()
        self.tokens = {}
        """By the token before it (or None) and its place in a text: a token's number in the shadow."""
        self.place_of = []
        """Of each of those numbers: text and offset."""
        self.block_text = {}
        """By key: the tokens that a block of that key must hold."""
        self.plans = {}
        """Of each open sequence."""
        self.text = {}
        """Of each open sequence: its tokens, in order."""
        self.says = {}
        """Of each open sequence: what it says, as places in texts; behind that it makes something up."""
        self.told_late = {}
        """Of sequences whose content grows as they speak: that content."""
        self.swapped = {}
        """By ticket: all of that for a sequence in the host tier."""
        self.window = {}
        """Of each group with a window and each open sequence: the tokens that must still be there."""
        self.moves_owed = self.turns_owed = self.transfers_owed = False
        """Whether the shadow waits for moves, rotations or transfers that the policy will report later."""

    @initialize(config=CONFIGS, at_once=st.booleans())
    def build(self, config, at_once):
        self.config = config
        self.transfer_at_once = at_once
        policy = self.policy = self.factory(config)
        self.ids = [np.full(group.cells, -1) for group in policy.groups]
        self.rotary = [np.full(group.cells, -(10**6)) for group in policy.groups]
        self.host_ids, self.host_rotary = (np.full(policy.groups[0].host_cells, -1) for _ in range(2))
        self.window = {g: {} for g, group in enumerate(policy.groups) if group.window is not None}
        self.ring = min(config.window, config.max_tokens, config.cells) if policy.unbounded else None
        self.streams = policy.capacity // policy.max_sequence_tokens
        self.paged = isinstance(policy, PagedPolicy)
        self.by_content = type(policy).match is not Policy.match
        self.reserves = type(policy).reserve is not Policy.reserve
        self.gives_up_blocks = self.paged and policy.window is not None

    # What is asked of the policy

    @rule(seq=SEQUENCES, prompt=TOKENS, more=TOKENS, text=PROMPTS, late=st.booleans(), instead=st.booleans())
    def open(self, seq, prompt, more, text, late, instead):
        """A sequence begins with what is cached of its prompt, perhaps in the place of one that has ended."""
        seq %= self.config.sequences
        plan = self.plan(prompt, more, text)
        if seq in self.plans and instead:
            self.policy.free(seq)
            self.end(seq)
        if seq in self.plans or not self.policy.admits(plan):
            return
        told = self.begin(seq, plan, late)
        hit = self.match(seq, plan)
        self.policy.open(seq, told)
        if hit and self.policy.reserve(Chunk(seq, hit, 0)):
            self.hold(seq, hit)
            self.carry()

    @rule(
        prompts=st.lists(st.tuples(SEQUENCES, TOKENS, TOKENS, PROMPTS), min_size=2, max_size=4),
        instead=st.booleans(),
        ahead=st.booleans(),
    )
    def run_prompts(self, prompts, instead, ahead):
        """New sequences start, or old ones take more in; whoever else is there generates a token.

        ``ahead``: what waits in the host tier has been fetched by then.
        """
        for _, n, _, text in prompts if ahead else ():
            self.fetch(Content(text), n)
        for seq, n, more, text in prompts:
            self.open(seq, n, more, text, False, instead)
        self.run_a_step([(seq % self.config.sequences, n) for seq, n, _, _ in prompts] + self.everyone())

    @precondition(lambda self: len(self.host_ids))
    @rule(seq=SEQUENCES)
    def come_and_go(self, seq):
        """A sequence that begins like no other takes what room there is, and ends."""
        seq %= self.config.sequences
        if seq not in self.plans:
            self.open(seq, 48, 0, (), False, False)
        if seq in self.plans and not self.text[seq]:
            self.run_a_step([(seq, min(48, self.policy.usage().placeable))])
            self.policy.free(seq)
            self.end(seq)
            self.carry()

    @precondition(lambda self: self.plans)
    @rule(rounds=st.integers(1, 4), others=st.lists(st.tuples(SEQUENCES, TOKENS), max_size=3))
    def generate(self, rounds, others):
        """A token for everyone, now and then more for some."""
        for _ in range(rounds):
            self.run_a_step(others + self.everyone())
            others = []

    @rule(
        prompts=st.lists(st.tuples(SEQUENCES, TOKENS, TOKENS, PROMPTS), max_size=3),
        others=st.lists(st.tuples(SEQUENCES, TOKENS), max_size=2),
        whole=st.booleans(),
        preempt=st.sampled_from(["free", "swap", None]),
    )
    def schedule(self, prompts, others, whole, preempt):
        """As vLLM's scheduler: room for all who run, or all but the last, who gives way; else for those who wait.

        A sequence that comes may find blocks that are only scheduled. What has found room is placed without fail.
        """
        step = [chunk for chunk in self.chunks(others + self.everyone()) if self.reserve(chunk)]
        if preempt and step:
            self.give_up(step.pop().seq, preempt)
        for seq, n, more, text in [] if preempt else prompts:
            seq %= self.config.sequences
            plan = self.plan(n, more, text)
            if seq in self.plans or not self.policy.admits(plan):
                continue
            hit = self.match(seq, plan)
            self.policy.open(seq, self.begin(seq, plan, late=False))
            chunk = Chunk(seq, hit, plan.prompt_tokens - hit)
            if self.reserve(chunk, whole=plan.final_tokens if whole else 0, waits=bool(self.plans)):
                self.hold(seq, hit)
                step.append(chunk)
            else:
                self.policy.free(seq)
                self.end(seq)
        if step:
            self.allocate(step, sure=self.reserves)
        else:
            self.carry()

    def everyone(self):
        return [(seq, 1) for seq in self.plans]

    def chunks(self, wants):
        step = []
        for seq, n in wants:
            n = min(n, self.room_of(seq)) if seq in self.plans else 0
            if n and seq not in {chunk.seq for chunk in step}:
                step.append(Chunk(seq, len(self.text[seq]), n))
        return step

    def run_a_step(self, wants):
        step = self.chunks(wants)
        if step:
            self.allocate(step)

    def reserve(self, chunk, **conditions):
        before = self.state()
        if self.policy.reserve(chunk, **conditions):
            return True
        self.note("reserve refused")
        self.nothing_but_the_window_moved([chunk], before)
        return False

    def give_up(self, seq, how):
        """It was given room for its next tokens, but they will not run."""
        self.note("preempted before written")
        if how == "swap" and self.swap_out_one(seq):
            return
        self.policy.free(seq)
        self.end(seq)

    @precondition(lambda self: self.plans)
    @rule(
        which=SEQUENCES,
        what=st.sampled_from(["tail", "tail", "all", "nothing"]),
        cut=SHARES,
        retell=st.none() | PROMPTS,
    )
    def free(self, which, what, cut, retell):
        seq = sorted(self.plans)[which % len(self.plans)]
        start = 0 if what == "all" else int(cut * len(self.text[seq]))
        kept = self.policy.can_truncate(seq, start)
        assert kept in (0, start)
        with self.unless_unsupported(never=kept > 0):
            if what == "nothing":
                before = self.state()
                self.policy.free(seq, len(self.text[seq]) + 1)
                self.policy.free(seq, start, start)
                assert self.state() == before
            else:
                self.policy.free(seq, start)
                self.forget(seq, self.text[seq][start:])
                if start == 0:
                    self.end(seq)
                elif kept:
                    for group, must_stay in self.window.items():
                        lowest = max(start + 1 - self.policy.groups[group].window, 0)
                        must_stay[seq] = set(self.text[seq][lowest:])
                if start and retell is not None:
                    self.retell(seq, retell)
        self.carry()

    def retell(self, seq, text):
        """From here on it says something else."""
        if self.by_content:
            content = self.content_of(self.text[seq])
            for piece in text:
                content.extend(piece)
            self.plans[seq] = self.plans[seq]._replace(content=content)
            self.says[seq] = list(places_in(content))
            self.learn(content)
            self.policy.open(seq, self.plans[seq])

    @precondition(can("shift"))
    @rule(which=SEQUENCES, keep=SHARES, discard=SHARES)
    def shift_the_context(self, which, keep, discard):
        """Forget a range in the middle; what follows moves up."""
        seq = sorted(self.plans)[which % len(self.plans)]
        text = self.text[seq]
        keep = int(keep * len(text))
        discard = 1 + int(discard * (len(text) - keep - 1))
        behind = text[keep + discard :]
        if not behind or any(set(behind) & set(other) for s, other in self.text.items() if s != seq):
            return
        with self.unless_unsupported():
            self.policy.free(seq, keep, keep + discard)
            self.forget(seq, text[keep : keep + discard])
            self.policy.shift(seq, keep + discard, None, -discard)
            self.turns_owed = True

    @precondition(can("copy"))
    @rule(which=SEQUENCES, to=SEQUENCES, cut=st.none() | SHARES)
    def copy(self, which, to, cut):
        src, dst = sorted(self.plans)[which % len(self.plans)], to % self.config.sequences
        text = self.text[src]
        if not text or self.text.get(dst) or src == dst:
            return
        if dst in self.plans:
            self.policy.free(dst)
            self.end(dst)
        stop = None if cut is None else 1 + int(cut * len(text))
        content = self.content_of(text[:stop])
        content.extend((next(self.sources), 0, self.config.max_tokens))
        plan = self.plans[src]._replace(content=content)
        if not self.policy.admits(plan):
            return
        self.policy.open(dst, self.begin(dst, plan, late=False))
        with self.unless_unsupported():
            self.policy.copy(src, dst, 0, stop)
            self.text[dst] = text[:stop]
            for kept in self.window.values():
                kept[dst] = kept[src] & set(text[:stop])
            self.moves_owed |= self.streams > 1

    @precondition(lambda self: self.plans and len(self.host_ids))
    @rule(which=SEQUENCES)
    def swap_out(self, which):
        self.swap_out_one(sorted(self.plans)[which % len(self.plans)])
        self.carry()

    def swap_out_one(self, seq):
        before = self.state()
        ticket = self.policy.swap_out(seq)
        if ticket is None:
            assert self.state() == before
            return False
        assert ticket not in self.swapped
        self.swapped[ticket] = self.plans[seq], self.text[seq], self.says[seq], self.told_late.get(seq)
        self.end(seq)
        return True

    @precondition(lambda self: self.swapped)
    @rule(seq=SEQUENCES, which=SEQUENCES, waits=st.booleans(), tell=st.booleans(), more=st.none() | TOKENS)
    def swap_in(self, seq, which, waits, tell, more):
        """Under any number that is free; perhaps only if ``more`` tokens then find room as well."""
        seq %= self.config.sequences
        ticket = sorted(self.swapped)[which % len(self.swapped)]
        if seq in self.plans:
            return
        before = self.state()
        plan, text, _, _ = self.swapped[ticket]
        upto = min(len(text) + (more or 0), max(plan.final_tokens, len(text)))
        held = self.policy.swap_in(seq, ticket, upto, waits=waits)
        if held is None:
            assert self.state() == before
            return
        self.note("swapped in")
        self.plans[seq], self.text[seq], self.says[seq], late = self.swapped.pop(ticket)
        assert held == len(self.text[seq])
        for group, kept in self.window.items():
            kept[seq] = set(self.text[seq][max(held + 1 - self.policy.groups[group].window, 0) :])
        if late is not None:
            self.told_late[seq] = late
        elif tell:
            self.policy.open(seq, self.plans[seq])
        self.carry()
        if upto > held:
            self.allocate([Chunk(seq, held, upto - held)], sure=True)

    @precondition(lambda self: self.swapped)
    @rule(which=SEQUENCES)
    def forget_swapped(self, which):
        ticket = sorted(self.swapped)[which % len(self.swapped)]
        self.policy.forget_swapped(ticket)
        del self.swapped[ticket]

    def fetch(self, content, prompt):
        """What is brought in ahead of its use takes nothing from anybody."""
        maps, usage, sequences, _ = self.state()
        n = len(self.policy.fetch(content, prompt))
        after = self.policy.usage()
        assert (self.state()[0], self.state()[2]) == (maps, sequences)
        assert (after.stored, after.allocated) == (usage.stored, usage.allocated)
        if n:
            assert len(self.policy.fetch(content, prompt)) == 0
            assert self.policy.match(99, content, prompt) >= n * self.policy.block_size
            assert all(block >= 0 for block in self.policy.found(99))
        self.carry()

    @precondition(lambda self: len(self.plans) > 3)
    @rule(which=SEQUENCES)
    def keep_one(self, which):
        seq = sorted(self.plans)[which % len(self.plans)]
        self.policy.keep(seq)
        for other in set(self.plans) - {seq}:
            if self.streams == 1:  # With streams the others lie in caches of their own, which stay as they are.
                self.end(other)

    @precondition(can("compact"))
    @rule()
    def compact(self):
        before = self.policy.usage().external_fragmentation
        self.moves_owed |= self.policy.compact().n_runs > 0
        assert self.policy.usage().external_fragmentation <= before + 1e-12
        if self.policy.name in PACK_EVERYTHING:
            assert self.policy.usage().free_extents <= 1

    @precondition(can("idle"))
    @rule()
    def idle(self):
        moves = self.policy.idle()
        moves.apply(self.ids[0])
        moves.apply(self.rotary[0])
        self.moves_owed &= moves.n_runs == 0

    def empty_the_cache(self):
        for ticket in self.swapped:
            self.policy.forget_swapped(ticket)
        for seq in list(self.plans):
            self.policy.free(seq)
            self.end(seq)
        assert self.policy.sequences() == []
        usage = self.policy.usage()
        assert (usage.stored, usage.allocated, usage.span) == (0, 0, 0)
        assert (usage.free, usage.free_extents) == (self.policy.capacity, self.streams)
        if self.paged and self.policy.host is not None:
            assert self.policy.host.hold(self.policy.host.n) is not None

    def teardown(self):
        if hasattr(self, "policy"):
            self.empty_the_cache()

    # What must be true after each

    @invariant()
    def cells_hold_what_sequences_remember(self):
        for group in range(len(self.policy.groups)):
            cells_of = self.cells_by_owner(group)
            assert set(cells_of) <= set(self.plans)
            for seq in self.plans:
                cells, positions = cells_of.get(seq, ([], []))
                tokens = self.tokens_at(group, seq, positions)
                if not self.moves_owed and not self.transfers_owed:
                    assert self.ids[group][cells].tolist() == tokens
                    if not self.turns_owed:
                        assert self.rotary[group][cells].tolist() == positions

    @invariant()
    def a_cell_has_two_owners_only_for_a_copied_token(self):
        for group in range(len(self.policy.groups)):
            owners = self.policy.occupancy(group).owners
            token_in = {}
            for seq, (cells, positions) in self.cells_by_owner(group).items():
                for cell, token in zip(cells, self.tokens_at(group, seq, positions), strict=True):
                    assert token_in.setdefault(cell, token) == token
            assert set(token_in) == {cell for cell, of in enumerate(owners) if of}
            if self.streams == 1 and not self.paged:
                assert len(set(token_in.values())) == len(token_in)

    @invariant()
    def films_show_the_map(self):
        for group in range(len(self.policy.groups)):
            assert np.array_equal(self.policy.first_owners(group), self.policy.occupancy(group).first_owner())

    @invariant()
    def usage_counts_the_cells(self):
        policy, usage = self.policy, self.policy.usage()
        used = np.array([bool(of) for of in policy.occupancy().owners])
        assert usage.capacity == policy.capacity <= policy.groups[0].cells
        assert usage.stored == used.sum() <= usage.allocated
        assert usage.free + usage.allocated == usage.capacity
        assert 0 <= usage.external_fragmentation <= 1
        assert 0 <= usage.largest_free_extent <= usage.free
        top = int(np.flatnonzero(used).max(initial=-1)) + 1
        assert usage.span == top
        if usage.stored == usage.allocated and policy.capacity == policy.groups[0].cells:
            free_extents = [run for stream in np.split(used, self.streams) for run in lengths_of_runs(~stream)]
            assert (usage.free_extents, usage.largest_free_extent) == (len(free_extents), max(free_extents, default=0))

    @invariant()
    def sequences_are_those_that_hold_cells(self):
        holding = [seq for seq in sorted(self.plans) if self.text[seq]]
        named = self.policy.sequences()
        assert named == sorted(set(named))
        assert set(holding) <= set(named) <= set(self.plans)

    @invariant()
    def blocks_are_counted(self):
        if not self.paged:
            return
        pool, tables = self.policy.pool, self.policy.tables.values()
        held = Counter(block for s in tables for block in s.blocks[s.skipped :])
        assert all(block == NULL for s in tables for block in s.blocks[: s.skipped])
        assert pool.refs.tolist() == [held[block] for block in range(pool.n)]
        free = pool.free.order()
        assert sorted(free) == [block for block in range(pool.first, pool.n) if not held[block]]
        assert len(pool.free) == len(free)

    @invariant()
    def cached_blocks_hold_what_their_key_says(self):
        if not self.paged:
            return
        pool, size = self.policy.pool, self.policy.block_size
        keyed = {block: key for block, key in enumerate(pool.keys) if key is not None}
        assert self.policy.prefix_cache or not keyed
        for key in keyed.values():
            assert keyed[pool.find(key)] == key
        assert pool.n_cached == len(set(keyed.values()))
        assert pool.n_free_cached == sum(1 for block in keyed if pool.refs[block] == 0)
        assert self.policy.usage().cached == pool.n_free_cached * size
        if self.transfers_owed:
            return
        for block, key in keyed.items():
            assert self.ids[0][block * size : (block + 1) * size].tolist() == self.block_text[key]
        for key, tokens in self.block_text.items() if self.policy.host is not None else ():
            slot = self.policy.host.find(key)
            if slot is not None:
                assert self.host_ids[slot * size : (slot + 1) * size].tolist() == tokens

    # How it is told

    def plan(self, prompt, more, text):
        """What a sequence will say: a prompt, and an answer of its own."""
        most = self.config.max_tokens
        prompt, final = min(prompt, most), min(prompt + more, most)
        content = Content(text).head(prompt)
        content.extend((next(self.sources), 0, final - content.n))
        return SequencePlan(prompt, most, final, content, next(self.requests))

    def begin(self, seq, plan, late):
        """A sequence that holds nothing yet. Returns the plan to tell the policy: all of it, or ``late`` the prompt
        now, and the answer word by word."""
        self.plans[seq], self.text[seq] = plan, []
        self.says[seq] = list(places_in(plan.content))
        for kept in self.window.values():
            kept[seq] = set()
        self.learn(plan.content)
        if not late:
            return plan
        grows = self.told_late[seq] = plan.content.head(plan.prompt_tokens)
        return plan._replace(content=grows)

    def match(self, seq, plan):
        hit = self.policy.match(seq, plan.content, plan.prompt_tokens)
        assert 0 <= hit < plan.prompt_tokens
        assert hit % self.policy.block_size == 0
        if self.paged and any(block < 0 for block in self.policy.found(seq)):
            self.note("hit in the host tier")
        return hit

    def hold(self, seq, hit):
        """Its first tokens were in the cache."""
        self.text[seq] = self.spell(self.says[seq][:hit])
        if hit:
            self.note("hit")
        for group, kept in self.window.items():
            kept[seq] = set(self.text[seq][max(hit + 1 - self.policy.groups[group].window, 0) :])

    def spell(self, places, after=None):
        """The tokens that stand for this text behind the token ``after``.

        Where nothing is found by content each is a number of its own, so that a copy cannot pass for what it copies.
        """
        text = []
        for place in places:
            name = (after, place) if self.by_content else next(self.fresh)
            if name not in self.tokens:
                self.tokens[name] = len(self.place_of)
                self.place_of.append(place)
            after = self.tokens[name]
            text.append(after)
        return text

    def content_of(self, text):
        return Content((source, at, 1) for source, at in (self.place_of[token] for token in text))

    def learn(self, content):
        """Which tokens its blocks hold."""
        if self.by_content:
            size, text = self.policy.block_size, self.spell(places_in(content))
            for at, key in enumerate(content.keys(size, content.n // size)):
                tokens = text[at * size : (at + 1) * size]
                assert self.block_text.setdefault(key, tokens) == tokens

    def carry(self):
        """Copies between the tiers are made now, or left to the next micro-batch."""
        if self.transfer_at_once:
            self.transfer(self.policy.settle_transfers())
        else:
            self.transfers_owed = True

    def transfer(self, transfers):
        for to_host, cell, host, n in transfers:
            assert n > 0
            for near, far in ((self.ids[0], self.host_ids), (self.rotary[0], self.host_rotary)):
                here, there = near[cell : cell + n], far[host : host + n]
                assert len(here) == len(there) == n
                if to_host:
                    there[:] = here
                else:
                    here[:] = there

    def note(self, what):
        self.seen.add(what)

    def end(self, seq):
        del self.plans[seq], self.text[seq], self.says[seq]
        self.told_late.pop(seq, None)
        for kept in self.window.values():
            del kept[seq]

    def forget(self, seq, tokens):
        gone = set(tokens)
        self.text[seq] = [token for token in self.text[seq] if token not in gone]
        if gone:
            self.says[seq] = [self.place_of[token] for token in self.text[seq]]
            self.plans[seq] = self.plans[seq]._replace(content=self.content_of(self.text[seq]))
            self.told_late.pop(seq, None)
        for kept in self.window.values():
            kept[seq] -= gone

    def room_of(self, seq):
        final = 4 * self.config.max_tokens if self.policy.unbounded else self.plans[seq].final_tokens
        return max(final - len(self.text[seq]), 0)

    @contextmanager
    def unless_unsupported(self, never=False):
        before = self.state()
        try:
            yield
        except Unsupported:
            assert not never
            assert self.state() == before

    def state(self):
        groups = range(len(self.policy.groups))
        maps = [self.policy.occupancy(group) for group in groups]
        pool = (self.policy.pool.free.order(), list(self.policy.pool.keys)) if self.paged else None
        return [(m.position.tolist(), m.owners) for m in maps], self.policy.usage(), self.policy.sequences(), pool

    def allocate(self, step, sure=False):
        """Run a step; ``sure``: there is room for it."""
        before, usage = self.state(), self.policy.usage()
        n = sum(chunk.n for chunk in step)
        try:
            batches = self.policy.allocate(step, views=True)
            if self.policy.name in TAKE_ANY_ROOM and n <= self.config.n_ubatch:
                assert n <= usage.placeable
            full = False
        except NoSlot as reason:
            batches, full = reason.done, True
            self.note("no room")
            assert not sure
            assert self.policy.name not in RESERVE_AHEAD
            assert not (self.policy.name in TAKE_ANY_ROOM and n <= min(usage.placeable, self.config.n_ubatch))
            assert not batches or self.policy.name in KEEP_WHAT_WAS_PLACED
        done = Counter()
        for batch in batches:
            for chunk in batch.chunks:
                done[chunk.seq] += chunk.n
        if full:
            self.no_room(step, before, untouched=not batches)
        else:
            assert done == {chunk.seq: chunk.n for chunk in step}
        self.final = {seq: len(self.text[seq]) + n for seq, n in done.items()}
        for seq, end in self.final.items():
            self.window_moves_on(seq, end)
        for batch in batches:
            self.forward(batch, last=batch is batches[-1])
        if batches:
            self.moves_owed = self.turns_owed = self.transfers_owed = False
        if full:
            self.moves_owed = self.turns_owed = not self.paged
        for seq, content in self.told_late.items():
            for source, at in places_in(self.content_of(self.text[seq][content.n :])):
                content.extend((source, at, 1))

    def no_room(self, step, before, untouched):
        """Nothing has changed but for compaction; and, as in the original, for what a window gave up."""
        if self.paged:
            self.nothing_but_the_window_moved(step, before)
            return
        for chunk in step:
            self.window_moves_on(chunk.seq, chunk.start + chunk.n)
        if untouched:
            (maps, usage, sequences, _), (old_maps, old_usage, old_sequences, _) = self.state(), before
            assert sequences == old_sequences
            assert (usage.stored, usage.allocated) == (old_usage.stored, old_usage.allocated)
            if maps[0] == old_maps[0]:
                assert usage == old_usage
            for group in range(len(maps)):
                if group not in self.window:
                    assert tokens_of(maps[group]) == tokens_of(old_maps[group])

    def nothing_but_the_window_moved(self, step, before):
        """No room for these: all is as it was, but that blocks are gone which their next tokens cannot see."""
        after = self.state()
        if not self.gives_up_blocks:
            assert after == before
            return
        size, window = self.policy.block_size, self.policy.window
        first = {chunk.seq: max(chunk.start + 1 - window, 0) // size * size for chunk in step}
        (position, owners), (now, owners_now) = before[0][0], after[0][0]
        stay = [{seq for seq in of if at >= first.get(seq, 0)} for at, of in zip(position, owners, strict=True)]
        assert [set(of) for of in owners_now] == stay
        assert now == [at if of else -1 for at, of in zip(position, stay, strict=True)]
        assert after[2] == before[2]

    def window_moves_on(self, seq, end):
        """Once a sequence ends at ``end``, cells outside of the window of its next token may be used again."""
        for group, kept in self.window.items():
            kept[seq] -= set(self.text[seq][: max(end + 1 - self.policy.groups[group].window, 0)])

    def forward(self, batch, last):
        """One forward pass of the engine: move, rotate, write; then look at what attention may see."""
        assert batch.n_tokens == sum(chunk.n for chunk in batch.chunks) <= self.config.n_ubatch
        written = {}
        for chunk in batch.chunks:
            text = self.text[chunk.seq]
            assert (chunk.start, chunk.also) == (len(text), ())
            more = self.says[chunk.seq][chunk.start : chunk.start + chunk.n]
            more += [(next(self.sources), 0) for _ in range(chunk.n - len(more))]
            written[chunk.seq] = self.spell(more, text[-1] if text else None)
            text += written[chunk.seq]
            for group, kept in self.window.items():
                lowest = self.final[chunk.seq] + 1 - self.policy.groups[group].window
                kept[chunk.seq] |= set(text[max(lowest, chunk.start) :])
        for group, place in enumerate(batch.places):
            ids, rotary = self.ids[group], self.rotary[group]
            assert group == 0 or not place.transfers
            self.transfer(place.transfers)
            if self.paged and place.moves.n_runs:
                self.note("copied on write")
            for array in (ids, rotary):
                place.moves.apply(array)
            assert len(set(place.shift.cells.tolist())) == len(place.shift.cells)
            rotary[place.shift.cells] += place.shift.deltas
            assert len(set(place.cells.tolist())) == batch.n_tokens
            ends = np.cumsum([chunk.n for chunk in batch.chunks])[:-1]
            for chunk, view, own in zip(batch.chunks, place.views, np.split(place.cells, ends), strict=True):
                ids[own], rotary[own] = written[chunk.seq], view.positions[-chunk.n :]
                if self.ring is None:
                    assert rotary[own].tolist() == list(range(chunk.start, chunk.start + chunk.n))
            cells_of = self.cells_by_owner(group)
            for chunk, view, own in zip(batch.chunks, place.views, np.split(place.cells, ends), strict=True):
                cells, positions = view.cells.tolist(), view.positions.tolist()
                assert cells[-chunk.n :] == own.tolist()
                assert ids[cells].tolist() == self.tokens_at(group, chunk.seq, positions)
                assert rotary[cells].tolist() == positions
                if last:
                    assert (cells, positions) == cells_of[chunk.seq]
            self.check_reads(group, batch, place)

    def check_reads(self, group, batch, place):
        reads = place.reads
        assert reads.tokens.tolist() == [chunk.n for chunk in batch.chunks]
        if group not in self.window:
            assert reads.useful.tolist() == [len(view.cells) for view in place.views]
            assert (reads.useful <= reads.scanned).all()

    def cells_by_owner(self, group):
        """Of each sequence in a group: its cells in order of position, and those positions."""
        table = self.policy.occupancy(group)
        found = {}
        for cell, (position, owners) in enumerate(zip(table.position.tolist(), table.owners, strict=True)):
            assert (position >= 0) == bool(owners)
            for seq in owners:
                found.setdefault(seq, []).append((position, cell))
        return {
            seq: ([cell for _, cell in sorted(pairs)], [position for position, _ in sorted(pairs)])
            for seq, pairs in found.items()
        }

    def tokens_at(self, group, seq, positions):
        """The tokens that a sequence should hold, given at which ascending positions the policy holds some.

        Fails unless these are all that its layout promises to keep, each once.
        """
        text = self.text[seq]
        if group in self.window:
            assert positions == sorted(set(positions))
            tokens = [text[position] for position in positions]
            assert self.window[group][seq] <= set(tokens)
            return tokens
        if self.ring is None or len(text) <= self.ring:
            assert positions == list(range(len(text)))
            return text
        sinks = min(self.config.sinks, self.ring - 1)
        newest = self.ring - sinks
        assert positions[:sinks] == list(range(sinks))
        first = positions[sinks]
        assert positions[sinks:] == list(range(first, first + newest))
        assert sinks <= first <= max(self.config.max_tokens, self.ring) - newest
        return text[:sinks] + text[len(text) - newest :]


def lengths_of_runs(free):
    edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False])).astype(int)))
    return (edges[1::2] - edges[::2]).tolist()


def places_in(content):
    return ((source, start + i) for source, start, n in content for i in range(n))


def tokens_of(cell_map):
    position, owners = cell_map
    return Counter(zip(position, owners, strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_its_word(name):
    CacheMachine.seen.clear()
    examples = 150 if name in MUST_BE_SEEN else 50
    run_state_machine_as_test(partial(CacheMachine, POLICIES[name]), settings=settings(SETTINGS, max_examples=examples))
    assert MUST_BE_SEEN.get(name, set()) <= CacheMachine.seen


class ForgetsAMove(UnifiedPolicy):
    """Compacts, and does not say so."""

    def compact(self):
        moves = super().compact()
        self.arena.pending.settle_moves()
        return moves


class SharesBlocks(PagedPolicy):
    """Hands out the lowest block again and again."""

    def _place(self, chunks, *rest):
        for chunk in chunks:
            self.tables[chunk.seq].blocks[0] = 1
        return super()._place(chunks, *rest)


class SkipsAReference(PagedPolicy):
    """One block of each sequence that goes is never given back."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        release = self.pool.release
        self.pool.release = lambda blocks: release(blocks[1:])


class LeavesAKey(PagedPolicy):
    """Writes into a cached block, which is still found as what it was."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        prepare, refs = self.blocks.prepare_write, self.pool.refs
        self.blocks.prepare_write = lambda table, at: prepare(table, at) if refs[table.blocks[at]] > 1 else None


class LetsTheUnwrittenBeFound(PagedPolicy):
    """A block that was scheduled keeps its key when its sequence ends before it has run."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        release = self.blocks.release

        def keep_keys(table, keep):
            table.n_keyed = min(table.n_keyed, table.length // self.block_size)
            release(table, keep)

        self.blocks.release = keep_keys


class ForgetsATransfer(PagedPolicy):
    """Brings blocks back from the host tier, and does not say so."""

    def __init__(self, name, config, **options):
        super().__init__(name, replace(config, host_cells=64), **options)
        log = self._offload.log
        add = log.add
        log.add = lambda block, slot, *, to_host: add(block, slot, to_host=True) if to_host else None


class FakeEntryPoint:
    def __init__(self, name, factory):
        self.name, self.load = name, lambda: factory


@pytest.mark.parametrize(
    "factory",
    [
        lambda config: ForgetsAMove("mine", config, compactor=pack),
        *[
            partial(wrong, "mine", block_size=4, free=partial(free_blocks, "lru"), prefix_cache=True)
            for wrong in (SharesBlocks, SkipsAReference, LeavesAKey, LetsTheUnwrittenBeFound, ForgetsATransfer)
        ],
    ],
    ids=[
        "forgets a move",
        "shares blocks",
        "skips a reference",
        "leaves a key",
        "lets the unwritten be found",
        "forgets a transfer",
    ],
)
def test_a_plug_in_is_held_to_its_word_too(factory, monkeypatch, capsys):
    """The control: what is registered from elsewhere is found, and if it is wrong it does not pass."""
    mine = FakeEntryPoint("mine", factory)
    monkeypatch.setattr(presets, "entry_points", lambda group: [mine] if group == "kvsim.policies" else [])
    assert list(available())[-1] == "mine"
    quick = settings(SETTINGS, max_examples=100, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(partial(CacheMachine, available()["mine"]), settings=quick)


@pytest.mark.parametrize("name", POLICIES)
def test_a_token_for_two_sequences_is_seen_by_both_or_refused(name):
    policy = POLICIES[name](CacheConfig(cells=64, n_ubatch=8, sequences=2, max_tokens=16, block_size=4, chunk_size=8))
    for seq in range(2):
        policy.open(seq, SequencePlan(4, 16, 8))
    before = policy.occupancy().owners
    try:
        policy.allocate([Chunk(0, 0, 4, (1,))])
    except (Unsupported, NoSlot, Rejected):
        assert policy.occupancy().owners == before
    else:
        assert sum(owners == {0, 1} for owners in policy.occupancy().owners) == 4


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in KEEP_WHAT_WAS_PLACED])
def test_what_finds_no_room_is_taken_back_from_every_sequence_that_would_have_seen_it(name):
    """Two micro-batches for sequences 0 and 1 together: the first fits, the second does not."""
    policy = POLICIES[name](CacheConfig(cells=32, n_ubatch=20, sequences=2, max_tokens=64, block_size=4, chunk_size=8))
    with pytest.raises((Unsupported, NoSlot, Rejected)):
        policy.allocate([Chunk(0, 0, 40, (1,))])
    assert policy.sequences() == []
    assert policy.usage().allocated == 0
