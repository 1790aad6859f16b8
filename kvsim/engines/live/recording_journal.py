"""What a run has gathered so far, line by line, so that a kill loses at most the last line and ``--resume`` goes on."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvsim.engines.live.client import Answer
from kvsim.engines.live.prompts import Prompt, Vocabulary
from kvsim.engines.live.traffic import Exchange
from kvsim.errors import UserError
from kvsim.experiments.traffic import InMemoryRequests
from workloads import Request, Workload

_KIND = "kvsim-journal"
_KEPT = ("id_slot", "truncated", "stop_type", "tokens_cached", "tokens_evaluated", "tokens_predicted")
_KEPT_TIMINGS = ("cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms")
_CLIENT_ERROR, _SERVER_ERROR = 400, 500


@dataclass(frozen=True)
class Head:
    """What a journal is of; a run that resumes must be of the same."""

    asked: str
    """Digest of all requests."""
    seed: int
    texts: int
    """Which texts of that seed."""
    engine: str
    """As the server says it."""
    vocabulary: Vocabulary
    flags: tuple[str, ...] | None
    """What the server was started with, if it was said."""
    began: float
    """When the first part began: seconds since 1970."""


class Journal:
    """A file to which each exchange is added as it ends; times are seconds since the beginning of the first part."""

    def __init__(self, path: Path, head: Head, exchanges: Sequence[Exchange], parts: Sequence[float]):
        self.path, self.head = path, head
        self.exchanges = list(exchanges)
        """One for each end, more than one of a request that was sent again."""
        self.parts = tuple(parts)
        """When each part began: 0 of the first."""

    @property
    def latest(self) -> dict[int, Exchange]:
        """By request, how it ended the last time that it was sent."""
        return {exchange.request.id: exchange for exchange in self.exchanges}

    @staticmethod
    def begin(path: Path, head: Head) -> Journal:
        """A new file. Raises ``UserError`` if there is one, or it cannot be written."""
        said = {**asdict(head), "vocabulary": head.vocabulary.to_dict(), "journal": _KIND}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(_line(said))
        except FileExistsError:
            raise UserError(
                f"{path}: a recording was begun there; --resume goes on with it, or delete it to begin anew"
            ) from None
        except OSError as e:
            raise UserError(f"{path}: cannot write: {e.strerror}") from None
        return Journal(path, head, (), (0.0,))

    @staticmethod
    def head_of(path: Path) -> Head:
        """What a journal is of. Raises ``UserError`` if it is none."""
        return _head(path, _lines(path))

    @staticmethod
    def resume(path: Path, requests: Workload) -> Journal:
        """A file that was begun, and goes on now. Raises ``UserError`` if it is none, or of other requests."""
        lines = _lines(path)
        head = _head(path, lines)
        if head.asked != digest(requests):
            raise UserError(
                f"{path}: of other requests than these; the same scenario, seed and --requests are expected"
            )
        known = {request.id: request for request in requests}
        try:
            exchanges = [_exchange(line, known) for line in lines[1:] if "part_s" not in line]
            parts = [0.0, *(float(line["part_s"]) for line in lines[1:] if "part_s" in line)]
        except (KeyError, TypeError, ValueError) as e:
            raise UserError(f"{path}: damaged ({type(e).__name__}: {e}); delete it to begin anew") from None
        part_s = max(time.time() - head.began, 0.0)
        _cut_last_line(path)
        journal = Journal(path, head, exchanges, [*parts, part_s])
        journal._append({"part_s": part_s})
        return journal

    def add(self, exchange: Exchange) -> None:
        """Add an exchange, whose times are since the beginning of this part. Raises ``UserError``."""
        moved = _later(exchange, self.parts[-1])
        self.exchanges.append(moved)
        answer = asdict(moved.answer)
        answer["result"] = kept_result(moved.answer.result)
        said = {"request": moved.request.id, "due_s": moved.due_s, "after": moved.after}
        self._append({**said, "prompt": asdict(moved.prompt), "answer": answer})

    def remove(self) -> None:
        """Delete the file: all is done."""
        self.path.unlink(missing_ok=True)

    def _append(self, said: dict[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(said))
        except OSError as e:
            raise UserError(f"{self.path}: cannot write: {e.strerror}") from None


def remaining(workload: Workload, done: Collection[int]) -> InMemoryRequests:
    """What is left of a workload; the first request comes at once. Sessions that lack a turn begin anew.

    ``done``: requests that need not be sent again.
    """
    groups = [group for group in _groups(workload) if any(request.id not in done for request in group)]
    first_s = groups[0][0].arrival_s if groups else 0.0
    return InMemoryRequests(
        tuple(r._replace(arrival_s=max(r.arrival_s - first_s, 0.0)) for group in groups for r in group),
        users=workload.users,
        notes=tuple(workload.notes),
        prefixes=workload.prefixes,
    )


def done_requests(exchanges: dict[int, Exchange]) -> frozenset[int]:
    """Requests that were answered, or that the server would refuse again."""
    return frozenset(
        id
        for id, exchange in exchanges.items()
        if exchange.answer.error is None or _CLIENT_ERROR <= (exchange.answer.status or 0) < _SERVER_ERROR
    )


def digest(requests: Workload) -> str:
    """Equal for equal requests."""
    found = hashlib.sha256(repr(requests.users).encode())
    for request in requests:
        found.update(repr(tuple(request)).encode())
    return found.hexdigest()


def kept_result(result: dict[str, Any]) -> dict[str, Any]:
    """What is kept of llama-server's last message: without texts and settings."""
    told = {**result, **result.get("timings", {})}
    return {key: told[key] for key in (*_KEPT, *_KEPT_TIMINGS) if key in told}


