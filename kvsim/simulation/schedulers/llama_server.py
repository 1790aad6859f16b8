"""llama-server's scheduler: slots that keep what they held, a host cache behind them, and a batch that is halved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.decision_log import DecisionLog, no_log
from kvsim.simulation.schedulers.host_prompt_cache import Entry, HostPromptCache, ratio
from kvsim.simulation.schedulers.slot_server import SlotServer
from kvsim.simulation.schedulers.slots import Slot
from policies import NOTHING, Chunk, Content, NoSlot, Policy
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
    to ``n_batch``. It is run in pieces. Where a piece finds no room in a cache that all share, an idle slot is purged;
    with none left ``n_batch`` is halved; at 1 every request in a slot fails.
    """

    def __init__(
        self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder, log: DecisionLog = no_log
    ):
        super().__init__(scenario, policy, backend, recorder, log)
        kept = scenario.server.cache_ram and policy.can_copy_out
        self.host_cache = HostPromptCache(scenario, policy, log) if kept else None
        recorder.host_prompts = self.host_cache
        self._unified = scenario.unified

    def no_slot(self, reason: NoSlot, now: float) -> None:
        """Purge an idle slot; with none left halve ``n_batch``; at 1 fail every request in a slot, and empty these."""
        self._recorder.failed_allocations += 1
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
            self._log("clear", slot=slot.id, tokens=slot.content.n)
            slot.content, slot.kept = NOTHING, False
            return
        self._copied(copies)
        slot.content, slot.kept = entry.content, True
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
