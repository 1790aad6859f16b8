"""What a server says of its decisions: for comparisons with the log of a real one."""

from __future__ import annotations

from typing import Any, Protocol


class DecisionLog(Protocol):
    """Hears of every decision, by the kind and the fields that recordings of llama-server give it."""

    def __call__(self, kind: str, **fields: Any) -> None:
        """A decision was made."""
        ...


def no_log(kind: str, **fields: Any) -> None:
    """Hear nothing."""
