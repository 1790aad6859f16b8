"""Replay recordings of vLLM's ``Scheduler``, step by step, and of its server, in time, on the simulator's own."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvsim.engines.recordings.recording_files import Record, whole_number
from kvsim.engines.recordings.replay import Replay, State
from kvsim.engines.recordings.vllm_blocks import UNBOUNDED, VllmCache, crc, recorded_state
from kvsim.engines.recordings.vllm_driven import (
    CallLog,
    Driven,
    DrivenApart,
    DrivenAsync,
    DrivenAsyncApart,
    DrivenAsyncOffloading,
    DrivenOffloading,
    RecordedDrafts,
)
from kvsim.engines.recordings.vllm_groups import GroupCallLog, group_policy
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.job import Job
from kvsim.simulation.schedulers.vllm_async import BATCHES, AsyncVllm
from policies import Chunk, Content
from policies.paging.disk_chunks import TieredChunks
from workloads import Request, Segment

MODES = {"server": "server", "inproc": "in process"}
_NUMBERED_ANSWERS = 3_000_000
"""The number of the text that is the answer of the recorded scheduler's request 0; the next ones follow."""
_ANSWERS = 1 << 40
"""The number of the text that is the answer of a recorded server's request 0."""


class _StepReplay(Replay):
    """Performs steps on the simulator's scheduler over the paged policy."""

    def __init__(
        self,
        cache: VllmCache,
        policy: CallLog | GroupCallLog,
        server: dict[str, Any],
        *,
        asynchronous: bool,
        speculation: Record | None = None,
        drafts_are_noted: bool = False,
        apart: bool = False,
    ):
        """``server``: keys of ``[server]``; ``speculation``: the method, and the tokens of a draft;
        ``drafts_are_noted``: as in ``Drafts``; ``apart``: others prefill for it, and it for others."""
        self._policy = policy
        policy.calls, policy.name_of = [], {}
        table = {"scheduler": "vllm", "async_scheduling": asynchronous, **server}
        cells = {"cells": policy.groups[0].cells, "prefix_cache": cache.caching}
        drafts = {} if speculation is None else {**speculation, "acceptance": 0.0, "share": 1.0}
        scenario = load_scenario({"server": table, "cache": cells, "speculation": drafts})
        kind: type[Driven]
        if apart:
            kind = DrivenAsyncApart if asynchronous else DrivenApart
        elif cache.chunks is None:
            kind = DrivenAsync if asynchronous else Driven
        else:
            kind = DrivenAsyncOffloading if asynchronous else DrivenOffloading
        self._scheduler = kind(scenario, policy, cache.max_tokens)
        self._drafts = RecordedDrafts(scenario, are_noted=drafts_are_noted)
        if speculation is not None:
            self._scheduler.use_drafts(self._drafts)


