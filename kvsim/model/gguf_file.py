"""Reads the header of a GGUF file: its fields, and the places of its tensors.

The reader of the ``gguf`` package makes an array of every word of a vocabulary, which takes seconds, and trusts the
lengths in damaged files. This one checks every length against the size of the file.
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
"""Format characters of ``struct``, by type of value."""
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 1 << 16
"""The most fields, and the most tensors."""
_MOST_ITEMS = 1 << 22
"""The most items of an array."""
_MOST_DIMENSIONS = 4
LARGEST = 1 << 24
"""The largest accepted size of anything in a model."""
LARGEST_LAYERS = 1 << 12
_VOCABULARY = "tokenizer."
"""Prefix of the names of tokeniser fields."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type, dimensions and place of a tensor."""

    kind: int
    """A value of ``gguf.GGMLQuantizationType``."""
    dims: tuple[int, ...]
    """Size of each axis, the contiguous one first: (inputs, outputs) for a matrix."""
    offset: int
    """Bytes from the start of the file; not checked, since the length of a tensor depends on its type."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file."""

    path: Path
    size: int
    """Size of the file in bytes."""
    fields: Mapping[str, Any] = field(repr=False)
    """Values are numbers, booleans, strings, or lists of one of these."""
    tensors: Mapping[str, TensorInfo] = field(repr=False)

    def whole(self, key: str, default: int | None = None, most: int = LARGEST, least: int = 1) -> int:
        """The whole number of a field, from ``least`` to ``most``. Raises ``UserError``."""
        value = self.fields.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise UserError(f"{self.path}: {key} is {value!r:.40}; a whole number from {least} to {most} is expected")
        return value

    def vocabulary(self) -> int:
        """The number of embeddings. Raises ``UserError``."""
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.dims) != 2:
            raise UserError(f"{self.path}: it has no table of embeddings (token_embd.weight, of two dimensions)")
        if not 1 <= embedding.dims[1] <= LARGEST:
            raise UserError(f"{self.path}: {embedding.dims[1]} embeddings; from 1 to {LARGEST} are expected")
        return embedding.dims[1]


class _DamagedError(Exception):
    """The file is damaged; the message describes the fault."""


def read_header(path: Path, *, vocabulary: bool = True) -> GgufHeader:
    """Read the header of a GGUF file, version 2 or 3, little-endian. Raises ``UserError``.

    Without ``vocabulary``, the fields of the tokeniser are skipped: some hundred thousand words, whose memory Python
    releases only in part.
    """
    try:
        # Opening a pipe would block until another process writes to it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path}: not a file; a GGUF file is expected")
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise UserError(f"{path}: not a GGUF file (it does not begin with {_MAGIC.decode()})")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data, vocabulary).header(path)
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except _DamagedError as e:
        raise UserError(f"{path}: damaged GGUF file: {e}") from None
    except UserError:
        raise
    except ValueError as e:
        # The path contains a null byte.
        raise UserError(f"{str(path)!r}: cannot be read: {e}") from None


class _Reader:
    """Reads the header in one pass."""

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
            raise _DamagedError(f"it claims {n_tensors} tensors and {n_fields} fields")
        fields: dict[str, Any] = {}
        seen: set[str] = set()
        for _ in range(n_fields):
            key = self._string()
            if key in seen:
                raise _DamagedError(f"field {key!r:.60} twice")
            seen.add(key)
            (kind,) = self._numbers("I", 1)
            if self._vocabulary or not key.startswith(_VOCABULARY):
                fields[key] = self._value(kind)
            else:
                self._skip(kind)
        found: list[tuple[str, TensorInfo]] = [self._tensor() for _ in range(n_tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise _DamagedError(f"general.alignment is {alignment!r:.40}; a power of two is expected")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, info in found:
            if name in tensors:
                raise _DamagedError(f"tensor {name!r:.60} twice")
            if info.offset % alignment:
                raise _DamagedError(f"tensor {name!r:.60} does not lie on a multiple of {alignment} bytes")
            tensors[name] = TensorInfo(info.kind, info.dims, start + info.offset)
        return GgufHeader(path, len(self._data), fields, tensors)

    def _take(self, size: int) -> int:
        """Skip ``size`` bytes and return where they begin."""
        if size > len(self._data) - self._at:
            raise _DamagedError(f"it ends after {len(self._data)} bytes, inside its header")
        self._at += size
        return self._at - size

    def _numbers(self, code: str, n: int) -> tuple[Any, ...]:
        return struct.unpack_from(f"<{n}{code}", self._data, self._take(struct.calcsize(f"<{code}") * n))

    def _string(self) -> str:
        (n,) = self._numbers("Q", 1)
        start = self._take(n)
        return self._data[start : start + n].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], 1)[0]
        kind, n = self._array(kind)
        return [self._string() for _ in range(n)] if kind == _STRING else list(self._numbers(_SCALARS[kind], n))

    def _array(self, kind: int) -> tuple[int, int]:
        """Read the head of an array: the type and the number of its items. ``kind`` must be the type of arrays."""
        if kind != _ARRAY:
            raise _DamagedError(f"a value of type {kind}")
        (kind,), (n,) = self._numbers("I", 1), self._numbers("Q", 1)
        if n > _MOST_ITEMS:
            raise _DamagedError(f"an array of {n} values")
        if kind != _STRING and kind not in _SCALARS:
            raise _DamagedError(f"an array of values of type {kind}")
        return kind, n

    def _skip(self, kind: int) -> None:
        """Skip a value."""
        n = 1
        if kind != _STRING and kind not in _SCALARS:
            kind, n = self._array(kind)
        if kind == _STRING:
            # Vocabularies have 10^5 of them.
            length, at, end = struct.Struct("<Q").unpack_from, self._at, len(self._data) - 8
            for _ in range(n):
                at += 8 + (length(self._data, at)[0] if at <= end else 0)
            self._take(at - self._at)
        else:
            self._take(struct.calcsize(f"<{_SCALARS[kind]}") * n)

    def _tensor(self) -> tuple[str, TensorInfo]:
        name = self._string()
        (n,) = self._numbers("I", 1)
        if not 1 <= n <= _MOST_DIMENSIONS:
            raise _DamagedError(f"tensor {name!r:.60} of {n} dimensions")
        dims = self._numbers("Q", n)
        (kind,), (offset,) = self._numbers("I", 1), self._numbers("Q", 1)
        return name, TensorInfo(kind, dims, offset)
