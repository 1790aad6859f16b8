"""The server: a SimPy process that takes what has arrived, runs a step, and asks a backend how long it took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import simpy

from kvsim.simulation.arrivals import Arrivals, Inbox, Process
from kvsim.simulation.backend import Backend, SimulatedBackend
from kvsim.simulation.prefetch import Prefetcher
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers import Scheduler
from policies import Chunk, MicroBatch, NoSlot, Policy
from policies.fast_forward.lockstep import NO_READS, LockstepBatch


class Server:
    """One turn after another until nothing more can arrive and nothing is left to do."""

    def __init__(
        self,
        env: simpy.Environment,
        arrivals: Arrivals,
        scheduler: Scheduler,
        policy: Policy,
        backend: Backend,
        recorder: Recorder,
        prefetcher: Prefetcher,
        *,
        fast_forwards: bool = True,
    ):
        """``fast-forwards``: take decode steps that are alike in one event, where the backend can tell their times
        ahead."""
        self._env = env
        self._arrivals = arrivals
        self._scheduler = scheduler
        self._policy = policy
        self._backend = backend
        self._recorder = recorder
        self._prefetcher = prefetcher
        self._inbox = arrivals if isinstance(arrivals, Inbox) and not arrivals.keeps_script else None
        self._foresight = (
            backend if fast_forwards and isinstance(backend, SimulatedBackend) and prefetcher.off else None
        )
        if self._foresight is not None:
            scheduler.keep_step(None if recorder.watches else policy.lockstep_batch())

    def run(self) -> Process:
        """The server's turns."""
        env, scheduler, recorder = self._env, self._scheduler, self._recorder
        arrivals, inbox = self._arrivals, self._inbox
        busy, began = False, env.now
        while True:
            if busy and inbox is not None:
                jobs = inbox.take()
            else:
                waited = yield from arrivals.next(busy, began, self._idle)
                if waited is None:
                    return
                jobs = waited
            now = env.now
            for job in jobs:
                if not self._prefetcher.off:
                    self._prefetcher.arrived(job)
                recorder.arrived(job)
                scheduler.submit(job, now)
            if scheduler.ended:
                self._tell_who_ended()
            step = scheduler.compose(now)
            lockstep_batch = scheduler.lockstep_batch
            busy, began = bool(step) or lockstep_batch is not None, now
            if busy:
                if lockstep_batch is None:
                    steps, seconds = self._leap(step)
                elif step:
                    steps, seconds = self._mixed_step(step, lockstep_batch, now)
                else:
                    steps, seconds = self._lockstep_steps(lockstep_batch, now)
                if steps:
                    if seconds > 0:
                        yield env.timeout(seconds)
                    scheduler.ran(step, steps, env.now)
                elif lockstep_batch is None:
                    yield from self._step(step)
                if scheduler.ended:
                    self._tell_who_ended()
            if recorder.watches:
                recorder.cache(env.now, self._policy.usage())

    def _tell_who_ended(self) -> None:
        if not self._prefetcher.off:
            for job in self._scheduler.ended:
                self._prefetcher.ended(job)
        self._scheduler.ended.clear()

    def _idle(self) -> float:
        """Let the policy tidy a slice of the cache while there is nothing else to do; its seconds."""
        moves = self._policy.idle()
        if moves.n_runs == 0:
            return 0.0
        self._recorder.moved(moves)
        if self._recorder.watches:
            self._recorder.cache(self._env.now, self._policy.usage())
        seconds = self._backend.move(moves)
        self._recorder.idled(self._env.now, seconds)
        return seconds

    def _lockstep_steps(self, lockstep_batch: LockstepBatch[Any], now: float) -> tuple[int, float]:
        """Take steps of a lockstep batch alone up to the next arrival or decision; how many, and their seconds.

        As one by one: the first step to end at or after the next event is the last that nobody else had a say in.
        """
        assert self._foresight is not None
        costs, policy = self._foresight.costs, self._policy
        members, forecast = len(lockstep_batch), lockstep_batch.forecast(self._scheduler.steady(()))
        lasting = costs.lasting(members, forecast, policy.kernel, policy.groups[0])
        n, event = forecast.steps, self._env.peek()
        seconds = lasting(n)
        if now + seconds >= event:
            n = _reaching(event - now, lasting, n, seconds)
            seconds = lasting(n)
        costs.reached(members, lockstep_batch.max_scanned_per_token(n))
        self._recorder.lockstep_steps(n, forecast.total_scanned(n))
        for moves in lockstep_batch.take_steps(forecast, n):
            self._recorder.moved(moves)
        return n, seconds

    def _leap(self, step: Sequence[Chunk]) -> tuple[int, float]:
        """The same of steps that the policy foresees; none where it does not."""
        backend = self._foresight
        if backend is None:
            return 0, 0.0
        recorder, now = self._recorder, self._env.now
        most = min(self._scheduler.steady(step), recorder.blind_steps)
        planned = self._policy.plan_decode_steps(step, most) if most > 1 else None
        if planned is None:
            return 0, 0.0
        each = backend.fast_forward(planned)
        times = np.add.accumulate(np.concatenate(([now], sum(each[1:], each[0]))))
        n = min(int(np.searchsorted(times[1:], self._env.peek())) + 1, planned.steps)
        if n < 2:
            return 0, 0.0
        taken = planned.first_steps(n)
        usages = planned.take_steps(n, recorder.watches)
        recorder.fast_forward(times[:n], [seconds[:n] for seconds in each], taken, usages)
        backend.costs.went(taken)
        return n, float(times[n]) - now

    def _step(self, step: Sequence[Chunk]) -> Process:
        """Place the step, run it, let the time pass, and tell the scheduler how it went."""
        env, recorder, backend = self._env, self._recorder, self._backend
        refusal: NoSlot | None = None
        batches: Sequence[MicroBatch] = ()
        try:
            batches = self._policy.allocate(step, views=backend.wants_views)
        except NoSlot as reason:
            refusal, batches = reason, reason.done
        if refusal is None:
            # After a refusal, copies that the next try will make are still owed: they are not to go ahead with these.
            self._prefetcher.look_after(self._scheduler.waiting)
        seconds = self._prefetcher.wait_s(self._scheduler.started)
        self._scheduler.started.clear()
        if seconds:
            recorder.waited(seconds)
        for batch, took in zip(batches, backend.step(step, batches), strict=True):
            recorder.forward(env.now + seconds, took, batch)
            seconds += took
        if seconds > 0:
            if recorder.watches:
                recorder.cache(env.now, self._policy.usage())
            recorder.snapshots(env.now, self._policy)
            yield env.timeout(seconds)
        if refusal is None:
            self._scheduler.commit(step, env.now)
        else:
            self._scheduler.no_slot(refusal, env.now)

    def _mixed_step(self, step: Sequence[Chunk], lockstep_batch: LockstepBatch[Any], now: float) -> tuple[int, float]:
        """Take a step of a lockstep batch, in one pass with some chunks, or with the first of them, and its seconds;
        none where there was no room for it, and then the scheduler has been told."""
        assert self._foresight is not None
        self._scheduler.started.clear()
        try:
            summaries = lockstep_batch.place(step)
        except NoSlot as reason:
            self._scheduler.no_slot(reason, now)
            return 0, 0.0
        seconds, tokens, next_step_reads = 0.0, len(lockstep_batch), lockstep_batch.next_step_reads()
        for summary in summaries:
            seconds += self._foresight.mixed_step(tokens, next_step_reads, summary)
            self._recorder.mixed_step(summary, next_step_reads)
            tokens, next_step_reads = 0, NO_READS
        lockstep_batch.take_step()
        return 1, seconds


def _reaching(seconds: float, lasting: Callable[[int], float], steps: int, most_s: float) -> int:
    """After how many steps so much time has passed, if some steps last ``most_s``, which is enough; at least one.

    Nearly all steps of a fast-forward take as long as each other, so the next guess is where a straight line would
    have it.
    """
    if seconds <= 0:
        return 1
    low, low_s = 0, 0.0
    while steps - low > 1:
        guess = low + min(int((seconds - low_s) / (most_s - low_s) * (steps - low)) + 1, steps - low - 1)
        guess_s = lasting(guess)
        if guess_s >= seconds:
            steps, most_s = guess, guess_s
        else:
            low, low_s = guess, guess_s
    return steps
