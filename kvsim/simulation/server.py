"""The server: a SimPy process that takes in requests, composes a step, has it placed and priced, and commits it."""

from __future__ import annotations

import simpy

from kvsim.simulation.arrivals import Arrivals, Process
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import Job
from kvsim.simulation.prefetch import Prefetcher
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers import Scheduler
from kvsim.simulation.schedulers.base import ENDLESS, no_progress
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
        self.scheduler = scheduler
        self._policy = policy
        self._backend = backend
        self._recorder = recorder
        self._prefetcher = prefetcher
        self._runs_ahead = backend.price is not None and prefetcher.off
        """Whether nothing looks at SimPy's clock while a step runs."""
        self._loop = StepLoop(arrivals, scheduler, policy, backend, recorder, prefetcher, most_steps=most_steps)

    def run(self) -> Process:
        """The process: take in, compose, place and price, let the time pass, commit.

        As long as nothing else can happen before a step has ended, SimPy's clock stays behind: ``now`` is the server's.
        """
        env, scheduler, recorder = self._env, self.scheduler, self._recorder
        busy, began, now = False, env.now, env.now
        while True:
            if not (busy and self._runs_ahead and now < self._arrivals.horizon_s()):
                if now > env.now:
                    yield from self._catch_up(now)
                jobs = self._arrivals.ready() if busy else None
                if jobs is None:
                    jobs = yield from self._arrivals.next(busy, began, self._compact_while_idle)
                    if jobs is None:
                        if waiting := list(scheduler.waiting):
                            raise no_progress(env.now, waiting, self._policy, "the scheduler composes no step")
                        return
                    now = env.now
                for job in jobs:
                    self._accept(job, now)

            step = scheduler.compose(now)
            if scheduler.ended:  # Refused, or answered without a step: before their clients come again.
                if now > env.now and self._is_awaited():
                    yield from self._catch_up(now)
                self._drop_ended()
            busy, began = bool(step) or scheduler.rule is not None or scheduler.has_copies, now
            if busy:
                steps, now, refusal = self._loop.advance(step, now)
                if now > env.now and not self._runs_ahead:
                    yield from self._catch_up(now)
                if refusal is None:
                    scheduler.commit(step, steps, now)
                else:
                    scheduler.on_out_of_cells(refusal, now)
                if scheduler.ended:
                    if now > env.now and self._is_awaited():
                        yield from self._catch_up(now)
                    self._drop_ended()
            # Behind a step of rows no time passes before the next look, unless it waits for copies.
            copies = recorder.host_prompts is not None or recorder.counts.host.chunks.servers > 0
            copies = copies or self._policy.saves_checkpoints
            looks_soon = busy and scheduler.rule is not None and not copies
            if recorder.watches and not looks_soon:
                recorder.cache(now, self._policy.usage())

    def steps_to_next_end(self) -> int:
        """At least so many steps pass, beside the one that has been taken, before any request ends; 0: unknown."""
        return self.scheduler.steps_to_next_end()

    @property
    def queued_tokens(self) -> int:
        """Tokens of the requests that wait for a slot."""
        return sum([job.tokens for job in self.scheduler.waiting])

    def _catch_up(self, now: float) -> Process:
        """Let SimPy's clock pass to the server's, and all happen that happens until then."""
        for delay in delays_until(self._env.now, now):
            yield self._env.timeout(delay)

    def _is_awaited(self) -> bool:
        """Whether a client waits for the end of one of the requests that have ended."""
        return any(job.done is not None for job in self.scheduler.ended)

    def _accept(self, job: Job, now: float) -> None:
        """Hand a request that has arrived to everything that must know of it."""
        if not self._prefetcher.off:
            self._prefetcher.arrived(job)
        self._recorder.arrived(job)
        self.scheduler.submit(job, now)

    def _drop_ended(self) -> None:
        """Forget the requests that have ended, once their clients and the prefetcher know of them."""
        ended = self.scheduler.ended
        for job in ended:
            if not self._prefetcher.off:
                self._prefetcher.ended(job)
            if job.done is not None:
                job.done.succeed()
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
