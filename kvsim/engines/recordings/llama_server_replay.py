"""Replay recorded runs of llama-server on its scheduler, and compare every batch and every decision."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvsim.engines.recordings.recording_files import Record
from kvsim.engines.recordings.replay import Replay, State, ZeroTimeBackend
from kvsim.engines.recordings.server_flags import scenario_of
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.host_prompt_cache import MIB, STATE_HEADER, StateSize, size_of_states
from kvsim.simulation.schedulers.llama_server import LlamaServer
from kvsim.simulation.set_up import build_policy
from policies import Chunk, Content, OutOfCells
from workloads import Request

_EARLIER_STATE_HEADER = 20
"""Bytes of a saved state's header in llama-server 0.5.0-dev."""
_EDGE_S = 0.002
"""Times in the log agree to 1 or 2 ms: a task that came so long before a step ended may have come after it."""
_REFUSED_BY_HTTP = 400
_WARM_UP_TOKEN, _WARM_UP_ANSWER = 999, 8
_SHARES = ("sim", "keep", "threshold", "mib")
"""Fields that the log rounds to three digits."""
_BYTES = ("mib", "limit", "est")
"""Fields that depend on the model."""
_TAKEN_IN = ("check", "by_similarity", "by_lru", "defer", "launch")
"""Decisions on tasks that are taken from the queue; in each round of the server's loop they come before all prompts."""
_NOT_COMPARED = ("type", "kind", "t", "ms", "message", "ret", "limit_mib")


class _ReplayedServer(LlamaServer):
    """Our server, whose queue gets the tasks of each round of its loop as the round begins."""

    give_tasks: Callable[[], None]

    def _take_tasks(self, now: float) -> None:
        self.give_tasks()
        super()._take_tasks(now)


