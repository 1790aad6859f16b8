"""``[workload]`` sections that replay a trace file: one class for each kind of file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

import workloads
from kvsim.section import Section


class TraceWorkload(Section):
    """What all traces have."""

    count_key: ClassVar[str] = "limit"
    """The key that says how many requests at most."""
    path: str
    """Relative paths start at the scenario file's folder."""
    limit: PositiveInt | None = None
    rate_scale: Annotated[float, Field(ge=1e-6, le=1e9)] = 1.0
    start_s: NonNegativeFloat = 0.0
    stop_s: PositiveFloat | None = None

    def _read(self, reader: type[workloads.Trace], folder: Path) -> workloads.Workload:
        try:
            path = folder / Path(self.path).expanduser()
        except RuntimeError as e:
            raise workloads.WorkloadError(f"{self.path}: no such file ({e})") from None
        return reader(path, self.limit, self.rate_scale, self.start_s, self.stop_s)


class AzureWorkload(TraceWorkload):
    """A trace of the Azure LLM inference data set, plain or gzipped."""

    kind: Literal["azure"]

    def build(self, seed: int, folder: Path) -> workloads.Workload:
        """The request stream; reads the whole file once to check it."""
        return self._read(workloads.AzureTrace, folder)


class MooncakeWorkload(TraceWorkload):
    """A trace of Mooncake, plain or gzipped; it says which prompts share which blocks."""

    kind: Literal["mooncake"]

    def build(self, seed: int, folder: Path) -> workloads.Workload:
        """The request stream; reads the whole file once to check it."""
        return self._read(workloads.MooncakeTrace, folder)
