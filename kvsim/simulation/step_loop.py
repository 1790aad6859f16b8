"""The step loop: every step of a server is taken here, one after another, until something must be decided.

Sequences that only decode are rows of the policy's placement rule (``policies/placement/``). As long as nobody else
needs a token, their steps follow each other in one compiled loop. A step with prompt chunks beside the rows is one turn
of the same. Where a policy has no rule, its ``allocate`` is asked in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from kvsim.costs.pass_price import PassPrice
from kvsim.simulation.arrivals import Arrivals
from kvsim.simulation.backend import Backend
from kvsim.simulation.prefetch import Prefetcher
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.base import Scheduler
from policies import Chunk, MicroBatch, OutOfCells, Policy
from policies.compiled import i64
from policies.placement.rule import PassReads, PlacementRule


class Stop(Enum):
    """Why the loop has stopped."""

    EVENT = "a request may have arrived"
    ENDED = "a row had its last token"
    DECISION = "the next step needs a decision"
    RELEASED = "a row has given room back"
    LIMIT = "as many steps were taken as were asked for"


class Advance(NamedTuple):
    """What became of what the scheduler had composed."""

    steps: int
    """Steps that were placed."""
    at_s: float
    """When the last of them ends, seconds."""
    refusal: OutOfCells | None = None
    """Why the policy had no room, if it had none."""


class StepLoop:
    """Places what the scheduler has composed, prices it, and goes on as long as nothing must be decided."""

    def __init__(
        self,
        arrivals: Arrivals,
        scheduler: Scheduler,
        policy: Policy,
        backend: Backend,
        recorder: Recorder,
        prefetcher: Prefetcher,
        *,
        most_steps: int,
    ):
        """``most_steps``: steps that are taken at a time; 0: every step is placed chunk by chunk."""
        self._arrivals = arrivals
        self._scheduler = scheduler
        self._policy = policy
        self._backend = backend
        self._recorder = recorder
        self._prefetcher = prefetcher
        self._most_steps = most_steps
        self._price: PassPrice | None = None
        if most_steps and backend.price is not None and prefetcher.off and not recorder.wants_chunks:
            self._price = backend.price
            if policy.has_placement_rule:
                scheduler.use_rule(policy.placement_rule())

    def advance(self, step: Sequence[Chunk], now: float) -> Advance:
        """Place the composed step, and where it has rows alone, the steps that follow."""
        scheduler = self._scheduler
        rule, copies_s = scheduler.rule, scheduler.settle_copies()
        if copies_s:
            self._recorder.copying(copies_s)
            now += copies_s
            if rule is None and not step:
                return Advance(0, now)
        if rule is None:
            return self._step_of_chunks(step, now)
        if not step and not copies_s:
            steps, at_s, _ = self.run(rule, now, scheduler.decode_only_steps(), scheduler.waits_for_room)
            if steps:
                return Advance(steps, at_s)
        return self._step_beside_rows(step, rule, now)

    def run(self, rule: PlacementRule, now: float, most: int, stops_at_release: bool) -> tuple[int, float, Stop]:
        """Take steps of the rows alone until the next event, at most ``most``; steps, when the last ends, and why."""
        price, recorder, until = self._price, self._recorder, self._arrivals.horizon_s()
        assert price is not None
        watches, states, tells_each = recorder.watches, recorder.cache_states, recorder.hears_each_pass
        clock, limit = now, min(most, self._most_steps)
        steps: i64 = 0
        passes: i64 = 0
        scores: i64 = 0
        useful_scores: i64 = 0
        stop = Stop.LIMIT
        rule.released = False
        while steps < limit:
            if tells_each or not rule.repeat_step():
                rule.settle()
                if not rule.take_step():
                    stop = Stop.DECISION
                    break
            began = clock
            for work in rule.passes:
                seconds = price.seconds(work)
                first = work.groups[0]
                if tells_each or work.prepares():
                    seconds += self._backend.before_pass(work)
                    recorder.passed(clock, seconds, work)
                elif first.longer:
                    recorder.passed(clock, seconds, work)
                else:
                    passes += 1
                    scores += first.single_scanned
                    useful_scores += first.single_useful
                clock += seconds
            steps += 1
            if watches:
                rule.look()
                states.hold_state(began, rule)
                if tells_each:
                    recorder.snapshot(began, self._policy)
            if rule.ended:
                stop = Stop.ENDED
                break
            if clock >= until:
                stop = Stop.EVENT
                break
            if stops_at_release and rule.released:
                stop = Stop.RELEASED
                break
        rule.settle()
        recorder.counts.forward_passes += passes
        recorder.counts.cache.scores += scores
        recorder.counts.cache.useful_scores += useful_scores
        return steps, clock, stop

    def _step_beside_rows(self, step: Sequence[Chunk], rule: PlacementRule, now: float) -> Advance:
        """Take one step in which rows get their tokens beside some chunks."""
        price, recorder = self._price, self._recorder
        assert price is not None
        self._scheduler.started.clear()
        try:
            passes = rule.place(step)
        except OutOfCells as reason:
            return Advance(1, self._run_batches(step, reason.done, now), reason)
        clock = now
        for work in passes:
            took = price.seconds(work)
            if work.prepares():
                took += self._backend.before_pass(work)
            recorder.passed(clock, took, work)
            clock += took
        if recorder.watches:
            recorder.cache(now, self._policy.usage())
            recorder.snapshot(now, self._policy)
        return Advance(1, clock)

    def _step_of_chunks(self, step: Sequence[Chunk], now: float) -> Advance:
        """Place one step through the policy, and let the backend run or price it."""
        recorder, scheduler = self._recorder, self._scheduler
        refusal: OutOfCells | None = None
        batches: Sequence[MicroBatch] = ()
        try:
            batches = self._policy.allocate(step, views=self._backend.wants_views)
        except OutOfCells as reason:
            refusal, batches = reason, reason.done
        if refusal is None:
            # After a refusal, copies that the next try will make are still owed: no prefetch may carry them.
            self._prefetcher.look_after(scheduler.waiting)
        waited_s = self._prefetcher.wait_s(scheduler.started)
        scheduler.started.clear()
        if waited_s:
            recorder.waited(waited_s)
        ended_s = self._run_batches(step, batches, now, waited_s)
        drafting_s = scheduler.drafting_s(step) if refusal is None else 0.0
        if drafting_s:
            recorder.drafting(drafting_s)
        return Advance(1, ended_s + drafting_s, refusal)

    def _run_batches(
        self, step: Sequence[Chunk], batches: Sequence[MicroBatch], now: float, waited_s: float = 0.0
    ) -> float:
        """Have the backend run or price what was placed of a step, after a wait; when it has ended, seconds."""
        recorder, clock = self._recorder, now + waited_s
        for batch, took in zip(batches, self._backend.step(step, batches), strict=True):
            recorder.passed(clock, took, PassReads.of(batch))
            recorder.digested(batch)
            clock += took
        if clock > now and recorder.watches:
            recorder.cache(now, self._policy.usage())
            recorder.snapshot(now, self._policy)
        return clock


def delays_until(now: float, at_s: float) -> tuple[float, ...]:
    """The delays after which a clock that adds them to ``now`` shows ``at_s``, to the last bit.

    One nearly always. Where the sum would be rounded to another number, the second begins within a factor of two of
    ``at_s``, so that it is exact.
    """
    delay = at_s - now
    if now + delay == at_s:
        return (delay,)
    first = 0.75 * at_s - now
    return first, at_s - (now + first)
