"""A scheduler of one's own: continuous batching that admits the shortest waiting prompt first."""

from kvsim.simulation.schedulers import SchedulerBase, no_progress
from policies.api import Chunk


class ShortestFirst(SchedulerBase):
    """Continuous batching; of the requests that wait, the one with the fewest tokens starts first."""

    def __init__(self, scenario, policy, backend, recorder):
        super().__init__(scenario, policy, backend, recorder)
        self.slots, self.n_batch = scenario.server.slots, scenario.n_batch
        self.waiting = []
        self.running = {}  # by slot, in order of admission
        self.full = False  # whether a step found no room, and no request has ended since: then none is admitted

    def submit(self, job, now):
        """Queue a request, unless it could never be served."""
        if not self._refuses(job, now):
            self.waiting.append(job)

    def compose(self, now):
        """Admit requests while there are slots; then give each that runs all its tokens, up to ``n_batch`` in all."""
        while self.waiting and not self.full and len(self.running) < self.slots:
            job = min(self.waiting, key=lambda job: job.tokens)
            slot = next(slot for slot in range(self.slots) if slot not in self.running)
            if not self._admit(slot, job, now):
                break
            self.waiting.remove(job)
            self.running[slot] = job
        # Who waits beside a free slot waits for cells: ``why`` says so.
        self._recorder.held_back(bool(self.waiting) and len(self.running) < self.slots)
        step, room = [], self.n_batch
        for slot, job in self.running.items():
            n = min(job.tokens - job.computed, room)
            if n:
                step.append(Chunk(slot, job.computed, n))
                room -= n
        return step

    def _complete(self, step, now):
        """Count the tokens of a step that has run, and end the requests that have all their output."""
        for chunk in step:
            job = self.running[chunk.seq]
            job.computed += chunk.n
            job.furthest = max(job.furthest, job.computed)
            if job.computed == job.tokens:
                full = self._emit_token(job, now)
                if full or job.generated == job.request.output_tokens:
                    self._policy.free(job.slot)
                    del self.running[job.slot]
                    self._end(job, now)
                    self.full = False

    def on_out_of_cells(self, reason, now):
        """Let the request admitted last wait again, so that the others have its cells."""
        self._recorder.out_of_cells()
        self._complete([chunk for batch in reason.done for chunk in batch.chunks], now)
        if len(self.running) < 2:
            raise no_progress(now, [*self.running.values(), *self.waiting], self._policy, str(reason))
        self.full = True
        slot, job = self.running.popitem()
        self._policy.free(slot)
        self._put_off(job)
        self.waiting.append(job)


SCHEDULERS = {"shortest-first": ShortestFirst}
