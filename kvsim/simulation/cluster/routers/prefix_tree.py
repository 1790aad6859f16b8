"""What a router remembers of the prompts that it has sent where: one radix tree for all servers.

As the trees of vllm-router 0.1.17 (``src/tree.rs``), sglang-router 0.3.2 (``src/policies/tree.rs``) and smg 1.13.0
(``crates/kv_index/src/string_tree.rs``), which are one tree with a few lines of difference: each node has the servers
that got its text and when each last did, in matches and insertions; only where an insertion ends is that time noted,
so that a node which becomes a leaf again counts as the oldest. Theirs hold characters, this one holds runs of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from policies.content import TextSegment

_NO_CHILDREN: dict[tuple[int, int], Node] = {}
"""Of all leaves; most nodes are."""
_TOUCHED_EVERY = 8
"""A match is noted as a use only where the clock is a multiple of this (``epoch & 7 == 0``)."""
MOST_HOLDERS = 8
"""Servers that smg considers of those that a text was sent to (``MATCHED_TENANTS_CAP``)."""


class Node:
    """A run of text, which continues that of its parent."""

    __slots__ = ("children", "last", "parent", "size", "text", "used")

    def __init__(self, parent: Node | None, text: list[TextSegment], size: int, used: dict[int, int]):
        self.parent = parent
        self.text = text
        self.size = size
        """Tokens of ``text``."""
        self.used = used
        """The servers that got it, and when each last did; 0 where others' texts go on from here."""
        self.children = _NO_CHILDREN
        """By the source and place of their first token."""
        self.last: int | None = None
        """The server that a match is said to be of: the first that got the text, while it is among ``used``."""

    def begin(self) -> tuple[int, int]:
        """The source and place of its first token, under which its parent has it."""
        return self.text[0][:2]

    def add(self, child: Node) -> None:
        """Have another node below this."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        self.children[child.begin()] = child


class Found:
    """How far a text is in the tree."""

    __slots__ = ("matched", "offset", "partly", "path", "segment", "text")

    def __init__(self, text: Sequence[TextSegment], path: list[Node]):
        self.text = text
        self.path = path
        """The nodes that the text contains as a whole, from the root on."""
        self.partly: Node | None = None
        """The node within which the text leaves the tree."""
        self.matched = 0
        """Tokens that are in the tree."""
        self.segment = self.offset = 0
        """Where the text leaves the last node of the path: the index of a segment, and tokens into it."""

    @property
    def node(self) -> Node:
        """The node in which the match ends."""
        return self.partly or self.path[-1]


class PrefixTree:
    """The prompts that each of several servers got."""

    def __init__(self, servers: int):
        self.root = Node(None, [], 0, dict.fromkeys(range(servers), 0))
        self.sizes = [0] * servers
        """Tokens of the nodes that each server is in."""
        self._clock = servers  # Each is inserted with an empty text at the start.

    def find(self, text: Sequence[TextSegment]) -> Found:
        """How far a text is in the tree, which stays as it is."""
        node = self.root
        found = Found(text, [node])
        segment = offset = 0
        while segment < len(text):
            source, start, length = text[segment]
            child = node.children.get((source, start + offset))
            if child is None:
                break
            size = child.size
            if len(child.text) == 1 and size <= length - offset:  # As it is most of the time.
                shared = size
                offset += size
                if offset == length:
                    segment, offset = segment + 1, 0
            else:
                shared, segment, offset = _shared(child.text, text, segment, offset)
            found.matched += shared
            if shared < size:
                found.partly = child
                break
            found.path.append(child)
            found.segment, found.offset = segment, offset
            node = child
        return found

    def owner(self, found: Found) -> int:
        """The server that a match is said to be of; now and then the match counts as a use."""
        node = found.node
        if node.last is None or node.last not in node.used:
            node.last = next(iter(node.used))  # Of several, the real trees take any.
        if self._clock % _TOUCHED_EVERY == 0:
            node.used[node.last] = self._clock
        self._clock += 1
        return node.last

    def matches(self, found: Found) -> list[int]:
        """Tokens of the text that each server has got before."""
        longest = [0] * len(self.sizes)
        matched = 0
        for node in found.path[1:]:
            matched += node.size
            for server in node.used:
                longest[server] = matched
        if found.partly is not None:
            for server in found.partly.used:
                longest[server] = found.matched
        return longest

    def insert(self, found: Found, server: int) -> None:
        """Note that a text that was looked up just now goes to a server."""
        for node in found.path:
            if server not in node.used:
                node.used[server] = 0
                self.sizes[server] += node.size
        node, text, segment, offset = found.path[-1], found.text, found.segment, found.offset
        if found.partly is not None:
            node, segment, offset = self._split(found, server)
        rest = _rest(text, segment, offset)
        if rest:
            size = sum(length for _, _, length in rest)
            leaf = Node(node, rest, size, {server: self._clock})
            leaf.last = server
            node.add(leaf)
            self.sizes[server] += size
        else:
            node.used[server] = self._clock
        self._clock += 1

    def _split(self, found: Found, server: int) -> tuple[Node, int, int]:
        """Divide the node within which a text leaves the tree; its first part, and where the text goes on."""
        old, parent = found.partly, found.path[-1]
        assert old is not None
        shared, segment, offset = _shared(old.text, found.text, found.segment, found.offset)
        head, tail = _cut(old.text, shared)
        new = Node(parent, head, shared, dict(old.used))
        new.last = old.last
        parent.add(new)
        old.parent, old.text, old.size = new, tail, old.size - shared
        new.add(old)
        if server not in new.used:
            new.used[server] = 0
            self.sizes[server] += shared
        return new, segment, offset

    def evict(self, most: int, *, together: bool = False) -> None:
        """Remove the least recently used leaves of each server that has more than ``most`` tokens.

        ``together``: of whichever server, until all have no more than that in sum, as in smg.
        """
        over = {server for server, size in enumerate(self.sizes) if together or size > most}
        total = sum(self.sizes)
        if not over or (together and total <= most):
            return
        nodes = self._below()
        followed = Counter((node.parent, server) for node in nodes for server in node.used if server in over)
        number = count()  # Equal ages: in the order of the walk; in the real trees in none.
        leaves = ((node, server) for node in nodes for server in node.used if server in over)
        heap = [
            (node.used[server], next(number), server, node) for node, server in leaves if not followed[node, server]
        ]
        heapify(heap)
        while heap and (total > most if together else over):
            _, _, server, node = heappop(heap)
            if server not in over:
                continue
            del node.used[server]
            self.sizes[server] -= node.size
            total -= node.size
            if not together and self.sizes[server] <= most:
                over.discard(server)
            parent = node.parent
            assert parent is not None
            if not node.used and not node.children:
                del parent.children[node.begin()]
            followed[parent, server] -= 1
            if parent is not self.root and not followed[parent, server]:
                heappush(heap, (parent.used[server], next(number), server, parent))

    def _below(self) -> list[Node]:
        """All nodes but the root."""
        nodes = list(self.root.children.values())
        for node in nodes:
            nodes.extend(node.children.values())  # The list grows while it is walked.
        return nodes


def _shared(run: Sequence[TextSegment], text: Sequence[TextSegment], segment: int, offset: int) -> tuple[int, int, int]:
    """How many tokens of a node's run a text shares from a place on, and the place after them."""
    shared = 0
    for source, place, left in run:
        while left:
            if segment == len(text):
                return shared, segment, offset
            other, start, length = text[segment]
            if other != source or start + offset != place:
                return shared, segment, offset
            n = min(left, length - offset)
            shared += n
            place += n
            left -= n
            offset += n
            if offset == length:
                segment, offset = segment + 1, 0
    return shared, segment, offset


def _rest(text: Sequence[TextSegment], segment: int, offset: int) -> list[TextSegment]:
    """The text from a place on."""
    rest = list(text[segment:])
    if offset:
        source, start, length = rest[0]
        rest[0] = (source, start + offset, length - offset)
    return rest


def _cut(text: Sequence[TextSegment], n: int) -> tuple[list[TextSegment], list[TextSegment]]:
    """The first ``n`` tokens of a text, and the others."""
    head: list[TextSegment] = []
    for at, (source, start, length) in enumerate(text):
        if n < length:
            if n:
                head.append((source, start, n))
            return head, _rest(text, at, n)
        head.append((source, start, length))
        n -= length
    return head, []
