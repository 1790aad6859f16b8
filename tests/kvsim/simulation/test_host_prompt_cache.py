"""llama-server's host cache against a slow list that follows its rules word for word, saves and looks in any order."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.schedulers.host_prompt_cache import MIB, HostPromptCache
from kvsim.simulation.set_up import build_policy
from policies import NOTHING, Content

CONTEXT = 512


def scenario(cache_ram, policy="contiguous", window=None):
    """A small cache of a model whose states take about 4 kB a token."""
    cache = {"policy": policy, "cells": CONTEXT, "unified": True} | ({"window": window} if window else {})
    return load_scenario({"workload": {}, "server": {"slots": 2, "cache_ram": cache_ram}, "cache": cache})


def cache_of(cache_ram, policy="contiguous", window=None):
    world = scenario(cache_ram, policy, window)
    return HostPromptCache(world, build_policy(world)), world.cell_bytes


def tokens(content):
    """A text token by token."""
    return [tuple(token) for token in content.tokens().tolist()]


def common(one, other):
    """Number of tokens that both lists begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Listed:
    """The rules in their words: a list of token sequences with their bytes, oldest first."""

    def __init__(self, limit_mib, cell_bytes, layers):
        self.limit = None if limit_mib < 0 else limit_mib * MIB
        self.cell_bytes, self.layers = cell_bytes, layers
        self.entries = []

    def size(self, text):
        """Each token's K and V and 12 bytes; 24 for each layer, and 32."""
        return round(len(text) * (self.cell_bytes + 12)) + 24 * self.layers + 32

    @property
    def bytes(self):
        return sum(self.size(text) for text in self.entries)

    def save(self, text):
        """Whether it was saved."""
        if not text or any(entry[: len(text)] == text for entry in self.entries):
            return False
        if self.limit is not None and self.size(text) > self.limit:
            return False
        self.entries = [entry for entry in self.entries if text[: len(entry)] != entry]
        while self.limit is not None and self.entries and self.bytes + self.size(text) > self.limit:
            self.entries.pop(0)
        self.entries.append(text)
        return True

    def look(self, held, prompt):
        """The number of the entry to bring back; None if there is none."""
        keep = Fraction(common(held, prompt), len(held)) if held else -1
        similarity = Fraction(common(held, prompt), len(prompt))
        best = None
        for i, entry in enumerate(self.entries):
            kept = Fraction(common(entry, prompt), len(entry))
            similar = Fraction(common(entry, prompt), len(prompt))
            if kept >= Fraction(1, 4) and kept > keep and similar > similarity:
                keep, similarity, best = kept, similar, i
        return best

    def enforce(self):
        """The oldest go while there are too many bytes, or too many tokens."""
        while self.limit is not None and self.bytes > self.limit:
            self.entries.pop(0)
        held = sum(map(len, self.entries))
        most = CONTEXT
        if self.limit is not None and held:
            most = max(most, self.limit * held // self.bytes)
        while sum(map(len, self.entries)) > most:
            self.entries.pop(0)


texts = st.builds(
    lambda parts: Content((source, start, n) for source, start, n in parts),
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([0, 0, 0, 60]), st.sampled_from([1, 20, 60, 150, 300])),
        min_size=1,
        max_size=3,
    ),
).map(lambda content: content.head(CONTEXT))


