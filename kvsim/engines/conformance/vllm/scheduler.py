"""Replay recorded steps of vLLM's ``Scheduler`` on the simulator's own, over the paged policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.engines.conformance.recordings import Record, State, whole_number
from kvsim.engines.conformance.vllm.driven import CallLoggingPolicy, build_scheduler
from kvsim.engines.conformance.vllm.recorded import UNBOUNDED, RecordedPolicy, crc, recorded_state
from kvsim.simulation.job import Job
from kvsim.simulation.schedulers.vllm_async import BATCHES, AsyncVllm
from policies import Content
from workloads import Request, Segment


class SchedulerReplay:
    """Performs steps of ``Scheduler``, or of ``AsyncScheduler`` with as many steps in flight as the recording says."""

    excused: Sequence[str] = ()

    def __init__(self, header: Record):
        effective = header["effective"]
        asynchronous = bool(effective["async_scheduling"])
        self.era = f"{header['vllm']}, scheduler{', asynchronous' * asynchronous}"
        batches = whole_number(effective, "max_concurrent_batches", BATCHES)
        self._depth = whole_number(header, "depth", batches) if asynchronous else 1
        if self._depth > 1:
            self.era += f", {self._depth} steps in flight" * (self._depth != BATCHES)
        max_tokens = whole_number(header, "max_model_len", UNBOUNDED)
        self._recorded = RecordedPolicy(header, max_tokens, CallLoggingPolicy)
        policy = self._policy = self._recorded.policy
        policy.calls, policy.name_of = [], {}
        server = {
            "slots": whole_number(header, "max_seqs"),
            "n_batch": whole_number(header, "budget"),
            "long_prefill_threshold": int(header.get("long_thr", 0)),
            "chunked_prefill": bool(header.get("chunked", True)),
            "reserve_full": bool(effective["reserve_full"]),
            "order": header.get("policy", "fcfs"),
        }
        self._scheduler = build_scheduler(policy, server, max_tokens, asynchronous=asynchronous)
        self._jobs: dict[str, Job] = {}

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
        step = scheduler.schedule(0.0)
        tables = {chunk.seq: list(policy.tables[chunk.seq].blocks) for chunk in step}
        of = {chunk.seq: names[policy.tables[chunk.seq].content] for chunk in step}
        emitting = [of[chunk.seq] for chunk in step if chunk.start + chunk.n >= self._jobs[of[chunk.seq]].tokens]
        scheduler.take_step(step)
        if isinstance(scheduler, AsyncVllm):
            while len(scheduler.flights) >= self._depth:
                scheduler.collect()
        calls, policy.calls = policy.calls, []
        ours: State = {
            "nst": [[of[chunk.seq], chunk.n] for chunk in step],
            "emit": emitting,
            "fin": [names[job.content] for job in scheduler.let_go],
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