class LlamaServerReplay(Replay):
    """Gives our scheduler the requests as they came, and goes through its steps beside the recorded ones."""

    def __init__(self, header: Record):
        if header.get("type") != "meta" or "flags" not in header or not isinstance(header.get("server"), dict):
            raise ValueError(
                "not a recording of llama-server; a line with 'type': 'meta', 'flags' and 'server' is expected"
            )
        self.scenario, self._knows_bytes = scenario_of(header)
        self.era = _version(header["server"].get("version", ()))
        self.excused: list[str] = []  # Tasks that came at the very edge of a step and were taken after it.
        self._policy = build_policy(self.scenario)
        self._scheduler = _ReplayedServer(self.scenario, self._policy, ZeroTimeBackend(), Recorder(), log=self._note)
        usual = _EARLIER_STATE_HEADER if self.era.startswith("0.5") else STATE_HEADER
        self._use_sizes(header.get("model", {}), int(header["server"].get("state_header", usual)))
        self._scheduler.give_tasks = self._give_tasks
        self._defaults = header.get("body", {})
        self._sources: dict[str, list[int]] = {}
        self._requests: dict[int, Record] = {}
        """By task."""
        self._without_task: list[Record] = []
        """Requests that failed before the log told them from others."""
        self._posted: dict[int, float] = {}
        """Tasks that our scheduler has not been given yet, in the order in which they came, and when that was."""
        self._events: list[Record] = []
        """Recorded decisions since the last step."""
        self._decided: list[dict[str, Any]] = []
        """Ours since then."""
        self._answers: dict[int, dict[str, Any]] = {}
        """How our requests ended, by task."""
        self._batch: list[list[Any]] = []
        self._placed: tuple[Sequence[Chunk], OutOfCells | None] = ((), None)
        """The last step, and why it found no room, if it found none."""
        self._rounds: list[set[int]] = []
        """Tasks that were taken in each round of the server's loop that is still to come before the next step."""
        self._offset = 0
        """Tokens of the batch before the next step."""
        self._ended_s = -math.inf
        """When the last recorded step ended."""
        self._loaded = _loaded(header["server"], self)
        self._warm_up(int(header.get("warm_up_tokens", 0)))

    def _use_sizes(self, model: Mapping[str, Any], header: int) -> None:
        """Let states have the sizes that they had in the recorded server.

        ``model``: what the recording says of it; ``cell_bytes`` of a token in all ``layers`` with attention.
        """
        sizes = size_of_states(self.scenario, self._policy, header)
        if "cell_bytes" in model:
            state = model.get("state_bytes")
            sizes = StateSize(self._policy.groups, model["cell_bytes"], model["layers"], state, header)
            self._knows_bytes = True
        for part in (self._scheduler.host_cache, self._scheduler.checkpoints):
            if part is not None:
                part.size = sizes

    def perform(self, record: Record) -> tuple[State, State]:
        """Take in a record; at a step, or when all slots are idle, return what was decided since the last."""
        kind = record.get("type")
        if kind == "source":
            self._sources[record["name"]] = record["tokens"]
        elif kind == "request":
            if "task" in record:
                self._requests[record["task"]] = record
            elif record.get("status") != _REFUSED_BY_HTTP:
                self._without_task.append(record)
        elif kind == "step":
            return self._compare(record)
        elif kind != "event":
            raise ValueError(f"type {kind!r:.40} is unknown; accepted: source, request, step, event")
        elif record["kind"] == "post":
            self._posted[record["task"]] = record["t"]
        elif record["kind"] == "idle":
            return self._compare(None)
        else:
            self._events.append(record)
        return {}, {}

    def operation(self, record: Record) -> dict[str, Any]:
        """Which step it is."""
        return {key: record[key] for key in ("type", "kind", "t", "batch") if key in record}

    def _warm_up(self, tokens: int) -> None:
        """Serve what the server served before the recording began: one prompt of equal tokens, answered by eight."""
        if not tokens:
            return
        job = Job(Request(-1, 0.0, tokens, _WARM_UP_ANSWER), 0.0)
        job.content = Content([(_WARM_UP_TOKEN, 0, 1)] * tokens + [(-1, at, 1) for at in range(_WARM_UP_ANSWER)])
        self._scheduler.submit(job, 0.0)
        while piece := self._scheduler.compose(0.0):
            self._place(piece)
            self._finish_step()
        self._decided.clear()

    def _compare(self, step: Record | None) -> tuple[State, State]:
        """What was recorded since the last step, and what our scheduler has done meanwhile, this step included."""
        scheduler = self._scheduler
        self._finish_step()
        begins = not scheduler.has_batch
        self._rounds = _rounds(self._events) if begins else []
        piece = scheduler.compose(0.0)
        while not piece and self._rounds:
            piece = scheduler.compose(0.0)
        if begins and step is not None:
            self._excuse(step)
        recorded, ours = self._loaded
        self._loaded = {}, {}
        events, self._events = [self._as_decision(event) for event in self._events], []
        decided, self._decided = self._decided, []
        for at in range(max(len(events), len(decided))):
            for state, decisions in ((recorded, events), (ours, decided)):
                state[f"decision {at + 1}"] = decisions[at] if at < len(decisions) else None
        for event in events:
            if event["decision"] == "stop" and event["task"] in self._requests:
                request = self._requests[event["task"]]
                recorded[f"answer {request['id']}"] = _answer(request)
                ours[f"answer {request['id']}"] = self._answers.get(event["task"])
        if step is not None or piece:
            self._place(piece)
            given = {"tokens": [], "off": 0, "n": 0, "ok": True} if step is None else step
            fields = {"tokens": self._batch, "off": self._offset, "n": sum(chunk.n for chunk in piece)}
            fields["ok"] = self._placed[1] is None
            recorded |= {key: given[key] for key in fields if key in given}
            ours |= {key: fields[key] for key in fields if key in given}
        if step is not None:
            self._ended_s = step["t"] + step.get("s", 0.0)
        return recorded, ours

    def _place(self, piece: Sequence[Chunk]) -> None:
        refusal = None
        self.placed = ()
        try:
            self.placed = tuple(self._policy.allocate(piece))
        except OutOfCells as reason:
            refusal = reason
        self._placed = piece, refusal

    def _finish_step(self) -> None:
        """Commit the last step, or make room for it."""
        (piece, refusal), self._placed = self._placed, ((), None)
        if refusal is not None:
            self._scheduler.on_out_of_cells(refusal, 0.0)
        elif piece:
            self._offset += sum(chunk.n for chunk in piece)
            self._scheduler.commit(piece, 1, 0.0)
        self._scheduler.ended.clear()
        self._scheduler.started.clear()

    def _give_tasks(self) -> None:
        """Queue what was taken in the next round of the server's loop, and what had come before the last step ended."""
        taken = self._rounds.pop(0) if self._rounds else set()
        for task, came_s in list(self._posted.items()):
            if task in taken and task not in self._requests and self._without_task:
                # The log does not say which: they came in the order in which they were sent.
                self._requests[task] = self._without_task.pop(0)
            if task not in self._requests:
                del self._posted[task]  # A question about the server's health, say.
            elif task in taken or came_s < self._ended_s - _EDGE_S:
                del self._posted[task]
                self._scheduler.submit(self._job(task, came_s), came_s)

    def _excuse(self, step: Record) -> None:
        """Note tasks that came while a step was being composed and were taken after it."""
        for task, came_s in self._posted.items():
            late = (step["t"] - came_s) * 1e3
            self.excused.append(f"task {task} came {late:.1f} ms before step {step['batch']} and was taken after it")

    def _job(self, task: int, came_s: float) -> Job:
        """A request, with its tokens as text."""
        record = self._requests[task]
        body = {**self._defaults, **record.get("params", {})}
        prompt = [] if record.get("raw_prompt") == "" else tokens_of(record["prompt"], self._sources)
        limit = int(record["n_predict"])
        output = self._scheduler.context if limit < 0 else max(limit, 1)
        own = {key: body[key] for key in ("n_keep", "n_discard", "cache_prompt") if key in body}
        starts = user_starts(prompt, body.get("message_delimiters", ()))
        job = Job(Request(task, came_s, len(prompt), output, user_starts=starts, **own), came_s)
        answer = record.get("output", []) + [record["answer"]] * output
        job.content = Content((token, 0, 1) for token in [*prompt, *answer[:output]])
        return job

    def _as_decision(self, event: Record) -> dict[str, Any]:
        """A recorded event without what is not decided: times, messages."""
        kept = {key: value for key, value in event.items() if key not in _NOT_COMPARED}
        if not self._knows_bytes:
            kept = {key: value for key, value in kept.items() if key not in _BYTES}
        if "t_last" in kept:
            kept["t_last"] = min(kept["t_last"], 0)
        return {"decision": event["kind"], **kept}

    def _note(self, kind: str, **fields: Any) -> None:
        """Hear of a decision of our scheduler, and put it as the recordings do."""
        job: Job | None = fields.pop("job", None)
        task = {} if job is None else {"task": job.request.id}
        if kind == "batch":
            self._offset = 0
            generating = {slot.id for slot in self._scheduler.slots if slot.job is not None and slot.job.prefilled}
            self._batch = [[c.seq, "g" if c.seq in generating else "p", c.start, c.n] for c in fields["chunks"]]
            return
        if kind == "answered":
            assert job is not None
            slot = {"slot": fields["slot"], **task}
            computed = job.request.prompt_tokens - job.cached
            self._decided.append({"decision": "prompt_time", **slot, "tokens": computed})
            self._decided.append({"decision": "answer_time", **slot, "tokens": job.generated})
            return
        if kind == "stop":
            assert job is not None
            self._answers[job.request.id] = _our_answer(job, fields)
        self._decided.append({"decision": kind, **task, **self._put(kind, job, fields)})

    def _put(self, kind: str, job: Job | None, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a decision as the log shows them."""
        shown = dict(fields)
        if kind in ("no_room", "failed"):
            shown["off"] = self._offset
        if kind == "prompt" and job is not None:
            own = job.request.n_keep
            shown["n_keep"] = self.scenario.server.n_keep if own is None else own
        if "source" in shown:
            shown["from"] = shown.pop("source")
        for key in _SHARES:
            if key in shown:
                shown[key] = None if math.isnan(shown[key]) else float(f"{shown[key]:.3f}")
        if "t_last" in shown:
            shown["t_last"] = min(shown["t_last"], 0)
        if "truncated" in shown:
            shown["truncated"] = int(shown["truncated"])
        return shown if self._knows_bytes else {key: value for key, value in shown.items() if key not in _BYTES}


def tokens_of(pieces: Sequence[tuple[str, int, int]], sources: Mapping[str, Sequence[int]]) -> list[int]:
    """The tokens of a recorded prompt: of its sources, or one token over and over (``#7``).

    Raises ``ValueError`` if a source has fewer tokens than are taken of it.
    """
    tokens: list[int] = []
    for name, first, count in pieces:
        if name.startswith("#"):
            tokens += [int(name[1:])] * count
        elif len(sources[name]) < first + count:
            raise ValueError(f"source {name!r:.40} has {len(sources[name])} tokens; a prompt takes {first + count}")
        else:
            tokens += sources[name][first : first + count]
    return tokens


def user_starts(prompt: Sequence[int], delimiters: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Where messages of a user begin in a prompt, by the ``tokens`` of the delimiters that were sent with it."""
    found = []
    for at in range(len(prompt)):
        fits = (each for each in delimiters if prompt[at : at + len(each["tokens"])] == each["tokens"])
        if next(fits, {}).get("role") == "user":
            found.append(at)
    return tuple(found)


def _rounds(events: Sequence[Record]) -> list[set[int]]:
    """The tasks taken in each round of the server's loop since a step: a round without anything to compute has none."""
    rounds: list[set[int]] = [set()]
    began = False
    for event in events:
        if event["kind"] == "prompt":
            began = True
        elif began and event["kind"] in _TAKEN_IN:
            rounds.append(set())
            began = False
        if event["kind"] in ("launch", "defer"):
            rounds[-1].add(event["task"])
    return rounds


def _answer(request: Record) -> dict[str, Any]:
    """What a recorded client was told at the end."""
    if "error" in request or "result" not in request:
        return {"failed": True}
    told = request["result"]
    keys = ("id_slot", "cache_n", "prompt_n", "predicted_n", "truncated", "tokens_cached")
    return {key: told[key] for key in keys if key in told}


def _our_answer(job: Job, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What our client would be told."""
    if job.status == "failed":
        return {"failed": True}
    return {
        "id_slot": fields["slot"],
        "cache_n": job.cached,
        "prompt_n": job.request.prompt_tokens - job.cached,
        "predicted_n": job.generated,
        "truncated": bool(fields["truncated"]),
        "tokens_cached": fields["tokens"],
    }


def _loaded(said: Mapping[str, Any], replay: LlamaServerReplay) -> tuple[State, State]:
    """What the server said of itself while it loaded, and ours, as far as it said it."""
    scenario = replay.scenario
    cells = scenario.context_cells if scenario.unified else scenario.equal_share
    ours = {
        "slots": scenario.server.slots,
        "n_ctx_slot": scenario.slot_context,
        "kv_cells": cells,
        "kv_unified": str(scenario.unified).lower(),
        "n_batch": scenario.n_batch,
        "n_ubatch": scenario.n_ubatch,
    }
    return {key: said[key] for key in ours if key in said}, {key: ours[key] for key in ours if key in said}


def _version(lines: Sequence[str]) -> str:
    """The server's version, as it says it itself."""
    for line in lines:
        found = re.match(r"(?:version|build): *(\S+)", str(line))
        if found:
            return found[1]
    return "unknown"


def state_header(scenario: Scenario, records: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the header of states that a server saved to host memory, by the sizes in its log.

    Today's, unless only the earlier one gives the recorded sizes of the whole host cache.
    """
    policy = build_policy(scenario)
    held: list[tuple[list[tuple[int, int]], float]] = []
    for record in records:
        if record.get("kind") == "host_cache":
            held.append(([], record["mib"]))
        elif record.get("kind") == "host_entry" and held:
            held[-1][0].append((record["tokens"], record.get("checkpoints", 0)))
    for header in (STATE_HEADER, _EARLIER_STATE_HEADER):
        size = size_of_states(scenario, policy, header)
        sums = [sum(size.of(tokens) + made * size.of_checkpoint(0) for tokens, made in entries) for entries, _ in held]
        if all(float(f"{total / MIB:.3f}") == mib for total, (_, mib) in zip(sums, held, strict=True)):
            return header
    return STATE_HEADER