class HostCacheMachine(RuleBasedStateMachine):
    """Saves what slots held, looks for prompts, brings back what is found, and enforces the limits."""

    @initialize(limit=st.sampled_from([1, 2, 3, -1]))
    def begin(self, limit):
        self.cache, cell_bytes = cache_of(limit)
        self.listed = Listed(limit, cell_bytes, scenario(limit).model.shape.n_layers)
        self.most = 0

    @rule(text=texts)
    def save(self, text):
        entry = self.cache.save(text)
        saved = self.listed.save(tokens(text))
        assert (entry is not None) == saved
        event(f"saved: {saved}")
        self.most = max(self.most, self.listed.bytes)
        self.enforce()

    @rule(held=st.one_of(st.just(NOTHING), texts), prompt=texts)
    def look(self, held, prompt):
        self.find(held, prompt)

    @rule(data=st.data(), held=st.one_of(st.just(NOTHING), texts))
    def look_for_more_of_an_entry(self, data, held):
        """A prompt that goes on from a text that is held, or from its beginning."""
        if self.cache.entries:
            entry = data.draw(st.sampled_from(range(self.cache.prompts)))
            text = self.cache.entries[entry].content
            prompt = text.head(data.draw(st.integers(1, text.n)))
            prompt.extend((9, 0, data.draw(st.sampled_from([1, 30, 400]))))
            self.find(held, prompt)

    def find(self, held, prompt):
        entry, number = self.cache.find(held, prompt), self.listed.look(tokens(held), tokens(prompt))
        event(f"found: {number is not None}")
        assert (entry is None) == (number is None)
        if entry is not None:
            assert self.cache.entries.index(entry) == number
            self.cache.remove(entry)
            del self.listed.entries[number]
        self.enforce()

    def enforce(self):
        self.cache.enforce_limits()
        self.listed.enforce()

    @invariant()
    def the_entries_are_those_of_the_list(self):
        assert [tokens(entry.content) for entry in self.cache.entries] == self.listed.entries
        assert self.cache.prompts == len(self.listed.entries)
        assert self.cache.bytes == self.listed.bytes == sum(entry.bytes for entry in self.cache.entries)
        assert self.cache.tokens == sum(map(len, self.listed.entries))
        assert self.cache.most_bytes == self.most

    @invariant()
    def nothing_is_held_beyond_the_limit(self):
        limit = self.cache.limit_bytes
        assert self.cache.bytes <= limit if limit else self.cache.tokens <= CONTEXT

    @invariant()
    def each_token_has_a_cell_of_its_own(self):
        cells = [entry.cells for entry in self.cache.entries]
        assert [len(each) for each in cells] == [entry.content.n for entry in self.cache.entries]
        taken = np.concatenate([*cells, np.zeros(0, dtype=np.int64)])
        assert len(np.unique(taken)) == len(taken)
        assert not any(start <= cell < end for cell in taken.tolist() for start, end in self.cache._host._free)
        assert self.cache._host._free.size - self.cache._host._free.total == len(taken)


@pytest.mark.slow
class TestHostCache(HostCacheMachine.TestCase):
    settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("cache_ram", [1, -1])
@pytest.mark.parametrize(("policy", "window"), [("sliding-window", 16), ("sliding-window", None), ("streams", None)])
def test_there_is_room_for_all_that_the_limit_allows(cache_ram, policy, window):
    """Also where a window makes states smaller than the cells of their tokens."""
    cache, _ = cache_of(cache_ram, policy, window)
    for source in range(200):
        assert cache.save(Content([(source, 0, 50 + source)])) is not None
        cache.enforce_limits()
    assert cache.prompts > 0


def test_what_is_larger_than_the_limit_is_not_saved():
    cache, cell_bytes = cache_of(1)
    most = int((MIB - 1000) / (cell_bytes + 12))
    assert cache.save(Content([(0, 0, most)])) is not None
    assert cache.save(Content([(1, 0, most + 20)])) is None
    assert cache.prompts == 1


def test_the_oldest_entries_make_room():
    """An entry that is brought back and saved again is the newest."""
    cache, cell_bytes = cache_of(1)
    each = int(MIB / (cell_bytes + 12) / 3.5)
    for source in (0, 1, 2):
        cache.save(Content([(source, 0, each)]))
    again = cache.find(NOTHING, Content([(0, 0, each + 5)]))
    cache.remove(again)
    cache.save(again.content)
    cache.save(Content([(3, 0, each)]))
    assert [next(iter(entry.content))[0] for entry in cache.entries] == [2, 0, 3]
