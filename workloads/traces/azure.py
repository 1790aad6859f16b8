"""The Azure LLM inference traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``.

Patel et al., "Splitwise: Efficient generative LLM inference using phase splitting" (ISCA 2024); public at
github.com/Azure/AzurePublicDataset under CC-BY-4.0. The 2023 files have CRLF line ends, seven decimals and no
final newline; the 2024 ones six decimals and an offset.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import islice

from workloads.request import WorkloadError
from workloads.traces.azure_columns import OddError, read_columns
from workloads.traces.azure_rows import COLUMNS, AzureClock, RowReader
from workloads.traces.bad_rows import FlawError
from workloads.traces.csv_rows import CsvRows
from workloads.traces.files import open_bytes, open_text
from workloads.traces.trace import Page, Row, Trace, page_of, paged

_BLOCK = 1 << 18
"""Bytes that are read at a time: some thousand rows."""
_LINE = 1 << 16
"""Bytes in a line at most, where many lines are read at once."""


class AzureTrace(Trace):
    """The requests of one of these files."""

    __slots__ = ()

    def _has_header(self) -> bool:
        return True

    def _pages(self, *, check_all: bool) -> Iterator[Page]:
        done = 0
        try:
            for page in self._blocks():
                yield page
                done += len(page.seconds)
        except (OddError, FlawError, WorkloadError, csv.Error):
            pass
        else:
            return
        # Again from the start, one by one: only so is the first of several faults found, and its row counted.
        yield from paged(islice(self._rows(), done, None))

    def _blocks(self) -> Iterator[Page]:
        """The rows block by block. Raises ``OddError`` where only ``_rows`` can go on; no fault is worded here."""
        clock = AzureClock()
        with open_bytes(self.path) as binary:
            header = binary.readline(_LINE)
            if header.decode("utf-8-sig").rstrip("\r\n") != ",".join(COLUMNS):
                raise OddError
            reader = RowReader(list(COLUMNS), range(3), clock)
            while block := binary.read(_BLOCK):
                rest = binary.readline(_LINE)
                if len(rest) == _LINE:
                    raise OddError
                block += rest
                try:
                    page = read_columns(block, clock)
                except OddError:
                    page = _read_lines(block, reader)
                yield page

    def _rows(self) -> Iterator[Row]:
        """The rows one by one, as every file can be read. Raises ``WorkloadError``."""
        with open_text(self.path) as text:
            rows = CsvRows(self.path, text, COLUMNS)
            reader = RowReader(rows.header or [], rows.columns, AzureClock())
            yield from self._ledger.sift(rows.numbered(), reader.read)


def _read_lines(block: bytes, reader: RowReader) -> Page:
    """The rows of whole lines of which some are odd, but still one line each."""
    if b'"' in block or block.count(b"\r") != block.count(b"\r\n"):
        raise OddError
    rows = csv.reader(block.decode().split("\n"), strict=True)
    return page_of([reader.read(row) for row in rows if row])
