"""The preset ``radix-tree`` against a radix tree written down plainly: the same hits, and the same evictions."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import CacheConfig, Chunk, Content, SequencePlan, available

ANSWERS = 1000
"""The first source of what is generated, which no other sequence says."""


@dataclass(eq=False)
class Node:
    """A token, behind all tokens above it."""

    parent: "Node | None" = None
    token: object = None
    children: dict = field(default_factory=dict)
    holders: int = 0
    used: int = 0


class Tree:
    """Zheng et al., section 3: least recently used leaves go first, and none that a running request holds."""

    def __init__(self, cells):
        self.root, self.free, self.clock = Node(), cells, 0
        self.paths = {}

    def nodes(self):
        pending = [*self.root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending += node.children.values()

    def match(self, tokens):
        """The nodes that a text begins with."""
        path, node = [], self.root
        for token in tokens:
            if token not in node.children:
                break
            node = node.children[token]
            path.append(node)
        return path

    def begin(self, seq, tokens):
        """How many tokens were found; None if there is no room."""
        found = self.match(tokens[:-1])
        idle = sum(1 for node in self.nodes() if not node.holders and node not in found)
        if len(tokens) - len(found) > self.free + idle:
            return None
        self.paths[seq] = []
        for node in found:
            self.hold(seq, node)
        for token in tokens[len(found) :]:
            self.append(seq, token)
        return len(found)

    def hold(self, seq, node):
        node.holders += 1
        self.paths[seq].append(node)

    def append(self, seq, token):
        """False if there is no cell for one more token."""
        if not self.free:
            leaves = [node for node in self.nodes() if not node.holders and not node.children]
            if not leaves:
                return False
            oldest = min(leaves, key=lambda node: node.used)
            del oldest.parent.children[oldest.token]
            self.free += 1
        self.free -= 1
        parent = self.paths[seq][-1] if self.paths[seq] else self.root
        node = parent.children[token] = Node(parent, token)
        self.hold(seq, node)
        return True

    def end(self, seq):
        self.clock += 1
        for node in self.paths.pop(seq):
            node.holders -= 1
            node.used = self.clock


def spelled(content):
    return list(map(tuple, content.tokens().tolist()))


def radix_tree(cells):
    """The preset with so many cells besides the one that is never handed out."""
    return available()["radix-tree"](CacheConfig(cells + 1, sequences=8, max_tokens=200))


def begin(policy, seq, content, prompt):
    """Serve a prompt; how many tokens were found, or None if there is no room."""
    found = policy.match(seq, content, prompt)
    policy.open(seq, SequencePlan(prompt, 200, content.n, content))
    if not policy.reserve(Chunk(seq, found, prompt - found)):
        policy.free(seq)
        return None
    policy.allocate([Chunk(seq, found, prompt - found)])
    return found


BEGINNINGS = [(), ((0, 0, 12),), ((0, 0, 5),), ((0, 0, 12), (1, 0, 9)), ((0, 0, 12), (2, 0, 9)), ((3, 0, 20),)]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from(BEGINNINGS), st.integers(1, 9)),
        st.tuples(st.just("decode"), st.integers(0, 3), st.integers(1, 6)),
        st.tuples(st.just("end"), st.integers(0, 3), st.just(0)),
    ),
    max_size=40,
)


@pytest.mark.slow
@given(cells=st.integers(20, 90), steps=STEPS)
@settings(max_examples=50, deadline=None)
def test_finds_and_evicts_what_a_radix_tree_does(cells, steps):
    compare(cells, steps)


def test_the_comparison_meets_hits_evictions_and_refusals():
    chats = [("begin", ((0, 0, 12), (source, 0, 9)), 4) for source in (1, 2, 1)]
    policy = compare(
        40, [*chats, ("end", 0, 3), ("end", 0, 2), ("begin", ((3, 0, 20),), 5), ("begin", ((3, 0, 20),), 6)]
    )
    assert policy.met == {"hit", "evicted", "refused"}


def compare(cells, steps):
    """Take the steps in both, comparing all that can be seen; returns the policy, with what it met."""
    policy, tree, texts, running = radix_tree(cells), Tree(cells), [], {}
    policy.met = set()
    policy.pool.on_evict = lambda block, key: policy.met.add("evicted")
    for kind, which, n in steps:
        if kind == "begin":
            seq = next(seq for seq in range(len(running) + 1) if seq not in running)
            # Each prompt ends with tokens of its own, and each answer is its own.
            content = Content([*which, (10 + len(texts), 0, n)])
            prompt = content.n
            content.extend((ANSWERS + len(texts), 0, 60))
            found = begin(policy, seq, content, prompt)
            assert found == tree.begin(seq, spelled(content)[:prompt])
            texts.append(content)
            policy.met |= {"refused"} if found is None else {"hit"} if found else set()
            if found is not None:
                running[seq] = (content, prompt)
        elif running:
            seq = sorted(running)[which % len(running)]
            content, length = running[seq]
            for _ in range(n):
                room = policy.reserve(Chunk(seq, length, 1))
                assert room == tree.append(seq, spelled(content)[length])
                if not room:
                    break
                policy.allocate([Chunk(seq, length, 1)])
                length += 1
            running[seq] = content, length
            if kind == "end":
                policy.free(seq)
                tree.end(seq)
                del running[seq]
        assert policy.pool.n_cached == sum(1 for _ in tree.nodes())
        for content in texts:
            assert policy.cached_tokens(content, content.n) == len(tree.match(spelled(content)[:-1]))
    return policy


def test_a_prompt_that_is_cached_as_a_whole_keeps_its_last_token_twice():
    """It is computed for what follows. A radix tree drops the copy; a block pool keeps both under one key."""
    policy, tree, text = radix_tree(40), Tree(40), Content([(0, 0, 10)])
    for _ in range(2):
        begin(policy, 0, text, 10)
        policy.free(0)
        tree.begin(0, spelled(text))
        tree.end(0)
    assert policy.pool.n_cached == sum(1 for _ in tree.nodes()) == 10
    assert policy.usage().cached == 11


def test_finds_what_blocks_of_sixteen_do_not():
    contents = [Content([(0, 0, 30), (1 + number, 0, 5)]) for number in range(2)]
    found = {}
    for name in ("radix-tree", "vllm"):
        policy = available()[name](CacheConfig(160, sequences=2, max_tokens=64))
        found[name] = [begin(policy, seq, content, 35) for seq, content in enumerate(contents)]
    assert found == {"radix-tree": [0, 30], "vllm": [0, 16]}
