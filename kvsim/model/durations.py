"""How durations are written in messages."""

from __future__ import annotations


def about(duration_s: float) -> str:
    """How long something takes, in words: ``about 3 min 46 s``."""
    minutes, left = divmod(round(duration_s), 60)
    return f"about {minutes} min {left} s" if minutes else f"about {left} s"
