"""Recordings of llama-server (``{"type": "meta", "flags": ...}``), with the steps of its log where they have it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from kvsim.costs.profile import MachineInfo
from kvsim.engines.recordings.llama_server_replay import LlamaServerReplay, tokens_of, user_starts
from kvsim.engines.recordings.recorded_server import ServedRequest, ServerMeta
from kvsim.engines.recordings.recording_files import Record, whole_number
from kvsim.engines.recordings.seen_steps import SeenRequest, seen_steps
from kvsim.engines.recordings.steps import (
    FrontEnd,
    MeasuredStep,
    RecordedClients,
    SentAfter,
    SteppedServer,
    as_json_key,
    machine_of,
    one_after_another,
    replayed,
    since_last,
)
from kvsim.experiments.traffic import InMemoryRequests
from kvsim.simulation.set_up import build_policy
from workloads import Request, Segment
from workloads.request import answer_of
from workloads.traces.recorded import AskedRequest

_CLOCK_S = 0.0015
"""How well the log's clock agrees with the client's."""
_THREADS = ("-t", "--threads")


def read_llama_server(path: Path, header: Record, records: Sequence[Record]) -> SteppedServer:
    """Read such a recording. Raises ``UserError``, ``ValueError`` and ``KeyError`` if it is none."""
    requests = [record for record in records if record["type"] == "request"]
    replay = LlamaServerReplay(header)
    scenario = replay.scenario
    said, model, machine = header["server"], header.get("model", {}), header.get("machine", {})
    meta = ServerMeta(
        engine="llama-server",
        version=replay.era,
        model=str(model.get("file", "unknown")),
        device=str(machine.get("cpu", "unknown processor")),
        prefix_caching=True,
        max_num_seqs=scenario.server.slots,
        max_num_batched_tokens=scenario.n_batch,
        max_model_len=scenario.slot_context,
        clock="client",
        requests=max(1, len(requests)),
    )
    recorded = any(record["type"] == "step" for record in records)
    if recorded:
        steps = _steps(replay, records)
    else:
        steps = seen_steps([_seen(record) for record in requests if record.get("token_s")], scenario)
    server = [replay.era, model, machine.get("cpu"), machine.get("cores"), _threads(header)]
    same_server = as_json_key(*server, said.get("kv_type_k"), said.get("kv_type_v"))
    attention = said.get("flash_attn_resolved", said.get("flash_attn", "unknown"))
    front_end = _front_end(records, steps if recorded else ())
    return SteppedServer(
        path,
        meta,
        tuple(_served(record) for record in requests if record.get("token_s") and "error" not in record),
        (),
        scenario=scenario,
        workload=_workload(records, header.get("body", {})),
        clients=RecordedClients(_after(requests), front_end, _begun_after(records)),
        steps=steps,
        seen=not recorded,
        kernel=build_policy(scenario).kernel,
        machine=_machine(header),
        same_costs=as_json_key(same_server, attention, said.get("n_ubatch")),
        same_server=same_server,
        same_settings=as_json_key(header["flags"]),
        settings=" ".join(map(str, header["flags"])) or "its defaults",
        assumed=tuple(header.get("assumed", ())),
    )


def _threads(header: Record) -> int:
    flags = [str(flag) for flag in header["flags"]]
    for flag, value in pairwise(flags):
        if flag in _THREADS:
            return int(value)
    return int(header.get("machine", {}).get("cores", 1))


def _machine(header: Record) -> MachineInfo:
    machine = header.get("machine", {})
    return machine_of(
        machine.get("cpu", "unknown processor"),
        machine.get("cores", 1),
        _threads(header),
        own_s=float(header.get("server_cpu_s", 1.0)) + float(header.get("client_cpu_s", 0.0)),
        other_s=float(header.get("other_cpu_s", 0.0)),
        system=str(machine.get("system", "")),
        load_before=float(header.get("load_before", 0.0)),
    )


def _served(record: Record) -> ServedRequest:
    prompt = tuple((str(source), int(start), int(n)) for source, start, n in record["prompt"])
    tokens = record["token_s"]
    asked = AskedRequest(record["send_s"], prompt, len(tokens))
    return ServedRequest(str(record["id"]), asked, tokens[0], tokens[-1], None)


def _workload(records: Sequence[Record], defaults: Record) -> InMemoryRequests:
    sources = {record["name"]: record["tokens"] for record in records if record["type"] == "source"}
    requests = [record for record in records if record["type"] == "request" and record["prompt"]]
    texts, found = SharedTexts(), []
    for record in sorted(requests, key=lambda record: (record["send_s"], record["id"])):
        body = {**defaults, **record.get("params", {})}
        own = {key: body[key] for key in ("n_keep", "n_discard", "cache_prompt") if key in body}
        prompt = tokens_of(record["prompt"], sources)
        asked, came = record["n_predict"], len(record.get("token_s", ()))
        output = max(1, asked) if asked >= 0 else came or 1
        answer = record.get("output") or [record.get("answer") or 0] * output
        number, arrival_s = whole_number(record, "id", least=0), float(record["send_s"])
        content = texts.add(number, prompt, answer[:output])
        starts = user_starts(prompt, body.get("message_delimiters", ()))
        found.append(Request(number, arrival_s, len(prompt), output, content=content, user_starts=starts, **own))
    return InMemoryRequests(tuple(found))


def _after(requests: Sequence[Record]) -> dict[int, SentAfter]:
    """What each request waited for: one other, or all of a group (-1: of ``burst0``, -2: of ``burst1``, ...)."""
    sent = {record["id"] for record in requests if record["prompt"]}
    groups: dict[str, list[int]] = {}
    for record in requests:
        if record["id"] in sent:
            groups.setdefault(str(record.get("group", "")), []).append(record["id"])
    found = {}
    for record in requests:
        if "after" not in record or record["id"] not in sent:
            continue
        number = record["after"]
        waits = groups.get(f"burst{-1 - number}", []) if number < 0 else [number]
        if waits and sent.issuperset(waits):
            found[record["id"]] = SentAfter(tuple(waits), float(record.get("think", 0.0)))
    return found


def _front_end(records: Sequence[Record], steps: Sequence[MeasuredStep]) -> FrontEnd:
    """There: from sending until the task is posted; back: after a step. Medians, so far as the log's clock allows."""
    posted = {record["task"]: record["t"] for record in records if record.get("kind") == "post"}
    requests = [r for r in records if r["type"] == "request" and r.get("token_s") and r.get("task") in posted]
    if not requests or not steps:
        return FrontEnd(0.0, 0.0)
    there = [max(0.0, float(posted[record["task"]] - record["send_s"])) for record in requests]
    back = [since_last(record["token_s"][0] + _CLOCK_S, steps) - _CLOCK_S for record in requests]
    return FrontEnd(median(there), max(0.0, median(back)))


