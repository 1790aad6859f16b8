"""Names that others may add to, in installed packages or in single files: orders of eviction, schedulers.

Built-in ones are looked up first, so that a run which names nothing else never looks for packages.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from policies.origin import Origin

NAME = re.compile(r"[\w.+=@-]+")
"""A name that others may give: it becomes part of the names of files."""


class PluginError(ValueError):
    """A plug-in cannot be used. The message is one line; it names the package or the file, and the line if known."""


class PluginWarning(UserWarning):
    """A registered plug-in was left out. The message is one line."""


FILES: dict[str, tuple[Origin, dict[str, Any]]] = {}
"""The files that were loaded (``plugins.load_plugin``), by path, each with all names that it defines."""


class Registry:
    """What there is of one kind, by name: what is built in, and what others have added."""

    def __init__(
        self,
        kind: str,
        group: str,
        table: str,
        built_in: Mapping[str, str],
        *,
        renamed: Mapping[str, str] | None = None,
    ):
        """``kind``: what one is called; ``group``: where packages register them, as entry points; ``table``: the
        dictionary in a file that has them; ``built_in``: names, and what each is in a line; ``renamed``: methods that
        were called otherwise in earlier versions, and their names now."""
        self.kind = kind
        self.group = group
        self.table = table
        self.built_in = built_in
        self._renamed = renamed or {}
        self._installed: dict[str, tuple[Any, Origin]] | None = None
        REGISTRIES.append(self)

    def names(self) -> list[str]:
        """All names, the built-in ones first."""
        return [*self.built_in, *self._added()]

    def __contains__(self, name: str) -> bool:
        return name in self.built_in or name in self._added()

    def added(self, name: str) -> Any:
        """What others have added under a name. Raises ``ValueError`` with a line that lists what there is."""
        if name not in self._added():
            raise ValueError(f"no {self.kind} called {name!r:.80}; there are {', '.join(self.names())}")
        return self._added()[name][0]

    def origin(self, name: str) -> Origin | None:
        """Where it comes from; None for what is built in."""
        return None if name in self.built_in else self._added()[name][1]

    def summary(self, name: str) -> str:
        """What it is, in a line; of what others have added, where it comes from as well."""
        if name in self.built_in:
            return self.built_in[name]
        made, origin = self._added()[name]
        described = inspect.getdoc(made.func if isinstance(made, partial) else made) or "without a description"
        return f"{described.splitlines()[0]} ({origin})"

    def _added(self) -> dict[str, tuple[Any, Origin]]:
        """What others have added: packages, which are looked for once, then files."""
        if self._installed is None:
            self._installed = {}
            for point in sorted(entry_points(group=self.group), key=lambda point: point.name):
                origin = Origin.of_entry_point(point)
                try:
                    made = point.load()
                    fault = self._fault(point.name, made, self._installed)
                except (Exception, SystemExit) as e:
                    fault = f"cannot be imported: {type(e).__name__}: {e}"
                if fault is None:
                    self._installed[point.name] = made, origin
                else:
                    line = f"{self.kind} {point.name!r} of {origin} is left out: {fault}"
                    warnings.warn(line, PluginWarning, stacklevel=2)
        found = dict(self._installed)
        for path, (origin, defined) in FILES.items():
            for name, made in dict(defined.get(self.table, {})).items():
                fault = self._fault(name, made, found)
                if fault is not None:
                    raise PluginError(f"{path}: {self.table}: {fault}")
                found[name] = made, origin
        return found

    def _fault(self, name: Any, made: Any, taken: Mapping[str, Any]) -> str | None:
        """Why it cannot be had under a name; None if it can."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            return f"{name!r:.60} is not a valid name; letters, digits and any of . _ + = @ - are accepted"
        if name in self.built_in or name in taken:
            return f"there is a {self.kind} called {name!r} already"
        if not callable(made):
            return f"{name!r}: a class or another callable is expected, got {made!r:.60}"
        old = next((method for method in self._renamed if hasattr(made, method)), None)
        return f"{name!r}: the method {old} is called {self._renamed[old]} now" if old else None


REGISTRIES: list[Registry] = []
"""All of them."""


def known_origins() -> list[Origin]:
    """Where everything comes from that others have added, as far as it has been looked for."""
    installed = [origin for each in REGISTRIES for _, origin in (each._installed or {}).values()]
    return [*installed, *[origin for origin, _ in FILES.values()]]
