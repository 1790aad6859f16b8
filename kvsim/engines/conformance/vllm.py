"""Replay recordings of vLLM: its KV cache manager call by call, and its scheduler step by step."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from kvsim.engines.conformance.recordings import Record, Replay, State, whole_number
from kvsim.engines.conformance.zero_time import ZeroTimeBackend
from kvsim.errors import Livelock
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.simulation.job import FailureKind, Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.vllm import Vllm
from policies import CacheConfig, Chunk, Content, SequencePlan
from policies.content import Key, TextSegment
from policies.layouts.paged import PagedPolicy
from policies.paging.eviction import free_blocks
from workloads import Request, Segment

VERSION = "0.33.0"
UNBOUNDED = 1 << 30
"""Tokens or sequences, where a recording sets no limit."""
_MASK = (1 << 32) - 1
P = TypeVar("P", bound=PagedPolicy)


def crc(value: object) -> int:
    """The recordings' checksum of a JSON value."""
    return zlib.crc32(json.dumps(value, separators=(",", ":")).encode())


def tokens_of(piece: TextSegment) -> Iterator[int]:
    """The token ids of a segment, by the recordings' formula."""
    seed, start, n = piece
    for i in range(start, start + n):
        x = (seed * 2654435761 + i * 40503 + i * i * 97 + 12345) & _MASK
        x = ((x ^ (x >> 15)) * 2246822519) & _MASK
        yield (x >> 13) & 0x7FFF


class BlockIds:
    """The recordings' ids of full blocks, by our content keys."""

    def __init__(self, block_size: int):
        self.of: dict[Key, str] = {}
        self._block_size = block_size
        self._texts: dict[Content, tuple[list[int], list[str]]] = {}
        """By content: the tokens of its last, incomplete block, and the ids of the full blocks before it."""

    def learn(self, content: Content, piece: TextSegment) -> None:
        """Register the blocks that become full as the content grows by ``piece``."""
        tokens, ids = self._texts.setdefault(content, ([], []))
        tokens += tokens_of(piece)
        size = self._block_size
        while len(tokens) >= size:
            block = ",".join(map(str, tokens[:size]))
            del tokens[:size]
            parent = ids[-1] if ids else "root"
            ids.append(blake2b(f"{parent}|{block}".encode(), digest_size=6).hexdigest())
        keys = content.keys(size, len(ids))
        for at in range(len(ids)):
            self.of.setdefault(keys[at], ids[at])


class RecordedPolicy(Generic[P]):
    """A policy built from a recording's header, and its state in the recording's fields."""

    def __init__(self, header: Record, max_tokens: int, build: Callable[..., P]):
        blocks, size = whole_number(header, "num_blocks"), whole_number(header, "block_size")
        config = CacheConfig(
            cells=blocks * size,
            n_ubatch=header.get("effective", header).get("max_in_flight", UNBOUNDED),
            sequences=UNBOUNDED,
            max_tokens=max_tokens,
            block_size=size,
            watermark=float(header.get("watermark", 0.0)),
        )
        self.policy = build(
            f"vllm {VERSION}",
            config,
            block_size=size,
            free=partial(free_blocks, "lru"),
            prefix_cache=bool(header["caching"]),
            window=whole_number(header, "window") if "window" in header else None,
            tail_only=header.get("retention") == 0,
        )
        self.names = BlockIds(size)
        self.evicted: list[list[Any]] = []
        self.policy.pool.on_evict = lambda block, key: self.evicted.append([block, self.names.of[key]])

    def state(self, record: Record) -> State:
        """Our values of the fields that every record has."""
        pool, names = self.policy.pool, self.names.of
        queue = pool.free.order()
        blocks = [[pool.refs[b], 0 if (key := pool.keys[b]) is None else names[key]] for b in range(1, pool.n)]
        state: State = {"nf": len(queue), "fqc": crc(queue), "st": crc(blocks), "nc": pool.n_cached, "ev": self.evicted}
        if "fq" in record:
            state["fq"] = queue
        self.evicted = []
        return state


COMMON = ("nf", "fqc", "fq", "st", "nc")


def recorded_state(record: Record, fields: tuple[str, ...]) -> State:
    """The record's own fields and the common ones, of which the queue is optional."""
    common = {key: record[key] for key in COMMON if key != "fq" or key in record}
    return {key: record[key] for key in fields} | common | {"ev": record.get("ev", [])}


