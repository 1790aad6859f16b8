"""Records what vLLM's scheduler decides over several cache groups, without a GPU: run by the Python that has vLLM.

    python record_groups.py MODEL OUT.jsonl.gz [NAME=VALUE ...]

``Scheduler``, ``KVCacheManager`` and its coordinators are the real ones; what runs the model is played. The model,
which ``model.py`` writes, is only looked at for its shape. The groups are given, as ``full:16,window:16:48``; each has
a kind, the tokens of a block, and those of its window or chunk, or the grid of a state's checkpoints.

The fields are those of recordings of the scheduler. Where these have one list of blocks, there is one for each group; a
group's number follows the ids of its blocks. Of a block with several ids, the first counts.
"""

import gzip
import json
import math
import random
import sys
import zlib
from collections import deque
from hashlib import blake2b

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

SETTINGS = {
    "groups": "full:16,window:16:48",
    "seed": 1,
    "steps": 300,
    "num_blocks": 64,
    "budget": 128,
    "max_seqs": 6,
    "max_model_len": 512,
    "depth": 1,
    "caching": 1,
    "retention": 0,
    "chunked": 1,
    "long_thr": 0,
    "reserve_full": 1,
    "policy": "fcfs",
    "watermark": 0.0,
    "texts": 8,
    "p_arrive": 0.4,
    "max_out": 40,
    "p_abort": 0.02,
}
"""What can be set, and usual values. ``texts``: how many beginnings prompts share; ``depth``: steps in flight;
``retention``: tokens between the states and windows that stay cached, 0: none but the ends of prompts, -1: all."""


def token(seed, i):
    """Token ``i`` of a text."""
    x = (seed * 2654435761 + i * 40503 + i * i * 97 + 12345) % 2**32
    x ^= x >> 15
    return (x * 2246822519 % 2**32) >> 13 & 0x7FFF


def crc(value):
    return zlib.crc32(json.dumps(value, separators=(",", ":")).encode())


def name_of(key):
    """The recordings' id of a block, by vLLM's key of it, in which the number of its cache group follows."""
    return f"{key[:-4].hex()}:{int.from_bytes(key[-4:], 'big')}"


def group_of(text):
    """A cache group by the words of ``groups``: as the header has it."""
    kind, size, *rest = text.split(":")
    group = {"kind": kind, "block_size": int(size)}
    if kind in ("window", "chunked"):
        group["span"] = int(rest[0])
    if kind == "state":
        group["checkpoint_grid"] = int(rest[0]) if rest else 0
    return group


def spec_of(group, given):
    """vLLM's own description of a cache group. How many bytes its blocks have is of no account to a scheduler.

    Without a prefix cache vLLM keeps one state for each sequence, in a block for as many tokens as one can have.
    """
    kind, size = group["kind"], group["block_size"]
    heads = {"block_size": size, "num_kv_heads": 4, "head_size": 64, "dtype": torch.float16}
    if kind == "full":
        return FullAttentionSpec(**heads)
    if kind == "latent":
        return MLAAttentionSpec(**heads | {"num_kv_heads": 1, "head_size": 576})
    if kind == "window":
        return SlidingWindowSpec(**heads, sliding_window=group["span"])
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(**heads, attention_chunk_size=group["span"])
    return MambaSpec(
        block_size=size if given["caching"] else given["max_model_len"],
        shapes=((16, 16),),
        dtypes=(torch.float16,),
        mamba_cache_mode="align" if given["caching"] else "none",
        num_prefill_checkpoint_blocks=int(group["checkpoint_grid"] > 0),
        prefill_checkpoint_alignment=group["checkpoint_grid"] or None,
    )