class SchedulerReplay(_StepReplay):
    """Performs steps of ``Scheduler``, or of ``AsyncScheduler`` with as many steps in flight as the recording says."""

    def __init__(self, header: Record):
        effective = header["effective"]
        asynchronous = bool(effective["async_scheduling"])
        self.era = f"{header['vllm']}, scheduler{', asynchronous' * asynchronous}"
        batches = whole_number(effective, "max_concurrent_batches", BATCHES)
        self._depth = whole_number(header, "depth", batches) if asynchronous else 1
        if self._depth > 1:
            self.era += f", {self._depth} steps in flight" * (self._depth != BATCHES)
        cache = VllmCache.of(header, whole_number(header, "max_model_len", UNBOUNDED))
        server = {
            "slots": whole_number(header, "max_seqs"),
            "n_batch": whole_number(header, "budget"),
            "long_prefill_threshold": int(header.get("long_thr", 0)),
            "chunked_prefill": bool(header.get("chunked", True)),
            "reserve_full": bool(effective["reserve_full"]),
            "order": header.get("policy", "fcfs"),
        }
        speculation, apart = header.get("speculation"), bool(header.get("apart", False))
        policy = group_policy(cache, header) if "groups" in header else cache.build(CallLog)
        super().__init__(
            cache,
            policy,
            server,
            asynchronous=asynchronous,
            speculation=speculation,
            drafts_are_noted=tuple(map(int, re.findall(r"\d+", header["vllm"])[:2])) >= (0, 33),
            apart=apart,
        )
        self._states = self._policy.states()
        self._jobs: dict[str, Job] = {}
        if speculation is not None:
            self.era += f", drafts of {speculation['tokens']} tokens ({speculation['method']})"

    def perform(self, record: Record) -> tuple[State, State]:
        """Perform one step: arrivals and cancellations, the schedule, and the outcome of the oldest step in flight."""
        if record["op"] != "step":
            raise ValueError(f"operation {record['op']!r} is unknown; accepted: step")
        policy, scheduler, names = self._policy, self._scheduler, self._policy.name_of
        for added in record.get("add", ()):
            self._add(*added)
        for name in record.get("abort", ()):
            scheduler.cancel(self._jobs[name], 0.0)
        scheduler.let_go.clear()
        held = []
        if isinstance(scheduler, DrivenApart):
            held = sorted(names[job.content] for job in scheduler.now_held)
            scheduler.now_held.clear()
        if isinstance(policy.chunks, TieredChunks):
            policy.chunks.proceed(record["io"], record["ans"])
        step = scheduler.schedule(0.0)
        tables = {chunk.seq: policy.tables_of(chunk.seq) for chunk in step}
        of = {chunk.seq: names[policy.content_of(chunk.seq)] for chunk in step}
        emitting = [of[chunk.seq] for chunk in step if chunk.start + chunk.n >= self._jobs[of[chunk.seq]].tokens]
        self._drafts.follow(record)
        checked = [(of[chunk.seq], _drafted(self._jobs[of[chunk.seq]], chunk)) for chunk in step]
        drafts = [[name, n, self._drafts.accepted.get(name, 0)] for name, n in checked if n > 0]
        scheduler.take_step(step)
        if isinstance(scheduler, AsyncVllm):
            while len(scheduler.flights) >= self._depth:
                scheduler.collect()
        copied: State = {}
        if isinstance(scheduler, DrivenOffloading):
            copied = self._copied(scheduler, record)
        elif isinstance(scheduler, DrivenApart):
            copied = self._read(scheduler, record)
            copied["hold"] = held
        calls, policy.calls = policy.calls, []
        ours: State = {
            "nst": [[of[chunk.seq], chunk.n] for chunk in step],
            "emit": emitting,
            "fin": [names[job.content] for job in scheduler.let_go],
            "run": [names[job.content] for job in scheduler.running],
            "wait": [names[job.content] for job in scheduler.waiting],
            **({"calls": calls} if "calls" in record else {}),
            **({"drafts": drafts} if "drafts" in record else {}),
            **copied,
        }
        recorded = recorded_state({"fin": [], **record}, tuple(ours))
        for name, table in record["tables"]:
            recorded[f"table {name}"] = table
        for seq, table in tables.items():
            ours[f"table {of[seq]}"] = crc(table) if isinstance(recorded.get(f"table {of[seq]}"), int) else table
        return recorded, ours | self._states.after(record)

    def _copied(self, scheduler: DrivenOffloading, record: Record) -> State:
        """What was decided of copies, in the fields of recordings; afterwards those have ended that are ``done``."""
        log, chunks = scheduler.log, scheduler.log.chunks
        loads, stores, flushed = log.copies
        as_listed = [
            [[c.number, f"r{c.job.request.id}", c.blocks, [*c.slots.values()]] for c in of] for of in (loads, stores)
        ]
        found: State = {"look": log.looks, "loads": as_listed[0], "stores": as_listed[1], "flush": sorted(flushed)}
        found["out"] = self._states.names_of(chunks.evicted)
        log.looks = []
        chunks.evicted.clear()
        scheduler.learn(record["done"], 0.0)
        if isinstance(chunks, TieredChunks):
            for field, to_disk in (("gets", False), ("puts", True)):
                found[field] = [[c.number, [*c.slots.values()]] for c in chunks.begun if c.to_disk == to_disk]
            found["nd"] = len(chunks.files)
            chunks.begun.clear()
        return found

    def _read(self, scheduler: DrivenApart, record: Record) -> State:
        """What was decided of reads, in the fields of recordings; afterwards those have ended that it says."""
        log = scheduler.log
        found: State = {"look": log.looks, "reads": [[f"r{c.job.request.id}", c.blocks] for c in log.composed]}
        log.looks = []
        numbers = {copy.job: number for number, copy in log.under_way.items()}
        scheduler.learn([numbers[self._jobs[name]] for name in record["done"]], 0.0)
        scheduler.give_up([self._jobs[name] for name in record["sent"]])
        return found

    def operation(self, record: Record) -> Record:
        """The step's number, arrivals and cancellations."""
        return {key: record[key] for key in ("op", "i", "add", "abort") if key in record}

    def _add(
        self, name: str, prompt: list[list[int]], max_tokens: int, priority: int, arrival_s: float, kind: str = ""
    ) -> None:
        number = int(name.removeprefix("r"))
        segments = tuple(Segment(*piece) for piece in prompt)
        n = sum(segment.n for segment in segments)
        job = Job(Request(number, arrival_s, n, max_tokens, content=segments, priority=priority), arrival_s)
        job.prefill_only = kind == "prefill"
        job.source = Job(job.request, arrival_s) if kind == "decode" else None
        # Each recorded request's answer has a source number of its own, which later prompts quote.
        job.content = content = Content()
        for piece in (*segments, (_NUMBERED_ANSWERS + number, 0, max_tokens)):
            self._states.extend(content, piece)
        self._jobs[name] = job
        self._policy.name_of[content] = name
        self._scheduler.submit(job, arrival_s)


