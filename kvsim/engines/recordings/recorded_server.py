"""Recorded servers: what a server was, what was asked of it, and when it answered; JSONL, plain or compressed.

The first line is of kind ``meta``: the engine and its settings. Then comes a line of kind ``request`` for each request
and, where they were noted, a line of kind ``second`` for each second. All times are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from kvsim.errors import UserError
from workloads.traces.bad_rows import FlawError
from workloads.traces.files import open_text, shown_path
from workloads.traces.jsonl import MAX_LINE, Object, check_keys, parse, seconds, shown, whole
from workloads.traces.recorded import AskedRequest, asked_request, kind_of_line

Clock = Literal["engine", "client"]
"""Whose clock it was. ``engine``: the engine's own, from when it takes a request into its queue. ``client``: that of
who asked over HTTP, which includes the network and the front end."""

_MAX_COUNT = 1 << 40


class ServerMeta(BaseModel):
    """The engine and its settings; other keys are not read."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    engine: str
    version: str
    model: str
    """The model's name, as its publisher writes it."""
    device: str
    """The device's name, as its maker or the driver writes it."""
    device_memory_bytes: PositiveInt | None = None
    dtype: str | None = None
    """The type of weights, K and V."""
    tensor_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    """Engines behind vLLM's own balancer; limits and blocks are of each."""
    enable_expert_parallel: bool = False
    """Whether these divide the experts."""
    block_size: PositiveInt = 16
    """Tokens in a block."""
    num_gpu_blocks: PositiveInt | None = None
    """Blocks, the null block included; None if that was not noted."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    prefix_caching: bool
    max_num_seqs: PositiveInt | None
    """The most requests that run at the same time; None: vLLM's default on the device, as in the next."""
    max_num_batched_tokens: PositiveInt | None
    """The most tokens in a step."""
    max_model_len: PositiveInt | None = None
    """The most tokens of a sequence; None: as many as the model was trained for."""
    clock: Clock
    requests: PositiveInt
    """Number of lines of kind ``request`` in the file."""


class ServedRequest(NamedTuple):
    """A request, and when the server answered it; seconds since the first arrival."""

    id: str
    asked: AskedRequest
    first_token_s: float
    last_token_s: float
    preemptions: int | None
    """None if that was not noted."""


class ServerSecond(NamedTuple):
    """The state of the server at one time."""

    t: float
    """Seconds since the first arrival."""
    running: int
    waiting: int


@dataclass(frozen=True)
class RecordedServer:
    """A recording: one server, and all that was asked of it."""

    path: Path
    meta: ServerMeta
    requests: tuple[ServedRequest, ...]
    """In order of arrival, the first at 0."""
    seconds: tuple[ServerSecond, ...]
    """In order of time; empty if nothing was noted."""
    notes: tuple[str, ...] = ()
    """What was corrected in the file, one line each."""

    @property
    def name(self) -> str:
        """The name of the file up to the ending ``.jsonl``."""
        return self.path.name.split(".jsonl")[0] or self.path.stem

    def id_of(self, number: int) -> str:
        """The id of a request by its number in a simulation."""
        return self.requests[number].id

    @property
    def expert_parallel(self) -> int:
        """Servers that divide the experts."""
        return self.meta.data_parallel_size if self.meta.enable_expert_parallel else 1

    @property
    def preemptions(self) -> int | None:
        """Preemptions of all requests; None if they were not noted."""
        counts = [request.preemptions for request in self.requests]
        return None if None in counts else sum(n for n in counts if n is not None)


