"""``kvsim record --url``: send a scenario's traffic to a running server, and write down what came back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvsim.engines.live.bounded import ServerFault
from kvsim.engines.live.client import Client
from kvsim.engines.live.prompts import FIRST_MARK, Prompts, Vocabulary
from kvsim.engines.live.recorded_lines import Record, latencies, llama_server_records, openai_records
from kvsim.engines.live.recorded_meta import Asking, Run, llama_server_meta, openai_meta
from kvsim.engines.live.recording_journal import Head, RecordingJournal, digest, done_requests, remaining
from kvsim.engines.live.settings import (
    ServerSettings,
    about_server,
    ask_counters,
    ask_settings,
    flags_of_log,
    flags_of_server,
)
from kvsim.engines.live.traffic import Exchange, SendingStopped, send_traffic
from kvsim.engines.live.vocabulary import find_vocabulary
from kvsim.engines.recordings.llama_server_log import ServerLog, last_mark, read_log
from kvsim.engines.recordings.llama_server_replay import state_header
from kvsim.engines.recordings.recording_files import check_target, write_recording
from kvsim.engines.recordings.server_flags import scenario_of
from kvsim.errors import UserError, counted
from kvsim.scenario.scenario import Scenario
from workloads import Workload

Form = Literal["llama-server", "vllm"]
"""How the lines of a recording look."""

_SLACK_TOKENS, _SLACK_SHARE = 8, 0.01
"""By how much counters may exceed what was asked before it is said that others ask too."""
_CAUSES, _NAMED = 3, 5
"""Causes of failures, and requests of each, that are named."""
_LOG_WAITS_S = (0.3, 1.5)
"""Seconds in which a server writes the end of its log."""


@dataclass(frozen=True)
class LiveRecording:
    """Summary of a recording that was written."""

    path: Path
    engine: str
    form: Form
    requests: int
    """To be sent in all."""
    ended: int
    """Sent, and ended well or not."""
    failed: int
    """Requests among them that got no answer, or another one than they asked for."""
    first_failure: str | None
    why_failed: str
    """Which requests failed and why, in words."""
    steps: int | None
    """From the server's log; None without one."""
    text: bool
    """Whether prompts were sent as text."""
    latencies: dict[str, Any]
    """TTFT and TPOT, milliseconds."""
    assumed: tuple[str, ...]
    """What the server does not say, one line each."""
    warnings: tuple[str, ...]
    stopped: str | None
    """Why it ended early; what is missing can be sent with ``resume``."""
    interrupted: bool
    """Whether the user ended it."""

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        told = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        del told["path"], told["interrupted"], told["latencies"]
        return {"file": str(self.path), **told, **{name: self.latencies.get(name) for name in ("ttft_ms", "tpot_ms")}}


def record_server(
    scenario: Scenario, path: str | Path, asking: Asking, *, progress: Callable[[float], None] | None = None
) -> LiveRecording:
    """Send a scenario's traffic to a server and write a recording of what was sent and what came back.

    While it goes, each request that ends is added to a file beside, ``path`` with ``.part`` behind it. If the sending
    ends early, the recording has what was gathered, and that file stays, for ``Asking.resume``. ``progress`` is told
    the share of requests that have ended. Raises ``UserError`` where nothing could be gathered.
    """
    path, address = Path(path), asking.address
    check_target(path)
    if asking.log is not None and not asking.log.is_file():
        raise UserError(f"{asking.log}: there is no such log")
    settings = ask_settings(address, key=asking.key, timeout_s=min(asking.timeout_s, 10.0))
    if asking.log is not None and settings.api != "llama-server":
        raise UserError(f"{address}: is {settings.engine}; a log is read of llama-server only")
    if asking.flags is not None and settings.api == "llama-server":
        _check(asking.flags, settings)
    workload = scenario.build_workload()
    journal = _journal(scenario, path.with_name(path.name + ".part"), asking, settings, workload)
    run = Run(scenario, path, asking, settings, workload, journal)
    _send(run, progress)
    if not any(exchange.answer.error is None for exchange in journal.exchanges):
        return _nothing(run)
    done = _write(run)
    if run.stopped is None:
        journal.remove()
    return done


def _client(asking: Asking, settings: ServerSettings) -> Client:
    return Client(asking.address, settings.api, settings.model, key=asking.key, timeout_s=asking.timeout_s)


def _check(flags: tuple[str, ...], settings: ServerSettings) -> None:
    """Raises ``UserError`` unless these can be the flags of a server."""
    try:
        scenario_of({"flags": flags, "server": about_server(settings, flags)})
    except (ValueError, KeyError) as e:
        raise UserError(f"--flags: {' '.join(str(e).split())}") from None


