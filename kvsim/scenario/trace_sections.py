"""``[workload]`` sections that replay a trace file: one class for each kind of file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, StringConstraints, field_validator

import workloads
from kvsim.scenario.section import PositiveInt, Section, WorkloadSection


class TraceWorkload(WorkloadSection):
    """The keys of all traces. A file may be plain, or compressed by gzip, bzip2 or xz."""

    count_key: ClassVar[str] = "limit"
    """The key with the largest number of requests."""
    if TYPE_CHECKING:  # A field of every subclass.
        kind: str
    path: str
    """Relative paths start at the scenario file's folder."""
    limit: PositiveInt | None = None
    """The most requests to keep."""
    rate_scale: Annotated[float, Field(ge=1e-6, le=1e9)] = 1.0
    """Divides all arrival times: 2 doubles the rate."""
    start_s: NonNegativeFloat = 0.0
    """Start of the time window, in unscaled seconds since the first request."""
    stop_s: PositiveFloat | None = None
    """End of the time window."""
    keep: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability of keeping each request (or session) in the window, drawn independently."""
    skip_bad_rows: bool = False
    """Leave out wrong rows, and list them, instead of refusing the file."""

    def build(self, seed: int, folder: Path) -> workloads.Workload:
        """Open the trace, which reads the whole file once to check it. Raises ``WorkloadError``."""
        try:
            path = folder / Path(self.path).expanduser()
        except RuntimeError as e:
            raise workloads.WorkloadError(f"{self.path}: no such file ({e})") from None
        return workloads.open_trace(path, self.kind, seed=seed, **self._options())

    def _options(self) -> dict[str, Any]:
        """The options of the reader: the keys of this section but those of all workloads."""
        others = {"kind", "path", *WorkloadSection.model_fields}
        return {name: getattr(self, name) for name in type(self).model_fields if name not in others}


class AzureWorkload(TraceWorkload):
    """A trace of the Azure LLM inference data set."""

    kind: Literal["azure"]


class MooncakeWorkload(TraceWorkload):
    """A trace of Mooncake, which has the shared blocks of prompts."""

    kind: Literal["mooncake"]


class BurstGptWorkload(TraceWorkload):
    """A trace of BurstGPT."""

    kind: Literal["burstgpt"]
    failed: Literal["refuse", "drop"] = "refuse"
    """Failed calls, which have no response tokens: refuse the file, or leave them out and list them."""


class RagPulseWorkload(TraceWorkload):
    """The trace of RAGPulse; prompts have shared texts if the files with their lengths are in the same folder."""

    kind: Literal["ragpulse"]
    clock_reset: Literal["refuse", "continue"] = "refuse"
    """Where the clock goes back: refuse the file, or add whole weeks from there on and note it."""


class RecordedWorkload(TraceWorkload):
    """What was asked of a recorded server, as in the files of ``kvsim validate --recorded``."""

    kind: Literal["recorded"]


class ObservedWorkload(TraceWorkload):
    """What passed through ``kvsim observe``; ``keep`` and the time window refer to sessions, ``limit`` to requests."""

    kind: Literal["observed"]
    sessions: bool = True
    """Requests that go on from an earlier answer come as long after it as they did; if false, each at its own time."""


class LogWorkload(TraceWorkload):
    """A log of one's own: of a server, a proxy or a benchmark; see ``workloads.traces.own_logs``."""

    kind: Literal["log"]


class WekaWorkload(TraceWorkload):
    """Sessions of coding agents; ``keep`` and the time window refer to sessions, ``limit`` to requests."""

    kind: Literal["weka"]
    rate: Annotated[float, Field(ge=1e-9, le=1e9)] = 0.01
    """New sessions/s, Poisson: the trace does not have their start times."""


ColumnName = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class TableColumns(Section):
    """Names of the columns of a table."""

    arrival: ColumnName = "arrival"
    prompt: ColumnName = "prompt"
    """Number of tokens."""
    output: ColumnName = "output"
    """Number of tokens."""
    session: ColumnName | None = None
    """Name or number of the session; empty for a request of its own."""
    priority: ColumnName | None = None
    """Smaller values are more urgent."""


class TableWorkload(TraceWorkload):
    """A table of requests in CSV, JSONL or Parquet, with any names of columns."""

    kind: Literal["table"]
    format: Literal["csv", "jsonl", "parquet"] | None = None
    """By default, the suffix of the file's name."""
    columns: TableColumns = TableColumns()
    time: Literal["s", "ms", "us", "ns", "datetime"] = "s"
    """The unit of arrivals; ``datetime``: date and time."""
    delimiter: str = ","
    """The character between fields, in CSV."""

    @field_validator("delimiter")
    @classmethod
    def _one_character(cls, delimiter: str) -> str:
        if len(delimiter) != 1 or delimiter in '\r\n"\0' or not delimiter.isascii():
            raise ValueError(f"{delimiter!r} cannot separate fields; one character such as , ; or \\t is accepted")
        return delimiter

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "columns": workloads.Columns(**self.columns.model_dump())}


REGISTERED = "registered"
"""Stands for all kinds of traces that other packages read."""


class RegisteredWorkload(TraceWorkload):
    """A trace of a kind that another package reads; see [Add a reader](add-a-reader.md)."""

    kind: str
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """What the reader has beyond the keys of all traces."""

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if not is_registered(kind):
            raise ValueError(f"{kind!r} is no kind of trace that an installed package reads")
        return kind

    def _options(self) -> dict[str, Any]:
        keys = super()._options()
        own: dict[str, Any] = keys.pop("options")
        return keys | own


TRACES: dict[str, type[TraceWorkload]] = {
    "azure": AzureWorkload,
    "burstgpt": BurstGptWorkload,
    "mooncake": MooncakeWorkload,
    "ragpulse": RagPulseWorkload,
    "weka": WekaWorkload,
    "recorded": RecordedWorkload,
    "observed": ObservedWorkload,
    "log": LogWorkload,
    "table": TableWorkload,
}
"""Sections of traces by ``kind``."""


def is_registered(kind: str) -> bool:
    """Whether another package reads traces of this kind."""
    from workloads.traces.kinds import KINDS, readers  # Not before it is needed: it imports all readers.

    return kind in readers() and kind not in KINDS
