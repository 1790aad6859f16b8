"""Replay recordings of a vLLM server: who came when, with the recorded times of the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from kvsim.engines.conformance.recordings import Record, State, whole_number
from kvsim.engines.conformance.vllm.driven import CallLoggingPolicy, build_scheduler
from kvsim.engines.conformance.vllm.recorded import build_policy
from kvsim.simulation.job import Job
from kvsim.simulation.schedulers.vllm_async import BATCHES, AsyncVllm
from policies import Chunk, Content, MicroBatch
from workloads import Request, Segment

MODES = {"server": "server", "inproc": "in process"}
_ANSWERS = 1 << 40
"""The number of the text that is the answer of request 0; the next ones follow."""


class ServerReplay:
    """Performs the steps of ``EngineCore`` on the simulator's own scheduler, over the paged policy.

    A request is known to the scheduler from the time on at which the recorded engine handed it over (``engine``).
    """

    excused: Sequence[str] = ()

    def __init__(self, header: Record):
        engine = header["engine"]
        asynchronous = bool(engine.get("async_scheduling", False))
        if engine["mode"] not in MODES:
            raise ValueError(f"mode is {engine['mode']!r:.40}; accepted: {', '.join(MODES)}")
        self.era = f"{header['vllm']}, {MODES[engine['mode']]}{', asynchronous' * asynchronous}"
        budget, max_tokens = whole_number(engine, "max_num_batched_tokens"), whole_number(engine, "max_model_len")
        self._max_tokens = max_tokens
        policy = self._policy = build_policy(
            CallLoggingPolicy,
            blocks=whole_number(engine, "num_blocks"),
            block_size=whole_number(engine, "block_size"),
            caching=bool(engine["prefix_caching"]),
            max_tokens=max_tokens,
            max_in_flight=budget,
            watermark=float(engine.get("watermark", 0.0)),
        )
        policy.calls, policy.name_of = [], {}
        server = {
            "slots": whole_number(engine, "max_num_seqs"),
            "n_batch": budget,
            "long_prefill_threshold": int(engine.get("long_prefill_token_threshold", 0)),
            "chunked_prefill": bool(engine.get("enable_chunked_prefill", True)),
            "reserve_full": bool(engine.get("scheduler_reserve_full_isl", True)),
            "order": engine.get("scheduling_policy", "fcfs"),
        }
        self._scheduler = build_scheduler(policy, server, max_tokens, asynchronous=asynchronous)
        self._to_come: deque[tuple[float, Job]] = deque()
        self._in_order = True
        self._hits: dict[int, int] = {}
        """By request: prompt tokens that were found in the prefix cache, as recorded."""
        self._tell_finished = False
        """Whether a request has ended since the last step was scheduled, so that one more is, if only to say so."""

    def perform(self, record: Record) -> tuple[State, State]:
        """Take note of a request, or perform a step: arrivals, the schedule, and the outcome of a step."""
        kinds = {"request": self._note_request, "step": self._step}
        if record["type"] not in kinds:
            raise ValueError(f"type {record['type']!r} is unknown; accepted: {', '.join(kinds)}")
        return kinds[record["type"]](record)

    @property
    def placed(self) -> tuple[tuple[Chunk, ...], tuple[MicroBatch, ...]]:
        """The last step and its micro-batches."""
        return self._scheduler.placed

    def operation(self, record: Record) -> dict[str, Any]:
        """The step's number and time in milliseconds."""
        return {"step": record["s"], "t": record["t"]}

    def _note_request(self, record: Record) -> tuple[State, State]:
        number, outputs = record["r"], whole_number(record, "n_out")
        if not isinstance(number, int) or number in self._hits:
            raise ValueError(f"r is {number!r:.40}; a number that no other request has is expected")
        segments = [(_text(source), start, n) for source, start, n in record["prompt"]]
        prompt = sum(n for _, _, n in segments)
        if prompt != record["n_prompt"]:
            raise ValueError(f"n_prompt of request {number} is {record['n_prompt']}, its segments have {prompt} tokens")
        if prompt >= self._max_tokens:
            raise ValueError(f"request {number} has {prompt} tokens, a sequence at most {self._max_tokens}")
        arrival_ms = float(record["engine"])
        pieces = tuple(Segment(*segment) for segment in segments)
        priority = record.get("priority", 0)
        job = Job(Request(number, arrival_ms, prompt, outputs, content=pieces, priority=priority), arrival_ms)
        job.content = Content([*segments, (_ANSWERS + number, 0, outputs)])
        self._policy.name_of[job.content] = str(number)
        self._hits[number] = record["hit"]
        self._to_come.append((arrival_ms, job))
        self._in_order = False
        return {}, {}

    def _step(self, record: Record) -> tuple[State, State]:
        scheduler, policy, at = self._scheduler, self._policy, float(record["t"])
        if isinstance(scheduler, AsyncVllm) and not (scheduler.running or scheduler.waiting or self._tell_finished):
            while scheduler.flights:
                scheduler.collect()
        self._let_in(at)
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        scheduler.preempted.clear()
        scheduler.started.clear()
        scheduler.ended.clear()
        self._tell_finished = False
        step = scheduler.schedule(at)
        of = {chunk.seq: int(policy.name_of[policy.tables[chunk.seq].content]) for chunk in step}
        new = [job for job in scheduler.started if not job.preemptions]
        again = [job for job in scheduler.started if job.preemptions]
        ours: State = {
            "n": [[of[chunk.seq], chunk.n, chunk.start] for chunk in step],
            "new": _numbers(new),
            "res": _numbers(again),
            "pre": _numbers(scheduler.preempted),
            "run": [running, len(scheduler.running)],
            "wait": [waiting, len(scheduler.waiting)],
            "free": len(policy.pool.free),
        }
        scheduler.take_step(step)
        ours["fin"] = _numbers(scheduler.ended)
        self._see_outcome(bool(step))
        policy.calls.clear()
        recorded: State = {key: record[key] for key in ("n", "run", "wait", "free")}
        # The engine keeps some of these as sets: in which order requests come is said by ``n``.
        recorded |= {key: sorted(record.get(key, ())) for key in ("new", "res", "pre", "fin")}
        for job in new:
            key = f"hit of {job.request.id}"
            recorded[key], ours[key] = self._hits[job.request.id], job.cached
        return recorded, ours

    def _let_in(self, at: float) -> None:
        """Hand the requests over that have come by ``at``, in milliseconds."""
        if not self._in_order:
            self._to_come = deque(sorted(self._to_come, key=lambda item: item[0]))
            self._in_order = True
        while self._to_come and self._to_come[0][0] <= at:
            self._scheduler.submit(self._to_come.popleft()[1], at)

    def _see_outcome(self, executed: bool) -> None:
        """Wait for the oldest step in flight, unless another can be scheduled first: ``step_with_batch_queue``."""
        scheduler = self._scheduler
        if isinstance(scheduler, AsyncVllm):
            if len(scheduler.flights) < BATCHES and (executed or scheduler.running or scheduler.waiting):
                return
            scheduler.let_go.clear()
            scheduler.collect()
            self._tell_finished = bool(scheduler.let_go)


def _text(source: int | str) -> int:
    """The number of a text: its own, or that of a request's answer (``out:7``)."""
    if isinstance(source, str):
        return _ANSWERS + int(source.removeprefix("out:"))
    return source


def _numbers(jobs: list[Job]) -> list[int]:
    return sorted(job.request.id for job in jobs)
