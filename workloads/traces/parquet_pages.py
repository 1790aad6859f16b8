"""Checks what a Parquet file promises, before pyarrow sets memory aside for it.

A column chunk is a row of pages. The header of each states how many bytes follow and how many they become when they
are decompressed (github.com/apache/parquet-format, ``parquet.thrift``). pyarrow reserves as much before it looks at
the data, has no option that bounds it, and aborts the process on some damaged footers when it is asked for the places
of column chunks; so footer and page headers are read here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

from workloads.traces.thrift import BINARY, I32, I64, CompactReader, ThriftError, Wanted

MAX_PAGE = 1 << 25
"""Decompressed bytes of a page that are always accepted. Writers aim at 1 MB; few go beyond 10 MB."""
MAX_RATIO = 100
"""Decompressed bytes for each stored byte, in a page beyond ``MAX_PAGE``."""

_MAGIC = b"PAR1"
_HEADER = 256
"""Bytes that are read for a page header at first."""
_MAX_HEADER = 1 << 24
"""The most bytes of a page header, as in pyarrow: it may quote the least and the greatest text of the page."""
_PADDING = 100
"""Bytes by which early versions of parquet-mr understate the size of a column chunk (PARQUET-816), as in pyarrow."""

# The numbers of fields in parquet.thrift.
_ROW_GROUPS, _COLUMNS, _META_DATA = 4, 1, 3
_PATH, _NUM_VALUES, _TOTAL_COMPRESSED, _DATA_OFFSET, _DICTIONARY_OFFSET = 3, 5, 7, 9, 11
_CHUNK: Wanted = {
    _PATH: [BINARY],
    _NUM_VALUES: I64,
    _TOTAL_COMPRESSED: I64,
    _DATA_OFFSET: I64,
    _DICTIONARY_OFFSET: I64,
}
_FOOTER: Wanted = {_ROW_GROUPS: [{_COLUMNS: [{_META_DATA: _CHUNK}]}]}
_UNCOMPRESSED, _COMPRESSED, _DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 2, 3, 5, 7, 8
_VALUES = 1
_PAGE: Wanted = {
    _UNCOMPRESSED: I32,
    _COMPRESSED: I32,
    _DATA_PAGE: {_VALUES: I32},
    _DICTIONARY_PAGE: {_VALUES: I32},
    _DATA_PAGE_V2: {_VALUES: I32},
}


class BadPageError(Exception):
    """A Parquet file is damaged, or promises what it does not hold; the message says where."""


class _Chunk(NamedTuple):
    """Where the pages of one column in one row group lie."""

    column: str
    row_group: int
    """From 1."""
    start: int
    size: int
    """Stored bytes."""
    n_values: int


def footer_limit(raw: IO[bytes]) -> int:
    """The most elements of a list in the footer that its length allows, for pyarrow's ``thrift_container_size_limit``.

    pyarrow makes room for a whole list, some hundred bytes for each element, before it reads the first one. An element
    of a long list (a column chunk, a row group, a column) takes more than eight bytes.
    """
    return 100 + _footer_size(raw) // 8


def check_pages(raw: IO[bytes], columns: Sequence[str]) -> None:
    """Check the headers of all pages of these columns.

    Raises ``BadPageError`` for a page that is longer than what is left of its column chunk, or that decompresses to
    more than ``MAX_PAGE`` bytes and to more than ``MAX_RATIO`` times its stored size.
    """
    end = raw.seek(0, 2)
    for chunk in _chunks(raw):
        if chunk.column in columns:
            try:
                _check_chunk(raw, chunk, end)
            except (BadPageError, ThriftError) as e:
                raise BadPageError(f"column {chunk.column!r}, row group {chunk.row_group}: {e}") from None


def _footer_size(raw: IO[bytes]) -> int:
    """Bytes of the footer; 0 if the file does not end as Parquet does, which pyarrow reports."""
    end = raw.seek(0, 2)
    raw.seek(max(0, end - 8))
    last = raw.read(8)
    return min(int.from_bytes(last[:4], "little"), end) if last[4:] == _MAGIC else 0


def _chunks(raw: IO[bytes]) -> Iterator[_Chunk]:
    """The column chunks that the footer lists. Raises ``BadPageError``."""
    size = _footer_size(raw)
    raw.seek(raw.seek(0, 2) - 8 - size)
    try:
        footer = CompactReader(raw.read(size)).struct(_FOOTER)
        for number, row_group in enumerate(footer[_ROW_GROUPS], 1):
            for column in row_group[_COLUMNS]:
                meta = column[_META_DATA]
                start, dictionary = meta[_DATA_OFFSET], meta.get(_DICTIONARY_OFFSET, 0)
                path = b".".join(meta[_PATH]).decode(errors="replace")
                # An offset of 0 stands for no dictionary in some files, and pyarrow takes it so.
                start = dictionary if 0 < dictionary < start else start
                yield _Chunk(path, number, start, meta[_TOTAL_COMPRESSED], meta[_NUM_VALUES])
    except (KeyError, EOFError, ThriftError):
        raise BadPageError("the footer cannot be read") from None


def _check_chunk(raw: IO[bytes], chunk: _Chunk, end: int) -> None:
    """Check the pages that pyarrow would read: until the values or the bytes of the chunk are used up."""
    if not 0 <= chunk.start <= end or chunk.size < 0:
        raise BadPageError(f"{chunk.size:,} bytes at byte {chunk.start:,} of {end:,}")
    at, end, values = chunk.start, min(end, chunk.start + chunk.size + _PADDING), 0
    while at < end and values < chunk.n_values:
        header, data = _read_header(raw, at, end)
        stored, size = header.get(_COMPRESSED, -1), header.get(_UNCOMPRESSED, -1)
        if not 0 <= stored <= end - data:
            raise BadPageError(f"a page promises {stored:,} bytes where {end - data:,} follow")
        if not 0 <= size <= max(MAX_PAGE, MAX_RATIO * stored):
            raise BadPageError(f"a page promises {size:,} bytes from {stored:,}; write it in smaller pages")
        # pyarrow makes room for all entries of a dictionary; each takes a byte or more.
        entries = header.get(_DICTIONARY_PAGE, {}).get(_VALUES, 0)
        if not 0 <= entries <= size:
            raise BadPageError(f"a page promises {entries:,} entries in {size:,} bytes")
        values += sum(max(0, header.get(kind, {}).get(_VALUES, 0)) for kind in (_DATA_PAGE, _DATA_PAGE_V2))
        at = data + stored


def _read_header(raw: IO[bytes], start: int, end: int) -> tuple[dict[int, Any], int]:
    """The page header at ``start``, and where the data of the page begins."""
    length = _HEADER
    while True:
        raw.seek(start)
        reader = CompactReader(raw.read(min(length, end - start)))
        try:
            return reader.struct(_PAGE), start + reader.at
        except EOFError:
            if length >= min(_MAX_HEADER, end - start):
                raise BadPageError(f"no page header at byte {start:,}") from None
        length *= 16