def read_recorded_server(path: str | Path) -> RecordedServer:
    """Read a recording. Raises ``UserError`` and ``WorkloadError``, one line with the file and its line."""
    path = Path(path)
    meta: ServerMeta | None = None
    requests: list[ServedRequest] = []
    seen: set[str] = set()
    states: list[ServerSecond] = []
    for number, line in _lines(path):
        try:
            row = parse(line, ("kind",))
            kind = kind_of_line(row)
            if (kind == "meta") is not (meta is None):
                raise FlawError("a second line of kind meta" if meta else f"kind {kind}; the first line must be meta")
            if kind == "meta":
                meta = _meta(row)
            elif kind == "request":
                requests.append(_request(row))
                if requests[-1].id in seen:
                    raise FlawError(f"a second request {requests[-1].id!r:.60}")
                seen.add(requests[-1].id)
            else:
                states.append(_second(row, states[-1].t if states else 0.0))
        except FlawError as flaw:
            raise UserError(f"{shown_path(path)}: line {number}: {flaw}") from None
    if meta is None:
        raise UserError(f"{shown_path(path)}: empty; a recorded server is expected: meta, requests and seconds")
    if len(requests) != meta.requests:
        cut = "; is the file cut?" if len(requests) < meta.requests else ""
        raise UserError(f"{shown_path(path)}: {len(requests)} requests, and meta says {meta.requests}{cut}")
    return _from_first_arrival(path, meta, requests, states)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1."""
    with open_text(path) as text:
        number = 0
        while line := text.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise UserError(f"{shown_path(path)}: line {number}: longer than {MAX_LINE} characters")
            if not line.isspace():
                yield number, line.rstrip("\r\n")


def _from_first_arrival(
    path: Path, meta: ServerMeta, requests: list[ServedRequest], states: list[ServerSecond]
) -> RecordedServer:
    """Sort the requests by arrival, and let all times start with the first."""
    ordered = sorted(requests, key=lambda request: request.asked.arrival_s)
    notes = () if ordered == requests else (f"{shown_path(path)}: the requests were sorted by arrival",)
    first_s = ordered[0].asked.arrival_s
    served = tuple(_earlier(request, first_s) for request in ordered)
    return RecordedServer(path, meta, served, tuple(s._replace(t=s.t - first_s) for s in states), notes)


def _earlier(request: ServedRequest, by_s: float) -> ServedRequest:
    """The request with all of its times earlier by some seconds."""
    return request._replace(
        asked=request.asked._replace(arrival_s=request.asked.arrival_s - by_s),
        first_token_s=request.first_token_s - by_s,
        last_token_s=request.last_token_s - by_s,
    )


def _meta(row: Object) -> ServerMeta:
    try:
        return ServerMeta.model_validate({key: value for key, value in row.items() if key != "kind"})
    except ValidationError as e:
        fault = e.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        if fault["type"] == "missing":
            raise FlawError(f"no key {key!r}") from None
        said = fault["msg"].removeprefix("Value error, ")
        raise FlawError(f"{key} {shown(fault['input'])}: {said[:1].lower()}{said[1:]}") from None


def _request(row: Object) -> ServedRequest:
    """A line of kind ``request``. Raises ``FlawError``."""
    check_keys("", row, ("id", "first_token_s", "last_token_s"))
    asked = asked_request(row)
    named = [("arrival_s", asked.arrival_s)]
    for key in ("scheduled_s", "first_token_s", "last_token_s"):
        if key != "scheduled_s" or row.get(key) is not None:
            named.append((key, seconds(row, key)))
    for (before, earlier), (key, later) in pairwise(named):
        if later < earlier:
            raise FlawError(f"{key} {later} is before {before} {earlier}")
    times = dict(named)
    preemptions = None if row.get("preemptions") is None else whole(row, "preemptions", 0, _MAX_COUNT)
    first, last = times["first_token_s"], times["last_token_s"]
    return ServedRequest(str(row["id"]), asked, first, last, preemptions)


def _second(row: Object, before: float) -> ServerSecond:
    """A line of kind ``second``. Raises ``FlawError``."""
    check_keys("", row, ("t", "running", "waiting"))
    now = seconds(row, "t")
    if now < before:
        raise FlawError(f"t {now} is earlier than the second before, {before}")
    running, waiting = (whole(row, key, 0, _MAX_COUNT) for key in ("running", "waiting"))
    if row.get("kv_percent") is not None:
        seconds(row, "kv_percent", most=100.0)
    return ServerSecond(now, running, waiting)
