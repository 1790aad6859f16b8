"""Replay recordings of vLLM's ``Scheduler``, step by step, and of its server, in time, on the simulator's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from kvsim.engines.recordings.recording_files import Record, whole_number
from kvsim.engines.recordings.replay import Replay, State, ZeroTimeBackend
from kvsim.engines.recordings.vllm_blocks import UNBOUNDED, PolicyStates, VllmCache, crc, recorded_state
from kvsim.engines.recordings.vllm_groups import GroupCallLog, group_policy
from kvsim.errors import Livelock
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.simulation.drafts import Drafts
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.offloading import ChunkCopy, Offloading, Part, StepCopies
from kvsim.simulation.schedulers.vllm import Vllm
from kvsim.simulation.schedulers.vllm_apart import ApartVllm, AsyncApartVllm, RemoteReads
from kvsim.simulation.schedulers.vllm_async import BATCHES, AsyncVllm
from kvsim.simulation.schedulers.vllm_offload import AsyncOffloadingVllm, OffloadingVllm
from policies import Chunk, Content, MicroBatch
from policies.layouts.paged import PagedPolicy
from workloads import Request, Segment

MODES = {"server": "server", "inproc": "in process"}
_NUMBERED_ANSWERS = 3_000_000
"""The number of the text that is the answer of the recorded scheduler's request 0; the next ones follow."""
_ANSWERS = 1 << 40
"""The same of a recorded server's."""


class _CallLog(PagedPolicy):
    """The paged policy, logging the scheduler's calls."""

    calls: list[list[Any]]
    name_of: dict[Content, str]

    def tables_of(self, seq: int) -> list[int]:
        """The blocks that a sequence has."""
        return list(self.tables[seq].blocks)

    def content_of(self, seq: int) -> Content:
        """What a sequence says."""
        return self.tables[seq].content

    def states(self) -> PolicyStates:
        """Its states in the fields of recordings."""
        return PolicyStates(self.pool, self.block_size)

    def match(self, seq: int, content: Content, tokens: int) -> int:
        """Look up a prefix, and log it."""
        hit = super().match(seq, content, tokens)
        self.calls.append(["L", self.name_of[content], hit, self.admission.found(seq)])
        return hit

    def reserve(
        self,
        chunk: Chunk,
        *,
        whole: int = 0,
        waits: bool = False,
        in_flight: int = 0,
        known: int | None = None,
        lookahead: int = 0,
    ) -> bool:
        """Reserve blocks, and log it."""
        s = self.tables[chunk.seq]
        held = len(s.blocks) or chunk.start // self.block_size
        computed, hit = (chunk.start, 0) if s.blocks else (0, chunk.start)
        done = super().reserve(chunk, whole=whole, waits=waits, in_flight=in_flight, known=known, lookahead=lookahead)
        new = list(s.blocks[held:]) if done else None
        self.calls.append(["A", self.name_of[s.content], computed, chunk.n, hit, new])
        return done


class _Driven(Vllm):
    """vLLM's scheduler without our checks: like the original, it refuses no request, and waits for ever."""

    def __init__(self, scenario: Scenario, policy: _CallLog | GroupCallLog, max_tokens: int):
        super().__init__(scenario, policy, ZeroTimeBackend(), Recorder())
        self._context, self._limit = max_tokens, max_tokens - 1
        self._log = policy
        self.let_go: list[Job] = []
        """Jobs whose blocks were freed at their end, since the list was last cleared."""
        self.preempted: list[Job] = []
        """Jobs that were preempted, since the list was last cleared."""
        self.placed: tuple[MicroBatch, ...] = ()
        """The micro-batches of the last step."""
        self._gone: set[Job] = set()

    def submit(self, job: Job, now: float) -> None:
        """Queue a request."""
        self.waiting.add(job)

    def cancel(self, job: Job, now: float) -> None:
        """End a request whose client has gone, unless its blocks were freed before."""
        if job not in self._gone:
            super().cancel(job, now)
            self._freed(job)

    def schedule(self, now: float) -> list[Chunk]:
        """Compose a step; empty where the original schedules nothing, and waits."""
        try:
            return list(super().schedule(now))
        except Livelock:
            return []

    def take_step(self, step: list[Chunk]) -> None:
        """Place a composed step and run it, so that its outcome can be seen."""
        self.placed = tuple(self._policy.allocate(step))
        self.commit(step, 1, 0.0)

    def _preempt(self, job: Job) -> None:
        super()._preempt(job)
        self.preempted.append(job)
        self._log.calls.append(["P", self._log.name_of[job.content]])

    def _let_go(self, job: Job) -> None:
        super()._let_go(job)
        self.let_go.append(job)
        self._freed(job)

    def _freed(self, job: Job) -> None:
        if job not in self._gone:
            self._gone.add(job)
            self._log.calls.append(["F", self._log.name_of[job.content]])

    def _refuses(self, job: Job, now: float) -> bool:
        return False

    def _count_step(self, progressed: bool, now: float) -> None:
        """Never raise ``Livelock``."""


class _DrivenAsync(_Driven, AsyncVllm):
    """The asynchronous scheduler without our checks; the replay calls ``collect``."""


class _OffloadLog(Offloading):
    """Decides what is copied, and logs it."""

    looks: list[list[Any]]
    copies: StepCopies

    def look_up(self, job: Job, held: int) -> int | None:
        """Look up chunks, and log it."""
        found = super().look_up(job, held)
        self.looks.append([f"r{job.request.id}", held, found])
        return found

    def compose(self, step: Iterable[Part]) -> StepCopies:
        """Say what is copied, and log it."""
        self.copies = super().compose(step)
        return self.copies