class ServerReplay(_StepReplay):
    """Performs the steps of ``EngineCore``.

    A request is known to the scheduler from the time on at which the recorded engine handed it over (``engine``).
    """

    def __init__(self, header: Record):
        engine = header["engine"]
        asynchronous = bool(engine.get("async_scheduling", False))
        if engine["mode"] not in MODES:
            raise ValueError(f"mode is {engine['mode']!r:.40}; accepted: {', '.join(MODES)}")
        self.era = f"{header['vllm']}, {MODES[engine['mode']]}{', asynchronous' * asynchronous}"
        budget, self._max_tokens = (whole_number(engine, k) for k in ("max_num_batched_tokens", "max_model_len"))
        cache = VllmCache(
            whole_number(engine, "num_blocks"),
            whole_number(engine, "block_size"),
            bool(engine["prefix_caching"]),
            self._max_tokens,
            max_in_flight=budget,
            watermark=float(engine.get("watermark", 0.0)),
        )
        server = {
            "slots": whole_number(engine, "max_num_seqs"),
            "n_batch": budget,
            "long_prefill_threshold": int(engine.get("long_prefill_token_threshold", 0)),
            "chunked_prefill": bool(engine.get("enable_chunked_prefill", True)),
            "reserve_full": bool(engine.get("scheduler_reserve_full_isl", True)),
            "order": engine.get("scheduling_policy", "fcfs"),
        }
        super().__init__(cache, cache.build(CallLog), server, asynchronous=asynchronous)
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

    def operation(self, record: Record) -> Record:
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
        of = {chunk.seq: int(policy.name_of[policy.content_of(chunk.seq)]) for chunk in step}
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
        self.placed = scheduler.placed
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


def _drafted(job: Job, chunk: Chunk) -> int:
    """The drafted tokens in a chunk; of a request that has ended, it is not known yet that it has."""
    return chunk.n - 1 if job.ended else chunk.start + chunk.n - job.tokens


def _numbers(jobs: Sequence[Job]) -> list[int]:
    return sorted(job.request.id for job in jobs)
