"""Readers from elsewhere, which installed packages register as entry points."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Container, Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from workloads.traces.trace import Trace

ENTRY_POINT_GROUP = "kvsim.readers"
"""Where other packages register readers: subclasses of ``Trace``, by the kind of trace that they read."""

_NAME = re.compile(r"[\w.+@-]+")


class ReaderWarning(UserWarning):
    """A registered reader was left out. The message is one line."""


def others(taken: Container[str]) -> dict[str, type[Trace]]:
    """The registered readers by kind, but those that cannot be imported or whose kind is taken: a warning says so."""
    found = {}
    for kind, reader, fault in _registered(entry_points):
        fault = fault or (f"{kind!r} is a kind of trace already" if kind in taken or kind in found else "")
        if reader is None or fault:
            warnings.warn(f"reader {kind!r} is left out: {fault}", ReaderWarning, stacklevel=2)
        else:
            found[kind] = reader
    return found


@cache
def _registered(
    search: Callable[..., Iterable[EntryPoint]],
) -> list[tuple[str, type[Trace] | None, str]]:
    """Kind, reader and fault of each entry point, by kind; looked for once in a process."""
    found: list[tuple[str, type[Trace] | None, str]] = []
    for point in sorted(search(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        fault, reader = "", None
        try:
            reader = point.load()
        except (Exception, SystemExit) as e:
            fault = f"it cannot be imported: {type(e).__name__}: {next(iter(str(e).splitlines()), '')}"
        if not fault and not (isinstance(reader, type) and issubclass(reader, Trace)):
            fault = f"a subclass of workloads.api.Trace is expected, got {reader!r:.60}"
        elif not _NAME.fullmatch(point.name):
            fault = "letters, digits and any of . _ + @ - are accepted in its name"
        found.append((point.name, reader, fault))
    return found
