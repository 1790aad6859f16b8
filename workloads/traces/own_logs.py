"""Logs that one has anyway: of servers, of proxies and of benchmarks, recognised by what is in them.

What is read, and where the form of it was looked up:

- answers of OpenAI's API, one a line: ``created``, ``usage.prompt_tokens``, ``usage.completion_tokens`` (OpenAI's API
  reference, object ``chat.completion``), with llama-server's ``timings`` too (``result_timings::to_json`` in
  ``tools/server/server-task.cpp``, llama.cpp b6975); Ollama's last lines of an answer (``docs/api.md`` of 0.12);
- LiteLLM's spend log (model ``LiteLLM_SpendLogs`` in its ``schema.prisma``), CSV or JSON, and any CSV or JSON with
  such names;
- the log of llama-server (``server-context.cpp``, b6975) with ``--log-timestamps``;
- vLLM's log of requests (``vllm/entrypoints/logger.py`` of 0.11) with ``--enable-log-requests
  --enable-log-outputs`` at the level DEBUG, which has the numbers of all tokens;
- of all these, the tokens of a prompt that the server's cache held, where that is told: ``cached_tokens`` of OpenAI's
  API (vLLM: ``--enable-prompt-tokens-details``), also in LiteLLM's ``metadata``; ``timings.cache_n``;
- nginx's access log (``ngx_http_log_module``) with ``prompt_tokens=N`` and ``completion_tokens=N`` in its lines;
- results of ``vllm bench serve --save-detailed`` (``vllm/benchmarks/serve.py``, with ``start_times``) and of GuideLLM
  (``src/guidellm/schemas/request_stats.py`` of 0.4).
"""

from __future__ import annotations

import csv
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import dropwhile
from typing import Any, NamedTuple, TextIO, TypeVar

from workloads.generators.lengths import MAX_TOKENS
from workloads.request import WorkloadError
from workloads.reuse import LoggedHits
from workloads.traces.bad_rows import FlawError
from workloads.traces.clock import TIMESTAMP, parse_datetime
from workloads.traces.files import Remark, open_text, shown_path
from workloads.traces.jsonl import json_lines, parse, shown
from workloads.traces.table import TableTrace
from workloads.traces.table_row import SINCE_1970, TableRow

Used = TypeVar("Used")
Entry = Mapping[str, Any]

NAMES = {
    "arrival": (
        *("startTime", "request_start_time", "start_time", "created", "created_at", "timestamp", "time", "ts"),
        *("time_iso8601", "msec"),
    ),
    "prompt": ("prompt_tokens", "input_tokens", "prompt_eval_count"),
    "output": ("completion_tokens", "output_tokens", "eval_count"),
    "session": ("session_id", "conversation_id", "chat_id"),
}
"""Names that logs have for what we call so; the first that is there counts."""

_MOST = 1 << 28
"""The most characters of a file that is one JSON value."""
_START = 1 << 18
"""Characters that show the form; those of the first line and as many again."""
_TOOK = (("total_duration", 1), ("request_time", 10**9))
"""What tells how long an answer took where the time is that of its end, and nanoseconds in its unit."""
_LLAMA = re.compile(r"^(?:\d+\.\d\d\.\d{3}\.\d{3} [A-Z] |build: \d+ \(|main: |srv +\w+: |slot +\w+: )", re.MULTILINE)
_STAMP = re.compile(r"(\d+)\.(\d\d)\.(\d{3})\.(\d{3}) [A-Z] ")
_EVALUATED = re.compile(r"^(?:.*\| )? *prompt eval time = +\S+ ms / +(\d+) tokens")
_TASK = re.compile(r"slot +\w+: id +\d+ \| task (\d+) \| (.*)")
_PROMPT = re.compile(r"new prompt, .*(?:task\.n_tokens|n_prompt_tokens) = (\d+)")
_ANSWER = re.compile(r"^(?:.*\| )? *eval time = +\S+ ms / +(\d+) (?:tokens|runs)")
_VLLM = re.compile(r"^(?:\([^)]*\) )?(?:INFO|DEBUG|WARNING) (\d\d-\d\d \d\d:\d\d:\d\d) ")
_VLLM_ASKED = re.compile(r"(?:Received request|Request) (\S+?)(?: details)?: .*prompt_token_ids: \[([\d, ]*)\]")
_VLLM_ANSWERED = re.compile(
    r"Generated response (\S+?)( \(streaming \w+\))?: .*output_token_ids: (?:[\[(]([\d, ]*)[\])]|None)"
)
_NGINX = re.compile(r"\[(\d\d/[A-Z][a-z]{2}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4})\]")
_NAMED = re.compile(r'\b(prompt_tokens|completion_tokens|cached_tokens|request_time)["\']?[=:]\s*["\']?([\d.]+)')
_GIN = re.compile(r"^\[GIN\] \d{4}/\d\d/\d\d", re.MULTILINE)


