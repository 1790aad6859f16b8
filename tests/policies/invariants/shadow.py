"""A shadow of the cache that stands in for the engine: what every cell holds, and what every sequence should hold.

Two arrays by cell say which token was written where, and by which position its key is rotated. They are changed by what
the policy reports and by nothing else; so a move, a rotation or a copy to or from the host tier that is not reported,
or in the wrong order, shows as a cell that does not hold what the policy says it holds.
"""

import numpy as np

from policies.checking import cells_by_owner
from policies.layouts.hybrid_paged import HybridPagedPolicy
from policies.layouts.paged import PagedPolicy
from policies.layouts.ring import RingOptions
from policies.layouts.token_eviction import TokenEvictionOptions
from policies.layouts.two_level import TwoLevelPolicy
from tests.policies.invariants.words import Words, places_in


class Shadow:
    """The reference state beside a policy."""

    def __init__(self, policy, config, seen, *, transfer_at_once):
        """``seen``: collects the situations that have been met. ``transfer_at_once``: copies between the tiers are
        made when they are due, not with the next micro-batch."""
        self.policy, self.config, self.note = policy, config, seen.add
        self.words = Words(policy)
        self.plans = {}
        """The plan of each open sequence."""
        self.text = {}
        """The tokens of each open sequence, in order."""
        self.says = {}
        """What each open sequence says, as places in texts; behind that it makes something up."""
        self.told_late = {}
        """The contents that grow as their sequences speak."""
        self.exported = {}
        """All of that for each sequence in the host tier."""
        self.window = {g: {} for g, group in enumerate(policy.groups) if group.window is not None}
        """The tokens that must still be there, by group with a window and by open sequence."""
        self.ring = (
            min(config.read(RingOptions).window, config.max_tokens, policy.max_sequence_tokens)
            if policy.unbounded
            else None
        )
        """Tokens of a sequence that a ring keeps."""
        self.evicts = policy.forgets and not policy.unbounded
        """Whether single tokens of a sequence may go; those of a pass stay until another step needs room."""
        self.streams = policy.groups[0].streams
        self.paged = isinstance(policy, PagedPolicy)
        self.caches = block_caches(policy)
        self.grouped = isinstance(policy, HybridPagedPolicy)
        """Whether several groups have their blocks in one pool."""
        self.in_blocks = self.grouped or bool(self.caches)
        self.moves_unreported = self.rotations_unreported = self.transfers_unreported = False
        """Whether the shadow waits for moves, rotations or transfers that the policy will report later."""
        self.ids = [np.full(group.cells, -1) for group in policy.groups]
        self.rotary = [np.full(group.cells, -(10**6)) for group in policy.groups]
        self.host_ids, self.host_rotary = (np.full(policy.groups[0].host_cells, -1) for _ in range(2))
        self._transfer_at_once = transfer_at_once

    # Sequences

    def begin(self, seq, plan, *, late=False):
        """A sequence that holds nothing yet. Returns the plan to tell the policy: all of it, or ``late`` the prompt
        now, and the answer token by token."""
        self.plans[seq], self.text[seq] = plan, []
        self.says[seq] = list(places_in(plan.content))
        for kept in self.window.values():
            kept[seq] = set()
        self.words.learn(plan.content)
        if not late:
            return plan
        grows = self.told_late[seq] = plan.content.head(plan.prompt_tokens)
        return plan._replace(content=grows)

    def match(self, seq, plan):
        """What the policy finds of a prompt."""
        hit = self.policy.match(seq, plan.content, plan.prompt_tokens)
        assert 0 <= hit < plan.prompt_tokens
        assert hit % self.policy.block_size == 0
        if self.paged and any(block < 0 for block in self.policy.admission.found(seq)):
            self.note("hit in the host tier")
        return hit

    def hold(self, seq, hit):
        """Its first tokens were in the cache."""
        self.text[seq] = self.words.spell(self.says[seq][:hit])
        if hit:
            self.note("hit")
        self.hold_window(seq)

    def hold_window(self, seq):
        """What the next token sees must be there."""
        for group, kept in self.window.items():
            kept[seq] = set(self.text[seq][self.lowest(group, len(self.text[seq])) :])

    def end(self, seq):
        """It holds nothing any more."""
        del self.plans[seq], self.text[seq], self.says[seq]
        self.told_late.pop(seq, None)
        for kept in self.window.values():
            del kept[seq]

    def forget(self, seq, tokens):
        """A sequence gave up tokens."""
        gone = set(tokens)
        self.text[seq] = [token for token in self.text[seq] if token not in gone]
        if gone:
            self.says[seq] = [self.words.place_of[token] for token in self.text[seq]]
            self.plans[seq] = self.plans[seq]._replace(content=self.words.content_of(self.text[seq]))
            self.told_late.pop(seq, None)
        for kept in self.window.values():
            kept[seq] -= gone

    def truncate(self, seq, start, *, kept):
        """It gave up all from ``start`` on; ``kept``: the policy said that it can go on with the rest."""
        self.forget(seq, self.text[seq][start:])
        if start == 0:
            self.end(seq)
        elif kept:
            self.hold_window(seq)

    def say_instead(self, seq, text):
        """From here on a sequence says something else; the plan to tell the policy."""
        content = self.words.content_of(self.text[seq])
        for segment in text:
            content.extend(segment)
        self.plans[seq] = self.plans[seq]._replace(content=content)
        self.says[seq] = list(places_in(content))
        self.words.learn(content)
        return self.plans[seq]

    def share(self, src, dst, stop):
        """One sequence sees the first tokens of another."""
        self.text[dst] = self.text[src][:stop]
        for kept in self.window.values():
            kept[dst] = kept[src] & set(self.text[dst])
        self.moves_unreported |= self.streams > 1

    def export(self, seq, exported):
        """A sequence went to the host tier."""
        assert exported not in self.exported
        self.exported[exported] = self.plans[seq], self.text[seq], self.says[seq], self.told_late.get(seq)
        self.end(seq)

    def import_(self, seq, exported):
        """A sequence came back; whether it was told late."""
        self.plans[seq], self.text[seq], self.says[seq], late = self.exported.pop(exported)
        assert exported.tokens == len(self.text[seq])
        self.hold_window(seq)
        if late is not None:
            self.told_late[seq] = late
        return late is not None

    def guess(self, step, ends):
        """Let drafts be written that say something else from ``ends`` on; what their sequences say and see before."""
        before = {seq: (self.says[seq], {group: kept[seq] for group, kept in self.window.items()}) for seq in ends}
        for seq, start, n, _ in step:
            wrong = [(self.words.private_text(), 0) for _ in range(start + n - ends[seq])]
            self.says[seq] = self.says[seq][: ends[seq]] + wrong
            for kept in self.window.values():
                kept[seq] = set(kept[seq])
        return before

    def take_back(self, seq, end, says, saw):
        """Only the first ``end`` tokens of a sequence were right."""
        self.text[seq], self.says[seq] = self.text[seq][:end], says
        self.note("drafts rejected")
        for group, kept in self.window.items():
            kept[seq] = (kept[seq] | saw[group]) & set(self.text[seq][self.lowest(group, end) :])

    def room_of(self, seq):
        """Tokens that a sequence may still be given."""
        final = 4 * self.config.max_tokens if self.policy.unbounded else self.plans[seq].final_tokens
        return max(final - len(self.text[seq]), 0)

    def window_moves_on(self, seq, end):
        """Once a sequence ends at ``end``, cells outside of the window of its next token may be used again."""
        for group, kept in self.window.items():
            kept[seq] -= set(self.text[seq][: self.lowest(group, end)])

    def lowest(self, group, position):
        """The first position that a token at ``position`` sees through a group's window."""
        window = self.policy.groups[group].window
        if self.policy.groups[group].chunked:
            return position // window * window
        return max(position + 1 - window, 0)

    # Cells

    def carry(self):
        """Copies between the tiers are made now, or left to the next micro-batch."""
        if self._transfer_at_once:
            self._transfer(self.policy.settle_transfers())
        else:
            self.transfers_unreported = True

    def _transfer(self, transfers):
        for to_host, cell, host, n in transfers:
            assert n > 0
            for near, far in ((self.ids[0], self.host_ids), (self.rotary[0], self.host_rotary)):
                here, there = near[cell : cell + n], far[host : host + n]
                assert len(here) == len(there) == n
                if to_host:
                    there[:] = here
                else:
                    here[:] = there

    def move(self, moves):
        """Moves that the policy reported at once are made in the first group."""
        moves.apply(self.ids[0])
        moves.apply(self.rotary[0])
        self.moves_unreported &= moves.n_runs == 0

    def run(self, batches, tokens):
        """Run a step's micro-batches; ``tokens``: how many each sequence gets."""
        ends = {seq: len(self.text[seq]) + n for seq, n in tokens.items()}
        for seq, end in ends.items():
            self.window_moves_on(seq, end)
        for batch in batches:
            self._forward(batch, ends, last=batch is batches[-1])
        if batches:
            self.moves_unreported = self.rotations_unreported = self.transfers_unreported = False

    def say_late(self):
        """Tell the contents that grow what has been generated."""
        for seq, content in self.told_late.items():
            for source, at in places_in(self.words.content_of(self.text[seq][content.n :])):
                content.extend((source, at, 1))

    def _forward(self, batch, ends, last):
        """One forward pass of the engine: move, rotate, write; then look at what attention may see."""
        written = self._generate(batch, ends)
        for group, place in enumerate(batch.places):
            ids, rotary = self.ids[group], self.rotary[group]
            assert group == 0 or not place.transfers
            self._transfer(place.transfers)
            if self.in_blocks and place.moves.n_runs:
                self.note("copied on write")
            if self.evicts and place.moves.n_runs:
                self.note("compacted")
            for array in (ids, rotary):
                place.moves.apply(array)
            assert len(set(place.shift.cells.tolist())) == len(place.shift.cells)
            rotary[place.shift.cells] += place.shift.deltas
            firsts = np.cumsum([chunk.n for chunk in batch.chunks])[:-1]
            for chunk, view, own in zip(batch.chunks, place.views, np.split(place.cells, firsts), strict=True):
                ids[own], rotary[own] = written[chunk.seq], view.positions[-chunk.n :]
                if self.ring is None:
                    assert rotary[own].tolist() == list(range(chunk.start, chunk.start + chunk.n))
            cells_of = cells_by_owner(self.policy.occupancy(group))
            for chunk, view, own in zip(batch.chunks, place.views, np.split(place.cells, firsts), strict=True):
                cells, positions = view.cells.tolist(), view.positions.tolist()
                assert cells[-chunk.n :] == own.tolist()
                assert ids[cells].tolist() == self.tokens_at(group, chunk.seq, positions)
                assert rotary[cells].tolist() == positions
                if last:
                    assert (cells, positions) == cells_of[chunk.seq]
            if group not in self.window:
                assert place.reads.useful.tolist() == [len(view.cells) for view in place.views]

    def _generate(self, batch, ends):
        """The tokens that each sequence gets; they are its own from now on."""
        written = {}
        for chunk in batch.chunks:
            text = self.text[chunk.seq]
            assert (chunk.start, chunk.also) == (len(text), ())
            more = self.says[chunk.seq][chunk.start : chunk.start + chunk.n]
            more += [(self.words.private_text(), 0) for _ in range(chunk.n - len(more))]
            written[chunk.seq] = self.words.spell(more, text[-1] if text else None)
            text += written[chunk.seq]
            for group, kept in self.window.items():
                kept[chunk.seq] |= set(text[max(self.lowest(group, ends[chunk.seq]), chunk.start) :])
        return written

    def tokens_at(self, group, seq, positions):
        """The tokens that a sequence should hold, given at which ascending positions the policy holds some.

        Fails unless these are all that its layout promises to keep, each once.
        """
        text = self.text[seq]
        if self.evicts:
            assert len(positions) >= min(len(text), self.config.read(TokenEvictionOptions).budget)
            if len(positions) < len(text):
                self.note("evicted")
            return [text[position] for position in positions]
        if group in self.window:
            tokens = [text[position] for position in positions]
            assert self.window[group][seq] <= set(tokens)
            return tokens
        if self.ring is None or len(text) <= self.ring:
            assert self.ring is None or positions == list(range(len(text)))
            return text
        sinks = min(self.config.read(RingOptions).sinks, self.ring - 1)
        newest = self.ring - sinks
        assert positions[:sinks] == list(range(sinks))
        first = positions[sinks]
        assert positions[sinks:] == list(range(first, first + newest))
        assert sinks <= first <= max(self.config.max_tokens, self.ring) - newest
        return text[:sinks] + text[len(text) - newest :]


def block_caches(policy):
    """The paged caches that a policy is made of, if it is, each with the first group whose cells are its blocks'."""
    if isinstance(policy, TwoLevelPolicy):
        return [(policy.part_of.index(part), part) for part in policy.parts]
    return [(0, policy)] if isinstance(policy, PagedPolicy) else []