def _journal(
    scenario: Scenario, part: Path, asking: Asking, settings: ServerSettings, workload: Workload
) -> RecordingJournal:
    """The file that keeps what is gathered. Raises ``UserError``."""
    if asking.resume:
        engine = RecordingJournal.head_of(part).engine
        if engine != settings.engine:
            raise UserError(f"{part}: begun with {engine}; {asking.address} is {settings.engine}")
        return RecordingJournal.resume(part, workload)
    if part.exists():
        raise UserError(f"{part}: a recording was begun there; --resume goes on with it, or delete it to begin anew")

    async def find() -> Vocabulary:
        async with _client(asking, settings) as client:
            return await find_vocabulary(client, settings)

    vocabulary = asyncio.run(find())
    head = Head(
        asked=digest(workload),
        seed=scenario.seed,
        texts=asking.texts,
        engine=settings.engine,
        vocabulary=vocabulary,
        flags=asking.flags,
        began=time.time(),
    )
    return RecordingJournal.begin(part, head)


def _send(run: Run, progress: Callable[[float], None] | None) -> None:
    """Send what is missing."""
    journal, asking = run.journal, run.asking
    left = remaining(run.workload, done_requests(journal.latest))
    if not left.requests:
        return
    total, before_ours = run.workload.n_requests, len(journal.exchanges)
    first_mark = None
    if asking.log is not None:  # Above those of earlier parts, and of earlier recordings of this server.
        first_mark = max((len(journal.parts) - 1) * total, int(last_mark(asking.log) - FIRST_MARK) + 1)
    head = journal.head
    prompts = Prompts(head.seed, head.vocabulary, texts=head.texts, first_mark=first_mark)
    for exchange in journal.exchanges:
        prompts.answered(exchange.request, exchange.answer)

    def note(exchange: Exchange) -> None:
        journal.add(exchange)
        if progress is not None:
            progress(len(journal.latest) / total)

    before = ask_counters(asking.address, key=asking.key)
    try:
        send_traffic(lambda: _client(asking, run.settings), left, prompts, limit_s=asking.limit_s, on_end=note)
    except SendingStopped as stopped:
        run.stopped = stopped
        return  # What the server computed of requests that had not ended is not known.
    is_all = len(done_requests(journal.latest)) == total
    after = None
    try:
        if before is not None:
            after = ask_counters(asking.address, key=asking.key)
        elif not is_all:
            ask_settings(asking.address, key=asking.key)
    except ServerFault as fault:  # It went while the last requests were on their way.
        if not is_all:
            run.stopped = SendingStopped(str(fault), journal.exchanges)
        return
    if before is not None and after is not None:
        counted_now = after.prompt_tokens + after.output_tokens - before.prompt_tokens - before.output_tokens
        run.others = {"counted": counted_now, "ours": _most(journal.exchanges[before_ours:], run.settings)}


def _most(exchanges: Sequence[Exchange], settings: ServerSettings) -> int:
    """Tokens that a server may have counted for us, all that was asked of those that failed included."""
    tokens = 0
    for exchange in exchanges:
        request, answer = exchange.request, exchange.answer
        if answer.error is not None:
            tokens += request.prompt_tokens + request.output_tokens
            continue
        # llama-server counts what it computes, vLLM whole prompts.
        found = answer.cached_tokens or 0 if settings.api == "llama-server" else 0
        tokens += (answer.prompt_tokens or request.prompt_tokens) - found + answer.output_tokens
    return tokens


def _nothing(run: Run) -> LiveRecording:
    """Raises ``UserError``: there is nothing to be kept."""
    if len(run.journal.parts) == 1:
        run.journal.remove()
    if run.stopped is not None and run.stopped.interrupted:
        raise KeyboardInterrupt
    if run.stopped is not None:
        raise UserError(f"{run.stopped}; nothing was gathered")
    first = next(iter(run.journal.latest.values()))
    raise UserError(
        f"{run.asking.address}: none of {counted(run.workload.n_requests, 'request')} was answered: {first.error}"
    )


