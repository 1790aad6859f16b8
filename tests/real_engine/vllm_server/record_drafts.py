"""Records what vLLM's scheduler decides where tokens are drafted, without a GPU: run by the Python that has vLLM.

    python record_drafts.py MODEL OUT.jsonl.gz [NAME=VALUE ...]

``Scheduler`` and ``KVCacheManager`` are the real ones; what runs the model, and what drafts, is played: how many
drafted tokens are accepted is drawn, and for n-grams how many are drafted. The fields are those of recordings of the
scheduler, and besides:

- ``drafts`` ``[request, drafted tokens that this step checks, how many of them are accepted]``
- ``next`` ``[request, tokens drafted behind this step]``, except where steps are composed ahead: there it is always as
  many as are asked for

Blocks have the ids of the recordings instead of SHA-256 sums.
"""

import gzip
import json
import random
import sys
from collections import deque

import torch
import vllm
from record_offload import Recording as Playing
from record_offload import crc, name_of, token
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
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
    "window": 0,
    "method": "ngram",
    "tokens": 3,
    "acceptance": 0.6,
    "found": 0.8,
    "texts": 8,
    "p_arrive": 0.4,
    "max_out": 40,
    "p_abort": 0.02,
}
"""What can be set, and usual values. ``method``: as of a scenario; ``found``: share of the steps in which n-grams find
something; ``window``: 0 for full attention."""
METHODS = {"ngram": "ngram", "draft-model": "draft_model", "eagle": "eagle", "mtp": "mtp"}


def scheduler_of(model, given):
    """The real scheduler."""
    size, length, blocks = given["block_size"], given["max_model_len"], given["num_blocks"]
    shape = {"block_size": size, "num_kv_heads": 4, "head_size": 64, "dtype": torch.float16}
    spec = SlidingWindowSpec(**shape, sliding_window=given["window"]) if given["window"] else FullAttentionSpec(**shape)
    page = spec.page_size_bytes
    target = ModelConfig(model=model, dtype="float16", max_model_len=length)
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=given["max_seqs"],
            max_num_batched_tokens=given["budget"],
            max_model_len=length,
            is_encoder_decoder=False,
        ),
        model_config=target,
        cache_config=CacheConfig(block_size=size, enable_prefix_caching=bool(given["caching"])),
        device_config=DeviceConfig("cpu"),
        speculative_config=SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=given["tokens"],
            target_model_config=target,
            target_parallel_config=ParallelConfig(),
        ),
    )
    # Only now: another drafter would be looked for in files.
    config.speculative_config.method = METHODS[given["method"]]
    config.scheduler_config.async_scheduling = given["depth"] > 1
    config.cache_config.num_gpu_blocks = blocks
    tensor = KVCacheTensor(page * blocks, ["layer"], layer_stride=page * blocks, block_stride=page)
    kind = AsyncScheduler if given["depth"] > 1 else Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
    )


class Recording(Playing):
    """Plays the engine and the drafter around the real scheduler, and writes down what it decides."""

    def __init__(self, model, given):
        self.given = given
        self.draw = random.Random(given["seed"])
        self.scheduler = scheduler_of(model, given)
        self.arrived, self.evicted, self.freed, self.copies = 0, [], [], {}
        self.in_flight = deque()
        """Of each step that was composed and whose output has not come: what was composed, and the tokens of each."""
        self.next = []
        """What was drafted behind the step that ended last."""
        self._listen()

    def header(self):
        """Every setting."""
        given, scheduler = self.given, self.scheduler
        effective = {
            "async_scheduling": given["depth"] > 1,
            "max_concurrent_batches": given["depth"],
            "max_in_flight": given["budget"] * given["depth"],
            "reserve_full": scheduler.scheduler_reserve_full_isl,
            "lookahead": scheduler.num_lookahead_tokens,
        }
        names = ("seed", "num_blocks", "block_size", "budget", "max_seqs", "max_model_len", "depth")
        about = {"type": "header", "kind": "scheduler", "vllm": vllm.__version__, "effective": effective}
        about |= {"window": given["window"]} if given["window"] else {}
        speculation = {key: given[key] for key in ("method", "tokens")}
        return about | {k: given[k] for k in names} | {"caching": bool(given["caching"]), "speculation": speculation}

    def _listen(self):
        """Have the real ones tell what they decide."""
        scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        free, forget = scheduler._free_request, pool._maybe_evict_cached_block

        def tell_freed(request, **options):
            self.freed.append(request.request_id)
            return free(request, **options)

        def tell_forgotten(block):
            if block.block_hash is not None:
                self.evicted.append([block.block_id, name_of(block.block_hash)])
            return forget(block)

        scheduler._free_request, pool._maybe_evict_cached_block = tell_freed, tell_forgotten

    def step(self, i, more):
        """The record of one step; ``more``: with arrivals and aborts."""
        scheduler, record = self.scheduler, {"op": "step", "i": i}
        if more:
            record |= self._arrivals(i)
        output = scheduler.schedule()
        scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        emit = [name for name in scheduled if not scheduler.requests[name].is_prefill_chunk]
        # Drafts of a request that had no step before say nothing.
        begun = {each.req_id for each in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        accepted = {name: 0 if name in begun else self._accepted(len(drafts.get(name, ()))) for name in emit}
        record |= {
            "nst": [list(each) for each in scheduled.items()],
            "emit": emit,
            "tables": [[name, scheduler.kv_cache_manager.get_block_ids(name)[0]] for name in scheduled],
            "drafts": [[name, len(drafts[name]), accepted[name]] for name in emit if drafts.get(name)],
        }
        self.in_flight.append((output, accepted))
        ended, self.next = len(self.freed), []
        while self.in_flight and (len(self.in_flight) >= self.given["depth"] or not scheduled):
            self._learn()
        pool = scheduler.kv_cache_manager.block_pool
        queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        blocks = [[block.ref_cnt, name_of(block.block_hash) if block.block_hash else 0] for block in pool.blocks[1:]]
        evicted, self.evicted = self.evicted, []
        record |= {"next": self.next} if self.given["depth"] == 1 else {}
        return record | {
            "fin": self.freed[ended:],
            "ev": evicted,
            "run": [request.request_id for request in scheduler.running],
            "wait": [request.request_id for request in scheduler.waiting],
            "nf": len(queue),
            "fqc": crc(queue),
            "st": crc(blocks),
            "nc": len(pool.cached_block_hash_to_block),
        }

    def _accepted(self, drafted):
        accepted = 0
        while accepted < drafted and self.draw.random() < self.given["acceptance"]:
            accepted += 1
        return accepted

    def _drafted(self):
        given = self.given
        if given["method"] != "ngram":
            return given["tokens"]
        return self.draw.randrange(1, given["tokens"] + 1) if self.draw.random() < given["found"] else 0

    def _learn(self):
        """Give the scheduler the output of the oldest step in flight, and what is drafted behind it."""
        output, accepted = self.in_flight.popleft()
        scheduler, names, sampled = self.scheduler, list(output.num_scheduled_tokens), []
        for name in names:
            request = scheduler.requests.get(name)
            known = request is not None and name in accepted
            source, first = 3_000_000 + int(name[1:]), request.num_output_tokens if known else 0
            sampled.append([token(source, first + at) for at in range(1 + accepted[name])] if known else [])
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        if self.given["depth"] > 1 or not names:
            return
        drafted = {name: self._drafted() for name in names}
        scheduler.update_draft_token_ids(DraftTokenIds(list(drafted), [[7] * n for n in drafted.values()]))
        self.next = [[name, n] for name, n in drafted.items() if name in accepted]


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
