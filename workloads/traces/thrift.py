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
        kept: dict[int, Any] = {}
        number = 0
        while True:
            delta, kind = divmod(self._take(1)[0], 16)
            if kind == _STOP:
                return kept
            number = number + delta if delta else self._integer()
            if number not in wanted:
                self._skip(kind, depth)
            elif number in kept:
                raise ThriftError(f"field {number} twice")
            else:
                kept[number] = self._value(kind, wanted[number], depth)

    def _value(self, kind: int, wanted: Any, depth: int) -> Any:
        expected = _STRUCT if isinstance(wanted, dict) else _LIST if isinstance(wanted, list) else wanted
        if kind != expected:
            raise ThriftError(f"a value of type {kind}; expected {expected}")
        if kind == _STRUCT:
            return self.struct(wanted, depth + 1)
        if kind == _LIST:
            size, element = self._list_header()
            return [self._value(element, wanted[0], depth + 1) for _ in range(size)]
        return self._take(self._varint()) if kind == BINARY else self._integer()

    def _skip(self, kind: int, depth: int, *, in_list: bool = False) -> None:
        """Pass over a value of this type."""
        if depth > _MAX_DEPTH:
            raise ThriftError("nested too deeply")
        if kind == _BYTE or (kind in (_TRUE, _FALSE) and in_list):
            self._take(1)
        elif kind in (_I16, I32, I64):
            self._varint()
        elif kind == _DOUBLE:
            self._take(8)
        elif kind == BINARY:
            self._take(self._varint())
        elif kind in (_LIST, _SET):
            size, element = self._list_header()
            for _ in range(size):
                self._skip(element, depth + 1, in_list=True)
        elif kind == _STRUCT:
            self.struct({}, depth + 1)
        elif kind not in (_TRUE, _FALSE):
            raise ThriftError(f"a value of type {kind}")

    def _list_header(self) -> tuple[int, int]:
        """The number of elements and their type."""
        size, element = divmod(self._take(1)[0], 16)
        return (self._varint() if size == 15 else size), element

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
