"""llama-server's scheduler: slots that keep what they held, a host cache behind them, and a batch that is halved."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import FailureKind, Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.base import SchedulerBase
from kvsim.simulation.schedulers.decision_log import DecisionLog, no_log
from kvsim.simulation.schedulers.host_prompt_cache import HostPromptCache, ratio
from kvsim.simulation.schedulers.slots import Slot, reused_runs
from policies import NOTHING, Chunk, Content, NoSlot, Policy

_KEPT_AT_LEAST = np.float32(0.5)
"""Share of a slot's tokens that a request must keep; otherwise they are saved first, and a better state looked for."""


class LlamaServer(SchedulerBase):
    """Today's llama-server (llama.cpp, ``tools/server/server-context.cpp``, ``server-queue.cpp``; 2026).

    *Taking tasks*: one after another until none is left. A request gets the idle slot that holds the longest beginning
    of its prompt, if that is more than ``slot_prompt_similarity`` of it; else the one that was used longest ago, of
    those never used the last. What the slot is about to lose is saved to the host cache, from which a better beginning
    may come back; and what idle slots hold is saved as well. Without an idle slot the request is deferred; each slot
    that is released puts the first deferred request before all others.

    *An update*: contexts are shifted; a batch is one token for each generating slot, then prompts in order of slots, up
    to ``n_batch``. It is run in pieces. Where a piece finds no room in a cache that all share, an idle slot is purged;
    with none left ``n_batch`` is halved; at 1 every request in a slot fails.
    """

    def __init__(
        self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder, log: DecisionLog = no_log
    ):
        super().__init__(scenario, policy, backend, recorder)
        server = scenario.server
        # It refuses no request for the output that it may ask for: a full slot ends its request, or shifts its context.
        self._context = min(scenario.slot_context, policy.max_sequence_tokens)
        self.slots = [Slot(i) for i in range(server.slots)]
        self.queue: deque[Job] = deque()
        """Requests that have come, or whose turn has come, since tasks were last taken."""
        self.deferred: deque[Job] = deque()
        """Requests that found no idle slot, in the order in which they asked."""
        self.host_cache = HostPromptCache(scenario, policy, log) if server.cache_ram and policy.can_copy_out else None
        recorder.host_prompts = self.host_cache
        self._opens_early = not policy.can_copy_out
        """Whether a sequence is opened when its request gets a slot, as layouts with admission need it, rather than
        when the server begins with its prompt, as in llama.cpp."""
        self._log = log
        self._threshold = np.float32(server.slot_prompt_similarity)
        self._unified = scenario.unified
        self._pending: deque[Chunk] = deque()
        """The part of the batch that has not been run yet."""
        self._n_batch = scenario.n_batch
        self._limit = self._n_batch
        """The most tokens of the next piece."""
        self._turn = 0

    @property
    def context(self) -> int:
        """The most tokens in a slot."""
        return self._context

    @property
    def has_batch(self) -> bool:
        """Whether a part of the batch is still to be run."""
        return bool(self._pending)

    @property
    def waiting(self) -> Iterable[Job]:
        """Requests without a slot."""
        return chain(self.queue, self.deferred)

    def submit(self, job: Job, now: float) -> None:
        """Queue a request. Even one that no slot can hold gets a slot first."""
        self.queue.append(job)

    def compose(self, now: float) -> Sequence[Chunk]:
        """Compose the next piece of the batch, or of a new batch."""
        while not self._pending:
            self._take_tasks(now)
            self._shift_contexts()
            self._pending.extend(self._new_batch(now))
            if self._pending:
                self._log("batch", chunks=tuple(self._pending))
            elif not self.queue:
                return ()
        piece: list[Chunk] = []
        room = self._limit
        for chunk in self._pending:
            if room == 0:
                break
            piece.append(chunk._replace(n=min(chunk.n, room)))
            room -= piece[-1].n
        return piece

    def decode_only_steps(self, step: Sequence[Chunk]) -> int:
        """While every job in a slot decodes, and no request waits or all slots are taken."""
        jobs = [slot.job for slot in self.slots if slot.job is not None]
        if len(step) != len(jobs) or len(self._pending) != len(step) or self._limit != self._n_batch:
            return 0
        if self.queue or not all(job.prefilled for job in jobs):
            return 0
        return 1 + min(self._steps_left(job, self._context - 1) for job in jobs)

    def no_slot(self, reason: NoSlot, now: float) -> None:
        """Purge an idle slot; with none left halve ``n_batch``; at 1 fail every request in a slot."""
        self._recorder.failed_allocations += 1
        done = [chunk for batch in reason.done for chunk in batch.chunks]
        tried = min(self._limit, sum(chunk.n for chunk in self._pending))
        if done:
            self._complete(done, now)
        if self._limit == 1:
            self._fail_all(reason, now)
            return
        if not self._purge_one():
            self._limit //= 2
            if self._limit < tried:
                self._recorder.split(tried - sum(chunk.n for chunk in done))
        self._log("no_room", n_batch=self._limit)

    # Taking tasks

    def _take_tasks(self, now: float) -> None:
        """Give requests idle slots, until none is in the queue."""
        while self.queue:
            job = self.queue.popleft()
            if all(slot.job is not None for slot in self.slots):
                self._log("defer", job=job)
                self.deferred.append(job)
                continue
            prompt = job.content.head(job.request.prompt_tokens)
            slot = self._choose(prompt)
            if not self._admits(slot, job, now):
                if not job.ended:
                    self.queue.appendleft(job)
                    return
                continue
            slot.take(job, prompt)
            if self._opens_early and 0 < prompt.n < self._context:
                slot.held = self._open(slot, job)
            self._log("launch", slot=slot.id, job=job)
            if self.host_cache is not None and self._scenario.server.cache_idle_slots:
                self._save_idle_slots(self.host_cache)

    def _choose(self, prompt: Content) -> Slot:
        """The idle slot for a prompt, with the state that it is to begin with."""
        idle = [slot for slot in self.slots if slot.job is None]
        best, best_similarity = None, np.float32(0)
        if self._threshold:
            for slot in idle:
                if slot.content.n:
                    prefix = slot.content.common_prefix(prompt)
                    similarity = ratio(prefix, prompt.n)
                    self._log("check", slot=slot.id, sim=similarity, lcp=prefix, of=prompt.n)
                    if similarity > best_similarity and similarity > self._threshold:
                        best, best_similarity = slot, similarity
        if best is not None:
            # As the server computes it: from the share, not from the tokens.
            kept = best_similarity * np.float32(prompt.n) / np.float32(best.content.n)
            self._log("by_similarity", slot=best.id, sim=best_similarity, threshold=self._threshold, keep=kept)
            loses_much = bool(kept < _KEPT_AT_LEAST)
        else:
            best, loses_much = min(reversed(idle), key=lambda slot: slot.last_used), True
            self._log("by_lru", slot=best.id, t_last=best.last_used)
        if loses_much and self.host_cache is not None:
            self._save(best, self.host_cache)
            self._bring_back(best, prompt, self.host_cache)
            self.host_cache.enforce_limits()
        return best

    def _save(self, slot: Slot, cache: HostPromptCache) -> bool:
        """Save what an idle slot holds to the host cache; False if it holds nothing, or nothing new."""
        entry = cache.save(slot.content)
        if entry is None:
            return False
        self._copied(self._policy.copy_out(slot.id, entry.cells))
        return True

    def _bring_back(self, slot: Slot, prompt: Content, cache: HostPromptCache) -> None:
        """Put the best state for a prompt into its slot, if the host cache has one that is better than the slot's."""
        entry = cache.find(slot.content, prompt)
        if entry is None:
            return
        try:
            copies = self._policy.copy_in(slot.id, entry.cells)
        except NoSlot:
            slot.content = NOTHING
            self._log("clear", slot=slot.id, tokens=0)
            return
        self._copied(copies)
        slot.content = entry.content
        cache.remove(entry)

    def _save_idle_slots(self, cache: HostPromptCache) -> None:
        """Save what idle slots hold; with one cache for all, empty them."""
        for slot in self.slots:
            if slot.job is None:
                if self._save(slot, cache):
                    cache.enforce_limits()
                if self._unified:
                    self._clear(slot)

    def _admits(self, slot: Slot, job: Job, now: float) -> bool:
        """Whether the policy lets the request start in this slot; if it never will, the request fails.

        Only layouts that reserve room for whole sequences say no, of which llama.cpp has none: what idle slots keep
        gives way, and then the request waits for others to end.
        """
        plan = self._plan(job)
        if self._policy.admits(plan):
            return True
        self._clear(slot)
        while not self._policy.admits(plan):
            if self._clear_one():
                continue
            if all(s.job is None for s in self.slots):
                sizes = f"{plan.prompt_tokens} prompt tokens, up to {plan.max_tokens} in all"
                empty = f"an empty cache of {self._policy.capacity} cells"
                why = f"{self._policy.name} can never place the request ({sizes}) in {empty}"
                self._fail(job, now, FailureKind.CACHE, why, refusal=why)
            return False
        return True

    # The batch

    def _shift_contexts(self) -> None:
        """Discard tokens of each generating slot that is full (``--context-shift``)."""
        for slot in self.slots:
            job = slot.job
            if job is not None and job.prefilled and job.tokens >= self._context and not self._policy.unbounded:
                self._shift_context(slot, job)

    def _new_batch(self, now: float) -> list[Chunk]:
        """One token for each generating slot, then prompts in order of slots."""
        busy = [slot for slot in self.slots if slot.job is not None]
        batch = [Chunk(slot.id, slot.job.computed, 1) for slot in busy if slot.job is not None and slot.job.prefilled]
        room = self._n_batch - len(batch)
        for slot in busy:
            job = slot.job
            if room <= 0:
                break
            if job is None or job.prefilled or not (slot.begun or self._begin(slot, job, now)):
                continue
            batch.append(Chunk(slot.id, job.computed, min(job.tokens - job.computed, room)))
            room -= batch[-1].n
        return batch

    def _begin(self, slot: Slot, job: Job, now: float) -> bool:
        """Begin with a prompt in its slot; False if it is refused, or is empty."""
        n = job.request.prompt_tokens
        self._log("prompt", slot=slot.id, job=job, context=self._context, tokens=n)
        if n == 0:
            self._log("empty", slot=slot.id, job=job)
            self._log("answered", slot=slot.id, job=job)
            self._end(job, now)
            self._release(slot)
            return False
        if n >= self._context:
            sizes = f"{n} prompt tokens, {self._context} in a slot"
            reason = f"the request exceeds the available context size: {sizes}"
            self._fail(job, now, FailureKind.CONTEXT, reason, exceeded=self._context)
            self._log("error", job=job)
            self._release(slot)
            return False
        held = slot.held if self._opens_early else self._open(slot, job)
        slot.begun = True
        self._start(slot.id, job, held, now)
        return True

    def _open(self, slot: Slot, job: Job) -> int:
        """Open the job's sequence on what its slot holds of the prompt; return how many tokens that are."""
        held = self._held(slot, job)
        if not held:
            held = self._policy.match(slot.id, job.content, job.tokens)
        self._policy.open(slot.id, self._plan(job))
        if held and not self._policy.reserve(Chunk(slot.id, held, 0)):
            held = 0
        return held

    def _held(self, slot: Slot, job: Job) -> int:
        """How much of its prompt the slot holds; all that it holds behind that is freed."""
        server, held = self._scenario.server, 0
        cached = job.request.cache_prompt
        if server.cache_prompt if cached is None else cached:
            held = slot.content.common_prefix(slot.prompt)
            if server.cache_reuse and self._policy.can_shift and slot.content.n:
                held = self._reuse(slot, held)
        if held == slot.prompt.n:
            self._log("one_at_least", slot=slot.id, job=job)
            held -= 1
        held = self._policy.can_truncate(slot.id, held) if held else 0
        if slot.content.n:
            self._policy.free(slot.id, held)
        slot.content = slot.prompt.head(held)
        return held

    def _reuse(self, slot: Slot, held: int) -> int:
        """Move runs of tokens that the prompt has elsewhere to their places in it; return what is held then."""
        for source, n in reused_runs(slot.content, slot.prompt, held, self._scenario.server.cache_reuse):
            self._log("reuse", slot=slot.id, job=slot.job, tokens=n, source=source, to=held)
            self._policy.free(slot.id, held, source)
            self._policy.shift(slot.id, source, source + n, held - source)
            held += n
        return held

    def _shift_context(self, slot: Slot, job: Job) -> None:
        """Discard ``n_discard`` tokens, or half of them, behind the first ``n_keep``."""
        server, request = self._scenario.server, job.request
        keep = server.n_keep if request.n_keep is None else request.n_keep
        keep = (request.prompt_tokens if keep < 0 else keep) + self._scenario.model.add_bos_token
        keep = max(min(keep, self._context - 4), 0)
        left = job.computed - keep
        discard = (server.n_discard if request.n_discard is None else request.n_discard) or left // 2
        discard = max(min(discard, left - 1), 0)
        self._log("shift", slot=slot.id, job=job, n_keep=keep, n_left=left, n_discard=discard)
        slot.truncated = True
        if discard == 0:
            return
        self._policy.free(slot.id, keep, keep + discard)
        self._policy.shift(slot.id, keep + discard, None, -discard)
        self._backend.discard(slot.id, keep, keep + discard)
        job.content = job.content.without(keep, keep + discard)
        job.computed -= discard
        job.discarded += discard
        self._recorder.context_shifts += 1

    # After a step

    def _complete(self, step: Sequence[Chunk], now: float) -> None:
        """Count the tokens, emit one where a prompt or the last answer's token is done, end requests, slot by slot."""
        self._limit = self._n_batch
        ready = []
        for chunk in step:
            self._advance(chunk.n)
            slot = self.slots[chunk.seq]
            assert slot.job is not None, "a chunk ran for an empty slot"
            slot.job.computed += chunk.n
            if slot.job.computed == slot.job.tokens:
                ready.append(slot)
        for slot in sorted(ready, key=lambda slot: slot.id):
            if slot.job is not None:
                self._emit(slot, slot.job, now)

    def _skip(self, step: Sequence[Chunk], steps: int) -> None:
        """Count the tokens."""
        self._pending = deque(chunk._replace(start=chunk.start + steps) for chunk in step)
        for chunk in step:
            job = self.slots[chunk.seq].job
            assert job is not None, "a chunk ran for an empty slot"
            job.computed += steps
            job.generated += steps

    def _advance(self, n: int) -> None:
        """Take ``n`` tokens off the first pending chunk."""
        first = self._pending.popleft()
        if n < first.n:
            self._pending.appendleft(Chunk(first.seq, first.start + n, first.n - n))

    def _emit(self, slot: Slot, job: Job, now: float) -> None:
        """Count an output token; end the request if its slot is full, or if it has all that it asked for."""
        self._emit_token(job, now)
        shifts = self._scenario.server.context_shift and self._context > 3
        full = job.tokens >= self._context and not shifts and not self._policy.unbounded
        if full:
            slot.truncated = True
            self._log("full", slot=slot.id, job=job, tokens=job.computed)
        if full or job.generated >= job.request.output_tokens:
            job.truncated = job.generated < job.request.output_tokens
            self._log("answered", slot=slot.id, job=job)
            self._end(job, now)
            self._release(slot, keep=self._scenario.server.keep_idle_slots)

    def _release(self, slot: Slot, *, in_batch: int = 0, keep: bool = True) -> None:
        """Let a request go from its slot, which keeps what it holds; the first deferred request is next.

        ``in_batch``: tokens of it that were to be run when it failed.
        """
        job = slot.job
        assert job is not None, "an empty slot is released"
        if slot.begun:
            slot.content = job.content.head(job.computed + in_batch)
        self._log("stop", slot=slot.id, job=job, tokens=slot.content.n, truncated=slot.truncated)
        self._turn += 1
        slot.vacate(self._turn)
        if self.deferred:
            self._log("pop", job=self.deferred[0])
            self.queue.appendleft(self.deferred.popleft())
        if not keep:
            self._clear(slot)

    def _fail_all(self, reason: NoSlot, now: float) -> None:
        """Fail every request in a slot, and empty the slots."""
        in_batch = {chunk.seq: chunk.n for chunk in self._pending}
        self._pending.clear()
        self._limit = self._n_batch
        self._log("failed", n_batch=1)
        for slot in self.slots:
            if slot.job is not None:
                error = "Context size has been exceeded."
                self._log("error", job=slot.job)
                self._fail(slot.job, now, FailureKind.NO_SLOT, error, refusal=str(reason))
                self._release(slot, in_batch=in_batch.get(slot.id, 0))
                self._clear(slot)

    def _purge_one(self) -> bool:
        """Empty the first idle slot that holds something, where all slots share one cache; False if there is none."""
        return self._unified and self._clear_one(purges=True)

    def _clear_one(self, *, purges: bool = False) -> bool:
        for slot in self.slots:
            if slot.job is None and slot.content.n:
                if purges:
                    self._log("purge", slot=slot.id, tokens=slot.content.n)
                self._clear(slot)
                return True
        return False

    def _clear(self, slot: Slot) -> None:
        """Empty a slot."""
        self._log("clear", slot=slot.id, tokens=slot.content.n)
        if slot.content.n:
            self._policy.free(slot.id)
            slot.content = NOTHING
