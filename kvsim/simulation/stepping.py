"""Placing composed steps and pricing them: one step, or as many decode-only steps at once as nothing decides between.

Fast-forwarding changes no result: cells and counts are those of single steps, times differ by rounding alone (1e-12).
A step is a fast-forward of one wherever more cannot be planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import simpy

from kvsim.simulation.backend import Backend, Predictor
from kvsim.simulation.prefetch import Prefetcher
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers import Scheduler
from policies import Chunk, MicroBatch, NoSlot, Policy
from policies.fast_forward.lockstep import NO_READS, Forecast, LockstepBatch
from policies.fast_forward.state_sums import StateSums

Advance = tuple[int, float, NoSlot | None]
"""How many steps were placed, the seconds they take together, and why the policy had no room, if it had none."""


class Stepper:
    """Takes what the scheduler has composed as far as it goes before the next event or decision."""

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        policy: Policy,
        backend: Backend,
        recorder: Recorder,
        prefetcher: Prefetcher,
        *,
        fast_forward: bool,
    ):
        """``fast_forward``: take many steps at once, where the backend can price them ahead of time."""
        self._env = env
        self._scheduler = scheduler
        self._policy = policy
        self._backend = backend
        self._recorder = recorder
        self._prefetcher = prefetcher
        self._predictor: Predictor | None = None
        self._plans_ahead = policy.can_fast_forward
        if fast_forward and backend.predictor is not None and prefetcher.off:
            self._predictor = backend.predictor
            follows_policy = self._plans_ahead and recorder.can_sum_up
            scheduler.allow_lockstep(policy.lockstep_batch() if follows_policy else None)

    def advance(self, step: Sequence[Chunk], now: float) -> Advance:
        """Place the composed step, or it and the decode-only steps that follow, and price them."""
        batch, copies_s = self._scheduler.lockstep_batch, self._scheduler.settle_copies()
        if copies_s:
            return self._step_after_copies(step, now, copies_s)
        if batch is None:
            return self._planned_steps(step, now) or self._single_step(step, now)
        if step:
            return self._mixed_step(step, batch, now)
        return self._lockstep_steps(batch, now)

    def _lockstep_steps(self, batch: LockstepBatch[Any], now: float) -> Advance:
        """Take steps of a lockstep batch alone, up to the first that ends at or after the next event."""
        predictor, event = self._predictor, self._env.peek()
        assert predictor is not None
        members, forecast = len(batch), batch.forecast(self._scheduler.decode_only_steps(()))
        if forecast is None:
            return self._mixed_step((), batch, now)
        seconds_of = predictor.lockstep_steps(members, forecast)
        steps = forecast.steps
        seconds = seconds_of(steps)
        if now + seconds >= event:
            steps = _first_reaching(event - now, seconds_of, steps, seconds)
            seconds = seconds_of(steps)
        recorder = self._recorder
        self._count_passes(batch, forecast, steps)
        if recorder.watches:
            sums = StateSums(predictor.lockstep_weights(members, forecast))
            copies = batch.take_steps(forecast, steps, sums)
            recorder.cache_states.hold_sums(now, sums)
        else:
            copies = batch.take_steps(forecast, steps)
        for moves in copies:
            recorder.moved(moves)
        return steps, seconds, None

    def _count_passes(self, batch: LockstepBatch[Any], forecast: Forecast, steps: int) -> None:
        """Count what members of a lockstep batch read alone in the first ``steps`` steps of a forecast."""
        predictor, sizes = self._predictor, forecast.pass_sizes(len(batch))
        assert predictor is not None
        predictor.took_lockstep_steps(max(sizes), batch.max_scanned_per_token(steps))
        self._recorder.lockstep_steps(steps * len(sizes), forecast.total_scanned(steps), forecast.total_useful(steps))

    def _mixed_step(self, step: Sequence[Chunk], batch: LockstepBatch[Any], now: float) -> Advance:
        """Take one step in which a lockstep batch gets its tokens beside some chunks."""
        predictor = self._predictor
        assert predictor is not None
        self._scheduler.started.clear()
        try:
            passes = batch.place(step)
        except NoSlot as reason:
            return 1, self._run(step, reason.done, now), reason
        seconds, by_pass = 0.0, batch.members_by_pass()
        for i, chunks in enumerate(passes):
            members, reads = by_pass[i] if i < len(by_pass) else (0, NO_READS)
            seconds += predictor.mixed_step(members, reads, chunks)
            self._recorder.mixed_step(chunks, reads)
        alone = batch.passes_alone()
        if alone is not None:
            seconds += predictor.lockstep_steps(len(batch), alone)(1)
            self._count_passes(batch, alone, 1)
        batch.take_step()
        if self._recorder.watches:
            self._recorder.cache(now, self._policy.usage())
        return 1, seconds, None

    def _planned_steps(self, step: Sequence[Chunk], now: float) -> Advance | None:
        """Take the decode-only steps that the policy can plan ahead; None if it cannot plan two."""
        predictor, recorder = self._predictor, self._recorder
        if predictor is None or not self._plans_ahead:
            return None
        most = min(self._scheduler.decode_only_steps(step), recorder.unobserved_steps)
        planned = self._policy.plan_decode_steps(step, most) if most > 1 else None
        if planned is None:
            return None
        each = predictor.steps(planned)
        times = np.add.accumulate(np.concatenate(([now], sum(each[1:], each[0]))))
        steps = min(int(np.searchsorted(times[1:], self._env.peek())) + 1, planned.steps)
        if steps < 2:
            return None
        taken = planned.first_steps(steps)
        usages = planned.take_steps(steps, recorder.watches)
        recorder.fast_forward(times[:steps], [seconds[:steps] for seconds in each], taken, usages)
        predictor.took(taken)
        return steps, float(times[steps]) - now, None

    def _step_after_copies(self, step: Sequence[Chunk], now: float, copies_s: float) -> Advance:
        """Let copies to and from the host be made first; there may be nothing to run behind them."""
        batch = self._scheduler.lockstep_batch
        self._recorder.copying(copies_s)
        if batch is not None:
            steps, seconds, refusal = self._mixed_step(step, batch, now + copies_s)
        elif step:
            steps, seconds, refusal = self._single_step(step, now + copies_s)
        else:
            return 0, copies_s, None
        return steps, seconds + copies_s, refusal

    def _single_step(self, step: Sequence[Chunk], now: float) -> Advance:
        """Place one step through the policy, and let the backend run or price it."""
        recorder, scheduler = self._recorder, self._scheduler
        refusal: NoSlot | None = None
        batches: Sequence[MicroBatch] = ()
        try:
            batches = self._policy.allocate(step, views=self._backend.wants_views)
        except NoSlot as reason:
            refusal, batches = reason, reason.done
        if refusal is None:
            # After a refusal, copies that the next try will make are still owed: no prefetch may carry them.
            self._prefetcher.look_after(scheduler.waiting)
        seconds = self._prefetcher.wait_s(scheduler.started)
        scheduler.started.clear()
        if seconds:
            recorder.waited(seconds)
        return 1, self._run(step, batches, now, seconds), refusal

    def _run(self, step: Sequence[Chunk], batches: Sequence[MicroBatch], now: float, waited_s: float = 0.0) -> float:
        """Have the backend run or price what was placed of a step; the seconds, with those that it waited before."""
        recorder, seconds = self._recorder, waited_s
        for batch, took in zip(batches, self._backend.step(step, batches), strict=True):
            recorder.forward(now + seconds, took, batch)
            seconds += took
        if seconds > 0:
            if recorder.watches:
                recorder.cache(now, self._policy.usage())
            recorder.snapshot(now, self._policy)
        return seconds


def _first_reaching(seconds: float, seconds_of: Callable[[int], float], steps: int, most_s: float) -> int:
    """The first number of steps that takes at least ``seconds``, if ``steps`` take ``most_s``, which is enough.

    Nearly all steps take equally long, so each guess is where a straight line would have it.
    """
    if seconds <= 0:
        return 1
    low, low_s = 0, 0.0
    while steps - low > 1:
        guess = low + min(int((seconds - low_s) / (most_s - low_s) * (steps - low)) + 1, steps - low - 1)
        guess_s = seconds_of(guess)
        if guess_s >= seconds:
            steps, most_s = guess, guess_s
        else:
            low, low_s = guess, guess_s
    return steps