def scheduler_of(model, given, groups):
    """The real scheduler, and the tokens of which a block has an id."""
    length, blocks, caching = given["max_model_len"], given["num_blocks"], bool(given["caching"])
    specs = [KVCacheGroupSpec([f"layer {i}"], spec_of(group, given)) for i, group in enumerate(groups)]
    sizes = [spec.kv_cache_spec.block_size for spec in specs]
    size = math.lcm(*sizes)  # As resolve_kv_cache_block_sizes has it.
    hashed = math.gcd(*sizes) if caching else size
    states = [group["block_size"] for group in groups if group["kind"] == "state"]
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=given["max_seqs"],
            max_num_batched_tokens=given["budget"],
            max_model_len=length,
            is_encoder_decoder=False,
            enable_chunked_prefill=bool(given["chunked"]),
            long_prefill_token_threshold=given["long_thr"],
            policy=given["policy"],
            scheduler_reserve_full_isl=bool(given["reserve_full"]),
            watermark=given["watermark"],
        ),
        model_config=ModelConfig(model=model, dtype="float16", max_model_len=length),
        cache_config=CacheConfig(block_size=sizes[0], enable_prefix_caching=caching),
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.async_scheduling = given["depth"] > 1  # Only now: on a CPU it would be switched off.
    config.scheduler_config.enable_chunked_prefill = bool(given["chunked"])
    config.cache_config.num_gpu_blocks = blocks
    if states and caching:
        config.cache_config.mamba_cache_mode, config.cache_config.block_size = "align", states[0]
    retention = None if given["retention"] < 0 else given["retention"]
    kind = AsyncScheduler if given["depth"] > 1 else Scheduler
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], specs, prefix_cache_retention_interval=retention),
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
        hash_block_size=hashed,
    )
    return scheduler, hashed


