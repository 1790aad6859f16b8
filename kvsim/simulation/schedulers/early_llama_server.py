"""The scheduler of llama-server as it was in early 2025: slots that are never purged, and prompts that are cut."""

from __future__ import annotations

from typing import ClassVar

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import FailureKind, Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.decision_log import DecisionLog, no_log
from kvsim.simulation.schedulers.host_prompt_cache import ratio
from kvsim.simulation.schedulers.slot_server import SlotServer
from kvsim.simulation.schedulers.slots import Slot
from policies import NOTHING, Content, NoSlot, Policy
from policies.compiled import mypyc_attr


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

    def no_slot(self, reason: NoSlot, now: float) -> None:
        """Halve ``n_batch``; at 1 fail every request in a slot."""
        self._recorder.failed_allocations += 1
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
