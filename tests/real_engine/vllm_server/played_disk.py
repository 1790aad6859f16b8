"""The disk behind vLLM's offloading: its own tier of files, whose threads are played.

``TieringOffloadingManager``, ``FileSystemTierManager``, its look-ups and its files are the real ones. What they would
do beside the scheduler takes a drawn number of steps, and the disk is full when it has a given number of files.
"""

import errno
import os
from collections import deque
from pathlib import Path
from queue import SimpleQueue

from vllm.v1.kv_offload.tiering.fs import manager as files


class Disk:
    """Plays the threads of the real tier of files, and writes down what it is given."""

    def __init__(self, manager, draw, slowest, room):
        """``manager``: the real one; ``slowest``: most steps that anything takes; ``room``: for files."""
        (tier,) = manager.secondary_tiers
        self.draw, self.slowest, self.room = draw, slowest, room
        self.gets, self.puts = [], []
        self.files = set()
        self.pool, self.lookups = tier._pool, tier._lookup_manager
        self.asked = deque()
        """Of the look-ups of each step: the steps that it still takes until they are answered, and what is asked."""
        self.tasks = {}
        """By number: the steps that a read or write still takes, and what is then to be done."""
        store, self.store_files = tier.submit_store, files.batch_store_block
        load, complete = tier.submit_load, manager.complete_store
        self.true_queue, self.lookups._lookup_queue = self.lookups._lookup_queue, self

        def tell_store(job):
            self.puts.append([job.job_id, job.chunk_ids.tolist()])
            return store(job)

        def tell_load(job):
            self.gets.append([job.job_id, job.chunk_ids.tolist()])
            return load(job)

        def complete_in_order(keys, context, **options):
            return complete(sorted(keys, key=context.get_offload_key_position), context, **options)

        tier.submit_store, tier.submit_load, manager.complete_store = tell_store, tell_load, complete_in_order
        files.batch_store_block = self._store

    def put(self, asked):
        """Take the look-ups of a step, instead of the real queue."""
        self.asked.append([self.draw.randrange(self.slowest), asked])

    def step(self):
        """Let a step's time pass: what of reading, writing and looking up has ended then."""
        pool, ended = self.pool, []
        for queue in (pool._load_q, pool._store_q):
            while queue:
                task, state = queue.popleft()
                self.tasks[state.job_id] = [self.draw.randrange(self.slowest), task, state]
        for number, entry in list(self.tasks.items()):
            entry[0] -= 1
            if entry[0] < 0:
                ended.append(number)
                del self.tasks[number]
                self._run(*entry[1:])
        answered = SimpleQueue()
        for entry in self.asked:
            entry[0] -= 1
        while self.asked and self.asked[0][0] < 0:
            answered.put(self.asked.popleft()[1])
        n = answered.qsize()
        answered.put(None)
        self.lookups._lookup_queue = answered
        self.lookups._worker()
        self.lookups._lookup_queue = self
        return {"io": ended, "ans": n}

    def close(self):
        """Let the real ones end."""
        self.lookups._lookup_queue, files.batch_store_block = self.true_queue, self.store_files

    def _run(self, task, state):
        """Let one of the real pool's workers do one task, and stop."""

        def last():
            self.pool._stop = True
            task()

        self.pool._load_q.append((last, state))
        self.pool._worker(True)
        self.pool._stop = False

    def _store(self, paths, view, offsets, size, direct):
        """Write files, one by one, until the disk is full."""
        for path, offset in zip(paths, offsets, strict=True):
            if path not in self.files and len(self.files) == self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.store_files([path], view, [offset], size, direct)
            assert Path(path).stat().st_size == size
            self.files.add(path)