class LogForm(NamedTuple):
    """A form of logs."""

    title: str
    entries: Callable[[LogTrace, TextIO], Iterable[tuple[int, Any]]]
    """The numbered parts of a file that are read one by one."""
    asked: Callable[[Any], Entry]
    """An entry with our names of what is in it. Raises ``FlawError``."""


@dataclass(frozen=True, slots=True)
class LogTrace(TableTrace):
    """The requests of a log of one's own, in order of arrival; what is in it shows which form it has.

    Entries without a number of tokens, such as failed calls and lines of a stream, are left out, and counted.
    """

    _prompts: array[int] = field(default_factory=lambda: array("q"), init=False, repr=False, compare=False)
    _found: array[int] = field(default_factory=lambda: array("q"), init=False, repr=False, compare=False)
    """Tokens of each prompt that the server's cache held, -1 where that is not told."""

    @property
    def logged_hits(self) -> LoggedHits | None:
        """What the server's cache held of the prompts, where that is told, of the whole file; None in a part of it.

        Servers leave out zeros: where some entries tell it, the others had none.
        """
        part = self._windowed() or self.keep < 1 or self.n_requests < len(self._prompts)
        told = not part and max(self._found, default=-1) >= 0
        return LoggedHits.of(self._prompts, [max(n, 0) for n in self._found]) if told else None

    def _has_header(self) -> bool:
        return False

    def _form(self) -> LogForm:
        with open_text(self.path) as text:
            start = text.readline(_START)
            while start.isspace():
                start = text.readline(_START)
            start = start.lstrip() + text.read(_START)
        form = log_form(start)
        if form is None:
            raise WorkloadError(f"{shown_path(self.path)}: no log that is known; {why_no_log(start)}")
        return form

    def _remarks(self) -> tuple[str, ...]:
        return Remark(f"{shown_path(self.path)}: read as {self._form().title}"), *TableTrace._remarks(self)

    def _rows(self, use: Callable[[TableRow], Used]) -> Iterator[Used]:
        form, first = self._form(), not self._bad_rows.closed
        if first:
            del self._prompts[:], self._found[:]

        def read(number: int, entry: Any) -> Used | None:
            try:
                entry = form.asked(entry)
                row, found = _row(entry), _found(entry)
            except (TypeError, ValueError, OverflowError) as e:
                raise FlawError(f"not what such a log has ({e})") from None
            if row is None:
                self._bad_rows.drop(number, "entry without numbers of tokens")
                return None
            if first:
                self._prompts.append(row.prompt_tokens)
                self._found.append(min(found, row.prompt_tokens))
            return use(row)

        with open_text(self.path) as text:
            for used in self._bad_rows.sift(form.entries(self, text), read):
                if used is not None:
                    yield used


