"""Errors that are not bugs in kvsim: wrong input, settings that cannot work, engines that differ from their model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_MEANT = 3
"""Names that may have been meant; others are left out."""
_MANY, _SOME = 50, 12
"""Names beyond which only some are listed, and how many."""
_CLOSE = 0.6
"""Similarity from which a name may have been meant, as in ``difflib.get_close_matches``."""
_AS_CLOSE = 0.1
"""A name that is less similar than the closest by more than this was not meant."""


def no_such(what: str, given: str, known: Iterable[str]) -> str:
    """Say in a line that there is no ``what`` of a name, which name may have been meant, and which there are."""
    return f"no {what} called {given!r:.80}; {choices(given, known)}"


def choices(given: str, known: Iterable[str]) -> str:
    """Say which name may have been meant, and which there are."""
    names = list(known)
    hint = did_you_mean(given, names)
    there = "there is" if len(names) == 1 else "there are"
    listed = ", ".join(names if len(names) <= _MANY else names[:_SOME])
    more = f" and {len(names) - _SOME} others" if len(names) > _MANY else ""
    return f"{f'{hint} {there.capitalize()}' if hint else there} {listed}{more}"


def counted(n: int, noun: str) -> str:
    """A number of things, such as ``1 request`` or ``2,048 cells``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def did_you_mean(given: str, known: Iterable[str], rest: str = "") -> str:
    """Ask whether a similar name was meant: "did you mean 'paged'?"; empty if none is similar.

    ``rest`` is put after each name.
    """
    from difflib import SequenceMatcher

    pairs = {name: SequenceMatcher(None, given.casefold(), name.casefold()) for name in known}
    # The bound leaves out long texts, which would take seconds.
    alike = {name: pair.ratio() for name, pair in pairs.items() if pair.real_quick_ratio() >= _CLOSE}
    least = max(_CLOSE, max(alike.values(), default=0.0) - _AS_CLOSE)
    close = sorted((name for name in alike if alike[name] >= least), key=lambda name: -alike[name])
    return f"did you mean {' or '.join(repr(name + rest) for name in close[:_MEANT])}?" if close else ""


def unknown(what: str, given: str, known: Iterable[str], rest: str = "") -> str:
    """Say that this ``what`` is unknown, which may have been meant or, if none is similar, which are accepted."""
    names = list(known)
    return f"unknown {what}; {did_you_mean(given, names, rest) or 'accepted: ' + ', '.join(names)}"


LIMITS = "; docs/limits.md has what kvsim cannot do"
"""Ends a refusal of what is not wrong, but not simulated."""


class UserError(ValueError):
    """The user's input is wrong. The message has one line for each fault and says what is accepted."""


class NoTimes(UserError):
    """The machine profile was measured with another model or cache than is served, so nothing is known of times.

    The message has one line: what was measured, what is served, and how to get the times.
    """

    def __init__(self, message: str, scenario: Any = None):
        super().__init__(message)
        self.scenario = scenario
        """The ``Scenario`` that was asked about, if known."""


class Divergence(Exception):
    """Two implementations that should agree do not: a bug in kvsim, or an engine that was built differently.

    The message is one line.
    """


class Livelock(UserError):
    """The server makes no progress and never will: these settings cannot serve this traffic.

    The message names the requests, how many cells or blocks they wait for, and how many are free.
    """

    def __init__(self, message: str, requests: tuple[int, ...] = ()):
        super().__init__(message)
        self.requests = requests
        """Numbers of the requests that wait."""
