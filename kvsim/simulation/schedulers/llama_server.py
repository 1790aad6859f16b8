"""Three versions of llama-server's scheduler: today's, one with fairer rules, and that of early 2025."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import FailureKind, Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.context_checkpoints import ContextCheckpoints
from kvsim.simulation.schedulers.host_prompt_cache import Entry, HostCells, HostPromptCache, ratio, size_of_states
from kvsim.simulation.schedulers.slot_server import SlotServer
from kvsim.simulation.schedulers.slots import DecisionLog, Slot, no_log
from policies import NOTHING, Chunk, Content, OutOfCells, Policy
from policies.compiled import mypyc_attr

_UNLIKE = np.float32(0)
"""The similarity of texts that begin with different tokens."""
_KEPT_AT_LEAST = np.float32(0.5)
"""Share of a slot's tokens that a request must keep; otherwise they are saved first, and a better state looked for."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LlamaServer(SlotServer):
    """Today's llama-server (llama.cpp, ``tools/server/server-context.cpp``, ``server-queue.cpp``; 2026).

    *Taking tasks*: one after another until none is left. A request gets the idle slot that holds the longest beginning
    of its prompt, if that is more than ``slot_prompt_similarity`` of it; else the one that was used longest ago, of
    those never used the last. What the slot is about to lose is saved to the host cache, from which a better beginning
    may come back; and what idle slots hold is saved as well. Without an idle slot the request is deferred; each slot
    that is released puts the first deferred request before all others.

    *An update*: contexts are shifted; a batch is one token for each generating slot, then prompts in order of slots, up
    to ``n_batch``, each of which ends where a checkpoint is due. It is run in pieces. Where a piece finds no room in a
    cache that all share, an idle slot is purged; with none left ``n_batch`` is halved; at 1 every request in a slot
    fails.
    """

    def __init__(
        self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder, log: DecisionLog = no_log
    ):
        super().__init__(scenario, policy, backend, recorder, log)
        kept = scenario.server.cache_ram and policy.can_export
        host = HostCells()
        self.host_cache = HostPromptCache(scenario, policy, log, host) if kept else None
        recorder.host_prompts = self.host_cache
        self.checkpoints: ContextCheckpoints | None = None
        """None where every beginning of what a slot holds can be gone on from."""
        if policy.saves_checkpoints:
            sizes = size_of_states(scenario, policy)
            copy = partial(self._copied, whole=False)
            self.checkpoints = ContextCheckpoints(scenario, policy, recorder, sizes, log, host, copy)
        self._unified = scenario.unified

    def on_out_of_cells(self, reason: OutOfCells, now: float) -> None:
        """Purge an idle slot; with none left halve ``n_batch``; at 1 fail every request in a slot, and empty these."""
        self._recorder.out_of_cells()
        done = [chunk for batch in reason.done for chunk in batch.chunks]
        if not done and self._limit > 1 and self._purge_one():
            self._log("no_room", n_batch=self._limit)
            return
        self._leave_all_rows()
        tried = min(self._limit, sum([chunk.n for chunk in self._pending]))
        if done:
            self._complete(done, now)
        if self._limit == 1:
            self._fail_all(reason, now, "Context size has been exceeded.", empties=True)
            return
        if not done or not self._purge_one():
            self._halve(tried, sum([chunk.n for chunk in done]))
        self._log("no_room", n_batch=self._limit)

    # Taking tasks

    def _choose(self, prompt: Content, oldest: Slot) -> Slot:
        """The idle slot for a prompt, with the state that it is to begin with."""
        chosen, loses_much = self._pick(prompt, oldest)
        if loses_much and self.host_cache is not None:
            self._save(chosen, self.host_cache)
            self._bring_back(chosen, prompt, self.host_cache)
            self.host_cache.enforce_limits()
        return chosen

    def _pick(self, prompt: Content, oldest: Slot) -> tuple[Slot, bool]:
        """The idle slot for a prompt, and whether much is lost of what it holds: by similarity, else by age."""
        best, best_similarity = None, _UNLIKE
        # A prompt that no other repeats is like none, which need not be found out where no log wants to know.
        if self._threshold and not (prompt.private and self._log is no_log):
            for slot in self.slots.idle:
                if slot.content.n:
                    prefix = slot.content.common_prefix(prompt)
                    similarity = ratio(prefix, prompt.n)
                    self._log("check", slot=slot.id, sim=similarity, lcp=prefix, of=prompt.n)
                    if similarity > best_similarity and similarity > self._threshold:
                        best, best_similarity = slot, similarity
        if best is None:
            self._log("by_lru", slot=oldest.id, t_last=oldest.last_used)
            return oldest, True
        # As the server computes it: from the share, not from the tokens.
        kept = best_similarity * np.float32(prompt.n) / np.float32(best.content.n)
        self._log("by_similarity", slot=best.id, sim=best_similarity, threshold=self._threshold, keep=kept)
        return best, bool(kept < _KEPT_AT_LEAST)

    def _save(self, slot: Slot, cache: HostPromptCache) -> bool:
        """Save what an idle slot holds to the host cache; False if it holds nothing, or nothing new."""
        entry = cache.save(slot.content, slot.checkpoints)
        if entry is None:
            return False
        entry.exported = exported = self._policy.export(slot.id, entry.cells)
        assert exported is not None, "host cells were named"
        self._copied(exported.copies)
        return True

    def _bring_back(self, slot: Slot, prompt: Content, cache: HostPromptCache) -> None:
        """Put the best state for a prompt into its slot, if the host cache has one that is better than the slot's."""
        entry = cache.find(slot.content, prompt)
        if entry is None or entry.exported is None:
            return
        try:
            copies = self._policy.import_(slot.id, entry.exported)
        except OutOfCells:
            self._log("clear", slot=slot.id, tokens=slot.content.n)
            slot.content, slot.kept = NOTHING, False
            slot.checkpoints.clear()
            return
        self._copied(copies)
        slot.content, slot.kept = entry.content, True
        slot.checkpoints = [*entry.checkpoints]
        if self._leaves(entry, prompt):
            cache.remove(entry)

    def _leaves(self, entry: Entry, prompt: Content) -> bool:
        """Whether a state that was brought back for a prompt leaves the host cache: always."""
        return True

    def _save_idle_slots(self, cache: HostPromptCache) -> None:
        """Save what idle slots hold; with one cache for all, empty them."""
        for slot in self.slots.idle:
            if self._save(slot, cache):
                cache.enforce_limits()
            if self._unified:
                self._clear(slot)

    # Versions of the loop's parts

    def _usable(self, slot: Slot, job: Job, held: int) -> int:
        if self.checkpoints is None:
            return super()._usable(slot, job, held)
        held = self.checkpoints.usable(slot, job, held)
        return self._without_last(slot, job, held)

    def _piece(self, slot: Slot, job: Job, room: int) -> int:
        if self.checkpoints is None:
            return super()._piece(slot, job, room)
        return self.checkpoints.piece(slot, job, room)

    def _launched(self) -> None:
        """Save what idle slots hold (``--cache-idle-slots``)."""
        if self.host_cache is not None and self._scenario.server.cache_idle_slots:
            self._save_idle_slots(self.host_cache)

    def _call_deferred(self, now: float) -> None:
        self.queue.appendleft(self.deferred.popleft())

    def _shift_keeps(self, job: Job) -> int:
        return max(min(self._n_keep(job) + self._scenario.model.add_bos_token, self._context - 4), 0)

    def _shift_discards(self, discard: int, left: int) -> int:
        return max(min(discard, left - 1), 0)

    def _ends_as_full(self, job: Job) -> bool:
        shifts = self._scenario.server.context_shift and self._context > 3
        return job.tokens >= self._context and not shifts and not self._policy.unbounded

    def _complete(self, step: Sequence[Chunk], now: float) -> None:
        self._limit = self._n_batch
        super()._complete(step, now)

    def _purge_one(self) -> bool:
        """Empty the first idle slot that holds something, where all slots share one cache; False if there is none."""
        slot = next((slot for slot in self.slots.all if slot.job is None and slot.kept), None)
        if slot is None or not self._unified:
            return False
        self._log("purge", slot=slot.id, tokens=slot.content.n)
        self._clear(slot)
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
class FairLlamaServer(LlamaServer):
    """Today's llama-server with four rules of our own; the rest is the server's.

    *Which slot*: the one where what the prompt finds most exceeds what it would throw away, if that is more than what
    it would find in the slot used longest ago or in the host cache; else the slot used longest ago. So a user comes
    back to the own slot, and those who share no more than a system prompt spread over all slots.

    *What is brought back* from the host cache stays there as well if the prompt keeps less than half of it: it is the
    history of another user.

    *Prompts of a batch* are computed in order of arrival, not of slot numbers, and *deferred requests* get slots in
    order of arrival, not the last first.
    """

    def _pick(self, prompt: Content, oldest: Slot) -> tuple[Slot, bool]:
        """The idle slot for a prompt, and whether much is lost of what it holds: by what is gained, else by age."""
        best, most = None, self._found(oldest, prompt)
        for slot in self.slots.idle:
            prefix = slot.content.common_prefix(prompt)
            gain = prefix - (slot.content.n - prefix)
            if gain > most:
                best, most = slot, gain
        if best is None:
            self._log("by_lru", slot=oldest.id, t_last=oldest.last_used)
            return oldest, True
        self._log("by_gain", slot=best.id, gain=most)
        return best, False

    def _found(self, slot: Slot, prompt: Content) -> int:
        """Tokens of a prompt that it would find in a slot, with what the host cache would bring there."""
        entry = None if self.host_cache is None else self.host_cache.find(slot.content, prompt)
        return (slot.content if entry is None else entry.content).common_prefix(prompt)

    def _leaves(self, entry: Entry, prompt: Content) -> bool:
        """Whether a state that was brought back for a prompt leaves the host cache: if the prompt keeps half of it."""
        return 2 * entry.content.common_prefix(prompt) >= entry.content.n

    def _prompts_in_order(self, busy: Sequence[Slot]) -> Sequence[Slot]:
        """Slots in the order in which their requests came."""
        return sorted(busy, key=lambda slot: _arrival(slot.job))

    def _call_deferred(self, now: float) -> None:
        """Queue the request deferred first, behind those that came before it."""
        job = self.deferred.popleft()
        later = [at for at, other in enumerate(self.queue) if _arrival(other) > _arrival(job)]
        self.queue.insert(later[0] if later else len(self.queue), job)