def _groups(workload: Workload) -> Iterator[list[Request]]:
    """Sessions, and single requests."""
    group: list[Request] = []
    for request in workload:
        if group and (request.session is None or request.session != group[0].session):
            yield group
            group = []
        group.append(request)
    if group:
        yield group


def _later(exchange: Exchange, by_s: float) -> Exchange:
    """The exchange with all of its times later."""
    answer = exchange.answer
    moved = replace(
        answer,
        sent_s=answer.sent_s + by_s,
        headers_s=None if answer.headers_s is None else answer.headers_s + by_s,
        token_s=[t + by_s for t in answer.token_s],
        done_s=answer.done_s + by_s,
    )
    return replace(exchange, answer=moved, due_s=exchange.due_s + by_s)


def _line(said: dict[str, Any]) -> str:
    return json.dumps(said, separators=(",", ":")) + "\n"


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines; the last one may have been cut by a kill."""
    try:
        text = path.read_text("utf-8", "replace")
        return [json.loads(line) for line in text.split("\n")[:-1]]
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; nothing was begun that --resume could go on with") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    except ValueError:
        raise UserError(f"{path}: damaged: not JSON lines; delete it to begin anew") from None


def _cut_last_line(path: Path) -> None:
    """Take away what follows the last end of a line."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def _head(path: Path, lines: list[dict[str, Any]]) -> Head:
    try:
        said = dict(lines[0])
        if said.pop("journal") != _KIND:
            raise ValueError("another kind of file")
        said["vocabulary"] = Vocabulary.from_dict(said["vocabulary"])
        said["flags"] = None if said["flags"] is None else tuple(said["flags"])
        return Head(**said)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{path}: not what kvsim record --url begins; delete it to begin anew") from None


def _exchange(line: dict[str, Any], known: dict[int, Request]) -> Exchange:
    prompt = line["prompt"]
    said = prompt["said"] if isinstance(prompt["said"], str) else tuple(prompt["said"])
    pieces = tuple((int(source), int(start), int(n)) for source, start, n in prompt["pieces"])
    return Exchange(
        known[line["request"]],
        Prompt(said, pieces, prompt["answer"], prompt["mark"]),
        Answer(**line["answer"]),
        line["due_s"],
        line["after"],
    )