class ManagerReplay:
    """Performs calls of ``KVCacheManager`` on the paged policy."""

    excused: Sequence[str] = ()

    def __init__(self, header: Record):
        self.era = f"{header['vllm']}, manager"
        self._recorded = RecordedPolicy(header, UNBOUNDED, PagedPolicy)
        self._policy = self._recorded.policy
        self._contents: dict[str, Content] = {}
        self._prompts: dict[str, int] = {}
        self._seqs: dict[str, int] = {}

    def perform(self, record: Record) -> tuple[State, State]:
        """Perform one call; return the recorded state after it and ours, in the same fields."""
        operations: dict[str, Callable[[Record], State]] = {
            "add": self._add,
            "append": self._append,
            "lookup": self._lookup,
            "alloc": self._alloc,
            "free": self._free,
            "preempt": self._free,
            "reset": lambda _: {"ok": self._policy.pool.forget_all()},
            "evict": self._evict,
        }
        if record["op"] not in operations:
            raise ValueError(f"operation {record['op']!r} is unknown; accepted: {', '.join(operations)}")
        found = operations[record["op"]](record)
        return recorded_state(record, tuple(found)), found | self._recorded.state(record)

    def operation(self, record: Record) -> dict[str, Any]:
        """The call and its arguments."""
        left_out = {"out", "tbl", "hit", "blocks", "i", "ev", *COMMON} - ({"hit"} if record["op"] == "alloc" else set())
        return {key: value for key, value in record.items() if key not in left_out}

    def _add(self, record: Record) -> State:
        content = self._contents[record["r"]] = Content()
        self._seqs[record["r"]] = len(self._seqs)
        for piece in record["prompt"]:
            self._extend(content, piece)
        self._prompts[record["r"]] = content.n
        return {}

    def _append(self, record: Record) -> State:
        self._extend(self._contents[record["r"]], record["seg"])
        return {}

    def _extend(self, content: Content, piece: list[int]) -> None:
        seed, start, n = piece
        content.extend((seed, start, n))
        self._recorded.names.learn(content, (seed, start, n))

    def _lookup(self, record: Record) -> State:
        seq, content = self._seqs[record["r"]], self._contents[record["r"]]
        hit = self._policy.match(seq, content, content.n)
        return {"hit": hit, "blocks": self._policy.found(seq)}

    def _alloc(self, record: Record) -> State:
        seq, content = self._seqs[record["r"]], self._contents[record["r"]]
        policy = self._policy
        if record["first"]:
            policy.open(seq, SequencePlan(self._prompts[record["r"]], UNBOUNDED, UNBOUNDED, content))
        # After a look-up that disagreed, continue with the blocks that our own look-up found.
        hit = len(policy.found(seq)) * policy.block_size if record["first"] and record["hit"] else 0
        held = hit // policy.block_size if record["first"] else len(policy.tables[seq].blocks)
        chunk = Chunk(seq, record["nct"] + hit, record["new"])
        done = policy.reserve(
            chunk,
            whole=content.n if record["ff"] else 0,
            waits=record["hs"] and not record["stt"],
            lookahead=record["look"],
            in_flight=record["infl"],
        )
        if done:
            policy.allocate([chunk])
        table = list(policy.tables[seq].blocks)
        return {"out": table[held:] if done else None, "tbl": table}

    def _free(self, record: Record) -> State:
        self._policy.free(self._seqs[record["r"]])
        return {}

    def _evict(self, record: Record) -> State:
        for block in record["ids"]:
            self._policy.pool.forget(block)
        return {}


class CallLoggingPolicy(PagedPolicy):
    """The paged policy, logging the scheduler's calls."""

    calls: list[list[Any]]
    name_of: dict[Content, str]

    def match(self, seq: int, content: Content, tokens: int) -> int:
        """Look up a prefix, and log it."""
        hit = super().match(seq, content, tokens)
        self.calls.append(["L", self.name_of[content], hit, self.found(seq)])
        return hit

    def reserve(
        self, chunk: Chunk, *, whole: int = 0, waits: bool = False, lookahead: int = 0, in_flight: int = 0
    ) -> bool:
        """Reserve blocks, and log it."""
        s = self.tables[chunk.seq]
        held = len(s.blocks) or chunk.start // self.block_size
        computed, hit = (chunk.start, 0) if s.blocks else (0, chunk.start)
        done = super().reserve(chunk, whole=whole, waits=waits, lookahead=lookahead, in_flight=in_flight)
        new = list(s.blocks[held:]) if done else None
        self.calls.append(["A", self.name_of[s.content], computed, chunk.n, hit, new])
        return done


class OutcomeRecorder(Recorder):
    """Logs requests that end or are preempted."""

    def __init__(self, policy: CallLoggingPolicy):
        super().__init__()
        self._policy = policy
        self.ended: list[str] = []

    def finish(self, job: Job) -> None:
        """Log that the request's blocks are freed at its end."""
        super().finish(job)
        name = self._policy.name_of[job.content]
        self._policy.calls.append(["F", name])
        if job.failure != FailureKind.CANCELLED:
            self.ended.append(name)

    def preempted(self, job: Job) -> None:
        """Log that the request's blocks are freed by a preemption."""
        super().preempted(job)
        self._policy.calls.append(["P", self._policy.name_of[job.content]])


