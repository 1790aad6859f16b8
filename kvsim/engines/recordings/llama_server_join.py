"""Join what a client sent to a llama-server with the server's log: a recording for ``kvsim conform llama-server``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsim.engines.recordings.llama_server_log import ServerLog
from kvsim.engines.recordings.recording_files import Record
from kvsim.errors import UserError

_FORMAT = 1
_SAME_MS = 0.011
"""The log rounds times to 0.01 ms, the answer to 0.001 ms."""


@dataclass
class SentRequest:
    """A request to ``/completion``, and what came back; times are seconds since the client's start."""

    id: int
    prompt: Sequence[int] | str
    """Token ids; text only with ``pieces``, or if it is empty and has no tokens whatever the model."""
    n_predict: int
    pieces: Sequence[tuple[int | str, int, int]] | None = None
    """The texts that the prompt consists of, by name; None: its tokens say it."""
    prompt_tokens: int | None = None
    """Tokens of the prompt by the server's count; None: as many as there are ids."""
    answer: int | None = None
    """The token that the answer consists of, where the request forced one."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the body that matter to the server's decisions, such as ``n_keep``."""
    group: str = ""
    due_s: float | None = None
    """When it was to be sent; None: when it was."""
    after: int | None = None
    """The request whose end it waited for, and then for ``think_s``; None if it came by the clock."""
    think_s: float = 0.0
    mark: float | None = None
    """The ``mirostat_tau`` that it was sent with, if no other had the same: the log says it of the task."""
    send_s: float = 0.0
    headers_s: float = 0.0
    """When the status line came."""
    token_s: list[float] = field(default_factory=list)
    """When each token of the answer came."""
    tokens: list[int] = field(default_factory=list)
    """The answer."""
    done_s: float = 0.0
    status: int = 0
    """HTTP's; 0 if nothing came back."""
    result: Mapping[str, Any] | None = None
    """The server's last message: ``id_slot``, ``tokens_cached``, ``truncated`` and the fields of its ``timings``."""
    error: Any = None
    """What the server said instead."""


@dataclass
class _Task:
    """What the log says of a task."""

    id: int
    post: float
    slot: int | None = None
    prompt: int | None = None
    prompt_ms: float | None = None
    answer_ms: float | None = None
    mark: float | None = None


def recording(log: ServerLog, requests: Sequence[SentRequest], meta: Mapping[str, Any]) -> list[Record]:
    """The records of a run: ``meta``, sources, requests and the log, on the client's clock.

    ``meta`` has the server's ``flags`` as they were typed, and may have more; its ``server`` is added to by what the
    log says. Raises ``UserError`` if an answered request is not in the log.
    """
    tasks = _tasks(log)
    task_of = _match(log, requests, tasks)
    posts = {task.id: task.post for task in tasks}
    lags = [posts[task_of[r.id]] - r.send_s for r in requests if r.id in task_of]
    if not lags:
        raise UserError(f"{log.path}: none of the {len(requests)} requests is in the log")
    offset = min(lags)  # What the quickest request took to get there is taken for nothing.
    said = {"server": {**meta.get("server", {}), **log.about}}
    records = recording_without_log(requests, {**meta, **said}, task_of)
    since = _begin(log, tasks, min(posts[task] for task in task_of.values()))
    records += [{**record, "t": round(record["t"] - offset, 6)} for record in log.records if record["t"] >= since]
    return records


def _begin(log: ServerLog, tasks: Sequence[_Task], first: float) -> float:
    """From when on a log is of a run whose first request came at ``first``.

    Where others came before it, such as those of an earlier run, that is since the server was last idle.
    """
    idle = [record["t"] for record in log.records if record.get("kind") == "idle" and record["t"] <= first]
    return idle[-1] if idle and any(task.post < idle[-1] for task in tasks) else -math.inf


def recording_without_log(
    requests: Iterable[SentRequest], meta: Mapping[str, Any], task_of: Mapping[int, int] | None = None
) -> list[Record]:
    """The records of what a client sent and saw alone; ``task_of``: the log's task of each request, where known."""
    records: list[Record] = [{"type": "meta", "format": _FORMAT, **meta}]
    ordered = sorted(requests, key=lambda r: r.id)
    for request in ordered:
        if request.prompt and request.pieces is None:
            records.append({"type": "source", "name": _source(request), "tokens": list(request.prompt)})
    return records + [_request(request, (task_of or {}).get(request.id)) for request in ordered]


