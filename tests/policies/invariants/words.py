"""Numbers that stand for tokens, and the texts that sequences say."""

from itertools import count

from policies import Content, Policy, SequencePlan
from policies.layouts.hybrid_paged import HybridPagedPolicy

PRIVATE = 1 << 20
"""Texts from here on are said by one sequence only."""


class Words:
    """Numbers tokens such that a number stands for a token and for all that came before it in its sequence.

    That is what K and V depend on, so a block found in the wrong place shows even where its own tokens are right. Where
    a policy finds nothing by content each token has a number of its own, so that a copy cannot pass for the original.
    """

    def __init__(self, policy):
        self.by_content = type(policy).match is not Policy.match
        """Whether the policy finds prefixes by their content."""
        self._block_size = policy.blocks.hashed if isinstance(policy, HybridPagedPolicy) else policy.block_size
        self._lookahead = policy.blocks.key_lookahead if isinstance(policy, HybridPagedPolicy) else 0
        self._fresh = count()
        self._sources = count(PRIVATE)
        self._requests = count()
        self._numbers = {}
        """A token's number, by the number before it (or None) and its place in a text."""
        self.place_of = []
        """Text and offset of each number."""
        self.block_text = {}
        """The numbers that a block must hold, by its key."""

    def plan(self, prompt, more, text, most):
        """A plan for a sequence of at most ``most`` tokens: a prompt, and an answer that no other sequence says."""
        prompt, final = min(prompt, most), min(prompt + more, most)
        content = Content(text).head(prompt)
        content.extend((self.private_text(), 0, final - content.n))
        return SequencePlan(prompt, most, final, content, next(self._requests), kind=len(text))

    def private_text(self):
        """A text that no sequence has said yet."""
        return next(self._sources)

    def spell(self, places, after=None):
        """The numbers of the tokens at these places behind the token ``after``."""
        text = []
        for place in places:
            name = (after, place) if self.by_content else next(self._fresh)
            if name not in self._numbers:
                self._numbers[name] = len(self.place_of)
                self.place_of.append(place)
            after = self._numbers[name]
            text.append(after)
        return text

    def content_of(self, text):
        """What tokens of these numbers say."""
        return Content((source, at, 1) for source, at in (self.place_of[token] for token in text))

    def learn(self, content):
        """Remember which tokens the blocks of a text must hold."""
        if self.by_content:
            size, text = self._block_size, self.spell(places_in(content))
            for at, key in enumerate(content.keys(size, content.n // size, self._lookahead)):
                tokens = text[at * size : (at + 1) * size]
                assert self.block_text.setdefault(key, tokens) == tokens


def places_in(content):
    """Text and offset of each token."""
    return ((source, start + i) for source, start, n in content for i in range(n))