def _arrival(job: Job | None) -> tuple[float, int]:
    """When a request came, and its number, which says which of several came first."""
    assert job is not None, "an idle slot has no prompt"
    return job.arrival_s, job.request.id


@mypyc_attr(allow_interpreted_subclasses=True)
class EarlyLlamaServer(SlotServer):
    """llama-server of build b4875 (``examples/server/server.cpp``), of March 2025.

    *Taking tasks*: a request gets the idle slot of whose tokens it repeats the longest run, wherever that is in its
    prompt, if it is more than ``slot_prompt_similarity`` of what the slot holds (``common_lcs``); else the one that was
    released longest ago, of those never used the first. It continues behind the common prefix alone. A slot that is
    released puts the first deferred request at the end of the queue, behind those that came during the step.

    *An update*: a prompt that no slot can hold is cut, and a full slot drops tokens; without context shift both are
    errors. Where a piece of the batch finds no room, ``n_batch`` is halved until the end of the batch; idle slots keep
    their cells. What earlier micro-batches of the piece took is not given back, and all of the piece is placed again.
    Where a single token finds no room, every request in a slot fails, and the slots keep what they hold.
    """

    _last_first: ClassVar[bool] = False

    def __init__(
        self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder, log: DecisionLog = no_log
    ):
        super().__init__(scenario, policy, backend, recorder, log)
        # A model whose positions cannot be shifted switches it off (common/common.cpp).
        self._shifts = scenario.server.context_shift and (policy.can_shift or policy.unbounded)
        self._called, self._called_s = 0, 0.0
        """Requests that slots called when they were last released, and when that was."""

    def submit(self, job: Job, now: float) -> None:
        """Queue a request, before those that were called since it came."""
        earlier = self._called if job.arrival_s < self._called_s else 0
        self.queue.insert(max(len(self.queue) - earlier, 0), job)

    def on_out_of_cells(self, reason: OutOfCells, now: float) -> None:
        """Halve ``n_batch``; at 1 fail every request in a slot."""
        self._recorder.out_of_cells()
        if self._limit == 1:
            error = "Input prompt is too big compared to KV size. Please try increasing KV size."
            self._fail_all(reason, now, error, empties=not self._scenario.server.keep_idle_slots)
            return
        self._leave_all_rows()
        self._halve(min(self._limit, sum([chunk.n for chunk in self._pending])))
        self._log("no_room", n_batch=self._limit)

    def _choose(self, prompt: Content, oldest: Slot) -> Slot:
        best, longest = None, 0
        # A prompt that no other repeats has no run in common with any.
        for slot in self.slots.idle if self._threshold and not prompt.private else ():
            run = slot.content.longest_common_run(prompt)
            if run > longest and ratio(run, slot.content.n) > self._threshold:
                best, longest = slot, run
        if best is not None:
            self._log("by_similarity", slot=best.id, lcs=longest, of=best.content.n)
            return best
        self._log("by_lru", slot=oldest.id, t_last=oldest.last_used)
        return oldest

    def _call_deferred(self, now: float) -> None:
        if now != self._called_s:
            self._called, self._called_s = 0, now
        self.queue.append(self.deferred.popleft())
        self._called += 1

    # Prompts that are too long

    def _begin(self, slot: Slot, job: Job, now: float) -> bool:
        begun = super()._begin(slot, job, now)
        if begun and job.discarded:
            self._backend.discard(slot.id, *self._cut(job))
        return begun

    def _shorten(self, slot: Slot, job: Job) -> bool:
        if not self._shifts:
            return False
        if not job.discarded:
            start, stop = self._cut(job)
            job.content, slot.prompt = job.content.without(start, stop), slot.prompt.without(start, stop)
            job.discarded = stop - start
            self._log("shortened", slot=slot.id, job=job, tokens=job.tokens)
        slot.truncated = True
        return True

    def _cut(self, job: Job) -> tuple[int, int]:
        """The tokens of a prompt that are left out: halves of what is behind the first ``n_keep``, until it fits."""
        keep = self._first_kept(job)
        half = (self._context - keep) // 2
        return keep, keep + (job.request.prompt_tokens - keep - half) // half * half

    def _first_kept(self, job: Job) -> int:
        """First tokens that are kept where a prompt is cut; a context shift keeps the model's own one as well."""
        return max(min(self._n_keep(job), self._context - 4), 0)

    # Full slots

    def _make_room(self, slot: Slot, job: Job, now: float) -> None:
        """Shift the context; without that the request fails."""
        if self._shifts:
            super()._make_room(slot, job, now)
            return
        self._log("error", job=job)
        self._fail(job, now, FailureKind.FULL, "context shift is disabled", exceeded=self._context)
        self._release(slot, now, keep=self._scenario.server.keep_idle_slots)

    def _shift_keeps(self, job: Job) -> int:
        return self._first_kept(job) + self._scenario.model.add_bos_token

    def _shift_discards(self, discard: int, left: int) -> int:
        # The original would discard more than there is, and go on at positions that are taken.
        return max(min(discard, left), 0)

    def _ends_as_full(self, job: Job) -> bool:
        # Context shifts come a token earlier; they leave a slot full only where it has next to no room.
        return job.tokens > self._context and not self._policy.unbounded

    def _release(self, slot: Slot, now: float, *, in_batch: int = 0, keep: bool = True) -> None:
        lists = not slot.begun or slot.job is None or self._caches(slot.job)
        super()._release(slot, now, in_batch=in_batch, keep=keep)
        if not lists:
            # Its cells stay, but no request will be told of them.
            slot.content, slot.uncomputed = NOTHING, 0
