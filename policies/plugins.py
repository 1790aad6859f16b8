"""Policies from elsewhere: those that installed packages register, and those in single files."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from policies.checked import CheckedPolicy
from policies.checking import BrokenPromise
from policies.origin import Origin
from policies.policy import CacheConfig, Kernel, Policy, PolicyFactory
from policies.presets import ALIASES, PRESETS, Preset, PresetGroup
from policies.registry import FILES, NAME, REGISTRIES, PluginError, PluginWarning, known_origins

ENTRY_POINT_GROUP = "kvsim.policies"
"""Where other packages register policies, as entry points."""

FILE_TABLE = "POLICIES"
"""The name of the dictionary in a single file, from names to policies."""

_NOT_STATED = "not stated"
_BUILT_IN = {preset.name: preset for preset in PRESETS}


def available() -> dict[str, Preset]:
    """Every policy that can be used, by its current name: built-in ones, then plug-ins by name, then those of files.

    Installed plug-ins are looked for once in a process, since that takes longer than a short run. One that cannot be
    imported, or whose name is taken, is left out with a ``PluginWarning``.
    """
    found, _ = _installed(entry_points)
    return found | {name: preset for presets in _files.values() for name, preset in presets.items()}


def in_group(group: PresetGroup) -> list[str]:
    """The names of a group's policies; plug-ins are in ``standard``, what ideas are held against in ``papers``."""
    known = available()
    names = [name for name, preset in known.items() if preset.group == group]
    against = {known[name].against for name in names}
    return [name for name in known if name in names or name in against]


def engine_of(name: str) -> str:
    """The engine and version that a policy stands for; empty for a layout of our own, and for what is no preset."""
    preset = _BUILT_IN.get(name) or available().get(name)
    return preset.engine if preset is not None else ""


def why_left_out(name: str) -> str | None:
    """Why a registered plug-in of this name was left out, in a line; None if there was none."""
    return _installed(entry_points)[1].get(name)


def origins(names: Iterable[str]) -> dict[str, Origin]:
    """Where those of the named policies come from that are plug-ins."""
    known = available()
    found = {name: known[name].origin for name in names if name in known}
    return {name: origin for name, origin in found.items() if origin is not None}


def load_plugin(file: str | Path) -> tuple[str, ...]:
    """Make the policies of a Python file available by name, and return the names.

    The file has a dictionary ``POLICIES`` from names to policies: classes, or other callables that take a
    ``CacheConfig``; and tables of what else others may add (``registry.REGISTRIES``), or these alone. It may import
    modules beside it. One that has changed since is loaded anew. Raises ``PluginError``.
    """
    path = Path(os.path.abspath(file))
    if path.suffix != ".py" or not path.is_file():
        what = "a Python file is expected" if path.exists() else "no such file"
        raise PluginError(f"{file}: {what}; its {FILE_TABLE} = {{'name': class}} says which policies there are")
    origin, before = Origin.of_file(path), _origin_of_file(str(path))
    if before is not None and before.digest == origin.digest:
        return tuple(_files[str(path)])
    if before is not None:
        _forget_modules(before)
    defined = vars(_executed(path, origin))
    table = defined.get(FILE_TABLE, {})
    tables = {name: defined[name] for name in (FILE_TABLE, *[each.table for each in REGISTRIES]) if name in defined}
    if not tables or not all(isinstance(each, dict) and each for each in tables.values()):
        raise PluginError(f"{file}: no {FILE_TABLE}; {FILE_TABLE} = {{'name': class}} is expected at its end")
    taken = {name: other for other, presets in _files.items() if other != str(path) for name in presets}
    for name, factory in table.items():
        fault = _fault_of(name, factory)
        if fault is None and name in taken:
            fault = f"{name!r} is a policy of {taken[name]} already"
        if fault is not None:
            raise PluginError(f"{file}: {FILE_TABLE}: {fault}")
    _files[str(path)] = {name: _preset(name, factory, origin) for name, factory in table.items()}
    FILES[str(path)] = origin, defined
    return tuple(table)


def loaded_files() -> tuple[tuple[str, str], ...]:
    """The files that were loaded, each with the digest of its code, for ``reload_files`` in another process."""
    found = ((path, _origin_of_file(path)) for path in _files)
    return tuple((path, origin.digest) for path, origin in found if origin is not None)


