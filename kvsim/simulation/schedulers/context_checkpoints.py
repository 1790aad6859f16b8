"""llama-server's context checkpoints: what of a slot cannot be rolled back, saved while its prompt is computed.

Source: llama.cpp of 2026, ``tools/server/server-context.cpp`` (``create_checkpoint``, ``update_slots``; pull requests
15293, 20288 and 24110).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.host_prompt_cache import MIB, HostCells, StateSize
from kvsim.simulation.schedulers.slots import DecisionLog, Slot
from policies import Checkpoint, HostCopy, Policy

_BEFORE_THE_END = 4
"""Tokens before the end of a prompt, and that many more than a micro-batch, where its batch is ended for one."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ContextCheckpoint:
    """A checkpoint of a slot."""

    tokens: int
    """Tokens of the prompt that had been computed."""
    request: int
    """The request that it was made for."""
    saved: Checkpoint
    bytes: int
    """Bytes of host memory that it takes."""


class ContextCheckpoints:
    """Makes checkpoints of slots, gives them up, and finds the one that a prompt can go on from."""

    def __init__(
        self,
        scenario: Scenario,
        policy: Policy,
        recorder: Recorder,
        size: StateSize,
        log: DecisionLog,
        host: HostCells,
        copy: Callable[[Sequence[HostCopy]], None],
    ):
        """``copy``: has the backend carry out copies between cells and ``host``."""
        self._host, self._copy = host, copy
        self._policy, self._recorder, self._log, self.size = policy, recorder, log, size
        self._most = scenario.server.ctx_checkpoints
        self._step = scenario.server.checkpoint_min_step
        self._n_batch, self._n_ubatch = scenario.n_batch, scenario.n_ubatch
        windows = [group.window for group in policy.groups if group.window is not None]
        self._window, self._longest = min(windows, default=0), max(windows, default=0)

    # Finding one

    def usable(self, slot: Slot, job: Job, held: int) -> int:
        """With how many of the first ``held`` tokens of its prompt, which a slot holds, it can go on.

        A checkpoint is restored if need be, and those that lie behind it are given up.
        """
        found, after = held, held
        # The window of the next token must lie behind this, or a state must.
        limit = max(0, held - self._window - (held == slot.prompt.n))
        if 0 < held <= slot.content.n and self._policy.ends(slot.id)[0] >= limit:
            checkpoint = self._nearest(slot, held, limit)
            if checkpoint is None:
                self._log("no_checkpoint", slot=slot.id, job=slot.job)
                found = after = 0
            else:
                saved = checkpoint.saved
                self._copy(self._policy.restore_checkpoint(slot.id, saved))
                after = min(held, max(saved.first + 1, saved.last))
                found = min(after, checkpoint.tokens)
                self._note("restored_checkpoint", slot, checkpoint, n_past=found)
            message = max((at for at in job.request.user_starts if at <= held), default=0)
            self._recorder.counts.checkpoints.sought(held, found, message)
        for checkpoint in [*slot.checkpoints]:
            if checkpoint.saved.last > after:
                slot.checkpoints.remove(checkpoint)
                self._note("invalid_checkpoint", slot, checkpoint, n_swa=self._window, pos_next=after)
        return found

    def _nearest(self, slot: Slot, held: int, limit: int) -> ContextCheckpoint | None:
        """The newest checkpoint that lies within what is held and has what the next token sees."""
        for checkpoint in reversed(slot.checkpoints):
            first, last = checkpoint.saved.first, checkpoint.saved.last
            self._log("look_at_checkpoint", slot=slot.id, job=slot.job, pos_min=first, pos_max=last, thold=limit)
            if last <= held and (first < limit or first == 0):
                return checkpoint
        return None

    # Making one

    def piece(self, slot: Slot, job: Job, room: int) -> int:
        """How many tokens of its prompt a slot puts into a batch that has room for so many; makes a checkpoint before.

        It ends at the last user message, at one that lies far enough behind the last checkpoint, and near the prompt's
        end, so that the next piece can begin with a checkpoint.
        """
        begin, end = job.computed, job.tokens
        if not self._most:
            return min(end - begin, room)
        users = job.request.user_starts
        last_user = users[-1] if users else -1
        stop = min(end, begin + room)
        for back in (_BEFORE_THE_END + self._n_ubatch, _BEFORE_THE_END):
            if begin < end - min(self._n_batch, back) < stop:
                stop = end - min(self._n_batch, back)
        newest = slot.checkpoints[-1].tokens + self._step if slot.checkpoints else -1
        stop = min([stop, *(at for at in users if at > begin and (at == last_user or at > newest))])
        near_end = end < stop + self._n_ubatch
        is_wanted = near_end or begin == last_user or (begin in users and begin > newest)
        if is_wanted and self._policy.ends(slot.id)[0] >= 0:
            self._make(slot, job, begin)
        return stop - begin

    def _make(self, slot: Slot, job: Job, tokens: int) -> None:
        """Save a slot that has computed so many tokens, and make room for that first."""
        kept = slot.checkpoints
        if len(kept) + 1 >= self._most:
            self._thin_out(slot, job)
        while len(kept) >= self._most:
            self._note("old_checkpoint", slot, kept.pop(0))
        for checkpoint in [*kept]:
            if checkpoint.tokens == tokens:
                kept.remove(checkpoint)
                self._log("same_checkpoint", slot=slot.id, job=job, tokens=tokens)
        host = self._host.take(min(self._longest, tokens))
        saved = self._policy.save_checkpoint(slot.id, host)
        self._copy(saved.copies)
        made = ContextCheckpoint(tokens, job.request.id, saved, self.size.of_checkpoint(saved.window_tokens))
        # Slots and entries of the host cache share it: its cells are free when the last of them has given it up.
        weakref.finalize(made, self._host.give_back, host)
        kept.append(made)
        self._recorder.counts.checkpoints.made += 1
        self._note("checkpoint", slot, made, number=len(kept), most=self._most)

    def _thin_out(self, slot: Slot, job: Job) -> None:
        """Give up checkpoints of earlier requests that lie too close to the one before, until one more is too few."""
        kept, before = slot.checkpoints, -1
        for checkpoint in [*kept]:
            if len(kept) + 1 < self._most:
                break
            if checkpoint.request != job.request.id and before >= 0 and checkpoint.tokens <= before + self._step:
                kept.remove(checkpoint)
                self._note("close_checkpoint", slot, checkpoint)
            else:
                before = checkpoint.tokens

    def _note(self, kind: str, slot: Slot, checkpoint: ContextCheckpoint, **fields: int) -> None:
        """Log a decision on a checkpoint, as the server words it."""
        saved, mib = checkpoint.saved, checkpoint.bytes / MIB
        where = {"pos_min": saved.first, "pos_max": saved.last, "tokens": checkpoint.tokens}
        self._log(kind, slot=slot.id, job=slot.job, **fields, **where, mib=mib)
