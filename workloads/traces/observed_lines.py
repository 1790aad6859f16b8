"""Lines of the files that ``kvsim observe`` writes: a header for each run of the proxy, a line for each request.

A line of the kind ``counts`` has the tokens of an earlier request of its run, which were counted after its end. A
request whose texts were not looked at in time (``missed``) may have a second line, which replaces the first.

A header has ``started`` (date and time), and the size of a block in bytes and in token ids. A request has its times in
seconds since then, its tokens and how they were counted, and hashes of the full blocks of its prompt's canonical text
(``blocks``) and of prompt and answer together beyond those (``answer_blocks``). Hashes are chained: equal ones stand
for equal texts from the beginning to the end of the block.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from workloads.generators.lengths import MAX_TOKENS
from workloads.request import BadRowError
from workloads.traces.bad_rows import FlawError
from workloads.traces.clock import parse_datetime
from workloads.traces.files import shown_path
from workloads.traces.jsonl import Object, check_keys, parse, seconds, shown, whole
from workloads.traces.observed_blocks import Call

VERSION = 1
"""The version of the format that is read."""

CAUSES = {
    "unreachable": "the server was not reached",
    "timeout": "not in time",
    "no_answer": "no answer",
    "cut_short": "the answer broke off",
    "http_4xx": "HTTP 4xx",
    "http_5xx": "HTTP 5xx",
    "error_event": "an error in the answer",
}
"""Why a request failed, by the proxy's word for it."""
FAILED, CANCELLED, EMPTY = "failed", "cancelled before the first token", "answered without a token"
"""Why a request is left out."""

_HEADER = re.compile(r'\{\s*"kind"\s*:\s*"observed"')
_KEYS = ("started", "block_bytes", "block_tokens")
_REQUEST_KEYS = (
    *("arrival_s", "last_s", "status", "end", "prompt_tokens", "output_tokens", "counted"),
    *("unit", "prompt_units", "blocks", "answer_units", "answer_blocks"),
)
_ENDS = ("completed", "cancelled", "failed")
_COUNTS = ("server", "tokenizer", "estimate")
_UNITS = ("bytes", "tokens")
_DIGITS = 16
_HEX = re.compile(r"[0-9a-f]*")
_MAX_UNITS = 2**40
_MAX_BLOCK = 2**20


RequestKey = tuple[int, Any]
"""Names a request by the start of its run and its number there."""


class Run(NamedTuple):
    """A run of the proxy, from its header."""

    started_ns: int
    """Nanoseconds since 1970."""
    block_bytes: int
    block_tokens: int


class Seen(NamedTuple):
    """A request as the proxy saw it."""

    key: RequestKey
    call: Call
    """The request, whose blocks are not in a tree yet."""
    estimated: bool
    """Whether its tokens were estimated."""
    left_out: str
    """Why the request is left out; empty if it is not."""
    cause: str
    """Why it failed, if that is known."""
    distorted: float
    """By how many seconds the proxy was late while it ran."""
    missed: bool
    """Whether the proxy has not looked at all of it."""
    blocks: list[int]
    """Hashes of the full blocks of the prompt."""
    answer_blocks: list[int]
    """Hashes of the further full blocks of prompt and answer; empty if the answer is not known."""


class Counts(NamedTuple):
    """Tokens of a request that were counted after its end."""

    key: RequestKey
    prompt_tokens: int
    output_tokens: int
    estimated: bool


class LineReader:
    """Reads the lines of a file in order; a header says what the requests after it mean."""

    def __init__(self, path: Path):
        self._path = Path(shown_path(path))
        self._run: Run | None = None

    def read(self, number: int, line: str) -> Seen | Counts | None:
        """What a line says of a request; None for a header.

        Raises ``FlawError`` for a bad request, and ``BadRowError`` for a bad header, since all that follows would be
        misunderstood without it.
        """
        try:
            row = parse(line, ("kind",))
            if row["kind"] == "observed":
                self._run = _run(row)
                return None
        except FlawError as flaw:
            if _HEADER.match(line):
                raise BadRowError(self._path, number, str(flaw)) from None
            raise
        if row["kind"] not in ("request", "counts"):
            raise FlawError(f"kind {shown(row['kind'])}; expected observed, request, counts")
        if self._run is None:
            raise FlawError('no header before it; a file begins with a line of kind "observed"')
        return _seen(row, self._run) if row["kind"] == "request" else _counts(row, self._run)


def without_torn(lines: Iterable[tuple[int, str]], torn: list[int]) -> Iterator[tuple[int, str]]:
    """The numbered lines without those that a killed proxy left unfinished, whose numbers are added to ``torn``.

    Such a line is the last of the file, or is followed by a header, in a line of its own or in the same one.
    """
    held: tuple[int, str] | None = None
    for number, line in lines:
        starts = [match.start() for match in _HEADER.finditer(line)] if '"observed"' in line else []
        glued = bool(starts) and starts[-1] > 0 and line.startswith("{")
        if held is not None:
            if starts and not glued and _is_torn(held[1]):
                torn.append(held[0])
            else:
                yield held
        if glued:
            torn.append(number)
            line = line[starts[-1] :]
        held = number, line
    if held is not None:
        if _is_torn(held[1]):
            torn.append(held[0])
        else:
            yield held


