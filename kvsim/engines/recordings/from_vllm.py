"""Recordings of vLLM, with its steps where it wrote them itself: its times are in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvsim.advice.memory.command_line import engine_flags, whole
from kvsim.engines.recordings.recorded_server import ServedRequest, ServerMeta, ServerSecond
from kvsim.engines.recordings.recording_files import Record, whole_number
from kvsim.engines.recordings.seen_steps import SeenRequest, seen_steps
from kvsim.engines.recordings.steps import (
    LONGEST_S,
    FrontEnd,
    MeasuredStep,
    RecordedClients,
    SentAfter,
    SteppedServer,
    as_json_key,
    machine_of,
    one_after_another,
    overlapping,
    replayed,
    since_last,
)
from kvsim.engines.recordings.vllm_scenario import VllmLimits, vllm_behaviour, vllm_scenario
from kvsim.engines.recordings.vllm_scheduler import ServerReplay
from kvsim.errors import counted
from kvsim.experiments.traffic import InMemoryRequests
from kvsim.model.engine_versions import PRESENT
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.set_up import build_policy
from workloads import Request, Segment
from workloads.request import answer_of
from workloads.traces.recorded import AskedRequest

_SEQUENCES = 256
"""Requests at the same time where vLLM is not told how many."""
_WAITS = ("mode", "async_scheduling")


def read_vllm(path: Path, header: Record, records: Sequence[Record]) -> SteppedServer:
    """Read such a recording. Raises ``UserError``, ``ValueError`` and ``KeyError`` if it is none."""
    records = [_as_vllm(record) for record in records]
    requests = [record for record in records if record["type"] == "request"]
    engine, assumed = completed(header)
    version = str(header.get("vllm") or PRESENT["vLLM"].version)
    header = {**header, "engine": engine, "vllm": version}
    scenario = _scenario(engine, version)
    meta = ServerMeta(
        engine="vllm",
        version=version,
        model=str(engine["model"]),
        device=str(header.get("cpu", "unknown processor")),
        dtype=engine.get("dtype"),
        block_size=engine["block_size"],
        num_gpu_blocks=engine["num_blocks"],
        prefix_caching=engine["prefix_caching"],
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        max_model_len=engine["max_model_len"],
        clock="client",
        requests=max(1, len(requests)),
    )
    cores, machine = int(header.get("cores", 1)), header.get("machine", {})
    same_server = as_json_key(
        "vllm", version, header.get("shape"), engine.get("dtype"), header.get("cpu"), header.get("cores")
    )
    recorded = any(record["type"] == "step" for record in records)
    if recorded:
        steps = _steps(header, scenario, records)
    else:
        steps = seen_steps([_seen(record) for record in requests if record.get("tok")], scenario)
    return SteppedServer(
        path,
        meta,
        tuple(_served(record) for record in requests if "first" in record and "error" not in record),
        _seconds(records),
        scenario=scenario,
        workload=_workload(requests),
        clients=RecordedClients(_after(header, requests), _front_end(requests, steps if recorded else ())),
        steps=steps,
        seen=not recorded,
        kernel=build_policy(scenario).kernel,
        machine=machine_of(
            meta.device,
            cores,
            cores,
            machine.get("own_s", 1.0),
            machine.get("other_s", 0.0),
            python=str(header.get("python", "")),
            load_before=float(machine.get("load_before", 0.0)),
        ),
        same_costs=as_json_key(same_server, [engine.get(key) for key in _WAITS]),
        same_server=same_server,
        same_settings=as_json_key(engine, header.get("flags", ())),
        settings=" ".join(map(str, header.get("flags", ()))) or str(header.get("group", "its defaults")),
        assumed=(*header.get("assumed", ()), *assumed),
    )


def _as_vllm(record: Record) -> Record:
    """A request that ``kvsim record --url`` wrote, in seconds, as recordings of vLLM have it; others as they are."""
    if "send_s" not in record:
        return record
    times = {
        key: 1e3 * record[name]
        for key, name in {"due": "at", "sent": "send_s", "end": "done_s"}.items()
        if name in record
    }
    tokens = [1e3 * at for at in record["token_s"]]
    found = {"type": "request", "r": record["id"], "prompt": record["prompt"], **times, "tok": tokens}
    found |= {"n_prompt": record["prompt_tokens"], "n_out": record["n_predict"]}
    if tokens:
        found["first"] = tokens[0]
    if "error" in record:
        found["error"] = record["error"]
    elif tokens:
        found["end"] = tokens[-1]
    if "cache_n" in record.get("result", {}):
        found["hit"] = record["result"]["cache_n"]
    if "after" in record:
        found |= {"after": record["after"], "think": 1e3 * record["think"]}
    return found


def completed(header: Record) -> tuple[Record, tuple[str, ...]]:
    """What a recording says of its engine, with what it does not say, and what was assumed, one line each.

    A server that is asked over HTTP says little of its settings; what it was started with may be in ``flags``.
    """
    typed = [str(flag) for flag in header.get("flags", ())]
    flags, _, _ = engine_flags("vllm", typed)
    engine, usual, assumed = dict(header["engine"]), PRESENT["vLLM"], []

    def fill(key: str, flag: str, otherwise: int, what: str) -> None:
        if engine.get(key) is not None:
            return
        engine[key] = whole(flags, flag, otherwise)
        if flag not in flags:
            assumed.append(f"{counted(otherwise, what)} ({flag} is not known)")

    fill("max_model_len", "--max-model-len", 8192, "token")
    fill("max_num_seqs", "--max-num-seqs", _SEQUENCES, "sequence")
    fill("max_num_batched_tokens", "--max-num-batched-tokens", usual.n_batch, "token")
    fill("block_size", "--block-size", usual.block_size, "token")
    longest = -(-engine["max_model_len"] // engine["block_size"])
    fill("num_blocks", "--num-gpu-blocks-override", longest * min(engine["max_num_seqs"], 8), "block")
    if "prefix_caching" not in engine:
        engine["prefix_caching"] = "--no-enable-prefix-caching" not in flags
    version = str(header.get("vllm", ""))
    if "async_scheduling" not in engine and header.get("clock") == "client" and version:
        # On CPUs vLLM switches it off.
        usual_way = vllm_behaviour(version).async_scheduling and "+cpu" not in version
        engine["async_scheduling"] = usual_way and "--no-async-scheduling" not in typed
    return engine, tuple(assumed)


def _scenario(engine: Record, version: str) -> Scenario:
    usual = vllm_behaviour(version)
    behaviour = usual._replace(
        async_scheduling=bool(engine.get("async_scheduling", False)),
        reserve_full=engine.get("scheduler_reserve_full_isl", usual.reserve_full),
    )
    keys = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks")
    limits = VllmLimits(*(engine[key] for key in keys))
    return vllm_scenario(behaviour, limits, prefix_cache=engine["prefix_caching"], cache={})


def _served(record: Record) -> ServedRequest:
    prompt = tuple((str(source), int(start), int(n)) for source, start, n in record["prompt"])
    asked = AskedRequest(record["sent"] / 1e3, prompt, record["n_out"])
    first, last, preemptions = record["first"] / 1e3, record["end"] / 1e3, record.get("pre")
    return ServedRequest(str(record["r"]), asked, first, last, None if preemptions is None else int(preemptions))


def _workload(requests: list[Record]) -> InMemoryRequests:
    texts: dict[str, int] = {}
    by_number = {record["r"]: record for record in requests}
    found = []
    for record in sorted(requests, key=lambda record: (record["sent"], record["r"])):
        record = by_number[record["r"]]
        content = tuple(_segment(source, start, n, texts, by_number) for source, start, n in record["prompt"])
        number, sent_s = whole_number(record, "r", least=0), record["sent"] / 1e3
        found.append(Request(number, sent_s, record["n_prompt"], record["n_out"], content=content))
    return InMemoryRequests(tuple(found))


def _segment(source: Any, start: int, n: int, texts: dict[str, int], requests: Mapping[int, Record]) -> Segment:
    if isinstance(source, str) and source.startswith("out:"):
        earlier = int(source.removeprefix("out:"))
        return Segment(answer_of(earlier, requests[earlier]["n_out"]).source, start, n)
    return Segment(texts.setdefault(str(source), len(texts)), start, n)


def _after(header: Record, requests: list[Record]) -> dict[int, SentAfter]:
    """What each request waited for. In a run without a rate, one that came to an idle server waited for all before."""
    found = {r["r"]: SentAfter((r["after"],), r.get("think", 0.0) / 1e3) for r in requests if "after" in r}
    if found or header.get("rate_per_s"):
        return found
    before: tuple[int, ...] = ()
    group: list[int] = []
    last_ms = ended_ms = 0.0
    for record in sorted(requests, key=lambda record: (record["due"], record["r"])):
        if group and record["due"] >= ended_ms:
            before, group, last_ms = tuple(group), [], ended_ms
        if before:
            found[record["r"]] = SentAfter(before, max(0.0, record["sent"] - last_ms) / 1e3)
        group.append(record["r"])
        ended_ms = max(ended_ms, record["end"])
    return found


def _front_end(requests: list[Record], steps: Sequence[MeasuredStep]) -> FrontEnd:
    """There: from sending to the engine, in the fastest tenth, since others wait for a step. Back: after a step."""
    there = sorted(float(record["engine"] - record["sent"]) for record in requests if "engine" in record)
    if not there or not steps:
        return FrontEnd(0.0, 0.0)
    back = [since_last(record["first"] / 1e3, steps) for record in requests if "first" in record]
    return FrontEnd(there[len(there) // 10] / 1e3, median(back) if back else 0.0)


def _seen(record: Record) -> SeenRequest:
    times = [at / 1e3 for at in record["tok"]]
    return SeenRequest(record["n_prompt"], record.get("hit", 0), record["sent"] / 1e3, times)


def _steps(header: Record, scenario: Scenario, records: Sequence[Record]) -> tuple[MeasuredStep, ...]:
    """The steps that computed something."""
    placed: list[MeasuredStep] = []
    idle: list[bool] = []
    for record, works in replayed(ServerReplay(header), scenario, records):
        if works and record["n"]:
            computed_ms = record["sched"] + record["exec"]
            output_s = float(record["t"] + record["sched"] + record["exec"]) / 1e3
            placed.append(MeasuredStep(record["t"] / 1e3, (computed_ms + record["upd"]) / 1e3, output_s, works))
            idle.append(record["run"][1] == len(record.get("fin", ())) and record["wait"][1] == 0)
    if header["engine"].get("async_scheduling"):
        return overlapping(placed)
    return one_after_another(placed, idle)


def _seconds(records: Sequence[Record]) -> tuple[ServerSecond, ...]:
    """Requests running and waiting, second by second: as the last step before had them."""
    found: list[ServerSecond] = []
    for record in records:
        if record["type"] != "step":
            continue
        if not record["t"] / 1e3 <= LONGEST_S:
            raise ValueError(f"a step at {record['t']} ms")
        while len(found) < record["t"] / 1e3:
            running, waiting = (record[key][0] for key in ("run", "wait"))
            found.append(ServerSecond(float(len(found)), running, waiting))
    return tuple(found)
