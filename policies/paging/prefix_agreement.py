"""How much of a text is cached in all groups: vLLM 0.33.0's ``HybridKVCacheCoordinator.find_longest_cache_hit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from policies.content import Key
from policies.paging.blocks import NULL
from policies.paging.cache_groups import GroupBlocks


class Agreed(NamedTuple):
    """What was found of a text."""

    tokens: int
    blocks: tuple[list[int], ...]
    """For each group, with ``NULL`` where no block is needed."""
    junction: int = 0
    """Tokens of the longest prefix that some groups had where others had less; 0 if there is none."""


class PrefixAgreement:
    """Looks for prefixes that several groups have."""

    def __init__(self, groups: Sequence[GroupBlocks]):
        self._groups = groups
        alike: dict[object, list[GroupBlocks]] = {}
        for group in groups:
            alike.setdefault((group.spec.kind, group.size, group.spec.span), []).append(group)
        for first, *others in alike.values():
            first.alike = others
        self._kinds = sorted(alike.values(), key=lambda of: not of[0].keeps_all)
        """Groups that are alike; those that keep all come first."""
        self._simple = len(self._kinds) == 2 and self._kinds[0][0].keeps_all
        """Whether one round is enough."""

    def find(self, keys: Sequence[Key], most: int) -> Agreed:
        """The longest prefix, of at most ``most`` tokens, that is cached in all groups.

        Each kind of group accepts the length that the one before has found, or shortens it, until all accept it.
        """
        found: dict[GroupBlocks, list[int]] = {}
        length, longest = most, 0
        while True:
            now = length
            for group, *others in self._kinds:
                if group.keeps_all and group in found:
                    now = min(now, len(found[group]) * group.size)
                    continue
                found[group] = blocks = group.look_up(keys, now)
                for other in others:
                    found[other] = [NULL if b == NULL else other.find(keys, at) or NULL for at, b in enumerate(blocks)]
                now = len(blocks) * group.size
                longest = max(longest, now)
            if now >= length:
                break
            length = now
            if self._simple:
                break
        for group in self._groups:
            if group.keeps_all:
                del found[group][-(-length // group.size) :]
        junction = longest if len(self._groups) > 1 and longest > length else 0
        return Agreed(length, tuple(found[group] for group in self._groups), junction)