def _is_torn(line: str) -> bool:
    """Whether it is the beginning of a line; no object within one ends before the line does."""
    return line.startswith("{") and not line.rstrip().endswith("}")


def _run(row: Object) -> Run:
    """A header. Raises ``FlawError``."""
    check_keys("", row, ("version",))
    if type(row["version"]) is not int or row["version"] != VERSION:
        raise FlawError(f"version {shown(row['version'])} of the file's format is not read; expected {VERSION}")
    check_keys("", row, _KEYS)
    if not isinstance(row["started"], str):
        raise FlawError(f"started {shown(row['started'])} is not a date and time")
    started_ns = parse_datetime("started", row["started"])
    return Run(started_ns, whole(row, "block_bytes", 1, _MAX_BLOCK), whole(row, "block_tokens", 1, _MAX_BLOCK))


def _seen(row: Object, run: Run) -> Seen:
    """A request of this run. Raises ``FlawError``."""
    check_keys("", row, _REQUEST_KEYS)
    arrival_ns, ended_ns = (run.started_ns + round(seconds(row, key) * 1e9) for key in ("arrival_s", "last_s"))
    if ended_ns < arrival_ns:
        raise FlawError(f"last_s {shown(row['last_s'])} is before arrival_s {shown(row['arrival_s'])}")
    by_token = _one_of(row, "unit", _UNITS) == "tokens"
    size = run.block_tokens if by_token else run.block_bytes
    said, answered = (whole(row, key, 0, _MAX_UNITS) for key in ("prompt_units", "answer_units"))
    blocks, answer_blocks = _all_blocks(row, said // size, (said + answered) // size)
    # It ends later than it arrives even for the proxy's clock, so that it never ends before it is there.
    times = arrival_ns, max(ended_ns, arrival_ns + 1)
    prompt, output, estimated = _tokens(row)
    call = Call(*times, prompt, output, by_token, size, said, answered)
    left_out = _left_out(row, output)
    distorted = seconds(row, "distorted") if "distorted" in row else 0.0
    cause = CAUSES.get(row["cause"], "") if isinstance(row.get("cause"), str) else ""
    key = (run.started_ns, row["id"] if type(row.get("id")) is int else None)
    return Seen(key, call, estimated, left_out, cause, distorted, "missed" in row, blocks, answer_blocks)


def _counts(row: Object, run: Run) -> Counts:
    """Counts that came later. Raises ``FlawError``."""
    check_keys("", row, ("id", "prompt_tokens", "output_tokens", "counted"))
    return Counts((run.started_ns, whole(row, "id", 0, _MAX_UNITS)), *_tokens(row))


def _tokens(row: Object) -> tuple[int, int, bool]:
    """Tokens of prompt and answer, and whether they are estimates. Raises ``FlawError``."""
    prompt, output = (whole(row, key, 0, MAX_TOKENS) for key in ("prompt_tokens", "output_tokens"))
    return max(prompt, 1), output, _one_of(row, "counted", _COUNTS) == "estimate"


def _left_out(row: Object, output: int) -> str:
    """Why the request of this row is left out; empty if it is not. Raises ``FlawError``."""
    end, status = _one_of(row, "end", _ENDS), row["status"]
    good = status is not None and 200 <= whole(row, "status", 0, 999) < 300
    if end == "failed" or (end == "completed" and not good):
        return FAILED
    if good and output:
        return ""
    return CANCELLED if end == "cancelled" else EMPTY


def _all_blocks(row: Object, of_prompt: int, of_all: int) -> tuple[list[int], list[int]]:
    """The blocks of the prompt and of the answer, where there may be so many. Raises ``FlawError``."""
    blocks, answer = _hashes(row, "blocks"), _hashes(row, "answer_blocks")
    if len(blocks) > of_prompt:
        raise FlawError(f"{len(blocks)} blocks; prompt_units {row['prompt_units']} have {of_prompt}")
    if answer and (len(blocks) < of_prompt or len(answer) > of_all - of_prompt):
        raise FlawError(
            f"{len(blocks)} blocks and {len(answer)} answer_blocks; prompt_units {row['prompt_units']} and "
            f"answer_units {row['answer_units']} have {of_prompt} and {of_all - of_prompt}"
        )
    return blocks, answer


def _hashes(row: Object, key: str) -> list[int]:
    """A list of hashes, as numbers. Raises ``FlawError``."""
    value = row[key]
    if not isinstance(value, list):
        raise FlawError(f"{key} {shown(value)} is not a list")
    if not value:
        return []
    if set(map(type, value)) == {str} and set(map(len, value)) == {_DIGITS} and _HEX.fullmatch(text := "".join(value)):
        return list(struct.unpack(f">{len(value)}Q", bytes.fromhex(text)))
    wrong = next(v for v in value if not isinstance(v, str) or len(v) != _DIGITS or not _HEX.fullmatch(v))
    raise FlawError(f"{key}: {shown(wrong)} is not a hash of {_DIGITS} digits, 0 to 9 and a to f")


def _one_of(row: Object, key: str, accepted: tuple[str, ...]) -> Any:
    if row[key] not in accepted:
        raise FlawError(f"{key} {shown(row[key])}; expected {', '.join(accepted)}")
    return row[key]