def reload_files(files: tuple[tuple[str, str], ...]) -> None:
    """Load, in a worker, the files that ``loaded_files`` listed. Raises ``PluginError`` if one is another by now."""
    warnings.simplefilter("ignore", PluginWarning)  # The process that sent the work has said it.
    for path, digest in files:
        loaded = _origin_of_file(path)
        if loaded is not None and loaded.digest == digest:
            continue
        load_plugin(path)
        loaded = _origin_of_file(path)
        if loaded is None or loaded.digest != digest:
            raise PluginError(f"{path}: changed while it was in use; start again")


def fault_in_plugin(error: BaseException, policy: Policy) -> str | None:
    """Where in a plug-in's code an error arose, and the error, in a line; None if the policy is no plug-in's.

    An error that arose elsewhere is put down to the policy's class, since what a policy returns may be what is wrong.
    """
    where = ""
    if isinstance(policy, CheckedPolicy):
        where = f" (policy {policy.name!r}, step {policy.step})"
        policy = policy.inner
    kind = type(policy)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    known = [preset.origin for preset in available().values() if preset.origin is not None] + known_origins()
    origin = next((origin for origin in known if origin.holds(file)), None)
    if isinstance(broken := error.__cause__ or error, BrokenPromise):
        return f"{_place_of(kind, origin)}: {broken}" if origin is not None else str(broken)
    if (line := _fault(error, known)) is not None or origin is None:
        return line and line + where
    *_, (raised, at) = _lines(error.__cause__ or error)
    return f"{_place_of(kind, origin)}: {kind.__name__}: {_in_a_line(error)} (met in {_shown(raised)}:{at}){where}"


_files: dict[str, dict[str, Preset]] = {}
"""The policies of each file that was loaded, by its path."""


@cache
def _installed(search: Callable[..., Iterable[EntryPoint]]) -> tuple[dict[str, Preset], dict[str, str]]:
    """The built-in policies and registered plug-ins by name, and why others of these were left out."""
    found: dict[str, Preset] = dict(_BUILT_IN)
    left_out: dict[str, str] = {}
    for point in sorted(search(group=ENTRY_POINT_GROUP), key=lambda p: p.name):
        origin = Origin.of_entry_point(point)
        try:
            factory = point.load()
            fault = f"{point.name!r} is registered twice" if point.name in found else None
            fault = _fault_of(point.name, factory) or fault
        except (Exception, SystemExit) as e:
            fault = f"cannot be imported: {_fault(e, [origin]) or _in_a_line(e)}"
        if fault is None:
            found[point.name] = _preset(point.name, factory, origin)
        else:
            line = f"plug-in {point.name!r} of {origin} is left out: {fault}"
            if point.name not in found and point.name not in ALIASES:
                left_out[point.name] = line
            warnings.warn(line, PluginWarning, stacklevel=2)
    return found, left_out


