"""Records what vLLM's scheduler and its offloading connector decide, without a GPU: run by the Python that has vLLM.

    python record_offload.py MODEL OUT.jsonl.gz [NAME=VALUE ...]

``Scheduler``, ``KVCacheManager``, ``OffloadingConnectorScheduler`` and ``CPUOffloadingManager`` are the real ones; what
runs the model and copies is played: each copy takes a drawn number of steps. With ``disk`` there is also the real tier
of files behind host memory (``played_disk.py``). The model, which ``model.py`` writes, is only looked at for its shape.
The fields are those of recordings of the scheduler, and besides:

- ``done`` copies of which the scheduler learns behind this step (its output says so)
- ``look`` ``[request, tokens found in blocks, tokens found in chunks or null, where it must be asked again]``
- ``loads``, ``stores`` ``[copy, request, blocks, chunks]`` · ``flush`` copies that must end before the step runs
- ``out`` ids of the chunks that were evicted, in order: that of a chunk's last block
- with a disk: ``io`` writes and reads that ended before this step, and ``ans`` how many steps' look-ups were answered
- ``gets``, ``puts`` ``[number, chunks]`` reads and writes of files that the step began, and the end of stores behind it
- ``nd`` files at the end

Three things are not left to the real ones: blocks have the ids of the recordings instead of SHA-256 sums, and the
connector is told of ended requests, and the disk's tier of stored chunks, in the order in which they ended and that of
their text, instead of as sets, whose order is arbitrary.
"""

import gzip
import json
import random
import sys
import tempfile
import zlib
from collections import deque
from functools import partial
from hashlib import blake2b

import torch
import vllm
from played_disk import Disk
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

SETTINGS = {
    "seed": 1,
    "steps": 300,
    "num_blocks": 40,
    "block_size": 16,
    "budget": 128,
    "max_seqs": 6,
    "max_model_len": 512,
    "depth": 1,
    "caching": 1,
    "chunks": 48,
    "blocks_per_chunk": 1,
    "order": "lru",
    "store_threshold": 0,
    "prompt_only": 1,
    "texts": 8,
    "p_arrive": 0.4,
    "max_out": 40,
    "p_abort": 0.02,
    "slowest": 4,
    "disk": 0,
}
"""What can be set, and usual values. ``texts``: how many beginnings prompts share; ``slowest``: the most steps that a
copy takes; ``depth``: steps in flight; ``disk``: chunks that there is room for behind host memory."""


def token(seed, i):
    """Token ``i`` of a text."""
    x = (seed * 2654435761 + i * 40503 + i * i * 97 + 12345) % 2**32
    x ^= x >> 15
    return (x * 2246822519 % 2**32) >> 13 & 0x7FFF


def crc(value):
    return zlib.crc32(json.dumps(value, separators=(",", ":")).encode())


def name_of(key):
    """The recordings' id of a block, by vLLM's key of it, in which the number of its cache group follows."""
    return key[:-4].hex()


def offloading(given, page, folder):
    """The connector's settings; ``page``: bytes of a block; ``folder``: of the disk's files."""
    extra = {
        "spec_name": "TieringOffloadingSpec" if given["disk"] else "CPUOffloadingSpec",
        # Without threads of its own, since what they do is played.
        "secondary_tiers": [{"type": "fs", "root_dir": folder, "n_read_threads": 0, "n_write_threads": 0}],
        "cpu_bytes_to_use": page * given["blocks_per_chunk"] * given["chunks"],
        "blocks_per_chunk": given["blocks_per_chunk"],
        "eviction_policy": given["order"],
        "store_threshold": given["store_threshold"],
        "offload_prompt_only": bool(given["prompt_only"]),
    }
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


def scheduler_of(model, given, connector):
    """The real scheduler with its connector, whose settings depend on ``given`` and the bytes of a block."""
    size, length, blocks = given["block_size"], given["max_model_len"], given["num_blocks"]
    spec = FullAttentionSpec(block_size=size, num_kv_heads=4, head_size=64, dtype=torch.float16)
    page = spec.page_size_bytes
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=given["max_seqs"],
            max_num_batched_tokens=given["budget"],
            max_model_len=length,
            is_encoder_decoder=False,
        ),
        model_config=ModelConfig(model=model, dtype="float16", max_model_len=length),
        cache_config=CacheConfig(block_size=size, enable_prefix_caching=bool(given["caching"])),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **connector(given, page)),
    )
    config.scheduler_config.async_scheduling = given["depth"] > 1  # Only now: on a CPU it would be switched off.
    config.cache_config.num_gpu_blocks = blocks
    tensor = KVCacheTensor(page * blocks, ["layer"], layer_stride=page * blocks, block_stride=page)
    kind = AsyncScheduler if given["depth"] > 1 else Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
    )


