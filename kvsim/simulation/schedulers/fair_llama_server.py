"""llama-server with a rule for slots that parts users who share a system prompt, and prompts in order of arrival."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.simulation.job import Job
from kvsim.simulation.schedulers.host_prompt_cache import Entry
from kvsim.simulation.schedulers.llama_server import LlamaServer
from kvsim.simulation.schedulers.slots import Slot
from policies import Content
from policies.compiled import mypyc_attr


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