def _fault_of(name: Any, factory: Any) -> str | None:
    """Why a plug-in cannot be available under a name; None if it can."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return f"{name!r:.60} is not a valid name; letters, digits and any of . _ + = @ - are accepted"
    if name in _BUILT_IN or name in ALIASES:
        return f"{name!r} is the name of a built-in policy"
    if not callable(factory):
        return f"{name!r}: a class or another callable is expected, got {factory!r:.60}"
    return None


def _preset(name: str, factory: PolicyFactory, origin: Origin) -> Preset:
    """A plug-in as a preset; what it does not say of itself is marked as not stated."""
    source = f"plug-in {origin}"
    if isinstance(factory, Preset):
        source = f"{factory.source}; {source}"
        return replace(factory, name=name, origin=origin, build=partial(_build, factory.build, origin), source=source)
    described = inspect.getdoc(factory.func if isinstance(factory, partial) else factory)
    return Preset(
        name=name,
        summary=next(iter((described or "a plug-in without a description").splitlines())),
        layout=_NOT_STATED,
        compactor=_NOT_STATED,
        trigger=_NOT_STATED,
        kernel=_NOT_STATED,
        parameters=(),
        source=source,
        build=partial(_build, partial(_call, factory), origin),
        origin=origin,
    )


def _call(factory: PolicyFactory, name: str, config: CacheConfig) -> Policy:
    return factory(config)


def _build(make: Callable[[str, CacheConfig], Policy], origin: Origin, name: str, config: CacheConfig) -> Policy:
    """Build a plug-in's policy under its registered name, and check that it sets what it must.

    Raises ``ValueError`` where the policy says so, as for impossible settings, and ``PluginError``.
    """
    policy: Any  # A plug-in may give anything.
    try:
        policy = make(name, config)
    except ValueError:
        raise
    except (Exception, SystemExit) as e:
        raise PluginError(_fault(e, [origin]) or f"{_place_of(make, origin)}: {_in_a_line(e)}") from e
    if not isinstance(policy, Policy):
        kind = type(policy).__name__
        raise PluginError(f"{_place_of(make, origin)}: {name} gives {kind!r}; a policies.api.Policy is expected")
    place = _place_of(type(policy), origin)
    if missing := [key for key in ("capacity", "groups", "kernel") if not hasattr(policy, key)]:
        raise PluginError(f"{place}: {type(policy).__name__} does not set {', '.join(missing)}")
    if policy.kernel not in get_args(Kernel):
        raise PluginError(f"{place}: kernel: {policy.kernel!r:.40}; accepted: {', '.join(get_args(Kernel))}")
    policy.name = name
    return policy


def _executed(path: Path, origin: Origin) -> ModuleType:
    """Run a file as a module of its own; the modules beside it can be imported from then on."""
    name = f"kvsim_plugin_{path.stem}_{origin.version}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "the path ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # Last, so that nothing in the folder hides an installed module.
    try:
        # Not through a loader: it may take compiled code for current that is a second old.
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except (Exception, SystemExit) as e:
        del sys.modules[name]
        raise PluginError(_fault(e, [origin]) or f"{_shown(str(path))}: {_in_a_line(e)}") from e
    for beside in origin.roots[1:]:
        imported = getattr(sys.modules.get(Path(beside).stem), "__file__", None)
        if imported is not None and not origin.holds(imported):
            line = f"{_shown(str(path))}: imports {imported}, not {_shown(beside)}, which has the same name"
            warnings.warn(line, PluginWarning, stacklevel=3)
    return module


def _forget_modules(origin: Origin) -> None:
    """Have the modules of a file that has changed imported anew."""
    for name, module in list(sys.modules.items()):
        if origin.holds(getattr(module, "__file__", None) or ""):
            del sys.modules[name]
    importlib.invalidate_caches()


def _origin_of_file(path: str) -> Origin | None:
    """Where a file that is loaded comes from; None for one that is not, or of which a part was forgotten."""
    return FILES[path][0] if path in _files and path in FILES else None


def _fault(error: BaseException, known: Iterable[Origin]) -> str | None:
    """The innermost line of the given plug-ins' code in an error's traceback, or in that of what caused it."""
    errors = [error]
    while errors[-1].__cause__ is not None:  # A simulation raises a copy, with the error as its cause.
        errors.append(errors[-1].__cause__)
    origins = list(known)
    for each in reversed(errors):
        for file, line in reversed(list(_lines(each))):
            if any(origin.holds(file) for origin in origins):
                return f"{_shown(file)}:{line}: {_in_a_line(each)}"
    return None


def _lines(error: BaseException) -> Iterator[tuple[str, int]]:
    """The files and lines of a traceback, outermost first; last, where a file is no Python."""
    at = error.__traceback__
    while at is not None:
        yield at.tb_frame.f_code.co_filename, at.tb_lineno
        at = at.tb_next
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        yield error.filename, error.lineno


def _in_a_line(error: BaseException) -> str:
    """An error's kind, and the first line of its message."""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    first = next(iter(message.strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _place_of(made: Any, origin: Origin) -> str:
    """The file and line where a class or function of a plug-in begins; its package, where that cannot be said."""
    while isinstance(made, partial):
        made = made.args[0] if made.func is _call else made.func
    try:
        return f"{_shown(inspect.getsourcefile(made) or origin.package)}:{inspect.getsourcelines(made)[1]}"
    except (OSError, TypeError):
        return _shown(origin.package)


def _shown(path: str) -> str:
    """A path as a reader finds it: relative, if it lies in the current folder."""
    here = os.getcwd() + os.sep
    return path.removeprefix(here)