class Recording:
    """Plays the engine around the real scheduler, and writes down what it decides."""

    def __init__(self, model, given, folder):
        self.given = given
        self.draw = random.Random(given["seed"])
        self.scheduler = scheduler_of(model, given, partial(offloading, folder=folder))
        self.arrived = 0
        self.looks, self.out, self.evicted, self.freed = [], [], [], []
        """What the real ones have decided since the last step: see the fields ``look``, ``out``, ``ev`` and ``fin``."""
        self.copies = {}
        """Of each copy under way: the steps that it still takes, and the request that waits for it, if it is a load."""
        self.in_flight = deque()
        """Of each step that was composed and whose output has not come: what was composed, who gets a token, and the
        copies that had ended by then."""
        self._listen()
        manager = self.scheduler.connector.connector_scheduler.manager
        self.disk = Disk(manager, self.draw, given["slowest"], given["disk"]) if given["disk"] else None

    def header(self):
        """Every setting."""
        given, scheduler = self.given, self.scheduler
        effective = {
            "async_scheduling": given["depth"] > 1,
            "max_concurrent_batches": given["depth"],
            "max_in_flight": given["budget"] * given["depth"],
            "reserve_full": scheduler.scheduler_reserve_full_isl,
        }
        offload = {key: given[key] for key in ("chunks", "blocks_per_chunk", "order", "store_threshold", "prompt_only")}
        offload |= {"disk": given["disk"]} if self.disk else {}
        names = ("seed", "num_blocks", "block_size", "budget", "max_seqs", "max_model_len", "depth")
        about = {"type": "header", "kind": "scheduler", "vllm": vllm.__version__, "effective": effective}
        return about | {key: given[key] for key in names} | {"caching": bool(given["caching"]), "offload": offload}

    def _listen(self):
        """Have the real ones tell what they decide."""
        scheduler, connector = self.scheduler, self.scheduler.connector.connector_scheduler
        pool = scheduler.kv_cache_manager.block_pool
        order = getattr(connector.manager, "primary_tier", connector.manager)._policy
        find, evict, build = connector.get_num_new_matched_tokens, order.evict, connector.build_connector_meta
        free, forget = scheduler._free_request, pool._maybe_evict_cached_block

        def tell_found(request, local, **options):
            found = find(request, local, **options)
            self.looks.append([request.request_id, local, found[0]])
            return found

        def tell_evicted(n, protected):
            gone = evict(n, protected)
            self.out += [name_of(key) for key, _ in gone or ()]
            return gone

        def build_in_order(output):
            output.finished_req_ids = [name for name in self.freed if name in output.finished_req_ids]
            self.freed.clear()
            return build(output)

        def tell_freed(request, **options):
            self.freed.append(request.request_id)
            return free(request, **options)

        def tell_forgotten(block):
            if block.block_hash is not None:
                self.evicted.append([block.block_id, name_of(block.block_hash)])
            return forget(block)

        connector.get_num_new_matched_tokens, order.evict = tell_found, tell_evicted
        connector.build_connector_meta, scheduler._free_request = build_in_order, tell_freed
        pool._maybe_evict_cached_block = tell_forgotten

    def steps(self):
        """The records of all steps: as many as are asked for, and as all requests and copies then still take."""
        given, i = self.given, 0
        while i < given["steps"] or self.scheduler.requests or self.copies or self.in_flight:
            assert i < 10 * given["steps"], "no end in sight"
            yield self.step(i, i < given["steps"])
            i += 1

    def step(self, i, more):
        """The record of one step; ``more``: with arrivals and aborts."""
        scheduler, record = self.scheduler, {"op": "step", "i": i}
        if more:
            record |= self._arrivals(i)
        if self.disk:
            record |= self.disk.step()
        output = scheduler.schedule()
        meta, scheduled = output.kv_connector_metadata, output.num_scheduled_tokens
        emit = [name for name in scheduled if not scheduler.requests[name].is_prefill_chunk]
        record |= {
            "nst": [list(each) for each in scheduled.items()],
            "emit": emit,
            "tables": [[name, scheduler.kv_cache_manager.get_block_ids(name)[0]] for name in scheduled],
            "look": self.looks,
            "loads": [_copy(number, job, job.dst_spec, job.src_spec) for number, job in meta.load_jobs.items()],
            "stores": [_copy(number, job, job.src_spec, job.dst_spec) for number, job in meta.store_jobs.items()],
            "flush": sorted(meta.jobs_to_flush),
            "out": self.out,
        }
        self.looks, self.out = [], []
        self.in_flight.append((output, emit, self._copies_that_end(meta)))
        ended = len(self.freed)
        record["done"] = []
        while self.in_flight and (len(self.in_flight) >= self.given["depth"] or not scheduled):
            record["done"] += self._learn()
        if self.disk:
            record |= {"gets": self.disk.gets, "puts": self.disk.puts, "nd": len(self.disk.files)}
            self.disk.gets, self.disk.puts = [], []
        pool, queues = scheduler.kv_cache_manager.block_pool, (scheduler.kv_holding_waiting, scheduler.waiting)
        queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        blocks = [[block.ref_cnt, name_of(block.block_hash) if block.block_hash else 0] for block in pool.blocks[1:]]
        evicted, self.evicted = self.evicted, []
        return record | {
            "fin": self.freed[ended:],
            "ev": evicted,
            "run": [request.request_id for request in scheduler.running],
            "wait": [request.request_id for queue in queues for request in queue],
            "nf": len(queue),
            "fqc": crc(queue),
            "st": crc(blocks),
            "nc": len(pool.cached_block_hash_to_block),
        }

    def _arrivals(self, i):
        """New requests, and those whose clients go away."""
        draw, given, record = self.draw, self.given, {}
        while draw.random() < given["p_arrive"]:
            most = min(given["max_model_len"], given["block_size"] * (given["num_blocks"] - 1))
            n, longest = self.arrived, most - given["max_out"]
            text, share = draw.randrange(given["texts"]), draw.randrange(0, longest * 2 // 3)
            prompt = [[100 + text, 0, share], [1_000_000 + n, 0, draw.randrange(1, longest // 4)]]
            if not share or draw.random() < 0.15:
                del prompt[0]
            answer = draw.randrange(1, given["max_out"])
            record.setdefault("add", []).append([f"r{n}", prompt, answer, 0, float(n)])
            tokens = [token(seed, start + k) for seed, start, length in prompt for k in range(length)]
            self.scheduler.add_request(
                Request(
                    f"r{n}",
                    tokens,
                    SamplingParams(max_tokens=answer, ignore_eos=True),
                    None,
                    arrival_time=float(n),
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
        size, ids, tokens = self.given["block_size"], [], request.all_token_ids
        parent = request.block_hashes[-1].hex() if request.block_hashes else "root"
        for start in range(size * len(request.block_hashes), len(tokens) - size + 1, size):
            block = ",".join(map(str, tokens[start : start + size]))
            ids.append(blake2b(f"{parent}|{block}".encode(), digest_size=6).digest())
            parent = ids[-1].hex()
        return ids

    def _copies_that_end(self, meta):
        """The copies whose end the worker sees while it begins a step. A store begins one step after it was composed;
        what is to be flushed has ended."""
        ended = []
        for number, job in meta.load_jobs.items():
            self.copies[number] = [self.draw.randrange(self.given["slowest"]), job.req_id]
        for number, copy in self.copies.items():
            copy[0] -= 1
            if copy[0] < 0:
                ended.append(number)
        for number in meta.store_jobs:
            self.copies[number] = [self.draw.randrange(self.given["slowest"]), None]
        ended += [number for number in sorted(meta.jobs_to_flush & self.copies.keys()) if number not in ended]
        return [(number, self.copies.pop(number)[1]) for number in ended]

    def _learn(self):
        """Give the scheduler the output of the oldest step in flight; the copies that this says have ended."""
        output, emit, ended = self.in_flight.popleft()
        worker = OffloadingWorkerMetadata()
        for number, _ in ended:
            worker.mark_completed(number)
        loaded = {name for _, name in ended if name is not None}
        names, sampled = list(output.num_scheduled_tokens), []
        for name in names:
            request = self.scheduler.requests.get(name)
            known = request is not None and name in emit
            sampled.append([token(3_000_000 + int(name[1:]), request.num_output_tokens)] if known else [])
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=worker),
            ),
        )
        return [number for number, _ in ended]


def _copy(number, job, blocks, chunks):
    return [number, job.req_id, blocks.block_ids.tolist(), chunks.block_ids.tolist()]


def main(model, out, *settings):
    """Write one recording."""
    given = dict(SETTINGS)
    for setting in settings:
        name, value = setting.split("=")
        given[name] = type(SETTINGS[name])(value)
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(model, given, folder)
        records = [recording.header(), *recording.steps()]
        if recording.disk:
            recording.disk.close()
        recording.scheduler.shutdown()
    lines = b"".join(json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records)
    with open(out, "wb") as file:
        file.write(gzip.compress(lines, mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
