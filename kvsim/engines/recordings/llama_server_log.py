"""Read a llama-server's log: every call of ``llama_decode``, and every decision, in order.

The server must have been started with ``--log-file FILE --log-timestamps --log-prefix -lv 5``: only at level 5 does it
say what is in each batch. What its lines look like was read in ``tools/server/server-context.cpp``, ``server-task.cpp``
and ``server-queue.cpp`` of the llama.cpp in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvsim.engines.recordings.recording_files import Record
from kvsim.errors import LIMITS, UserError

FLAGS = "--log-file FILE --log-timestamps --log-prefix -lv 5"
"""What llama-server must be started with."""

_STAMP = re.compile(r"(\d{1,9})\.(\d\d)\.(\d{3})\.(\d{3}) ([A-Z]) ")
"""Minutes, seconds, milliseconds and microseconds since the start, and the level. Some messages do not end their line,
so a stamp may stand anywhere in one."""
_SPEAKER = re.compile(r"(slot|srv|que) [^:]*: (?:id +(\d{1,9}) \| task (-?\d{1,18}) \| )?")
"""The part of the server that speaks; for a slot, its number and its task, -1 if it has none."""

_NUMBER = r" *(?P<{}>-?\d{{1,18}}(?:\.\d{{1,18}})?|-?nan|-?inf)"
_TEXT = r"(?P<{}>.+)"


def _pattern(template: str) -> re.Pattern[str]:
    """The pattern of a message in which ``{name}`` is a number, ``{message}`` any text and ``{_}`` is not kept."""
    parts = re.split(r"\{(\w+)\}", template)
    found = ""
    for i, part in enumerate(parts):
        if i % 2 == 0:
            found += re.escape(part)
        elif part == "_":
            found += r"\S+"
        else:
            found += (_TEXT if part == "message" else _NUMBER).format(part)
    return re.compile(found)


_OF_CHECKPOINT = "pos_min = {pos_min}, pos_max = {pos_max}, n_tokens = {tokens}"
_EVENTS = (
    ("post", "new task, id = {task}/{_}, front = 0"),
    ("defer", "defer task, id = {task}"),
    ("pop", "pop deferred task, id_task = {task}"),
    ("check", "- checking sim = {sim} ({lcp}/{of})"),
    ("by_similarity", "selected slot by LCP similarity, f_sim_best = {sim} (> {threshold} thold), f_keep = {keep}"),
    ("by_lru", "selected slot by LRU, t_last = {t_last}"),
    ("look", "- looking for better prompt, base f_keep = {keep}, f_sim = {sim}"),
    ("candidate", "- prompt with length {tokens}, lcp = {lcp}, f_keep = {keep}, f_sim = {sim}"),
    ("found", "- found better prompt with f_keep = {keep}, f_sim = {sim}"),
    ("save", "- saving prompt with length {tokens}, total state size = {mib} MiB"),
    ("already_saved", "- prompt is already in the cache, skipping"),
    ("too_large", "- prompt state size {mib} MiB exceeds cache size limit {limit} MiB"),
    ("obsolete", "- removing obsolete cached prompt with length {tokens}"),
    ("make_room", "- making room for prompt cache entry, removing oldest entry (size = {mib} MiB"),
    ("size_limit", "- cache size limit reached, removing oldest entry (size = {mib} MiB"),
    ("token_limit", "- cache token limit ({limit}, est: {est}) reached, removing oldest entry"),
    ("host_cache", "- cache state: {prompts} prompts, {mib} MiB"),
    ("host_entry", "- prompt 0x{_}: {tokens} tokens, checkpoints: {checkpoints}, {mib} MiB"),
    ("clear", "clearing prompt with {tokens} tokens"),
    ("launch", "processing task, is_child = 0"),
    ("prompt", "new prompt, n_ctx_slot = {context}, n_keep = {n_keep}, task.n_tokens = {tokens}"),
    ("empty", "empty prompt - releasing slot"),
    ("one_at_least", "need to evaluate at least 1 token"),
    ("look_at_checkpoint", "checking checkpoint with [{pos_min}, {pos_max}] against {thold}"),
    ("restored_checkpoint", f"restored context checkpoint ({_OF_CHECKPOINT}, n_past = {{n_past}}, size = {{mib}} MiB"),
    ("no_checkpoint", "forcing full prompt re-processing due to lack of cache data"),
    (
        "invalid_checkpoint",
        f"erased invalidated context checkpoint ({_OF_CHECKPOINT}, n_swa = {{n_swa}}, pos_next = {{pos_next}}, "
        "size = {mib} MiB",
    ),
    (
        "close_checkpoint",
        f"erasing context checkpoint too close to an earlier one ({_OF_CHECKPOINT}, size = {{mib}} MiB",
    ),
    ("old_checkpoint", f"erasing old context checkpoint ({_OF_CHECKPOINT}, size = {{mib}} MiB"),
    ("same_checkpoint", "superseding context checkpoint at n_tokens = {tokens}"),
    ("checkpoint", f"created context checkpoint {{number}} of {{most}} ({_OF_CHECKPOINT}, size = {{mib}} MiB"),
    ("reuse", "reusing chunk with size {tokens}, shifting KV cache [{from}, {_}) -> [{to}, {_})"),
    (
        "no_room",
        "failed to find free space in the KV cache, retrying with smaller batch size, "
        "off = {off}, n_batch = {n_batch}, ret = {ret}",
    ),
    ("failed", "{message} off = {off}, n_batch = {n_batch}, ret = {ret}"),
    ("purge", "purging slot {slot} with {tokens} tokens"),
    ("shift", "slot context shift, n_keep = {n_keep}, n_left = {n_left}, n_discard = {n_discard}"),
    ("full", "stopped due to running out of context capacity, prompt.n_tokens() = {tokens}"),
    ("prompt_time", "prompt eval time = {ms} ms / {tokens} tokens"),
    ("answer_time", "eval time = {ms} ms / {tokens} tokens"),
    ("stop", "stop processing: n_tokens = {tokens}, truncated = {truncated}"),
    ("error", "task id = {task}, error: {message}"),
    ("idle", "all slots are idle"),
)
"""Kinds of events and the messages that tell of them; the first that fits counts."""

_MARKS = (
    ("token", "slot decode token, id={_}, n_ctx = {_}, n_tokens = {start}, truncated"),
    ("piece", "cached n_tokens = {start}, memory_seq_rm ["),
    ("prompt_end", "init sampler, took {_} ms, tokens: text = {_}, total = {total}"),
    ("decode", "n_batch (effective) = {n_batch}, off = {off}"),
    ("nothing", "no tokens to decode"),
    ("decoded", "done yielding to queue"),
    ("draft", "generate_draft: id="),
    ("sampling", "sampler params:"),
)
"""Messages that are no events: steps and marks are made of them."""

_MARK = re.compile(r"\bmirostat_ent = (\d{1,9}(?:\.\d{1,9})?)")
_KINDS = [(kind, template.split("{")[0], _pattern(template)) for kind, template in (*_MARKS, *_EVENTS)]
_MARK_KINDS = frozenset(kind for kind, _ in _MARKS)

_CONTEXT = (
    ("n_ctx", re.compile(r"llama_context: n_ctx += (\d+)")),
    ("n_batch", re.compile(r"llama_context: n_batch += (\d+)")),
    ("n_ubatch", re.compile(r"llama_context: n_ubatch += (\d+)")),
    ("flash_attn", re.compile(r"llama_context: flash_attn += (\w+)")),
    ("kv_cells", re.compile(r"llama_kv_cache: size = .*?\( *(\d+) cells")),
    ("kv_streams", re.compile(r"llama_kv_cache: size = .*? (\d+/\d+) seqs")),
    ("kv_type_k", re.compile(r"llama_kv_cache: size = .*?K \((\w+)\)")),
    ("kv_type_v", re.compile(r"llama_kv_cache: size = .*?V \((\w+)\)")),
    ("states", re.compile(r"llama_memory_recurrent: size = .*?\( *(\d+) cells")),
    ("states_mib", re.compile(r"llama_memory_recurrent: size = +([\d.]+) MiB")),
    ("flash_attn_resolved", re.compile(r"Flash Attention (?:was auto, set to )?(enabled|disabled)")),
)
"""What is said of a context while it is made. Several may be made to find out what fits; the last one serves."""
_SERVER = (
    ("http_threads", re.compile(r"using (\d+) threads for HTTP")),
    ("slots", re.compile(r"initializing, n_slots = (\d+)")),
    ("n_ctx_slot", re.compile(r"n_slots = \d+, n_ctx_slot = (\d+)")),
    ("kv_unified", re.compile(r"n_ctx_slot = \d+, kv_unified = '(\w+)'")),
    ("host_cache_mib", re.compile(r"prompt cache is enabled, size limit: (no limit|\d+)")),
    ("idle_slots", re.compile(r"(idle slots will be saved.*)")),
)


def _value(text: str) -> int | float | str | None:
    """A number where the text is one, None where it is one that is not finite."""
    if text.lstrip("-") in {"nan", "inf"}:
        return None
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


@dataclass(frozen=True)
class ServerLog:
    """What a llama-server did, by its log; times are seconds since it was started."""

    path: Path
    about: Record
    """What it said of itself while it loaded: ``slots``, ``n_ctx_slot``, ``n_batch`` and more, after its own
    corrections."""
    records: tuple[Record, ...]
    """Lines of type ``step`` and ``event``, in the log's order."""
    marks: Mapping[int, float] = field(default_factory=dict)
    """By task, the ``mirostat_tau`` of its request: without mirostat it changes nothing, so it can tell which request
    a task is of."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A message of the log."""

    at: int
    """Where in the text it begins."""
    t: float
    level: str
    text: str
    """Up to the end of the line."""
    rest: str
    """Further lines."""