def log_form(start: str) -> LogForm | None:
    """The form of a log that begins so; None if it is none of these."""
    if start.startswith(("{", "[")):
        return _json_form(start)
    if _VLLM.match(start):
        return _FORMS["vllm"]
    first = start.partition("\n")[0]
    if _NGINX.search(first) and (_NAMED.search(start)):
        return _FORMS["nginx"]
    if _named(first.replace('"', "").strip().split(",")):
        return _FORMS["litellm" if "startTime" in first else "csv"]
    return _FORMS["llama-server"] if _LLAMA.search(start) else None


def why_no_log(start: str) -> str:
    """Say what a log lacks that looks like one; empty if it does not."""
    if _GIN.search(start):
        return (
            "this log of Ollama says when requests ended, not how long they were; keep the last line of each answer of "
            "/api/chat, which has prompt_eval_count and eval_count, or let kvsim observe see the requests"
        )
    return ""


def _json_form(start: str) -> LogForm | None:
    if '"input_lens"' in start and '"output_lens"' in start:
        return _FORMS["vllm bench"]
    if '"benchmarks"' in start and ('"guidellm' in start or '"requests"' in start):
        return _FORMS["guidellm"]
    if start.startswith("["):
        try:
            row = json.JSONDecoder().raw_decode(start[1:].lstrip())[0]
        except (ValueError, RecursionError):
            return None
        return _FORMS["json"] if isinstance(row, dict) and _is_asked(row) else None
    for line in start.split("\n")[:20]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and _is_asked(row):
            tool = next((key for key, sign in _SIGNS.items() if sign in row), "json lines")
            return _FORMS[tool]
    return None


_SIGNS = {"timings": "timings", "ollama": "eval_count", "openai": "usage", "litellm lines": "startTime"}


def _is_asked(row: Entry) -> bool:
    """Whether an object has the time of a request, and numbers of tokens."""
    usage = row.get("usage") or row.get("timings")
    keys = [*row, *(usage if isinstance(usage, dict) else ())]
    return _named(keys) or ("timings" in row and "created" in row)


def _named(names: Iterable[str]) -> bool:
    """Whether there are names for all that a request needs."""
    known = {name.strip() for name in names}
    return all(known & set(NAMES[field]) for field in ("arrival", "prompt", "output"))


def _row(entry: Entry) -> TableRow | None:
    """The request of an entry; None if it has no numbers of tokens. Raises ``FlawError``."""
    usage = entry["usage"] if isinstance(entry.get("usage"), dict) else entry
    prompt, output = (_tokens(usage, field) for field in ("prompt", "output"))
    took = next((round(float(entry[key]) * unit) for key, unit in _TOOK if entry.get(key)), 0)
    timings = entry.get("timings")
    if isinstance(timings, dict):
        prompt = int(timings.get("prompt_n", 0)) + int(timings.get("cache_n", 0))
        output = int(timings.get("predicted_n", 0))
        took = round((timings.get("prompt_ms", 0) + timings.get("predicted_ms", 0)) * 1e6)
    if not prompt or not output:
        return None
    name = next((name for name in NAMES["arrival"] if entry.get(name) not in (None, "")), None)
    if name is None:
        raise FlawError(f"no time; expected one of {', '.join(NAMES['arrival'])}")
    session = next((entry[name] for name in NAMES["session"] if entry.get(name)), None)
    return TableRow(max(_nanoseconds(name, entry[name]) - took, 0), prompt, output, session)


def _found(entry: Entry) -> int:
    """Tokens of a prompt that the server's cache held; -1 if that is not told."""
    metadata = entry.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except (ValueError, RecursionError):
            metadata = None
    inner = metadata if isinstance(metadata, dict) else {}
    places = [entry.get("timings"), entry.get("usage"), inner.get("usage_object"), inner.get("additional_usage_values")]
    for place in (entry, *places):
        if not isinstance(place, dict):
            continue
        for told in (place.get("prompt_tokens_details"), place.get("input_tokens_details"), place):
            for name in ("cached_tokens", "cache_read_input_tokens", "cache_n"):
                if isinstance(told, dict) and told.get(name) not in (None, ""):
                    return int(told[name])
    return -1