def _source(request: SentRequest) -> str:
    return f"prompt{request.id}"


def _request(request: SentRequest, task: int | None) -> Record:
    """The line of a request."""
    n, pieces = len(request.prompt), request.pieces
    if pieces is None:
        if isinstance(request.prompt, str) and n:
            raise UserError(f"request {request.id}: its prompt is text; token ids are expected")
        pieces = [(_source(request), 0, n)] if n else []
    record: Record = {"type": "request", "id": request.id, "group": request.group}
    if request.after is None:
        record["at"] = request.send_s if request.due_s is None else request.due_s
    else:
        record |= {"after": request.after, "think": request.think_s}
    record |= {
        "prompt": [list(piece) for piece in pieces],
        "prompt_tokens": n if request.prompt_tokens is None else request.prompt_tokens,
        "n_predict": request.n_predict,
        "answer": request.answer,
        "params": dict(request.params),
    }
    if not n:
        record["raw_prompt"] = "" if isinstance(request.prompt, str) else []
    record |= {"send_s": request.send_s, "status": request.status, "headers_s": request.headers_s}
    if request.result is not None:
        record["result"] = dict(request.result)
    if request.error is not None:
        record["error"] = request.error
    record |= {"done_s": request.done_s, "token_s": list(request.token_s)}
    if any(token != request.answer for token in request.tokens):
        record["output"] = list(request.tokens)
    if task is not None:
        record["task"] = task
    return record


def _tasks(log: ServerLog) -> list[_Task]:
    """The tasks of the log, in the order in which they came in."""
    tasks: dict[int, _Task] = {}
    for record in log.records:
        if record.get("kind") == "post":
            tasks[record["task"]] = _Task(record["task"], record["t"], mark=log.marks.get(record["task"]))
        task = tasks.get(record.get("task", -1))
        if task is None:
            continue
        task.slot = record.get("slot", task.slot)
        if record["kind"] == "prompt":
            task.prompt = record["tokens"]
        elif record["kind"] == "prompt_time":
            task.prompt_ms = record["ms"]
        elif record["kind"] == "answer_time":
            task.answer_ms = record["ms"]
    return list(tasks.values())


def _match(log: ServerLog, requests: Sequence[SentRequest], tasks: Sequence[_Task]) -> dict[int, int]:
    """The task of each request: by its mark, else by slot and times if the answer has them, else by its length."""
    left = list(tasks)
    found: dict[int, int] = {}
    for fits in (_is_marked, _is_answered, _is_as_long):
        for request in sorted(requests, key=lambda r: r.send_s):
            if request.id in found or _is_empty_list(request):  # Such a list is refused before it becomes a task.
                continue
            task = next((task for task in left if fits(request, task)), None)
            if task is not None:
                found[request.id] = task.id
                left.remove(task)
    for request in requests:
        if request.result is not None and request.id not in found:
            raise UserError(f"{log.path}: no task is that of request {request.id}; is it the log of another run?")
    return found


def _is_empty_list(request: SentRequest) -> bool:
    return not isinstance(request.prompt, str) and not len(request.prompt)


def _is_marked(request: SentRequest, task: _Task) -> bool:
    return request.mark is not None and request.mark == task.mark


def _is_answered(request: SentRequest, task: _Task) -> bool:
    """Whether slot and times in an answer are those that the log gives for a task."""
    result = request.result
    if result is None or "prompt_ms" not in result or task.prompt_ms is None or task.answer_ms is None:
        return False
    return (
        task.prompt == len(request.prompt)
        and task.slot == result.get("id_slot")
        and abs(task.prompt_ms - result["prompt_ms"]) < _SAME_MS
        and abs(task.answer_ms - result["predicted_ms"]) < _SAME_MS
    )


def _is_as_long(request: SentRequest, task: _Task) -> bool:
    """Whether an unanswered request, or an empty prompt, of which the log gives no times, can be that of a task."""
    return (
        task.prompt == len(request.prompt)
        and task.mark in (None, request.mark)
        and not (request.result and len(request.prompt))
    )
