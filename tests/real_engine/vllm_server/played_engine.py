"""What recorders of vLLM's scheduler have in common: they play the engine around the real one, without a GPU.

Only the Python that has vLLM can load this. Requests come and go by drawn numbers, their tokens are made up, and blocks
have the ids of the recordings instead of SHA-256 sums.
"""

import gzip
import json
import random
import sys
import zlib
from collections import deque
from hashlib import blake2b
from pathlib import Path

import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import ModelRunnerOutput
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
    "texts": 8,
    "p_arrive": 0.4,
    "max_out": 40,
    "p_abort": 0.02,
}
"""What can be set, and usual values. ``texts``: how many beginnings prompts share; ``depth``: steps in flight."""


def token(seed, i):
    """Token ``i`` of a text."""
    x = (seed * 2654435761 + i * 40503 + i * i * 97 + 12345) % 2**32
    x ^= x >> 15
    return (x * 2246822519 % 2**32) >> 13 & 0x7FFF


def crc(value):
    return zlib.crc32(json.dumps(value, separators=(",", ":")).encode())


def model_of(model, given):
    """vLLM's description of the model, which is only looked at for its shape."""
    return ModelConfig(model=model, dtype="float16", max_model_len=given["max_model_len"])


def config_of(model, given, block_size, scheduling=None, **further):
    """vLLM's settings; ``scheduling``: more of the scheduler's own, ``further``: more of all."""
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=given["max_seqs"],
            max_num_batched_tokens=given["budget"],
            max_model_len=given["max_model_len"],
            is_encoder_decoder=False,
            **scheduling or {},
        ),
        model_config=model,
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=bool(given["caching"])),
        device_config=DeviceConfig("cpu"),
        **further,
    )
    config.scheduler_config.async_scheduling = given["depth"] > 1  # Only now: on a CPU it would be switched off.
    config.cache_config.num_gpu_blocks = given["num_blocks"]
    return config


def scheduler_of(config, given, cache, block_size, **further):
    """The real scheduler."""
    kind = AsyncScheduler if given["depth"] > 1 else Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        **further,
    )


def cache_of(spec, blocks):
    """A cache of one group of layers."""
    page = spec.page_size_bytes
    tensor = KVCacheTensor(page * blocks, ["layer"], layer_stride=page * blocks, block_stride=page)
    return KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(["layer"], spec)])


