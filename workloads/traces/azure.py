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
from workloads.traces.azure_columns import IrregularRowsError, read_columns
from workloads.traces.azure_rows import COLUMNS, AzureClock, RowReader
from workloads.traces.bad_rows import FlawError
from workloads.traces.csv_rows import CsvRows
from workloads.traces.files import open_bytes, open_text
from workloads.traces.trace import Row, RowBatch, Trace, batch_of, in_batches

_BLOCK = 1 << 18
"""Bytes that are read at a time, some thousand rows."""
_LINE = 1 << 16
"""The most bytes in a line while blocks are read."""


class AzureTrace(Trace):
    """A trace of the Azure LLM inference data set."""

    __slots__ = ()

    def _has_header(self) -> bool:
        return True

    def _batches(self, *, check_all: bool) -> Iterator[RowBatch]:
        done = 0
        try:
            for batch in self._blocks():
                yield batch
                done += len(batch.seconds)
        except (IrregularRowsError, FlawError, WorkloadError, csv.Error):
            pass
        else:
            return
        # Again from the start, row by row: this finds the first of several faults and counts its row.
        yield from in_batches(islice(self._rows(), done, None))

    def _blocks(self) -> Iterator[RowBatch]:
        """Read rows in large blocks. Any exception means that ``_rows`` must go on; its messages describe faults."""
        clock = AzureClock()
        with open_bytes(self.path) as binary:
            header = binary.readline(_LINE)
            if header.decode("utf-8-sig").rstrip("\r\n") != ",".join(COLUMNS):
                raise IrregularRowsError
            reader = RowReader(list(COLUMNS), range(3), clock)
            while block := binary.read(_BLOCK):
                rest = binary.readline(_LINE)
                if len(rest) == _LINE:
                    raise IrregularRowsError
                block += rest
                try:
                    batch = read_columns(block, clock)
                except IrregularRowsError:
                    batch = _read_lines(block, reader)
                yield batch

    def _rows(self) -> Iterator[Row]:
        """Read rows one by one, which works for every file. Raises ``WorkloadError``."""
        with open_text(self.path) as text:
            rows = CsvRows(self.path, text, COLUMNS)
            reader = RowReader(rows.header or [], rows.columns, AzureClock())
            yield from self._bad_rows.sift(rows.numbered(), reader.read)


def _read_lines(block: bytes, reader: RowReader) -> RowBatch:
    """Read whole lines, one row each, that may be written in any way."""
    if b'"' in block or block.count(b"\r") != block.count(b"\r\n"):
        raise IrregularRowsError
    rows = csv.reader(block.decode().split("\n"), strict=True)
    return batch_of([reader.read(row) for row in rows if row])
