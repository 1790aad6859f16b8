"""Reads chosen fields of data in the compact protocol of Apache Thrift, such as the headers of Parquet files.

github.com/apache/thrift, ``doc/specs/thrift-compact-protocol.md``.
"""

from __future__ import annotations

from typing import Any

_STOP, _TRUE, _FALSE, _BYTE, _I16, I32, I64, _DOUBLE, BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)

Wanted = dict[int, Any]
"""The fields to keep, by number: ``I32``, ``I64``, ``BINARY``, a dict for a struct, [one of these] for a list."""

_MAX_DEPTH = 16
_MAX_VARINT = 10
"""Bytes of a number of 64 bits."""


class ThriftError(Exception):
    """The data is not in the compact protocol, or not of the types that are wanted."""


class CompactReader:
    """Reads structs one by one. Raises ``EOFError`` where the data ends too early, ``ThriftError`` if it is damaged."""

    def __init__(self, data: bytes):
        self._data = data
        self.at = 0
        """Bytes that have been read."""

    def struct(self, wanted: Wanted, depth: int = 0) -> dict[int, Any]:
        """The wanted fields of the struct that begins here, by number. A field may be there only once."""
        if depth > _MAX_DEPTH:
            raise ThriftError("nested too deeply")
        kept: dict[int, Any] = {}
        number = 0
        while True:
            delta, kind = divmod(self._take(1)[0], 16)
            if kind == _STOP:
                return kept
            number = number + delta if delta else self._integer()
            if number in kept:
                raise ThriftError(f"field {number} twice")
            if number in wanted:
                kept[number] = self._value(kind, wanted[number], depth)
            elif kind not in (_TRUE, _FALSE):  # The type of a field says whether it is true; in a list, a byte does.
                self._value(kind, None, depth)

    def _value(self, kind: int, wanted: Any, depth: int) -> Any:
        """The value of this type that begins here; what is not wanted (None) is only passed over."""
        expected = _STRUCT if isinstance(wanted, dict) else _LIST if isinstance(wanted, list) else wanted
        if wanted is not None and kind != expected:
            raise ThriftError(f"a value of type {kind}; expected {expected}")
        if kind == _STRUCT:
            return self.struct(wanted or {}, depth + 1)
        if kind in (_LIST, _SET):
            return self._list(wanted, depth + 1)
        if kind == BINARY:
            return self._take(self._varint())
        if kind in (_I16, I32, I64):
            return self._integer()
        if kind == _DOUBLE or kind in (_TRUE, _FALSE, _BYTE):
            return self._take(8 if kind == _DOUBLE else 1)
        raise ThriftError(f"a value of type {kind}")

    def _list(self, wanted: Any, depth: int) -> list[Any]:
        if depth > _MAX_DEPTH:
            raise ThriftError("nested too deeply")
        size, kind = divmod(self._take(1)[0], 16)
        size = self._varint() if size == 15 else size
        if wanted is not None:
            return [self._value(kind, wanted[0], depth) for _ in range(size)]
        for _ in range(size):
            self._value(kind, None, depth)
        return []

    def _integer(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)

    def _varint(self) -> int:
        number = 0
        for place in range(_MAX_VARINT):
            byte = self._take(1)[0]
            number |= (byte & 127) << 7 * place
            if byte < 128:
                return number
        raise ThriftError("a number of more than 64 bits")

    def _take(self, n: int) -> bytes:
        taken = self._data[self.at : self.at + n]
        if len(taken) < n:
            raise EOFError
        self.at += n
        return taken