def _lines(text: str) -> Iterator[_Line]:
    """The stamped messages, each up to the next stamp."""
    stamps = _STAMP.finditer(text)
    stamp = next(stamps, None)
    while stamp is not None:
        following = next(stamps, None)
        said, _, rest = text[stamp.end() : len(text) if following is None else following.start()].partition("\n")
        minutes, seconds, ms, us, level = stamp.groups()
        t = int(minutes) * 60 + int(seconds) + int(ms) / 1e3 + int(us) / 1e6
        yield _Line(stamp.start(), t, level, said, rest)
        stamp = following


@dataclass(slots=True)
class _Piece:
    """Consecutive tokens of a slot in a batch."""

    slot: int
    generated: bool
    start: int
    task: int
    count: int | None
    """None until the log says where the piece ends."""
    prompt: int | None = None
    """Tokens of the prompt that it belongs to."""


@dataclass(slots=True)
class _Step:
    """A call of ``llama_decode``, and the batch that it takes tokens from."""

    record: Record
    limit: int
    """The most tokens that it takes."""
    batch: list[_Piece]
    at: int


@dataclass
class _Steps:
    """Makes steps of the lines about single tokens and pieces of prompts, and notes the marks of tasks."""

    n_batch: int
    steps: list[_Step] = field(default_factory=list)
    marks: dict[int, float] = field(default_factory=dict)
    _batch: list[_Piece] = field(default_factory=list)
    _number: int = -1
    _composing: bool = False
    _prompts: dict[int, int] = field(default_factory=dict)
    """Tokens of the prompt of each slot."""
    _open: dict[int, _Piece] = field(default_factory=dict)
    """The last piece of each slot's prompt, where its end is not known."""
    _marked: dict[int, float] = field(default_factory=dict)
    """The marks of slots that are about to be given their tasks."""

    def event(self, record: Record) -> None:
        """Note what an event says of the last step, of a prompt, or of a mark."""
        if record["kind"] == "launch" and record.get("slot") in self._marked:
            self.marks[record.get("task", -1)] = self._marked.pop(record["slot"])
        if record["kind"] == "prompt" and "slot" in record:
            self._prompts[record["slot"]] = record["tokens"]
            self._open.pop(record["slot"], None)
        elif record["kind"] in ("no_room", "failed") and self.steps:
            self.steps[-1].record["ok"] = False

    def mark(self, line: _Line, kind: str, slot: int, task: int, found: Record) -> Record | None:
        """Take in a line; the record of a step that begins with it."""
        if kind in ("token", "piece"):
            self._add(_Piece(slot, kind == "token", found["start"], task, 1 if kind == "token" else None))
        elif kind == "prompt_end" and slot in self._open:
            piece = self._open.pop(slot)
            piece.count = found["total"] - piece.start
        elif kind == "decode":
            return self._decode(line, found)
        elif kind == "sampling" and (mark := _MARK.search(line.rest)):
            self._marked[slot] = float(mark[1])
        elif kind == "nothing" and self.steps:
            self.steps.pop().record["n"] = 0
        elif kind == "decoded" and self.steps and "s" not in self.steps[-1].record:
            record = self.steps[-1].record
            record["s"] = round(line.t - record["t"], 6)
        return None

    def _add(self, piece: _Piece) -> None:
        if not self._composing:
            self._batch, self._composing = [], True
            self._number += 1
        self._batch.append(piece)
        if not piece.generated:
            before = self._open.get(piece.slot)
            # A prompt that goes on says where its piece before ended.
            if before is not None and before.task == piece.task and piece.start > before.start:
                before.count = piece.start - before.start
            piece.prompt = self._prompts.get(piece.slot)
            self._open[piece.slot] = piece

    def _decode(self, line: _Line, found: Record) -> Record:
        first = self._composing or not self.steps
        self._composing = False
        record: Record = {"type": "step", "t": line.t, "batch": max(0, self._number), "off": found["off"], "n": -1}
        record["ok"] = True
        if first:
            record["tokens"] = []
        self.steps.append(_Step(record, found["n_batch"], self._batch, line.at))
        return record

    def finish(self) -> int | None:
        """Fill in how many tokens each step took; where in the text a step is that cannot be, or None."""
        for step in self.steps:
            known = sum(piece.count or 0 for piece in step.batch)
            for piece in step.batch:
                if piece.count is None:  # Nothing tells its end: it filled the batch.
                    most = (piece.prompt or self.n_batch + piece.start) - piece.start
                    piece.count = min(self.n_batch - known, most)
                    known += piece.count
            if known > self.n_batch or any((piece.count or 0) < 1 for piece in step.batch):
                return step.at
            record = step.record
            record["n"] = min(step.limit, known - record["off"])
            if record["n"] < 1 or record["off"] < 0:
                return step.at
            if "tokens" in record:
                record["tokens"] = [[p.slot, "g" if p.generated else "p", p.start, p.count] for p in step.batch]
        return None