def _tokens(usage: Entry, field: str) -> int:
    """A number of tokens; 0 if there is none. Raises ``FlawError`` for other values."""
    name = next((name for name in NAMES[field] if usage.get(name) not in (None, "")), None)
    if name is None:
        return 0
    value = usage[name]
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number <= MAX_TOKENS or number != int(number):
        raise FlawError(f"{name} {shown(value)} is no number of tokens; expected 0 to {MAX_TOKENS}")
    return int(number)


def _nanoseconds(name: str, value: Any) -> int:
    """A time as a date, or in seconds, or in smaller units since 1970. Raises ``FlawError``."""
    if isinstance(value, str) and TIMESTAMP.fullmatch(value.strip()):
        return parse_datetime(name, value)
    try:
        number = float(value)
        if not 0 <= number < 1e20:
            raise ValueError
    except (TypeError, ValueError):
        raise FlawError(f"{name} {shown(value)} is not a time; expected a date and time, or seconds") from None
    scale = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
    return round(number * scale[next((unit for least, unit in SINCE_1970 if number >= least), "s")])


def _lines(trace: LogTrace, text: TextIO) -> Iterator[tuple[int, str]]:
    return json_lines(trace.path, text)


def _csv_rows(trace: LogTrace, text: TextIO) -> Iterator[tuple[int, Entry]]:
    try:
        yield from enumerate(csv.DictReader(dropwhile(str.isspace, text), strict=True), 1)
    except csv.Error as e:
        raise WorkloadError(f"{shown_path(trace.path)}: not CSV ({e})") from None


def _document(trace: LogTrace, text: TextIO) -> Iterator[tuple[int, Entry]]:
    """The requests of a file that is one JSON value."""
    whole = text.read(_MOST + 1)
    if len(whole) > _MOST:
        raise WorkloadError(
            f"{shown_path(trace.path)}: longer than {_MOST:,} characters, which one JSON value may have"
        )
    try:
        found = json.loads(whole)
    except (ValueError, RecursionError) as e:
        raise WorkloadError(f"{shown_path(trace.path)}: not JSON ({e})") from None
    try:
        rows = list(_requests_of(found))
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise WorkloadError(f"{shown_path(trace.path)}: requests are not where they should be ({e})") from None
    return enumerate(rows, 1)


def _requests_of(found: Any) -> Iterator[Entry]:
    if isinstance(found, list):
        yield from found
    elif "benchmarks" in found:
        for benchmark in found["benchmarks"]:
            yield from benchmark["requests"]["successful"]
    elif "start_times" in found:
        columns = (found["start_times"], found["input_lens"], found["output_lens"])
        for start_s, prompt, output in zip(*columns, strict=True):
            yield {"start_time": start_s, "input_tokens": prompt, "output_tokens": output}
    else:
        raise KeyError("start_times, which vllm bench serve --save-detailed writes since 0.12")


