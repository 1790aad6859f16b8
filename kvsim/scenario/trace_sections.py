"""``[workload]`` sections that replay a trace file: one class for each kind of file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, StringConstraints, field_validator

import workloads
from kvsim.scenario.section import Section


class TraceWorkload(Section):
    """What all traces have. A file may be plain, or packed by gzip, bzip2 or xz."""

    count_key: ClassVar[str] = "limit"
    """The key that says how many requests at most."""
    reader: ClassVar[type[workloads.Trace]]
    """Who reads such files."""
    path: str
    """Relative paths start at the scenario file's folder."""
    limit: PositiveInt | None = None
    rate_scale: Annotated[float, Field(ge=1e-6, le=1e9)] = 1.0
    start_s: NonNegativeFloat = 0.0
    stop_s: PositiveFloat | None = None
    keep: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the requests in the window that are kept, each (or each session) by a draw of its own."""
    skip_bad_rows: bool = False
    """Leave out rows that are wrong, and say which, instead of refusing the file."""

    def build(self, seed: int, folder: Path) -> workloads.Workload:
        """The request stream; reads the whole file once to check it. Raises ``WorkloadError``."""
        try:
            path = folder / Path(self.path).expanduser()
        except RuntimeError as e:
            raise workloads.WorkloadError(f"{self.path}: no such file ({e})") from None
        return self.reader(
            path,
            limit=self.limit,
            rate_scale=self.rate_scale,
            start_s=self.start_s,
            stop_s=self.stop_s,
            keep=self.keep,
            seed=seed,
            skip_bad_rows=self.skip_bad_rows,
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        """What this kind's reader takes beyond that."""
        return {}


class AzureWorkload(TraceWorkload):
    """A trace of the Azure LLM inference data set."""

    reader = workloads.AzureTrace
    kind: Literal["azure"]


class MooncakeWorkload(TraceWorkload):
    """A trace of Mooncake; it says which prompts share which blocks."""

    reader = workloads.MooncakeTrace
    kind: Literal["mooncake"]


class BurstGptWorkload(TraceWorkload):
    """A trace of BurstGPT."""

    reader = workloads.BurstGptTrace
    kind: Literal["burstgpt"]
    failed: Literal["refuse", "drop"] = "refuse"
    """Calls that failed, which have no response tokens: refuse the file, or leave them out and say which."""

    def _options(self) -> dict[str, Any]:
        return {"failed": self.failed}


class RagPulseWorkload(TraceWorkload):
    """The trace of RAGPulse; it says which prompts share which texts, if the files with their lengths are beside it."""

    reader = workloads.RagPulseTrace
    kind: Literal["ragpulse"]
    clock_reset: Literal["refuse", "continue"] = "refuse"
    """Where the clock falls: refuse the file, or add whole weeks from there on and say so."""

    def _options(self) -> dict[str, Any]:
        return {"clock_reset": self.clock_reset}


class WekaWorkload(TraceWorkload):
    """Sessions of coding agents; ``keep`` and the window go by sessions, ``limit`` by requests."""

    reader = workloads.WekaTrace
    kind: Literal["weka"]
    rate: Annotated[float, Field(ge=1e-9, le=1e9)] = 0.01
    """New sessions/s, Poisson: the trace does not say when they started."""

    def _options(self) -> dict[str, Any]:
        return {"rate": self.rate}


ColumnName = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class TableColumns(Section):
    """What the columns of a table are called."""

    arrival: ColumnName = "arrival"
    prompt: ColumnName = "prompt"
    """Tokens."""
    output: ColumnName = "output"
    """Tokens."""
    session: ColumnName | None = None
    """The rows of a session follow one another."""
    priority: ColumnName | None = None


class TableWorkload(TraceWorkload):
    """Any table of requests, in CSV, JSONL or Parquet."""

    reader = workloads.TableTrace
    kind: Literal["table"]
    format: Literal["csv", "jsonl", "parquet"] | None = None
    """By default what the file's name ends with."""
    columns: TableColumns = TableColumns()
    time: Literal["s", "ms", "us", "ns", "datetime"] = "s"
    """The unit of arrivals."""
    delimiter: str = ","
    """CSV: what stands between fields."""

    @field_validator("delimiter")
    @classmethod
    def _one_character(cls, delimiter: str) -> str:
        if len(delimiter) != 1 or delimiter in '\r\n"\0' or not delimiter.isascii():
            raise ValueError(f"{delimiter!r} cannot stand between fields; one character such as , ; or \\t is accepted")
        return delimiter

    def _options(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "columns": workloads.Columns(**self.columns.model_dump()),
            "time": self.time,
            "delimiter": self.delimiter,
        }


TRACES: dict[str, type[TraceWorkload]] = {
    "azure": AzureWorkload,
    "burstgpt": BurstGptWorkload,
    "mooncake": MooncakeWorkload,
    "ragpulse": RagPulseWorkload,
    "weka": WekaWorkload,
    "table": TableWorkload,
}
"""By ``kind``."""
