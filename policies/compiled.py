"""Whether the compiled modules are used: those that ``setup.py`` builds beside some Python files of ours.

Python prefers a compiled module to the file that it was compiled from. A build therefore leaves a stamp: a hash of each
source. Where one of them has changed since, Python's own files are used until the next build; all of them, because
compiled modules call one another directly. The figures are the same either way.

``kvsim`` and ``setup.py`` load this file without the rest of ``policies``, so it imports nothing of ours.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import source_hash, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

COMPILED = "compiled"
"""The state in which the compiled modules are used."""
PURE = "KVSIM_PURE"
"""An environment variable: where it is set, builds compile nothing, and runs use Python's own files."""
HOME = Path(__file__).resolve().parents[1]
"""The folder that holds the packages."""
STAMP = os.path.join("policies", f"compiled{EXTENSION_SUFFIXES[0]}.sources")
"""The file with the hashes; compiled modules are for one version of Python, and so is the stamp."""

Kind = TypeVar("Kind", bound=type)

if TYPE_CHECKING:
    import numpy as np
    from librt.vecs import vec as vec
    from mypy_extensions import i32 as i32
    from mypy_extensions import i64 as i64
    from mypy_extensions import mypyc_attr as mypyc_attr
    from mypy_extensions import u8 as u8
    from numpy.typing import NDArray

    from policies.vocabulary import IntArray
else:
    i64 = i32 = int
    """Whole numbers that compiled code keeps in a machine word, or in four bytes."""

    class u8(int):
        """Whole numbers that are kept in one byte, compiled or not."""

    class vec:
        """An array of numbers in compiled code: ``vec[i64](numbers)``. It does not grow."""

        def __class_getitem__(cls, kind: type) -> Callable[..., array]:
            """What makes an array of whole numbers, or of floats."""
            return partial(array, {float: "d", u8: "B"}.get(kind, "q"))

    def mypyc_attr(**_: Any) -> Callable[[Kind], Kind]:
        """Return a decorator without effect: mypyc reads from it how to compile a class."""
        return lambda kind: kind


class _Memory:
    """The memory of an array of numbers, as NumPy asks for it."""

    def __init__(self, numbers: Any, kind: str):
        import numpy as np

        self._keeps = np.frombuffer(numbers, dtype=kind)
        # A vec shows its memory as if it were not to be written to.
        self.__array_interface__ = {**self._keeps.__array_interface__, "data": (self._keeps.ctypes.data, False)}


def as_array(numbers: vec[i64]) -> IntArray:
    """NumPy's view of an array of numbers, which shares its memory; int64 of shape (len(numbers),)."""
    import numpy as np

    return np.asarray(_Memory(numbers, "int64"))


def as_flags(numbers: vec[u8]) -> NDArray[np.bool_]:
    """NumPy's view of an array of zeros and ones, which shares its memory; bool of shape (len(numbers),)."""
    import numpy as np

    return np.asarray(_Memory(numbers, "bool"))


def stamp_of(sources: Iterable[str], home: Path = HOME) -> str:
    """The text of a stamp: in each line a hash and the path of a source, from the folder that holds the packages."""
    return "".join(f"{source_hash(_read(os.path.join(home, source))).hex()} {source}\n" for source in sources)


def _read(path: str) -> bytes:
    """What is in a file; nothing where there is none."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except FileNotFoundError:
        return b""


def state(home: Path = HOME) -> str:
    """``COMPILED``, or in words why Python's own files are used."""
    try:
        stamp = (home / STAMP).read_text(encoding="utf-8")
    except FileNotFoundError:
        return "not compiled"
    if os.environ.get(PURE):
        return f"compiled, but {PURE} is set"
    # A build that is under way, or was cut short, leaves an empty stamp.
    current = stamp and stamp == stamp_of((line.split(" ", 1)[1] for line in stamp.splitlines()), home)
    return COMPILED if current else "compiled, but a source has changed since (make core)"


class PythonFiles:
    """Finds the Python files of our modules, where Python would prefer the compiled modules beside them."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The Python file of a module; None for packages, and for modules of others."""
        package, _, module = name.rpartition(".")
        if path is None or package.partition(".")[0] not in ("kvsim", "policies"):
            return None
        files = (os.path.join(folder, f"{module}.py") for folder in path)
        return next((spec_from_file_location(name, file) for file in files if os.path.isfile(file)), None)


STATE = state()
"""The state of this process."""
if STATE not in (COMPILED, "not compiled"):
    sys.meta_path.insert(0, PythonFiles)