def _llama_server(trace: LogTrace, text: TextIO) -> Iterator[tuple[int, Entry]]:
    """Requests by task: when it got its slot, and the tokens of its prompt and its answer."""
    began: dict[str, int] = {}
    prompts: dict[str, int] = {}
    evaluated = -1
    now: int | None = None
    task, number, seen = "", 0, False
    for line in text:
        if stamp := _STAMP.match(line):
            minutes, seconds, ms, us = map(int, stamp.groups())
            now = ((minutes * 60 + seconds) * 10**6 + ms * 1000 + us) * 1000
        if of := _TASK.search(line):
            task = of[1]
            seen = True
            if now is not None:
                began.setdefault(task, now)
            if found := _PROMPT.match(of[2]):
                prompts[task] = int(found[1])
        if found := _EVALUATED.match(line):
            evaluated = int(found[1])
        elif (answer := _ANSWER.match(line)) and task in prompts:
            if task not in began:
                raise WorkloadError(
                    f"{shown_path(trace.path)}: no times; start llama-server with --log-timestamps --log-prefix"
                )
            number += 1
            prompt = prompts.pop(task)
            tokens = {"prompt_tokens": prompt, "completion_tokens": int(answer[1])}
            tokens |= {"cached_tokens": max(prompt - evaluated, 0)} if evaluated >= 0 else {}
            evaluated = -1
            yield number, {"start_time": began.pop(task) / 1e9, **tokens}
    if not number:
        what = "no answer was finished" if seen else "no slot got a request"
        raise WorkloadError(f"{shown_path(trace.path)}: a log of llama-server in which {what}")


def _vllm(trace: LogTrace, text: TextIO) -> Iterator[tuple[int, Entry]]:
    """Requests of vLLM's log, which has neither year nor fractions of seconds."""
    asked: dict[str, tuple[str, int]] = {}
    streamed: dict[str, int] = {}
    number = 0
    for line in text:
        if not (stamp := _VLLM.match(line)):
            continue
        if found := _VLLM_ASKED.search(line):
            asked[found[1]] = f"2000-{stamp[1]}", _count(found[2])
        elif (found := _VLLM_ANSWERED.search(line)) and found[1] in asked:
            request, stream, ids = found.groups()
            if stream == " (streaming delta)":
                streamed[request] = streamed.get(request, 0) + _count(ids or "")
                continue
            number += 1
            time, prompt = asked.pop(request)
            # Of a stream, only its parts have the numbers of tokens.
            output = _count(ids) if ids else streamed.pop(request, 0)
            yield number, {"time": time, "prompt_tokens": prompt, "completion_tokens": output}
    if not number:
        raise WorkloadError(
            f"{shown_path(trace.path)}: a log of vLLM without numbers of tokens; start it with --enable-log-requests "
            "--enable-log-outputs and VLLM_LOGGING_LEVEL=DEBUG"
        )


def _count(ids: str) -> int:
    return len(ids.replace(",", " ").split())


def _nginx(line: str) -> Entry:
    stamp = _NGINX.search(line)
    if stamp is None:
        raise FlawError("no time such as [10/Oct/2025:13:55:36 +0000]")
    ended = datetime.strptime(stamp[1], "%d/%b/%Y:%H:%M:%S %z").timestamp()
    return {"time": ended, **dict(_NAMED.findall(line))}


def _plain(entry: Any) -> Entry:
    if not isinstance(entry, dict):
        raise FlawError(f"{shown(entry)} is not an object")
    return entry


def _object(line: str) -> Entry:
    return parse(line, ())


_FORMS = {
    "openai": LogForm("answers of OpenAI's API with their usage, one a line", _lines, _object),
    "timings": LogForm("answers of llama-server with their timings, one a line", _lines, _object),
    "ollama": LogForm("answers of Ollama, one a line", _lines, _object),
    "litellm lines": LogForm("LiteLLM's spend log, JSON lines", _lines, _object),
    "json lines": LogForm("requests in JSON, one a line", _lines, _object),
    "json": LogForm("a list of requests in JSON", _document, _plain),
    "litellm": LogForm("LiteLLM's spend log, CSV", _csv_rows, _plain),
    "csv": LogForm("requests in CSV", _csv_rows, _plain),
    "vllm bench": LogForm("a result of vllm bench serve", _document, _plain),
    "guidellm": LogForm("a report of GuideLLM", _document, _plain),
    "llama-server": LogForm("llama-server's log; requests begin where they get a slot", _llama_server, _plain),
    "vllm": LogForm("vLLM's log of requests, in whole seconds", _vllm, _plain),
    "nginx": LogForm("nginx's access log", _lines, _nginx),
}