class Playing:
    """Plays the engine around the real scheduler, and writes down what it decides."""

    may_repeat = False
    """Whether some requests say nothing of their own."""
    header_names = ("seed", "num_blocks", "block_size", "budget", "max_seqs", "max_model_len", "depth")

    def __init__(self, given, scheduler, hashed):
        """``hashed``: the tokens of which a block has an id."""
        self.given, self.scheduler, self.hashed = given, scheduler, hashed
        self.draw = random.Random(given["seed"])
        self.longest = min(given["max_model_len"], hashed * (given["num_blocks"] - 1)) - given["max_out"]
        """Tokens of a prompt, at most."""
        self.arrived = 0
        self.evicted, self.freed = [], []
        """What the real ones have decided since the last step: see the fields ``ev`` and ``fin``."""
        self.in_flight = deque()
        """Of each step that was composed and whose output has not come: what was composed, who gets a token, and what
        else ``composed`` keeps of it."""
        pool = scheduler.kv_cache_manager.block_pool
        free, forget = scheduler._free_request, pool._maybe_evict_cached_block

        def tell_freed(request, *rest, **options):
            self.freed.append(request.request_id)
            return free(request, *rest, **options)

        def tell_forgotten(block):
            if block.block_hash is not None:
                self.evicted.append([block.block_id, self.name_of(block.block_hash)])
            return forget(block)

        scheduler._free_request, pool._maybe_evict_cached_block = tell_freed, tell_forgotten

    def name_of(self, key):
        """The recordings' id of a block, by vLLM's key of it, in which the number of its cache group follows."""
        return key[:-4].hex()

    def header(self):
        """Every setting."""
        given, scheduler = self.given, self.scheduler
        effective = {
            "async_scheduling": given["depth"] > 1,
            "max_concurrent_batches": given["depth"],
            "max_in_flight": given["budget"] * given["depth"],
            "reserve_full": scheduler.scheduler_reserve_full_isl,
        }
        about = {"type": "header", "kind": "scheduler", "vllm": vllm.__version__, "effective": effective}
        return about | {key: given[key] for key in self.header_names} | {"caching": bool(given["caching"])}

    def goes_on(self, record):
        """Whether there is more to come behind the last step with arrivals; ``record``: the latest, None at first."""
        return bool(self.scheduler.requests or self.in_flight)

    def steps(self):
        """The records of all steps: as many as are asked for, and as all requests then still take."""
        i, record = 0, None
        while i < self.given["steps"] or self.goes_on(record):
            assert i < 10 * self.given["steps"], "no end in sight"
            yield (record := self.step(i, i < self.given["steps"]))
            i += 1

    def step(self, i, more):
        """The record of one step; ``more``: with arrivals and aborts."""
        record = {"op": "step", "i": i} | (self.arrivals() if more else {}) | self.begun()
        output = self.scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        emit = [name for name in scheduled if not self.scheduler.requests[name].is_prefill_chunk]
        record |= {
            "nst": [list(each) for each in scheduled.items()],
            "emit": emit,
            "tables": [[name, self.table(name, i)] for name in scheduled],
        }
        fields, kept = self.composed(output, emit)
        self.in_flight.append((output, emit, kept))
        ended = len(self.freed)
        while self.in_flight and (len(self.in_flight) >= self.given["depth"] or not scheduled):
            self.learn()
        return record | fields | self.told() | self.state(ended)

    def begun(self):
        """Further fields of a step that begins."""
        return {}

    def table(self, name, i):
        """The blocks of a request in step ``i``."""
        return self.scheduler.kv_cache_manager.get_block_ids(name)[0]

    def composed(self, output, emit):
        """Further fields of a step that was composed, and what is kept of it until its output comes."""
        return {}, None

    def told(self):
        """Further fields of a step whose outputs have come."""
        return {}

    def state(self, ended):
        """The fields of what there is behind a step; ``ended``: requests that had ended before its outputs came."""
        scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        blocks = [[b.ref_cnt, self.name_of(b.block_hash) if b.block_hash else 0] for b in pool.blocks[1:]]
        evicted, self.evicted = self.evicted, []
        return {
            "fin": self.freed[ended:],
            "ev": evicted,
            "run": [request.request_id for request in scheduler.running],
            "wait": [request.request_id for request in (*scheduler.kv_holding_waiting, *scheduler.waiting)],
            "nf": len(queue),
            "fqc": crc(queue),
            "st": crc(blocks),
            "nc": len(pool.cached_block_hash_to_block),
        }

    def arrivals(self):
        """New requests, and those whose clients go away."""
        draw, given, record = self.draw, self.given, {}
        while draw.random() < given["p_arrive"]:
            n = self.arrived
            text, share = draw.randrange(given["texts"]), draw.randrange(0, self.longest * 2 // 3)
            prompt = [[100 + text, 0, share], [1_000_000 + n, 0, draw.randrange(1, self.longest // 4)]]
            if not share or draw.random() < 0.15:
                del prompt[0]
            elif self.may_repeat and draw.random() < 0.15:  # Word for word what others may say.
                del prompt[1]
            answer, priority, *kind = self.asked()
            record.setdefault("add", []).append([f"r{n}", prompt, answer, priority, float(n), *kind])
            self.scheduler.add_request(
                Request(
                    f"r{n}",
                    [token(seed, start + k) for seed, start, length in prompt for k in range(length)],
                    SamplingParams(max_tokens=answer, ignore_eos=True, extra_args=self.extra_of(*kind)),
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

    def asked(self):
        """Tokens of an answer, the request's priority, and its kind where there are several."""
        return self.draw.randrange(1, self.given["max_out"]), 0

    def extra_of(self, kind=None):
        """What a request of a kind says besides; nothing unless there are several."""

    def _hash_new_blocks(self, request):
        """The recordings' ids of the full blocks of a request that have none yet."""
        size, ids, tokens = self.hashed, [], request.all_token_ids
        ahead = getattr(self.scheduler, "num_hash_lookahead_tokens", 0)  # Since vLLM 0.33.
        parent = request.block_hashes[-1].hex() if request.block_hashes else "root"
        for start in range(size * len(request.block_hashes), len(tokens) - size - ahead + 1, size):
            block = ",".join(map(str, tokens[start : start + size + ahead]))
            ids.append(blake2b(f"{parent}|{block}".encode(), digest_size=6).digest())
            parent = ids[-1].hex()
        return ids

    def learn(self):
        """Give the scheduler the output of the oldest step in flight; the names of its requests, and what was kept."""
        output, emit, kept = self.in_flight.popleft()
        names, sampled = list(output.num_scheduled_tokens), []
        for name in names:
            request = self.scheduler.requests.get(name)
            known = request is not None and name in emit
            text, first = 3_000_000 + int(name[1:]), request.num_output_tokens if known else 0
            sampled.append([token(text, first + at) for at in range(self.sampled(name, kept))] if known else [])
        index = {name: at for at, name in enumerate(names)}
        said = ModelRunnerOutput(names, index, sampled_token_ids=sampled, **self.besides(kept))
        self.scheduler.update_from_output(output, said)
        return names, kept

    def sampled(self, name, kept):
        """How many tokens a request gets."""
        return 1

    def besides(self, kept):
        """What the output of a step says besides tokens."""
        return {}


def given_of(settings, usual):
    """Settings by the words ``NAME=VALUE``."""
    given = dict(usual)
    for setting in settings:
        name, value = setting.split("=")
        given[name] = type(usual[name])(value)
    return given


def write(recording, out):
    """Write a recording."""
    records = [json.dumps(record, separators=(",", ":")) for record in (recording.header(), *recording.steps())]
    Path(out).write_bytes(gzip.compress("".join(f"{record}\n" for record in records).encode(), mtime=0))


def main(recording_of, usual):
    """Make the recording of a model and settings that is asked for on the command line."""
    model, out, *settings = sys.argv[1:]
    write(recording_of(model, given_of(settings, usual)), out)
