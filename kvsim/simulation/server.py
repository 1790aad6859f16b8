"""The server: a SimPy process that takes in requests, composes a step, has it placed and priced, and commits it."""

from __future__ import annotations

import simpy

from kvsim.simulation.arrivals import Arrivals, Process
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import Job
from kvsim.simulation.prefetch import Prefetcher
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers import Scheduler
from kvsim.simulation.schedulers.base import ENDLESS
from kvsim.simulation.step_loop import StepLoop, delays_until
from policies import Policy


class Server:
    """One turn after another, until nothing more can arrive and nothing is left to do."""

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
        most_steps: int = ENDLESS,
    ):
        """``most_steps``: steps that are taken before the server looks again; 0: each step is placed chunk by chunk."""
        self._env = env
        self._arrivals = arrivals
        self._scheduler = scheduler
        self._policy = policy
        self._backend = backend
        self._recorder = recorder
        self._prefetcher = prefetcher
        self._loop = StepLoop(arrivals, scheduler, policy, backend, recorder, prefetcher, most_steps=most_steps)

    def run(self) -> Process:
        """The process: take in, compose, place and price, let the time pass, commit."""
        env, scheduler, recorder = self._env, self._scheduler, self._recorder
        busy, began = False, env.now
        while True:
            jobs = self._arrivals.ready() if busy else None
            if jobs is None:
                jobs = yield from self._arrivals.next(busy, began, self._compact_while_idle)
                if jobs is None:
                    return
            now = env.now
            for job in jobs:
                self._accept(job, now)

            step = scheduler.compose(now)
            if scheduler.ended:  # Refused, or answered without a step: before their clients come again.
                self._drop_ended()
            busy, began = bool(step) or scheduler.rule is not None or scheduler.has_copies, now
            if busy:
                steps, at_s, refusal = self._loop.advance(step, now)
                if at_s > now:
                    for delay in delays_until(now, at_s):
                        yield env.timeout(delay)
                    now = env.now
                if refusal is None:
                    scheduler.commit(step, steps, now)
                else:
                    scheduler.no_slot(refusal, now)
                if scheduler.ended:
                    self._drop_ended()
            # Behind a step of rows no time passes before the next look, unless sequences are copied.
            looks_soon = busy and scheduler.rule is not None and recorder.host_prompts is None
            if recorder.watches and not looks_soon:
                recorder.cache(now, self._policy.usage())

    def _accept(self, job: Job, now: float) -> None:
        """Hand a request that has arrived to everything that must know of it."""
        if not self._prefetcher.off:
            self._prefetcher.arrived(job)
        self._recorder.arrived(job)
        self._scheduler.submit(job, now)

    def _drop_ended(self) -> None:
        """Forget the requests that have ended, once the prefetcher knows of them."""
        ended = self._scheduler.ended
        if not self._prefetcher.off:
            for job in ended:
                self._prefetcher.ended(job)
        ended.clear()

    def _compact_while_idle(self) -> float:
        """Let the policy compact a slice of the cache while there is nothing else to do; return its seconds."""
        moves = self._policy.idle()
        if moves.n_runs == 0:
            return 0.0
        self._recorder.moved(moves)
        if self._recorder.watches:
            self._recorder.cache(self._env.now, self._policy.usage())
        seconds = self._backend.move(moves)
        self._recorder.idled(self._env.now, seconds)
        return seconds
