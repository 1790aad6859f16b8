"""Records what vLLM's scheduler and its NIXL connector decide, without a GPU: run by the Python that has vLLM.

    python record_apart.py MODEL OUT.jsonl.gz [NAME=VALUE ...]

``Scheduler``, ``KVCacheManager`` and ``NixlPullConnectorScheduler`` are the real ones; what runs the model and reads
is played: each read takes a drawn number of steps. One server has requests of three kinds: those that it prefills for
others (``prefill``), those that others have prefilled (``decode``), and its own. The fields are those of recordings of
the scheduler, and besides:

- ``add`` has the kind of each request behind its other fields
- ``look`` ``[request, tokens found in blocks, tokens that are to be read behind them]``
- ``reads`` ``[request, blocks that are read into]``, in order · ``hold`` requests whose blocks are held from now on
- ``done``, ``sent`` requests of which the scheduler learns behind this step that they have been read, here or by others

Blocks have the ids of the recordings instead of SHA-256 sums.
"""

import gzip
import json
import random
import sys
from collections import deque

import vllm
from record_offload import Recording as OffloadRecording
from record_offload import crc, name_of, scheduler_of, token
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

SETTINGS = {
    "seed": 1,
    "steps": 200,
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
    "slowest": 8,
}
"""What can be set, and usual values. ``texts``: how many beginnings prompts share; ``slowest``: the most steps that a
read takes; ``depth``: steps in flight."""
KINDS = {
    "prefill": {"do_remote_decode": True, "do_remote_prefill": False},
    "decode": {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_block_ids": [[1]],
        "remote_engine_id": "other",
        "remote_request_id": "other",
        "remote_host": "other",
        "remote_port": 1,
        "tp_size": 1,
    },
    "": None,
}
"""What a request says of its kind, as the proxy does and a prefill server's answer."""


class Recording:
    """Plays the engine around the real scheduler, and writes down what it decides."""

    def __init__(self, model, given):
        self.given = given
        self.draw = random.Random(given["seed"])
        self.scheduler = scheduler_of(model, given, lambda *_: {"kv_connector": "NixlConnector"})
        self.arrived = 0
        self.looks, self.evicted, self.freed = [], [], []
        """What the real ones have decided since the last step: see the fields ``look``, ``ev`` and ``fin``."""
        self.reads, self.sends = {}, {}
        """Of requests whose blocks are read here, or by others: the steps that it still takes."""
        self.in_flight = deque()
        """Of each step that was composed and whose output has not come: what was composed, who gets a token, and the
        requests whose blocks had been read by then, here and by others."""
        self._listen()

    def header(self):
        """Every setting."""
        given, scheduler = self.given, self.scheduler
        effective = {
            "async_scheduling": given["depth"] > 1,
            "max_concurrent_batches": given["depth"],
            "max_in_flight": given["budget"] * given["depth"],
            "reserve_full": scheduler.scheduler_reserve_full_isl,
        }
        names = ("seed", "num_blocks", "block_size", "budget", "max_seqs", "max_model_len", "depth")
        about = {"type": "header", "kind": "scheduler", "vllm": vllm.__version__, "effective": effective}
        return about | {key: given[key] for key in names} | {"caching": bool(given["caching"]), "apart": True}

    def _listen(self):
        """Have the real ones tell what they decide."""
        scheduler, connector = self.scheduler, self.scheduler.connector.connector_scheduler
        pool = scheduler.kv_cache_manager.block_pool
        find, free, forget = (
            connector.get_num_new_matched_tokens,
            scheduler._free_request,
            pool._maybe_evict_cached_block,
        )

        def tell_found(request, local, **options):
            found = find(request, local, **options)
            self.looks.append([request.request_id, local, found[0]])
            return found

        def tell_freed(request, **options):
            self.freed.append(request.request_id)
            return free(request, **options)

        def tell_forgotten(block):
            if block.block_hash is not None:
                self.evicted.append([block.block_id, name_of(block.block_hash)])
            return forget(block)

        connector.get_num_new_matched_tokens, scheduler._free_request = tell_found, tell_freed
        pool._maybe_evict_cached_block = tell_forgotten

    def steps(self):
        """The records of all steps: as many as are asked for, and as all requests and reads then still take."""
        given, i = self.given, 0
        while i < given["steps"] or self.scheduler.requests or self.reads or self.sends or self.in_flight:
            assert i < 10 * given["steps"], "no end in sight"
            yield self.step(i, i < given["steps"])
            i += 1

    def step(self, i, more):
        """The record of one step; ``more``: with arrivals and aborts."""
        scheduler, record = self.scheduler, {"op": "step", "i": i}
        if more:
            record |= self._arrivals(i)
        output = scheduler.schedule()
        meta, scheduled = output.kv_connector_metadata, output.num_scheduled_tokens
        emit = [name for name in scheduled if not scheduler.requests[name].is_prefill_chunk]
        reads = {name: read for name, read in meta.reqs_to_recv.items() if read.awaiting_kvs}
        record |= {
            "nst": [list(each) for each in scheduled.items()],
            "emit": emit,
            "tables": [[name, scheduler.kv_cache_manager.get_block_ids(name)[0]] for name in scheduled],
            "look": self.looks,
            "reads": [[name, list(read.local_physical_block_ids[0])] for name, read in reads.items()],
            "hold": sorted(meta.reqs_to_send),
        }
        self.looks = []
        self.sends |= {name: self.draw.randrange(self.given["slowest"]) for name in meta.reqs_to_send}
        self.reads |= {name: self.draw.randrange(self.given["slowest"]) for name in reads}
        self.in_flight.append((output, emit, _ended(self.reads), _ended(self.sends)))
        ended = len(self.freed)
        record |= {"done": [], "sent": []}
        while self.in_flight and (len(self.in_flight) >= self.given["depth"] or not scheduled):
            done, sent = self._learn()
            record["done"] += done
            record["sent"] += sent
        pool, queues = scheduler.kv_cache_manager.block_pool, (scheduler.kv_holding_waiting, scheduler.waiting)
        queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        blocks = [[block.ref_cnt, name_of(block.block_hash) if block.block_hash else 0] for block in pool.blocks[1:]]
        evicted, self.evicted, freed = self.evicted, [], self.freed[ended:]
        self.freed.clear()
        return record | {
            "fin": freed,
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
            kind = draw.choice(["prefill", "decode", "decode", ""])
            answer = 1 if kind == "prefill" else draw.randrange(1, given["max_out"])
            record.setdefault("add", []).append([f"r{n}", prompt, answer, 0, float(n), kind])
            said = {} if KINDS[kind] is None else {"kv_transfer_params": dict(KINDS[kind])}
            self.scheduler.add_request(
                Request(
                    f"r{n}",
                    [token(seed, start + k) for seed, start, length in prompt for k in range(length)],
                    SamplingParams(max_tokens=answer, ignore_eos=True, extra_args=said),
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
        return OffloadRecording._hash_new_blocks(self, request)

    def _learn(self):
        """Give the scheduler the output of the oldest step in flight; the reads that this says have ended."""
        output, emit, done, sent = self.in_flight.popleft()
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
                kv_connector_output=KVConnectorOutput(
                    finished_recving=dict.fromkeys(done), finished_sending=dict.fromkeys(sent)
                ),
            ),
        )
        return done, sent


def _ended(under_way):
    """Let a step pass; the requests that have been read by then."""
    for name in under_way:
        under_way[name] -= 1
    ended = [name for name, left in under_way.items() if left < 0]
    for name in ended:
        del under_way[name]
    return ended


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
