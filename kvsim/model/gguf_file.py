"""The header of a GGUF file: its fields, and where its tensors lie.

Read here and not with the ``gguf`` package's reader, which makes an array of every word of a vocabulary (seconds) and
believes any length that a damaged file claims. Every length is checked against the size of the file.
"""

from __future__ import annotations

import mmap
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsim.errors import UserError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Of each type of value its code in ``struct``."""
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 1 << 16
"""Fields, or tensors."""
_MOST_ITEMS = 1 << 22
"""Of an array."""
_MOST_DIMENSIONS = 4
_VOCABULARY = "tokenizer."
"""What the names of a vocabulary's fields begin with."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies, and as what."""

    kind: int
    """Its type, a number of ``gguf.GGMLQuantizationType``."""
    dims: tuple[int, ...]
    """Numbers along each axis, the one that is contiguous first: (inputs, outputs) for a matrix."""
    offset: int
    """Bytes from the start of the file. Not yet checked: how long a tensor is depends on its type."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says of itself."""

    path: Path
    size: int
    """Bytes of the file."""
    fields: Mapping[str, Any] = field(repr=False)
    """Numbers, truth values, strings, and lists of one of them."""
    tensors: Mapping[str, TensorInfo] = field(repr=False)


class _Damaged(Exception):
    """The file is not what it should be; the message says how."""


def read_header(path: Path, *, vocabulary: bool = True) -> GgufHeader:
    """Read the header of a GGUF file, version 2 or 3, little-endian. Raises ``UserError``.

    Without its ``vocabulary``, the fields of the tokeniser are passed over: some hundred thousand words, whose memory
    Python gives back only in part.
    """
    try:
        # Opening a pipe would wait for somebody to write into it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path}: not a file; a GGUF file is expected")
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise UserError(f"{path}: not a GGUF file (it does not begin with {_MAGIC.decode()})")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data, vocabulary).header(path)
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except _Damaged as e:
        raise UserError(f"{path}: damaged GGUF file: {e}") from None
    except UserError:
        raise
    except ValueError as e:
        # A null byte in the name.
        raise UserError(f"{str(path)!r}: cannot be read: {e}") from None


class _Reader:
    """Walks through the header once."""

    def __init__(self, data: mmap.mmap, vocabulary: bool):
        self._data = data
        self._vocabulary = vocabulary
        self._at = len(_MAGIC)

    def header(self, path: Path) -> GgufHeader:
        (version,) = self._numbers("I", 1)
        if version not in _VERSIONS:
            accepted = " and ".join(map(str, _VERSIONS))
            raise UserError(f"{path}: GGUF version {version}; little-endian files of version {accepted} are accepted")
        n_tensors, n_fields = self._numbers("Q", 2)
        if max(n_tensors, n_fields) > _MOST_ENTRIES:
            raise _Damaged(f"it claims {n_tensors} tensors and {n_fields} fields")
        fields: dict[str, Any] = {}
        seen: set[str] = set()
        for _ in range(n_fields):
            key = self._string()
            if key in seen:
                raise _Damaged(f"field {key!r:.60} twice")
            seen.add(key)
            (kind,) = self._numbers("I", 1)
            if self._vocabulary or not key.startswith(_VOCABULARY):
                fields[key] = self._value(kind)
            else:
                self._pass_over(kind)
        found: list[tuple[str, TensorInfo]] = [self._tensor() for _ in range(n_tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise _Damaged(f"general.alignment is {alignment!r:.40}; a power of two is expected")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, info in found:
            if name in tensors:
                raise _Damaged(f"tensor {name!r:.60} twice")
            if info.offset % alignment:
                raise _Damaged(f"tensor {name!r:.60} does not lie on a multiple of {alignment} bytes")
            tensors[name] = TensorInfo(info.kind, info.dims, start + info.offset)
        return GgufHeader(path, len(self._data), fields, tensors)

    def _past(self, size: int) -> int:
        """Go on behind so many bytes; where they begin."""
        if size > len(self._data) - self._at:
            raise _Damaged(f"it ends after {len(self._data)} bytes, inside its header")
        self._at += size
        return self._at - size

    def _numbers(self, code: str, n: int) -> tuple[Any, ...]:
        return struct.unpack_from(f"<{n}{code}", self._data, self._past(struct.calcsize(f"<{code}") * n))

    def _string(self) -> str:
        (n,) = self._numbers("Q", 1)
        start = self._past(n)
        return self._data[start : start + n].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], 1)[0]
        kind, n = self._array(kind)
        return [self._string() for _ in range(n)] if kind == _STRING else list(self._numbers(_SCALARS[kind], n))

    def _array(self, kind: int) -> tuple[int, int]:
        """Of what, and of how many; ``kind``: that of a value that is neither a string nor a number."""
        if kind != _ARRAY:
            raise _Damaged(f"a value of type {kind}")
        (kind,), (n,) = self._numbers("I", 1), self._numbers("Q", 1)
        if n > _MOST_ITEMS:
            raise _Damaged(f"an array of {n} values")
        if kind != _STRING and kind not in _SCALARS:
            raise _Damaged(f"an array of values of type {kind}")
        return kind, n

    def _pass_over(self, kind: int) -> None:
        """A value that nobody asks for."""
        n = 1
        if kind != _STRING and kind not in _SCALARS:
            kind, n = self._array(kind)
        if kind == _STRING:
            for _ in range(n):
                self._past(*self._numbers("Q", 1))
        else:
            self._past(struct.calcsize(f"<{_SCALARS[kind]}") * n)

    def _tensor(self) -> tuple[str, TensorInfo]:
        name = self._string()
        (n,) = self._numbers("I", 1)
        if not 1 <= n <= _MOST_DIMENSIONS:
            raise _Damaged(f"tensor {name!r:.60} of {n} dimensions")
        dims = self._numbers("Q", n)
        (kind,), (offset,) = self._numbers("I", 1), self._numbers("Q", 1)
        return name, TensorInfo(kind, dims, offset)