class Recording:
    """Plays the engine around the real scheduler, and writes down what it decides."""

    def __init__(self, model, given):
        self.given = given
        self.draw = random.Random(given["seed"])
        self.groups = [group_of(text) for text in given["groups"].split(",")]
        self.scheduler, self.hashed = scheduler_of(model, given, self.groups)
        self.arrived = 0
        self.calls, self.evicted, self.freed = [], [], []
        """What the real ones have decided since the last step: see the fields ``calls``, ``ev`` and ``fin``."""
        self.in_flight = deque()
        """Of each step that was composed and whose output has not come: what was composed, and who gets a token."""
        self._listen()

    def header(self):
        """Every setting."""
        given, scheduler = self.given, self.scheduler
        effective = {
            "async_scheduling": given["depth"] > 1,
            "max_concurrent_batches": given["depth"],
            "max_in_flight": scheduler.vllm_config.max_in_flight_tokens,
            "reserve_full": scheduler.scheduler_reserve_full_isl,
            "chunked": scheduler.scheduler_config.enable_chunked_prefill,
        }
        names = ["seed", "num_blocks", "budget", "max_seqs", "max_model_len", "depth"]
        names += ["policy", "long_thr", "watermark"]
        about = {"type": "header", "kind": "scheduler", "vllm": vllm.__version__, "effective": effective}
        about |= {key: given[key] for key in names}
        about |= {"caching": bool(given["caching"]), "chunked": bool(given["chunked"]), "groups": self.groups}
        return about | {"retention": None if given["retention"] < 0 else given["retention"], "hashed": self.hashed}

    def _listen(self):
        """Have the real ones tell what they decide."""
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        look_up, allocate, preempt = manager.get_computed_blocks, manager.allocate_slots, scheduler._preempt_request
        free, forget = scheduler._free_request, manager.block_pool._maybe_evict_cached_block

        def tell_found(request, *rest):
            found = look_up(request, *rest)
            self.calls.append(["L", request.request_id, found[1], ids_of(found[0])])
            return found

        def tell_allocated(request, new, num_new_computed_tokens=0, *rest, **options):
            given = allocate(request, new, num_new_computed_tokens, *rest, **options)
            computed = request.num_computed_tokens
            out = None if given is None else ids_of(given)
            self.calls.append(["A", request.request_id, computed, new, num_new_computed_tokens, out])
            return given

        def tell_preempted(request, *rest, **options):
            self.calls.append(["P", request.request_id])
            return preempt(request, *rest, **options)

        def tell_freed(request, *rest, **options):
            self.calls.append(["F", request.request_id])
            self.freed.append(request.request_id)
            return free(request, *rest, **options)

        def tell_forgotten(block):
            if block.block_hash is not None:
                self.evicted.append([block.block_id, name_of(block.block_hash)])
            return forget(block)

        manager.get_computed_blocks, manager.allocate_slots = tell_found, tell_allocated
        scheduler._preempt_request, scheduler._free_request = tell_preempted, tell_freed
        manager.block_pool._maybe_evict_cached_block = tell_forgotten

    def steps(self):
        """The records of all steps: as many as are asked for, and those after them until no request gets further."""
        i, record = 0, {"nst": []}
        while i < self.given["steps"] or record["nst"] or self.in_flight:
            yield (record := self.step(i, i < self.given["steps"]))
            i += 1

    def step(self, i, more):
        """The record of one step; ``more``: with arrivals and aborts."""
        scheduler, record = self.scheduler, {"op": "step", "i": i}
        if more:
            record |= self._arrivals(i)
        ended = len(self.freed)
        output = scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        emit = [name for name in scheduled if not scheduler.requests[name].is_prefill_chunk]
        tables = [[name, list(map(list, scheduler.kv_cache_manager.get_block_ids(name)))] for name in scheduled]
        record |= {"nst": [list(each) for each in scheduled.items()], "emit": emit}
        record["tables"] = [[name, table if i % 8 == 0 else crc(table)] for name, table in tables]
        self.in_flight.append((output, emit))
        while self.in_flight and (len(self.in_flight) >= self.given["depth"] or not scheduled):
            self._learn()
        pool = scheduler.kv_cache_manager.block_pool
        queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        blocks = [[block.ref_cnt, name_of(block.block_hash) if block.block_hash else 0] for block in pool.blocks[1:]]
        evicted, self.evicted = self.evicted, []
        calls, self.calls = self.calls, []
        return record | {
            "fin": self.freed[ended:],
            "ev": evicted,
            "run": [request.request_id for request in scheduler.running],
            "wait": [request.request_id for request in scheduler.waiting],
            "calls": calls,
            "nf": len(queue),
            "fqc": crc(queue),
            "st": crc(blocks),
            "nc": len({block.block_hash for block in pool.blocks} - {None}),
        }

    def _arrivals(self, i):
        """New requests, and those whose clients go away."""
        draw, given, record = self.draw, self.given, {}
        while draw.random() < given["p_arrive"]:
            n, longest = self.arrived, given["max_model_len"] - given["max_out"] - 1
            text, share = draw.randrange(given["texts"]), draw.randrange(0, longest * 2 // 3)
            prompt = [[100 + text, 0, share], [1_000_000 + n, 0, draw.randrange(1, longest // 4)]]
            if not share or draw.random() < 0.15:
                del prompt[0]
            elif draw.random() < 0.15:  # Word for word what others may say.
                del prompt[1]
            answer = draw.randrange(1, given["max_out"])
            priority = draw.randrange(3) if given["policy"] == "priority" else 0
            record.setdefault("add", []).append([f"r{n}", prompt, answer, priority, float(n)])
            tokens = [token(seed, start + k) for seed, start, length in prompt for k in range(length)]
            self.scheduler.add_request(
                Request(
                    f"r{n}",
                    tokens,
                    SamplingParams(max_tokens=answer, ignore_eos=True),
                    None,
                    arrival_time=float(n),
                    priority=priority,
                    block_hasher=self._hash_new_blocks,
                )
            )
            self.arrived += 1
        alive = [name for name, request in self.scheduler.requests.items() if not request.is_finished()]
        if alive and draw.random() < given["p_abort"]:
            record["abort"] = [draw.choice(alive)]
            self.scheduler.finish_requests(record["abort"], RequestStatus.FINISHED_ABORTED)
        return record

    def _hash_new_blocks(self, request):
        """The recordings' ids of the full blocks of a request that have none yet."""
        size, ids, tokens = self.hashed, [], request.all_token_ids
        parent = request.block_hashes[-1].hex() if request.block_hashes else "root"
        for start in range(size * len(request.block_hashes), len(tokens) - size + 1, size):
            block = ",".join(map(str, tokens[start : start + size]))
            ids.append(blake2b(f"{parent}|{block}".encode(), digest_size=6).digest())
            parent = ids[-1].hex()
        return ids

    def _learn(self):
        """Give the scheduler the output of the oldest step in flight."""
        output, emit = self.in_flight.popleft()
        names, sampled = list(output.num_scheduled_tokens), []
        for name in names:
            request = self.scheduler.requests.get(name)
            known = request is not None and name in emit
            sampled.append([token(3_000_000 + int(name[1:]), request.num_output_tokens)] if known else [])
        index = {name: at for at, name in enumerate(names)}
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)
        )


def ids_of(blocks):
    return [[block.block_id for block in group] for group in blocks.blocks]


def main(model, out, *settings):
    """Write one recording."""
    given = dict(SETTINGS)
    for setting in settings:
        name, value = setting.split("=")
        given[name] = type(SETTINGS[name])(value)
    recording = Recording(model, given)
    records = [recording.header(), *recording.steps()]
    lines = b"".join(json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records)
    with open(out, "wb") as file:
        file.write(gzip.compress(lines, mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
