"""The machine: what is asked of a policy, in whatever order."""

from collections import Counter
from contextlib import contextmanager
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies import Chunk, Content, OutOfCells, Policy, Unsupported
from policies.checking import places_what_was_asked
from tests.policies.invariants import checks
from tests.policies.invariants.shadow import Shadow
from tests.policies.invariants.subjects import (
    CONFIGS,
    KEEP_WHAT_WAS_PLACED,
    PACK_EVERYTHING,
    PROMPTS,
    RESERVE_AHEAD,
    SEQUENCES,
    SHARES,
    TAKE_ANY_ROOM,
    TOKENS,
)


def can(operation):
    """There is a sequence, and the policy has an operation of its own."""
    return lambda self: self.shadow.plans and getattr(type(self.policy), operation) is not getattr(Policy, operation)


def any_sequence(self):
    """There is a sequence."""
    return self.shadow.plans


class CacheMachine(RuleBasedStateMachine):
    """A policy, and the shadow that it is compared with."""

    seen: ClassVar[set[str]] = set()
    """Situations that have been met: a machine that never meets them shows nothing."""

    def __init__(self, factory):
        super().__init__()
        self.factory = factory

    @initialize(config=CONFIGS, at_once=st.booleans())
    def build(self, config, at_once):
        self.config = config
        self.policy = self.factory(config)
        self.shadow = Shadow(self.policy, config, self.seen, transfer_at_once=at_once)

    @invariant()
    def all_checks_hold(self):
        for check in checks.ALWAYS_TRUE:
            check(self.policy, self.shadow)

    def teardown(self):
        if hasattr(self, "shadow"):
            for exported in self.shadow.exported:
                self.policy.drop_export(exported)
            for seq in list(self.shadow.plans):
                self.end(seq)
            checks.nothing_is_left(self.policy, self.shadow)

    # Sequences begin, and run

    @rule(seq=SEQUENCES, prompt=TOKENS, more=TOKENS, text=PROMPTS, late=st.booleans(), instead=st.booleans())
    def open(self, seq, prompt, more, text, late, instead):
        """A sequence begins with what is cached of its prompt, perhaps in the place of one that has ended."""
        seq %= self.config.sequences
        plan = self.shadow.words.plan(prompt, more, text, self.config.max_tokens)
        if seq in self.shadow.plans and instead:
            self.end(seq)
        if seq in self.shadow.plans or not self.policy.admits(plan):
            return
        told = self.shadow.begin(seq, plan, late=late)
        hit = self.shadow.match(seq, plan)
        self.policy.open(seq, told)
        if hit and self.policy.reserve(Chunk(seq, hit, 0)):
            self.shadow.hold(seq, hit)
            self.shadow.carry()

    @rule(
        prompts=st.lists(st.tuples(SEQUENCES, TOKENS, TOKENS, PROMPTS), min_size=2, max_size=4),
        instead=st.booleans(),
        ahead=st.booleans(),
    )
    def run_prompts(self, prompts, instead, ahead):
        """New sequences start, or old ones take more in; all others generate a token.

        ``ahead``: what waits in the host tier has been fetched by then.
        """
        for _, n, _, text in prompts if ahead else ():
            self.fetch(Content(text), n)
        for seq, n, more, text in prompts:
            self.open(seq, n, more, text, False, instead)
        self.run_a_step([(seq % self.config.sequences, n) for seq, n, _, _ in prompts] + self.everyone())

    @precondition(lambda self: len(self.shadow.host_ids))
    @rule(seq=SEQUENCES)
    def come_and_go(self, seq):
        """A sequence that begins like no other takes what room there is, and ends."""
        seq %= self.config.sequences
        if seq not in self.shadow.plans:
            self.open(seq, 48, 0, (), False, False)
        if seq in self.shadow.plans and not self.shadow.text[seq]:
            self.run_a_step([(seq, min(48, self.policy.usage().placeable))])
            self.end(seq)
            self.shadow.carry()

    @precondition(any_sequence)
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
        """Reserve as vLLM's scheduler does: room for all that run, or all but the last, which gives way; else for
        those that wait.

        A sequence that comes may find blocks that are only scheduled. What has found room is placed without fail.
        """
        step = [chunk for chunk in self.chunks(others + self.everyone()) if self.reserve(chunk)]
        if preempt and step:
            self.give_up(step.pop().seq, preempt)
        for seq, n, more, text in [] if preempt else prompts:
            seq %= self.config.sequences
            plan = self.shadow.words.plan(n, more, text, self.config.max_tokens)
            if seq in self.shadow.plans or not self.policy.admits(plan):
                continue
            hit = self.shadow.match(seq, plan)
            self.policy.open(seq, self.shadow.begin(seq, plan))
            n, known = plan.prompt_tokens - hit, plan.prompt_tokens
            chunk = Chunk(seq, hit, self.policy.cut_chunk(seq, hit, n, prompt=known, tokens=known, most=n))
            waits = bool(self.shadow.plans)
            if self.reserve(chunk, whole=plan.final_tokens if whole else 0, waits=waits):
                self.shadow.hold(seq, hit)
                step.append(chunk)
            else:
                self.end(seq)
        if step:
            self.allocate(step, sure=self.policy.can_reserve)
        else:
            self.shadow.carry()

    @precondition(can("reserve_with_drafts"))
    @rule(drafts=st.lists(st.tuples(SEQUENCES, st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3))
    def check_drafts(self, drafts):
        """Sequences get a token and drafts, the first of which are accepted; the others say what nothing else says."""
        step, ends = [], {}
        for which, drafted, accepted in drafts:
            seq = self.pick(which)
            start, n = len(self.shadow.text[seq]), min(1 + drafted, self.shadow.room_of(seq))
            if start and n > 1 and seq not in ends and seq not in self.shadow.told_late:
                chunk = Chunk(seq, start, n)
                if self.policy.reserve_with_drafts(chunk, 0, known=start + 1):
                    step.append(chunk)
                    ends[seq] = min(start + 1 + accepted, start + n)
        if step:
            before = self.shadow.guess(step, ends)
            self.allocate(step, sure=self.policy.can_reserve)
            for seq, end in ends.items():
                self.policy.take_back(seq, end)
                self.shadow.take_back(seq, end, *before[seq])

    def everyone(self):
        return [(seq, 1) for seq in self.shadow.plans]

    def chunks(self, wants):
        step = []
        for seq, n in wants:
            n = min(n, self.shadow.room_of(seq)) if seq in self.shadow.plans else 0
            if n and seq not in {chunk.seq for chunk in step}:
                step.append(Chunk(seq, len(self.shadow.text[seq]), n))
        return step

    def run_a_step(self, wants):
        step = self.chunks(wants)
        if step:
            self.allocate(step)

    def reserve(self, chunk, **conditions):
        before = self.state()
        self.shadow.moves_unreported |= self.shadow.evicts
        if self.policy.reserve(chunk, **conditions):
            return True
        self.seen.add("reserve refused")
        checks.only_the_window_moved(self.policy, self.shadow, [chunk], before)
        return False

    def allocate(self, step, sure=False):
        """Run a step; ``sure``: there is room for it."""
        before, usage, name = self.state(), self.policy.usage(), self.policy.name
        n = sum(chunk.n for chunk in step)
        try:
            batches = self.policy.allocate(step, views=True)
            if name in TAKE_ANY_ROOM and n <= self.config.n_ubatch:
                assert n <= usage.placeable
            full = False
        except OutOfCells as reason:
            batches, full = reason.done, True
            self.seen.add("no room")
            assert not sure
            assert name not in RESERVE_AHEAD
            assert not (name in TAKE_ANY_ROOM and n <= min(usage.placeable, self.config.n_ubatch))
            assert not batches or name in KEEP_WHAT_WAS_PLACED
        done = Counter()
        for batch in batches:
            for chunk in batch.chunks:
                done[chunk.seq] += chunk.n
        places_what_was_asked(self.policy, step, batches, self.config.n_ubatch, refused=full)
        if full:
            checks.only_compaction_changed(self.policy, self.shadow, step, before, untouched=not batches)
        self.shadow.run(batches, done)
        if full:
            self.shadow.moves_unreported = self.shadow.rotations_unreported = not self.shadow.in_blocks
        self.shadow.say_late()

    # Sequences end, and give up tokens

    def end(self, seq):
        self.policy.free(seq)
        self.shadow.end(seq)

    def give_up(self, seq, how):
        """It was given room for its next tokens, but they will not run."""
        self.seen.add("preempted before written")
        if how != "swap" or not self.export_one(seq):
            self.end(seq)

    @precondition(any_sequence)
    @rule(
        which=SEQUENCES,
        what=st.sampled_from(["tail", "tail", "all", "nothing"]),
        cut=SHARES,
        retell=st.none() | PROMPTS,
    )
    def free(self, which, what, cut, retell):
        seq = self.pick(which)
        start = 0 if what == "all" else int(cut * len(self.shadow.text[seq]))
        kept = self.policy.can_truncate(seq, start)
        assert kept in (0, start)
        with self.unless_unsupported(never=kept > 0):
            if what == "nothing":
                before = self.state()
                self.policy.free(seq, len(self.shadow.text[seq]) + 1)
                self.policy.free(seq, start, start)
                assert self.state() == before
            else:
                self.policy.free(seq, start)
                self.shadow.truncate(seq, start, kept=kept > 0)
                if start and retell is not None and self.shadow.words.by_content:
                    self.policy.open(seq, self.shadow.say_instead(seq, retell))
        self.shadow.carry()

    @precondition(lambda self: self.shadow.plans and self.policy.can_shift)
    @rule(which=SEQUENCES, keep=SHARES, discard=SHARES)
    def shift_the_context(self, which, keep, discard):
        """Forget a range in the middle; what follows moves up."""
        seq = self.pick(which)
        text = self.shadow.text[seq]
        keep = int(keep * len(text))
        discard = 1 + int(discard * (len(text) - keep - 1))
        behind = text[keep + discard :]
        if not behind or any(set(behind) & set(other) for s, other in self.shadow.text.items() if s != seq):
            return
        with self.unless_unsupported():
            self.policy.free(seq, keep, keep + discard)
            self.shadow.forget(seq, text[keep : keep + discard])
            self.policy.shift(seq, keep + discard, None, -discard)
            self.shadow.rotations_unreported = True

    @precondition(lambda self: len(self.shadow.plans) > 3)
    @rule(which=SEQUENCES)
    def keep_one(self, which):
        seq = self.pick(which)
        self.policy.keep(seq)
        for other in set(self.shadow.plans) - {seq}:
            if self.shadow.streams == 1:  # With streams the others lie in caches of their own, which stay as they are.
                self.shadow.end(other)

    @precondition(can("copy"))
    @rule(which=SEQUENCES, to=SEQUENCES, cut=st.none() | SHARES)
    def copy(self, which, to, cut):
        src, dst = self.pick(which), to % self.config.sequences
        text = self.shadow.text[src]
        if not text or self.shadow.text.get(dst) or src == dst:
            return
        if dst in self.shadow.plans:
            self.end(dst)
        stop = None if cut is None else 1 + int(cut * len(text))
        words = self.shadow.words
        content = words.content_of(text[:stop])
        content.extend((words.private_text(), 0, self.config.max_tokens))
        plan = self.shadow.plans[src]._replace(content=content)
        if not self.policy.admits(plan):
            return
        self.policy.open(dst, self.shadow.begin(dst, plan))
        with self.unless_unsupported():
            self.policy.copy(src, dst, 0, stop)
            self.shadow.share(src, dst, stop)

    # The host tier

    @precondition(lambda self: self.shadow.plans and len(self.shadow.host_ids))
    @rule(which=SEQUENCES)
    def export(self, which):
        self.export_one(self.pick(which))
        self.shadow.carry()

    def export_one(self, seq):
        """It leaves its cells, which it still has when it has been copied."""
        before = self.state()
        exported = self.policy.export(seq)
        assert self.state() == before
        if exported is None:
            return False
        self.policy.free(seq)
        self.shadow.export(seq, exported)
        return True

    @precondition(lambda self: self.shadow.exported)
    @rule(seq=SEQUENCES, which=SEQUENCES, waits=st.booleans(), tell=st.booleans(), more=st.none() | TOKENS)
    def import_(self, seq, which, waits, tell, more):
        """Under any number that is free; perhaps only if ``more`` tokens then find room as well."""
        seq %= self.config.sequences
        exported = self.pick(which, self.shadow.exported)
        if seq in self.shadow.plans:
            return
        before = self.state()
        plan, text, _, _ = self.shadow.exported[exported]
        upto = min(len(text) + (more or 0), max(plan.final_tokens, len(text)))
        try:
            assert self.policy.import_(seq, exported, upto=upto, waits=waits) == ()
        except OutOfCells:
            assert self.state() == before
            return
        held = exported.tokens
        self.seen.add("imported")
        if not self.shadow.import_(seq, exported) and tell:
            self.policy.open(seq, self.shadow.plans[seq])
        self.shadow.carry()
        if upto > held:
            self.allocate([Chunk(seq, held, upto - held)], sure=True)

    @precondition(lambda self: self.shadow.exported)
    @rule(which=SEQUENCES)
    def drop_export(self, which):
        exported = self.pick(which, self.shadow.exported)
        self.policy.drop_export(exported)
        del self.shadow.exported[exported]

    def fetch(self, content, prompt):
        """What is brought in ahead of its use takes no cell from any sequence."""
        maps, usage, sequences, _ = self.state()
        n = len(self.policy.fetch(content, prompt))
        after = self.policy.usage()
        assert (self.state()[0], self.state()[2]) == (maps, sequences)
        assert (after.stored, after.allocated) == (usage.stored, usage.allocated)
        if n:
            assert len(self.policy.fetch(content, prompt)) == 0
            assert self.policy.match(99, content, prompt) >= n * self.policy.block_size
            assert all(block >= 0 for block in self.policy.admission.found(99))
        self.shadow.carry()

    # Tidying

    @precondition(can("compact"))
    @rule()
    def compact(self):
        before = self.policy.usage().external_fragmentation
        self.shadow.moves_unreported |= self.policy.compact().n_runs > 0
        assert self.policy.usage().external_fragmentation <= before + 1e-12
        if self.policy.name in PACK_EVERYTHING:
            assert self.policy.usage().free_extents <= 1

    @precondition(can("idle"))
    @rule()
    def idle(self):
        self.shadow.move(self.policy.idle())

    # Helpers

    def pick(self, which, among=None):
        among = sorted(self.shadow.plans if among is None else among)
        return among[which % len(among)]

    def state(self):
        return checks.state_of(self.policy, self.shadow)

    @contextmanager
    def unless_unsupported(self, never=False):
        before = self.state()
        try:
            yield
        except Unsupported:
            assert not never
            assert self.state() == before