def _write(run: Run) -> LiveRecording:
    """Write what was gathered."""
    journal, settings = run.journal, run.settings
    exchanges = list(journal.latest.values())
    warnings = _warnings(run)
    steps: int | None = None
    if settings.api == "llama-server":
        records, assumed, told = _as_llama_server(run, exchanges)
        warnings += told
        if run.asking.log is not None:
            steps = sum(record["type"] == "step" for record in records) or None
    else:
        known = run.asking.flags or settings.started
        assumed = [] if known else ["flags: the server does not say them"]
        records = openai_records(exchanges, openai_meta(run, assumed))
    write_recording(run.path, records)
    failures = [exchange for exchange in exchanges if exchange.error is not None]
    return LiveRecording(
        path=run.path,
        engine=settings.engine,
        form="llama-server" if settings.api == "llama-server" else "vllm",
        requests=run.workload.n_requests,
        ended=len(exchanges),
        failed=len(failures),
        first_failure=f"request {failures[0].request.id}: {failures[0].error}" if failures else None,
        steps=steps,
        why_failed=_why(failures),
        text=journal.head.vocabulary.is_text,
        latencies=latencies(exchanges),
        assumed=tuple(assumed),
        warnings=tuple(warnings),
        stopped=None if run.stopped is None else str(run.stopped),
        interrupted=run.stopped is not None and run.stopped.interrupted,
    )


def _why(failures: Sequence[Exchange]) -> str:
    """Which requests failed and why, the most frequent causes first."""
    by_cause: dict[str, list[int]] = {}
    for exchange in failures:
        by_cause.setdefault(exchange.error or "", []).append(exchange.request.id)
    causes = sorted(by_cause.items(), key=lambda each: -len(each[1]))
    told = []
    for cause, ids in causes[:_CAUSES]:
        more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
        which = f"request{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids[:_NAMED]))}{more}"
        told.append(f"{cause} ({which})")
    rest = sum(len(ids) for _, ids in causes[_CAUSES:])
    return "; ".join([*told, *([f"{rest} for other reasons"] if rest else [])])


def _warnings(run: Run) -> list[str]:
    """What the user must know of how it went, one line each."""
    found = []
    first = min(run.journal.exchanges, key=lambda exchange: exchange.answer.sent_s)
    if first.answer.cached_tokens:
        known = f"its cache held {counted(first.answer.cached_tokens, 'token')} of the first prompt already"
        found.append(f"{run.asking.address}: {known}; start it anew, or take another --seed, for a run of its own")
    if again := sum(exchange.answer.tries > 1 for exchange in run.journal.latest.values()):
        sent = f"{counted(again, 'request')} sent again, as it asked for by Retry-After; times are of the last time"
        found.append(f"{run.asking.address}: {sent}")
    if run.others is None:
        return found
    counted_now, ours = run.others["counted"], run.others["ours"]
    if counted_now < 0:
        found.append(f"{run.asking.address}: its counters fell: was it started anew meanwhile?")
    elif counted_now > ours + max(_SLACK_TOKENS, ours * _SLACK_SHARE):
        tokens = f"it computed {counted(counted_now, 'token')}, and {counted(ours, 'token')} were ours"
        found.append(
            f"{run.asking.address}: used by others meanwhile: {tokens}; times and cache hits are not ours alone"
        )
    return found


def _as_llama_server(run: Run, exchanges: Sequence[Exchange]) -> tuple[list[Record], list[str], list[str]]:
    """The records, what was assumed, and warnings. A log that does not fit is left out, and said."""
    given = run.asking.flags or run.journal.head.flags
    fault = ""
    if run.asking.log is not None:
        for wait_s in _LOG_WAITS_S:
            time.sleep(wait_s)
            try:
                log = read_log(run.asking.log)
                flags, assumed = _flags(given, flags_of_log(log.about))
                meta = llama_server_meta(run, flags, assumed)
                # Bytes that depend on the server's version, which it does not say over HTTP.
                scenario, _ = scenario_of({**meta, "server": {**meta["server"], **log.about}})
                meta["server"]["state_header"] = state_header(scenario, log.records)
                records = llama_server_records(exchanges, meta, log)
            except UserError as e:
                fault = str(e)
            else:
                return records, assumed, _strangers(log, records)
    flags, assumed = _flags(given, flags_of_server(run.settings))
    records = llama_server_records(exchanges, llama_server_meta(run, flags, assumed))
    return records, assumed, [f"{fault}; the recording is without steps and decisions"] if fault else []


def _flags(given: tuple[str, ...] | None, found: tuple[list[str], str]) -> tuple[list[str], list[str]]:
    return (list(given), []) if given is not None else (found[0], list(filter(None, [found[1]])))


def _strangers(log: ServerLog, records: Sequence[Record]) -> list[str]:
    """A warning if the log has requests that are not in the recording: conformance cannot hold then."""
    ours = {record["task"] for record in records if record["type"] == "request" and "task" in record}
    others = sum(record.get("kind") == "launch" and record["task"] not in ours for record in log.records)
    if not others:
        return []
    return [
        f"{log.path}: {counted(others, 'request')} of others in the log; kvsim conform needs all that a server served"
    ]
