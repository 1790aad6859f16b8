"""The Azure LLM inference traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``.

Patel et al., "Splitwise: Efficient generative LLM inference using phase splitting" (ISCA 2024); public at
github.com/Azure/AzurePublicDataset under CC-BY-4.0. The 2023 files have CRLF line ends, seven decimals and no
final newline; the 2024 ones six decimals and an offset.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import islice
from typing import ClassVar

from workloads.request import WorkloadError
from workloads.traces.azure_columns import IrregularRowsError, read_columns
from workloads.traces.bad_rows import FlawError
from workloads.traces.clock import Clock
from workloads.traces.columns import TOKENS, Schema, time_in
from workloads.traces.csv_rows import check_fields
from workloads.traces.files import open_bytes
from workloads.traces.row_trace import RowTrace
from workloads.traces.trace import RowBatch, batch_of, in_batches

_BLOCK = 1 << 18
"""Bytes that are read at a time, some thousand rows."""
_LINE = 1 << 16
"""The most bytes in a line while blocks are read."""


class AzureTrace(RowTrace):
    """A trace of the Azure LLM inference data set."""

    __slots__ = ()

    columns: ClassVar[Schema] = {
        "TIMESTAMP": time_in("datetime"),
        "ContextTokens": TOKENS,
        "GeneratedTokens": TOKENS,
    }

    def _batches(self, *, check_all: bool) -> Iterator[RowBatch]:
        done = 0
        try:
            for batch in self._blocks():
                yield batch
                done += len(batch.seconds)
        except (IrregularRowsError, FlawError, WorkloadError, csv.Error):
            # Again from the start, row by row: this finds the first of several faults and counts its row.
            yield from in_batches(islice(self._rows(check_all=check_all), done, None))

    def _blocks(self) -> Iterator[RowBatch]:
        """Read rows in large blocks. Any exception means that ``_rows`` must go on; its messages describe faults."""
        clock = Clock()
        with open_bytes(self.path) as binary:
            header = binary.readline(_LINE)
            if header.decode("utf-8-sig").rstrip("\r\n") != ",".join(self.columns):
                raise IrregularRowsError
            while block := binary.read(_BLOCK):
                rest = binary.readline(_LINE)
                if len(rest) == _LINE:
                    raise IrregularRowsError
                block += rest
                try:
                    batch = read_columns(block, clock)
                except IrregularRowsError:
                    batch = self._read_lines(block, clock)
                yield batch

    def _read_lines(self, block: bytes, clock: Clock) -> RowBatch:
        """Read whole lines, one row each, that may be written in any way."""
        if b'"' in block or block.count(b"\r") != block.count(b"\r\n"):
            raise IrregularRowsError
        read, header = self._reader(clock, check_all=False), list(self.columns)
        readers = [(name, column.of_text) for name, column in self._timed(clock).items()]
        rows = []
        for fields in csv.reader(block.decode().split("\n"), strict=True):
            if fields:
                check_fields(fields, header)
                rows.append(read(0, [of(name, field) for (name, of), field in zip(readers, fields, strict=True)]))
        return batch_of([row for row in rows if row is not None])
