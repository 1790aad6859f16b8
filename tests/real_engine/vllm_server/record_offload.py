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

import sys
import tempfile
from functools import partial

import torch
from played_disk import Disk
from played_engine import SETTINGS as COMMON
from played_engine import Playing, cache_of, config_of, given_of, model_of, scheduler_of, write
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput

SETTINGS = COMMON | {
    "chunks": 48,
    "blocks_per_chunk": 1,
    "order": "lru",
    "store_threshold": 0,
    "prompt_only": 1,
    "slowest": 4,
    "disk": 0,
}
"""``slowest``: the most steps that a copy takes; ``disk``: chunks that there is room for behind host memory."""


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


def connected(model, given, connector):
    """The real scheduler with its connector, whose settings depend on ``given`` and the bytes of a block."""
    size = given["block_size"]
    spec = FullAttentionSpec(block_size=size, num_kv_heads=4, head_size=64, dtype=torch.float16)
    transfer = KVTransferConfig(kv_role="kv_both", **connector(given, spec.page_size_bytes))
    config = config_of(model_of(model, given), given, size, kv_transfer_config=transfer)
    return scheduler_of(config, given, cache_of(spec, given["num_blocks"]), size)


class Recording(Playing):
    """Plays the worker that copies too."""

    def __init__(self, model, given, folder):
        scheduler = connected(model, given, partial(offloading, folder=folder))
        super().__init__(given, scheduler, given["block_size"])
        self.looks, self.out, self.done = [], [], []
        """What the real ones have decided since the last step: see the fields ``look``, ``out`` and ``done``."""
        self.copies = {}
        """Of each copy under way: the steps that it still takes, and the request that waits for it, if it is a load."""
        self._listen()
        manager = self.scheduler.connector.connector_scheduler.manager
        self.disk = Disk(manager, self.draw, given["slowest"], given["disk"]) if given["disk"] else None

    def header(self):
        """Every setting."""
        keys = (
            "chunks",
            "blocks_per_chunk",
            "order",
            "store_threshold",
            "prompt_only",
            *(["disk"] if self.disk else []),
        )
        return super().header() | {"offload": {key: self.given[key] for key in keys}}

    def _listen(self):
        """Have the connector tell what it decides."""
        connector = self.scheduler.connector.connector_scheduler
        order = getattr(connector.manager, "primary_tier", connector.manager)._policy
        find, evict, build = connector.get_num_new_matched_tokens, order.evict, connector.build_connector_meta

        def tell_found(request, local, **options):
            found = find(request, local, **options)
            self.looks.append([request.request_id, local, found[0]])
            return found

        def tell_evicted(n, protected):
            gone = evict(n, protected)
            self.out += [self.name_of(key) for key, _ in gone or ()]
            return gone

        def build_in_order(output):
            output.finished_req_ids = [name for name in self.freed if name in output.finished_req_ids]
            self.freed.clear()
            return build(output)

        connector.get_num_new_matched_tokens, order.evict = tell_found, tell_evicted
        connector.build_connector_meta = build_in_order

    def goes_on(self, record):
        """As long as there are copies too."""
        return super().goes_on(record) or bool(self.copies)

    def begun(self):
        """What the disk has done."""
        return self.disk.step() if self.disk else {}

    def composed(self, output, emit):
        """What was looked for and what is to be copied; the copies that have ended by then."""
        meta, looks, out = output.kv_connector_metadata, self.looks, self.out
        self.looks, self.out = [], []
        return {
            "look": looks,
            "loads": [_copy(number, job, job.dst_spec, job.src_spec) for number, job in meta.load_jobs.items()],
            "stores": [_copy(number, job, job.src_spec, job.dst_spec) for number, job in meta.store_jobs.items()],
            "flush": sorted(meta.jobs_to_flush),
            "out": out,
        }, self._copies_that_end(meta)

    def told(self):
        """The copies that have ended, and what the disk was given."""
        told, self.done = {"done": self.done}, []
        if self.disk:
            told |= {"gets": self.disk.gets, "puts": self.disk.puts, "nd": len(self.disk.files)}
            self.disk.gets, self.disk.puts = [], []
        return told

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

    def besides(self, ended):
        """The copies that have ended."""
        worker = OffloadingWorkerMetadata()
        for number, _ in ended:
            worker.mark_completed(number)
        self.done += [number for number, _ in ended]
        loaded = {name for _, name in ended if name is not None}
        return {"kv_connector_output": KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=worker)}


def _copy(number, job, blocks, chunks):
    return [number, job.req_id, blocks.block_ids.tolist(), chunks.block_ids.tolist()]


def main(model, out, *settings):
    """Write one recording."""
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(model, given_of(settings, SETTINGS), folder)
        write(recording, out)
        if recording.disk:
            recording.disk.close()
        recording.scheduler.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