def last_mark(path: Path) -> float:
    """The highest mark of a request in a log; 0 if there is none."""
    return max((float(found[1]) for found in _MARK.finditer(path.read_text("utf-8", "replace"))), default=0.0)


def read_log(path: str | Path) -> ServerLog:
    """Read a log of one run of llama-server.

    Raises ``UserError``, one line: not such a log, of a level that shows no batches, or damaged.
    """
    source = Path(path)
    try:
        text = source.read_text("utf-8", "replace")
    except (OSError, ValueError) as e:
        raise UserError(f"{source}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
    about = _about(source, text)
    steps = _Steps(about["n_batch"])
    records: list[Record] = []
    debug = False
    for line in _lines(text):
        debug = debug or line.level == "D"
        record = _record(source, line, steps)
        if record is not None:
            records.append(record)
    if not debug:
        raise UserError(f"{source}: shows no batches: its level is too low; llama-server must be started with {FLAGS}")
    wrong = steps.finish()
    if wrong is not None:
        number = text.count("\n", 0, wrong) + 1
        raise UserError(f"{source}: line {number}: a batch whose tokens are not shown; is the log damaged?")
    if not any(record.get("kind") == "launch" for record in records):
        raise UserError(f"{source}: shows no request that got a slot")
    # A step is left out if it was empty, or if the log ends before it.
    kept = [r for r in records if r["type"] == "event" or (r["n"] > 0 and "s" in r)]
    return ServerLog(source, about, tuple(kept), steps.marks)


def _about(source: Path, text: str) -> Record:
    """What the server said of itself while it loaded. Raises ``UserError`` if it is not there, or there twice."""
    context: Record = {}
    server: Record = {}
    stamped = False
    for line in _lines(text):
        stamped = True
        if "constructing llama_context" in line.text and "slots" not in server:
            context = {}
        if "initializing, n_slots" in line.text and "slots" in server:
            raise UserError(f"{source}: shows two starts of llama-server; a log of one run is expected")
        for found, patterns in ((context, _CONTEXT), (server, _SERVER)):
            for key, pattern in patterns:
                if key not in found and (hit := pattern.search(line.text)):
                    found[key] = _value(hit[1])
        if "new task, id = " in line.text and "slots" in server:
            break
    if not stamped:
        raise UserError(f"{source}: not a log of llama-server with times; it must be started with {FLAGS}")
    if "slots" not in server or "n_batch" not in context:
        raise UserError(
            f"{source}: does not show how llama-server loaded its model; "
            f"a whole log of a server started with {FLAGS} is expected"
        )
    return {**context, **server}


def _record(source: Path, line: _Line, steps: _Steps) -> Record | None:
    """The record that a line begins, if any."""
    speaker = _SPEAKER.match(line.text)
    if speaker is None:
        return None
    said = line.text[speaker.end() :].lstrip()
    fits = ((kind, pattern.match(said)) for kind, beginning, pattern in _KINDS if said.startswith(beginning))
    kind, hit = next((fit for fit in fits if fit[1]), ("", None))
    if hit is None:
        return None
    found = {key: _value(text) for key, text in hit.groupdict().items()}
    if not found.get("checkpoints", 1):
        del found["checkpoints"]  # Only models with windows or states have any.
    slot, task = (int(speaker[2]), int(speaker[3])) if speaker[2] else (-1, -1)
    if kind == "draft":
        raise UserError(f"{source}: shows speculative decoding, which is not replayed{LIMITS}")
    if kind in _MARK_KINDS:
        return steps.mark(line, kind, slot, task, found)
    record: Record = {"type": "event", "t": line.t, "kind": kind}
    if slot >= 0:
        record["slot"] = slot
    if task >= 0:
        record["task"] = task
    record |= found
    steps.event(record)
    return record
