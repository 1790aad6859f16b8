"""What the code of a policy is that kvsim does not ship: a plug-in by name, or a callable given from Python."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from kvsim.errors import UserError
from policies import PolicyFactory, available, origins
from policies.origin import OUR_PACKAGES, digest_of, package_folder, with_siblings

_PLAIN = (bool, int, float, complex, str, bytes, range, type(None), type(...), np.generic)
"""Types whose values are told apart by their text."""
_WRAPPED = {property: "fget", staticmethod: "__func__", classmethod: "__func__"}
"""What a class may hold around a function, and the attribute that has the function."""


def describe_code(policy: str | PolicyFactory) -> Any:
    """Return a value that JSON can express, and that differs whenever the code of a policy does.

    Built-in policies have none. A plug-in's is its version and a digest of its whole package, or of its file and the
    modules beside it. A callable's is the same of the module that it comes from, with all values that it holds. Raises
    ``UserError`` for a callable that holds what cannot be described.
    """
    if not isinstance(policy, str):
        return _Description().of(policy)
    origin = available()[policy].origin
    return None if origin is None else [origin.version, origin.digest]


def plugins_used(policies: Iterable[str]) -> list[dict[str, str]]:
    """List those of the named policies that are plug-ins, each with its package, or its file, and the version."""
    return [
        {"policy": policy, "package": origin.package, "version": origin.version}
        for policy, origin in origins(policies).items()
    ]


def plugins_line(used: Sequence[Mapping[str, str]]) -> str:
    """Say in a line which policies are plug-ins, and of which versions; empty if none is."""
    named = [f"{each['policy']} from {each['package']} {each['version']}" for each in used]
    return f"plug-ins: {', '.join(named)}" if named else ""


class _Description:
    """Describes values by their code and contents; each object once, since they may refer to each other in circles."""

    def __init__(self) -> None:
        self._met: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """A value that JSON can express. Raises ``UserError``."""
        if isinstance(value, _PLAIN):
            return [type(value).__name__, repr(value)]
        if id(value) in self._met:
            return "met before"
        self._met[id(value)] = value  # Kept, so that no other value gets its number.
        if isinstance(value, ModuleType):
            return ["module", value.__name__, _digest_of_module(value.__name__)]
        if isinstance(value, np.ndarray):
            return ["array", value.dtype.str, value.shape, hashlib.blake2b(value.tobytes()).hexdigest()]
        if isinstance(value, type):
            return ["class", value.__module__, value.__qualname__, self._class(value)]
        if isinstance(value, FunctionType):
            return ["function", *self._function(value)]
        if isinstance(value, MethodType):
            return ["method", self.of(value.__self__), self.of(value.__func__)]
        if isinstance(value, partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, CodeType):
            return ["code", value.co_code.hex(), list(value.co_names), [self.of(each) for each in value.co_consts]]
        return self._contents(value)

    def _contents(self, value: Any) -> Any:
        kind = type(value).__name__
        if isinstance(value, Mapping):
            return [kind, [[self.of(key), self.of(each)] for key, each in value.items()]]
        if isinstance(value, Sequence):
            return [kind, [self.of(each) for each in value]]
        if isinstance(value, Set):
            return [kind, sorted(str(self.of(each)) for each in value)]
        if dataclasses.is_dataclass(value):
            held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        elif hasattr(value, "__dict__"):
            held = vars(value)
        else:
            what = f"a callable holds {value!r:.60}, and whether that has changed cannot be told"
            raise UserError(f"policies: {what}; put the policy into a file or a package of its own")
        return ["object", self.of(type(value)), self.of(dict(held))]

    def _function(self, function: FunctionType) -> list[Any]:
        """Its module and code, what it closes over, and the values, functions and classes that it uses by name."""
        inner = [cell.cell_contents for cell in function.__closure__ or ()]
        outer = {name: function.__globals__.get(name) for name in _names_in(function.__code__)}
        used = {name: value for name, value in outer.items() if isinstance(value, (*_PLAIN, FunctionType, type))}
        held = [self.of(each) for each in (function.__defaults__, function.__kwdefaults__, inner, used)]
        digest = _digest_of_module(function.__module__)
        return [function.__module__, function.__qualname__, digest, self.of(function.__code__), *held]

    def _class(self, kind: type) -> Any:
        """Its module's digest; the functions and values in it where the module has no file, as in a notebook."""
        digest = _digest_of_module(kind.__module__)
        if digest is not None:
            return digest
        held = {name: getattr(value, _WRAPPED.get(type(value), ""), value) for name, value in vars(kind).items()}
        kept = {name: value for name, value in held.items() if isinstance(value, (*_PLAIN, FunctionType, type))}
        return [self.of(kind.__bases__), self.of(kept)]


def _names_in(code: CodeType) -> list[str]:
    """The names that code looks up, those in functions inside of it included."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _names_in(each)]
    return sorted({*code.co_names, *inner})


def _digest_of_module(name: str) -> str | None:
    """Digest of a module's package, or of its file and the modules beside it; None if it has no file.

    Empty for kvsim, whose version is part of every run, and for Python's own modules.
    """
    top = name.split(".")[0]
    if top in OUR_PACKAGES or (top in sys.stdlib_module_names and top != "__main__"):
        return ""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or not Path(file).is_file():
        return None
    folder = package_folder(name)
    if folder is not None:
        return digest_of((folder,))
    return digest_of((file,) if "site-packages" in Path(file).parts else with_siblings(Path(file).absolute()))