class _DrivenOffloading(_Driven, OffloadingVllm):
    """The scheduler with chunks in host memory, without our checks; the replay says when copies have ended."""

    def __init__(self, scenario: Scenario, policy: _CallLog | GroupCallLog, max_tokens: int):
        super().__init__(scenario, policy, max_tokens)
        assert policy.chunks is not None
        self.offload = self.log = _OffloadLog(policy, policy.chunks, caching=scenario.cache.prefix_cache)
        self.log.looks = []

    def _seen_to_end(self, now: float) -> list[int]:
        return []


class _DrivenAsyncOffloading(_DrivenOffloading, AsyncOffloadingVllm):
    """The offloading scheduler with asynchronous steps; the replay calls ``collect``."""


class _RecordedDrafts(Drafts):
    """What was drafted and accepted in a recorded step."""

    def __init__(self, scenario: Scenario):
        super().__init__(scenario, None, Recorder())
        self.accepted: dict[str, int] = {}
        """By request."""
        self._next: dict[str, int] | None = None

    def follow(self, record: Record) -> None:
        """Draft and accept as in a record's step."""
        self.accepted = {name: accepted for name, _, accepted in record.get("drafts", ())}
        self._next = dict(record["next"]) if "next" in record else None

    def propose(self, job: Job, most: int) -> int:
        """What was drafted behind the step; as much as is asked for where that is not recorded."""
        return most if self._next is None else self._next.get(f"r{job.request.id}", 0)

    def verify(self, job: Job, drafted: int, *, hopeless: bool = False) -> int:
        """What was accepted of a draft in the step."""
        return min(self.accepted.get(f"r{job.request.id}", 0), drafted)


class _ReadLog(RemoteReads):
    """Decides what is read from other servers, and logs it."""

    looks: list[list[Any]]
    composed: list[ChunkCopy]

    def look_up(self, job: Job, held: int) -> int:
        """Say what is to be read, and log it."""
        found = super().look_up(job, held)
        self.looks.append([f"r{job.request.id}", held, found])
        return found

    def compose(self, step: Iterable[Part]) -> StepCopies:
        """Say what is read, and log it."""
        found = super().compose(step)
        self.composed = found.loads
        return found


class _DrivenApart(_Driven, ApartVllm):
    """The scheduler of a server that prefills for others and reads from others; the replay says when reads end."""

    def __init__(self, scenario: Scenario, policy: _CallLog | GroupCallLog, max_tokens: int):
        super().__init__(scenario, policy, max_tokens)
        self.offload = self.reads = self.log = _ReadLog(policy)
        self.log.looks, self.log.composed = [], []
        self.read = lambda *_: 0.0
        self.now_held: list[Job] = []
        """Jobs whose blocks are held since the list was last cleared."""

    def _seen_to_end(self, now: float) -> list[int]:
        return []

    def _let_go(self, job: Job) -> None:
        super()._let_go(job)
        if job in self.held:
            self.now_held.append(job)


class _DrivenAsyncApart(_DrivenApart, AsyncApartVllm):
    """The same with asynchronous steps; the replay calls ``collect``."""


class _StepReplay(Replay):
    """Performs steps on the simulator's scheduler over the paged policy."""

    def __init__(
        self,
        cache: VllmCache,
        policy: _CallLog | GroupCallLog,
        server: dict[str, Any],
        *,
        asynchronous: bool,
        speculation: Record | None = None,
        apart: bool = False,
    ):
        """``server``: keys of ``[server]``; ``speculation``: the method, and the tokens of a draft; ``apart``: others
        prefill for it, and it for others."""
        self._policy = policy
        policy.calls, policy.name_of = [], {}
        table = {"scheduler": "vllm", "async_scheduling": asynchronous, **server}
        cells = {"cells": policy.groups[0].cells, "prefix_cache": cache.caching}
        drafts = {} if speculation is None else {**speculation, "acceptance": 0.0, "share": 1.0}
        scenario = load_scenario({"server": table, "cache": cells, "speculation": drafts})
        kind: type[_Driven]
        if apart:
            kind = _DrivenAsyncApart if asynchronous else _DrivenApart
        elif cache.chunks is None:
            kind = _DrivenAsync if asynchronous else _Driven
        else:
            kind = _DrivenAsyncOffloading if asynchronous else _DrivenOffloading
        self._scheduler = kind(scenario, policy, cache.max_tokens)
        self._drafts = _RecordedDrafts(scenario)
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
        policy = group_policy(cache, header) if "groups" in header else cache.build(_CallLog)
        super().__init__(cache, policy, server, asynchronous=asynchronous, speculation=speculation, apart=apart)
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
        if isinstance(scheduler, _DrivenApart):
            held = sorted(names[job.content] for job in scheduler.now_held)
            scheduler.now_held.clear()
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
        if isinstance(scheduler, _DrivenOffloading):
            copied = self._copied(scheduler, record)
        elif isinstance(scheduler, _DrivenApart):
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

    def _copied(self, scheduler: _DrivenOffloading, record: Record) -> State:
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
        return found

    def _read(self, scheduler: _DrivenApart, record: Record) -> State:
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
        super().__init__(cache, cache.build(_CallLog), server, asynchronous=asynchronous)
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