def _begun_after(records: Sequence[Record]) -> dict[int, float]:
    """Seconds from sending until the first step, for requests at a fixed time that came to an idle server."""
    sent = {r["task"]: r for r in records if r["type"] == "request" and "task" in r and "after" not in r}
    found: dict[int, float] = {}
    waiting: list[Record] = []
    idle = True
    for record in records:
        if record["type"] == "step":
            found |= {request["id"]: float(record["t"] - request["send_s"]) for request in waiting}
            waiting, idle = [], False
        elif record.get("kind") == "idle":
            idle = True
        elif record.get("kind") == "post" and idle and record["task"] in sent:
            waiting.append(sent[record["task"]])
    return {number: max(0.0, seconds) for number, seconds in found.items()}


def _seen(record: Record) -> SeenRequest:
    result = record.get("result", {})
    prompt_s = result["prompt_ms"] / 1e3 if "prompt_ms" in result else None
    tokens = sum(n for _, _, n in record["prompt"])
    cached, slot = result.get("cache_n", 0), result.get("id_slot")
    return SeenRequest(tokens, cached, record["send_s"], record["token_s"], slot, prompt_s)


def _steps(replay: LlamaServerReplay, records: Sequence[Record]) -> tuple[MeasuredStep, ...]:
    """The steps that found room."""
    placed: list[MeasuredStep] = []
    idle: list[bool] = []
    for record, works in replayed(replay, replay.scenario, records):
        if record["type"] == "step" and record["ok"]:
            start_s, took_s = float(record["t"]), float(record["s"])
            placed.append(MeasuredStep(start_s, took_s, start_s + took_s, works))
            idle.append(False)
        elif record["type"] == "event" and record["kind"] == "idle" and idle:
            idle[-1] = True
    return tuple(step for step in one_after_another(placed, idle) if step.works)


_Tokens = NDArray[np.int64]


class SharedTexts:
    """Prompts in the order in which they were sent, each with its answer.

    A prompt consists of the segments of the earlier prompt and answer that it shares most tokens with, as far as the
    tokens are the same, and of a text of its own behind. All texts are held, and compared with each new prompt that
    begins with the same token.
    """

    def __init__(self) -> None:
        self._texts: dict[int, list[tuple[_Tokens, tuple[Segment, ...]]]] = {}
        """Tokens and segments of prompts with their answers, by their first token."""
        self._own = 0

    def add(self, number: int, prompt: Sequence[int], answer: Sequence[int]) -> tuple[Segment, ...]:
        """The segments of a prompt; ``number``: of its request, ``answer``: what it was answered."""
        tokens = np.asarray([*prompt, *answer], dtype=np.int64)
        alike = self._texts.setdefault(int(tokens[0]), [])
        shared, found = 0, tuple[Segment, ...]()
        for other, segments in alike:
            common = _common(tokens[: len(prompt)], other)
            if common > shared:
                shared, found = common, segments
        content = _head(found, shared)
        if shared < len(prompt):
            content = (*content, Segment(self._own, 0, len(prompt) - shared))
            self._own += 1
        said = (answer_of(number, len(answer)),) if len(answer) else ()
        alike.append((tokens, (*content, *said)))
        return content


def _common(one: _Tokens, other: _Tokens) -> int:
    """How many tokens two texts have in common at their beginning."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n


def _head(segments: Sequence[Segment], n: int) -> tuple[Segment, ...]:
    """The first ``n`` tokens of some segments."""
    found = []
    for segment in segments:
        if n <= 0:
            break
        found.append(segment._replace(n=min(n, segment.n)))
        n -= segment.n
    return tuple(found)
