"""Where a plug-in's code is: the package or the file that it comes from, its version, and a digest of all of it."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

OUR_PACKAGES = ("kvsim", "policies", "real_engine", "workloads")
"""Packages that belong to no plug-in, wherever they lie."""


@dataclass(frozen=True)
class Origin:
    """What a plug-in policy was loaded from."""

    package: str
    """The installed package's name; for a single file its path."""
    version: str
    """The package's version; for a single file the beginning of its digest."""
    roots: tuple[str, ...]
    """Folders and files that hold its code; absolute paths."""

    def __str__(self) -> str:
        return f"{self.package} {self.version}"

    @cached_property
    def digest(self) -> str:
        """Digest of all its files, read once."""
        return digest_of(self.roots)

    def holds(self, file: str) -> bool:
        """Whether a source file is part of its code."""
        return any(file == root or file.startswith(root + os.sep) for root in self.roots)

    @staticmethod
    def of_entry_point(point: EntryPoint) -> Origin:
        """The package that registered an entry point, with every module that it installs."""
        if point.dist is None:
            return Origin(point.module, "without a version", _package_roots(point.module, ()))
        installed = (point.dist.read_text("top_level.txt") or "").split()
        for file in point.dist.files or ():
            if file.suffix == ".py" and not file.parts[0].startswith(("..", "__editable__")):
                installed.append(file.parts[0].removesuffix(".py"))
        return Origin(point.dist.name, point.dist.version, _package_roots(point.module, installed))

    @staticmethod
    def of_file(path: Path) -> Origin:
        """A single file, with the modules beside it that it imports."""
        roots = with_siblings(path)
        return Origin(str(path), digest_of(roots)[:12], roots)


def digest_of(roots: Iterable[str]) -> str:
    """Digest of the contents of files, and of all files in folders, with their names in these."""
    digest = hashlib.blake2b(digest_size=16)
    for root in map(Path, roots):
        for path in _files(root):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root.parent).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def package_folder(module: str) -> str | None:
    """The folder of the package that a module is in; None for a module outside of packages."""
    top = sys.modules.get(module.split(".")[0])
    file = getattr(top, "__file__", None)
    return os.path.dirname(os.path.abspath(file)) if file is not None and hasattr(top, "__path__") else None


def with_siblings(file: Path) -> tuple[str, ...]:
    """A file, and the modules and packages in its folder that it imports, directly or by way of one another."""
    found = {str(file): None}
    unread = [file]
    while unread:
        for name in _imported_by(unread.pop()):
            for root in (file.parent / name, file.parent / f"{name}.py"):
                package = (root / "__init__.py").is_file()
                if (package or (root.suffix == ".py" and root.is_file())) and str(root) not in found:
                    found[str(root)] = None
                    unread += [path for path in _files(root) if path.suffix == ".py"]
    return tuple(found)


def _files(root: Path) -> list[Path]:
    """The file itself, or every file of a folder that is neither hidden nor made by Python, in order of path."""
    if not root.is_dir():
        return [root]
    inside = ((path, path.relative_to(root).parts) for path in sorted(root.rglob("*")) if path.is_file())
    return [path for path, parts in inside if not any(p.startswith(".") or p == "__pycache__" for p in parts)]


def _imported_by(path: Path) -> Iterator[str]:
    """The first parts of all names that a file imports, anywhere in it; none of a file that is not Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        yield from (first for name in names if (first := name.split(".")[0]) not in OUR_PACKAGES)


def _package_roots(module: str, installed: Iterable[str]) -> tuple[str, ...]:
    """The folders and files of a module's own package, and of the others that were installed with it."""
    first, _, rest = module.partition(".")
    roots = {*_roots_of(first, rest)}
    for name in installed:
        if name not in OUR_PACKAGES:
            roots.update(_roots_of(name, ""))
    return tuple(sorted(roots))


def _roots_of(name: str, rest: str) -> Iterator[str]:
    """Where a module or package lies; of a namespace that several packages share, the part that leads to ``rest``."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return
    if spec is None:
        return
    if spec.submodule_search_locations is None:
        if spec.has_location and spec.origin is not None:
            yield os.path.abspath(spec.origin)
    elif spec.origin is not None:
        yield from map(os.path.abspath, spec.submodule_search_locations)
    elif rest:
        first, _, rest = rest.partition(".")
        yield from _roots_of(f"{name}.{first}", rest)
