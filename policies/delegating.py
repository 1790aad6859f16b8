"""A policy around another, for those that watch it, or do elsewhere what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from policies.policy import Policy
from policies.vocabulary import CellMap, Chunk, MicroBatch

if TYPE_CHECKING:
    from policies.placement.rule import PlacementRule


DECLARED = [name for kind in reversed(Policy.__mro__) for name in vars(kind).get("__annotations__", ())]
"""The attributes that every policy has."""


class DelegatingPolicy(Policy):
    """Has the attributes of the policy within, and leaves every method to it; a subclass adds what else is to happen.

    It has no placement rule: what is placed by one would not pass through it. The methods that are not written out here
    are added below.
    """

    def __init__(self, inner: Policy):
        self.inner = inner
        for attribute in DECLARED:
            setattr(self, attribute, getattr(inner, attribute))

    @property
    def max_sequence_tokens(self) -> int:
        """What the inner policy can hold."""
        return self.inner.max_sequence_tokens

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Place the step in the inner policy."""
        return self.inner.allocate(step, views=views)

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Take the positions from the inner policy."""
        self.inner.free(seq, start, stop)

    def occupancy(self, group: int = 0) -> CellMap:
        """The cells of the inner policy."""
        return self.inner.occupancy(group)

    def placement_rule(self) -> PlacementRule | None:
        """None, so that every step passes through ``allocate``."""
        return None


def _ask_inner(name: str) -> Callable[..., Any]:
    """A method that calls the inner policy's method of the same name."""

    @wraps(getattr(Policy, name))
    def method(self: DelegatingPolicy, *args: Any, **options: Any) -> Any:
        return getattr(self.inner, name)(*args, **options)

    return method


for _name in dir(Policy):
    if callable(getattr(Policy, _name)) and not _name.startswith("_") and _name not in vars(DelegatingPolicy):
        setattr(DelegatingPolicy, _name, _ask_inner(_name))