class UncheckedVllm(Vllm):
    """vLLM's scheduler without our checks: like the original, it refuses no request."""

    def __init__(self, scenario: Scenario, policy: CallLoggingPolicy, recorder: Recorder, max_tokens: int):
        super().__init__(scenario, policy, ZeroTimeBackend(), recorder)
        self._context, self._limit = max_tokens, max_tokens - 1

    def _refusal(self, job: Job) -> None:
        """Refuses nothing."""

    def _check_progress(self, now: float) -> None:
        """Never raise ``Livelock``: the original waits for ever."""


class SchedulerReplay:
    """Performs steps of ``Scheduler`` on our own scheduler over the paged policy."""

    excused: Sequence[str] = ()

    def __init__(self, header: Record):
        effective = header["effective"]
        self.era = f"{header['vllm']}, scheduler"
        if effective["async_scheduling"]:
            self.era += ", asynchronous (ours is not)"
        max_tokens = whole_number(header, "max_model_len", UNBOUNDED)
        self._recorded = RecordedPolicy(header, max_tokens, CallLoggingPolicy)
        policy = self._policy = self._recorded.policy
        policy.calls, policy.name_of = [], {}
        server = {
            "scheduler": "vllm",
            "slots": whole_number(header, "max_seqs"),
            "n_batch": whole_number(header, "budget"),
            "long_prefill_threshold": int(header.get("long_thr", 0)),
            "chunked_prefill": bool(header.get("chunked", True)),
            "reserve_full": bool(effective["reserve_full"]),
            "order": header.get("policy", "fcfs"),
        }
        scenario = load_scenario({"server": server, "cache": {"cells": policy.groups[0].cells}})
        self._recorder = OutcomeRecorder(policy)
        self._scheduler = UncheckedVllm(scenario, policy, self._recorder, max_tokens)
        self._jobs: dict[str, Job] = {}

    def perform(self, record: Record) -> tuple[State, State]:
        """Perform one step: arrivals and cancellations, the schedule, and its completion."""
        if record["op"] != "step":
            raise ValueError(f"operation {record['op']!r} is unknown; accepted: step")
        policy, scheduler, names = self._policy, self._scheduler, self._policy.name_of
        for added in record.get("add", ()):
            self._add(*added)
        for name in record.get("abort", ()):
            if not self._jobs[name].ended:
                scheduler.cancel(self._jobs[name], 0.0)
        try:
            step = list(scheduler.compose(0.0))
        except Livelock:
            # The original schedules nothing and waits.
            step = []
        tables = {chunk.seq: list(policy.tables[chunk.seq].blocks) for chunk in step}
        of = {chunk.seq: names[policy.tables[chunk.seq].content] for chunk in step}
        generated_before = {name: job.generated for name, job in self._jobs.items()}
        policy.allocate(step)
        scheduler.commit(step, 1, 0.0)
        ended, self._recorder.ended = self._recorder.ended, []
        calls, policy.calls = policy.calls, []
        ours: State = {
            "nst": [[of[chunk.seq], chunk.n] for chunk in step],
            "emit": [
                of[chunk.seq] for chunk in step if self._jobs[of[chunk.seq]].generated > generated_before[of[chunk.seq]]
            ],
            "fin": ended,
            "run": [names[job.content] for job in scheduler.running],
            "wait": [names[job.content] for job in scheduler.waiting],
            "calls": calls,
        }
        recorded = recorded_state({"fin": [], **record}, tuple(ours))
        for name, table in record["tables"]:
            recorded[f"table {name}"] = table
        for seq, table in tables.items():
            ours[f"table {of[seq]}"] = crc(table) if isinstance(recorded.get(f"table {of[seq]}"), int) else table
        return recorded, ours | self._recorded.state(record)

    def operation(self, record: Record) -> dict[str, Any]:
        """The step's number, arrivals and cancellations."""
        return {key: record[key] for key in ("op", "i", "add", "abort") if key in record}

    def _add(self, name: str, prompt: list[list[int]], max_tokens: int, priority: int, arrival_s: float) -> None:
        number = int(name.removeprefix("r"))
        segments = tuple(Segment(*piece) for piece in prompt)
        n = sum(segment.n for segment in segments)
        job = Job(Request(number, arrival_s, n, max_tokens, content=segments, priority=priority), arrival_s)
        # Each recorded request's answer has a source number of its own, which later prompts quote.
        job.content = content = Content()
        for piece in (*segments, (3_000_000 + number, 0, max_tokens)):
            content.extend(piece)
            self._recorded.names.learn(content, piece)
        self._jobs[name] = job
        self._policy.name_of[content] = name
        self._scheduler.submit(job, arrival_s)


def vllm_replay(header: Record) -> Replay:
    """The replay of a recording, by its header. Raises ``ValueError`` if it is not one of vLLM's."""
    kinds: dict[str, Callable[[Record], Replay]] = {"manager": ManagerReplay, "scheduler": SchedulerReplay}
    if header.get("kind") not in kinds:
        raise ValueError(f"not a vLLM recording's header; a JSON object with 'kind' ({' or '.join(kinds)}) is expected")
    return kinds[header["kind"]](header)
